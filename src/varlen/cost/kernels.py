"""Pricing kernels over flat arrays; `tests/oracles/cost.py` defines in plain Python what each returns.

`price` looks rows up once per MicroPack and keys once per slice, so that a step of 10^4 slices takes a fraction of a
millisecond. `Rates` is unpacked before any loop: passing a tuple of arrays updates all their reference counts, which
takes several times as long as pricing a slice.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any, NamedTuple

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
from varlen.jit import compiled, inlined

Int32 = NDArray[np.int32]
Floats = NDArray[np.float64]


class _Scalars(NamedTuple):
    """The scalars of `Rates`, links included."""

    attention_flops: float
    windowed_flops: float
    window: float
    backward_ratio: float
    linear_flops: float
    head_flops: float
    """Per average layer."""
    weight_ratio: float
    head_weight_ratio: float
    recompute: float
    reuse_s: float
    collective_s: float
    cp: float
    node_group: float
    near_latency_s: float
    far_latency_s: float
    near_s_per_byte: float
    far_s_per_byte: float
    key_value_bytes: float
    key_value_back_bytes: float
    query_bytes: float
    query_gradient_bytes: float
    exchanges_back: float
    exchange_overlap: float
    host_s_per_token: float
    host_back_s_per_token: float


class _GridPoint(NamedTuple):
    """Grid points and interpolation weights in `Rates` for MicroPacks with a number of rows."""

    at: int
    weight: float
    floor: float
    gemm_floor: float
    gemm_s: float
    gemm_backward_s: float


@compiled
def _scalars(rates: Rates) -> Any:
    """Return the scalars of rates."""
    return _Scalars(
        rates.attention_flops,
        rates.windowed_flops,
        rates.window,
        rates.backward_ratio,
        rates.linear_flops,
        rates.head_flops / rates.num_layers,
        rates.weight_ratio,
        rates.head_weight_ratio,
        rates.recompute,
        rates.reuse_s,
        rates.collective_s,
        rates.cp,
        rates.node_group,
        rates.link_latency_s[0],
        rates.link_latency_s[1],
        rates.link_s_per_byte[0],
        rates.link_s_per_byte[1],
        rates.key_value_bytes,
        rates.key_value_back_bytes,
        rates.query_bytes,
        rates.query_gradient_bytes,
        rates.exchanges_back,
        rates.exchange_overlap,
        rates.host_s_per_token,
        rates.host_back_s_per_token,
    )


@compiled
def pairs(start: float, stop: float, window: float) -> float:
    """Count the query-key pairs of a slice; `window` is 0 for layers without one."""
    whole = (stop * (stop + 1.0) - start * (start + 1.0)) * 0.5
    if window <= 0.0 or stop <= window:
        return whole
    first = max(start, window)
    hidden = (first - window) * (stop - first) + (stop - first) * (stop - first + 1.0) * 0.5
    return whole - hidden


@compiled
def _cell(grid: Floats, value: float) -> tuple[int, float]:
    """Return the grid point at or below a value, and the weight of the next one, in reciprocals."""
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
    """Return how many times slower a value is than the first grid point: fewer rows take as long as these."""
    if len(grid) > 1 and value < grid[0]:
        return grid[0] / value
    return 1.0


@compiled
def _on_curve(curve: Floats, at: int, weight: float) -> float:
    """Seconds per FLOP on a curve."""
    if weight == 0.0:
        return curve[at]
    return curve[at] * (1.0 - weight) + curve[at + 1] * weight


@compiled
def _on_row(table: Floats, at: int, key: int, weight: float) -> float:
    """Seconds per FLOP on a row of a table, without creating an array for the row."""
    if weight == 0.0:
        return table[at, key]
    return table[at, key] * (1.0 - weight) + table[at, key + 1] * weight


@compiled
def _on_table(table: Floats, at: int, weight: float, key: int, key_weight: float) -> float:
    """Seconds per FLOP on a table."""
    low = _on_row(table, at, key, key_weight)
    if weight == 0.0:
        return low
    return low * (1.0 - weight) + _on_row(table, at + 1, key, key_weight) * weight


@compiled
def _grid_point(
    rows: float, scale: float, query_rows: Floats, gemm_rows: Floats, gemm_s: Floats, gemm_backward_s: Floats
) -> Any:
    """Return the grid points and weights for a number of rows."""
    scaled = rows * scale
    at, weight = _cell(query_rows, scaled)
    gemm_at, gemm_weight = _cell(gemm_rows, rows)
    return _GridPoint(
        at,
        weight,
        _floor(query_rows, scaled),
        _floor(gemm_rows, rows),
        _on_curve(gemm_s, gemm_at, gemm_weight),
        _on_curve(gemm_backward_s, gemm_at, gemm_weight),
    )


@inlined
def _attention(
    start: float, stop: float, group: float, point: _GridPoint, keys: Floats, forward_s: Floats, backward_s: Floats,
    scalars: _Scalars,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of a slice's attention in an average layer, forward and backward."""
    at, weight, floor = point.at, point.weight, point.floor
    key, key_weight = _cell(keys, stop)
    flops = scalars.attention_flops * pairs(start, stop, 0.0) / group * floor
    forward = flops * _on_table(forward_s, at, weight, key, key_weight)
    backward = flops * _on_table(backward_s, at, weight, key, key_weight)
    if scalars.windowed_flops > 0.0:
        key, key_weight = _cell(keys, min(stop, scalars.window))
        flops = scalars.windowed_flops * pairs(start, stop, scalars.window) / group * floor
        forward += flops * _on_table(forward_s, at, weight, key, key_weight)
        backward += flops * _on_table(backward_s, at, weight, key, key_weight)
    return forward, backward * scalars.backward_ratio


