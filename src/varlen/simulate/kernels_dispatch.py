"""The dispatcher as a numba kernel: which task each stage of a pipeline runs next; `tests/oracles` has its oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled, inlined

Float = NDArray[np.float64]
Int32 = NDArray[np.int32]

_F, _B, _W = 0, 1, 2
_NEVER = np.inf
_ROUNDING = 1 + 1e-9


@inlined
def _backward_at(
    stage: int, stages: int, done: Int32, ends_f: Float, ends_b: Float, clock: Float, send: Float, after: Int32,
) -> Any:  # fmt: skip
    """The chunk whose next backward can start first on a stage, and when; the last chunk first among equals."""
    chunks, count = done.shape[1], ends_b.shape[1]
    best, chosen = _NEVER, -1
    for chunk in range(chunks - stages + stage, -1, -stages):
        task = done[_B, chunk]
        if task >= count:
            continue
        waits_for = after[task]
        if done[_F, chunk] <= waits_for:
            continue
        start = clock[stage]
        if waits_for >= 0:
            start = max(start, ends_f[chunk, waits_for])
        if chunk < chunks - 1:
            if done[_B, chunk + 1] <= task:
                continue
            start = max(start, ends_b[chunk + 1, task] + send[task])
        if start < best:
            best, chosen = start, chunk
    return best, chosen


@inlined
def _forward_at(
    stage: int, stages: int, done: Int32, ends_f: Float, clock: Float, send: Float, peaks_f: Float,
    used: Float, allowed: Float,
) -> Any:  # fmt: skip
    """The chunk whose next forward can start first on a stage, and when; the last chunk first among equals."""
    chunks, count = ends_f.shape
    best, chosen = _NEVER, -1
    for chunk in range(chunks - stages + stage, -1, -stages):
        task = done[_F, chunk]
        if task >= count:
            continue
        is_full = False
        for rank in range(peaks_f.shape[0]):
            is_full |= used[rank, stage] + peaks_f[rank, chunk, task] > allowed[stage]
        if is_full:
            continue
        start = clock[stage]
        if chunk > 0:
            if done[_F, chunk - 1] <= task:
                continue
            start = max(start, ends_f[chunk - 1, task] + send[task])
        if start < best:
            best, chosen = start, chunk
    return best, chosen


@inlined
def _weight_at(stage: int, stages: int, done: Int32) -> int:
    """The chunk with the oldest weight gradients that wait on a stage; -1 if none do."""
    chosen = -1
    for chunk in range(stage, done.shape[1], stages):
        if done[_W, chunk] < done[_B, chunk] and (chosen < 0 or done[_W, chunk] < done[_W, chosen]):
            chosen = chunk
    return chosen


@inlined
def _chosen(
    stage: int, stages: int, at_b: float, on_b: int, at_f: float, on_f: int, splits: bool, forward_first: bool,
    weight: Float, clock: Float, done: Int32, peaks_b: Float, left_b: Float, used: Float, limits: Float,
) -> Any:  # fmt: skip
    """What a stage runs next: (start, kind, chunk)."""
    is_backward = at_b < at_f if forward_first else at_b <= at_f
    start, kind, chunk = (at_b, _B, on_b) if is_backward else (at_f, _F, on_f)
    waiting = _weight_at(stage, stages, done) if splits else -1
    if waiting < 0:
        return start, kind, chunk
    is_full = False
    if kind == _B and start < _NEVER:
        task = done[_B, chunk]
        for rank in range(peaks_b.shape[0]):
            need = max(peaks_b[rank, chunk, task], left_b[rank, chunk, task])
            is_full |= used[rank, stage] + need > limits[stage]
    if is_full or clock[stage] + weight[waiting, done[_W, waiting]] / 4 < start:
        return clock[stage], _W, waiting
    return start, kind, chunk


@inlined
def _account(
    kind: int, stage: int, chunk: int, task: int, peaks_f: Float, left_f: Float, peaks_b: Float, left_b: Float,
    waiting: Float, used: Float, peaks: Float,
) -> None:  # fmt: skip
    """Book the memory of one task on its stage: what each rank holds while it runs, and what it leaves behind."""
    for rank in range(peaks_f.shape[0]):
        if kind == _F:
            peaks[stage] = max(peaks[stage], used[rank, stage] + peaks_f[rank, chunk, task])
            used[rank, stage] += left_f[rank, chunk, task]
        elif kind == _B:
            peaks[stage] = max(peaks[stage], used[rank, stage] + peaks_b[rank, chunk, task])
            used[rank, stage] += left_b[rank, chunk, task]
            peaks[stage] = max(peaks[stage], used[rank, stage])
        else:
            used[rank, stage] -= waiting[rank, chunk, task]


@compiled
def dispatch(
    forward: Float,
    backward: Float,
    weight: Float,
    send_forward: Float,
    send_backward: Float,
    after: Int32,
    forward_peaks: Float,
    forward_left: Float,
    backward_peaks: Float,
    backward_left: Float,
    waiting: Float,
    begins: Float,
    limits: Float,
    allowed: Float,
    splits: bool,
    forward_first: bool,
    codes: NDArray[np.uint8],
    peaks: Float,
    limit_s: float = np.inf,
) -> float:
    """Run a pipeline by the rule of `varlen.simulate.dispatch`; inf where memory lets it go no further."""
    chunks, stages = forward.shape[0], limits.size
    done = np.zeros((3, chunks), np.int32)
    ends_f, ends_b = np.zeros(forward.shape), np.zeros(backward.shape)
    clock, used = np.zeros(stages), begins.copy()
    counts = np.zeros(stages, np.int32)
    starts, kinds, on = np.zeros(stages), np.zeros(stages, np.int32), np.zeros(stages, np.int32)
    is_stale = np.ones(stages, np.bool_)
    left = codes.size
    peaks[:] = 0.0
    waiting_s = np.zeros(stages)
    for chunk in range(chunks):
        for task in range(forward.shape[1]):
            waiting_s[chunk % stages] += forward[chunk, task]
        for task in range(backward.shape[1]):
            waiting_s[chunk % stages] += backward[chunk, task] + weight[chunk, task]
    while left > 0:
        stage = -1
        for s in range(stages):
            if is_stale[s]:
                is_stale[s] = False
                at_b, on_b = _backward_at(s, stages, done, ends_f, ends_b, clock, send_backward, after)
                at_f, on_f = _forward_at(s, stages, done, ends_f, clock, send_forward, forward_peaks,
                                         used, allowed)  # fmt: skip
                starts[s], kinds[s], on[s] = _chosen(
                    s, stages, at_b, on_b, at_f, on_f, splits, forward_first, weight, clock, done,
                    backward_peaks, backward_left, used, limits,
                )  # fmt: skip
            if stage < 0 or starts[s] < starts[stage]:
                stage = s
        if starts[stage] == _NEVER:
            return _NEVER
        kind, chunk = kinds[stage], on[stage]
        task = done[kind, chunk]
        took = (
            forward[chunk, task]
            if kind == _F
            else backward[chunk, task]
            if kind == _B
            else weight[chunk, task]
        )
        clock[stage] = starts[stage] + took
        waiting_s[stage] -= took
        if clock[stage] + waiting_s[stage] > limit_s * _ROUNDING:
            return float(clock[stage] + waiting_s[stage])
        _account(kind, stage, chunk, task, forward_peaks, forward_left, backward_peaks, backward_left, waiting,
                 used, peaks)  # fmt: skip
        if kind == _F:
            ends_f[chunk, task] = clock[stage]
        elif kind == _B:
            ends_b[chunk, task] = clock[stage]
        done[kind, chunk] += 1
        codes[stage, counts[stage]] = kind + 3 * (chunk // stages)
        counts[stage] += 1
        is_stale[stage] = True
        if kind != _W:
            is_stale[(chunk + 1 if kind == _F else chunk - 1) % stages] = True
        left -= 1
    return float(clock.max())
