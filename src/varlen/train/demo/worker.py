"""A process of its own for every run, so that its memory is its own and can be measured.

The processes are forked from a server that has imported torch and compiled the kernels, and runs no thread
pool, while the parent never imports torch: six runs start in the time of one.
"""

from __future__ import annotations

import os
import signal
import traceback
from contextlib import suppress
from multiprocessing import forkserver, get_context, resource_tracker, util
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from varlen.errors import InputError, VarlenError

if TYPE_CHECKING:
    from varlen.train.demo.job import Job

_PRELOAD = ["varlen.train.demo.run", "varlen.train.demo.preload"]


def prepare() -> None:
    """Start importing torch in the background; the first `Worker` then starts at once.

    In all runs, threads that wait for one another sleep instead of spinning, so that CPU seconds count
    work; and Ctrl-C is the parent's to answer. The server imports nothing from the current folder.
    """
    before = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = before or "PASSIVE"
    starting: Any = util  # whose function both servers call
    flags = starting._args_from_interpreter_flags
    starting._args_from_interpreter_flags = lambda: ["-P", *flags()]  # with -E, PYTHONSAFEPATH isn't read
    resource_tracker.ensure_running()  # else the server starts it, and that unblocks the signal again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process inherits the mask
    try:
        forkserver.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        starting._args_from_interpreter_flags = flags
        if before is None:
            del os.environ["OMP_WAIT_POLICY"]


class Worker:
    """A run in a process of its own, which answers one request at a time."""

    def __init__(self, name: str, job: Job) -> None:
        """Start the process; it builds its model while the caller goes on."""
        prepare()
        context = get_context("forkserver")
        self._name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, job), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Return when the model is built and warm."""
        self._receive()

    def request(self, method: str, *arguments: Any) -> Any:
        """Call a method of the run and return what it returns."""
        with suppress(OSError):  # where the process is gone, receiving says how it ended
            self._connection.send((method, arguments))
        return self._receive()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.terminate()
        self._process.join()
        self._process.close()

    def _receive(self) -> Any:
        try:
            outcome, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            raise VarlenError(self._death_message()) from None
        if outcome == "refused":
            raise InputError(f"the run {self._name!r} can't be done: {value}")
        if outcome == "failed":
            raise VarlenError(f"the run {self._name!r} failed:\n{value}")
        return value

    def _death_message(self) -> str:
        """Return how the process ended and, if it was killed, what usually helps."""
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return (
                f"the run {self._name!r} was killed by the system, most likely for lack of memory; "
                "free some, or pass shorter documents with --data"
            )
        return f"the process of the run {self._name!r} ended unexpectedly with exit code {code}"


def _serve(connection: Connection, job: Job) -> None:
    """Build a run, then call its methods as asked until the parent hangs up."""
    from varlen.train.demo.run import Run

    try:
        run = Run(job)
        connection.send(("done", None))
        while True:
            method, arguments = connection.recv()
            connection.send(("done", getattr(run, method)(*arguments)))
    except EOFError:
        return
    except InputError as error:
        connection.send(("refused", str(error)))
    except Exception:
        connection.send(("failed", traceback.format_exc()))
