"""Fixed schedules: 1F1B, interleaved, zero-bubble, slices. `fixed_schedule` chooses the planner's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.cost.memory import BACKWARD_COUNTS, FORWARD_COUNTS, Memory
from varlen.errors import SettingError
from varlen.simulate.api import run_plan
from varlen.simulate.graph import Durations
from varlen.simulate.timeline import Timeline
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, Mesh, MicroPacks, StepPlan, TaskArray
from varlen.types import FloatArray, Int32Array


class Schedule(NamedTuple):
    """The tasks of one data-parallel rank, stage by stage, as in `StepPlan`."""

    tasks: TaskArray
    """uint8 `[num_tasks]`: `kind + 3 * chunk on the stage`."""
    offsets: Int32Array
    """int32 `[pp + 1]`: stage s runs those from `offsets[s]` to the next."""


def one_f_one_b(pp: int, count: int) -> Schedule:
    """Return the 1F1B schedule: each stage alternates forwards and backwards as soon as the first backward can run.

    Stage s runs min(count, pp - s - 1) forwards first and so holds min(count, pp - s) MicroPacks at most; with equal
    costs a step takes (count + pp - 1)(forward + backward) (PipeDream-flush; Narayanan et al. 2021,
    "Memory-Efficient Pipeline-Parallel DNN Training", arXiv 2006.09503).

    >>> one_f_one_b(2, 2).tasks.tolist()
    [0, 0, 1, 1, 0, 1, 0, 1]
    """
    return sliced(pp, count, 1)


def sliced(pp: int, count: int, slices: int) -> Schedule:
    """Return 1F1B over slices: each document is `slices` MicroPacks, of which the last runs backward first.

    A stage waits for the end of the first document, so it runs slices - 1 more forwards before its first backward
    (Sun et al. 2024, "Seq1F1B", arXiv 2406.03488). In `StepPlan.backward`, the MicroPacks of a document are in
    reverse order.
    """
    _check(pp=pp, slices=slices)
    _check(0, count=count)
    if count % slices:
        raise _multiple(count, slices, "slices a document")
    stages = []
    for stage in range(pp):
        ahead = min(count, pp - stage + slices - 2)
        steady = [FORWARD, BACKWARD] * (count - ahead)
        stages.append([FORWARD] * ahead + steady + [BACKWARD] * ahead)
    return _schedule(stages)


@functools.lru_cache(maxsize=4096, typed=True)
def interleaved(pp: int, virtual: int, count: int) -> Schedule:
    """Return the interleaved 1F1B schedule of stages that hold `virtual` chunks of layers; plain 1F1B for one chunk.

    MicroPacks run in rounds of pp: all of a round through one chunk, then through the next. With equal costs
    a step takes (count + (pp - 1) / virtual)(forward + backward), in seconds of all chunks of a stage. Stage s holds
    up to 2 (pp - s - 1) + (virtual - 1) pp + 1 MicroPacks of a chunk each, more than necessary, to overlap messages,
    as in Megatron (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", arXiv 2104.04473, section 2.2).
    """
    _check(pp=pp, virtual=virtual)
    _check(0, count=count)
    if virtual == 1:
        return one_f_one_b(pp, count)
    if count % pp:
        raise _multiple(count, pp, "stages")
    total = count * virtual
    turn = np.arange(total) % (pp * virtual) // pp  # the chunk of each forward
    ahead_codes = FORWARD + KINDS * turn
    back_codes = BACKWARD + KINDS * (virtual - 1 - turn)
    stages = []
    for stage in range(pp):
        ahead = min(total, 2 * (pp - stage - 1) + (virtual - 1) * pp)
        steady = np.stack((ahead_codes[ahead:], back_codes[: total - ahead]), axis=1).ravel()
        stages.append([*ahead_codes[:ahead], *steady, *back_codes[total - ahead :]])
    return _schedule(stages)


def zero_bubble(pp: int, count: int) -> Schedule:
    """Return ZB-H1: input gradients first, weight gradients later, where the pipeline would be idle.

    Every stage holds at most pp MicroPacks, as the first stage of 1F1B does: stage s runs pp - s - 1 forwards ahead,
    and delays weight gradients by s MicroPacks. With equal costs and count >= pp a step takes
    count(forward + input + weight) + (pp - 1)(forward + input - weight), if weight is the least of the three
    (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241).

    >>> zero_bubble(2, 2).tasks.tolist()
    [0, 0, 1, 2, 1, 2, 0, 1, 0, 1, 2, 2]
    """
    _check(pp=pp)
    _check(0, count=count)
    stages = []
    for stage in range(pp):
        ahead = min(count, pp - stage - 1)
        order = [FORWARD] * ahead
        for done in range(count):
            order += [FORWARD] * (ahead + done < count) + [BACKWARD] + [WEIGHT] * (done >= stage)
        stages.append(order + [WEIGHT] * min(stage, count))
    return _schedule(stages)


def fixed_schedule(mesh: Mesh, count: int) -> Schedule:
    """Return the schedule for `count` MicroPacks that the planner tries besides dispatched orders."""
    return interleaved(mesh.pp, mesh.virtual_stages, count)


def _schedule(stages: list[list[int]]) -> Schedule:
    """Join the tasks of stages."""
    tasks = np.array([task for stage in stages for task in stage], np.uint8)
    return Schedule(tasks, np.cumsum([0, *map(len, stages)]).astype(np.int32))


def _check(smallest: int = 1, **numbers: int) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < smallest:
            raise SettingError(f"{name}={number!r}; a schedule needs a whole number of at least {smallest}")


def _multiple(count: int, size: int, what: str) -> SettingError:
    below = count // size * size
    return SettingError(
        f"{count:,} MicroPacks can't go in rounds of {size:,} {what}; make it {below:,} or {below + size:,}, "
        "with empty ones if need be"
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Amplification:
    """How pipelines amplify the cost of uneven work: one row for each number of stages."""

    stages: Int32Array
    """int32 `[num_rows]`."""
    makespan_s: FloatArray
    """float64 `[num_rows]`: seconds of a step."""
    even_s: FloatArray
    """float64 `[num_rows]`: seconds if all micro-batches of all ranks were equal, including filling the pipeline."""
    bubble_ratio: FloatArray
    """float64 `[num_rows]`: the idle share of all stages' time."""

    def __post_init__(self) -> None:
        for array in (self.stages, self.makespan_s, self.even_s, self.bubble_ratio):
            array.flags.writeable = False

    @property
    def slowdown(self) -> FloatArray:
        """float64 `[num_rows]`: seconds over those of even work; for one stage, max / mean over ranks."""
        return np.divide(self.makespan_s, self.even_s, out=np.ones(len(self.stages)), where=self.even_s > 0)


def amplify(
    forward_s: npt.ArrayLike, backward_s: npt.ArrayLike, stages: Sequence[int] = (1, 2, 4, 8)
) -> Amplification:
    """Simulate the same micro-batches with 1F1B through pipelines of several lengths.

    Without a pipeline, ranks wait once a step, for the rank with the most work. In a pipeline, a long micro-batch
    delays those behind it on each stage in turn (Liu et al. 2025, "SlimPack", arXiv 2509.26246, figure 2).
    `forward_s` and `backward_s` are `[dp, count]` seconds of each rank's micro-batches through the whole model.

    >>> uneven = [[1, 4, 1, 1], [1, 1, 1, 1]]
    >>> amplify(uneven, uneven, stages=(1, 4)).slowdown.round(3).tolist()
    [1.273, 1.818]
    """
    ahead, back = np.asarray(forward_s, np.float64), np.asarray(backward_s, np.float64)
    if ahead.ndim != 2 or ahead.shape != back.shape or ahead.size == 0:
        raise SettingError(
            f"forward seconds have the shape {ahead.shape}, backward ones {back.shape}; both must be [ranks, "
            "micro-batches], with at least one"
        )
    wrong = ~(np.isfinite(ahead) & np.isfinite(back) & (ahead >= 0) & (back >= 0))
    if wrong.any():
        rank, number = np.unravel_index(int(wrong.argmax()), wrong.shape)
        raise SettingError(
            f"micro-batch {number} of rank {rank} takes {ahead[rank, number]} s forward and {back[rank, number]} s "
            f"backward; seconds must be finite and not negative ({int(wrong.sum()):,} of {wrong.size:,} aren't)"
        )
    timelines = [_run(ahead, back, pp) for pp in stages]
    mean = (ahead.mean() + back.mean()) * (ahead.shape[1] + np.array(stages, np.int64) - 1) / stages
    return Amplification(
        stages=np.array(stages, np.int32),
        makespan_s=np.array([timeline.makespan_s for timeline in timelines]),
        even_s=mean.astype(np.float64),
        bubble_ratio=np.array([timeline.bubble_ratio for timeline in timelines]),
    )


def _run(ahead: FloatArray, back: FloatArray, pp: int) -> Timeline:
    """Run micro-batches through pipelines of pp stages by 1F1B; ranks synchronize only at the end."""
    dp, count = ahead.shape
    schedule, everyone = one_f_one_b(pp, count), np.arange(dp * count, dtype=np.int32)
    micropacks = MicroPacks(
        rank_offsets=count * np.arange(dp + 1, dtype=np.int32),
        slice_offsets=np.arange(dp * count + 1, dtype=np.int32),
        document_ids=everyone,
        starts=np.zeros(dp * count, np.int32),
        stops=np.ones(dp * count, np.int32),
    )
    plan = StepPlan(
        lengths=np.ones(dp * count, np.int32),
        first_ranks=everyone // count,
        num_ranks=np.ones(dp * count, np.int32),
        forward=micropacks,
        backward=micropacks,
        tasks=np.tile(schedule.tasks, dp),
        task_offsets=np.cumsum([0, *np.tile(np.diff(schedule.offsets), dp)], dtype=np.int32),
        mesh=Mesh(dp=dp, pp=pp),
        method="packed",
    )
    nothing, rows = np.zeros(dp * count), np.ones(dp * count)
    seconds = Durations(
        forward=np.tile(ahead.ravel() / pp, (pp, 1)),
        backward=np.tile(back.ravel() / pp, (pp, 1)),
        weight=np.zeros((pp, dp * count)),
        send_forward=nothing,
        send_backward=nothing,
        latency_s=0.0,
        gather=np.zeros(pp),
        sync=np.zeros(pp),
        forward_rows=rows,
        backward_rows=rows,
    )
    none = np.zeros(pp)
    memory = Memory(
        state_bytes=none,
        held_bytes=none,
        gradient_bytes=none,
        near_bytes=none,
        kept_for_weight_bytes=none,
        forward_peaks=np.zeros((pp, 1, FORWARD_COUNTS)),
        forward_left=np.zeros((pp, FORWARD_COUNTS)),
        backward_peaks=np.zeros((pp, 1, BACKWARD_COUNTS)),
        backward_left=np.zeros((pp, BACKWARD_COUNTS)),
        first_bytes=np.zeros((2, pp)),
        limit_bytes=float("inf"),
    )
    return run_plan(plan, seconds, memory)
