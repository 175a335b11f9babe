"""`one_gpu_plan`: slices of a given size and packs of short documents, on one GPU, without a cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from varlen.arguments import as_count
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
