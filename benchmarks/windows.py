"""Packing by windows: how many packs more it takes than best-fit-decreasing over the whole set."""

from __future__ import annotations

from functools import partial

import numpy as np

import varlen as vl
from benchmarks import checks
from benchmarks.inputs import REAL_LENGTHS, real_lengths
from benchmarks.rows import Limit, Row
from benchmarks.step import Step

SECTION = "windows"
CAPACITIES = (2048, 4096, 8192, 16384, 32768)
WINDOW = 16_384
MORE = 0.001
"""Packing by windows may take this share of packs more, and one pack a window."""
CHUNK = 10_000
"""Documents handed to the packer at a time, as a stream brings them."""


def steps() -> list[Step]:
    """Return what this section measures: one step a real set."""
    names = [path.stem for path in sorted(REAL_LENGTHS.glob("*.npz"))]
    return [Step(name, partial(_measure, name)) for name in names] or [Step("real sets", _no_sets)]


def _no_sets() -> list[Row]:
    """Say that there is nothing to measure."""
    raise FileNotFoundError("the real sets, shared/data/lengths beside the checkout, are not here")


def _measure(name: str) -> list[Row]:
    """Compare packs of one set at every capacity; documents longer than a pack are split in both."""
    lengths = dict(real_lengths(only=name))[name]
    num_windows = -(-len(lengths) // WINDOW)
    rows: list[Row] = []
    for capacity in CAPACITIES:
        whole = vl.pack(lengths, capacity=capacity, overlong="split")
        by_windows = _pack_by_windows(lengths, capacity)
        rows.append(
            Limit(
                section=SECTION,
                what=f"{name}: {len(lengths):,} documents, capacity {capacity:,}",
                value=by_windows,
                unit="packs",
                limit=whole.num_packs * (1 + MORE) + num_windows,
                limit_text=f"{100 * MORE} % + {num_windows:,}",
                base=whole.num_packs,
                group=name,
            )
        )
    return rows


def _pack_by_windows(lengths: np.ndarray, capacity: int) -> int:
    """Return the packs that a window packer hands out, after checking that they hold every token."""
    packer = vl.WindowPacker(capacity=capacity, window=WINDOW, overlong="split")
    parts = [packer.add(lengths[start : start + CHUNK]) for start in range(0, len(lengths), CHUNK)]
    parts.append(packer.flush())
    tokens = np.zeros(len(lengths), np.int64)
    for part in parts:
        np.add.at(tokens, part.document_ids, part.lengths)
        if part.num_packs and part.pack_sums(part.lengths).max() > capacity:
            raise checks.WrongResultError(f"a pack over its capacity of {capacity:,}")
    if not np.array_equal(tokens, lengths):
        raise checks.WrongResultError("packing by windows lost or doubled tokens")
    return sum(part.num_packs for part in parts)
