"""`varlen train` on the command line: an example, lines and JSON, Ctrl-C, and bad input in a sentence."""

import importlib.util
import io
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from tests.support.training import (
    metrics_of,
    planned_table,
    priced,
    processes_naming,
    same_end,
    start_verb,
    steps_of,
    table,
    write_hardware,
    write_store,
    write_toml,
)

from varlen.cli import app
from varlen.cli.train import Lines, Live, live_parts, run_display, step_parts
from varlen.signals import Stopped
from varlen.train import dry_run
from varlen.train.callbacks import RunOverview
from varlen.train.metrics import StepMetrics


@pytest.fixture
def run_train(verb):
    return lambda *arguments: verb("train", *arguments)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"))


def test_the_example_is_written_and_trains(run_train, store, tmp_path):
    code, out, _ = run_train("--init", "config.toml")
    assert (code, out.splitlines()[-1].split("  ")[-1]) == (0, "varlen train config.toml")
    assert run_train("--init", "config.toml")[0] == 2

    quick = ["--set", f"data.source={store}", "--set", "run.steps=2", "--set", "data.worker=thread"]
    code, out, said = run_train("config.toml", *quick, "--json")
    summary = json.loads(out)
    assert (code, summary["steps"], summary["plan"]["parallel"]) == (0, 2, "fsdp")
    assert 'attention "varlen"; 2 steps\n' in said
    assert "step 2  loss " in said
    assert steps_of(tmp_path / "run") == ["step-00000002"]

    text = (tmp_path / "config.toml").read_text().replace("steps = 200 ", "epochs = 1 ")
    (tmp_path / "epochs.toml").write_text(text.replace('"store"', f'"{store}"').replace('"run"', '"epochs"'))
    for _ in range(2):
        code, out, said = run_train("epochs.toml")
    assert (code, out.splitlines()[0].endswith(" steps; raise run.epochs to go on")) == (0, True)

    code, out, said = run_train("config.toml", *quick)
    assert (code, out.splitlines()[0]) == (
        0,
        "run/checkpoints/step-00000002 was finished already, 2 steps; raise run.steps to go on",
    )
    code, out, said = run_train(
        "config.toml", *quick, "--set", "run.steps=3", "--set", "measure.exposed_data=true"
    )
    assert code == 0
    assert out.startswith("3 steps, 1 of them now; ")
    assert "going on after step 2\n" in said

    more = [*quick, "--set", "run.epochs=1", "--set", "run.steps=1000000", "--set", "run.output=short"]
    code, out, said = run_train("config.toml", *more)
    steps = out.split()[0]
    assert (code, f"the data ended at step {steps} of 1,000,000; raise run.epochs to go on" in out) == (
        0,
        True,
    )
    assert (
        run_train("config.toml", *more)[1]
        .splitlines()[0]
        .endswith(f"{steps} steps; raise run.epochs to go on")
    )


