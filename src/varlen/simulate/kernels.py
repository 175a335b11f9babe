"""Kernels of the simulator and the dispatcher; `tests/oracles/simulate.py` defines in plain Python what they return.

Every stream, links included, runs its tasks in a known order, so the start of a task is the longest path to it. The
simulator therefore needs no event queue: a task costs some memory accesses, and no task starts earlier because
another one takes longer.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.cost.memory import (
    AHEAD,
    AHEAD_TOKENS,
    ANY,
    BACKWARD_COUNTS,
    BACKWARD_KEYS,
    BEFORE,
    CLOSED,
    COPIED,
    EARLY,
    FORWARD_COUNTS,
    GATHERED,
    HEAD,
    KEYS,
    KNOWN,
    LATER,
    LOGIT_ROWS,
    MOVED,
    NEAR,
    NEXT,
    OPENED,
    OWN,
    RETURNED,
    SHARED,
    WHOLE,
)
from varlen.jit import compiled, inlined

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@compiled
def _wake(task: int, stack: Int32, height: int, waiting: Int32, behind: Int32) -> int:
    """Push the streams that wait for a task on the stack; returns its height."""
    stream = waiting[task]
    while stream >= 0:
        stack[height] = stream
        height += 1
        following = behind[stream]
        behind[stream] = -1
        stream = following
    waiting[task] = -1
    return height


@compiled
def _blocker(task: int, afters: Int32, stops: Float64) -> int:
    """Return the first unfinished task that this one waits for, or -1."""
    for column in range(afters.shape[1]):
        other = afters[task, column]
        if other >= 0 and np.isnan(stops[other]):
            return other
    return -1


@compiled
def _ready(task: int, first: int, afters: Int32, lags: Float64, stops: Float64) -> tuple[float, int]:
    """Return when a task can start, and the last task that it waits for, of several the lowest; -1 for none."""
    ready, decider = 0.0, -1
    if task > first:
        ready, decider = stops[task - 1], task - 1
    for column in range(afters.shape[1]):
        other = afters[task, column]
        if other >= 0:
            time = stops[other] + lags[other]
            if time > ready or (time == ready and (decider < 0 or other < decider)):
                ready, decider = time, np.int64(other)
    return ready, decider


@compiled
def run_tasks(
    stream_offsets: Int32,
    afters: Int32,
    lags: Float64,
    lengths: Float64,
    groups: Int32,
    num_groups: int,
    starts: Float64,
    stops: Float64,
    deciders: Int32,
) -> int:
    """Run every task as early as its stream, its dependencies and its group allow; see `graph.Graph`.

    Tasks of a group start together and end when the longest is done. `starts` and `stops` are written, NaN for tasks
    that can't run, and `deciders`: the last task that each one (or its group) waited for, -1 for none. Returns how
    many tasks ran, fewer than all in a deadlock.
    """
    num_streams, num_tasks = len(stream_offsets) - 1, len(lengths)
    starts[:] = np.nan
    stops[:] = np.nan
    deciders[:] = -1
    turn = stream_offsets[:-1].copy()
    stack = np.arange(num_streams).astype(np.int32)
    waiting = np.full(num_tasks, -1, np.int32)
    behind = np.full(num_streams, -1, np.int32)
    missing = np.zeros(num_groups, np.int32)
    for task in range(num_tasks):
        if groups[task] >= 0:
            missing[groups[task]] += 1
    arrived = np.full(num_groups, -1, np.int32)
    group_ready = np.zeros(num_groups)
    group_length = np.zeros(num_groups)
    group_decider = np.full(num_groups, -1, np.int32)
    height, ran = num_streams, 0
    while height > 0:
        height -= 1
        stream = stack[height]
        while turn[stream] < stream_offsets[stream + 1]:
            task = turn[stream]
            blocker = _blocker(task, afters, stops)
            if blocker >= 0:
                behind[stream], waiting[blocker] = waiting[blocker], stream
                break
            ready, decider = _ready(task, stream_offsets[stream], afters, lags, stops)
            group = groups[task]
            if group < 0:
                starts[task], stops[task], deciders[task] = ready, ready + lengths[task], decider
                turn[stream] += 1
                ran += 1
                height = _wake(task, stack, height, waiting, behind)
                continue
            now, before = group_ready[group], group_decider[group]
            if ready > now or (ready == now and decider >= 0 and (before < 0 or decider < before)):
                group_ready[group], group_decider[group] = ready, decider
            group_length[group] = max(group_length[group], lengths[task])
            missing[group] -= 1
            behind[stream], arrived[group] = arrived[group], stream
            if missing[group] > 0:
                break
            peer = arrived[group]
            while peer >= 0:
                task, following = turn[peer], behind[peer]
                behind[peer] = -1
                starts[task], deciders[task] = group_ready[group], group_decider[group]
                stops[task] = group_ready[group] + group_length[group]
                turn[peer] += 1
                ran += 1
                height = _wake(task, stack, height, waiting, behind)
                if peer != stream:
                    stack[height] = peer
                    height += 1
                peer = following
    return ran


@compiled
def memory_curves(
    stream_offsets: Int32,
    at_start: Float64,
    at_stop: Float64,
    starts: Float64,
    stops: Float64,
    begins: Float64,
    times: Float64,
    sizes: Float64,
) -> None:
    """Sum up the bytes of each stage over time.

    Tasks change them by `at_start` and `at_stop`, from `begins` on. `times` and `sizes` are written: for each stage a
    point at 0, and two points for each task.
    """
    point = 0
    for stage in range(len(begins)):
        size = begins[stage]
        times[point], sizes[point] = 0.0, size
        point += 1
        for task in range(stream_offsets[stage], stream_offsets[stage + 1]):
            size += at_start[task]
            times[point], sizes[point] = starts[task], size
            size += at_stop[task]
            times[point + 1], sizes[point + 1] = stops[task], size
            point += 2


@compiled
def _in_turn(counts: Float64, rank_offsets: Int32) -> None:
    """Write the rows of the next and the previous non-empty MicroPack of the rank."""
    for rank in range(len(rank_offsets) - 1):
        before = -1
        for pack in range(rank_offsets[rank], rank_offsets[rank + 1]):
            if counts[OWN, pack] > 0:
                if before >= 0:
                    counts[NEXT, before], counts[BEFORE, pack] = counts[OWN, pack], counts[OWN, before]
                before = pack


@compiled
def are_whole(slices: Int32, others: Int32, cp: int) -> NDArray[np.bool_]:
    """Return which slices are whole documents, in the other pass too, that GPUs don't share; bool `[slices]`."""
    count = 0
    for table in (slices, others):
        for one in range(table.shape[1]):
            count = max(count, table[3, one] + 1)
    there, found = np.zeros(count, np.bool_), np.zeros(slices.shape[1], np.bool_)
    for one in range(others.shape[1]):
        there[others[3, one]] |= others[0, one] == 0 and others[4, one] == 1
    for one in range(slices.shape[1]):
        is_whole = slices[0, one] == 0 and slices[4, one] == 1 and slices[2, one] * cp == 1
        found[one] = is_whole and there[slices[3, one]]
    return found


