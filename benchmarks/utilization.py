"""What packing is sold with, measured: padding in rows of 2,048 tokens without and with it, at three mean lengths."""

from __future__ import annotations

from functools import partial

from benchmarks.rows import Limit, Row
from benchmarks.seed_table import CAPACITY, PROMISED, utilization
from benchmarks.step import Step

SECTION = "utilization"


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
