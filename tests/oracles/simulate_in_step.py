"""Ranks that run whole documents in one order of tasks, and bounds of their stages, in plain Python."""

from functools import cache
from math import inf

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
FORWARD, BACKWARD, WEIGHT = range(3)
Task = tuple[int, int, int]
"""Kind, chunk, MicroPack."""


def run_in_step(
    codes: NDArray[np.uint8], seconds: Float64, sends: Float64, lags: Float64, leaders: Int64
) -> Float64:
    """Return when the last task of each stage ends on each rank.

    A task starts when the one before it on the stage has ended and its input has arrived, on all ranks that share its
    MicroPack. A link sends one message after the other.
    """
    (_, chunks, ranks, _), (stages, _) = seconds.shape, codes.shape
    of_stage: list[list[Task]] = []
    for stage, row in enumerate(codes.tolist()):
        chunk_of = [code // 3 * stages + stage for code in row]
        kinds = [(code % 3, chunk) for code, chunk in zip(row, chunk_of)]
        of_stage.append([(*kind, kinds[:turn].count(kind)) for turn, kind in enumerate(kinds)])

    def is_sent(task: Task) -> bool:
        return task[1] < chunks - 1 if task[0] == FORWARD else task[0] == BACKWARD and task[1] > 0

    def link_of(task: Task) -> tuple[int, int]:
        return task[1] % stages, task[0] if stages > 2 else 0

    def before(task: Task, others: list[Task]) -> list[Task]:
        return others[max(others.index(task) - 1, 0) : others.index(task)]

    @cache
    def end(task: Task) -> Float64:
        kind, chunk, pack = task
        ready = np.zeros(ranks)
        for other in before(task, of_stage[chunk % stages]):
            ready = np.maximum(ready, end(other))
        if kind == FORWARD and chunk > 0:
            ready = np.maximum(ready, sent((FORWARD, chunk - 1, pack)) + lags[:, pack])
        if kind == BACKWARD and chunk < chunks - 1:
            ready = np.maximum(ready, sent((BACKWARD, chunk + 1, pack)) + lags[:, pack])
        if kind == BACKWARD and chunk == chunks - 1 and seconds[FORWARD, :, :, pack].any():
            ready = np.maximum(ready, end((FORWARD, chunk, pack)))
        if kind != WEIGHT:
            ready = np.array([ready[leaders[:, pack] == leader].max() for leader in leaders[:, pack]])
        return np.asarray(ready + seconds[kind, chunk, :, pack])

    @cache
    def sent(task: Task) -> Float64:
        messages = [other for other in of_stage[task[1] % stages] if is_sent(other)]
        ready = end(task)
        for other in before(task, [message for message in messages if link_of(message) == link_of(task)]):
            ready = np.maximum(ready, sent(other))
        return np.asarray(ready + sends[:, task[2]])

    try:
        return np.array([end(tasks[-1]) for tasks in of_stage])
    except RecursionError:
        return np.full((stages, ranks), inf)


def stage_seconds(
    ahead: Int32, back: Int32, forward: Float64, backward: Float64, weight: Float64, pp: int
) -> Float64:
    """Return the sums and the least sums of stages, written out."""
    found = np.zeros((4, pp, len(ahead) - 1))
    for rank, bounds in enumerate(zip(ahead[:-1], ahead[1:], back[:-1], back[1:])):
        first, second = slice(*bounds[:2]), slice(*bounds[2:])
        for stage in range(pp):
            both = forward[stage::pp, first].sum() + backward[stage::pp, second].sum()
            found[:2, stage, rank] = both + weight[stage::pp, second].sum(), both
            for row, taken in ((2, forward[:, first]), (3, backward[:, second])):
                filled = taken[:, taken.any(axis=0)]
                found[row, stage, rank] = filled[:stage].sum(axis=0).min() if filled.size else 0.0
    return found
