"""Which data-parallel rank this is, and how the packs of a step divide among ranks and batches."""

from __future__ import annotations

from varlen.errors import SettingError
from varlen.launch import launched, loading_workers
from varlen.pack.lengths import as_count


def as_ranks(dp_rank: int | None, dp_world_size: int | None) -> tuple[int, int]:
    """Return the data-parallel rank and world size.

    Args:
        dp_rank: from 0; ranks that share a replica (tensor, pipeline or context parallel) pass the same.
        dp_world_size: ranks that get different data.

    Raises:
        SettingError: one without the other, or a rank outside of the world.
    """
    if dp_rank is None and dp_world_size is None:
        return 0, 1
    if dp_rank is None or dp_world_size is None:
        given = "dp_rank" if dp_world_size is None else "dp_world_size"
        raise SettingError(f"only {given} was given; pass both dp_rank and dp_world_size, or neither")
    size = as_count(dp_world_size, "dp_world_size")
    return as_count(dp_rank, "dp_rank", 0, size - 1), size


def check_reader(*, is_ranked: bool) -> None:
    """Refuse to read where several processes would get the same data.

    Args:
        is_ranked: a rank and a world size were given.

    Raises:
        SettingError: they weren't, in a job of several processes; or this is a worker of PyTorch's DataLoader.
    """
    workers = loading_workers()
    if workers > 1 or (workers and not is_ranked):
        raise SettingError(
            f"this is one of {workers:,} worker processes of a DataLoader, each of which would get the same data; a "
            "PackedLoader makes its batches ahead in a process of its own: iterate it, or wrap it by "
            "DataLoader(dataset, batch_size=None, num_workers=0)"
        )
    launch = None if is_ranked else launched()
    if launch is not None:
        raise SettingError(
            f"{launch.said}, and each would get the same data; pass {launch.arguments}, or those of the "
            "data-parallel group where tensor, pipeline or context parallelism is used; where this process reads "
            "alone, pass dp_rank=0, dp_world_size=1"
        )


def as_batch_sizes(
    global_batch_size: int, micro_batch_size: int | None, dp_world_size: int
) -> tuple[int, int]:
    """Return the packs of a step, and those of a batch.

    Args:
        global_batch_size: packs of a step, over all ranks.
        micro_batch_size: packs of a batch; None for all that a rank takes in a step.
        dp_world_size: data-parallel ranks.

    Raises:
        SettingError: the packs of a step don't divide among the ranks and their batches; names the nearest that do.
    """
    whole = as_count(global_batch_size, "global_batch_size")
    micro = None if micro_batch_size is None else as_count(micro_batch_size, "micro_batch_size")
    at_once = dp_world_size * (micro or 1)
    if whole % at_once:
        below, above = whole // at_once * at_once, -(-whole // at_once) * at_once
        nearest = f"{below:,} or {above:,}" if below else f"{above:,}"
        by = f"{dp_world_size:,} ranks" + (f" with batches of {micro:,}" if micro else "")
        raise SettingError(
            f"global_batch_size {whole:,} doesn't divide among {by}; pass a multiple of {at_once:,}: {nearest}"
        )
    return whole, micro or whole // dp_world_size