@inlined
def _exchange(start: float, stop: float, group: float, scalars: _Scalars) -> tuple[float, float, float]:
    """Latency and seconds, forward and backward, of the exchange among GPUs that share a slice, in one layer."""
    if group <= 1.0:
        return 0.0, 0.0, 0.0
    is_near = group <= scalars.node_group
    latency = scalars.near_latency_s if is_near else scalars.far_latency_s
    share = (group - 1.0) / group * (scalars.near_s_per_byte if is_near else scalars.far_s_per_byte)
    rows = stop - start
    forward = min(scalars.key_value_bytes * stop, scalars.query_bytes * rows) * share
    backward = min(scalars.key_value_back_bytes * stop, scalars.query_gradient_bytes * rows) * share
    return latency, forward, backward


@inlined
def _slice_seconds(
    start: float, stop: float, num_ranks: float, point: _GridPoint, keys: Floats, forward_s: Floats,
    backward_s: Floats, scalars: _Scalars,
) -> tuple[float, float, float]:  # fmt: skip
    """See `slice_seconds`."""
    group = num_ranks * scalars.cp
    own = (stop - start) / group
    forward, backward = _attention(start, stop, group, point, keys, forward_s, backward_s, scalars)
    _, moved, moved_back = _exchange(start, stop, group, scalars)
    exchange = max(0.0, moved - scalars.exchange_overlap * forward)
    exchange_back = max(0.0, moved_back - scalars.exchange_overlap * backward)
    flops = own * point.gemm_floor * point.gemm_s
    back_flops = own * point.gemm_floor * point.gemm_backward_s
    forward += scalars.linear_flops * flops + scalars.collective_s * own
    again = scalars.recompute * forward
    head = scalars.head_flops
    weight = (scalars.linear_flops * scalars.weight_ratio + head * scalars.head_weight_ratio) * back_flops
    forward = max(forward + exchange, scalars.host_s_per_token * start / group) + head * flops
    backward += again + exchange_back + (scalars.collective_s + scalars.reuse_s) * own
    backward += scalars.linear_flops * back_flops
    backward = max(backward, scalars.host_back_s_per_token * start / group) + head * back_flops
    return forward, backward, weight


@compiled
def slice_seconds(
    start: float, stop: float, num_ranks: float, rows: float, rates: Rates
) -> tuple[float, float, float]:
    """Price one slice of a MicroPack of `rows` rows per GPU: forward, input and weight seconds of an average layer.

    The head is spread evenly over the model's layers; launches and latencies are left out, so that slices add up.
    """
    point = _grid_point(
        rows, rates.row_scale, rates.query_rows, rates.gemm_rows, rates.gemm_s, rates.gemm_backward_s
    )
    return _slice_seconds(
        start, stop, num_ranks, point, rates.key_lengths, rates.forward_s, rates.backward_s, _scalars(rates)
    )


