"""Pricing kernels over flat arrays, compiled by numba; `reference.py` says in plain Python what each must return.

`price` looks rows up once a MicroPack and keys once a slice, so that a step of 10^4 slices takes about a
millisecond.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.cost.rates import (
    FORWARD_HEAD,
    FORWARD_LAYER,
    INPUT_HEAD,
    INPUT_LAYER,
    NUM_COLUMNS,
    ROWS,
    WEIGHT_HEAD,
    WEIGHT_LAYER,
    Rates,
)
from varlen.jit import compiled

Int32 = NDArray[np.int32]
Floats = NDArray[np.float64]


@compiled
def pairs(start: float, stop: float, window: float) -> float:
    """Count the pairs of a query in a slice and a key that it sees; `window` is 0 where nothing hides keys."""
    whole = (stop * (stop + 1.0) - start * (start + 1.0)) * 0.5
    if window <= 0.0 or stop <= window:
        return whole
    first = max(start, window)
    hidden = (first - window) * (stop - first) + (stop - first) * (stop - first + 1.0) * 0.5
    return whole - hidden


@compiled
def _cell(grid: Floats, value: float) -> tuple[int, float]:
    """The grid point at or below a value, and how far the value lies towards the next, in reciprocals."""
    last = len(grid) - 1
    if value <= grid[0] or last == 0:
        return 0, 0.0
    if value >= grid[last]:
        return last - 1, 1.0
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        if grid[middle] <= value:
            low = middle
        else:
            high = middle
    return low, (1.0 / grid[low] - 1.0 / value) / (1.0 / grid[low] - 1.0 / grid[high])


@compiled
def _floor(grid: Floats, value: float) -> float:
    """How many times slower than at the first grid point: fewer rows take as long as that many."""
    if len(grid) > 1 and value < grid[0]:
        return grid[0] / value
    return 1.0


@compiled
def _on_curve(curve: Floats, at: int, part: float) -> float:
    """Seconds per FLOP on a curve."""
    if part == 0.0:
        return curve[at]
    return curve[at] * (1.0 - part) + curve[at + 1] * part


@compiled
def _on_table(table: Floats, at: int, part: float, key: int, key_part: float) -> float:
    """Seconds per FLOP on a table."""
    low = _on_curve(table[at], key, key_part)
    if part == 0.0:
        return low
    return low * (1.0 - part) + _on_curve(table[at + 1], key, key_part) * part


@compiled
def _attention(
    start: float, stop: float, group: float, at: int, part: float, floor: float, rates: Rates
) -> tuple[float, float]:
    """Seconds of a slice's attention in an average layer, forward and backward."""
    key, key_part = _cell(rates.key_lengths, stop)
    flops = rates.attention_flops * pairs(start, stop, 0.0) / group * floor
    forward = flops * _on_table(rates.forward_s, at, part, key, key_part)
    backward = flops * _on_table(rates.backward_s, at, part, key, key_part)
    if rates.windowed_flops > 0.0:
        key, key_part = _cell(rates.key_lengths, min(stop, rates.window))
        flops = rates.windowed_flops * pairs(start, stop, rates.window) / group * floor
        forward += flops * _on_table(rates.forward_s, at, part, key, key_part)
        backward += flops * _on_table(rates.backward_s, at, part, key, key_part)
    return forward, backward * rates.backward_ratio


@compiled
def _exchange(start: float, stop: float, group: float, rates: Rates) -> tuple[float, float, float]:
    """Latency and seconds, forward and backward, that GPUs sharing a slice spend on keys and values of a layer."""
    if group <= 1.0:
        return 0.0, 0.0, 0.0
    link = 0 if group <= rates.node_group else 1
    share = (group - 1.0) / group * rates.link_s_per_byte[link]
    keys, rows = rates.key_value_bytes * stop, stop - start
    forward = min(keys, rates.query_bytes * rows) * share
    backward = min(2.0 * keys, rates.query_gradient_bytes * rows) * share
    return rates.link_latency_s[link], forward, backward


@compiled
def slice_seconds(
    start: float, stop: float, num_ranks: float, rows: float, rates: Rates
) -> tuple[float, float, float]:
    """Price one slice of a MicroPack of `rows` rows a GPU: forward, input and weight seconds of an average layer.

    The head is spread evenly over the model's layers; launches and latencies are left out, so that slices add up.
    """
    group = num_ranks * rates.cp
    own = (stop - start) / group
    scaled = rows * rates.row_scale
    at, part = _cell(rates.query_rows, scaled)
    floor = _floor(rates.query_rows, scaled)
    forward, backward = _attention(start, stop, group, at, part, floor, rates)
    _, moved, moved_back = _exchange(start, stop, group, rates)
    exchange = max(0.0, moved - rates.exchange_overlap * forward)
    exchange_back = max(0.0, moved_back - rates.exchange_overlap * backward)
    at, part = _cell(rates.gemm_rows, rows)
    floor = _floor(rates.gemm_rows, rows)
    flops = own * floor * _on_curve(rates.gemm_s, at, part)
    back_flops = own * floor * _on_curve(rates.gemm_backward_s, at, part)
    forward += rates.linear_flops * flops + rates.collective_s * own
    again = rates.recompute * forward
    head = rates.head_flops / rates.num_layers
    weight = (rates.linear_flops + head) * back_flops
    forward = max(forward + exchange, rates.host_s_per_token * start / group) + head * flops
    backward += again + exchange_back + (rates.collective_s + rates.reuse_s) * own
    backward += rates.linear_flops * back_flops
    backward = max(backward, rates.host_back_s_per_token * start / group) + head * back_flops
    return forward, backward, weight