@compiled
def _ahead(slice_offsets: Int32, slices: Int32, pack: int, cp: int) -> int:
    """Return the slice of a MicroPack that GPUs gather ahead, by its rows alone; -1 if none.

    It is that of `varlen.runtime.mesh.shared_documents.gathered_ahead`, or one more.
    """
    longest, second, found = 0, 0, -1
    for one in range(slice_offsets[pack], slice_offsets[pack + 1]):
        stop = slices[1, one]
        if slices[2, one] * cp > 1:
            if stop > longest:
                longest, second, found = stop, longest, one
            else:
                second = max(second, stop)
    return found if longest <= AHEAD_TOKENS and 2 * second <= longest else -1


@compiled
def forward_counts(
    slice_offsets: Int32, slices: Int32, rank_offsets: Int32, cp: int, whole: NDArray[np.bool_]
) -> Float64:
    """Return the counts of forward MicroPacks, float64 `[9, MicroPacks]`; see `varlen.cost.memory`.

    `whole` is what `are_whole` returns.
    """
    starts, stops, num_ranks, document_ids = slices[0], slices[1], slices[2], slices[3]
    counts = np.zeros((FORWARD_COUNTS, len(slice_offsets) - 1))
    lengths = np.zeros(document_ids.max() + 1 if len(document_ids) else 0, np.int32)
    for one in range(len(stops)):
        lengths[document_ids[one]] = max(lengths[document_ids[one]], stops[one])
    for pack in range(len(slice_offsets) - 1):
        for one in range(slice_offsets[pack], slice_offsets[pack + 1]):
            start, stop, gpus = starts[one], stops[one], num_ranks[one] * cp
            share = float(gpus)
            counts[OWN, pack] += (stop - start) / share
            counts[AHEAD, pack] += ((0 if start else lengths[document_ids[one]]) - stop + start) / share
            counts[NEAR, pack] += stop / share
            if whole[one]:
                counts[WHOLE, pack] += stop / share
            if gpus > 1 and stop > counts[GATHERED, pack]:
                counts[GATHERED, pack], counts[SHARED, pack] = stop, stop / share
        one = _ahead(slice_offsets, slices, pack, cp)
        if one >= 0:
            counts[EARLY, pack] = starts[one] * (1.0 + 1.0 / (num_ranks[one] * cp))
    _in_turn(counts, rank_offsets)
    return counts


