"""`plan_step`: takes the lengths of one step, a cost model and a mesh; returns a plan of what each GPU does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from varlen.arguments import in_words
from varlen.cost.memory import layers_again
from varlen.cost.model import CostModel
from varlen.cost.shape import check_positions
from varlen.counts import many
from varlen.errors import LengthsError, PlanError, SettingError
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import check_fit
from varlen.plan.baselines.dynamic_cp import MOST_STEPS, WAYS, Way, dynamic_cp_candidates
from varlen.plan.baselines.packed import balanced_candidates, micro_batch_counts, packed, packed_candidates
from varlen.plan.bound import lower_bound
from varlen.plan.compose import TYPICAL_ROWS, seconds_of
from varlen.plan.micropack import FAR_OVER, SearchResult, micropack, thorough
from varlen.plan.score import as_scheduled, best_plan, score
from varlen.plan.search import Candidate, Search
from varlen.step_plan import Mesh, PlanMethod, StepPlan
from varlen.types import FloatArray, Int32Array

SHARES = (0.25, 0.5, 1.0)
"""Shares of the layers that recompute fully, tried in turn if selective recomputation doesn't save enough memory."""
_CAPACITY_MULTIPLE = 128
_MANY_RANKS, _LEAST_TOKENS = 1024, 128  # more ranks need at least this many tokens on each GPU

# Plans usually take about this multiple of their lower bound. More recomputation (or offloading, which seldom helps
# much) is tried only if a plan of that quality would be faster than the best so far.
_TYPICAL, _TYPICAL_OFFLOADING = 1.04, 1.13
# Above this multiple of its bound, the best plan is limited by memory: if one level of recomputation doesn't help,
# the next is tried.
_MEMORY_LIMITED = 1.25


