"""Start a program on several ranks as torchrun would: `ranks.py RANKS MODULES PROGRAM ARGUMENTS`.

Each rank is a process of its own, forked after the libraries were imported, which takes longer than what is tested.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIBRARIES = "torch,transformers,accelerate"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""For processes side by side with models this small, in which a second thread would do nothing but wait."""
DEADLINE_S = 300


def as_ranks(
    *words: Any, ranks: int = 2, folder: Any = None, libraries: str = LIBRARIES, **variables: str
) -> str:
    """Run a program on ranks that find each other, or alone on one; returns what the first printed.

    Once one fails, or time is over, the others, which would wait for it, are ended.
    """
    paths = [str(ROOT / name) for name in ("tests", "examples", "src")]
    settings = {**os.environ, **ONE_THREAD, **variables}
    settings["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    settings.pop("VARLEN_JIT", None)  # so few documents are packed sooner in plain Python
    start = [__file__, str(ranks), libraries] if ranks > 1 else []
    command = [sys.executable, *start, *map(str, words)]
    with tempfile.TemporaryDirectory() as told, contextlib.ExitStack() as stack:
        kept = {"stdout": Path(told, "out"), "stderr": Path(told, "errors")}
        files: dict[str, Any] = {name: stack.enter_context(path.open("w")) for name, path in kept.items()}
        started = subprocess.Popen(command, env=settings, cwd=folder, start_new_session=True, **files)
        try:
            ended = started.wait(timeout=DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        assert ended == 0, f"ended with {ended}\n{kept['stderr'].read_text()[-6000:]}"
        return kept["stdout"].read_text()


def main() -> int:
    """Import, fork, and wait for all, or for the first that fails."""
    ranks, libraries, *words = sys.argv[1:]
    # Held to the end, so that nothing else is given this port while libraries are imported; who listens may share it.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    told = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()}
    for library in libraries.split(","):
        importlib.import_module(library)
    started = [run(rank, words) for rank in range(int(ranks))]
    for _ in started:
        _, status = os.wait()
        if status:
            return os.waitstatus_to_exitcode(status) or 1
    return 0


def run(rank: int, words: list[str]) -> int:
    """Fork a rank that runs the program; returns its process in the parent, and never in the rank."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
