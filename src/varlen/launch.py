"""How this process was launched: alone, or as one of several with the same command."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

# Environment variables of launchers for the number of processes and the rank. `SLURM_NTASKS` and `SLURM_PROCID` alone
# don't count: sbatch and salloc set them for a single process.
_LAUNCHERS = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
_NO_STEP = 0xFFFFFFF0  # Slurm's step ids from here on are of batch scripts and shells, not of srun


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One of several processes that were launched with the same command."""

    source: str  # source of the information: the name of a variable, or the process group
    size: str  # number of processes, as the source spells it
    rank: str | None  # from 0; None if unknown
    rank_code: str  # Python code for the rank
    size_code: str  # Python code for the number of processes

    @property
    def words(self) -> str:
        """A sentence about this process."""
        return f"this is one of {self.size} processes ({self.source})"

    @property
    def arguments(self) -> str:
        """Arguments for functions that take ranks."""
        return f"dp_rank={self.rank_code}, dp_world_size={self.size_code}"


def launched() -> Launch | None:
    """Return the launch of this process; None where it is alone, as far as known.

    Checked in this order: an initialised process group of torch.distributed, which is authoritative;
    `WORLD_SIZE=1` from torchrun, which is authoritative too; then `WORLD_SIZE` and the variables of Open MPI, PMI and
    Slurm, of which a single one above 1 is enough. Doesn't import torch.
    """
    group = _process_group()
    if group is not None:
        return group if group.size != "1" else None
    if os.environ.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    for size, rank in _LAUNCHERS:
        count = os.environ.get(size, "").strip()
        if not count or _is_one(count) or (size.startswith("SLURM") and not _is_step()):
            continue
        rank_value = os.environ.get(rank, "").strip() or None
        code = [f'int(os.environ["{name}"])' for name in (rank, size)]
        return Launch(source=size, size=count, rank=rank_value, rank_code=code[0], size_code=code[1])
    return None


def num_dataloader_workers() -> int:
    """Return the number of workers of the PyTorch DataLoader that this process belongs to; 0 if it is none."""
    data: Any = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    return 0 if worker is None else int(worker.num_workers)


def _process_group() -> Launch | None:
    distributed: Any = sys.modules.get("torch.distributed")
    # A module that another thread is importing lacks its names.
    is_there = getattr(distributed, "is_available", bool)() and distributed.is_initialized()
    if not is_there:
        return None
    return Launch(
        source="the process group of torch.distributed",
        size=str(distributed.get_world_size()),
        rank=str(distributed.get_rank()),
        rank_code="torch.distributed.get_rank()",
        size_code="torch.distributed.get_world_size()",
    )


def _is_one(text: str) -> bool:
    """Whether a launcher's number is at most 1; False for other text."""
    try:
        return int(text) <= 1
    except ValueError:
        return False


def _is_step() -> bool:
    """Whether srun started this process, rather than a batch script or shell."""
    step = os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID") or "0"
    return step.isdigit() and int(step) < _NO_STEP
