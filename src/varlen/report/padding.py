"""What padding would compute, counted without packing anything: random batches, one length, length buckets."""

from __future__ import annotations

import numpy as np

from varlen.report.inspected import PaddingFigures
from varlen.types import Int32Array


def measure_padding(
    lengths: Int32Array, batch_documents: int, cut_at: int | None, seed: int
) -> tuple[PaddingFigures, ...]:
    """Count the slots of three ways of padding, for whole documents, and for documents cut where some are longer.

    Args:
        lengths: int32 `[num_documents]`, none of them 0.
        batch_documents: documents of a batch; the last batch holds what is left.
        cut_at: tokens that documents are cut to in a second round; None for no second round.
        seed: of the random batches.
    """
    order = np.random.default_rng(seed).permutation(lengths.size)
    rising = np.sort(lengths)
    found = list(_three(lengths[order], rising, batch_documents, None))
    if cut_at is not None and rising[-1] > cut_at:
        most = np.int32(cut_at)
        found += _three(np.minimum(lengths[order], most), np.minimum(rising, most), batch_documents, cut_at)
    return tuple(found)


def _three(
    mixed: Int32Array, rising: Int32Array, batch_documents: int, cut_at: int | None
) -> tuple[PaddingFigures, ...]:
    """Pad documents in random order, and sorted by length."""
    tokens, longest = int(rising.sum(dtype=np.int64)), int(rising[-1])
    end, tail = ("", "") if cut_at is None else ("_cut", f", cut at {cut_at:,}")
    ways = (
        ("random", "random batches, padded to the longest", _padded(mixed, batch_documents)),
        ("buckets", "sorted into length buckets", _padded(rising, batch_documents)),
        ("maximum", f"every document padded to {longest:,}", longest * rising.size),
    )
    return tuple(
        PaddingFigures(name=name + end, title=title + tail, cut_at=cut_at, tokens=tokens, slots=slots)
        for name, title, slots in ways
    )


def _padded(lengths: Int32Array, batch_documents: int) -> int:
    """Return the slots of consecutive batches, each padded to its longest document."""
    starts = np.arange(0, lengths.size, batch_documents)
    longest = np.maximum.reduceat(lengths, starts).astype(np.int64)
    sizes = np.diff(np.append(starts, lengths.size))
    return int((longest * sizes).sum())
