"""Padded batches of whole documents, for models that can't pack: little padding, and as much work on every rank.

Documents are shuffled, sorted by length within windows, and cut into batches of at most so many padded tokens.
Batches of about equal work are computed at once, one on each rank, and each step takes some of every size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from varlen.errors import OverlongDocumentError, SettingError
from varlen.pack.pieces import shuffled
from varlen.types import FloatArray, Int32Array, IntArray

BATCHES_OF_A_WINDOW = 64
"""Batches on each rank that a window's documents make, about: with more there is less padding, and less chance."""
FEWEST_WINDOWS = 4
"""Windows of an epoch at least, so that batches differ from one epoch to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedSteps:
    """The batches of an epoch, by step, micro-batch and rank."""

    documents: IntArray
    """int64: document ids, batch by batch, the longest of a batch first."""
    offsets: IntArray
    """int64 `[batches + 1]`: where each batch's documents begin."""
    batches: IntArray
    """int64 `[steps, micro_batches, ranks]`: the batch that each rank computes."""
    widths: IntArray
    """int64 `[batches]`: tokens of a row of each batch."""
    work: FloatArray
    """float64 `[batches]`: what each batch costs, padding included."""
    tokens: int
    """Tokens of documents in all batches."""
    empty_documents: int
    """Documents without tokens, which no batch holds."""
    repeated_documents: int
    """Documents that come twice, so that every rank has a batch: the shortest, where there are too few to divide."""

    @property
    def padding(self) -> float:
        """The share of tokens in all rows that are padding."""
        slots = int((np.diff(self.offsets) * self.widths).sum())
        return 1 - self.tokens / slots if slots else 0.0

    @property
    def imbalance(self) -> float:
        """The work of the ranks that the others wait for, over the mean: 1.0 where no rank ever waits."""
        work = self.work[self.batches]
        return float(work.max(2).sum() / work.mean(2).sum()) if work.size else 1.0


def padded_steps(
    lengths: Int32Array,
    max_tokens: int,
    *,
    max_rows: int,
    multiple: int,
    ranks: int,
    micro_batches: int,
    window: int | None,
    work: tuple[float, float],
    seed: int | None,
) -> PaddedSteps:
    """Cut the documents of an epoch into padded batches, and deal these to ranks, equally many to each.

    Args:
        lengths: int32 `[documents]`.
        max_tokens: most tokens of a batch, padding included: rows times the longest, rounded up to `multiple`.
        window: documents that are sorted by length together; None for `BATCHES_OF_A_WINDOW` batches a rank.
        work: of a padded token, and of a padded row's squared width.
        seed: of the order of documents and steps; None keeps that of `lengths`.

    Cost: a sort of the documents, and some microseconds for each batch.
    """
    at_once, real = ranks * micro_batches, np.flatnonzero(lengths)
    widths = -(-lengths.astype(np.int64) // multiple) * multiple
    _check(lengths, widths, max_tokens, real.size, at_once)
    order = real if seed is None else real[shuffled(seed, real.size)]
    rows_of_a_batch = max(1, min(max_rows, int(max_tokens // widths[real].mean())))
    usual = min(BATCHES_OF_A_WINDOW * ranks * rows_of_a_batch, -(-real.size // FEWEST_WINDOWS))
    size = window or usual
    order = order[np.lexsort((-widths[order], np.arange(order.size) // size))]
    offsets = _cut(widths[order], size, max_tokens, max_rows)
    offsets = _divided(offsets, at_once)
    missing = -(offsets.size - 1) % at_once
    shortest = order[np.argsort(widths[order], kind="stable")[:missing]]
    order = np.concatenate([order, shortest])
    offsets = np.concatenate([offsets, offsets[-1] + 1 + np.arange(missing)])
    rows, width = np.diff(offsets), widths[order[offsets[:-1]]]
    amounts = rows * (work[0] * width + work[1] * width.astype(np.float64) ** 2)
    return PaddedSteps(
        documents=order,
        offsets=offsets,
        batches=_dealt(amounts, ranks, micro_batches, seed),
        widths=width,
        work=amounts,
        tokens=int(lengths[order].sum(dtype=np.int64)),
        empty_documents=lengths.size - real.size,
        repeated_documents=missing,
    )


def _check(lengths: Int32Array, widths: IntArray, max_tokens: int, count: int, at_once: int) -> None:
    longer = widths > max_tokens
    if longer.any():
        first = int(np.argmax(longer))
        raise OverlongDocumentError(
            f"document {first:,} has {lengths[first]:,} tokens, and a batch at most max_tokens={max_tokens:,} "
            f"({int(longer.sum()):,} of {lengths.size:,} documents are longer); truncate them, or pass max_tokens="
            f"{int(widths.max())}"
        )
    if count < at_once:
        raise SettingError(
            f"{count:,} documents with tokens can't give {at_once:,} batches one each (ranks times micro-batches); "
            "use fewer ranks or micro_batches, or more documents"
        )


def _cut(widths: IntArray, window: int, max_tokens: int, max_rows: int) -> IntArray:
    """Cut falling widths into batches, as large as they may be, within windows; int64 `[batches + 1]`."""
    offsets, begin = [0], 0
    while begin < widths.size:
        end = min(widths.size, (begin // window + 1) * window)
        begin = min(end, begin + min(max_rows, max_tokens // int(widths[begin])))
        offsets.append(begin)
    return np.array(offsets, np.int64)


def _divided(offsets: IntArray, at_once: int) -> IntArray:
    """Halve batches with the most rows until their number is a multiple, or each has one row."""
    wanted = min(-(-(offsets.size - 1) // at_once) * at_once, int(offsets[-1]))
    while offsets.size - 1 < wanted:
        rows = np.diff(offsets)
        most = np.argsort(-rows, kind="stable")[: wanted - offsets.size + 1]
        most = most[rows[most] > 1]
        offsets = np.sort(np.concatenate([offsets, offsets[most] + rows[most] // 2]))
    return offsets


def _dealt(work: FloatArray, ranks: int, micro_batches: int, seed: int | None) -> IntArray:
    """Return the batches of each step, micro-batch and rank, int64 `[steps, micro_batches, ranks]`.

    Neighbours by work are computed at once, by one rank each. A step takes a micro-batch of each size, so that all
    steps cost about the same; the rank with the most work of one micro-batch gets the least of the next.
    """
    slots = np.argsort(-work, kind="stable").reshape(micro_batches, -1, ranks)
    slots[1::2] = slots[1::2, ::-1]  # the step with the largest of one size gets the smallest of the next
    slots[1::2] = slots[1::2, :, ::-1]
    steps = np.ascontiguousarray(slots.transpose(1, 0, 2))
    if seed is None:
        return steps
    steps = steps[shuffled(seed, len(steps))]
    heaviest = int(np.argmax(work[steps].max((1, 2))))  # comes first, so that too little memory shows at once
    return np.concatenate([steps[heaviest : heaviest + 1], steps[:heaviest], steps[heaviest + 1 :]])
