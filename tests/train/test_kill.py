"""kill -9 of a trainer: at every call on the disk and at any moment, and the run still ends with the same bits."""

import random
import signal
import time

import pytest
from tests.support.training import Notes, settings, start_training, steps_of, table, write_store
from tests.support.training import same_end as require_same_end

from varlen.train.trainer import train


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    train(settings(store, output, **SHORT), Notes())
    return output


SHORT = {"run__checkpoint_every": 1, "run__keep": 2, "run__steps": 3}


def finished(process):
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def test_killed_at_any_call_on_the_disk_a_run_goes_on_with_the_same_bits(whole, store, tmp_path):
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
    require_same_end(whole, tmp_path / "run")
    assert [name for name in steps_of(tmp_path / "run") if name.startswith(".")] == []


def usual_s(store, folder):
    """Seconds that an undisturbed run takes, from its process on; the first one also starts what starts processes."""
    for number in range(2):
        begun = time.monotonic()
        assert finished(start_training(table(store, folder / f"timed{number}", **SHORT))) == 0
    return time.monotonic() - begun


def kill_at_random(store, whole, folder, least):
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
        require_same_end(whole, output)
        number += 1


def test_killed_at_random_moments_a_run_goes_on_with_the_same_bits(whole, store, tmp_path):
    kill_at_random(store, whole, tmp_path, 2)


@pytest.mark.soak
def test_a_hundred_kills_at_random_moments_change_no_bit(whole, store, tmp_path):
    kill_at_random(store, whole, tmp_path, 100)
