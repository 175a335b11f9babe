"""Children of this process by fork from one that has imported varlen and numba, which takes a child a second.

A test process has one such template, `forked.py SOCKET`, from its first child on. What it forks is a child of the
test process (CLONE_PARENT), which waits for it as for any other. Tests of fresh interpreters have fresh ones.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOADED = (
    *("varlen.feed.worker.main", "varlen.workers.task_worker", "varlen.plan.planner_worker"),
    *("varlen.offline.index", "varlen.offline.pack", "varlen.train.affordable", "pyarrow.parquet"),
)
READ_AT_IMPORT = ("VARLEN", "NUMBA", "OMP", "MKL", "OPENBLAS", "PYTHON", "LD_")
"""How variables begin that are read but once: where they differ, a child is a fresh interpreter."""
IS_POSSIBLE = sys.platform == "linux" and os.uname().machine == "x86_64"
_CLONE, _CLONE_PARENT = 56, 0x8000
_HIGH = 500
"""Files are brought above all that may be asked for before each is given its number."""


class Template:
    """The process that forks, and the socket that it listens to."""

    def __init__(self) -> None:
        self.lock, self.owner, self.settings = threading.Lock(), os.getpid(), _settings(AT_FIRST)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno()), str(ROOT / "src")],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=AT_FIRST,
        )
        theirs.close()
        atexit.register(self.close)

    def close(self) -> None:
        if os.getpid() == self.owner:
            self.socket.close()
            self.process.kill()
            self.process.wait()

    def forked(self, job: dict[str, Any], files: list[int]) -> int:
        """Fork a child; returns its number."""
        with self.lock:
            socket.send_fds(self.socket, [json.dumps(job).encode()], files)
            return int(self.socket.recv(100))


AT_FIRST: dict[str, str] = {}  # what a run of tests begins with, and not what one sets for its own children
_template: list[Template] = []


def _settings(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


_PYTHON = sys.executable


class ForkedPopen(subprocess.Popen[bytes]):
    """A child as `varlen.workers.child` starts it, by fork where nothing is asked for that a fork can't have."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        pass_fds, env, p2cread, c2pwrite = (given[number] for number in (3, 5, 9, 12))
        told = args[args.index("-c") + 2 :] if "-c" in args else []
        if args[0] != _PYTHON or not self._can_fork(told, env):
            super()._execute_child(args, *given)
            return
        _, path, _, search, module = json.loads(told[0])
        environment = env if search is None else {**env, "PYTHONPATH": search}
        job = {"path": path, "words": [module, *told[1:]], "environment": environment}
        job |= {"folder": str(Path.cwd()), "numbers": [0, 1, 2, *pass_fds]}
        job["mask"] = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
        self.pid = _template[0].forked(job, [p2cread, c2pwrite, 2, *pass_fds])
        self._child_created = True
        os.close(p2cread)
        os.close(c2pwrite)

    @staticmethod
    def _can_fork(told: list[str], environment: dict[str, str]) -> bool:
        if not told:
            return False
        if not _template:
            _template.append(Template())
        kept, name = _template[0].settings, "PYTHONPATH"
        wanted = _settings(environment)
        return os.getpid() == _template[0].owner and {**wanted, name: ""} == {**kept, name: ""}


FORKING = SimpleNamespace(Popen=ForkedPopen, PIPE=subprocess.PIPE)
"""What `varlen.workers.child` is given for the module `subprocess`."""


def make_batches() -> None:
    import varlen as vl

    rows = [{"input_ids": list(range(n))} for n in range(2, 40)]
    with tempfile.TemporaryDirectory() as os.environ["XDG_CACHE_HOME"]:
        for mode in ("indexed", "streaming"):
            with vl.PackedLoader(rows, capacity=40, global_batch_size=2, mode=mode, worker="thread") as made:
                next(made)


def make_plan() -> None:
    import varlen as vl

    cost = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))
    vl.plan_step([100, 40, 3000, 20, 111, 5], cost=cost, mesh=vl.Mesh(dp=8))


KERNELS = {"varlen.feed.worker.main": make_batches, "varlen.plan.planner_worker": make_plan}
"""By the module of a child, what loads its kernels before the first one is forked."""


def main() -> None:
    """Import, then fork a child for each job."""
    own = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:0] = [sys.argv[2]]
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    system, used = ctypes.PyDLL(None), set()
    while True:
        message, files, _, _ = socket.recv_fds(own, 1 << 20, 64)
        if not message:
            return
        job = json.loads(message)
        if job["words"][0] not in used:
            used.add(job["words"][0])
            KERNELS.get(job["words"][0], int)()
        ctypes.pythonapi.PyOS_BeforeFork()
        child = system.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if child == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            own.close()
            become(job, list(files))
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        for file in files:
            os.close(file)
        own.send(str(child).encode())


def become(job: dict[str, Any], files: list[int]) -> None:
    """Be the child of a job, to the end."""
    code = 1
    try:
        os.setsid()
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
        for file in files:
            os.close(file)
        for file, number in zip(high, job["numbers"]):
            os.dup2(file, number, inheritable=True)
            os.close(file)
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        tempfile.tempdir = None  # looked up anew
        signal.pthread_sigmask(signal.SIG_SETMASK, job["mask"])
        module, sys.argv = job["words"][0], job["words"]
        sys.path[:] = job["path"]
        importlib.import_module(module).main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
