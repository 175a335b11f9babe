"""A pool of processes on this machine that run tasks, started once per run."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from varlen.errors import SettingError, WorkerDiedError
from varlen.workers.child import CANNOT_BE_SENT, Child, await_end
from varlen.workers.processors import processors
from varlen.workers.task_worker import KEPT

Result = TypeVar("Result")
_AHEAD = 8  # tasks prepared in advance: the parts of one window, while the next one is planned


class Workers:
    """Fresh interpreters, each started when there is a task for it or when `start` is called."""

    def __init__(self, count: int) -> None:
        self._each = max(processors() // count, 1)
        self._workers: list[_Worker | None] = [None] * count
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def start(self) -> None:
        """Start all processes in the background."""
        for index in range(len(self._workers)):
            self._started(index)

    def _started(self, index: int) -> _Worker | None:
        with self._lock:  # so that none starts after `_kill`
            if not self._stopped.is_set() and self._workers[index] is None:
                self._workers[index] = _Worker(self._each)
            return self._workers[index]

    def run(
        self, function: Callable[[Any, Any], Result], shared: Any, tasks: Iterable[Any]
    ) -> Iterator[Result]:
        """Yield the results of all tasks as they complete, in any order; a failure stops all processes."""
        try:
            head = pickle.dumps((function, shared))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SettingError(CANNOT_BE_SENT.format(error=error)) from error
        waiting: SimpleQueue[Any] = SimpleQueue()
        results: SimpleQueue[Any] = SimpleQueue()
        room = threading.Semaphore(len(self._workers) + _AHEAD)
        indices = range(len(self._workers))

        def prepare() -> None:
            coming = iter(tasks)
            try:
                while (
                    room.acquire() and not self._stopped.is_set() and (task := next(coming, None)) is not None
                ):
                    waiting.put(task)
            except BaseException as error:  # of the caller's task iterator
                results.put((False, error))
            for _ in indices:
                waiting.put(None)

        def serve(index: int) -> None:
            try:
                while (task := waiting.get()) is not None:
                    room.release()
                    worker = None if self._stopped.is_set() else self._started(index)
                    if worker is None:
                        break
                    results.put(worker.ask(head, task))
            except BaseException as error:  # no process could be started
                results.put((False, error))
            results.put(None)

        threads = [threading.Thread(target=serve, args=(index,), daemon=True) for index in indices]
        threads.append(threading.Thread(target=prepare, daemon=True))
        is_over = False
        try:
            for thread in threads:
                thread.start()
            running = len(indices)
            while running:
                result = results.get()
                if result is None:
                    running -= 1
                    continue
                is_done, value = result
                if not is_done:
                    raise value
                yield value
            is_over = True
        finally:
            if not is_over:
                self._kill()
                room.release()
            for thread in threads:
                if thread.ident is not None:
                    await_end(thread)

    def _kill(self) -> None:
        """Kill all processes."""
        self._stopped.set()
        with self._lock:
            for worker in self._workers:
                if worker is not None:
                    worker.child.kill()

    def close(self) -> None:
        """Stop all processes, and close their pipes."""
        self._kill()
        for worker in self._workers:
            if worker is not None:
                worker.child.close()


class _Worker:
    """A process that runs one task at a time."""

    def __init__(self, threads: int) -> None:
        try:
            self.child = Child("varlen.workers.task_worker", threads=threads)
        except WorkerDiedError as error:
            raise WorkerDiedError(f"{error}; {KEPT}") from error.__cause__
        self._head = b""

    def ask(self, head: bytes, task: Any) -> tuple[bool, Any]:
        """Run a task; the function is only sent if it differs from the previous one."""
        given = pickle.dumps(task)
        try:
            if head != self._head:
                self.child.send(b"head" + head)
                self._head = head
            self.child.send(b"task" + given)
            reply = self.child.receive()
        except (EOFError, OSError):
            self.child.close()
            message = f"a process that worked on a part {self.child.end} (out of memory?); {KEPT}"
            return False, WorkerDiedError(message)
        return cast(tuple[bool, Any], pickle.loads(reply))
