"""Time calls in alternating rounds (A B A B), so that both meet the same moods of the machine, and fresh processes.

And the memory that a process holds. `getrusage` won't do: on Linux a new process inherits the peak of the one that
started it.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.rows import Race, Samples

BLOCK_S = 0.02
"""A call shorter than this is repeated back to back until the block takes as long; a sample is the mean."""
_STATUS = Path("/proc/self/status")
TELLS_RESIDENT = _STATUS.exists()
"""Whether what is held now is known; elsewhere only what was held at most."""

Call = Callable[[], object]


def race(
    what: str,
    ours: tuple[str, Call],
    theirs: tuple[str, str, Call],
    *,
    rounds: int,
    **more: Any,
) -> Race:
    """Time two calls that were checked already: what is called and the call, of the peer its name before.

    `more` is the rest of `Race.of`: fills, tokens, target, note.
    """
    mine, peer = alternate(ours[1], theirs[2], rounds=rounds)
    return Race.of(what, (ours[0], mine), (*theirs[:2], peer), **more)


def alternate(ours: Call, peer: Call, *, rounds: int) -> tuple[Samples, Samples]:
    """Run both calls once unmeasured, then measure them in turns, on one core; afterwards all are free again.

    Sample i of one was taken right beside sample i of the other. What stands in memory by then is frozen for the
    garbage collector, and automatic collection is off, as in `timeit`. Both help the peers: they make many Python
    objects, and one of them calls `gc.collect()` itself.
    """
    with _one_core():
        calls = (ours, peer)
        repeats = [_repeats(call) for call in calls]
        samples = (Samples([], []), Samples([], []))
        gc.collect()
        gc.freeze()
        gc.disable()
        for _ in range(rounds):
            for call, repeat, taken in zip(calls, repeats, samples):
                wall, cpu = _block(call, repeat)
                taken.wall_s.append(wall)
                taken.cpu_s.append(cpu)
                gc.collect()
        gc.enable()
        gc.unfreeze()
    return samples


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep the process on one core meanwhile, with one thread in the libraries that would start more."""
    cores: set[int] = set()
    with suppress(AttributeError, OSError):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
    with suppress(ImportError):
        import pyarrow as pa

        pa.set_cpu_count(1)
    with suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    try:
        yield
    finally:
        if cores:  # processes that are started later begin where this one may run
            os.sched_setaffinity(0, cores)


def _repeats(call: Call) -> int:
    """Warm a call up, and return how often it fits into a block."""
    wall, _ = _block(call, 1)
    if wall < 1.0:  # a longer call needs no second one to be known as longer than a block
        wall, _ = _block(call, 1)
    return max(1, round(BLOCK_S / wall))


def _block(call: Call, repeat: int) -> tuple[float, float]:
    """Return the mean wall and processor seconds of one call out of `repeat` back to back."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - wall) / repeat, (time.process_time() - cpu) / repeat


def measure(program: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """Run Python source in a fresh interpreter with these arguments, and read the JSON of its last line of output.

    `environment` is set besides this process's. A process that fails is a RuntimeError with what it wrote to stderr.
    """
    return json.loads(
        output(["-c", program, *arguments], {**os.environ, **(environment or {})}).splitlines()[-1]
    )


def measure_call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a module's function returns in a fresh interpreter; both ways go by JSON, paths as texts."""
    program = """
import importlib, json, sys
module, name, given = sys.argv[1:]
print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(given))))
"""
    given = json.dumps(arguments, default=str)
    return measure(program, function.__module__, function.__name__, given)


def output(arguments: list[Any], environment: Mapping[str, str]) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"a measurement ended with code {done.returncode}:\n{done.stderr}")
    return done.stdout


def every_core() -> dict[str, str]:
    """Return this process's environment without the limits of threads that `python -m benchmarks` sets."""
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    return {name: value for name, value in os.environ.items() if name not in limits}


def forget_peak() -> None:
    """Let the peak start anew from what is held now; where that can't be done, it only comes out higher."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    return _status("VmHWM")


def resident_bytes() -> int:
    """Return the memory held now; on macOS the most held so far, so that differences are at least told."""
    return _status("VmRSS")


def _status(name: str) -> int:
    """Read a size from Linux's account of this process, or the peak from `getrusage` elsewhere."""
    if not TELLS_RESIDENT:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return int(kilobytes) * 1024
