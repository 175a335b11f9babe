"""Every pricing kernel in plain Python: the specification that tests hold kernels against.

Written to be read. Arguments and results are those of the kernels to the last bit, so that plans are: whatever
rounds is added and multiplied in the order in which the kernels do, sums from first to last (`sum` of Python 3.12
and later would round less).
"""

import functools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.cost.rates import NUM_COLUMNS, Rates

Int32 = NDArray[np.int32]
Floats = NDArray[np.float64]


def _sum(values: Iterable[float]) -> float:
    """Add up from first to last."""
    return functools.reduce(operator.add, values, 0.0)


def pairs(start: float, stop: float, window: float) -> float:
    """Count the pairs of a query in a slice and a key that it sees: query t sees min(t + 1, window) keys."""
    whole = (stop * (stop + 1.0) - start * (start + 1.0)) * 0.5
    if window <= 0 or stop <= window:
        return whole
    # Of queries t from the window on, t + 1 - window keys are hidden.
    first = max(start, window)
    return whole - ((first - window) * (stop - first) + (stop - first) * (stop - first + 1.0) * 0.5)


def _place(grid: Floats, value: float) -> tuple[int, float]:
    """The grid point at or below a value, and how far the value lies towards the next, in reciprocals."""
    points = grid.tolist()
    if value <= points[0] or len(points) == 1:
        return 0, 0.0
    if value >= points[-1]:
        return len(points) - 2, 1.0
    at = bisect_right(points, value) - 1
    return at, (1 / points[at] - 1 / value) / (1 / points[at] - 1 / points[at + 1])


def _floor(grid: Floats, value: float) -> float:
    """How much slower than at the first grid point: fewer rows than that take as long as that many."""
    return float(grid[0]) / value if len(grid) > 1 and value < grid[0] else 1.0


def _between(low: float, high: float, part: float) -> float:
    return low * (1.0 - part) + high * part


def _on_curve(curve: Floats, at: int, part: float) -> float:
    """Seconds per FLOP at a place on a curve; past the last grid point the rate stays."""
    return float(curve[at]) if part == 0 else _between(float(curve[at]), float(curve[at + 1]), part)


def _on_table(table: Floats, rows: tuple[int, float], keys: tuple[int, float]) -> float:
    """Seconds per FLOP of attention: first between keys, then between rows."""
    at, part = rows
    low = _on_curve(table[at], *keys)
    return low if part == 0 else _between(low, _on_curve(table[at + 1], *keys), part)


def _attention(start: float, stop: float, group: float, rows: float, rates: Rates) -> tuple[float, float]:
    """Seconds of a slice's attention in an average layer, forward and backward."""
    scaled = rows * rates.row_scale
    at, floor = _place(rates.query_rows, scaled), _floor(rates.query_rows, scaled)
    kinds = [(rates.attention_flops, 0.0, stop)]
    if rates.windowed_flops > 0:
        kinds.append((rates.windowed_flops, rates.window, min(stop, rates.window)))
    forward = backward = 0.0
    for flops_per_pair, window, keys in kinds:
        flops = flops_per_pair * pairs(start, stop, window) / group * floor
        key = _place(rates.key_lengths, keys)
        forward += flops * _on_table(rates.forward_s, at, key)
        backward += flops * _on_table(rates.backward_s, at, key)
    return forward, backward * rates.backward_ratio


def _linear(rows: float, own: float, rates: Rates) -> tuple[float, float]:
    """Seconds for each FLOP a row of matrix products, forward and backward: `own` rows in a MicroPack of `rows`."""
    place, held = _place(rates.gemm_rows, rows), own * _floor(rates.gemm_rows, rows)
    return held * _on_curve(rates.gemm_s, *place), held * _on_curve(rates.gemm_backward_s, *place)


def _exchange(start: float, stop: float, group: float, rates: Rates) -> tuple[float, float, float]:
    """Latency and seconds that GPUs sharing a slice spend: keys travel to queries, or the other way if less."""
    if group <= 1:
        return 0.0, 0.0, 0.0
    link = 0 if group <= rates.node_group else 1
    s_per_byte = (group - 1) / group * float(rates.link_s_per_byte[link])
    forward = min(stop * rates.key_value_bytes, (stop - start) * rates.query_bytes)
    backward = min(stop * rates.key_value_back_bytes, (stop - start) * rates.query_gradient_bytes)
    return float(rates.link_latency_s[link]), forward * s_per_byte, backward * s_per_byte


def _exposed(
    start: float, stop: float, group: float, attended: tuple[float, float], rates: Rates
) -> tuple[float, float, float]:
    """Latency of the exchange, and what attention doesn't hide of its seconds, forward and backward."""
    latency, *moved = _exchange(start, stop, group, rates)
    forward, backward = (max(0.0, m - rates.exchange_overlap * a) for m, a in zip(moved, attended))
    return latency, forward, backward


def slice_seconds(
    start: float, stop: float, num_ranks: float, rows: float, rates: Rates
) -> tuple[float, float, float]:
    """Price one slice of a MicroPack of `rows` rows a GPU: forward, input and weight seconds of an average layer.

    The head is spread evenly over the model's layers; launches and latencies are left out, so that slices add up.
    """
    group = num_ranks * rates.cp
    own = (stop - start) / group
    attended = _attention(start, stop, group, rows, rates)
    linear, linear_back = _linear(rows, own, rates)
    _, exchange, exchange_back = _exposed(start, stop, group, attended, rates)
    head = rates.head_flops / rates.num_layers
    forward = attended[0] + (rates.linear_flops * linear + rates.collective_s * own)
    backward = attended[1] + (
        rates.recompute * forward + exchange_back + (rates.collective_s + rates.reuse_s) * own
    )
    backward += rates.linear_flops * linear_back
    return (
        max(forward + exchange, rates.host_s_per_token * start / group) + head * linear,
        max(backward, rates.host_back_s_per_token * start / group) + head * linear_back,
        (rates.linear_flops * rates.weight_ratio + head * rates.head_weight_ratio) * linear_back,
    )


