"""Every kernel of the simulator in plain Python: the specification that tests hold kernels against.

Written to be read. Arguments, results and every tie are those of the kernels.
"""

from itertools import groupby, pairwise
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from tests.oracles.simulate_dispatch import dispatch as dispatch
from tests.oracles.simulate_dispatch import dispatch_once as dispatch_once
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

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


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
    """Run every task as early as its stream, the tasks it waits for and its group allow.

    A party is a group, or a task alone. As long as one is found of which all that its tasks wait for has ended,
    it starts when the last of that has arrived, and ends as late as its longest task.
    """
    offsets = stream_offsets.tolist()
    stream_of = [
        stream for stream in range(len(offsets) - 1) for _ in range(offsets[stream], offsets[stream + 1])
    ]
    members: dict[int, list[int]] = {}
    for task, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(task)
    stopped: dict[int, float] = {}
    starts[:], stops[:], deciders[:] = nan, nan, -1

    def arrivals(task: int) -> list[tuple[float, float]]:
        """When each thing that a task waits for has arrived, and minus the task that brought it."""
        found: list[tuple[float, float]] = [(0.0, -inf)]
        if task > offsets[stream_of[task]]:
            found.append((stopped.get(task - 1, inf), -(task - 1)))
        found += [
            (stopped[other] + lags[other] if other in stopped else inf, -other)
            for other in afters[task].tolist()
            if other >= 0
        ]
        return found

    turn, progress = offsets[:-1], True
    while progress:
        progress = False
        for stream in range(len(turn)):
            while turn[stream] < offsets[stream + 1]:
                task = turn[stream]
                party = members[groups[task]] if groups[task] >= 0 else [task]
                ready, negative = max(arrival for member in party for arrival in arrivals(member))
                if ready == inf:
                    break
                progress = True
                for member in party:
                    starts[member], deciders[member] = ready, -1 if negative == -inf else int(-negative)
                    stopped[member] = stops[member] = ready + max(lengths[party])
                    turn[stream_of[member]] += 1
    return len(stopped)


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
    """Add up, stage by stage, what tasks take and give back."""
    points: list[tuple[float, float]] = []
    for stage, size in enumerate(begins.tolist()):
        points.append((0.0, size))
        for task in range(stream_offsets[stage], stream_offsets[stage + 1]):
            for time, change in ((starts[task], at_start[task]), (stops[task], at_stop[task])):
                size += change
                points.append((time, size))
    times[:] = [time for time, _ in points]
    sizes[:] = [size for _, size in points]


def are_whole(slices: Int32, others: Int32, cp: int) -> NDArray[np.bool_]:
    """Which slices are documents of one slice in both passes, on one GPU."""
    both = [
        {document for start, _, _, document, is_end in table.T.tolist() if start == 0 and is_end}
        for table in (slices, others)
    ]
    alone = [ranks * cp == 1 for ranks in slices[2].tolist()]
    whole = [document in both[0] & both[1] and one for document, one in zip(slices[3].tolist(), alone)]
    return np.array(whole, np.bool_)


def forward_counts(
    slice_offsets: Int32, slices: Int32, rank_offsets: Int32, cp: int, whole: NDArray[np.bool_]
) -> Float64:
    """Count what memory asks of each forward MicroPack: `varlen.cost.memory` says what."""
    table = [tuple(one) for one in slices[:4].T.tolist()]
    lengths: dict[int, int] = {}
    for _, stop, _, document in table:
        lengths[document] = max(lengths.get(document, 0), stop)
    counts = np.zeros((FORWARD_COUNTS, len(slice_offsets) - 1))
    for pack, (first, last) in enumerate(pairwise(slice_offsets.tolist())):
        for start, stop, ranks, document in table[first:last]:
            share = float(ranks * cp)
            # All of a document's keys and values are there from its first slice on.
            ahead = (0 if start else lengths[document]) - (stop - start)
            counts[[OWN, AHEAD, NEAR], pack] += np.array([stop - start, ahead, stop]) / share
        _gathered(counts, pack, [one[1:3] for one in table[first:last]], cp)
        counts[EARLY, pack] = _ahead(table[first:last], cp)[0]
        for (start, stop, ranks, _), of_both in zip(table[first:last], whole[first:last].tolist()):
            counts[WHOLE, pack] += (stop - start) / float(ranks * cp) * of_both
    _in_turn(counts, rank_offsets)
    return counts


