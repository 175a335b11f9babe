"""Why memory holds no plan of a step, and what it would hold: documents of which length, or which mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from varlen.cost.model import CostModel
from varlen.counts import many
from varlen.errors import SettingError
from varlen.step_plan import Mesh
from varlen.types import Int32Array

_MOST_DOUBLINGS = 6
"""Of context parallelism, that are tried before none is advised."""
_MOST_TP = 16
"""Tensor parallelism that is looked at; more doesn't stay within a node."""
_MOST_SHARDING = 12
"""Doublings of data parallelism that sharding is looked at with."""
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
        return (
            f"parameters, gradients and optimizer states take {memory.state_bytes[worst] / 1e9:,.1f} GB on stage "
            f"{worst} of {mesh.pp}, and a GPU may use {limit}; {_more(repairs[-1], mesh)}"
        )
    longest = int(lengths.max())
    most = repairs[-1]
    share = f" of {most.recompute_share:.0%} of layers" if most.recompute_share < 1 else ""
    tried = f"recompute={most.recompute!r}{share}, offload={most.offload!r}"
    tried = f"up to {tried}" if len(repairs) > 1 else tried
    tried += ", and no more of them may be tried" if is_limited else ""
    fits = _longest(longest, mesh, holds)
    if fits == longest:
        return (
            f"no plan of this method fits into the {limit} that a GPU may use ({tried}), though each document would "
            "alone; use another method, more pp or tp, or fewer documents a step"
        )
    per_row = (
        (memory.held_bytes + memory.gradient_bytes + 3 * memory.near_bytes).reshape(-1, mesh.pp).sum(axis=0)
    )
    tight, ranks = int((room / per_row).argmin()), most_ranks * mesh.cp
    wider = _wider(longest, mesh, holds)
    too_long = many(int((lengths > fits).sum()), "document is too long", "documents are too long")
    return (
        f"document {int(lengths.argmax()):,} has {longest:,} tokens, too many for the {many(ranks, 'rank')} that may "
        f"share it ({too_long}): beside its states a GPU of stage {tight} of {mesh.pp} may use "
        f"{room[tight] / 1e9:,.1f} GB ({tried}); alone, documents of up to {fits:,} tokens would fit"
        + (f", or a mesh of cp={wider}" if wider else "")
    )


def _more(cost: CostModel, mesh: Mesh) -> str:
    """Which meshes hold the states: the least pp x tp, and the least dp over which all of them are sharded."""
    divisions = []
    for tp in range(1, _MOST_TP + 1):
        for pp in range(1, cost.model.layers + 1):
            if _holds_states(cost, replace(mesh, pp=pp, tp=tp, virtual_stages=1)):
                divisions.append((pp * tp, -tp, pp))
                break
    ways = []
    if divisions:
        least, tp, pp = min(divisions)
        ways.append(
            f"pp x tp of at least {least:,} would hold them (pp={pp}, tp={-tp}; now pp={mesh.pp}, tp={mesh.tp})"
        )
    for doublings in range(_MOST_SHARDING + 1):
        sharded = replace(mesh, dp=mesh.dp << doublings, sharding="parameters")
        if _holds_states(cost, sharded):
            beside = f" with dp={sharded.dp:,}" if doublings else ""
            ways.append(
                f"sharding='parameters'{beside} (now {mesh.sharding!r}{f', dp={mesh.dp}' if beside else ''})"
            )
            break
    return ", or ".join(ways) or "no mesh of this model does: use a GPU with more memory"


def _holds_states(cost: CostModel, mesh: Mesh) -> bool:
    """Whether each GPU of a mesh that divides the model has room beside the states."""
    try:
        memory = cost.memory(mesh)
    except SettingError:
        return False
    return bool((memory.state_bytes < memory.limit_bytes).all())


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
