"""Child processes: fresh interpreters that communicate over pipes, without fork or a guard in the user's script."""

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

# The code that a child runs: it imports the module and its dependencies before adding the current folder to the path.
# So a `json.py` in the current folder doesn't replace a module that the parent had imported from elsewhere: a
# notebook has the folder on its path, but started without it. Where the module itself is found only there, the folder
# is added at once.
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


CANNOT_BE_SENT = (
    "a tokenizer that is a function of this session can't be sent to other processes ({error}); put it into a "
    "module, or use one process (processes=1)"
)
MOST_DEATHS = 3  # consecutive deaths without a message after which a child isn't restarted
_STARTS_S = 1.0
_LATER = ("decimal", "selectors", "socket", "subprocess", "tomllib")  # imported within functions


class Child:
    """A process, and its message pipes; one thread may send while another receives."""

    def __init__(self, module: str, *arguments: str, threads: int, files: Sequence[int] = ()) -> None:
        self._process = fresh_interpreter(module, *arguments, threads=threads, files=files)
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def end(self) -> str:
        """How it ended, for a message."""
        code = self._process.returncode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"

    def send(self, message: bytes) -> None:
        """Send a message; raises OSError or ValueError if the process has ended."""
        send(cast(IO[bytes], self._process.stdin), message)

    def receive(self) -> bytes:
        """Wait for a message; raises EOFError or OSError if the process has ended."""
        return receive(cast(IO[bytes], self._process.stdout))

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def close(self) -> None:
        """Wait for its end, and close the pipes."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # unread messages
                cast(IO[bytes], pipe).close()


def supervise(
    start: Callable[[], Child | None], listen: Callable[[Child], bool], died: Callable[[Child], None]
) -> Child | None:
    """Restart a child each time it dies, until it dies three times without a message in between.

    `start` returns a child, or None to stop; `listen` receives messages until the child is gone, and returns whether
    there were any; `died` is called after the child has ended and its pipes are closed. Returns the last child; None
    if `start` returned None. Raises WorkerDiedError if none can be started.
    """
    in_a_row = 0
    while in_a_row < MOST_DEATHS:
        child = start()
        if child is None:
            return None
        had_message = listen(child)
        child.close()
        died(child)
        in_a_row = 1 if had_message else in_a_row + 1
    return child


def send(pipe: IO[bytes], content: bytes) -> None:
    """Write a message with its length."""
    pipe.write(struct.pack("<q", len(content)))
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """Read a message; raises EOFError if the other end is closed."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    size = struct.unpack("<q", head)[0]
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def await_end(thread: threading.Thread, seconds: float | None = None) -> None:
    """Wait for a thread to end, at most some seconds, even if Ctrl-C interrupted its start."""
    until = time.monotonic() + _STARTS_S
    while True:
        try:
            return thread.join(seconds)
        except RuntimeError:  # it hasn't reported its start, and may never do so
            if time.monotonic() > until:
                return None
            time.sleep(_STARTS_S / 100)


def fresh_interpreter(
    module: str, *arguments: str, threads: int, files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start the `main` of a module in a fresh interpreter, with pipes to its standard input and output.

    The child starts without the current folder and PYTHONPATH on its path, so that no file there shadows a standard
    module, and then takes over this process's `sys.path`, so that it imports the same modules.

    It has its own session, so that Ctrl-C reaches only this process, which then stops the others; schedulers'
    signals, which may go to every process of a job, don't end it either.
    """
    environment = {
        **os.environ,
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
    }
    search = environment.pop("PYTHONPATH", None)
    environment.pop("PYTHONINSPECT", None)  # otherwise the child would wait for input at its end
    path = [entry for entry in sys.path if isinstance(entry, str)]
    first = [entry for entry in path if not _is_here(entry)]
    start_arguments = json.dumps([first, path, [] if first == path else _LATER, search, module])
    try:
        with held_back():
            return subprocess.Popen(
                [sys.executable or "python", *_flags(), "-c", _BEGIN, start_arguments, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                pass_fds=tuple(files),
            )
    except OSError as error:
        raise WorkerDiedError(
            f"another process can't be started ({error.strerror or error}); end other processes, or raise this "
            "user's limits on processes, memory and open files (ulimit -a)"
        ) from error


def _flags() -> list[str]:
    """Return options that exclude the current folder, and this interpreter's options that affect imports."""
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
    """Whether an entry of `sys.path` is the current folder."""
    try:
        return not entry or Path(entry).samefile(".")
    except OSError:
        return False
