"""`simulate`: a plan and a cost model in, the step's timeline out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.cost.memory import Memory
from varlen.cost.model import CostModel
from varlen.errors import DeadlockError, SettingError
from varlen.simulate import kernels
from varlen.simulate.deadlock import explain
from varlen.simulate.durations import Durations, durations
from varlen.simulate.form import check_form, check_places, check_shares
from varlen.simulate.graph import build_graph
from varlen.simulate.memory import memory_of
from varlen.simulate.timeline import Timeline
from varlen.step_plan import StepPlan
from varlen.types import FloatArray


def simulate(
    plan: StepPlan,
    cost: CostModel,
    *,
    slowdown: npt.ArrayLike | None = None,
    overlap: bool = True,
    contention: bool = True,
) -> Timeline:
    """Run a planned step in time, task by task, as the plan orders them.

    - A stage of a data-parallel rank runs its tasks in the plan's order, each as soon as its input has arrived.
    - Messages between stages leave in the order in which they are computed, one at a time over each link.
    - Ranks that share a document start its MicroPacks together and end them together; where parameters are sharded
      all data-parallel ranks do so with each MicroPack.
    - Gradients are added up when all data-parallel ranks of a stage are done.

    Args:
        plan: what to run.
        cost: what everything takes; what the plan recomputes and offloads stands before that of the cost model.
        slowdown: `[dp * pp]` factors of at least 0 on the seconds of each stage of each rank, for GPUs that are
            slower than others; without, 1.
        overlap: whether GPUs compute while they send and gather.
        contention: whether the messages of a link wait for each other.

    Returns:
        The timeline; a slower GPU, a missing overlap and contention never make any task of it earlier.

    Raises:
        PlanError: arrays of wrong shapes or out of range, or a plan that leaves something out. That is looked for in
            O(slices); `varlen.plan.check.check_plan` asks for every rule.
        DeadlockError: tasks wait for each other in a circle, which the message names.
        SettingError: a slowdown of another shape, or something else than a plan and a cost model.

    Cost: about a microsecond a task, and some hundred bytes.
    """
    if not isinstance(plan, StepPlan) or not isinstance(cost, CostModel):
        raise SettingError(
            f"simulate(plan, cost) was given a {type(plan).__name__} and a {type(cost).__name__}; give what "
            "vl.plan_step returned, and a vl.CostModel"
        )
    check_form(plan)
    check_shares(plan)
    check_places(plan)
    priced = cost.as_planned(plan)
    return run_plan(
        plan,
        durations(plan, priced),
        priced.memory(plan.mesh, splits_backward=plan.splits_backward),
        slowdown=slowdown,
        overlap=overlap,
        contention=contention,
    )


def run_plan(
    plan: StepPlan,
    seconds: Durations,
    memory: Memory,
    *,
    slowdown: npt.ArrayLike | None = None,
    overlap: bool = True,
    contention: bool = True,
) -> Timeline:
    """Run a planned step whose durations and bytes are known; see `simulate`.

    Args:
        plan: what to run.
        seconds: of every task.
        memory: bytes of every stage, and of rows in every chunk.
        slowdown: as for `simulate`.
        overlap: as for `simulate`.
        contention: as for `simulate`.

    Raises:
        PlanError: a plan that leaves something out.
        DeadlockError: tasks wait for each other in a circle.
        SettingError: a slowdown of another shape.
    """
    mesh = plan.mesh
    factors = _factors(slowdown, mesh.dp * mesh.pp)
    graph = build_graph(plan, seconds, factors, overlap, contention)
    count = len(graph.kinds)
    starts, stops, deciders = np.empty(count), np.empty(count), np.empty(count, np.int32)
    with jit.sized(1e-5 * count):
        ran = kernels.run_tasks(
            graph.stream_offsets,
            graph.afters,
            graph.lags_s,
            graph.lengths_s,
            graph.groups,
            graph.num_groups,
            starts,
            stops,
            deciders,
        )
        if ran < count:
            raise DeadlockError(explain(plan, graph, stops))
        curves = memory_of(plan, memory, graph, starts, stops)
    return Timeline(
        plan=plan,
        kinds=graph.kinds,
        ranks=graph.places // mesh.pp,
        stages=graph.places % mesh.pp,
        chunks=graph.chunks,
        micropacks=graph.micropacks,
        backward_of=graph.backward_of,
        starts_s=starts,
        stops_s=stops,
        work_s=graph.lengths_s,
        lags_s=graph.lags_s,
        deciders=deciders,
        memory_offsets=curves.offsets,
        memory_times_s=curves.times_s,
        memory_bytes=curves.sizes_bytes,
        memory_limit_bytes=memory.limit_bytes,
    )


def _factors(slowdown: npt.ArrayLike | None, num_places: int) -> FloatArray:
    """float64 `[dp * pp]`, checked.

    Raises:
        SettingError: another shape, or factors that are negative or not finite.
    """
    if slowdown is None:
        return np.ones(num_places)
    try:
        factors = np.asarray(slowdown, np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise SettingError(f"slowdown is no array of numbers: {error}; give dp * pp factors") from None
    wrong = ~(np.isfinite(factors) & (factors >= 0))
    if len(factors) != num_places:
        raise SettingError(
            f"slowdown has {len(factors):,} factors; the mesh has {num_places:,} stages of data-parallel ranks, "
            "dp * pp, and needs a factor for each"
        )
    if wrong.any():
        first = int(wrong.argmax())
        raise SettingError(
            f"slowdown {factors[first]} of stage {first} is negative or not finite ({int(wrong.sum()):,} of "
            f"{num_places:,} are); 1 is as fast as the cost model says, 2 takes twice as long"
        )
    return factors
