"""The feed's kernels in plain Python, to be read and believed; `kernels.py` must give the same."""

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


def interleave(
    lengths: Int64, begins: Int64, ends: Int64, weights: Float64, counts: Int64, most: int, choices: Int64
) -> int:
    """Choose the source of each next document, so that every source keeps to its share of what was taken.

    Of the sources that aren't ahead of their share, the one whose next document would end first in a fluid that
    flows out of all of them by their weights (worst-case fair queueing: Bennett and Zhang, INFOCOM 1996).
    So no source is ever further from its share than one longest document; ties go by the order of the sources.

    Args:
        lengths: int64: of the documents that come next, source after source; all 1 to share by documents. -1 where a
            window begins: it is passed when it is the source's turn, as if nothing were left till then.
        begins: int64 `[sources]`: those of source s are `lengths[begins[s]:ends[s]]`; brought up to date.
        ends: int64 `[sources]`.
        weights: float64 `[sources]`: shares, adding up to 1.
        counts: int64 `[sources]`: taken of each so far, in the unit of the lengths; brought up to date.
        most: documents wanted.
        choices: int64 `[most]`, written: the source of each, and behind them the one that has no document left.

    Returns:
        Number of choices; fewer than `most` where the next source has no document left.
    """
    number = 0
    while number < most:
        total = float(counts.sum())
        chosen, best = -1, np.inf
        for source in range(weights.size):
            begin = counts[source] / weights[source]
            if begin > total:
                continue
            has_one = begins[source] < ends[source] and lengths[begins[source]] > 0
            end = begin + lengths[begins[source]] / weights[source] if has_one else begin
            if end < best:
                chosen, best = source, end
        if chosen < 0:  # rounding: all seem to be ahead, so the one that is least
            chosen = int(np.argmin(counts / weights))
        choices[number] = chosen
        if begins[chosen] == ends[chosen]:
            return number
        length = lengths[begins[chosen]]
        begins[chosen] += 1
        if length >= 0:
            counts[chosen] += length
            number += 1
    return most
