"""`Peers`: the ranks that share a document, and what they tell each other of its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from varlen.step_plan import StepPlan


class Peers(Protocol):
    """A group of neighbouring data-parallel ranks at one stage. All of them call the same, in the same order."""

    @property
    def rank(self) -> int:
        """Of who calls, within the group."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what every rank gives, `[size, ...]`.

        Args:
            rows: `[...]`, of one shape and dtype on all ranks.
        """

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of what they have for this one, `[...]`.

        Args:
            parts: `[size, ...]`: for each rank, of one shape and dtype on all ranks.
        """


class ProcessPeers:
    """Peers in processes of their own; on CUDA their communicator is theirs alone."""

    def __init__(self, group: Any, waiting: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """Take a group.

        Args:
            group: with this process in it: a `ProcessGroup` of torch.distributed, or a backend such as
                `ProcessGroupNCCL`.
            waiting: entered around every call of the group, in which the others are waited for.
        """
        self._group, self._waiting = group, waiting
        self._rank, self._size = int(group.rank()), int(group.size())

    @property
    def rank(self) -> int:
        """As `Peers.rank`."""
        return self._rank

    @property
    def size(self) -> int:
        """As `Peers.size`."""
        return self._size

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """As `Peers.all_gather`."""
        out = rows.new_empty(self._size, *rows.shape)
        with self._waiting():
            self._group._allgather_base(out.flatten(0, 1), rows.contiguous()).wait()
        return out

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """As `Peers.reduce_scatter`."""
        out = parts.new_empty(parts.shape[1:])
        with self._waiting():
            self._group._reduce_scatter_base(out, parts.contiguous().flatten(0, 1)).wait()
        return out


def peers_of(
    plan: StepPlan,
    rank: int,
    group_of: Callable[[int, int], Any],
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[tuple[int, int], Peers]:
    """Return the groups in which a rank shares documents of a plan, by first data-parallel rank and size.

    Called by all processes of a stage before they run the plan: where members wait for each other to make a new
    group, it is for no one else. Groups are aligned, so that of two that have a process in common one holds the
    other; the larger is asked for first everywhere, and no two wait for each other.

    Args:
        plan: of the step.
        rank: data-parallel.
        group_of: returns what `ProcessPeers` takes, of neighbouring data-parallel ranks of this stage: given the
            first one, and how many; made once in a job, and not once a step.
        waiting: as for `ProcessPeers`.
    """
    return {key: ProcessPeers(group_of(*key), waiting) for key in groups_of(plan, rank)}


def groups_of(plan: StepPlan, rank: int) -> list[tuple[int, int]]:
    """Return the groups that share documents with a rank: first rank and size of each, the largest first.

    Args:
        plan: of the step.
        rank: data-parallel.
    """
    first, size = plan.first_ranks, plan.num_ranks
    mine = (size > 1) & (first <= rank) & (rank < first + size)
    pairs = set(zip(first[mine].tolist(), size[mine].tolist()))
    return sorted(pairs, key=lambda pair: -pair[1])
