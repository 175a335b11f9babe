"""A fresh interpreter beside this one, which speaks through pipes: no fork, and no guard in the user's script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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


_LATER = ("decimal", "selectors", "socket", "subprocess", "tomllib")
"""Of Python's own, what modules import within functions, and what numba imports."""


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
