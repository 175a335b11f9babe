"""`plan_step`: takes the lengths of one step, a cost model and a mesh; returns a plan of what each GPU does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from varlen.arguments import in_words
from varlen.cost.memory import LATER, layers_again
from varlen.cost.model import CostModel
from varlen.cost.shape import check_positions
from varlen.counts import as_size, many
from varlen.errors import LengthsError, PlanError, SettingError
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import check_fit
from varlen.plan.baselines.dynamic_cp import MOST_STEPS, WAYS, Way, dynamic_cp_candidates
from varlen.plan.baselines.packed import (
    PacksOf,
    balanced_candidates,
    capacities,
    micro_batch_counts,
    packed,
    packed_candidates,
    packs_of,
    rounded,
    usual_capacities,
)
from varlen.plan.bound import least_possible, lower_bound
from varlen.plan.compose import TYPICAL_ROWS, seconds_of
from varlen.plan.micropack import FAR_OVER, SearchResult, micropack, narrowed, thorough
from varlen.plan.score import are_few, as_scheduled, best_plan, score
from varlen.plan.search import Families, Search
from varlen.simulate.graph import stage_costs
from varlen.step_plan import Mesh, PlanMethod, StepPlan, spread
from varlen.types import FloatArray, Int32Array

SHARES = (0.25, 0.5, 1.0)
"""Shares of the layers that recompute fully, tried in turn if selective recomputation doesn't save enough memory."""
_MANY_RANKS, _LEAST_TOKENS = 1024, 128  # more ranks need at least this many tokens on each GPU

