"""`Peers`: the ranks that share a document, and what they tell each other of its keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from varlen.step_plan import StepPlan

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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

    def __init__(self, group: Any) -> None:
        """Take a group.

        Args:
            group: of torch.distributed, with this process in it.
        """
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

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
        _all_gather(out.flatten(0, 1), rows.contiguous(), group=self._group)
        return out

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """As `Peers.reduce_scatter`."""
        out = parts.new_empty(parts.shape[1:])
        _reduce_scatter(out, parts.contiguous().flatten(0, 1), group=self._group)
        return out


class PeerGroups:
    """The groups that one process has been in so far; each is made once in a job, when a plan first needs it."""

    def __init__(self, ranks: Sequence[int], rank: int, **settings: Any) -> None:
        """Take where data-parallel ranks are.

        Args:
            ranks: `[dp]`: the process of each data-parallel rank at this process's stage.
            rank: data-parallel, of this process.
            settings: for `torch.distributed.new_group`, such as `timeout` and `backend`.
        """
        self._ranks, self._rank, self._settings = ranks, rank, settings
        self._made: dict[tuple[int, int], ProcessPeers] = {}

    def of(self, plan: StepPlan) -> dict[tuple[int, int], Peers]:
        """Return the groups that a plan has this process in, by first data-parallel rank and size.

        Called by all processes of a stage before they run the plan: the members of a new group wait here for each
        other, and for no one else. Groups are aligned, so that of two that have a process in common one holds the
        other; the larger is made first everywhere, and no two wait for each other.

        Args:
            plan: of the step.
        """
        return {key: self._peers(*key) for key in groups_of(plan, self._rank)}

    def _peers(self, first: int, size: int) -> Peers:
        if (first, size) not in self._made:
            members = [self._ranks[rank] for rank in range(first, first + size)]
            group = dist.new_group(members, use_local_synchronization=True, **self._settings)
            self._made[first, size] = ProcessPeers(group)
        return self._made[first, size]


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
