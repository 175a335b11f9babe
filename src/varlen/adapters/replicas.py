"""How many replicas take part and which this is, for samplers whose originals ask torch.distributed."""

from __future__ import annotations

from typing import Any

from varlen.arguments import as_count
from varlen.batch.packed import import_torch
from varlen.errors import SettingError
from varlen.launch import launched


def as_replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of replicas and the rank."""
    if num_replicas is None or rank is None:
        group = _group()
        launch = launched()
        if group is None and (num_replicas != rank or launch is not None):
            several = (
                f"one of {launch.size} processes by {launch.said_by}" if launch else "in a process alone"
            )
            raise SettingError(
                f"num_replicas={num_replicas} and rank={rank} were given, {several}, and torch.distributed isn't "
                "initialised; pass both, or initialise it first"
            )
        here, size = group or (0, 1)
        num_replicas = size if num_replicas is None else num_replicas
        rank = here if rank is None else rank
    count = as_count(num_replicas, "num_replicas")
    return count, as_count(rank, "rank", 0, count - 1)


def as_num_replicas(num_replicas: int | None) -> int:
    """Return the number of replicas where one process deals for all of them."""
    return as_replicas(None, None)[0] if num_replicas is None else as_count(num_replicas, "num_replicas")


def check_processes(
    known: int,
    who: str = "accelerate",
    way: str = "on CPUs pass use_cpu=True or set ACCELERATE_USE_CPU=true",
) -> None:
    """Refuse a job of several processes of which the framework doesn't know, as on CPUs where nobody told it.

    Each process would take itself for the only one, train on all of the data, and share no gradient.
    """
    launch = launched()
    if launch is not None and launch.size != str(known):
        raise SettingError(
            f"{launch.said}, and {who} knows of {known:,}, so each would train on all of the data; {way}, and where "
            f"this process does train alone, unset {launch.said_by}"
        )


def _group() -> tuple[int, int] | None:
    """Rank and size of the default process group, or None where there is none."""
    distributed: Any = import_torch().distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()