def test_a_run_by_plans_says_which_and_what_they_cost(run_train, store, tmp_path):
    hardware = write_hardware(tmp_path / "slow.json")
    write_toml(tmp_path / "a.toml", planned_table(store, tmp_path / "run", priced(hardware), run__steps=2))

    code, out, said = run_train("a.toml")

    assert code == 0, said
    words = 'in slices by plans: "micropack" on dp 1 x pp 1, recompute "auto", offload "auto", rates of slow; 2 steps'
    assert words in said
    assert re.search(r"\n  \d+\.\d\d % of the time waiting for plans, after the first one \(\d+\.\d s\)", out)
    summary = json.loads(run_train("a.toml", "--set", "run.steps=3", "--json")[1])
    assert summary["plan"]["plans"].startswith('"micropack" on dp 1 x pp 1')
    assert 0 <= summary["totals"]["first_plan_s"] < 60  # it may be there before the model is


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a configuration; varlen train --init config.toml writes an example"),
        (["none.toml"], "none.toml can't be read"),
        (["a.toml", "--init", "b.toml"], "--init writes an example and trains nothing"),
        (["a.toml", "--set", "run.stepz=1"], "run.stepz is no setting; the nearest is run.steps"),
        (["a.toml", "--set", "data.source=nowhere"], "nowhere"),
        (
            ["a.toml", "--set", "model.settings.max_position_embeddings=4"],
            "capacity 128 is longer than the 4 positions",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run_train, store, tmp_path, arguments, words):
    write_toml(tmp_path / "a.toml", table(store, tmp_path / "run"))

    code, out, said = run_train(*arguments)

    assert (code, out) == (2, "")
    assert said.startswith("varlen: ")
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_ends_in_one_sentence_where_a_run_would_fail(run_train, store, tmp_path, monkeypatch):
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "weight": 0}]
    (tmp_path / "none.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 9)
    inner = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else inner(name))
    write_toml(tmp_path / "a.toml", table(store, tmp_path / "run"))
    for changes, words in (
        (["run.learning_rate=1"], "run.learning_rate is no setting; the nearest is optimizer.learning_rate"),
        (['track.to=["mlflow"]'], 'install it (pip install "varlen[track]"), or leave it out'),
        (['eval.sets={none = "none.jsonl"}', "data.on_error=skip"], "eval.sets.none"),
        (['adapter.targets=["q_prj"]', 'adapter.export="merged"'], "the nearest is 'q_proj'"),
    ):
        given = [word for change in changes for word in ("--set", change)]
        code, out, said = run_train("a.toml", "--dry-run", *given)
        assert (code, out) == (2, ""), said
        assert said.splitlines()[-1].startswith("varlen: ")
        assert words in said.splitlines()[-1]
    code, out, said = run_train("a.toml", "--dry-run", "--memory", "0.001")
    assert (code, out) == (2, "")
    assert re.fullmatch(
        r"varlen: a process would need about .* of 1.0 MB \(as given\), and .* would need less; .*\n", said
    )
    for asked in (["--memory", "24"], ["--dry-run", "--memory", "0"]):
        assert "is of --dry-run, and above 0 GB" in run_train("a.toml", *asked)[2]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [(KeyboardInterrupt(), 130, "interrupted"), (Stopped(signal.SIGTERM), 143, "stopped by SIGTERM")],
)
def test_an_interrupted_dry_run_says_that_nothing_was_written(
    run_train, store, tmp_path, monkeypatch, error, exit_code, words
):
    def interrupted(*_, **__):
        raise error

    monkeypatch.setattr(dry_run, "open_loader", interrupted)
    monkeypatch.setattr(app, "end_soon", lambda _: None)  # it would end this process
    monkeypatch.setattr(app, "ignore", lambda: None)
    write_toml(tmp_path / "a.toml", table(store, tmp_path / "run"))

    code, out, said = run_train("a.toml", "--dry-run")

    assert (code, out) == (exit_code, "")
    assert said.splitlines()[-1] == f"varlen: {words}; nothing was written"


def test_a_dry_run_prints_what_would_be_done(run_train, store, tmp_path):
    hardware = write_hardware(tmp_path / "slow.json")
    write_toml(tmp_path / "a.toml", planned_table(store, tmp_path / "run", priced(hardware), run__steps=2))

    code, out, _ = run_train("a.toml", "--dry-run", "--processes", "2")
    assert code == 0
    lines = out.splitlines()
    assert [line[:13].strip() for line in lines if line[:1].strip()] == [
        *("data", "steps", "first step", "model", "plan", "predicted", "memory", "nothing was t")
    ]
    assert max(map(len, lines)) <= 80
    found = json.loads(run_train("a.toml", "--dry-run", "--json")[1])
    assert found["plan"]["steps"] == 4
    assert found["plan"]["tokens_per_s"] > 0


def test_one_of_several_processes_says_which_it_is(run_train, store, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    write_toml(tmp_path / "a.toml", table(store, tmp_path / "run", run__parallel="none"))

    assert run_train("a.toml")[2].startswith('varlen: rank 1: run.parallel is "none"')


def test_ctrl_c_saves_at_the_end_of_a_step_and_leaves_nothing_behind(store, tmp_path):
    made = table(
        store, tmp_path / "run", run__steps=4000, run__checkpoint_every=0, optimizer__schedule="constant"
    )
    made["data"]["worker"] = "process"
    write_toml(tmp_path / "a.toml", made)
    errors = tmp_path / "errors"
    run = start_verb("train", tmp_path / "a.toml", errors=errors)
    try:
        metrics, end = tmp_path / "run/metrics.jsonl", time.monotonic() + 240
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
            assert run.is_alive(), errors.read_text()
            assert time.monotonic() < end, "the run is too slow"
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all processes of the run
        run.join(240)
    finally:
        run.kill()

    said = errors.read_text()
    assert run.exitcode == 130, said
    (name,) = steps_of(tmp_path / "run")
    step = int(name.removeprefix("step-"))
    where = tmp_path / "run/checkpoints" / name
    last = said.splitlines()[-1]
    assert last == f"varlen: interrupted; step {step:,} is saved in {where}, where the same command goes on"
    assert "Traceback" not in said
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == list(range(1, step + 1))
    assert processes_naming(str(tmp_path)) == {}
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)


