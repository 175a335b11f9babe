"""Runs small enough for tests, by plans too: chats of bytes, a Llama of two layers, what two runs must share."""

import json
import os
import shutil
import signal
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tests.support.offline_packs import write_chats
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from varlen.cost.hardware import Hardware, RateCurve, RateTable, save_hardware
from varlen.documents.source import open_source
from varlen.offline.index import index_source
from varlen.signals import Stopped
from varlen.train import step as step_module
from varlen.train import trainer as trainer_module
from varlen.train.callbacks import Callback
from varlen.train.configuration import as_settings
from varlen.train.settings import TrainSettings
from varlen.train.trainer import train

STEPS = 6
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_dropout": 0.1,
}


def write_store(folder: Path) -> Path:
    """Write a token store of chats, of which only the answers are supervised."""
    write_chats(folder / "chats.jsonl", 96)
    index_source(open_source(str(folder / "chats.jsonl")), folder / "store")
    return folder / "store"


def table(store: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as TOML would hold it; a change is named table__key."""
    made: dict[str, Any] = {
        "data": {
            "source": str(store),
            "capacity": 128,
            "global_batch_size": 6,
            "micro_batch_size": 2,
            "worker": "thread",
        },
        "model": {"type": "llama", "settings": LLAMA},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2, "schedule": "linear"},
        "run": {"output": str(output), "steps": STEPS, "checkpoint_every": 2, "keep": 9, "threads": 1},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        made.setdefault(section, {})[key] = value
    return made


def settings(store: Path, output: Path, **changes: Any) -> TrainSettings:
    return as_settings(TrainSettings, table(store, output, **changes), "")


def from_model(store: Path, folder: Path, output: Path, **changes: Any) -> TrainSettings:
    """As `settings`, of a saved model."""
    made = {**table(store, output, **changes), "model": {"path": str(folder)}}
    return as_settings(TrainSettings, made, "")


class Notes(Callback):
    """Keeps what a run reports."""

    may_stop = False

    def __init__(self) -> None:
        self.overviews: list[Any] = []
        self.steps: list[Any] = []
        self.evaluations: list[Any] = []
        self.said: list[str] = []

    def on_begin(self, overview: Any) -> None:
        self.overviews.append(overview)

    def on_step(self, metrics: Any) -> None:
        self.steps.append(metrics)

    def on_evaluate(self, evaluation: Any) -> None:
        self.evaluations.append(evaluation)

    def on_note(self, sentence: str) -> None:
        self.said.append(sentence)


TIMINGS = ("tokens_per_s", "data_wait_s", "step_s", "plan_wait_s")
"""Metrics that differ between two runs of the same steps; all others are equal."""


def metrics_of(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines]


def weights_of(output: Path) -> Mapping[str, Any]:
    return load_file(output / "model" / "model.safetensors")


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of a checkpoint's tensors, by file and name; the files' own differ in the order of their notes."""
    return {
        f"{path.name} {name}": value.numpy().tobytes()
        for path in checkpoint.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def steps_of(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def same_end(one: Path, other: Path) -> None:
    """Require that two runs ended alike, to the last bit."""
    name = steps_of(one)[-1]
    assert steps_of(other)[-1] == name
    assert tensors_of(one / "checkpoints" / name) == tensors_of(other / "checkpoints" / name)
    model = "model/model.safetensors"
    assert (one / model).read_bytes() == (other / model).read_bytes()
    assert metrics_of(one) == metrics_of(other)
    loaders = [
        # Plans are also those of steps that happened to be read ahead.
        json.loads((run / "checkpoints" / name / "checkpoint.json").read_text())["loader"] | {"plans": None}
        for run in (one, other)
    ]
    assert loaders[0] == loaders[1]


def rewound(output: Path, step: int, copy: Path) -> Path:
    """Copy a run as it was when it had saved a step."""
    shutil.copytree(output, copy)
    shutil.rmtree(copy / "model", ignore_errors=True)
    for name in steps_of(copy):
        if name > f"step-{step:08d}":
            shutil.rmtree(copy / "checkpoints" / name)
    return copy


signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked where the demo began the fork server
CONTEXT = get_context("forkserver")
# Every process is forked from one that has imported all this, and starts at once.
CONTEXT.set_forkserver_preload(
    ["varlen.train.trainer", "varlen.train.demo.worker", "transformers.models.llama.modeling_llama"]
)


def start_training(made: dict[str, Any], kill_at: int | None = None) -> Any:
    """Train in a process of its own, which kills itself when the disk is asked for the nth time, if so wished."""
    process = CONTEXT.Process(target=_train, args=(made, kill_at))
    process.start()
    return process


def start_program(code: str, out: Path, errors: Path) -> Any:
    """Run a program in a session of its own; what it prints goes to files."""
    process = CONTEXT.Process(target=_run_program, args=(code, out, errors))
    process.start()
    return process


def start_verb(*words: Any, errors: Path) -> Any:
    """Run a verb of the command line."""
    given = ["varlen", *map(str, words)]
    return start_program(
        f"import sys; sys.argv = {given}\nfrom varlen.cli import main\nmain()", errors, errors
    )


def _run_program(code: str, out: Path, errors: Path) -> None:
    os.setsid()
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    exec(code, {"__name__": "__main__"})


def start_ranks(
    runs: list[dict[str, Any]],
    ranks: int,
    folder: Path,
    waits_at: int | None = None,
    prepare: Callable[[], None] | None = None,
) -> list[Any]:
    """Train one run after the other in several processes, as torchrun would start them.

    What ends a rank by an error stands in `folder` then. A rank waits for its end where step `waits_at` begins.
    `prepare` is called in each process before.
    """
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    ports = [store.port for store in stores]
    processes: list[Any] = []
    for rank in range(ranks):
        process = CONTEXT.Process(
            target=_train_rank, args=(runs, rank, ranks, ports, folder, waits_at, prepare)
        )
        process.start()
        processes.append(process)
    weakref.finalize(processes[0], stores.clear)  # when the caller has forgotten the processes
    return processes


def _train_rank(
    runs: list[dict[str, Any]],
    rank: int,
    ranks: int,
    ports: list[int],
    folder: Path,
    waits_at: int | None,
    prepare: Callable[[], None] | None,
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "VARLEN_JIT": 1}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    from varlen.train.step import Stepper

    def waiting(inner: Any) -> Any:
        def step(self: Any, number: int, *arguments: Any) -> Any:
            if number == waits_at and rank == ranks - 1:
                (folder / "waits").touch()
                signal.pause()
            return inner(self, number, *arguments)

        return step

    Stepper.step = waiting(Stepper.step)  # type: ignore[method-assign]
    if prepare is not None:
        prepare()
    try:
        for made, port in zip(runs, ports):
            os.environ["MASTER_PORT"] = str(port)
            train(as_settings(TrainSettings, made, ""), Notes())
    except Stopped as stopped:
        (folder / f"rank{rank}.txt").write_text(str(stopped))
        raise SystemExit(stopped.code) from None
    except Exception as error:
        (folder / f"rank{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


def signal_at(moment: str, sent: Mapping[int, Sequence[int]], number: int = 1) -> None:
    """Have ranks send themselves signals in the midst of a call, the nth of its kind.

    Args:
        moment: "start", "load", "step", "save" or "export".
        sent: by rank, the signals, one after the other.
        number: of the call.
    """
    from varlen.train import checkpoint, trainer
    from varlen.train.step import Stepper

    calls = 0

    def signalling(inner: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                for one in sent.get(int(os.environ.get("RANK", "0")), ()):
                    os.kill(os.getpid(), one)
            return inner(*arguments, **named)

        return call

    if moment == "step":
        Stepper.step = signalling(Stepper.step)  # type: ignore[method-assign]
        return
    names = {"start": "open_loader", "load": "build_model", "save": "save", "export": "export"}
    module: Any = checkpoint if moment == "save" else trainer
    setattr(module, names[moment], signalling(getattr(module, names[moment])))


def _train(made: dict[str, Any], kill_at: int | None) -> None:
    os.environ["VARLEN_JIT"] = "1"
    from varlen.train import checkpoint, metrics

    asked, output = 0, made["run"]["output"]

    def kill_in_time(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal asked
            # Kernels and tables that are put into a cache, by the first process alone, don't count.
            elsewhere = isinstance(arguments[0], Path) and not arguments[0].is_relative_to(output)
            asked += not elsewhere
            if asked == kill_at and not elsewhere:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    for module, name in ((checkpoint, "sync"), (checkpoint, "save_tensors"), (metrics.os, "fsync")):
        setattr(module, name, kill_in_time(getattr(module, name)))
    for name in ("replace", "mkdir"):
        setattr(Path, name, kill_in_time(getattr(Path, name)))
    train(as_settings(TrainSettings, made, ""), Notes())


def processes_naming(words):
    """Every process of this machine whose command names some words, with its environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if words in (folder / "cmdline").read_bytes().decode(errors="replace"):
                found[int(folder.name)] = (
                    (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                )
        except OSError:
            continue
    return found


def write_toml(path, made):
    """A configuration whose values JSON and TOML spell alike."""
    lines = []
    for name, section in made.items():
        inner = {key: value for key, value in section.items() if isinstance(value, dict)}
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in section.items() if k not in inner)]
        for key, value in inner.items():
            lines += [f"[{name}.{key}]", *(f"{k} = {json.dumps(v)}" for k, v in value.items())]
    path.write_text("\n".join(lines) + "\n")


PLAIN = {"model__settings": {**LLAMA, "attention_dropout": 0.0}, "optimizer__schedule": "constant"}
EVEN = {"slice_tokens": 24}


def write_hardware(path: Path) -> str:
    """Write rates so slow, and without time between tasks, that tiny documents are worth cutting."""
    rows = np.array([1.0, 1e6])
    flat = RateTable(query_rows=rows, key_lengths=rows, tflops=np.full((2, 2), 1e-3))
    slow = replace(
        Hardware.named("h100"),
        name="slow",
        attention=(flat, flat),
        gemm=RateCurve(rows=rows, tflops=np.full(2, 1e-3)),
        launch_s=0.0,
    )
    save_hardware(slow, path)
    return str(path)


def priced(hardware: str, **more: Any) -> dict[str, Any]:
    return {"hardware": hardware, "least_rows": 8, **more}


def planned_table(store: Path, output: Path, plan: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """The configuration of a run by plans; None: of whole packs."""
    made = table(store, output, **PLAIN | changes)
    return made if plan is None else made | {"plan": plan}


def planned(store: Path, output: Path, plan: dict[str, Any] | None, **changes: Any) -> TrainSettings:
    return as_settings(TrainSettings, planned_table(store, output, plan, **changes), "")


def run(store: Path, output: Path, plan: dict[str, Any] | None, **changes: Any) -> Notes:
    notes = Notes()
    train(planned(store, output, plan, **changes), notes)
    return notes


def use_float64(put: Any = setattr) -> None:
    """Train in float64, so that a wrong term can't hide behind rounding.

    Llama's norms and the trainer's own loss round to float32 whatever comes in, and are put aside.
    """
    inner = trainer_module.build_model
    put(trainer_module, "build_model", lambda *given, **named: inner(*given, **named).double())
    put(LlamaRMSNorm, "forward", _norm)
    put(step_module, "target_loss_sum", _loss_sum)


def _norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * hidden * scale


def _loss_sum(logits: torch.Tensor, labels: Any) -> torch.Tensor:
    targets = torch.as_tensor(labels).roll(-1, -1)
    targets[..., -1] = -100
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def same_weights(one: Path, other: Path) -> None:
    ours, theirs = (output / "model/model.safetensors" for output in (one, other))
    assert ours.read_bytes() == theirs.read_bytes()