def price(slice_offsets: Int32, starts: Int32, stops: Int32, num_ranks: Int32, rates: Rates) -> Floats:
    """Price MicroPacks: float64 `[num_micropacks, 7]`, seconds and rows of one GPU."""
    priced = np.zeros((len(slice_offsets) - 1, NUM_COLUMNS))
    ends = slice_offsets.tolist()
    for pack, (first, last) in enumerate(zip(ends, ends[1:])):
        slices = [
            (float(starts[one]), float(stops[one]), float(num_ranks[one]) * rates.cp)
            for one in range(first, last)
        ]
        if slices:
            priced[pack] = _micropack(slices, rates)
    return priced


def _micropack(slices: list[tuple[float, float, float]], rates: Rates) -> list[float]:
    """The columns of one MicroPack; a slice is its start, its stop and the GPUs that share it."""
    rows = _sum((stop - start) / group for start, stop, group in slices)
    attended = [_attention(start, stop, group, rows, rates) for start, stop, group in slices]
    exchanged = [_exposed(*slice_, hiding, rates) for slice_, hiding in zip(slices, attended)]
    earlier = _sum(start / group for start, stop, group in slices)
    latency = max(waited for waited, _, _ in exchanged)
    linear, linear_back = _linear(rows, rows, rates)
    computed = _sum(forward for forward, _ in attended)
    computed += rates.linear_flops * linear + rates.collective_s * rows + rates.launch_s
    launched = sum(start > 0 for start, _, _ in slices)  # those that begin documents are launched together
    computed += rates.slice_launch_s * launched
    back = _sum(backward for _, backward in attended)
    back += rates.recompute * computed + rates.linear_flops * linear_back + rates.launch_s
    back += rates.slice_launch_back_s * launched
    back += (rates.collective_s + rates.reuse_s) * rows
    forward = computed + _sum(moved for _, moved, _ in exchanged) + latency
    back = back + _sum(moved for _, _, moved in exchanged) + rates.exchanges_back * latency
    return [
        # Fetching from host memory runs beside the layer before it: it counts where it takes longer.
        max(forward, rates.host_s_per_token * earlier),
        rates.head_flops * linear + rates.launch_s,
        max(back, rates.host_back_s_per_token * earlier),
        rates.head_flops * linear_back + rates.launch_s,
        rates.linear_flops * rates.weight_ratio * linear_back + rates.launch_s,
        rates.head_flops * rates.head_weight_ratio * linear_back + rates.launch_s,
        rows,
    ]


def _seconds(stop: int, num_ranks: int, rows: float, rates: Rates, forward_part: float) -> float:
    forward, inputs, weights = slice_seconds(0.0, float(stop), float(num_ranks), rows, rates)
    return float(forward_part * forward + inputs + weights)


def document_seconds(
    lengths: Int32, num_ranks: Int32, rows: float, forward_part: float, rates: Rates
) -> Floats:
    """Return what each whole document costs in both passes, per layer and GPU, in MicroPacks of `rows` rows."""
    pairs = zip(lengths.tolist(), num_ranks.tolist())
    return np.array(
        [_seconds(length, ranks, rows, rates, forward_part) if length else 0.0 for length, ranks in pairs]
    )


def cut_evenly(
    lengths: Int32,
    num_ranks: Int32,
    work: Floats,
    budgets: Floats,
    least_rows: int,
    multiple: int,
    forward_part: float,
    rates: Rates,
) -> Any:
    """Cut documents into slices of equal cost, about a budget each."""
    slices: list[tuple[int, int, int]] = []
    shares = (work / budgets).tolist()
    for d, (length, ranks, share) in enumerate(zip(lengths.tolist(), num_ranks.tolist(), shares)):
        step = multiple * ranks
        least = -(-least_rows * ranks // step) * step
        parts = max(1, min(math.ceil(share - 0.15), length // least))
        rows = min(length / parts / ranks, 65536.0)
        whole = _seconds(length, ranks, rows, rates, forward_part)
        if parts > 1:
            last = whole - _seconds(length - least, ranks, rows, rates, forward_part)
            parts = max(1, min(parts, int(whole / last)))
        start = 0
        for part in range(1, parts + 1):
            stop = length
            if part < parts:
                reached = _last_below(
                    whole * part / parts, start, length, step, ranks, rows, rates, forward_part
                )
                stop = max(start + least, (reached + step // 2) // step * step)
            stop = length if length - stop < least else stop
            slices.append((d, start, stop))
            start = stop
            if stop == length:
                break
    table = np.array(slices, np.int32).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def _last_below(
    goal: float, low: int, high: int, step: int, ranks: int, rows: float, rates: Rates, forward_part: float
) -> int:
    """Halve the range in which the cost of a document's beginning passes the goal until it is at most a step wide."""
    while high - low > step:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if _seconds(middle, ranks, rows, rates, forward_part) <= goal else (low, middle)
        )
    return low
