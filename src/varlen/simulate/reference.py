"""Every kernel of the simulator in plain Python: the specification, the oracle of the tests, and `VARLEN_JIT=0`.

Written to be read. Arguments, results and every tie are those of the kernels.
"""

from __future__ import annotations

from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from varlen.simulate.reference_dispatch import dispatch as dispatch

Int32 = NDArray[np.int32]
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


def accumulated(
    slice_offsets: Int32, starts: Int32, stops: Int32, num_ranks: Int32, is_end: Int32, cp: int
) -> tuple[Float64, Float64]:
    """Count the rows whose key-value gradients begin, and those that stop, to be held in each backward MicroPack.

    The backward of a document's last slice adds to the keys and values of all rows before it; each earlier slice
    takes the sums of its own rows and is done with them.
    """
    size = len(slice_offsets) - 1
    begun, ended = np.zeros(size), np.zeros(size)
    pack_of = np.repeat(np.arange(size), np.diff(slice_offsets))
    is_last = is_end.astype(bool)
    np.add.at(begun, pack_of, np.where(is_last, starts / (cp * num_ranks), 0.0))
    np.add.at(ended, pack_of, np.where(is_last, 0.0, (stops - starts) / (cp * num_ranks)))
    return begun, ended