# Plans usually take about this multiple of their lower bound. More recomputation (or offloading, which seldom helps
# much) is tried only if a plan of that quality would be faster than the best so far.
_TYPICAL, _TYPICAL_OFFLOADING = 1.04, 1.13
# Above this multiple of its bound, the best plan is limited by memory: if one level of recomputation doesn't help,
# the next is tried.
_MEMORY_LIMITED = 1.25
_CLOSE = 1.08  # a thorough search gains about this much
_SLACK = 1.1  # work in MicroPacks of typical rows is over that in large ones by less
# Full recomputation is tried beside a plan that fits only if a plan of this multiple of its bound would be faster.
_TYPICAL_FULL = 1.1
# Selective recomputation takes hardly any time: with this `_shortage` of memory without it, it is always used. Below
# the other, more recomputation helps nothing.
_SHORT, _AMPLE = 1.0, 0.25
_USUAL_MICROPACKS, _USUAL_ROWS = 6, 16_384  # of a rank for each stage, and of a MicroPack if it has more


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
      `tuned`, the fastest of several capacities, balanced ranks and orders.
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
        capacity: most tokens of a pack ("packed") or of a rank's documents ("dynamic_cp"); by default the longest
            document's, or whatever is best if that is tuned.
        tuned: see "packed"; all other methods are always tuned.
        search: what "micropack" may try, and whether any method may add recomputation and offloading.

    Returns:
        A plan that fits into memory. Equal arguments give equal plans, anywhere.

    Raises:
        LengthsError: no tokens, lengths that are negative or fractional, or longer than the model's positions.
        OverlongDocumentError: documents over `capacity`.
        SettingError: an unknown method, or a mesh that doesn't divide the model.
        PlanError: no plan fits into memory, or the mesh has too many ranks for the step; says what would work.

    Cost: "micropack" takes about 0.1 s for 512 documents on 4 x 4, 1 s for 8,192 on 64 x 16, and 8 s for 100,000.
    If memory is short, it plans several levels of recomputation, which takes up to 0.3 s, 1.6 s and 13 s; see
    docs/planning-results.md.

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
    sizes = _sizes(checked, mesh, capacity, is_tuned=tuned or method == "dynamic_cp")
    memory = cost.memory(mesh)
    given = _Given(checked, mesh, method, sizes, tuned, search, cache(partial(packs_of, checked)))
    if (memory.state_bytes >= memory.limit_bytes).any():
        raise _refusal(given, cost)
    levels = list(repairs(cost, mesh)) if search.repairs else [cost]
    if len(levels) > 1 and cost.recompute == "none" and _shortage(checked, cost, mesh) > _SHORT:
        levels = levels[1:]
    best, level = _laddered(given, levels)
    if best and best.result and search.closely:
        bound_s = lower_bound(checked, levels[level], best.plan.mesh, least_rows=search.least_rows).seconds
        before_s = best.result.most_s
        if best.seconds > FAR_OVER * bound_s and (result := thorough(best.result)).most_s < before_s:
            best = _faster(best, _searched(result, levels[level]))
    if method == "micropack" and (best is None or (search.closely and search.contains)):
        best = _contained(given, levels, level, best)
    if best is None:
        raise _refusal(given, cost)
    plan = replace(spread(best.plan, mesh.dp // best.plan.mesh.dp), method=method)
    return replace(plan, answered_by=_label(plan, best.plan)) if method == "micropack" else plan


def _label(plan: StepPlan, narrow: StepPlan) -> str:
    """Return the description of a plan that was found with more context parallelism, or by another method."""
    label, ranks = narrow.answered_by, plan.mesh.dp // narrow.mesh.dp
    if " documents shared" not in label:
        label += f", {narrow.num_merged:,} of {narrow.num_documents:,} documents shared"
    return label if ranks == 1 else f"{label}, every document on {ranks} times as many ranks"


class _Given(NamedTuple):
    """What a plan is asked for, except for the cost model."""

    lengths: Int32Array
    mesh: Mesh
    method: PlanMethod
    sizes: Sequence[int]
    """Capacities to try, as far as the method has one; of "packed" that isn't tuned, the first."""
    tuned: bool
    search: Search
    packs_of: PacksOf
    """Packs of all documents at a capacity, the same on every mesh."""


class _Planned(NamedTuple):
    """A plan that fits into memory, on the mesh or one of `narrowed`."""

    plan: StepPlan
    seconds: float
    is_full: bool
    """Whether a plan with more memory might be faster."""
    result: SearchResult | None = None
    """The search, if it can be continued."""


def _laddered(given: _Given, levels: Sequence[CostModel]) -> tuple[_Planned | None, int]:
    """Return the best plan over all levels of recomputation, and its level."""
    best, best_level = None, 0
    for level, tried in enumerate(levels):
        typical = _TYPICAL_FULL if tried.recompute == "full" else _TYPICAL
        typical = typical if tried.offload == levels[0].offload else _TYPICAL_OFFLOADING
        bound_s, least_s, rows = 0.0, math.inf, given.search.least_rows
        if best:
            least_s = best.seconds
            bound_s = lower_bound(given.lengths, tried, best.plan.mesh, least_rows=rows).seconds
            if bound_s * typical >= least_s:
                break
        planned = _planned(given, [tried], least_s, near=best.plan.mesh if best else None)
        if planned and planned.seconds < least_s:
            is_enough = best is None and not (planned.is_full and given.search.closely)
            best, best_level = planned, level
            if is_enough:
                break
        elif least_s < _MEMORY_LIMITED * bound_s:
            break
    return best, best_level


def _contained(
    given: _Given, levels: Sequence[CostModel], level: int, best: _Planned | None
) -> _Planned | None:
    """Return the best plan, or a faster one by a method that plans a part of what "micropack" may.

    Whole documents that need more recomputation than the best plan are hardly faster; each of their candidates is
    tried with all levels up to it. Without a best plan, all of it is needed. Slices whose bound is far below the best
    plan are searched as thoroughly as by themselves.
    """
    bound = cache(partial(least_possible, given.lengths, least_rows=given.search.least_rows))
    for part, most_ranks in _parts(given):
        needed = [levels[: level + 1]] if best else [levels[-1:]]
        if part.method == "sliced" and best:
            needed = [[cost] for cost in levels]
        for costs in needed:
            limit_s = best.seconds if best else math.inf
            least_s = bound(costs[0], part.mesh, "packed" if part.method == "balanced" else part.method)
            if least_s >= limit_s:
                break
            if part.method == "sliced":
                is_far = least_s * FAR_OVER < limit_s < math.inf
                planned = _in_slices(part, costs[0], limit_s, is_far=is_far)
            else:
                planned = _planned(_filling(part, limit_s / least_s), costs, limit_s)
            if planned and (best is None or planned.plan.num_ranks.max() <= most_ranks):
                best = _faster(best, planned)
            if best and part.method == "sliced" and _shortage(given.lengths, costs[0], part.mesh) < _AMPLE:
                break
    return best


def _in_slices(part: _Given, cost: CostModel, limit_s: float, *, is_far: bool) -> _Planned | None:
    """Return the best plan of slices, perhaps None if it takes `limit_s` or longer."""
    result = _search(part, cost, math.inf if is_far else limit_s)
    if is_far and result and result.most_s < _CLOSE * limit_s:
        result = thorough(result)
    # Without shared documents or parameters, a plan takes what its search says: it needn't be simulated to lose.
    if result is None or (result.most_s >= limit_s and part.mesh.sharding != "parameters"):
        return None
    return _searched(result, cost)


def _shortage(lengths: Int32Array, cost: CostModel, mesh: Mesh) -> float:
    """Return the share of its memory that a stage needs for a usual pipeline, or for half of the longest document."""
    memory = cost.memory(mesh)
    held = memory.held_bytes.reshape(-1, mesh.pp).sum(axis=0)
    rows = int(lengths.sum(dtype=np.int64)) / (mesh.dp * mesh.cp)
    in_flight = min(rows / _USUAL_MICROPACKS, _USUAL_ROWS * mesh.pp)
    held_rows = max(in_flight, int(lengths.max()) / mesh.cp / 2)
    return float((held_rows * held / (memory.limit_bytes - memory.state_bytes)).max())


def _parts(given: _Given) -> Iterator[tuple[_Given, int]]:
    """Yield the methods and meshes that are part of what "micropack" may plan, and the most ranks of a document."""
    lengths, search = given.lengths, given.search
    methods: list[PlanMethod] = ["sliced"] if search.slices else []
    methods += ["packed", "balanced"]
    shared: list[PlanMethod] = ["dynamic_cp"] if search.merges else []
    for mesh in narrowed(given.mesh, search):
        sizes, most_ranks = (
            usual_capacities(lengths, mesh.dp),
            search.most_merged_ranks * given.mesh.cp // mesh.cp,
        )
        for method in [*methods, *(shared if mesh == given.mesh or are_few(lengths.size, mesh) else [])]:
            part = given._replace(mesh=mesh, method=method, sizes=sizes, tuned=True)
            yield part._replace(search=replace(search, merges=False)), most_ranks


def _filling(part: _Given, most: float) -> _Given:
    """Leave out capacities of "packed" with which pipelines would idle for over `most` of their work, less 1.

    Packs that are an eighth full may be the first and the last.
    """
    if part.method != "packed" or most == math.inf or are_few(part.lengths.size, part.mesh):
        return part
    share = int(part.lengths.sum(dtype=np.int64)) / part.mesh.dp
    idle = (part.mesh.num_chunks - 1) / part.mesh.virtual_stages / (8 * share)
    return part._replace(sizes=[size for size in part.sizes if 1 + idle * size < most])


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


def _sizes(lengths: Int32Array, mesh: Mesh, capacity: int | None, *, is_tuned: bool) -> list[int]:
    """Return the capacities to try."""
    if capacity is None:
        return usual_capacities(lengths, mesh.dp) if is_tuned else [rounded(int(lengths.max()))]
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise SettingError(f"capacity={capacity!r}; it must be a whole number of at least 1")
    check_fit([lengths], int(capacity), out=f"truncate or split them, or set capacity={int(lengths.max())}")
    return capacities(int(capacity))


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


def _planned(
    given: _Given, costs: Sequence[CostModel], limit_s: float, near: Mesh | None = None
) -> _Planned | None:
    """Return the plan of one method; None if none fits, and perhaps if it takes `limit_s` or longer.

    `costs` are levels of recomputation, of which only tuned methods of whole documents take several. `near` is as in
    `micropack`.
    """
    lengths, mesh, method, sizes, tuned, search, _ = given
    cost = costs[-1]
    if method in ("micropack", "sliced"):
        result = _search(given, cost, limit_s, near)
        return _searched(result, cost) if result else None
    if method == "packed" and not tuned:
        plan = as_scheduled(packed(lengths, mesh, sizes[0]), lengths, cost, mesh, method)
        step_s = score(plan, cost)
        return _Planned(plan, step_s, False) if step_s < math.inf else None
    best = None
    for families_of, counts in _whole(given, costs, limit_s):
        asked = (families_of, counts, lengths, costs, mesh, method)
        found = best_plan(*asked, splits=search.splits_backward, limit_s=limit_s)
        best = _faster(best, _Planned(*found, True) if found else None)
    return best


def _whole(
    given: _Given, costs: Sequence[CostModel], limit_s: float
) -> Iterator[tuple[Callable[[int], Families], tuple[int, ...]]]:
    """Yield candidates of whole documents by number of micro-batches, and the numbers to try."""
    lengths, mesh, method, sizes = given[:4]
    work = _work(lengths, costs[-1], mesh)
    layers = costs[-1].stages(mesh).layers.reshape(-1, mesh.pp).sum(axis=0).max()
    most_s = math.inf
    if not are_few(lengths.size, mesh):  # of an average layer, at the most recomputation
        most_s = (
            _SLACK * limit_s / layers * (work[:, 0].sum() / _work(lengths, costs[0], mesh, 1)[:, 0].sum())
        )

    def shared(count: int, way: Way) -> Families:
        return dynamic_cp_candidates(lengths, work, mesh, sizes, counts=(count,), ways=(way,), most_s=most_s)

    def balanced(count: int) -> Families:
        return balanced_candidates(lengths, work[:, 0], mesh, counts=(count,))

    if method == "dynamic_cp":
        for way in WAYS:
            yield partial(shared, way=way), micro_batch_counts(lengths, mesh, MOST_STEPS)
    elif method == "balanced":
        yield balanced, micro_batch_counts(lengths, mesh)
    else:  # the number of packs follows from their capacity
        yield lambda _: packed_candidates(lengths, work[:, 0], mesh, sizes, packs=given.packs_of), (0,)


def _search(
    given: _Given, cost: CostModel, incumbent_s: float, near: Mesh | None = None
) -> SearchResult | None:
    """Run the search of "micropack" or "sliced"; see `micropack`."""
    lengths, mesh, method, _, _, search, _ = given
    if method == "sliced":
        search = replace(search, grades=False, merges=False, asymmetric=False)
    return micropack(lengths, cost, mesh, search, method=method, incumbent_s=incumbent_s, near=near)


def _searched(result: SearchResult, cost: CostModel) -> _Planned:
    plan = result.plan()
    return _Planned(plan, score(plan, cost), result.best.is_full, result)


def _faster(first: _Planned | None, second: _Planned | None) -> _Planned | None:
    """Return the faster of two plans, the first if they are equal."""
    if first is None or second is None:
        return first or second
    return second if second.seconds < first.seconds else first


def _work(lengths: Int32Array, cost: CostModel, mesh: Mesh, most_ranks: int | None = None) -> FloatArray:
    """Return seconds of each document in both passes if 1, 2, 4, … ranks share it, `[num_documents, levels]`."""
    rates, sizes = stage_costs(cost, mesh).rates, 2 ** np.arange(int(math.log2(most_ranks or mesh.dp)) + 1)
    ones = np.ones(lengths.size, np.int32)
    return np.stack(
        [seconds_of(lengths, size * ones, TYPICAL_ROWS, rates) for size in sizes.astype(np.int32)], axis=1
    )


def _refusal(given: _Given, cost: CostModel) -> PlanError:
    """Return the error that says why no plan fits into memory, and what would."""
    mesh, method, search = given.mesh, given.method, given.search
    tried = list(repairs(cost, mesh)) if search.repairs else [cost]
    shares = method == "dynamic_cp" or (method == "micropack" and search.merges)
    most_ranks = 2 ** int(math.log2(mesh.dp)) if shares else 1
    # Faster to plan without these, none of which saves memory.
    sparing = replace(search, grades=False, splits_backward=False, asymmetric=False, exact=False)

    def holds(some: Int32Array, on: Mesh) -> bool:
        alone = given._replace(lengths=some, mesh=on, search=sparing, packs_of=cache(partial(packs_of, some)))
        others = [part for part, _ in _parts(alone)] if method == "micropack" else []
        return any(_planned(each, tried[-1:], math.inf) for each in [alone, *others])

    is_limited = not search.repairs and len(list(repairs(cost, mesh))) > 1
    return _explained(given.lengths, tried, mesh, holds, most_ranks, is_limited=is_limited)


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
    room, limit = memory.limit_bytes - memory.state_bytes, as_size(memory.limit_bytes)
    worst = int(room.argmin())
    if room[worst] <= 0:
        ways, axes = _more(costs[-1], mesh)
        return _proposing(
            axes,
            f"parameters, gradients and optimizer states take {as_size(memory.state_bytes[worst])} on stage "
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
    near = memory.near_bytes + memory.backward_peaks[:, :, LATER].max(axis=1)
    per_row = (memory.held_bytes + memory.gradient_bytes + near).reshape(-1, mesh.pp).sum(axis=0)
    tight, ranks = int((room / per_row).argmin()), most_ranks * mesh.cp
    wider = _wider(longest, mesh, holds)
    too_long = many(int((lengths > fits).sum()), "document is too long", "documents are too long")
    return _proposing(
        {"cp"} if wider else set(),
        f"document {int(lengths.argmax()):,} has {longest:,} tokens, too many for the {many(ranks, 'rank')} that may "
        f"share it ({too_long}): beside its states a GPU of stage {tight} of {mesh.pp} may use "
        f"{as_size(room[tight])} ({tried}); alone, documents of up to {fits:,} tokens would fit"
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