PLAN = RunOverview(
    steps=30,
    resumed_from=4,
    num_parameters=1234,
    num_trained=1234,
    model="llama",
    attention="varlen",
    world_size=2,
    parallel="ddp",
    device="cpu",
    precision="fp32",
)


def metrics_at(step):
    return StepMetrics(
        step=step,
        loss=2.5,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens=900,
        supervised_tokens=800,
        fill=0.9,
        total_tokens=900 * step,
        epoch=0,
        position={"step": step},
        tokens_per_s=4500.0,
        data_wait_s=0.002,
        step_s=0.2,
    )


def test_a_log_has_a_line_every_few_steps():
    written = io.StringIO()
    lines = Lines(Console(file=written, width=40), 10)

    lines.on_begin(PLAN)
    for step in range(5, 31):
        lines.on_step(metrics_at(step))

    assert written.getvalue().splitlines() == [
        'llama, 1,234 parameters, fp32 on 2 processes (ddp) of cpu, attention "varlen"; 30 steps, going on after '
        "step 4",
        *(
            f"step {step}  loss 2.5000  lr 0.001  4,500 tokens/s  90.0 % full  1.0 % waiting"
            for step in (5, 10, 20, 30)
        ),
    ]


def test_a_terminal_has_a_bar_with_loss_speed_and_waiting():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=160, highlight=False)
    with Progress(console=console, auto_refresh=False) as bar:
        live = Live(console, bar)
        live.on_begin(PLAN)
        live.on_step(metrics_at(12))
        (task,) = bar.tasks

    assert (task.completed, task.total) == (12, 30)
    assert live_parts(task)[0].words == "step 12/30"
    shown = [part.words for part in step_parts(task) if part.words]
    assert shown == ["loss 2.5000", "4,500 tokens/s", "lr 0.001", "1.0 % waiting", "90.0 % full"]
    assert "llama, 1,234 parameters" in written.getvalue()


def test_only_a_terminal_gets_the_bar():
    with run_display(5) as display:
        assert isinstance(display, Lines)


def test_two_calls_end_as_one_does(run_train, store, tmp_path):
    for output, stops in (("whole", [6]), ("parts", [4, 6])):
        write_toml(tmp_path / "a.toml", table(store, tmp_path / output, optimizer__schedule="constant"))
        for steps in stops:
            assert run_train("a.toml", "--set", f"run.steps={steps}")[0] == 0

    same_end(Path("whole"), Path("parts"))


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        (["x" * 3000] * 9, "data.overlong=drop", r"\d+ longer than 64 tokens and dropped.*raise capacity"),
        (
            [5] * 9,
            "data.on_error=skip",
            r"9 records skipped; the (log says what|first: .*line 1 holds number)",
        ),
        (["", ""], "data.overlong=split", r"(\d without a token|2 empty documents)"),
    ],
)
@pytest.mark.parametrize("mode", ["indexed", "streaming"])
def test_where_nothing_is_left_to_train_on_a_sentence_says_what_became_of_it(
    run_train, tmp_path, mode, rows, more, said
):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    run_train("--init", "config.toml")
    settings = ["data.source=a.jsonl", "data.capacity=64", f"data.mode={mode}", "run.steps=2", more]
    given = [word for one in [*settings, f"data.cache={tmp_path / 'cache'}"] for word in ("--set", one)]

    code, out, error = run_train("config.toml", *given, "--set", "data.worker=thread")

    assert (code, out) == (2, "")
    assert re.search(f"^varlen: .*{said}", error.splitlines()[-1]), error
    assert not list((tmp_path / "run").rglob("*.safetensors"))