def plan_step(
    lengths: npt.ArrayLike,
    *,
    cost: CostModel,
    mesh: Mesh,
    method: PlanMethod = "micropack",
    capacity: int | None = None,
    tuned: bool = False,
    search: Search | None = None,
) -> StepPlan:
    """Plan one optimizer step: which GPU computes which tokens, when, in both passes.

    - "packed": best-fit-decreasing packs of `capacity`, dealt round robin, run by 1F1B: the usual practice. With
      `tuned`, the fastest of smaller capacities, balanced ranks and orders.
    - "balanced": whole documents balanced by work (WLB-LLM; Karmarkar-Karp), with the best number of micro-batches.
    - "sliced": slices of equal cost, the same in both passes (Seq1F1B, ChunkFlow), with the best number of them.
    - "dynamic_cp": whole documents, long ones on several data-parallel ranks (Megatron-LM, FlexSP).
    - "micropack": slices and packs of equal or graded cost, long documents shared by ranks, separate weight-gradient
      tasks (after SlimPack; Liu et al. 2025, arXiv 2509.26246).

    A plan doesn't change a step's data or the order of steps: losses and gradients are those of any other plan.

    Args:
        lengths: `[num_documents]` tokens of each document of the step; those of 0 are in no MicroPack.
        cost: seconds and bytes; the plan uses at least its `recompute` and `offload`.
        mesh: the GPUs.
        method: see above.
        capacity: most tokens of a pack ("packed", "dynamic_cp"); by default the longest document's.
        tuned: see "packed"; all other methods are always tuned.
        search: what "micropack" may try, and whether any method may add recomputation and offloading.

    Returns:
        A plan that fits into memory. Equal arguments give equal plans, anywhere.

    Raises:
        LengthsError: no tokens, lengths that are negative or fractional, or longer than the model's positions.
        OverlongDocumentError: documents over `capacity`.
        SettingError: an unknown method, or a mesh that doesn't divide the model.
        PlanError: no plan fits into memory, or the mesh has too many ranks for the step; says what would work.

    Cost: "micropack" takes tens of milliseconds for 512 documents on 4 x 4 and under a second for 8,192 on 64 x 16.
    If memory is short, it plans every level of recomputation and searches the best of them thoroughly, which takes
    several times as long; see docs/planning-results.md.

    >>> import varlen as vl
    >>> cost = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))
    >>> plan = vl.plan_step([9000, 200, 40000, 1500], cost=cost, mesh=vl.Mesh(dp=2, pp=2, tp=4))
    >>> plan.num_tokens
    50700
    """
    if not isinstance(cost, CostModel) or not isinstance(mesh, Mesh):
        raise SettingError(
            f"cost is a {type(cost).__name__} and mesh a {type(mesh).__name__}; give a vl.CostModel and a vl.Mesh"
        )
    checked = _checked(lengths, cost)
    _check_ranks(checked, mesh)
    search = Search() if search is None else search
    if not isinstance(search, Search):
        raise SettingError(f"search is a {type(search).__name__}; it must be a vl.Search")
    if method not in get_args(PlanMethod):
        near = get_close_matches(str(method), get_args(PlanMethod), n=1)
        must = f"did you mean {near[0]!r}? It must" if near else "it must"
        raise SettingError(f"method={method!r}; {must} be {in_words(get_args(PlanMethod))}")
    limit = _capacity(checked, capacity)
    memory = cost.memory(mesh)
    if (memory.state_bytes >= memory.limit_bytes).any():
        raise _refusal(checked, cost, mesh, method, limit, tuned, search)
    best: _Planned | None = None
    best_cost, least_s = cost, math.inf
    for tried in repairs(cost, mesh) if search.repairs else [cost]:
        typical = _TYPICAL if tried.offload == cost.offload else _TYPICAL_OFFLOADING
        bound_s = lower_bound(checked, tried, mesh, least_rows=search.least_rows).seconds if best else 0.0
        if bound_s * typical >= least_s:
            break
        planned = _planned(checked, tried, mesh, method, limit, tuned, search, least_s)
        step_s = score(planned.plan, tried) if planned else math.inf
        if planned and step_s < least_s:
            is_enough = best is None and not (planned.is_full and search.closely)
            best, best_cost, least_s = planned, tried, step_s
            if is_enough:
                break
        elif least_s < _MEMORY_LIMITED * bound_s:
            break
    if best is None:
        best = _whole(checked, tried, mesh, method, limit, search)
        if best is None:
            raise _refusal(checked, cost, mesh, method, limit, tuned, search)
        return replace(best.plan, method=method)
    bound_s = lower_bound(checked, best_cost, mesh, least_rows=search.least_rows).seconds
    if best.result and search.closely and least_s > FAR_OVER * bound_s:
        longer = _Planned(thorough(best.result).plan(), best.is_full)
        best = _faster(best, longer, best_cost) or best
        if method == "micropack" and longer.is_full and search.orders and not best.plan.num_merged:
            best = _faster(best, _as_packs(checked, best_cost, mesh, limit), best_cost) or best
    return best.plan


def _checked(lengths: npt.ArrayLike, cost: CostModel) -> Int32Array:
    checked = as_lengths(lengths)
    if not checked.any():
        raise LengthsError(f"{checked.size:,} documents have no token among them; a step needs at least one")
    check_positions(cost.model, checked)
    return checked


