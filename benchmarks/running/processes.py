"""Several processes of one thread each: what a function returns on all of them, and how fast two exchange rows.

Two processes send at once into memory that is new each time, between computations, as ranks do that share a document
and neighbouring stages in the steady state of a pipeline: on a CPU either side's copies take the time of the other's,
caches hold what was computed last, and a message may wait for a turn of the scheduler. That is why means are taken,
over turns spread among what else is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from varlen.cost.hardware import Link

PATIENCE_S = 1800


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def side_by_side(run: Callable[..., Any], count: int, *words: Any) -> list[Any]:
    """Return what `run(rank, *words)` returns on each process of a torch.distributed job over gloo."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        given = pickle.dumps((run, words))
        processes = [
            context.Process(target=_rank, args=(given, rank, count, port, folder)) for rank in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE_S)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
            raise RuntimeError(f"processes ended with {[process.exitcode for process in processes]}")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(count)]


def _rank(given: bytes, rank: int, count: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=600))
    run, words = pickle.loads(given)
    found = run(rank, *words)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


SMALL, LARGE = 1024, 4 * 2**20
TURNS = 12
ROWS = 1024
"""Of a square matrix that is multiplied before each turn."""
LEFT_OUT = 0.05
"""Share of turns, the longest, that don't count."""


class Turns(NamedTuple):
    """Seconds of exchanges of `SMALL` and of `LARGE` bytes."""

    small: list[float]
    large: list[float]


def turns(rank: int) -> Turns:
    """Exchange between the first two ranks; all ranks call it, and those two wait for each other."""
    found = Turns([], [])
    matrix = torch.randn(ROWS, ROWS)
    for size, taken in zip((SMALL, LARGE), found):
        rows = torch.zeros(size, dtype=torch.uint8)
        for _ in range(TURNS if rank < 2 else 0):
            matrix = (matrix @ matrix).tanh_()
            _exchange(rows[:1], 1 - rank)  # so that both begin together
            begun = time.perf_counter()
            _exchange(rows, 1 - rank)
            taken.append(time.perf_counter() - begun)
    return found


def link_of(rounds: Sequence[Turns]) -> Link:
    """Return the link that turns were taken on."""
    small, large = (_mean([seconds for turn in rounds for seconds in turn[at]]) for at in (0, 1))
    per_byte = max(1e-12, (large - small) / (LARGE - SMALL))
    return Link(latency_s=max(1e-7, small - SMALL * per_byte), bytes_per_s=1 / per_byte)


def _mean(seconds: list[float]) -> float:
    kept = np.sort(seconds)[: max(1, round(len(seconds) * (1 - LEFT_OUT)))]
    return float(kept.mean())


def _exchange(rows: torch.Tensor, other: int) -> None:
    into = torch.empty_like(rows)
    works = [dist.irecv(into, other), dist.isend(rows, other)]
    for work in works:
        assert work is not None
        work.wait()
