"""What packing is sold with, measured: padding in rows of 2,048 tokens without and with it, at three mean lengths.

A page on token packing promises for documents of 256, 512 and 1,024 tokens on average that utilization rises from
12.5, 25 and 50 % to 80, 85 and 90 %. `utilization` draws such documents and counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

import varlen as vl
from benchmarks.inputs import Int32Array
from benchmarks.rows import Limit, Row
from benchmarks.step import Step

SECTION = "utilization"
CAPACITY = 2_048
SIGMA = 1.0
"""Standard deviation of the logarithm of a length."""
PROMISED = {256: (0.125, 0.80, 6.4), 512: (0.25, 0.85, 3.4), 1_024: (0.50, 0.90, 1.8)}
"""By mean length: utilization without packing, with packing, and the improvement."""


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """Tokens over slots of the same documents, each padded to a whole row, and packed."""

    mean: float
    """Mean length of the documents drawn."""
    padded: float
    packed: float
    packs: int
    lower_bound: int
    """Packs that no packing can go below."""

    @property
    def improvement(self) -> float:
        """Times as many tokens in a slot."""
        return self.packed / self.padded


def utilization(
    mean: int, capacity: int = CAPACITY, num_documents: int = 100_000, seed: int = 0
) -> Utilization:
    """Measure padding to `capacity` and best-fit-decreasing on log-normal lengths.

    Args:
        mean: tokens of a document on average, after clipping; see `lengths_of_mean`.
        capacity: tokens of a row, and the length that every document is padded to.
        num_documents: drawn.
        seed: same seed, same documents.
    """
    lengths = lengths_of_mean(mean, capacity, num_documents, seed)
    packing = vl.pack(lengths, capacity=capacity)
    return Utilization(
        mean=float(lengths.mean()),
        padded=float(lengths.mean()) / capacity,
        packed=packing.fill_ratio,
        packs=packing.num_packs,
        lower_bound=vl.lower_bound(lengths, capacity),
    )


def lengths_of_mean(mean: int, longest: int, num_documents: int, seed: int) -> Int32Array:
    """Draw log-normal lengths, clipped to `[1, longest]`, whose mean after clipping is the one wanted.

    Clipping takes tokens from the long tail only and so lowers the mean. The scale of the distribution is
    therefore raised until the clipped lengths have the mean that is asked for, to within a hundredth of a
    token or as near as whole tokens allow; their spread (`SIGMA`) and the order of the draws stay as they are.
    """
    shape = np.random.default_rng(seed).lognormal(0.0, SIGMA, num_documents)
    low, high = 0.0, float(longest) / shape.min()
    for _ in range(60):
        middle = (low + high) / 2
        clipped = _clipped(shape * middle, longest)
        if clipped.mean() < mean:
            low = middle
        else:
            high = middle
    return _clipped(shape * high, longest)


def _clipped(lengths: np.ndarray, longest: int) -> Int32Array:
    return np.clip(np.rint(lengths), 1, longest).astype(np.int32)


def steps() -> list[Step]:
    """Return what this section measures."""
    return [Step(f"mean {mean:,}", partial(_measure, mean)) for mean in PROMISED]


def _measure(mean: int) -> list[Row]:
    """Measure the padding that is left, beside what is promised and what is there without packing."""
    found = utilization(mean)
    _, promised, improvement = PROMISED[mean]
    return [
        Limit(
            section=SECTION,
            what=f"padding in rows of {CAPACITY:,}, packed; documents of {mean:,} tokens on average",
            value=100 * (1 - found.packed),
            unit="%",
            limit=100 * (1 - promised),
            base=100 * (1 - found.padded),
            note=f"{found.improvement:.2f}x as many tokens in a row as padded, {improvement}x promised",
        )
    ]
