"""Start a program on several ranks as torchrun would: `ranks.py LIBRARIES`, told of each job by a line of JSON.

Each rank is a process of its own, forked after the libraries were imported, which takes longer than what is tested;
the process that has imported them stays for the jobs that come next.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "torch,transformers.trainer,transformers.models.llama.modeling_llama,accelerate,"
    "varlen.feed.lookup,varlen.adapters.hf"
)
"""By the modules that hold what programs use: transformers itself imports nothing until it is asked for."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""For processes side by side with models this small, in which a second thread would do nothing but wait."""
DEADLINE_S = 1200 if os.environ.get("VARLEN_HYPOTHESIS") == "soak" else 300


@dataclass(frozen=True)
class Starter:
    """A process that has imported libraries and forks jobs; and what it was started with."""

    process: subprocess.Popen[str]
    libraries: frozenset[str]
    settings: dict[str, str]
    errors: Path


_kept: list[Starter] = []
"""The last ones that were used, at most `MOST`; each holds half a gigabyte."""
MOST = 2
OF_JOBS = ("XDG_CACHE_HOME",)
"""Variables that no library reads when it is imported."""


def as_ranks(*words: Any, **settings: Any) -> str:
    """Run a program on ranks that find each other, or alone on one; returns what the first printed."""
    return both(*words, **settings)[0]


def both(
    *words: Any, ranks: int = 2, folder: Any = None, libraries: str = LIBRARIES, **variables: str
) -> tuple[str, str]:
    """As `as_ranks`; returns also what all said on the other stream.

    Once one fails, or time is over, the others, which would wait for it, are ended.
    """
    paths = [str(ROOT / name) for name in ("", "examples", "src")]
    settings = {**os.environ, **ONE_THREAD, **variables}
    settings["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    settings.pop("VARLEN_JIT", None)  # so few documents are packed sooner in plain Python
    settings.pop("PYTEST_CURRENT_TEST", None)
    own = {name: settings[name] for name in OF_JOBS if name in settings}
    starter = starter_of(frozenset(libraries.split(",")), {**settings, **dict.fromkeys(OF_JOBS, "")})
    with tempfile.TemporaryDirectory() as told:
        kept = {"stdout": f"{told}/out", "stderr": f"{told}/errors"}
        job = {"ranks": ranks, "words": [*map(str, words)], "folder": str(folder or Path.cwd()), **kept}
        job["environment"] = own
        tell(starter, json.dumps(job))
        group = int(heard(starter) or "0")
        ended = heard(starter)
        if ended is None:
            os.killpg(group, signal.SIGKILL)
            ended = heard(starter)
        said = Path(kept["stderr"]).read_text()
        assert ended == "0", f"ended with {ended}\n{said[-6000:]}"
        return Path(kept["stdout"]).read_text(), said


def starter_of(libraries: frozenset[str], settings: dict[str, str]) -> Starter:
    """Return a starter that has these libraries, imported under these variables: a kept or a new one."""
    for one in _kept:
        if libraries <= one.libraries and one.settings == settings and one.process.poll() is None:
            _kept.remove(one)
            _kept.insert(0, one)
            return one
    end(_kept[MOST - 1 :])
    handle, errors = tempfile.mkstemp()
    process = subprocess.Popen(
        [sys.executable, __file__, ",".join(sorted(libraries))],
        env=settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=handle,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    os.close(handle)
    _kept.insert(0, Starter(process, libraries, settings, Path(errors)))
    return _kept[0]


def end(starters: list[Starter]) -> None:
    """End processes, and keep them no longer."""
    for starter in [*starters]:
        with starter.process as process:
            process.kill()
        starter.errors.unlink(missing_ok=True)
        _kept.remove(starter)


atexit.register(end, _kept)


def tell(starter: Starter, line: str) -> None:
    assert starter.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # what it ended of is said where its answer is read
        starter.process.stdin.write(line + "\n")


def heard(starter: Starter) -> str | None:
    """The next line of the starter, or None if it says nothing for the longest time that a job may take."""
    said = starter.process.stdout
    assert said is not None
    if not select.select([said], [], [], DEADLINE_S)[0]:
        return None
    line = said.readline().strip()
    assert line, f"{starter.libraries} can't be imported\n{starter.errors.read_text()[-6000:]}"
    return line


def main() -> None:
    """Import, then fork a process for each job, say its number, wait for it, and say what it ended with."""
    for library in sys.argv[1].split(","):
        importlib.import_module(library)
    # Accelerate asks for a garbage collection whenever a Trainer begins; what is imported is none.
    gc.freeze()
    # What libraries and programs print is no answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            os.setsid()
            os.chdir(job["folder"])
            os.environ |= job["environment"]
            for number, name in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
            answers.close()
            leave(program if job["ranks"] == 1 else partial(as_torchrun, job["ranks"]), job["words"])
        answers.write(f"{child}\n")
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")


def as_torchrun(ranks: int, words: list[str]) -> None:
    """Fork the ranks, and wait for all, or for the first that fails."""
    # Held to the end, so that nothing else is given this port while ranks start; who listens may share it.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    told = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()}
    for rank in range(ranks):
        if not os.fork():
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            leave(program, words)
    for _ in range(ranks):
        _, status = os.wait()
        if status:
            sys.exit(os.waitstatus_to_exitcode(status) or 1)


def program(words: list[str]) -> None:
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


def leave(work: Callable[[list[str]], None], words: list[str]) -> None:
    """Run a program in a process that was forked for it, and end the process."""
    code = 1
    try:
        work(words)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