@compiled
def _piece_end(cuts: Int64, document: int, row: int) -> int:
    """Return the end of the forward slice that contains a row, or the row itself if a slice begins there."""
    key = (np.int64(document) << 32) | row
    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if cuts[middle] < key:
            low = middle + 1
        else:
            high = middle
    if row == 0 or low == len(cuts) or cuts[low] >> 32 != document:
        return row
    return cuts[low] & 0xFFFFFFFF


@compiled
def backward_counts(
    slice_offsets: Int32,
    slices: Int32,
    order: Int64,
    rank_offsets: Int32,
    cp: int,
    cuts: Int64,
    whole: NDArray[np.bool_],
) -> Float64:
    """Return the counts of backward MicroPacks in `order`, float64 `[18, MicroPacks]`.

    `cuts` are the sorted ends of forward slices, `document id << 32 | stop`; empty if both passes are cut alike.
    `whole` is what `are_whole` returns.
    """
    starts, stops, num_ranks, document_ids, is_end = slices[0], slices[1], slices[2], slices[3], slices[4]
    counts = np.zeros((BACKWARD_COUNTS, len(slice_offsets) - 1))
    for pack in range(len(order)):
        first, last = slice_offsets[order[pack]], slice_offsets[order[pack] + 1]
        taken = 0
        for one in range(first, last):
            start, stop, gpus = starts[one], stops[one], num_ranks[one] * cp
            share = float(gpus)
            counts[OWN, pack] += (stop - start) / share
            counts[NEAR, pack] += stop / share
            document = document_ids[one]
            if whole[one]:
                counts[WHOLE, pack] += stop / share
            # Several whole documents may be one piece; none of their rows is held longer than copied.
            taken += (start < stop) + (len(cuts) > 0 and _piece_end(cuts, document, start + 1) < stop)
            counts[RETURNED, pack] += (
                _piece_end(cuts, document, stop) - _piece_end(cuts, document, start)
            ) / share
            if is_end[one]:
                counts[OPENED, pack] += start / share
            else:
                counts[CLOSED, pack] += (stop - start) / share
                counts[LATER, pack] += stop / share
            moved = start / share / (2.0 if is_end[one] else 1.0)
            if gpus > 1:
                if stop > counts[GATHERED, pack]:
                    counts[GATHERED, pack], counts[SHARED, pack] = stop, stop / share
            else:
                keys = min(start, BACKWARD_KEYS) / share
                counts[KEYS, pack] = max(counts[KEYS, pack], keys)
                moved = max(moved, keys)
            counts[MOVED, pack] = max(counts[MOVED, pack], moved)
        one = _ahead(slice_offsets, slices, order[pack], cp)
        if one >= 0:
            counts[EARLY, pack] = starts[one] * (1.0 + 1.0 / (num_ranks[one] * cp))
            counts[KNOWN, pack] = stops[one] * (1.0 + 1.0 / (num_ranks[one] * cp))
        if taken > 1:
            counts[COPIED, pack] = counts[OWN, pack] - counts[RETURNED, pack]
        counts[HEAD, pack], counts[ANY, pack] = min(counts[OWN, pack], LOGIT_ROWS), counts[OWN, pack] > 0
    _in_turn(counts, rank_offsets)
    return counts


@compiled
def counts_alike(slice_offsets: Int32, slices: Int32, order: Int64, rank_offsets: Int32, cp: int) -> Any:
    """Return `forward_counts` and `backward_counts` of passes with the same slices."""
    whole = are_whole(slices, slices, cp)
    ahead = forward_counts(slice_offsets, slices, rank_offsets, cp, whole)
    back = backward_counts(slice_offsets, slices, order, rank_offsets, cp, np.zeros(0, np.int64), whole)
    return ahead, back


