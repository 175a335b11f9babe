"""How this process was started: alone, or as one of several that a launcher started with the same command."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

_LAUNCHERS = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
"""Variables that launchers set in each process of a step: how many there are, and which this is.

`SLURM_NTASKS` and `SLURM_PROCID` alone say nothing: sbatch and salloc set them for a single process.
"""
_NO_STEP = 0xFFFFFFF0
"""Ids of Slurm's steps from here on are of a batch script or a shell, not of what srun starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Several processes that were started with the same command."""

    said_by: str
    """What says so: the name of a variable, or the process group."""
    size: str
    """How many, as that has it."""
    rank: str | None
    """Which this is, from 0; None where nothing says so."""
    rank_code: str
    """Python that gives the rank."""
    size_code: str
    """Python that gives the number."""

    @property
    def said(self) -> str:
        """What this process is, in words."""
        return f"this is one of {self.size} processes ({self.said_by})"

    @property
    def arguments(self) -> str:
        """What to pass to whatever takes ranks."""
        return f"dp_rank={self.rank_code}, dp_world_size={self.size_code}"


def launched() -> Launch | None:
    """Return the processes that this one is one of; None where it is alone, as far as can be known.

    Asked in this order: an initialised process group of torch.distributed, which knows; the number that torchrun
    gives, which knows as well; then `WORLD_SIZE`, Open MPI's, PMI's and Slurm's, of which one above 1 is enough.
    torch is not imported.
    """
    group = _process_group()
    if group is not None:
        return group if group.size != "1" else None
    if os.environ.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    for size, rank in _LAUNCHERS:
        said = os.environ.get(size, "").strip()
        if not said or _is_one(said) or (size.startswith("SLURM") and not _is_step()):
            continue
        told = os.environ.get(rank, "").strip() or None
        code = [f'int(os.environ["{name}"])' for name in (rank, size)]
        return Launch(said_by=size, size=said, rank=told, rank_code=code[0], size_code=code[1])
    return None


def loading_workers() -> int:
    """Return how many worker processes of PyTorch's DataLoader this is one of; 0 in any other process."""
    data: Any = sys.modules.get("torch.utils.data")
    told = None if data is None else data.get_worker_info()
    return 0 if told is None else int(told.num_workers)


def _process_group() -> Launch | None:
    distributed: Any = sys.modules.get("torch.distributed")
    # A module that is being imported by another thread lacks its names.
    is_there = getattr(distributed, "is_available", bool)() and distributed.is_initialized()
    if not is_there:
        return None
    return Launch(
        said_by="the process group of torch.distributed",
        size=str(distributed.get_world_size()),
        rank=str(distributed.get_rank()),
        rank_code="torch.distributed.get_rank()",
        size_code="torch.distributed.get_world_size()",
    )


def _is_one(said: str) -> bool:
    """Whether a launcher's number is at most 1. What is no number may be any."""
    try:
        return int(said) <= 1
    except ValueError:
        return False


def _is_step() -> bool:
    """Whether srun started this process in a step of its own, and no batch script or shell did."""
    step = os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID") or "0"
    return step.isdigit() and int(step) < _NO_STEP