def backward_counts(
    slice_offsets: Int32,
    slices: Int32,
    order: Int64,
    rank_offsets: Int32,
    cp: int,
    cuts: Int64,
    whole: NDArray[np.bool_],
) -> Float64:
    """Count what memory asks of each backward MicroPack, as they run: `varlen.cost.memory` says what.

    The backward of a document's last slice adds to the keys and values of all rows before it; each earlier slice
    takes the sums of its own rows and is done with them; whole documents have nothing to sum. What went into layers
    came in pieces, those of the forward slices, and goes in them; without cuts, those of the backward slices. Of
    several pieces a copy is made, and they go at once.
    """
    table = [tuple(one) for one in slices.T.tolist()]
    pieces: dict[int, list[tuple[int, int]]] = {}
    for document, stops in groupby(cuts.tolist(), lambda key: key >> 32):
        pieces[document] = [*pairwise([0, *(stop & 0xFFFFFFFF for stop in stops)])]
    counts = np.zeros((BACKWARD_COUNTS, len(slice_offsets) - 1))
    for pack, of_all in enumerate(order.tolist()):
        mine, taken = table[slice_offsets[of_all] : slice_offsets[of_all + 1]], 0
        are_whole = whole[slice_offsets[of_all] : slice_offsets[of_all + 1]].tolist()
        for (start, stop, ranks, document, is_end), is_whole in zip(mine, are_whole):
            rows, share = stop - start, float(ranks * cp)
            found = [rows, start, stop, 0, 0] if is_end else [rows, 0, stop, rows, stop]
            counts[[OWN, OPENED, NEAR, CLOSED, LATER], pack] += np.array(found) / share
            own = [one for one in pieces.get(document, [(start, stop)]) if one[0] < stop and start < one[1]]
            counts[RETURNED, pack] += sum(last - first for first, last in own if first >= start) / share
            taken += len(own)
            counts[WHOLE, pack] += rows / share * is_whole
            keys = min(start, BACKWARD_KEYS) / share if ranks * cp == 1 else 0.0
            # Keys and values are copied before gradients of twice their width, where there are some to copy.
            moved = start / share / (2.0 if is_end else 1.0)
            counts[KEYS, pack] = max(counts[KEYS, pack], keys)
            counts[MOVED, pack] = max(counts[MOVED, pack], keys, moved)
        _gathered(counts, pack, [one[1:3] for one in mine], cp)
        counts[[EARLY, KNOWN], pack] = _ahead(mine, cp)
        if taken > 1:
            counts[COPIED, pack] = counts[OWN, pack] - counts[RETURNED, pack]
        counts[HEAD, pack], counts[ANY, pack] = min(counts[OWN, pack], LOGIT_ROWS), counts[OWN, pack] > 0
    _in_turn(counts, rank_offsets)
    return counts


def counts_alike(
    slice_offsets: Int32, slices: Int32, order: Int64, rank_offsets: Int32, cp: int
) -> tuple[Float64, Float64]:
    """Count both passes of the same slices."""
    whole = are_whole(slices, slices, cp)
    ahead = forward_counts(slice_offsets, slices, rank_offsets, cp, whole)
    none = np.zeros(0, np.int64)
    back = backward_counts(slice_offsets, slices, order, rank_offsets, cp, none, whole)
    return ahead, back


def _in_turn(counts: Float64, rank_offsets: Int32) -> None:
    """Count rows of the MicroPacks next to each on its rank that hold some."""
    for first, last in pairwise(rank_offsets.tolist()):
        some = first + np.flatnonzero(counts[OWN, first:last])
        counts[NEXT, some[:-1]], counts[BEFORE, some[1:]] = counts[OWN, some[1:]], counts[OWN, some[:-1]]


def _ahead(pieces: list[tuple[int, ...]], cp: int) -> tuple[float, float]:
    """Where the slice that is gathered ahead starts and stops, times what a rank of those that share it holds.

    It is the longest shared one, if it is not too long and no other ends in its second half.
    """
    shared = sorted((piece for piece in pieces if piece[2] * cp > 1), key=lambda piece: piece[1])
    if not shared or shared[-1][1] > AHEAD_TOKENS or any(2 * one[1] > shared[-1][1] for one in shared[:-1]):
        return 0.0, 0.0
    start, stop, ranks, *_ = shared[-1]
    return start * (1.0 + 1.0 / (ranks * cp)), stop * (1.0 + 1.0 / (ranks * cp))


def _gathered(counts: Float64, pack: int, ends: list[tuple[int, ...]], cp: int) -> None:
    """Count the longest document that ranks share, given where slices stop and who shares them."""
    shared = [(stop, ranks) for stop, ranks in ends if ranks * cp > 1]
    if shared:
        stop, ranks = max(shared, key=lambda one: one[0])
        counts[[GATHERED, SHARED], pack] = stop, stop / float(ranks * cp)


def task_bytes(
    forward: Float64,
    backward: Float64,
    forward_peaks: Float64,
    forward_left: Float64,
    backward_peaks: Float64,
    backward_left: Float64,
    apart: Float64,
    first: Float64,
    stages: int,
) -> tuple[Float64, ...]:
    """Return what tasks take at most and what they leave in each pass, and what weight gradients wait with."""
    begins = np.zeros((len(forward), stages))
    for number, counts in enumerate((forward, backward)):
        for rank, rows in enumerate(counts[:, OWN]):
            for chunk in range(len(apart)) if rows.any() else ():
                begins[rank, chunk % stages] += first[number, chunk] * rows[np.flatnonzero(rows)[0]]
    return (
        *_added_up(forward, forward_peaks, forward_left),
        *_added_up(backward, backward_peaks, backward_left),
        apart[:, np.newaxis] * backward[:, np.newaxis, OWN],
        begins,
    )


def _added_up(counts: Float64, peaks: Float64, left: Float64) -> tuple[Float64, Float64]:
    """Add up what tasks of one pass take at most and what they leave, each `[ranks, chunks, MicroPacks]`.

    A task has the highest of its peaks; each is a sum over the things that its MicroPack counts.
    """
    most, remaining = np.zeros((2, len(counts), len(peaks), counts.shape[2]))
    for rank, chunk, pack in np.ndindex(most.shape):
        counted = counts[rank, :, pack]
        most[rank, chunk, pack] = max(0.0, *(_sum(peak * counted) for peak in peaks[chunk]))
        remaining[rank, chunk, pack] = _sum(left[chunk] * counted)
    return most, remaining


def _sum(values: Float64) -> float:
    """Add up one by one, as kernels do."""
    return float(np.cumsum(values)[-1])
