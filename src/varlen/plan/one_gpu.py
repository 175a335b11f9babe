"""`one_gpu_plan`: slices of a given size and packs of short documents, on one GPU, without a cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from varlen.arguments import as_count
from varlen.batch.tree_batch import TreeSegments
from varlen.pack.api import pack
from varlen.step_plan import BACKWARD, FORWARD, Mesh, MicroPacks, Offload, Recompute, StepPlan
from varlen.types import Int32Array


def one_gpu_plan(
    lengths: Int32Array, slice_tokens: int, *, recompute: Recompute = "full", offload: Offload = "none"
) -> StepPlan:
    """Plan a step whose MicroPacks hold at most `slice_tokens` tokens.

    Longer documents are cut into even slices, run forward first to last and then backward last to first, before the
    next document begins; shorter ones are packed. So the device holds one MicroPack's activations, and what one
    document keeps between its slices.

    >>> plan = one_gpu_plan(np.array([5, 2, 1], np.int32), 3)
    >>> plan.forward.stops.tolist(), plan.tasks.tolist()
    ([2, 5, 2, 1], [0, 0, 1, 1, 0, 1])
    """
    slice_tokens = as_count(slice_tokens, "slice_tokens")
    is_long = lengths > slice_tokens
    forward: list[list[tuple[int, int, int]]] = []
    backward: list[list[tuple[int, int, int]]] = []
    tasks: list[int] = []
    for document in np.flatnonzero(is_long).tolist():
        length = int(lengths[document])
        count = -(-length // slice_tokens)
        cuts = [length * part // count for part in range(count + 1)]
        slices = [[(document, start, stop)] for start, stop in zip(cuts, cuts[1:])]
        forward += slices
        backward += slices[::-1]
        tasks += [FORWARD] * count + [BACKWARD] * count
    packing = pack(np.where(is_long, 0, lengths), slice_tokens)
    for documents in packing.to_lists():
        pieces = [(document, 0, int(lengths[document])) for document in documents]
        forward.append(pieces)
        backward.append(pieces)
        tasks += [FORWARD, BACKWARD]
    return StepPlan(
        lengths=lengths.astype(np.int32),
        first_ranks=np.where(lengths > 0, 0, -1).astype(np.int32),
        num_ranks=np.ones(len(lengths), np.int32),
        forward=micropacks_of_pieces(forward),
        backward=micropacks_of_pieces(backward),
        tasks=np.array(tasks, np.uint8),
        task_offsets=np.array([0, len(tasks)], np.int32),
        mesh=Mesh(),
        method="sliced",
        recompute=recompute,
        offload=offload,
        answered_by=f"slices of up to {slice_tokens:,} tokens",
    )


def one_gpu_tree_plan(
    trees: Sequence[TreeSegments], slice_tokens: int, *, recompute: Recompute = "full"
) -> tuple[StepPlan, list[int]]:
    """Plan a step of trees whose MicroPacks hold at most `slice_tokens` tokens.

    Longer trees are cut into slices that run depth first, each backward after those behind it; shorter ones are
    packed. So the device holds one MicroPack's activations, and what one path keeps.

    Returns:
        The plan, whose documents are the trees, and for each forward slice the one that it continues, -1 for none.
    """
    slice_tokens = as_count(slice_tokens, "slice_tokens")
    lengths = np.array([int(each.ends.max(initial=0)) for each in trees], np.int32)
    forward: list[list[tuple[int, int, int]]] = []
    backward: list[list[tuple[int, int, int]]] = []
    tasks: list[int] = []
    parents: list[int] = []
    for tree in np.flatnonzero(lengths > slice_tokens).tolist():
        waiting: list[int] = []
        slices = cut_tree(trees[tree], slice_tokens)
        before = len(forward)
        for start, stop, parent in [*slices, (0, 0, -1)]:
            while waiting and waiting[-1] != parent:
                backward.append([(tree, *slices[waiting.pop()][:2])])
                tasks.append(BACKWARD)
            if stop:
                waiting.append(len(forward) - before)
                forward.append([(tree, start, stop)])
                parents.append(parent if parent < 0 else before + parent)
                tasks.append(FORWARD)
    packing = pack(np.where(lengths > slice_tokens, 0, lengths), slice_tokens)
    for documents in packing.to_lists():
        pieces = [(document, 0, int(lengths[document])) for document in documents]
        forward.append(pieces)
        backward.append(pieces)
        parents += [-1] * len(pieces)
        tasks += [FORWARD, BACKWARD]
    plan = StepPlan(
        lengths=lengths,
        first_ranks=np.where(lengths > 0, 0, -1).astype(np.int32),
        num_ranks=np.ones(len(lengths), np.int32),
        forward=micropacks_of_pieces(forward),
        backward=micropacks_of_pieces(backward),
        tasks=np.array(tasks, np.uint8),
        task_offsets=np.array([0, len(tasks)], np.int32),
        mesh=Mesh(),
        method="sliced",
        recompute=recompute,
        answered_by=f"slices of trees of up to {slice_tokens:,} tokens",
    )
    return plan, parents


def cut_tree(tree: TreeSegments, slice_tokens: int) -> list[tuple[int, int, int]]:
    """Return start and stop of slices, depth first, and the number of the slice that each continues, or -1.

    A slice stays in the subtree of the token before it. It ends where most of a path is done, in its second half.
    """
    tokens = int(tree.ends.max(initial=0))
    branches = tree.begins[1:][tree.parents[1:] != np.arange(len(tree.begins) - 1)]
    places = np.append(branches, tokens)
    depths = np.append(tree.positions[np.searchsorted(tree.begins, branches)], 0)
    slices: list[tuple[int, int, int]] = []
    starts: list[int] = []
    at = 0
    while at < tokens:
        one = int(np.searchsorted(tree.begins, at, side="right")) - 1
        parent, limit = at - 1, int(tree.stops[one])
        if tree.begins[one] == at:
            above = int(tree.parents[one])
            parent = int(tree.ends[above]) - 1 if above >= 0 else -1
            limit = int(tree.stops[above if above >= 0 else one])
        stop = min(at + slice_tokens, limit)
        if stop < limit:
            first, last = np.searchsorted(places, (at + slice_tokens // 2 + 1, stop + 1)).tolist()
            if first < last:
                stop = int(places[last - 1 - int(np.argmin(depths[first:last][::-1]))])
        continued = int(np.searchsorted(starts, parent, side="right")) - 1 if parent >= 0 else -1
        slices.append((at, stop, continued))
        starts.append(at)
        at = stop
    return slices


Pieces = Sequence[Sequence[tuple[int, int, int]]]
"""A rank's MicroPacks as slices: document, start, stop; a few, written by hand or in a loop."""


def micropacks_of_pieces(packs: Pieces) -> MicroPacks:
    """Return the MicroPacks of one rank as flat arrays."""
    columns = np.array([piece for each in packs for piece in each], np.int32).reshape(-1, 3).T
    return MicroPacks(
        rank_offsets=np.array([0, len(packs)], np.int32),
        slice_offsets=np.cumsum([0, *map(len, packs)], dtype=np.int32),
        document_ids=columns[0].copy(),
        starts=columns[1].copy(),
        stops=columns[2].copy(),
    )
