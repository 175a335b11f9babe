"""Processes of this machine that run tasks, hired once for all the work of a run."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any, TypeVar, cast

from varlen.errors import SettingError, WorkerDiedError
from varlen.files.retry import await_end
from varlen.offline.interpreter import fresh_interpreter
from varlen.offline.processors import processors
from varlen.offline.tasks import KEPT, NOT_FOUND, receive, send

Result = TypeVar("Result")
_AHEAD = 8
"""Tasks made ahead of the processes: the parts of a window, while the next one is planned."""


class Workers:
    """A number of fresh interpreters, each started when there is a task for it or when `start` asks for all."""

    def __init__(self, count: int) -> None:
        self._each = max(processors() // count, 1)
        self._workers: list[_Worker | None] = [None] * count
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def start(self) -> None:
        """Start all of them, while something else is done here."""
        for place in range(len(self._workers)):
            self._hired(place)

    def _hired(self, place: int) -> _Worker | None:
        with self._lock:  # so that none starts behind the back of who stops them
            if not self._stopped.is_set() and self._workers[place] is None:
                self._workers[place] = _Worker(self._each)
            return self._workers[place]

    def run(
        self, function: Callable[[Any, Any], Result], shared: Any, tasks: Iterable[Any]
    ) -> Iterator[Result]:
        """Yield the results of all tasks as they are done, in any order; after a failure nobody is left."""
        try:
            head = pickle.dumps((function, shared))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SettingError(NOT_FOUND.format(error=error)) from error
        waiting: SimpleQueue[Any] = SimpleQueue()
        results: SimpleQueue[Any] = SimpleQueue()
        room = threading.Semaphore(len(self._workers) + _AHEAD)
        places = range(len(self._workers))

        def prepare() -> None:
            coming = iter(tasks)
            try:
                while (
                    room.acquire() and not self._stopped.is_set() and (task := next(coming, None)) is not None
                ):
                    waiting.put(task)
            except BaseException as error:  # from the iterator of tasks: it belongs to the caller
                results.put((False, error))
            for _ in places:
                waiting.put(None)

        def serve(place: int) -> None:
            try:
                while (task := waiting.get()) is not None:
                    room.release()
                    worker = None if self._stopped.is_set() else self._hired(place)
                    if worker is None:
                        break
                    results.put(worker.ask(head, task))
            except BaseException as error:  # no process could be started
                results.put((False, error))
            results.put(None)

        threads = [threading.Thread(target=serve, args=(place,), daemon=True) for place in places]
        threads.append(threading.Thread(target=prepare, daemon=True))
        is_over = False
        try:
            for thread in threads:
                thread.start()
            running = len(places)
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
        """Stop everybody, whatever they do."""
        self._stopped.set()
        with self._lock:
            for worker in self._workers:
                if worker is not None:
                    worker.process.kill()

    def close(self) -> None:
        """Leave neither a process nor a pipe behind."""
        self._kill()
        for worker in self._workers:
            if worker is not None:
                worker.close()


class _Worker:
    """A process that runs one task at a time."""

    def __init__(self, threads: int) -> None:
        self.process = fresh_interpreter("varlen.offline.worker", threads=threads)
        self._head = b""

    def ask(self, head: bytes, task: Any) -> tuple[bool, Any]:
        """Have a task done; returns what `outcome` said, or that the process is gone."""
        given = pickle.dumps(task)
        try:
            to = cast(IO[bytes], self.process.stdin)
            if head != self._head:
                send(to, b"head" + head)
                self._head = head
            send(to, b"task" + given)
            answer = receive(cast(IO[bytes], self.process.stdout))
        except (EOFError, OSError):
            self.process.wait()
            return False, _death(self.process.returncode)
        return cast(tuple[bool, Any], pickle.loads(answer))

    def close(self) -> None:
        """Wait for the end, and close the pipes, once nobody asks any more."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what it had not read yet
                    pipe.close()


def _death(code: int | None) -> WorkerDiedError:
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
    return WorkerDiedError(f"a process that worked on a part {how} (out of memory?); {KEPT}")
