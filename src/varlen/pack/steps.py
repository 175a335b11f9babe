"""Steps for batch samplers: deals the packs of an epoch to ranks, equally many to each, with balanced work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from varlen.arguments import as_choice, as_count
from varlen.pack.api import DEFAULT_WORK, pack
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import KEEP_WHOLE, shuffled
from varlen.types import Int32Array, IntArray, Method

Fill = Literal["repeat", "empty"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The documents of each pack, and the packs of each step and rank."""

    documents: IntArray
    """int64 `[num_documents]`: document ids, pack by pack."""
    offsets: IntArray
    """int64 `[num_packs + 1]`: where each pack's documents begin."""
    packs: IntArray
    """int64 `[num_steps, ranks, packs_per_batch]`: packs of each batch, filled up with -1."""
    packed_tokens: int = 0
    """Tokens of all packs, repeated documents included."""
    dropped_documents: int = 0
    """Documents left out because they are longer than a pack, or because of `drop_last`."""
    dropped_tokens: int = 0
    empty_documents: int = 0
    """Documents without tokens, which no pack holds."""
    repeated_documents: int = 0
    """Documents repeated so that every rank has one in the last step."""
    empty_batches: int = 0
    """Batches without a document."""

    @property
    def num_packs(self) -> int:
        """Packs of all steps, over all ranks."""
        return len(self.offsets) - 1


def steps_of(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    method: Method = "best_fit",
    overlong: Literal["error", "drop"] = "error",
    max_documents: int | None = None,
    ranks: int = 1,
    packs_per_batch: int = 1,
    drop_last: bool = False,
    fill: Fill = "repeat",
    balance_over: int = 1,
    seed: int = 0,
    in_order: bool = False,
    work: tuple[float, float] = DEFAULT_WORK,
) -> Steps:
    """Pack the documents of an epoch, in the order of `lengths`, and deal the packs to ranks.

    Packs with the most documents are split until the number of packs is a multiple of `ranks * packs_per_batch`,
    so that every document is used once and all batches have the same number of packs. If there are too few
    documents for that, the last batches hold fewer packs; if there are fewer than ranks, some batches are empty
    (`fill="empty"`) or repeat the shortest document (`fill="repeat"`).
    """
    as_choice(overlong, "overlong", KEEP_WHOLE)
    as_choice(fill, "fill", get_args(Fill))
    at_once = as_count(ranks, "ranks") * as_count(packs_per_batch, "packs_per_batch")
    as_count(balance_over, "balance_over")
    packing = pack(lengths, capacity, method, overlong, max_documents)
    ledger = packing.ledger
    steps = Steps(
        documents=packing.document_ids,
        offsets=packing.offsets,
        packs=np.empty((0, ranks, packs_per_batch), np.int64),
        packed_tokens=ledger.packed,
        dropped_documents=ledger.dropped_documents,
        dropped_tokens=ledger.dropped,
        empty_documents=ledger.empty_documents,
    )
    sizes = as_lengths(lengths)
    steps = replace(steps, offsets=_split_largest(steps.offsets, at_once))
    if drop_last:
        steps = _without_last(steps, sizes, at_once)
    elif fill == "repeat":
        steps = _repeat_shortest(steps, sizes)
    dealt = _dealt(steps, sizes[steps.documents], work, balance_over, in_order, seed)
    return replace(steps, packs=dealt, empty_batches=int((dealt[:, :, 0] < 0).sum()))


def _without_last(steps: Steps, sizes: Int32Array, at_once: int) -> Steps:
    """Drop the packs of the last step if it isn't full."""
    stay = steps.num_packs // at_once * at_once
    end = int(steps.offsets[stay])
    dropped = int(sizes[steps.documents[end:]].sum(dtype=np.int64))
    return replace(
        steps,
        documents=steps.documents[:end],
        offsets=steps.offsets[: stay + 1],
        packed_tokens=steps.packed_tokens - dropped,
        dropped_documents=steps.dropped_documents + steps.documents.size - end,
        dropped_tokens=steps.dropped_tokens + dropped,
    )


def _split_largest(offsets: IntArray, at_once: int) -> IntArray:
    """Halve packs with the most documents until they make whole steps, or each holds one document."""
    wanted = min(-(-(offsets.size - 1) // at_once) * at_once, int(offsets[-1]))
    while offsets.size - 1 < wanted:
        counts = np.diff(offsets)
        most = np.argsort(-counts, kind="stable")[: wanted - offsets.size + 1]
        most = most[counts[most] > 1]
        offsets = np.sort(np.concatenate([offsets, offsets[most] + counts[most] // 2]))
    return offsets


def _repeat_shortest(steps: Steps, sizes: Int32Array) -> Steps:
    """Add a pack of the shortest document for each rank that would get none in the last step."""
    ranks, each = steps.packs.shape[1:]
    in_last = steps.num_packs % (ranks * each)
    missing = ranks - in_last if 0 < in_last < ranks else 0
    if not missing:
        return steps
    shortest = int(np.argmin(sizes[steps.documents]))
    again = np.arange(1, missing + 1) + steps.documents.size
    return replace(
        steps,
        documents=np.concatenate([steps.documents, np.repeat(steps.documents[shortest], missing)]),
        offsets=np.concatenate([steps.offsets, again]),
        packed_tokens=steps.packed_tokens + missing * int(sizes[steps.documents[shortest]]),
        repeated_documents=missing,
    )


def _dealt(
    steps: Steps, sizes: Int32Array, work: tuple[float, float], balance_over: int, in_order: bool, seed: int
) -> IntArray:
    """Return the packs of each batch, int64 `[num_steps, ranks, packs_per_batch]`."""
    _, ranks, each = steps.packs.shape
    whole, rest = divmod(steps.num_packs, ranks * each)
    order = np.arange(whole * ranks * each)
    if not in_order and order.size and (each > 1 or balance_over > 1):
        order = _by_work(steps, sizes, work, balance_over * ranks * each)
    slots = order.reshape(whole, each, ranks)
    if not in_order:
        # The rank with the most work of one slot gets the least of the next.
        slots[:, 1::2] = slots[:, 1::2, ::-1]
        if balance_over > 1:
            slots = _shuffled_within(slots, balance_over, seed)
        packs = slots.transpose(0, 2, 1)
    else:
        packs = order.reshape(whole, ranks, each)
    if not rest:
        return np.ascontiguousarray(packs)
    last = np.full((1, ranks, each), -1, np.int64)
    begins = np.arange(ranks + 1) * rest // ranks
    for rank in range(ranks):
        mine = np.arange(begins[rank], begins[rank + 1]) + whole * ranks * each
        last[0, rank, : mine.size] = mine
    return np.concatenate([packs, last])


def _by_work(steps: Steps, sizes: Int32Array, work: tuple[float, float], window: int) -> IntArray:
    """Return the packs of full steps, sorted by falling work within each window."""
    each = steps.packs.shape[1] * steps.packs.shape[2]
    count = steps.num_packs // each * each
    end = int(steps.offsets[count])
    amounts = work[0] * sizes[:end].astype(np.float64) + work[1] * sizes[:end].astype(np.float64) ** 2
    per_pack = np.add.reduceat(amounts, steps.offsets[:count])
    order: IntArray = np.lexsort((-per_pack, np.arange(count) // window))
    return order


def _shuffled_within(slots: IntArray, window: int, seed: int) -> IntArray:
    """Shuffle steps within each window, so that those with the most work don't always come first."""
    keys = shuffled(seed, len(slots))
    return slots[np.lexsort((keys, np.arange(len(slots)) // window))]