@compiled
def _add_up(counts: Float64, peaks: Float64, left: Float64, most: Float64, remaining: Float64) -> None:
    """Add peaks and remaining bytes of the tasks of one pass to zeros, `[ranks, chunks, MicroPacks]` each."""
    chunks, many, things = peaks.shape
    ranks, count = counts.shape[0], counts.shape[2]
    size = np.empty(count)
    for rank in range(ranks):
        for chunk in range(chunks):
            for peak in range(many):
                size[:] = 0.0
                for thing in range(things):
                    if peaks[chunk, peak, thing] != 0:
                        for pack in range(count):
                            size[pack] += peaks[chunk, peak, thing] * counts[rank, thing, pack]
                for pack in range(count):
                    most[rank, chunk, pack] = max(most[rank, chunk, pack], size[pack])
            for thing in range(things):
                if left[chunk, thing] != 0:
                    for pack in range(count):
                        remaining[rank, chunk, pack] += left[chunk, thing] * counts[rank, thing, pack]


@compiled
def task_bytes(
    forward: Float64, backward: Float64, forward_peaks: Float64, forward_left: Float64, backward_peaks: Float64,
    backward_left: Float64, apart: Float64, first: Float64, stages: int,
) -> Any:  # fmt: skip
    """Return the arrays of `simulate.memory.TaskBytes`, with ranks as first dimension.

    `forward` and `backward` are counts `[ranks, counts, MicroPacks]`, in the order of the pass; the tables are those
    of `Memory`, `apart` its `kept_for_weight_bytes` and `first` its `first_bytes`.
    """
    ranks, chunks = forward.shape[0], len(apart)
    most, remaining = np.zeros((ranks, chunks, forward.shape[2])), np.zeros((ranks, chunks, forward.shape[2]))
    back, left = np.zeros((ranks, chunks, backward.shape[2])), np.zeros((ranks, chunks, backward.shape[2]))
    waiting, begins = np.zeros((ranks, chunks, backward.shape[2])), np.zeros((ranks, stages))
    _add_up(forward, forward_peaks, forward_left, most, remaining)
    _add_up(backward, backward_peaks, backward_left, back, left)
    for rank in range(ranks):
        for chunk in range(chunks):
            if apart[chunk] != 0:
                for pack in range(backward.shape[2]):
                    waiting[rank, chunk, pack] = apart[chunk] * backward[rank, OWN, pack]
            for number in range(2):
                if first[number, chunk] != 0:
                    counts = backward if number else forward
                    for pack in range(counts.shape[2]):
                        if counts[rank, OWN, pack] > 0:
                            begins[rank, chunk % stages] += first[number, chunk] * counts[rank, OWN, pack]
                            break
    return most, remaining, back, left, waiting, begins


# The dispatcher.

_F, _B, _W = 0, 1, 2
_NEVER = np.inf
_ROUNDING = 1 + 1e-9


@inlined
def _backward_at(
    stage: int, stages: int, done: Int32, ends_f: Float64, ends_b: Float64, clock: Float64, send: Float64,
    after: Int32,
) -> Any:  # fmt: skip
    """Return the start of the earliest backward on a stage, and its chunk, the last of equals."""
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
    stage: int, stages: int, done: Int32, ends_f: Float64, clock: Float64, send: Float64, peaks_f: Float64,
    used: Float64, allowed: Float64,
) -> Any:  # fmt: skip
    """Return the start of the earliest forward on a stage, and its chunk, the last of equals."""
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
    """Return the chunk with the oldest waiting weight gradients of a stage, or -1."""
    chosen = -1
    for chunk in range(stage, done.shape[1], stages):
        if done[_W, chunk] < done[_B, chunk] and (chosen < 0 or done[_W, chunk] < done[_W, chosen]):
            chosen = chunk
    return chosen


@inlined
def _chosen(
    stage: int, stages: int, at_b: float, on_b: int, at_f: float, on_f: int, splits: bool, forward_first: bool,
    weight: Float64, clock: Float64, done: Int32, peaks_b: Float64, left_b: Float64, used: Float64, limits: Float64,
) -> Any:  # fmt: skip
    """Return the next task of a stage: start, kind, chunk."""
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
    kind: int, stage: int, chunk: int, task: int, peaks_f: Float64, left_f: Float64, peaks_b: Float64,
    left_b: Float64, waiting: Float64, used: Float64, peaks: Float64,
) -> None:  # fmt: skip
    """Update the memory of a stage by one task: its peak, and the bytes that it leaves on each rank."""
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


