"""The worker as a process: replaced at the exact batch when killed, and gone without a trace at the end."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.support.planning import is_there, until
from tests.support.stores import content, drained, loader_of, random_store

from varlen.errors import StalledError, WorkerDiedError
from varlen.feed.worker import process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
KILLS = 2


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return random_store(tmp_path_factory.mktemp("feed"))


@pytest.fixture(scope="module")
def whole(store):
    with loader_of(store, micro_batch_size=1, epochs=8) as loader:
        return drained(loader)


def pid_of(loader):
    until(lambda: loader._worker.pid is not None)
    return loader._worker.pid


def descriptors():
    """The pipes and the nameless memory that this process has open, with the inode of each."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target, inode = str(entry.readlink()), entry.stat().st_ino
        except FileNotFoundError:
            continue
        if target.startswith(("pipe:", "/memfd:")):
            found.add((target, inode))
    return found


def kill_at_random(loader, kills, rng):
    """Kill the worker so many times while batches are taken; returns what was taken."""
    found = []
    left, killed = kills, None
    for batch in loader:
        found.append(content(batch))
        if left and rng.random() < 0.05:
            pid = loader._worker.pid
            # The one killed before may not have been noticed yet.
            if pid not in (None, killed) and is_there(pid):
                time.sleep(rng.random() * 0.02)
                with suppress(ProcessLookupError):  # it had made the last batch, and was waited for
                    os.kill(pid, signal.SIGKILL)
                left, killed = left - 1, pid
    return found


def test_slots_that_a_killed_worker_was_filling_are_filled_by_the_next_one(store, whole):
    with loader_of(store, micro_batch_size=1, epochs=8, worker="process", deadline_s=20) as loader:
        found = [content(next(loader))]
        ring, pid = loader._worker._shared.ring, loader._worker.pid
        os.kill(pid, signal.SIGSTOP)
        while ring.mark() is not None:  # as if it had been about to fill them
            pass
        os.kill(pid, signal.SIGKILL)
        assert found + drained(loader)[0] == whole[0]
        assert loader.stats().restarts == 1


@pytest.mark.soak
def test_a_worker_is_killed_a_hundred_times(store):
    with loader_of(store, micro_batch_size=1, epochs=150) as loader:
        expected = drained(loader)[0]
    with loader_of(store, micro_batch_size=1, epochs=150, worker="process") as loader:
        assert kill_at_random(loader, 100, random.Random(2)) == expected
        assert loader.stats().restarts >= 99


def test_a_worker_that_dies_again_and_again_ends_with_a_sentence(store, monkeypatch):
    with loader_of(store, worker="process", epochs=None) as loader:
        next(loader)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        os.kill(loader._worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="3 times in a row at the same batch"):
            drained(loader)
        with pytest.raises(WorkerDiedError):
            next(loader)


def test_whoever_asks_again_at_once_after_workers_died_hears_why_again(store, monkeypatch):
    real = process._read
    monkeypatch.setattr(process, "_read", lambda line: (real(line), time.sleep(0.5)))  # the thread ends late
    with loader_of(store, worker="process", epochs=None, deadline_s=10) as loader:
        next(loader)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        os.kill(loader._worker.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(WorkerDiedError, match="3 times in a row at the same batch"):
                drained(loader)


def test_sixty_four_batches_held_at_once_keep_their_bytes(store, whole, caplog):
    with loader_of(store, micro_batch_size=1, epochs=8, worker="process", ring_slots=4) as loader:
        held = [batch for _, batch in zip(range(64), loader)]
        assert [content(batch) for batch in held] == whole[0][:64]
        assert loader.stats().copies == 61
        assert sum("copied" in record.message for record in caplog.records) == 1
        kept = held[1].input_ids[0, 3:9]  # a view keeps the slot
        expected = kept.tolist()
        del held
        rest = [content(batch) for batch in loader]
        assert rest == whole[0][64:]
        assert kept.tolist() == expected
    assert kept.tolist() == expected


def test_no_process_thread_memory_or_descriptor_is_left(store, fresh_children):
    before, threads = descriptors(), set(threading.enumerate())
    pids = []
    for ending in ("close", "exception", "dropped", "early"):
        loader = loader_of(store, worker="process")
        if ending != "early":
            next(loader)
        pids.append(pid_of(loader))
        if ending == "dropped":
            del loader
        elif ending == "exception":
            with pytest.raises(KeyboardInterrupt), loader:
                raise KeyboardInterrupt
        else:
            loader.close()
            loader.close()
    until(lambda: not any(map(is_there, pids)))
    until(lambda: set(threading.enumerate()) <= threads)
    until(lambda: descriptors() <= before)  # what earlier tests left is closed whenever it is collected


SCRIPT = """
import os, sys, time
import varlen as vl

loader = vl.PackedLoader(sys.argv[1], capacity=32, global_batch_size=24, epochs=None)
first = next(loader)
if sys.argv[2] == "fork":
    pid = os.fork()  # a child that keeps the pipes open
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    print(pid, end=" ")
print(loader._worker.pid, flush=True)
if sys.argv[2] == "end":
    sys.exit(0)
for batch in loader:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("ending", "number"),
    [("kill", signal.SIGKILL), ("fork", signal.SIGKILL), ("interrupt", signal.SIGINT), ("end", None)],
)
def test_a_script_without_a_guard_leaves_no_worker_however_it_ends(store, tmp_path, ending, number):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    trainer = subprocess.Popen(
        [sys.executable, "-W", "ignore", script, store, ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        *forked, worker = map(int, trainer.stdout.readline().split())
        if number is not None:
            assert is_there(worker)
            trainer.send_signal(number)
        trainer.wait(20)
        until(lambda: not is_there(worker))
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def test_the_memory_of_the_ring_has_no_name_and_is_for_this_user_alone(store):
    with loader_of(store, worker="process") as loader:
        batch = next(loader)
        file = loader._worker._shared.ring.file
        assert str(Path(f"/proc/self/fd/{file}").readlink()).startswith("/memfd:")
        assert os.fstat(file).st_mode & 0o777 == 0o600
        assert not np.shares_memory(batch.input_ids, batch.labels)


def test_a_worker_that_stands_still_is_named_after_the_deadline(store):
    with loader_of(store, worker="process", epochs=None, deadline_s=1.0) as loader:
        loader.start_prefetch()
        until(lambda: loader._worker.ready)
        pid = loader._worker.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(StalledError, match=f"process {pid}.* has made no batch for 1 s"):
                drained(loader)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_batches_of_before_a_seek_and_the_end_do_not_count_as_ready(store):
    for worker in ("process", "thread"):
        with loader_of(store, worker=worker, ring_slots=4, epochs=8) as loader:
            loader.start_prefetch()
            until(lambda: loader._worker.ready == 4)
            last = len(loader) - 1
            if worker == "process":
                os.kill(loader._worker.pid, signal.SIGSTOP)  # so that no batch of now can have been made
            loader.seek(last)
            if worker == "process":
                assert loader._worker.ready == 0
                os.kill(loader._worker.pid, signal.SIGCONT)
            assert next(loader) is not None
            waiting = loader._worker._queue if worker == "thread" else loader._worker._shared.batches
            until(lambda: waiting.qsize() == 1)  # noqa: B023 - called here
            assert loader._worker.ready == 0
            assert next(loader, None) is None
