"""How fast two processes of this machine send each other rows: latency and bytes a second."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from varlen.cost.hardware import Link

SMALL, LARGE = 1024, 4 * 2**20
TURNS = 15


def measured(rank: int) -> Link:
    """Return the link between the first two ranks; all ranks call it, and those two wait for each other."""
    if rank > 1:
        return Link(latency_s=1e-4, bytes_per_s=1e9)
    seconds = []
    for size in (SMALL, LARGE):
        rows, taken = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(TURNS):
            begun = time.perf_counter()
            if rank == 0:
                dist.send(rows, 1)
                dist.recv(rows, 1)
            else:
                dist.recv(rows, 0)
                dist.send(rows, 0)
            taken.append((time.perf_counter() - begun) / 2)
        seconds.append(median(taken))
    per_byte = max(1e-12, (seconds[1] - seconds[0]) / (LARGE - SMALL))
    return Link(latency_s=max(1e-7, seconds[0] - SMALL * per_byte), bytes_per_s=1 / per_byte)
