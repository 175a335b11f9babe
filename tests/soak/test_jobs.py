"""Random job situations: how a job starts, which signal comes when, what changes meanwhile. Right, or a sentence."""

import os
import random
import shutil
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.support.training import CONTEXT, Notes, same_end, settings, table, write_store, write_toml

from varlen.train.trainer import train

TERM, USR1, INT, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL
STARTS: dict[str, tuple[dict[str, str], bool]] = {
    "alone": ({}, True),
    "torchrun of one": ({"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, True),
    "sbatch": ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, True),
    "srun of one": ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}, True),
    "srun of two": ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, False),
    "mpirun of two": ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, False),
    "mpiexec of two": ({"PMI_SIZE": "2", "PMI_RANK": "0"}, False),
}
SIGNALS = [(), (TERM,), (USR1,), (INT,), (KILL,), (TERM, TERM), (USR1, TERM), (INT, TERM)]
CODES = {TERM: {143}, USR1: {138}, INT: {130}, KILL: {-9}}
CHANGES = ("nothing", "rate", "seed", "data", "metrics", "model", "checkpoint", "link")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    train(settings(store, output), Notes())
    return output


def command_line(arguments: list[str], names: dict[str, str], said: Path, begun: Path) -> None:
    """Be `varlen` in a process of its own."""
    os.environ.update(names, VARLEN_JIT="1")
    with said.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        app = import_module("varlen.cli.app")

        sys.argv = ["varlen", *arguments]
        inner = app.install_handlers

        def begin() -> None:
            inner()
            begun.touch()

        app.install_handlers = begin
        app.main()


def ran(
    folder: Path, names: dict[str, str], sent: tuple[int, ...] = (), delay_s: float = 0
) -> tuple[Any, str]:
    """Run a job to its end; returns its exit code and what it said."""
    said, begun = folder / "said.txt", folder / "begun"
    begun.unlink(missing_ok=True)
    process = CONTEXT.Process(
        target=command_line, args=(["train", str(folder / "c.toml")], names, said, begun)
    )
    process.start()
    while not begun.exists() and process.is_alive():
        time.sleep(0.01)
    time.sleep(delay_s if sent else 0)
    for number in sent:
        if process.is_alive():
            os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode is not None, f"hangs: {said.read_text()}"
    return process.exitcode, said.read_text()


def configure(folder: Path, store: Path, **changes: Any) -> None:
    write_toml(folder / "c.toml", table(store, folder / "run", **changes))


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "run/checkpoints").glob("step-*"))


def changed(folder: Path, store: Path, change: str) -> tuple[str | None, Path | None]:
    """Change something between two jobs; returns the words that refuse it, and the foreign file."""
    run, saved = folder / "run", checkpoints(folder)
    run.mkdir(exist_ok=True)
    if change == "rate":
        configure(folder, store, optimizer__learning_rate=0.5)
    elif change == "seed":
        configure(folder, store, run__seed=7)
        return ("run.seed was 0 and is 7" if saved else None), None
    elif change == "data":
        other = folder / "other"
        shutil.copytree(store.parent, other, dirs_exist_ok=True)
        shutil.rmtree(other / "store")
        (other / "chats.jsonl").write_text(
            "".join((other / "chats.jsonl").read_text().splitlines(True)[::-1])
        )
        configure(folder, other / "chats.jsonl", data__mode="indexed")
        return ("data.source was" if saved else None), None
    elif change == "metrics":
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        return "aren't of varlen's steps", run / "metrics.jsonl"
    elif change == "model":
        (run / "model").mkdir(exist_ok=True)
        (run / "model/mine.txt").write_text("mine")
        return "move it away", run / "model/mine.txt"
    elif change == "link":
        (folder / "thesis.txt").write_text("mine")
        (run / "plans.json").symlink_to(folder / "thesis.txt")
        return "is a link", folder / "thesis.txt"
    elif change == "checkpoint" and saved:
        shard = next(saved[-1].glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-8])
        return str(saved[-1]), None
    return None, None


def situation(number: int, store: Path, whole: Path, folder: Path) -> str:
    """Run two jobs, one after the other; returns what the situation was."""
    rng = random.Random(number)
    start, change = rng.choice(list(STARTS)), rng.choice(CHANGES)
    sent, delay_s = rng.choice(SIGNALS), rng.uniform(0, 0.9)
    names, is_alone = STARTS[start]
    configure(folder, store)

    code, said = ran(folder, names, sent, delay_s)

    came = [signal.Signals(one).name for one in sent]
    told = f"{number}: {start}, {came} after {delay_s:.2f} s, {change}: {code} {said}"
    allowed = set[int]().union(*(CODES[one] for one in sent)) | ({0} if is_alone else {2})
    assert code in allowed, told
    assert code == -9 or code == 0 or "varlen: " in said or names.get("SLURM_PROCID") == "1", told
    assert "Traceback" not in said, told
    if code in (143, 138, 130) and "is saved in" in said:
        assert checkpoints(folder), told
    words, foreign = changed(folder, store, change)
    before = foreign.read_bytes() if foreign is not None else b""

    code, said = ran(folder, {})

    told += f"; then {code} {said}"
    assert "Traceback" not in said, told
    assert code == (0 if words is None else 2), told
    assert words is None or words in said, told
    assert foreign is None or foreign.read_bytes() == before, told
    if words is None and change in ("nothing", "checkpoint"):
        same_end(whole, folder / "run")
    return told


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 300, 100))
def test_hundreds_of_random_situations_are_right_or_say_a_sentence(store, whole, tmp_path, first):
    for number in range(first, first + 100):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        situation(1000 + number, store, whole, folder)
        shutil.rmtree(folder)
