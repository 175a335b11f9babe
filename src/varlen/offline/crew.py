"""Run tasks side by side: in this process, over fresh processes of this machine, or over a Ray cluster.

Every task is a plain function of (what all share, its own arguments), and what it writes depends on those alone, so
that the bytes are the same whoever runs it and however many there are.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Queue
from typing import IO, Any, TypeVar, cast

from varlen.errors import MissingExtraError, SettingError, VarlenError, WorkerDiedError

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """Who runs tasks."""

    processes: int = 1
    """Processes on this machine; 1: this one."""
    ray: bool = False
    """Over the Ray cluster that RAY_ADDRESS names, or one on this machine."""

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
        raise SettingError(
            f"a tokenizer that is a function of this session can't be handed to other processes ({error}); "
            "put it into a module, or use one process (processes=1)"
        ) from error
    workers = [_start(max((os.cpu_count() or 1) // count, 1)) for _ in range(count)]
    waiting = iter(tasks)
    lock = threading.Lock()
    results: Queue[Any] = Queue()

    def serve(worker: subprocess.Popen[bytes]) -> None:
        try:
            send(cast(IO[bytes], worker.stdin), head)
            while True:
                with lock:
                    task = next(waiting, None)
                if task is None:
                    break
                send(cast(IO[bytes], worker.stdin), pickle.dumps(task))
                results.put(pickle.loads(receive(cast(IO[bytes], worker.stdout))))
        except (EOFError, BrokenPipeError, OSError):
            worker.wait()
            results.put((False, _death(worker.returncode)))
        except BaseException as error:  # from the iterator of tasks: it belongs to the caller
            results.put((False, error))
        results.put(None)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
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
        for worker in workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:  # what it had not read yet
                        continue


def _start(threads: int) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that waits for tasks: no fork, and no need for a guard in the user's script."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
    }
    command = [sys.executable, "-m", "varlen.offline.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _death(code: int | None) -> WorkerDiedError:
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
    return WorkerDiedError(
        f"a process that worked on a part {how} (out of memory?); what is finished is kept: run the same again, "
        "with fewer processes if memory is short"
    )


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
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            '--ray takes Ray, not installed here; run: pip install "varlen[ray]"'
        ) from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    handed = ray.put((function, shared))
    remote = ray.remote(_task)
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    most = 2 * max(int(resources.get("CPU", 1)), 1)
    waiting = iter(tasks)
    running: list[Any] = []
    while True:
        while len(running) < most and (task := next(waiting, None)) is not None:
            running.append(remote.remote(handed, task))
        if not running:
            return
        done, running = ray.wait(running, num_returns=1)
        is_done, value = ray.get(done[0])
        if not is_done:
            for reference in running:
                ray.cancel(reference, force=True)
            raise value
        yield value


def _task(handed: Any, task: Any) -> tuple[bool, Any]:
    function, shared = handed
    return outcome(function, shared, task)


def outcome(function: Callable[[Any, Any], Any], shared: Any, task: Any) -> tuple[bool, Any]:
    """Run a task; an error is a result too, so that it can cross processes."""
    try:
        return True, function(shared, task)
    except VarlenError as error:
        return False, error
    except OSError as error:
        return False, OSError(error.errno, error.strerror or str(error), error.filename)
    except Exception as error:  # a bug of ours: its traceback would be lost with the process
        import traceback

        return False, RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
