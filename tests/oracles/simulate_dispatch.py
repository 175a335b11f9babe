"""The dispatcher in plain Python: the specification that tests hold kernels against."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Int32 = NDArray[np.int32]

_ROUNDING = 1 + 1e-9


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
    splits: bool,
    forward_first: bool,
    limit_s: float,
    tries: int,
) -> tuple[float, NDArray[np.uint8], Float]:
    """Run a pipeline; where a backward didn't fit, again, with what was missing kept from forwards."""
    stages, allowed = limits.size, limits.copy()
    passes = [forward, backward, backward][: 2 + splits]
    tasks = sum(one.shape[1] for one in passes) * forward.shape[0] // stages
    codes, peaks, took = np.zeros((stages, tasks), np.uint8), np.zeros(stages), 0.0
    for _ in range(tries):
        took = dispatch_once(
            forward,
            backward,
            weight,
            send_forward,
            send_backward,
            after,
            forward_peaks,
            forward_left,
            backward_peaks,
            backward_left,
            waiting,
            begins,
            limits,
            allowed,
            splits,
            forward_first,
            codes,
            peaks,
            limit_s,
        )
        missing = [max(0.0, float(peak - limit)) for peak, limit in zip(peaks, limits)]
        if took == math.inf or not any(missing):
            break
        allowed -= np.array(missing)
    return took, codes, peaks


def dispatch_once(
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
    limit_s: float,
) -> float:
    """Run a pipeline by the rule of `varlen.simulate.dispatch`; inf where memory lets it go no further.

    Every round each stage names the task that it could start first, and the earliest of all is run. What a task
    waits for is always an earlier one, so that nothing that is run later could have changed an earlier choice.
    """
    chunks, stages = forward.shape[0], limits.size
    ends: dict[tuple[str, int, int], float] = {}
    done = {kind: [0] * chunks for kind in "FBW"}
    before_backward = chunks if forward_first else -chunks
    clock, used, run = [0.0] * stages, begins.copy(), [0] * stages
    peaks[:] = 0.0
    waiting_s, passes_s = (_work_of_stages(forward, back, stages) for back in (backward + weight, backward))
    taken = (forward_peaks, forward_left, backward_peaks, backward_left, waiting)

    def candidates(stage: int) -> Iterator[tuple[float, int, str, int]]:
        """Yield what a stage could run: (start, rank among equals, kind, chunk)."""
        mine = range(chunks - stages + stage, -1, -stages)
        for place, chunk in enumerate(mine):
            task = done["B"][chunk]
            waits_for = int(after[task]) if task < backward.shape[1] else -1
            if task < backward.shape[1] and (waits_for < 0 or ("F", chunk, waits_for) in ends):
                waits = [clock[stage], ends.get(("F", chunk, waits_for), 0.0)]
                if chunk < chunks - 1:
                    waits.append(ends.get(("B", chunk + 1, task), math.inf) + float(send_backward[task]))
                yield max(waits), place, "B", chunk
        for place, chunk in enumerate(mine):
            task = done["F"][chunk]
            if task < forward.shape[1]:
                need = forward_peaks[:, chunk, task]
                waits = [clock[stage]]
                if chunk > 0:
                    waits.append(ends.get(("F", chunk - 1, task), math.inf) + float(send_forward[task]))
                if (used[:, stage] + need <= allowed[stage]).all():
                    yield max(waits), place - before_backward, "F", chunk

    def first(stage: int) -> tuple[float, int, str, int]:
        """Return what a stage runs next; weight gradients where there is time for them."""
        found = min(candidates(stage), default=(math.inf, 0, "", 0))
        behind = [chunk for chunk in range(stage, chunks, stages) if done["W"][chunk] < done["B"][chunk]]
        if splits and behind:
            chunk = min(behind, key=lambda chunk: done["W"][chunk])
            is_over = _is_over((found[3], done["B"][found[3]]), taken, used[:, stage], limits[stage])
            if (found[2] == "B" and is_over) or clock[stage] + weight[chunk, done["W"][chunk]] / 4 < found[0]:
                return clock[stage], 0, "W", chunk
        return found

    for _ in range(codes.size):
        chosen = [first(stage) for stage in range(stages)]
        stage = min(range(stages), key=lambda stage: chosen[stage][0])
        start, _, kind, chunk = chosen[stage]
        if start == math.inf:
            return math.inf
        task = done[kind][chunk]
        took = float({"F": forward, "B": backward, "W": weight}[kind][chunk, task])
        clock[stage], waiting_s[stage] = start + took, waiting_s[stage] - took
        passes_s[stage] -= took * (kind != "W")
        least_s = clock[stage] + max(waiting_s[stage], passes_s[stage] + _drain(backward, stage, done))
        if least_s > limit_s * _ROUNDING:
            return least_s
        ends[kind, chunk, task] = clock[stage]
        done[kind][chunk] += 1
        codes[stage, run[stage]] = "FBW".index(kind) + 3 * (chunk // stages)
        run[stage] += 1
        peaks[stage] = max(peaks[stage], _account(kind, (chunk, task), taken, used[:, stage]))
    return max(clock)


def _work_of_stages(forward: Float, backward: Float, stages: int) -> list[float]:
    """Seconds of all tasks of each stage."""
    seconds = [0.0] * stages
    for chunk, tasks in enumerate(np.concatenate([forward, backward], axis=1).tolist()):
        for one in tasks:
            seconds[chunk % stages] += one
    return seconds


def _drain(backward: Float, stage: int, done: dict[str, list[int]]) -> float:
    """Least seconds of a MicroPack's backwards in the chunks before a stage's first, if that has one to run."""
    is_over = done["B"][stage] == backward.shape[1]
    return -math.inf if is_over else min(float(sum(column[:stage])) for column in backward.T)


def _account(kind: str, place: tuple[int, int], taken: tuple[Float, ...], used: Float) -> float:
    """Book the memory of a task on its stage, on all ranks at once; return the most that one of them held."""
    forward_peaks, forward_left, backward_peaks, backward_left, waiting = taken
    where = (slice(None), *place)
    if kind == "W":
        used -= waiting[where]
        return 0.0
    peaks, left = (forward_peaks, forward_left) if kind == "F" else (backward_peaks, backward_left)
    most = used + peaks[where]
    used += left[where]
    return float(max(most.max(), used.max() if kind == "B" else 0.0))


def _is_over(place: tuple[int, int], taken: tuple[Float, ...], used: Float, limit: float) -> bool:
    """Return whether some rank holds too much in a backward with split weights, then or afterwards."""
    if place[1] == taken[2].shape[2]:
        return False  # none is left
    need = np.maximum(*(x[:, *place] for x in taken[2:4]))
    return bool((used + need > limit).any())
