"""The amplifier effect: what the same uneven work costs under data parallelism alone, and with pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varlen.cost.memory import Memory
from varlen.cost.phases import BACKWARD_COUNTS, FORWARD_COUNTS
from varlen.errors import SettingError
from varlen.simulate.api import run_plan
from varlen.simulate.durations import Durations
from varlen.simulate.schedules import one_f_one_b
from varlen.simulate.timeline import Timeline
from varlen.step_plan import Mesh, MicroPacks, StepPlan
from varlen.types import FloatArray, Int32Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Amplification:
    """One row for each number of stages; the first is what data parallelism alone makes of the same work."""

    stages: Int32Array
    """int32 `[num_rows]`."""
    makespan_s: FloatArray
    """float64 `[num_rows]`: seconds of a step."""
    even_s: FloatArray
    """float64 `[num_rows]`: seconds if all micro-batches of all ranks were equal; filling the pipeline included."""
    bubble_ratio: FloatArray
    """float64 `[num_rows]`: the share of all stages' time in which they do not compute."""

    def __post_init__(self) -> None:
        for array in (self.stages, self.makespan_s, self.even_s, self.bubble_ratio):
            array.flags.writeable = False

    @property
    def slowdown(self) -> FloatArray:
        """float64 `[num_rows]`: times longer than with even work; in the row of one stage, max / mean over ranks."""
        return np.divide(self.makespan_s, self.even_s, out=np.ones(len(self.stages)), where=self.even_s > 0)


def amplify(
    forward_s: npt.ArrayLike, backward_s: npt.ArrayLike, stages: Sequence[int] = (1, 2, 4, 8)
) -> Amplification:
    """Run the same micro-batches, each rank its own, without a pipeline and through longer and longer ones.

    A rank without a pipeline waits once a step, for the rank with the most work. In a pipeline every stage waits for
    every micro-batch: a long one holds up those behind it on each stage in turn (Liu et al. 2025, "SlimPack",
    arXiv 2509.26246, figure 2).

    Args:
        forward_s: `[dp, count]`: seconds of each rank's micro-batches through the whole model, in their order.
        backward_s: `[dp, count]`: of their backward passes.
        stages: numbers of stages to cut the model into, evenly; 1 is data parallelism alone.

    Raises:
        SettingError: arrays of other shapes, seconds that are negative or not finite.

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
    """Micro-batches through pipelines of pp stages by 1F1B, ranks waiting for each other at the end alone."""
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
        task_offsets=np.concatenate(([0], np.cumsum(np.tile(np.diff(schedule.offsets), dp)))).astype(
            np.int32
        ),
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