@inlined
def _work_of_stages(forward: Float64, backward: Float64, weight: Float64, stages: int) -> Any:
    """Return the seconds of all tasks of each stage, of those but weight gradients, and of what comes after these.

    The last is the least time of a MicroPack's backwards in the chunks before the first of the stage.
    """
    waiting_s, passes_s, drain_s = np.zeros(stages), np.zeros(stages), np.full(stages, np.inf)
    for chunk in range(forward.shape[0]):
        for task in range(forward.shape[1]):
            waiting_s[chunk % stages] += forward[chunk, task]
            passes_s[chunk % stages] += forward[chunk, task]
        for task in range(backward.shape[1]):
            waiting_s[chunk % stages] += backward[chunk, task] + weight[chunk, task]
            passes_s[chunk % stages] += backward[chunk, task]
    for task in range(backward.shape[1]):
        so_far = 0.0
        for stage in range(stages):
            drain_s[stage] = min(drain_s[stage], so_far)
            so_far += backward[stage, task]
    return waiting_s, passes_s, drain_s


@compiled
def dispatch(
    forward: Float64,
    backward: Float64,
    weight: Float64,
    send_forward: Float64,
    send_backward: Float64,
    after: Int32,
    forward_peaks: Float64,
    forward_left: Float64,
    backward_peaks: Float64,
    backward_left: Float64,
    waiting: Float64,
    begins: Float64,
    limits: Float64,
    splits: bool,
    forward_first: bool,
    limit_s: float,
    tries: int,
) -> Any:
    """Run a pipeline, and again with less memory for forwards until backwards fit too, `tries` times at most.

    Returns the last run's seconds (inf if memory doesn't suffice), its codes and its peaks; see `dispatch_once`.
    """
    stages = limits.size
    tasks = (forward.shape[1] + backward.shape[1] * (2 if splits else 1)) * (forward.shape[0] // stages)
    codes, peaks, allowed = np.zeros((stages, tasks), np.uint8), np.zeros(stages), limits.copy()
    seconds = 0.0
    for _ in range(tries):
        seconds = dispatch_once(
            forward, backward, weight, send_forward, send_backward, after, forward_peaks, forward_left,
            backward_peaks, backward_left, waiting, begins, limits, allowed, splits, forward_first, codes, peaks,
            limit_s,
        )  # fmt: skip
        if seconds == _NEVER or not (peaks > limits).any():
            break
        # The memory that backwards need is only known now: reserve it and run again, also if this run gave up, since
        # waiting earlier may finish earlier.
        allowed -= np.maximum(peaks - limits, 0.0)
    return seconds, codes, peaks


@compiled
def dispatch_once(
    forward: Float64,
    backward: Float64,
    weight: Float64,
    send_forward: Float64,
    send_backward: Float64,
    after: Int32,
    forward_peaks: Float64,
    forward_left: Float64,
    backward_peaks: Float64,
    backward_left: Float64,
    waiting: Float64,
    begins: Float64,
    limits: Float64,
    allowed: Float64,
    splits: bool,
    forward_first: bool,
    codes: NDArray[np.uint8],
    peaks: Float64,
    limit_s: float,
) -> float:
    """Run a pipeline by the rule of `varlen.simulate.dispatch`; writes `codes` and `peaks`.

    Forwards may use `allowed` bytes. Returns seconds, or inf if memory doesn't suffice. Once it must take longer than
    `limit_s`, it stops, and returns the lower bound that shows this.
    """
    chunks, stages = forward.shape[0], limits.size
    done = np.zeros((3, chunks), np.int32)
    ends_f, ends_b = np.zeros(forward.shape), np.zeros(backward.shape)
    clock, used = np.zeros(stages), begins.copy()
    counts = np.zeros(stages, np.int32)
    starts, kinds, on = np.zeros(stages), np.zeros(stages, np.int32), np.zeros(stages, np.int32)
    is_stale = np.ones(stages, np.bool_)
    left = codes.size
    peaks[:] = 0.0
    waiting_s, passes_s, drain_s = _work_of_stages(forward, backward, weight, stages)
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
        if kind != _W:
            passes_s[stage] -= took
        drain = drain_s[stage] if done[_B, stage] < backward.shape[1] else -np.inf
        least_s = clock[stage] + max(waiting_s[stage], passes_s[stage] + drain)
        if least_s > limit_s * _ROUNDING:
            return float(least_s)
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


@compiled
def run_in_step(
    codes: NDArray[np.uint8], seconds: Float64, sends: Float64, lags: Float64, leaders: Int64
) -> Float64:
    """Run one order of tasks on all ranks as `run_tasks` would; returns when each stage ends, `[stages, ranks]`.

    For plans whose passes have the same MicroPacks of whole documents, equally many on each rank. `codes` are
    `[stages, tasks]`, `seconds` `[3, chunks, ranks, MicroPacks]`, the others `[ranks, MicroPacks]`. Ranks with one
    number in `leaders`, the first of them, share that MicroPack. The result is inf if tasks wait for each other.
    """
    (_, chunks, ranks, count), (stages, tasks) = seconds.shape, codes.shape
    inputs, has_input = np.zeros((2, chunks, count, ranks)), np.zeros((2, chunks, count), np.bool_)
    has_input[_F, 0] = True
    for pack in range(count):  # the backward of one that is empty on all ranks waits for nothing
        has_input[_B, chunks - 1, pack] = seconds[_F, :, :, pack].max() == 0.0
    done, turns = np.zeros((3, chunks), np.int64), np.zeros(stages, np.int64)
    ends, links, starts = np.zeros((stages, ranks)), np.zeros((stages, 2, ranks)), np.zeros(ranks)
    ran = -1
    while ran < turns.sum():
        ran = turns.sum()
        for stage in range(stages):
            while turns[stage] < tasks:
                code = np.int64(codes[stage, turns[stage]])
                kind, chunk = code % 3, code // 3 * stages + stage
                pack = done[kind, chunk]
                if kind != _W and not has_input[kind, chunk, pack]:
                    break
                starts[:] = ends[stage]
                for rank in range(ranks):
                    if kind != _W:
                        first = leaders[rank, pack]
                        ready = max(ends[stage, rank], inputs[kind, chunk, pack, rank])
                        starts[first] = max(starts[first], ready)
                for rank in range(ranks):
                    first = leaders[rank, pack] if kind != _W else rank
                    ends[stage, rank] = starts[first] + seconds[kind, chunk, rank, pack]
                done[kind, chunk] += 1
                turns[stage] += 1
                following = chunk + 1 if kind == _F else chunk - 1
                if kind == _F and following == chunks:
                    inputs[_B, chunk, pack], has_input[_B, chunk, pack] = ends[stage], True
                elif kind != _W and following >= 0:
                    link = links[stage, kind if stages > 2 else 0]  # each of two stages has only one link
                    link[:] = np.maximum(link, ends[stage]) + sends[:, pack]
                    inputs[kind, following, pack], has_input[kind, following, pack] = (
                        link + lags[:, pack],
                        True,
                    )
    return ends if ran == codes.size else np.full((stages, ranks), np.inf)


@compiled
def stage_seconds(
    ahead: Int32, back: Int32, forward: Float64, backward: Float64, weight: Float64, pp: int
) -> Float64:
    """Return seconds of each stage of each rank, `[4, pp, ranks]`, given those of tasks, `[chunks, MicroPacks]`.

    They are those of all its tasks, and of those but weight gradients; and the least of a MicroPack's forwards in the
    chunks before this stage, and of the backwards there (0 without a MicroPack that isn't empty).
    `ahead` and `back` say where each rank's MicroPacks begin, `[ranks + 1]`.
    """
    found = np.zeros((4, pp, ahead.size - 1))
    for rank in range(ahead.size - 1):
        for chunk in range(forward.shape[0]):
            of_both = forward[chunk, ahead[rank] : ahead[rank + 1]].sum()
            of_both += backward[chunk, back[rank] : back[rank + 1]].sum()
            found[1, chunk % pp, rank] += of_both
            found[0, chunk % pp, rank] += of_both + weight[chunk, back[rank] : back[rank + 1]].sum()
        for row, seconds, begins in ((2, forward, ahead), (3, backward, back)):
            least = np.full(pp, np.inf)
            for pack in range(begins[rank], begins[rank + 1]):
                so_far, is_empty = 0.0, seconds[:, pack].max() == 0.0
                for stage in range(1, 1 if is_empty else pp):
                    so_far += seconds[stage - 1, pack]
                    least[stage] = min(least[stage], so_far)
            for stage in range(1, pp):
                found[row, stage, rank] = least[stage] if least[stage] < np.inf else 0.0
    return found
