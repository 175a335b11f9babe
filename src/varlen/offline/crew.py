"""Run tasks side by side: in this process, over fresh processes of this machine, or over a Ray cluster.

Every task is a plain function of (what all share, its own arguments), and what it writes depends on those alone, so
that the bytes are the same whoever runs it and however many there are.
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import IO, Any, TypeVar, cast

from varlen.errors import MissingExtraError, SettingError, VarlenError, WorkerDiedError

Result = TypeVar("Result")
NOT_FOUND = (
    "a tokenizer that is a function of this session can't be handed to other processes ({error}); put it into a "
    "module, or use one process (processes=1)"
)
_KEPT = "what is finished is kept: run the same again, with fewer processes if memory is short"


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """Who runs tasks."""

    processes: int = 1
    """Processes on this machine; 1: this one."""
    ray: bool = False
    """Over the Ray cluster that RAY_ADDRESS names, or one on this machine. Its machines must share the folders of the
    data, of the output and of the tokens."""

    def __post_init__(self) -> None:
        """Refuse a crew of nobody.

        Raises:
            SettingError: fewer than one process.
        """
        if self.processes < 1:
            raise SettingError(f"processes must be at least 1, got {self.processes}")

    def run(
        self, function: Callable[[Any, Any], Result], shared: Any, tasks: Iterable[Any]
    ) -> Iterator[Result]:
        """Yield the results of all tasks as they are done, in any order.

        Args:
            function: of a module, so that other processes find it by its name.
            shared: its first argument; handed to each process once.
            tasks: its second arguments; taken one by one as there is room.

        Raises:
            VarlenError: a task failed; the others are stopped.
            SettingError: something that can't be handed to another process.
            MissingExtraError: Ray isn't installed.
        """
        if self.ray:
            return _over_ray(function, shared, tasks)
        if self.processes > 1:
            return _over_processes(function, shared, tasks, self.processes)
        return (function(shared, task) for task in tasks)


def _over_processes(
    function: Callable[[Any, Any], Result], shared: Any, tasks: Iterable[Any], count: int
) -> Iterator[Result]:
    try:
        head = pickle.dumps((function, shared))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SettingError(NOT_FOUND.format(error=error)) from error
    each = max((os.cpu_count() or 1) // count, 1)
    waiting, lock, stopped = iter(tasks), threading.Lock(), threading.Event()
    workers: list[_Worker] = []
    results: Queue[Any] = Queue()

    def take() -> Any:
        with lock:
            return None if stopped.is_set() else next(waiting, None)

    def start() -> _Worker | None:
        with lock:  # so that none starts behind the back of who stops them
            if stopped.is_set():
                return None
            workers.append(_Worker(each, head))
            return workers[-1]

    def serve() -> None:
        worker = None
        try:
            while (task := take()) is not None:
                worker = worker or start()
                if worker is None:
                    break
                results.put(worker.ask(task))
        except BaseException as error:  # from the iterator of tasks: it belongs to the caller
            results.put((False, error))
        results.put(None)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        running = count
        while running:
            result = results.get()
            if result is None:
                running -= 1
                continue
            is_done, value = result
            if not is_done:
                raise value
            yield value
    finally:
        stopped.set()
        with lock:
            for worker in workers:
                worker.process.kill()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        for worker in workers:
            worker.close()


class _Worker:
    """A process that runs one task at a time."""

    def __init__(self, threads: int, head: bytes) -> None:
        self.process = _start(threads)
        self._head: bytes | None = head

    def ask(self, task: Any) -> tuple[bool, Any]:
        """Have a task done; returns what `outcome` said, or that the process is gone."""
        messages = [self._head, pickle.dumps(task)] if self._head else [pickle.dumps(task)]
        self._head = None
        try:
            for message in messages:
                send(cast(IO[bytes], self.process.stdin), message)
            answer = receive(cast(IO[bytes], self.process.stdout))
        except (EOFError, OSError):
            self.process.wait()
            return False, _death(self.process.returncode)
        return cast(tuple[bool, Any], pickle.loads(answer))

    def close(self) -> None:
        """Leave neither a process nor a pipe behind, once nobody asks any more."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what it had not read yet
                    pipe.close()


def _start(threads: int) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that waits for tasks: no fork, and no need for a guard in the user's script.

    It is a session of its own, so that Ctrl-C is for this process alone, which then stops the others.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
    }
    command = [sys.executable, "-m", "varlen.offline.worker"]
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
    except OSError as error:
        raise WorkerDiedError(
            f"no other process can be started ({error.strerror or error}); what is finished is kept: run the same "
            "again with fewer processes"
        ) from error


def _death(code: int | None) -> WorkerDiedError:
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
    return WorkerDiedError(f"a process that worked on a part {how} (out of memory?); {_KEPT}")


def send(pipe: IO[bytes], content: bytes) -> None:
    """Write a message and its length."""
    pipe.write(struct.pack("<q", len(content)))
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """Read a message.

    Raises:
        EOFError: the other end is gone.
    """
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    size = struct.unpack("<q", head)[0]
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _over_ray(function: Callable[[Any, Any], Result], shared: Any, tasks: Iterable[Any]) -> Iterator[Result]:
    ray = _connected()
    handed = ray.put((Path.cwd(), function, shared))
    remote = ray.remote(_task)
    most = 2 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    waiting = iter(tasks)
    running: list[Any] = []
    try:
        while True:
            while len(running) < most and (task := next(waiting, None)) is not None:
                running.append(remote.remote(handed, task))
            if not running:
                return
            done, running = ray.wait(running, num_returns=1)
            try:
                is_done, value = ray.get(done[0])
            except ray.exceptions.RayError as error:
                said = str(error).strip().rpartition("\n")[2]
                raise WorkerDiedError(f"Ray lost a part ({type(error).__name__}: {said}); {_KEPT}") from error
            if not is_done:
                raise value
            yield value
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _connected() -> Any:
    """Return Ray, connected to the cluster of RAY_ADDRESS, or to one that it starts here."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            '--ray takes Ray, not installed here; run: pip install "varlen[ray]"'
        ) from error
    if not ray.is_initialized():
        os.environ.setdefault(
            "RAY_USAGE_STATS_ENABLED", "0"
        )  # nobody asked for this call to be told to others
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = os.environ.get("RAY_ADDRESS", "this machine")
            said = str(error).strip().partition("\n")[0]
            raise SettingError(
                f"no Ray cluster at {where} ({said}); set RAY_ADDRESS to one, or leave --ray out"
            ) from error
    return ray


def _task(handed: Any, task: Any) -> tuple[bool, Any]:
    """Run a task on a machine of a cluster: one processor is what it was given."""
    folder, function, shared = handed
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        os.chdir(folder)  # what paths are relative to
    except OSError:
        return False, SettingError(
            f"{folder} isn't there on {platform.node()}; over Ray, all machines must share the folders of the data "
            "and of the output"
        )
    return outcome(function, shared, task)


def outcome(function: Callable[[Any, Any], Any], shared: Any, task: Any) -> tuple[bool, Any]:
    """Run a task; an error is a result too, so that it can cross processes."""
    try:
        return True, function(shared, task)
    except VarlenError as error:
        return False, error
    except MemoryError:
        return False, WorkerDiedError(f"a process that worked on a part ran out of memory; {_KEPT}")
    except OSError as error:
        return False, OSError(error.errno, error.strerror or str(error), error.filename)
    except Exception as error:  # a bug of ours: its traceback would be lost with the process
        import traceback

        return False, RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
