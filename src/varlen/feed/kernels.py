"""The feed's kernels, compiled by numba; what each does stands in `tests/oracles/feed.py`."""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@compiled
def interleave(
    lengths: Int64, begins: Int64, ends: Int64, weights: Float64, counts: Int64, most: int, choices: Int64
) -> int:
    """Choose the source of each next document; the oracle says how.

    Args:
        lengths: int64: of the documents that come next, source after source; -1 where a window begins.
        places: int64 `[sources]`: where each one's begin, updated.
        ends: int64 `[sources]`: where each one's end.
        weights: float64 `[sources]`, adding up to 1.
        counts: int64 `[sources]`, brought up to date.
        most: documents wanted.
        choices: int64 `[most]`, written.

    Returns:
        Number of choices.
    """
    num = weights.size
    total = np.int64(0)
    for source in range(num):
        total += counts[source]
    number = 0
    while number < most:
        chosen, best = -1, np.inf
        least, least_begin = 0, np.inf
        for source in range(num):
            begin = counts[source] / weights[source]
            if begin < least_begin:
                least, least_begin = source, begin
            if begin > np.float64(total):
                continue
            end = begin
            if begins[source] < ends[source] and lengths[begins[source]] > 0:
                end = begin + lengths[begins[source]] / weights[source]
            if end < best:
                chosen, best = source, end
        if chosen < 0:
            chosen = least
        choices[number] = chosen
        if begins[chosen] == ends[chosen]:
            return number
        length = lengths[begins[chosen]]
        begins[chosen] += 1
        if length >= 0:
            counts[chosen] += length
            total += length
            number += 1
    return most
