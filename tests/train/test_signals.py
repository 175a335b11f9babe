"""Runs that are told to end or killed: they save at one step that all ranks agree on, or end with the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from tests.support.rarely import mostly
from tests.support.training import (
    CONTEXT,
    LLAMA,
    Notes,
    metrics_of,
    same_end,
    settings,
    signal_at,
    start_program,
    start_ranks,
    start_training,
    start_verb,
    steps_of,
    table,
    write_toml,
)

from varlen.signals import SCHEDULERS
from varlen.train.changes import WeightsMark
from varlen.train.trainer import agreed, train

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
NEVER = {"run__checkpoint_every": 0}
ran = partial(subprocess.run, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    train(settings(store, output, **NEVER), Notes())
    return output


def ended(processes):
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


CASES = {
    "at a step": ("step", {0: [TERM]}, 3, 1, [143]),
    "by the other signal": ("step", {0: [USR1]}, 3, 1, [138]),
    "twice": ("step", {0: [USR1, USR1, TERM]}, 3, 1, [138]),
    "at the first step": ("step", {0: [TERM]}, 1, 1, [143]),
    "at the last step": ("step", {0: [TERM]}, 6, 1, [0]),
    "while it is saved": ("save", {0: [TERM]}, 1, 1, [143]),
    "while the model is written": ("export", {0: [TERM]}, 1, 1, [0]),
    "while the data is opened": ("start", {0: [TERM]}, 1, 1, [143]),
    "while the model is built": ("load", {0: [USR1]}, 1, 1, [138]),
    "one rank of two": ("step", {1: [USR1]}, 3, 2, [138, 138]),
    "two ranks by two signals": ("step", {0: [USR1], 1: [TERM]}, 3, 2, [143, 143]),
    "one rank of two while it saves": ("save", {1: [TERM]}, 1, 2, [143, 143]),
    "one rank of two at the start": ("load", {1: [TERM]}, 1, 2, [143, 143]),
    "the first rank of two at the start": ("load", {0: [USR1]}, 1, 2, [138, 138]),
}
OFTEN = {
    "at a step",
    "twice",
    "at the last step",
    "while the model is built",
    "one rank of two",
    "while it is saved",
}


@pytest.mark.parametrize("name", mostly(sorted(OFTEN), CASES))
def test_every_rank_saves_one_step_and_says_which_signal_ended_it(store, whole, tmp_path, name):
    moment, sent, number, ranks, codes = CASES[name]
    saves = {"run__checkpoint_every": 2 if moment == "save" else 0}
    made = table(store, tmp_path / "run", data__micro_batch_size=2 if ranks == 1 else 1, **saves)

    processes = start_ranks([made], ranks, tmp_path, prepare=partial(signal_at, moment, sent, number))
    begun = time.monotonic()
    assert ended(processes) == codes, [path.read_text() for path in tmp_path.glob("rank*.txt")]
    assert time.monotonic() - begun < 60

    done = {"step": number, "save": 2, "export": 6}.get(moment, 0)
    assert (
        [int(one[-8:]) for one in steps_of(tmp_path / "run")] == [done]
        if done
        else not (tmp_path / "run/checkpoints").exists()
    )
    assert (tmp_path / "run/model").exists() == (codes == [0])
    if ranks == 1:
        train(settings(store, tmp_path / "run", **NEVER), Notes())
        if moment != "save":
            same_end(whole, tmp_path / "run")
        assert metrics_of(tmp_path / "run") == metrics_of(whole)


def test_ranks_with_a_plan_and_stages_save_together(store, tmp_path):
    made = table(store, tmp_path / "run", plan__pp=2, plan__hardware="h100", run__checkpoint_every=0)
    made["model"]["settings"] = {**LLAMA, "attention_dropout": 0.0}

    processes = start_ranks([made], 2, tmp_path, prepare=partial(signal_at, "step", {1: [TERM]}, 2))

    assert ended(processes) == [143, 143], [path.read_text() for path in tmp_path.glob("rank*.txt")]
    assert steps_of(tmp_path / "run") == ["step-00000002"]


LOST = """
import os, signal, threading
from varlen import signals
signals._GRACE_S = 1.0
signals.install_handlers()
class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass
Dropping()
print("goes on", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


def test_a_signal_that_a_library_has_lost_or_that_left_a_lock_behind_ends_the_process_all_the_same():
    done = ran([sys.executable, "-c", LOST])

    assert "goes on" in done.stdout
    assert done.returncode == 143
    assert done.stderr == "varlen: stopped by SIGTERM; run the same command again to go on\n"


LOST_INTERRUPT = """
import os, signal
from varlen import signals
signals.install_handlers()
class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
class Failing:
    def __del__(self): 1 / 0
Dropping()
Failing()
from varlen.train.trainer import Interrupt
with Interrupt() as interrupt:
    interrupt.defer()
    print(interrupt.signal)
"""


def test_a_ctrl_c_that_a_library_has_lost_ends_the_run_at_its_first_step(tmp_path):
    out, errors = tmp_path / "out", tmp_path / "errors"

    assert ended([start_program(LOST_INTERRUPT, out, errors)]) == [0]

    assert out.read_text().split() == [str(int(INT))]
    assert "KeyboardInterrupt" not in errors.read_text()
    assert "ZeroDivisionError" in errors.read_text()


STUCK = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from varlen import signals
from varlen.cli import app as cli
signals._GRACE_S = 1.0
def verb():
    ThreadPoolExecutor(1).submit(threading.Event().wait)
    raise signals.Stopped(signals.SCHEDULERS[0], "step 3 is saved")
try:
    cli._verb(verb)()
finally:
    print("ends", flush=True)
"""


def test_a_thread_that_stands_still_does_not_hold_up_the_end():
    done = ran([sys.executable, "-c", STUCK])

    assert done.stdout == "ends\n"
    assert done.returncode == 143
    assert "stopped by SIGTERM; step 3 is saved" in done.stderr


LATE = "import atexit, os; from varlen.cli import app; atexit.register(os.kill, os.getpid(), 2); app.main()"


def test_a_ctrl_c_after_the_last_message_ends_the_process_without_another():
    done = ran([sys.executable, "-c", LATE, "--version"])

    assert (done.returncode, done.stdout[:7], done.stderr) == (130, "varlen ", "")


def look_at(folder):
    sys.exit(WeightsMark(str(folder), None, None).get())


def test_hashing_weights_does_not_hold_up_the_end(tmp_path):
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(64 << 30)  # of zeros, which take no room, and a minute or more to hash
    process = CONTEXT.Process(target=look_at, args=(tmp_path,))
    process.start()

    assert ended([process]) == [0]  # None: nothing is known yet


def test_of_several_signals_all_ranks_follow_the_same_one():
    assert agreed([0, 0]) == 0
    assert agreed([0, INT]) == INT
    assert agreed([INT, USR1, 0]) == USR1
    assert agreed([USR1, TERM]) == TERM


def children_of(process):
    told = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
    return subprocess.run(told, capture_output=True, text=True, check=False).stdout.split()


@pytest.mark.parametrize("number", mostly([TERM], SCHEDULERS))
def test_a_signal_to_all_processes_of_a_job_leaves_the_loaders_worker_alive_to_the_end(
    tmp_path, store, number
):
    made = table(store, tmp_path / "run", run__steps=10**6, run__checkpoint_every=0, data__worker="process")
    write_toml(tmp_path / "c.toml", made)
    errors = tmp_path / "errors"
    process = start_verb("train", tmp_path / "c.toml", errors=errors)
    metrics = tmp_path / "run/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert process.is_alive(), errors.read_text()
        time.sleep(0.1)
    children = children_of(process)
    assert children, "no worker runs"
    for child in children:
        subprocess.run(["kill", f"-{int(number)}", child], check=False)
    time.sleep(0.5)
    assert children_of(process) == children, "a worker has died, and another took its place"
    os.kill(process.pid, number)
    assert ended([process]) == [128 + number], errors.read_text()

    said = errors.read_text()
    assert f"stopped by {number.name}; step" in said
    assert "is saved in" in said


@pytest.mark.parametrize("verb", mostly(["index"], ["index", "pack"]))
def test_other_verbs_end_at_once_and_go_on_later(tmp_path, verb):
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "some words to learn from " * 40}) + "\n")
    data.write_bytes(data.read_bytes() * 30_000)
    command = [
        sys.executable,
        "-m",
        "varlen",
        verb,
        str(data),
        "-o",
        str(tmp_path / "out"),
        "--processes",
        "2",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob("out.partial/.work/**/*.part")):
        time.sleep(0.02)
    process.send_signal(TERM)
    _, said = process.communicate(timeout=30)

    assert process.returncode == 143, said
    assert "stopped by SIGTERM; the same command again goes on where it stopped" in said
    assert not (tmp_path / "out").exists()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


@pytest.fixture(scope="module")
def undisturbed(store, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    train(settings(store, output, **SHORT), Notes())
    return output


SHORT = {"run__checkpoint_every": 1, "run__keep": 2, "run__steps": 3}


def finished(process):
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def test_killed_at_any_call_on_the_disk_a_run_goes_on_with_the_same_bits(undisturbed, store, tmp_path):
    made = table(store, tmp_path / "run", **SHORT)
    kills, found = 0, set()
    for kill_at in range(3, 120, 6):  # further and further, each time from what the last one left
        code = finished(start_training(made, kill_at))
        if (tmp_path / "run/checkpoints").is_dir():
            found |= {name for name in steps_of(tmp_path / "run") if name.startswith(".")}
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1

    assert kills >= 4
    assert found, "no kill struck in the midst of a save"
    same_end(undisturbed, tmp_path / "run")
    assert [name for name in steps_of(tmp_path / "run") if name.startswith(".")] == []


ALL_THREE = {
    **SHORT,
    "run__steps": 8,
    "run__save_in_background": True,
    "eval__every": 2,
    "eval__keep_best": True,
    "adapter__rank": 4,
    "adapter__dropout": 0.1,
    "adapter__export": "merged",
}


def test_a_killed_run_of_an_adapter_with_evaluations_and_background_saves_ends_with_the_same_bits(
    store, tmp_path
):
    sets = {"eval__sets": {"same": str(store)}}
    made = table(store, tmp_path / "run", **ALL_THREE, **sets)
    train(settings(store, tmp_path / "whole", **ALL_THREE, **sets), Notes())
    metrics, kills = tmp_path / "run/metrics.jsonl", 0
    for lines in (2, 4, 5, 7):
        process, until = start_training(made), time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
            if process.exitcode is not None:  # it ended before it was seen
                break
            assert time.monotonic() < until, "the run is too slow"
            time.sleep(0.002)
        process.kill()  # SIGKILL, from outside
        kills += finished(process) == -signal.SIGKILL
    assert kills >= 2
    assert finished(start_training(made)) == 0

    same_end(tmp_path / "whole", tmp_path / "run")
    one, other = (
        [
            {**json.loads(line), "seconds": 0}
            for line in (tmp_path / name / "evaluations.jsonl").read_text().splitlines()
        ]
        for name in ("whole", "run")
    )
    assert one == other
    assert [each["step"] for each in one] == [2, 4, 6, 8]


def usual_s(store, folder):
    """Seconds that an undisturbed run takes, from its process on; the first one also starts what starts processes."""
    for number in range(2):
        begun = time.monotonic()
        assert finished(start_training(table(store, folder / f"timed{number}", **SHORT))) == 0
    return time.monotonic() - begun


def kill_at_random(store, undisturbed, folder, least):
    """Train and kill until so many kills have struck; every run ends with the same bits."""
    longest_s = 1.5 * usual_s(store, folder)
    kills = number = 0
    while kills < least:
        assert number < 20 * least, f"{kills} kills in {number} runs"
        output, rng = folder / f"run{number}", random.Random(number)
        made = table(store, output, **SHORT)
        for _ in range(200):
            process = start_training(made)
            process.join(rng.uniform(0, longest_s))
            if process.exitcode is None:
                process.kill()
            if finished(process) == 0:
                break
            assert process.exitcode == -signal.SIGKILL
            kills += 1
        same_end(undisturbed, output)
        number += 1


@pytest.mark.soak
def test_a_hundred_kills_at_random_moments_change_no_bit(undisturbed, store, tmp_path):
    kill_at_random(store, undisturbed, tmp_path, 100)