@compiled
def price(slice_offsets: Int32, starts: Int32, stops: Int32, num_ranks: Int32, rates: Rates) -> Floats:
    """Price MicroPacks: float64 `[num_micropacks, 7]`, seconds and rows of one GPU."""
    size = len(slice_offsets) - 1
    priced = np.zeros((size, NUM_COLUMNS))
    scalars, launch_s, head_flops = _scalars(rates), rates.launch_s, rates.head_flops
    slice_launch_s, slice_launch_back_s = rates.slice_launch_s, rates.slice_launch_back_s
    keys, forward_s, backward_s, scale = rates.key_lengths, rates.forward_s, rates.backward_s, rates.row_scale
    query_rows, gemm_rows = rates.query_rows, rates.gemm_rows
    gemm_s, gemm_backward_s = rates.gemm_s, rates.gemm_backward_s
    for pack in range(size):
        first, last = slice_offsets[pack], slice_offsets[pack + 1]
        if first == last:
            continue
        rows = 0.0
        for one in range(first, last):
            rows += (stops[one] - starts[one]) / (scalars.cp * num_ranks[one])
        point = _grid_point(rows, scale, query_rows, gemm_rows, gemm_s, gemm_backward_s)
        forward, backward, exchange, exchange_back = 0.0, 0.0, 0.0, 0.0
        latency, host, launched = 0.0, 0.0, 0
        for one in range(first, last):
            start, stop, group = float(starts[one]), float(stops[one]), scalars.cp * num_ranks[one]
            attended, attended_back = _attention(
                start, stop, group, point, keys, forward_s, backward_s, scalars
            )
            waited, moved, moved_back = _exchange(start, stop, group, scalars)
            forward += attended
            backward += attended_back
            latency = max(latency, waited)
            exchange += max(0.0, moved - scalars.exchange_overlap * attended)
            exchange_back += max(0.0, moved_back - scalars.exchange_overlap * attended_back)
            host += start / group
            launched += start > 0.0
        linear = rows * point.gemm_floor * point.gemm_s
        linear_back = rows * point.gemm_floor * point.gemm_backward_s
        forward += scalars.linear_flops * linear + scalars.collective_s * rows + launch_s
        forward += slice_launch_s * launched
        again = scalars.recompute * forward
        backward += again + scalars.linear_flops * linear_back + launch_s
        backward += slice_launch_back_s * launched
        backward += (scalars.collective_s + scalars.reuse_s) * rows
        forward = forward + exchange + latency
        backward = backward + exchange_back + scalars.exchanges_back * latency
        priced[pack, FORWARD_LAYER] = max(forward, scalars.host_s_per_token * host)
        priced[pack, FORWARD_HEAD] = head_flops * linear + launch_s
        priced[pack, INPUT_LAYER] = max(backward, scalars.host_back_s_per_token * host)
        priced[pack, INPUT_HEAD] = head_flops * linear_back + launch_s
        priced[pack, WEIGHT_LAYER] = scalars.linear_flops * scalars.weight_ratio * linear_back + launch_s
        priced[pack, WEIGHT_HEAD] = head_flops * scalars.head_weight_ratio * linear_back + launch_s
        priced[pack, ROWS] = rows
    return priced


@compiled
def _seconds(
    stop: int, num_ranks: int, point: _GridPoint, keys: Floats, forward_s: Floats, backward_s: Floats,
    scalars: _Scalars, forward_part: float,
) -> float:  # fmt: skip
    """Seconds of the tokens before `stop` in the backward pass, and `forward_part` of those in the forward pass."""
    forward, inputs, weights = _slice_seconds(
        0.0, float(stop), float(num_ranks), point, keys, forward_s, backward_s, scalars
    )
    return float(forward_part * forward + inputs + weights)


@compiled
def document_seconds(
    lengths: Int32, num_ranks: Int32, rows: float, forward_part: float, rates: Rates
) -> Floats:
    """Return seconds of each whole document in both passes, per layer and GPU, in MicroPacks of `rows` rows."""
    point = _grid_point(
        rows, rates.row_scale, rates.query_rows, rates.gemm_rows, rates.gemm_s, rates.gemm_backward_s
    )
    keys, forward_s, backward_s = rates.key_lengths, rates.forward_s, rates.backward_s
    scalars = _scalars(rates)
    seconds = np.zeros(lengths.size)
    for d in range(lengths.size):
        if lengths[d] > 0:
            seconds[d] = _seconds(
                lengths[d], num_ranks[d], point, keys, forward_s, backward_s, scalars, forward_part
            )
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
    """Cut documents into slices of equal cost, about a budget each; returns document ids, starts and stops."""
    n = lengths.size
    most = n + int(lengths.sum() // least_rows) + 1
    ids, starts, stops = np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)
    scalars, scale = _scalars(rates), rates.row_scale
    keys, forward_s, backward_s = rates.key_lengths, rates.forward_s, rates.backward_s
    query_rows, gemm_rows = rates.query_rows, rates.gemm_rows
    gemm_s, gemm_backward_s = rates.gemm_s, rates.gemm_backward_s
    used = 0
    for d in range(n):
        length, step = int(lengths[d]), multiple * num_ranks[d]
        least = -(-least_rows * num_ranks[d] // step) * step
        parts = max(1, min(int(np.ceil(work[d] / budgets[d] - 0.15)), length // least))
        rows = min(float(length) / parts / num_ranks[d], 65536.0)
        point = _grid_point(rows, scale, query_rows, gemm_rows, gemm_s, gemm_backward_s)
        whole = _seconds(length, num_ranks[d], point, keys, forward_s, backward_s, scalars, forward_part)
        if parts > 1:
            # The last slice has the fewest rows: reduce the number of slices until it has enough.
            last = whole - _seconds(
                length - least, num_ranks[d], point, keys, forward_s, backward_s, scalars, forward_part
            )
            parts = max(1, min(parts, int(whole / last)))
        start = 0
        for part in range(parts):
            stop = length
            if part < parts - 1:
                low, high, goal = start, length, whole * (part + 1) / parts
                while high - low > step:
                    middle = (low + high) // 2
                    reached = _seconds(
                        middle, num_ranks[d], point, keys, forward_s, backward_s, scalars, forward_part
                    )
                    if reached <= goal:
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
