"""`Peers`: the ranks that share a document, and what they tell each other of its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from varlen.runtime.ranks import Group
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
    """Peers in processes of their own; on CUDA their communicator is theirs alone.

    From the CPU each sends each other one what is for it. That is as many bytes as gloo's own collectives move, in
    one turn and at the rate of plain messages, of which gloo's reduce-scatter reaches a third.
    """

    def __init__(
        self, group: Group, waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Take a group.

        Args:
            group: with this process in it, which is asked for its connection at each call, so that a group that is
                closed is left by all.
            waiting: entered around every call of the group, in which the others are waited for.
        """
        self._group, self._waiting = group, waiting
        self._rank, self._size = group.index, group.size

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
        rows = rows.contiguous()
        out = rows.new_empty(self._size, *rows.shape)
        with self._waiting():
            if rows.is_cuda:
                self._group.backend._allgather_base(out.flatten(0, 1), rows).wait()
            else:
                others = [(self.rank + turn) % self.size for turn in range(1, self.size)]
                works = [self._group.receive(out[other], other) for other in others]
                works += [self._group.send(rows, other) for other in others]
                out[self.rank].copy_(rows)
                for work in works:
                    work.wait()
        return out

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """As `Peers.reduce_scatter`; from the CPU, parts are overwritten."""
        parts = parts.contiguous()
        out = parts.new_empty(parts.shape[1:])
        with self._waiting():
            if parts.is_cuda:
                self._group.backend._reduce_scatter_base(out, parts.flatten(0, 1)).wait()
            else:
                into = out
                for turn in range(1, self.size):
                    after, before = (self.rank + turn) % self.size, (self.rank - turn) % self.size
                    works = [self._group.receive(into, before), self._group.send(parts[after], after)]
                    for work in works:
                        work.wait()
                    out.add_(parts[self.rank] if turn == 1 else into)
                    into = parts[after]  # has been sent, so that no more memory is needed
        return out


def peers_of(
    plan: StepPlan,
    rank: int,
    group_of: Callable[[int, int], Group],
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
