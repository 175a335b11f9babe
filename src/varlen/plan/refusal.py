"""Why memory holds no plan of a step, and what it would hold: documents of which length, or which mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from varlen.cost.model import CostModel
from varlen.counts import many
from varlen.step_plan import Mesh
from varlen.types import Int32Array

_MOST_DOUBLINGS = 6
"""Of context parallelism, that are tried before none is advised."""
Holds = Callable[[Int32Array, Mesh], bool]
"""Whether memory holds a plan of lengths on a mesh."""


def refusal(
    lengths: Int32Array,
    repairs: Sequence[CostModel],
    mesh: Mesh,
    holds: Holds,
    most_ranks: int,
    *,
    is_limited: bool,
) -> str:
    """Say why no plan fits, and what would.

    Args:
        lengths: int32 `[num_documents]`, of which no plan fits.
        repairs: what was tried, the most sparing with memory last.
        mesh: the GPUs.
        holds: asked of single documents, and of the longest on wider meshes.
        most_ranks: data-parallel ranks that may share a document.
        is_limited: whether there would be more to try.

    Cost: some twenty plans of one document.
    """
    memory = repairs[-1].memory(mesh)
    room, limit = memory.limit_bytes - memory.state_bytes, f"{memory.limit_bytes / 1e9:,.1f} GB"
    worst = int(room.argmin())
    if room[worst] <= 0:
        can_shard = mesh.sharding != "parameters" and mesh.dp * mesh.cp > 1
        return (
            f"parameters, gradients and optimizer states take {memory.state_bytes[worst] / 1e9:,.1f} GB on stage "
            f"{worst} of {mesh.pp}, and a GPU may use {limit}; use more pp or tp"
            + (f", or sharding='parameters' (now {mesh.sharding!r})" if can_shard else "")
        )
    longest = int(lengths.max())
    most = repairs[-1]
    share = f" of {most.recompute_share:.0%} of layers" if most.recompute_share < 1 else ""
    tried = f"recompute={most.recompute!r}{share}, offload={most.offload!r}"
    tried = f"up to {tried}" if len(repairs) > 1 else tried
    tried += ", and Search(repairs=False) tries no more" if is_limited else ""
    fits = _longest(longest, mesh, holds)
    if fits == longest:
        return (
            f"no plan of this method fits into the {limit} that a GPU may use ({tried}), though each document would "
            "alone; use another method, more pp or tp, or fewer documents a step"
        )
    per_row = (memory.held_bytes + memory.gradient_bytes).reshape(-1, mesh.pp).sum(axis=0)
    tight, ranks = int((room / per_row).argmin()), most_ranks * mesh.cp
    wider = _wider(longest, mesh, holds)
    too_long = many(int((lengths > fits).sum()), "document is too long", "documents are too long")
    return (
        f"document {int(lengths.argmax()):,} has {longest:,} tokens, too many for the {many(ranks, 'rank')} that may "
        f"share it ({too_long}): beside its states a GPU of stage {tight} of {mesh.pp} may use "
        f"{room[tight] / 1e9:,.1f} GB ({tried}); alone, documents of up to {fits:,} tokens would fit"
        + (f", or a mesh of cp={wider}" if wider else "")
    )


def _longest(longest: int, mesh: Mesh, holds: Holds) -> int:
    """The longest document, up to one, that memory holds alone."""
    if holds(np.array([longest], np.int32), mesh):
        return longest
    fits, over = 0, longest
    while over - fits > 1:
        middle = (fits + over) // 2
        if holds(np.array([middle], np.int32), mesh):
            fits = middle
        else:
            over = middle
    return fits


def _wider(longest: int, mesh: Mesh, holds: Holds) -> int | None:
    """The least context parallelism with which memory holds a document alone, by doubling; None if far away."""
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        cp = mesh.cp << doublings
        if holds(np.array([longest], np.int32), replace(mesh, cp=cp)):
            return cp
    return None
