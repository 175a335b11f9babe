"""`simulate`: takes a plan and a cost model, returns the step's timeline; and validation of a plan's form."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.cost.memory import Memory
from varlen.cost.model import CostModel
from varlen.counts import many
from varlen.errors import DeadlockError, PlanError, SettingError
from varlen.simulate import kernels
from varlen.simulate.graph import GRADIENT_SYNC, KIND_NAMES, Durations, Graph, build_graph, durations
from varlen.simulate.memory import memory_of
from varlen.simulate.timeline import Timeline
from varlen.step_plan import KINDS, Mesh, MicroPacks, StepPlan
from varlen.types import FloatArray


def simulate(
    plan: StepPlan,
    cost: CostModel,
    *,
    slowdown: npt.ArrayLike | None = None,
    overlap: bool = True,
    contention: bool = True,
) -> Timeline:
    """Simulate a planned step, task by task, in the plan's order.

    - A stage of a data-parallel rank runs its tasks in the plan's order, each as soon as its input has arrived.
    - Messages between stages are sent in the order in which they are computed, one at a time over each link.
    - Ranks that share a document start and end its MicroPacks together; if parameters are sharded, all data-parallel
      ranks do so with each MicroPack.
    - Gradients are synchronized when all data-parallel ranks of a stage are done.

    Args:
        plan: the step.
        cost: seconds and bytes; the plan's recomputation and offloading override those of the cost model.
        slowdown: `[dp * pp]` factors of at least 0 on the seconds of each stage of each rank, for GPUs that are
            slower than others; by default 1.
        overlap: whether GPUs compute while they send and gather.
        contention: whether the messages of a link wait for each other.

    Returns:
        The timeline. Slower GPUs, contention or no overlap never make a task earlier.

    Raises:
        PlanError: arrays of wrong shapes or out of range, or missing tokens, checked in O(slices);
            `varlen.plan.check.check_plan` checks all rules.
        DeadlockError: tasks wait for each other in a cycle, which the message names.
        SettingError: a slowdown of another shape, or arguments that are no plan or no cost model.

    Cost: about a microsecond and some hundred bytes per task.
    """
    if not isinstance(plan, StepPlan) or not isinstance(cost, CostModel):
        raise SettingError(
            f"simulate(plan, cost) was given a {type(plan).__name__} and a {type(cost).__name__}; give what "
            "vl.plan_step returned, and a vl.CostModel"
        )
    check_form(plan)
    check_shares(plan)
    check_slices(plan)
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
    """Simulate a planned step, given its durations and bytes; see `simulate`."""
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
        ranks=graph.stage_ids // mesh.pp,
        stages=graph.stage_ids % mesh.pp,
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


def _factors(slowdown: npt.ArrayLike | None, num_stage_ids: int) -> FloatArray:
    """Return validated slowdowns, float64 `[dp * pp]`."""
    if slowdown is None:
        return np.ones(num_stage_ids)
    try:
        factors = np.asarray(slowdown, np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise SettingError(f"slowdown is no array of numbers: {error}; give dp * pp factors") from None
    wrong = ~(np.isfinite(factors) & (factors >= 0))
    if len(factors) != num_stage_ids:
        raise SettingError(
            f"slowdown has {len(factors):,} factors; the mesh has {num_stage_ids:,} stages of data-parallel ranks, "
            "dp * pp, and needs a factor for each"
        )
    if wrong.any():
        first = int(wrong.argmax())
        raise SettingError(
            f"slowdown {factors[first]} of stage {first} is negative or not finite ({int(wrong.sum()):,} of "
            f"{num_stage_ids:,} are); 1 is as fast as the cost model says, 2 takes twice as long"
        )
    return factors


# Validation of a plan's form.

AGAIN: Final = "the plan was changed or made by other code; plan the step again"
_PASSES: Final = ("forward", "backward")


def first_of(wrong: npt.NDArray[np.bool_]) -> int:
    """Return the index of the first True."""
    return int(np.argmax(wrong))


def check_form(plan: StepPlan) -> None:
    """Require shapes, dtypes and ranges with which all arrays can be indexed safely."""
    _check_parts(plan)
    mesh, count = plan.mesh, plan.num_documents
    _check_array("lengths", plan.lengths, np.int32, None, 0, None)
    _check_array("first_ranks", plan.first_ranks, np.int32, count, -1, mesh.dp)
    _check_array("num_ranks", plan.num_ranks, np.int32, count, 1, mesh.dp + 1)
    for name in _PASSES:
        micropacks: MicroPacks = getattr(plan, name)
        _check_array(f"{name}.document_ids", micropacks.document_ids, np.int32, None, 0, count)
        size = micropacks.document_ids.size
        _check_array(f"{name}.starts", micropacks.starts, np.int32, size, 0, None)
        _check_array(f"{name}.stops", micropacks.stops, np.int32, size, 0, None)
        _check_offsets(f"{name}.slice_offsets", micropacks.slice_offsets, None, size)
        _check_offsets(f"{name}.rank_offsets", micropacks.rank_offsets, mesh.dp, micropacks.num_micropacks)
        ends = plan.lengths[micropacks.document_ids]
        wrong = (micropacks.starts >= micropacks.stops) | (micropacks.stops > ends)
        if wrong.any():
            j = first_of(wrong)
            raise PlanError(
                f"{name} slice {j:,} is the tokens {micropacks.starts[j]:,} to {micropacks.stops[j]:,} of document "
                f"{micropacks.document_ids[j]:,}, which has {ends[j]:,} ({int(wrong.sum()):,} of {size:,} slices are "
                f"empty or end outside); {AGAIN}"
            )
    _check_array("tasks", plan.tasks, np.uint8, None, 0, KINDS * mesh.virtual_stages)
    _check_offsets("task_offsets", plan.task_offsets, mesh.dp * mesh.pp, plan.tasks.size)


def _check_parts(plan: StepPlan) -> None:
    """Require a mesh, and MicroPacks of both passes."""
    for name, kind in (("mesh", Mesh), ("forward", MicroPacks), ("backward", MicroPacks)):
        part = getattr(plan, name)
        if not isinstance(part, kind):
            raise PlanError(f"{name} of the plan is a {type(part).__name__}, no {kind.__name__}; {AGAIN}")


def _check_array(
    name: str, array: npt.NDArray[Any], dtype: type, size: int | None, least: int, end: int | None
) -> None:
    """Require one dimension, a dtype, a size if given, and values from `least` to below `end`."""
    if array.ndim != 1 or array.dtype != dtype or (size is not None and array.size != size):
        wanted = "any size" if size is None else f"size {size:,}"
        raise PlanError(
            f"{name} is {array.dtype} of shape {array.shape}; a plan has {np.dtype(dtype)} in one dimension of "
            f"{wanted}"
        )
    wrong = (array < least) | (array >= (np.iinfo(np.int64).max if end is None else end))
    if wrong.any():
        j = first_of(wrong)
        limit = "any above" if end is None else f"{end - 1:,}"
        raise PlanError(
            f"{name}[{j:,}] is {array[j]:,}; it may be {least:,} to {limit} ({int(wrong.sum()):,} of "
            f"{array.size:,} are out of range); {AGAIN}"
        )


def _check_offsets(name: str, offsets: npt.NDArray[Any], parts: int | None, whole: int) -> None:
    """Require offsets that rise from 0 to `whole`."""
    _check_array(name, offsets, np.int32, None if parts is None else parts + 1, 0, whole + 1)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != whole or (np.diff(offsets) < 0).any():
        seen = "has no entry" if not offsets.size else f"runs from {offsets[0]:,} to {offsets[-1]:,}"
        raise PlanError(f"{name} {seen}; it must rise from 0 to {whole:,} without a step back; {AGAIN}")


def check_shares(plan: StepPlan) -> None:
    """Require that each document is on neighbouring ranks, an aligned power of two of them."""
    first, num, dp = plan.first_ranks, plan.num_ranks, plan.mesh.dp
    is_empty = plan.lengths == 0
    wrong = (num & (num - 1)) != 0
    wrong |= np.where(
        is_empty, (first != -1) | (num != 1), (first < 0) | (first % num != 0) | (first + num > dp)
    )
    if wrong.any():
        j = first_of(wrong)
        raise PlanError(
            f"document {j:,} of {plan.lengths[j]:,} tokens stands on {num[j]:,} ranks from rank {first[j]:,}; it "
            f"must be a power of two of them from a multiple of it, within {dp:,} ranks, or 1 from rank -1 for an "
            f"empty document ({int(wrong.sum()):,} of {num.size:,} documents are otherwise); {AGAIN}"
        )


def check_slices(plan: StepPlan) -> None:
    """Require that slices are on their documents' ranks, and have as many tokens as each document.

    `varlen.plan.check.check_plan` also requires each token once, and their order.
    """
    for name in _PASSES:
        micropacks: MicroPacks = getattr(plan, name)
        documents, sizes = micropacks.document_ids, micropacks.stops - micropacks.starts
        index = micropacks.ranks[micropacks.micropack_of_slice] - plan.first_ranks[documents]
        wrong = (index < 0) | (index >= plan.num_ranks[documents])
        if wrong.any():
            j = first_of(wrong)
            first, ranks = plan.first_ranks[documents[j]], many(int(plan.num_ranks[documents[j]]), "rank")
            raise PlanError(
                f"{name} slice {j:,} of document {documents[j]:,} is on rank {index[j] + first:,}, and the document "
                f"on {ranks} from rank {first:,} ({int(wrong.sum()):,} of {wrong.size:,} are elsewhere); {AGAIN}"
            )
        held = np.bincount(documents, sizes, plan.num_documents)
        wanted = plan.lengths.astype(np.float64) * plan.num_ranks
        wrong = held != wanted
        if wrong.any():
            j = first_of(wrong)
            ranks = many(int(plan.num_ranks[j]), "rank")
            raise PlanError(
                f"the {name} slices of document {j:,} hold {held[j]:,.0f} tokens of its {wanted[j]:,.0f} on {ranks} "
                f"({int(wrong.sum()):,} of {wrong.size:,} documents differ); {AGAIN}"
            )


def explain(plan: StepPlan, graph: Graph, stops: FloatArray) -> str:
    """Describe a cycle of waiting tasks in a deadlocked graph; `stops` are NaN for tasks that didn't run.

    From the first unfinished task of a stream, follow the task that it waits for, or one of its group that can't
    start yet, and from there the first unfinished task of that stream, until a stream repeats.
    """
    offsets = graph.stream_offsets
    missing = np.isnan(stops)
    stream_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    firsts = np.full(len(offsets) - 1, -1)  # the first unfinished task of each stream
    stuck = np.flatnonzero(missing)[::-1]
    firsts[stream_of[stuck]] = stuck  # the last write per stream is its first task
    path: list[int] = [int(firsts[firsts >= 0][0])]
    sentences: list[str] = []
    while True:
        task = path[-1]
        waited, together = _waited_for(task, graph, missing, stream_of, firsts)
        first = int(firsts[stream_of[waited]])
        here, there = _task(plan, graph, task), _task(plan, graph, waited)
        words = f"{_stage_words(plan, graph, task)} waits in {here} for {there}"
        if graph.stage_ids[waited] != graph.stage_ids[task]:
            words += f" on {_stage_words(plan, graph, waited)}"
        words += ", which is to start together with it" if together else ""
        if first != waited:
            words += f"{' and' if together else ', which'} comes there after {_task(plan, graph, first)}"
        sentences.append(words)
        if first in path:
            circle = sentences[path.index(first) :]
            break
        path.append(first)
    return (
        f"the order of tasks waits in a circle: {'; '.join(circle)}. {int(missing.sum()):,} of {len(stops):,} tasks "
        "can't run. A backward MicroPack must come after every forward MicroPack with slices of its documents, and "
        "ranks that run MicroPacks together must have them in one order"
    )


def _waited_for(
    task: int, graph: Graph, missing: np.ndarray, stream_of: np.ndarray, firsts: np.ndarray
) -> tuple[int, bool]:
    """Return the task that `task` waits for, and whether the two start together."""
    for other in graph.afters[task].tolist():
        if other >= 0 and missing[other]:
            return other, False
    peers = np.flatnonzero(graph.groups == graph.groups[task])
    for peer in peers[peers != task].tolist():
        is_first = firsts[stream_of[peer]] == peer
        if not is_first or any(other >= 0 and missing[other] for other in graph.afters[peer].tolist()):
            return peer, True
    raise AssertionError("a task that waits for nothing has run")


def _stage_words(plan: StepPlan, graph: Graph, task: int) -> str:
    stage_id = int(graph.stage_ids[task])
    return f"stage {stage_id % plan.mesh.pp} of rank {stage_id // plan.mesh.pp}"


def _task(plan: StepPlan, graph: Graph, task: int) -> str:
    kind = int(graph.kinds[task])
    if kind == GRADIENT_SYNC:
        return KIND_NAMES[kind]
    micropacks = plan.backward if graph.backward_of[task] else plan.forward
    number = graph.micropacks[task] - micropacks.rank_offsets[graph.stage_ids[task] // plan.mesh.pp]
    chunk = f" (chunk {graph.chunks[task]})" if plan.mesh.virtual_stages > 1 else ""
    return f"{KIND_NAMES[kind]} of MicroPack {number}{chunk}"