def _check_ranks(lengths: Int32Array, mesh: Mesh) -> None:
    """Refuse more data-parallel ranks than a step has work for: planning would take minutes and gigabytes."""
    tokens = int(lengths.sum(dtype=np.int64))
    most = max(_MANY_RANKS, tokens // (_LEAST_TOKENS * mesh.cp))
    if mesh.dp > most:
        raise PlanError(
            f"a mesh of dp={mesh.dp:,} for {tokens:,} tokens in {np.count_nonzero(lengths):,} documents: over "
            f"{_MANY_RANKS:,} ranks are planned only where each GPU has {_LEAST_TOKENS} tokens; dp may be at most "
            f"{most:,}, or give the step more documents"
        )


def _capacity(lengths: Int32Array, capacity: int | None) -> int:
    """Return the most tokens of a pack."""
    longest = int(lengths.max())
    if capacity is None:
        return -(-longest // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise SettingError(f"capacity={capacity!r}; it must be a whole number of at least 1")
    check_fit([lengths], int(capacity), out=f"truncate or split them, or set capacity={longest}")
    return int(capacity)


def repairs(cost: CostModel, mesh: Mesh) -> Iterator[CostModel]:
    """Yield the cost model as given, then with more recomputation, then with keys and values in host memory."""
    yield cost
    layers = cost.stages(mesh).layers
    if cost.recompute == "none":
        yield replace(cost, recompute="selective")
    # Several shares may round to the same layers.
    distinct = {tuple(layers_again(layers, share)): share for share in SHARES}
    for share in distinct.values():
        if cost.recompute != "full" or cost.recompute_share < share:
            yield replace(cost, recompute="full", recompute_share=share)
    if cost.offload == "none":
        yield replace(cost, recompute="full", recompute_share=1.0, offload="kv")


class _Planned(NamedTuple):
    """A plan that fits into memory."""

    plan: StepPlan
    is_full: bool
    """Whether a plan with more memory might be faster."""
    result: SearchResult | None = None
    """The search, if it can be continued."""


def _planned(
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    method: PlanMethod,
    capacity: int,
    tuned: bool,
    search: Search,
    incumbent_s: float = math.inf,
) -> _Planned | None:
    """Return the plan of one method; None if none fits, and perhaps if it is slower than the incumbent."""
    if method == "sliced":
        search = replace(search, grades=False, splits_backward=False, merges=False, asymmetric=False)
    if method in ("micropack", "sliced"):
        result = micropack(lengths, cost, mesh, search, method=method, incumbent_s=incumbent_s)
        best = _Planned(result.plan(), result.best.is_full, result) if result else None
        # Parameters are gathered for each MicroPack, so fewer and larger ones (whole documents) may be faster.
        if mesh.sharding == "parameters" and search.merges and search.orders and search.closely:
            grouped = _dynamic_cp(lengths, cost, mesh, capacity, "micropack")
            if grouped and grouped.plan.num_ranks.max() <= search.most_merged_ranks:
                return _faster(best, grouped, cost)
        return best
    if method == "packed" and not tuned:
        plan = as_scheduled(packed(lengths, mesh, capacity), lengths, cost, mesh, method)
        return _Planned(plan, False) if score(plan, cost) < math.inf else None
    if method == "dynamic_cp":
        return _dynamic_cp(lengths, cost, mesh, capacity, method)
    work = _work(lengths, cost, mesh)[:, 0]
    counts: tuple[int, ...] = (0,)  # the number of packs follows from their capacity
    if method == "balanced":
        counts = micro_batch_counts(lengths, mesh)

    def candidates_of(count: int) -> Iterator[Candidate]:
        if method == "balanced":
            return balanced_candidates(lengths, work, mesh, counts=(count,))
        return packed_candidates(lengths, work, mesh, capacity)

    fastest = best_plan(candidates_of, counts, lengths, cost, mesh, method)
    return _Planned(fastest, True) if fastest else None


def _dynamic_cp(
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    capacity: int,
    method: PlanMethod,
    counts: tuple[int, ...] | None = None,
) -> _Planned | None:
    """Plan whole documents, long ones on groups of ranks: both ways, each with its best number of micro-batches."""
    best: _Planned | None = None
    work = _work(lengths, cost, mesh)
    counts = counts or micro_batch_counts(lengths, mesh, MOST_STEPS)
    for way in WAYS:

        def candidates_of(count: int, way: Way = way) -> Iterator[Candidate]:
            return dynamic_cp_candidates(lengths, work, mesh, capacity, counts=(count,), ways=(way,))

        plan = best_plan(candidates_of, counts, lengths, cost, mesh, method)
        best = _faster(best, _Planned(plan, True) if plan else None, cost)
    return best


def _as_packs(lengths: Int32Array, cost: CostModel, mesh: Mesh, capacity: int) -> _Planned | None:
    """Plan packs of whole documents in two orders, which may be fastest if memory holds hardly more than one pack."""
    work = _work(lengths, cost, mesh)[:, 0]
    plan = best_plan(
        lambda _: packed_candidates(lengths, work, mesh, capacity, orders=("given", "long_first")),
        (0,),
        lengths,
        cost,
        mesh,
        "micropack",
    )
    return _Planned(plan, True) if plan else None


def _whole(
    lengths: Int32Array, cost: CostModel, mesh: Mesh, method: PlanMethod, capacity: int, search: Search
) -> _Planned | None:
    """Plan whole documents, the fallback of "micropack" for steps that other methods can plan."""
    if method != "micropack":
        return None
    if search.merges:
        finest = _dynamic_cp(
            lengths, cost, mesh, capacity, method, micro_batch_counts(lengths, mesh, MOST_STEPS)[-1:]
        )
        return finest and _dynamic_cp(lengths, cost, mesh, capacity, method)
    return _planned(lengths, cost, mesh, "balanced", capacity, True, search)


def _faster(first: _Planned | None, second: _Planned | None, cost: CostModel) -> _Planned | None:
    """Return the faster of two plans, the first if they are equal."""
    if first is None or second is None:
        return first or second
    return second if score(second.plan, cost) < score(first.plan, cost) else first


def _work(lengths: Int32Array, cost: CostModel, mesh: Mesh) -> FloatArray:
    """Return seconds of each document in both passes if 1, 2, 4, … ranks share it, `[num_documents, levels]`."""
    rates, sizes = cost.rates(mesh), 2 ** np.arange(int(math.log2(mesh.dp)) + 1)
    ones = np.ones(lengths.size, np.int32)
    return np.stack(
        [seconds_of(lengths, size * ones, TYPICAL_ROWS, rates) for size in sizes.astype(np.int32)], axis=1
    )


def _refusal(
    lengths: Int32Array,
    cost: CostModel,
    mesh: Mesh,
    method: PlanMethod,
    capacity: int,
    tuned: bool,
    search: Search,
) -> PlanError:
    """Return the error that says why no plan fits into memory, and what would."""
    tried = list(repairs(cost, mesh)) if search.repairs else [cost]
    shares = method == "dynamic_cp" or (method == "micropack" and search.merges)
    most_ranks = 2 ** int(math.log2(mesh.dp)) if shares else 1
    # Faster to plan without these, none of which saves memory.
    sparing = replace(search, grades=False, splits_backward=False, asymmetric=False, exact=False)

    def holds(some: Int32Array, on: Mesh) -> bool:
        given = (some, tried[-1], on, method, capacity)
        return bool(_planned(*given, tuned, sparing) or _whole(*given, sparing))

    is_limited = not search.repairs and len(list(repairs(cost, mesh))) > 1
    return _explained(lengths, tried, mesh, holds, most_ranks, is_limited=is_limited)


_MOST_DOUBLINGS = 6  # of context parallelism, tried for the advice of a refusal
_MOST_TP = 16  # most tensor parallelism that a refusal advises; more exceeds a node
_MOST_SHARDING = 12  # doublings of data parallelism that a refusal tries with sharding
Holds = Callable[[Int32Array, Mesh], bool]
"""Whether a plan of lengths on a mesh fits into memory."""


def _explained(
    lengths: Int32Array,
    costs: Sequence[CostModel],
    mesh: Mesh,
    holds: Holds,
    most_ranks: int,
    *,
    is_limited: bool,
) -> PlanError:
    """Return the error that says why no plan fits, and which lengths or mesh would.

    Cost: about 20 plans of one document.
    """
    memory = costs[-1].memory(mesh)
    room, limit = memory.limit_bytes - memory.state_bytes, f"{memory.limit_bytes / 1e9:,.1f} GB"
    worst = int(room.argmin())
    if room[worst] <= 0:
        ways, axes = _more(costs[-1], mesh)
        return _proposing(
            axes,
            f"parameters, gradients and optimizer states take {memory.state_bytes[worst] / 1e9:,.1f} GB on stage "
            f"{worst} of {mesh.pp}, and a GPU may use {limit}; {ways}",
        )
    longest = int(lengths.max())
    most = costs[-1]
    share = f" of {most.recompute_share:.0%} of layers" if most.recompute_share < 1 else ""
    tried = f"recompute={most.recompute!r}{share}, offload={most.offload!r}"
    tried = f"up to {tried}" if len(costs) > 1 else tried
    tried += ", and no more of them may be tried" if is_limited else ""
    fits = _longest(longest, mesh, holds)
    if fits == longest:
        return _proposing(
            {"pp", "tp"},
            f"no plan of this method fits into the {limit} that a GPU may use ({tried}), though each document would "
            "alone; use another method, more pp or tp, or fewer documents per step",
        )
    per_row = (
        (memory.held_bytes + memory.gradient_bytes + 3 * memory.near_bytes).reshape(-1, mesh.pp).sum(axis=0)
    )
    tight, ranks = int((room / per_row).argmin()), most_ranks * mesh.cp
    wider = _wider(longest, mesh, holds)
    too_long = many(int((lengths > fits).sum()), "document is too long", "documents are too long")
    return _proposing(
        {"cp"} if wider else set(),
        f"document {int(lengths.argmax()):,} has {longest:,} tokens, too many for the {many(ranks, 'rank')} that may "
        f"share it ({too_long}): beside its states a GPU of stage {tight} of {mesh.pp} may use "
        f"{room[tight] / 1e9:,.1f} GB ({tried}); alone, documents of up to {fits:,} tokens would fit"
        + (f", or a mesh of cp={wider}" if wider else ""),
    )


def _proposing(axes: set[str], message: str) -> PlanError:
    """Return the error of a message that proposes to enlarge axes of the mesh."""
    error = PlanError(message)
    error.axes = frozenset(axes)
    return error


def _more(cost: CostModel, mesh: Mesh) -> tuple[str, set[str]]:
    """Return meshes that hold the states: the least pp x tp, and the least dp with all of them sharded.

    Also returns which of pp and tp they enlarge.
    """
    divisions = []
    for tp in range(1, _MOST_TP + 1):
        for pp in range(1, cost.model.layers + 1):
            if _holds_states(cost, replace(mesh, pp=pp, tp=tp, virtual_stages=1)):
                divisions.append((pp * tp, -tp, pp))
                break
    ways = []
    if divisions:
        least, tp, pp = min(divisions)
        ways.append(
            f"pp x tp of at least {least:,} would hold them (pp={pp}, tp={-tp}; now pp={mesh.pp}, tp={mesh.tp})"
        )
    for doublings in range(_MOST_SHARDING + 1):
        sharded = replace(mesh, dp=mesh.dp << doublings, sharding="parameters")
        if _holds_states(cost, sharded):
            beside = f" with dp={sharded.dp:,}" if doublings else ""
            ways.append(
                f"sharding='parameters'{beside} (now {mesh.sharding!r}{f', dp={mesh.dp}' if beside else ''})"
            )
            break
    words = ", or ".join(ways) or "no mesh of this model does: use a GPU with more memory"
    return words, {"pp", "tp"} if divisions else set()


def _holds_states(cost: CostModel, mesh: Mesh) -> bool:
    """Whether a mesh divides the model, and each GPU has memory left beside the states."""
    try:
        memory = cost.memory(mesh)
    except SettingError:
        return False
    return bool((memory.state_bytes < memory.limit_bytes).all())


def _longest(longest: int, mesh: Mesh, holds: Holds) -> int:
    """Return the longest document, up to `longest`, that fits into memory by itself."""
    if holds(np.array([longest], np.int32), mesh):
        return longest
    fits, over = 0, longest
    while over - fits > 1:
        middle = (fits + over) // 2
        if holds(np.array([middle], np.int32), mesh):
            fits = middle
        else:
            over = middle
    return fits


def _wider(longest: int, mesh: Mesh, holds: Holds) -> int | None:
    """Return the least doubling of context parallelism with which a document fits by itself, or None."""
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        cp = mesh.cp << doublings
        if holds(np.array([longest], np.int32), replace(mesh, cp=cp)):
            return cp
    return None