@compiled
def price(slice_offsets: Int32, starts: Int32, stops: Int32, num_ranks: Int32, rates: Rates) -> Floats:
    """Price MicroPacks: float64 `[num_micropacks, 7]`, seconds and rows of one GPU."""
    size = len(slice_offsets) - 1
    priced = np.zeros((size, NUM_COLUMNS))
    for pack in range(size):
        first, last = slice_offsets[pack], slice_offsets[pack + 1]
        if first == last:
            continue
        rows = 0.0
        for one in range(first, last):
            rows += (stops[one] - starts[one]) / (rates.cp * num_ranks[one])
        scaled = rows * rates.row_scale
        at, part = _cell(rates.query_rows, scaled)
        floor = _floor(rates.query_rows, scaled)
        forward, backward, exchange, exchange_back = 0.0, 0.0, 0.0, 0.0
        latency, host = 0.0, 0.0
        for one in range(first, last):
            start, stop, group = float(starts[one]), float(stops[one]), rates.cp * num_ranks[one]
            attended, attended_back = _attention(start, stop, group, at, part, floor, rates)
            waited, moved, moved_back = _exchange(start, stop, group, rates)
            forward += attended
            backward += attended_back
            latency = max(latency, waited)
            exchange += max(0.0, moved - rates.exchange_overlap * attended)
            exchange_back += max(0.0, moved_back - rates.exchange_overlap * attended_back)
            host += start / group
        at, part = _cell(rates.gemm_rows, rows)
        floor = rows * _floor(rates.gemm_rows, rows)
        linear = floor * _on_curve(rates.gemm_s, at, part)
        linear_back = floor * _on_curve(rates.gemm_backward_s, at, part)
        forward += rates.linear_flops * linear + rates.collective_s * rows + rates.launch_s
        again = rates.recompute * forward
        backward += again + rates.linear_flops * linear_back + rates.launch_s
        backward += (rates.collective_s + rates.reuse_s) * rows
        forward = max(forward + exchange + latency, rates.host_s_per_token * host)
        backward = max(backward + exchange_back + 2.0 * latency, rates.host_back_s_per_token * host)
        priced[pack, FORWARD_LAYER] = forward
        priced[pack, FORWARD_HEAD] = rates.head_flops * linear + rates.launch_s
        priced[pack, INPUT_LAYER] = backward
        priced[pack, INPUT_HEAD] = rates.head_flops * linear_back + rates.launch_s
        priced[pack, WEIGHT_LAYER] = rates.linear_flops * linear_back + rates.launch_s
        priced[pack, WEIGHT_HEAD] = rates.head_flops * linear_back + rates.launch_s
        priced[pack, ROWS] = rows
    return priced


@compiled
def _seconds(stop: int, num_ranks: int, rows: float, rates: Rates, forward_part: float) -> float:
    """What the tokens before `stop` cost in the backward pass, and a part of what they cost in the forward pass."""
    forward, inputs, weights = slice_seconds(0.0, float(stop), float(num_ranks), rows, rates)
    return float(forward_part * forward + inputs + weights)


@compiled
def document_seconds(
    lengths: Int32, num_ranks: Int32, rows: float, forward_part: float, rates: Rates
) -> Floats:
    """Return what each whole document costs in both passes, per layer and GPU, in MicroPacks of `rows` rows."""
    seconds = np.zeros(lengths.size)
    for d in range(lengths.size):
        if lengths[d] > 0:
            seconds[d] = _seconds(lengths[d], num_ranks[d], rows, rates, forward_part)
    return seconds


@compiled
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
    """Cut documents into slices of equal cost, about a budget each.

    Returns:
        document_ids, starts, stops int32 `[num_slices]`.
    """
    n = lengths.size
    most = n + int(lengths.sum() // least_rows) + 1
    ids, starts, stops = np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)
    used = 0
    for d in range(n):
        length, step = int(lengths[d]), multiple * num_ranks[d]
        least = -(-least_rows * num_ranks[d] // step) * step
        parts = max(1, min(int(np.ceil(work[d] / budgets[d] - 0.15)), length // least))
        rows = min(float(length) / parts / num_ranks[d], 65536.0)
        whole = _seconds(length, num_ranks[d], rows, rates, forward_part)
        if parts > 1:
            # The last slice of equal cost has the fewest rows: no more slices than leave it enough.
            last = whole - _seconds(length - least, num_ranks[d], rows, rates, forward_part)
            parts = max(1, min(parts, int(whole / last)))
        start = 0
        for part in range(parts):
            stop = length
            if part < parts - 1:
                low, high, goal = start, length, whole * (part + 1) / parts
                while high - low > step:
                    middle = (low + high) // 2
                    if _seconds(middle, num_ranks[d], rows, rates, forward_part) <= goal:
                        low = middle
                    else:
                        high = middle
                stop = max(start + least, (low + step // 2) // step * step)
                if length - stop < least:
                    stop = length
            ids[used], starts[used], stops[used] = d, start, stop
            used += 1
            start = stop
            if stop == length:
                break
    return ids[:used], starts[:used], stops[:used]
