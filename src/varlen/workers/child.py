"""A child is a fresh interpreter that speaks through pipes: no fork, and no guard in the user's script."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from varlen.errors import WorkerDiedError
from varlen.signals import held_back

_BEGIN = """
import sys
from importlib import import_module
from json import loads
first, path, later, search, module = loads(sys.argv[1])
del sys.argv[0]
sys.argv[0] = module
sys.path[:] = first
for name in later:
    import_module(name)
try:
    import_module(module)
except ImportError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "varlen"]:
        del sys.modules[name]
    sys.path[:] = path
sys.path[:] = path
if search is not None:
    import os
    os.environ["PYTHONPATH"] = search
import_module(module).main()
"""
"""What a child runs: it imports all that the module needs before the current folder, and then takes it in, too.

So a `json.py` in the current folder stands for nothing that the parent had imported before it looked there: a
notebook has the folder on its path, but began without it. Where the module itself is found only there, the folder is
taken in at once.
"""


CANNOT_BE_SENT = (
    "a tokenizer that is a function of this session can't be handed to other processes ({error}); put it into a "
    "module, or use one process (processes=1)"
)
MOST_DEATHS = 3
"""Deaths one after the other, without a message between them, after which it is no accident."""
_STARTS_S = 1.0
_LATER = ("decimal", "selectors", "socket", "subprocess", "tomllib")
"""Of Python's own, what modules import within functions, and what numba imports."""


class Child:
    """A process, and the messages to it and from it; one thread may send while another one receives."""

    def __init__(self, module: str, *arguments: str, threads: int, files: Sequence[int] = ()) -> None:
        """Start it; arguments as `fresh_interpreter` takes them."""
        self._process = fresh_interpreter(module, *arguments, threads=threads, files=files)
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def end(self) -> str:
        """How it ended, for a sentence."""
        code = self._process.returncode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"

    def send(self, message: bytes) -> None:
        """Send a message; an OSError or ValueError says that it is gone."""
        send(cast(IO[bytes], self._process.stdin), message)

    def receive(self) -> bytes:
        """Wait for a message; an EOFError or OSError says that it is gone."""
        return receive(cast(IO[bytes], self._process.stdout))

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Wait for its end, and close the pipes."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what it had not read yet
                cast(IO[bytes], pipe).close()


def supervise(
    start: Callable[[], Child | None], listen: Callable[[Child], bool], died: Callable[[Child], None]
) -> Child | None:
    """Replace a child each time that it dies, until it dies three times without a message between.

    Args:
        start: returns a child, or None where none is wanted any more.
        listen: takes the child's messages until it is gone; returns whether there was one.
        died: is called once the child has ended and its pipes are closed.

    Returns:
        The last child; None where `start` gave none.

    Raises:
        WorkerDiedError: none can be started.
    """
    in_a_row = 0
    while in_a_row < MOST_DEATHS:
        child = start()
        if child is None:
            return None
        is_heard = listen(child)
        child.close()
        died(child)
        in_a_row = 1 if is_heard else in_a_row + 1
    return child


def send(pipe: IO[bytes], content: bytes) -> None:
    """Write a message and its length."""
    pipe.write(struct.pack("<q", len(content)))
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """Read a message; an EOFError says that the other end is gone."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    size = struct.unpack("<q", head)[0]
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Run something in a thread that doesn't keep the process alive."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def await_end(thread: threading.Thread, seconds: float | None = None) -> None:
    """Wait until a thread has ended, at most some seconds; also for one whose start Ctrl-C has interrupted."""
    until = time.monotonic() + _STARTS_S
    while True:
        try:
            return thread.join(seconds)
        except RuntimeError:  # it hasn't said yet that it runs, and may never do so
            if time.monotonic() > until:
                return None
            time.sleep(_STARTS_S / 100)


def fresh_interpreter(
    module: str, *arguments: str, threads: int, files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start the `main` of a module in an interpreter of its own, with pipes to its standard input and output.

    The child begins without the current folder and PYTHONPATH on its path, so that no file there stands for a module
    of Python's own, and then takes this process's `sys.path` as it is: what is imported here is imported there.

    It is a session of its own, so that Ctrl-C is for this process alone, which then stops the others; signals of
    schedulers, which may go to every process of a job, don't end it either.
    """
    environment = {
        **os.environ,
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
    }
    search = environment.pop("PYTHONPATH", None)
    environment.pop("PYTHONINSPECT", None)  # it would keep the child waiting for commands at its end
    path = [entry for entry in sys.path if isinstance(entry, str)]
    first = [entry for entry in path if not _is_here(entry)]
    told = json.dumps([first, path, [] if first == path else _LATER, search, module])
    try:
        with held_back():
            return subprocess.Popen(
                [sys.executable or "python", *_flags(), "-c", _BEGIN, told, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                pass_fds=tuple(files),
            )
    except OSError as error:
        raise WorkerDiedError(
            f"no other process can be started ({error.strerror or error}); what is finished is kept: run the same "
            "again with fewer processes"
        ) from error


def _flags() -> list[str]:
    """Return options that leave the current folder out, and those of this interpreter that say what is imported."""
    flags = sys.flags
    chosen = {
        "-I": flags.isolated,
        "-E": flags.ignore_environment,
        "-s": flags.no_user_site,
        "-S": flags.no_site,
    }
    others = {"-B": sys.dont_write_bytecode, "-Xutf8=1": flags.utf8_mode}
    return ["-P", *(flag for flag, is_set in (chosen | others).items() if is_set)]


def _is_here(entry: str) -> bool:
    """Return whether an entry of `sys.path` is the current folder."""
    try:
        return not entry or Path(entry).samefile(".")
    except OSError:
        return False
