"""`assign`: documents to groups, with the least load on the heaviest group, and `grouped`: to data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.cost.rates import Rates
from varlen.errors import LengthsError, MissingExtraError, PlanError, SettingError
from varlen.plan import kernels_assign
from varlen.plan.compose import TYPICAL_ROWS, RankDocuments, seconds_of
from varlen.plan.partition import as_weights, partition
from varlen.types import FloatArray, Int32Array, IntArray

STEPS: Final = 2**21
"""Steps of search, each about the time of a memory access: some milliseconds in all."""
ENOUGH: Final = 1e-4
"""The search ends at this relative distance to the lower bound, which no clock can measure."""
_NEAR: Final = 4  # documents on either side to try for a swap, since the nearest may not fit a group's memory
_WHOLE: Final = 24  # up to this many documents are searched at once
_NODES: Final = 2**12  # of one search through documents of three groups
_UNLIMITED: Final = 2**62


def assign(
    work: npt.ArrayLike,
    num_groups: int,
    *,
    tokens: npt.ArrayLike | None = None,
    token_limit: npt.ArrayLike | None = None,
    loads: npt.ArrayLike | None = None,
    steps: int = STEPS,
) -> Int32Array:
    """Assign documents to groups so that the heaviest group is light; returns the group of each document.

    Two initial assignments (by falling work, Graham 1969, "Bounds on Multiprocessing Timing Anomalies"; the largest
    differencing method, Karmarkar & Karp 1982, "The Differencing Method of Set Partitioning") are improved by
    exchanges between two groups. If the result is still over the lower bound, it is searched by branch and bound (as
    in Korf 1998, "A complete anytime algorithm for number partitioning", limited by steps and never by time): few
    documents at once, many by repeatedly reassigning light documents of the heaviest group and two others.

    A group can hold `token_limit` tokens (one number, or one for each group), and begins with `loads`, in the unit of
    `work`. Groups with equal loads and limits are numbered in the order of their first documents.

    >>> assign([9.0, 1.0, 2.0, 3.0, 3.0], 2).tolist()
    [0, 1, 1, 1, 1]
    """
    values = as_weights(work).astype(np.float64)
    for name, number in (("the number of groups", num_groups), ("steps", steps)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
            raise SettingError(f"{name} must be a whole number of at least 1, got {number!r}")
    before = group_loads(loads, num_groups)
    sizes, limits = group_limits(tokens, token_limit, values.size, num_groups)
    return _assigned(values, sizes, limits, before, steps)


def _assigned(
    values: FloatArray, sizes: IntArray, limits: IntArray, before: FloatArray, steps: int
) -> Int32Array:
    """Do what `assign` does, for validated arrays."""
    num_groups = before.size
    are_alike = bool((before == before[0]).all() and (limits == limits[0]).all())
    if num_groups == 1 or not values.size:
        _check_room(sizes, limits)
        return np.zeros(values.size, np.int32)
    with jit.sized(3e-7 * (steps + values.size * num_groups)):
        group_of = _searched(values, sizes, limits, before, steps)
    return _in_order_of_first(group_of, num_groups) if are_alike else group_of


def lightest_possible(work: FloatArray, loads: FloatArray) -> float:
    """Return a lower bound on the heaviest group's load, given the groups' loads before."""
    rising = np.sort(loads)
    filled = (np.cumsum(rising) + work.sum()) / np.arange(1, loads.size + 1)
    # If work were divisible, it would fill the lightest groups to a common level, below the loads of the others.
    levels = filled[np.append(filled[:-1] <= rising[1:], True)]
    return max(float(levels[0]), float(rising[-1]), float(rising[0] + work.max(initial=0.0)))


def _searched(
    values: FloatArray, sizes: IntArray, limits: IntArray, before: FloatArray, steps: int
) -> Int32Array:
    """Return the best assignment found, with groups in any order."""
    order = np.argsort(-values, kind="stable").astype(np.int32)
    enough = lightest_possible(values, before) * (1 + ENOUGH)
    best, heaviest = None, np.inf
    for group_of in _initial(order, values, sizes, limits, before):
        if _heaviest(values, group_of, before) > enough:
            left = kernels_assign.lighten(
                order, values, sizes, limits, before, enough, _NEAR, steps // 4, group_of
            )
            steps -= steps // 4 - left
        weight = _heaviest(values, group_of, before)
        if weight < heaviest:
            best, heaviest = group_of, weight
        if heaviest <= enough:
            return group_of
    assert best is not None
    if values.size <= _WHOLE:
        kernels_assign.search(order, values, sizes, limits, before, enough, steps, best)
    else:
        kernels_assign.regroup(order, values, sizes, limits, before, enough, _WHOLE, _NODES, steps, best)
    return best


def _initial(
    order: Int32Array,
    values: FloatArray,
    sizes: IntArray,
    limits: IntArray,
    before: FloatArray,
) -> Iterator[Int32Array]:
    """Yield one or two initial assignments within the limits."""
    dealt = np.empty(values.size, np.int32)
    is_dealt = kernels_assign.deal(order, values, sizes, limits, before, dealt) == 0
    if is_dealt:
        yield dealt
    if values.size >= limits.size:
        heavy_first = partition(values, limits.size, method="karmarkar_karp")
        differenced = np.argsort(before, kind="stable").astype(np.int32)[heavy_first]
        if _fits(differenced, sizes, limits):
            yield differenced
            return
    if not is_dealt:
        yield _fitted(sizes, limits)


def _fitted(sizes: IntArray, limits: IntArray) -> Int32Array:
    """Return an assignment within the limits, whatever its loads; raises if none is found."""
    _check_room(sizes, limits)
    large_first = np.argsort(-sizes, kind="stable").astype(np.int32)
    weights, filled = sizes.astype(np.float64), (limits.max() - limits).astype(np.float64)
    group_of = np.full(sizes.size, -1, np.int32)
    nodes = STEPS if sizes.size <= _WHOLE else 64 * sizes.size
    kernels_assign.search(large_first, weights, sizes, limits, filled, 0.0, nodes, group_of)
    if group_of.min(initial=0) >= 0:
        return group_of
    free = np.full(limits.size, _UNLIMITED, np.int64)
    kernels_assign.deal(large_first, weights, sizes, free, filled, group_of)
    over = np.bincount(group_of, weights, limits.size) - limits
    raise PlanError(
        f"no way was found to fit {sizes.size:,} documents of {int(sizes.sum()):,} tokens in all into "
        f"{limits.size:,} groups that hold {_range(limits)} tokens each; with {int(over.max()):,} more tokens a "
        "group they fit. Allow those, take more groups, or cut or merge the longest documents"
    )


def _check_room(sizes: IntArray, limits: IntArray) -> None:
    """Require that every document fits some group, and all tokens fit all groups together."""
    over = sizes > limits.max()
    if over.any():
        first = int(np.argmax(over))
        raise PlanError(
            f"document {first:,} of {int(sizes[first]):,} tokens fits no group, which holds {_range(limits)} tokens "
            f"at most ({int(over.sum()):,} of {sizes.size:,} documents don't); raise the limit to "
            f"{int(sizes.max()):,}, or let several ranks share it"
        )
    if int(sizes.sum()) > int(limits.sum(dtype=np.float64)):
        raise PlanError(
            f"{sizes.size:,} documents have {int(sizes.sum()):,} tokens, and {limits.size:,} groups of "
            f"{_range(limits)} tokens hold {int(limits.sum()):,}; raise the limit to at least "
            f"{-(-int(sizes.sum()) // limits.size):,}, or take fewer documents or more groups"
        )


def _range(limits: IntArray) -> str:
    low, high = int(limits.min()), int(limits.max())
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _fits(group_of: Int32Array, sizes: IntArray, limits: IntArray) -> bool:
    held = np.zeros(limits.size, np.int64)
    np.add.at(held, group_of, sizes)
    return bool((held <= limits).all())


def _heaviest(values: FloatArray, group_of: Int32Array, before: FloatArray) -> float:
    return float((before + np.bincount(group_of, values, before.size)).max())


def _in_order_of_first(group_of: Int32Array, num_groups: int) -> Int32Array:
    """Renumber groups in the order of their first documents."""
    used, begins = np.unique(group_of, return_index=True)
    rank = np.zeros(num_groups, np.int32)
    rank[used[np.argsort(begins, kind="stable")]] = np.arange(used.size, dtype=np.int32)
    return rank[group_of]


def group_loads(loads: npt.ArrayLike | None, num_groups: int) -> FloatArray:
    """Return validated initial loads, float64 `[num_groups]`; None for 0."""
    if loads is None:
        return np.zeros(num_groups)
    try:
        values = as_weights(loads).astype(np.float64)
    except LengthsError as error:
        raise LengthsError(f"the loads of groups before: {error}") from None
    if values.size != num_groups:
        raise LengthsError(f"there are {values.size:,} loads for {num_groups:,} groups; pass one per group")
    return values


def group_limits(
    tokens: npt.ArrayLike | None, token_limit: npt.ArrayLike | None, count: int, num_groups: int
) -> tuple[IntArray, IntArray]:
    """Return validated tokens, int64 `[num_documents]`, and limits, int64 `[num_groups]`."""
    if token_limit is None:
        return np.zeros(count, np.int64), np.full(num_groups, _UNLIMITED, np.int64)
    if tokens is None:
        raise SettingError("token_limit needs tokens: pass the length of each document")
    sizes = as_weights(tokens)
    if sizes.size != count or (sizes != np.floor(sizes)).any():
        raise LengthsError(
            f"tokens must be {count:,} whole numbers, one per document; got {sizes.size:,}"
            + ("" if sizes.size != count else ", some of them fractions")
        )
    limits = np.asarray(token_limit)
    if limits.dtype.kind not in "iu" or limits.shape not in ((), (num_groups,)) or (limits < 0).any():
        raise SettingError(
            f"token_limit must be a whole number of at least 0, or one for each of {num_groups:,} groups; "
            f"got {token_limit!r}"
        )
    whole = np.minimum(limits, np.array(_UNLIMITED, limits.dtype) if limits.dtype.itemsize == 8 else limits)
    return sizes.astype(np.int64), np.broadcast_to(whole.astype(np.int64), num_groups).copy()


_STEPS = 2**18  # of the search for a step's assignment: a millisecond or two


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """The data-parallel ranks of each document of a step."""

    first_ranks: Int32Array
    """int32 `[num_documents]`: -1 for documents of length 0."""
    num_ranks: Int32Array
    """int32 `[num_documents]`."""
    work: FloatArray
    """float64 `[num_documents]`: seconds on one GPU of each rank, in both passes and an average layer."""

    @property
    def num_merged(self) -> int:
        """Number of documents that several ranks share."""
        return int(np.count_nonzero(self.num_ranks > 1))

    def loads(self, dp: int) -> FloatArray:
        """Return the work of each rank, float64 `[dp]`."""
        filled = self.first_ranks >= 0
        first, work = self.first_ranks[filled], self.work[filled]
        # Work is added at the first rank of a document, subtracted behind its last, and summed up.
        ranks, changes = (
            np.concatenate([first, first + self.num_ranks[filled]]),
            np.concatenate([work, -work]),
        )
        return np.cumsum(np.bincount(ranks, changes, dp + 1))[:dp].astype(np.float64)


def merged_sizes(
    lengths: Int32Array,
    dp: int,
    rates: Rates,
    *,
    threshold: float,
    most_ranks: int,
    most_rows: float,
    unshared: FloatArray | None = None,
) -> Int32Array:
    """Return how many ranks share each document, the least power of two that is enough.

    A document is shared if it has over `most_rows` rows, or costs over `threshold` of a rank's mean work.
    `unshared` is the cost of each document that isn't shared, if it is known.
    """
    sizes = np.ones(lengths.size, np.int32)
    work = seconds_of(lengths, sizes, TYPICAL_ROWS, rates) if unshared is None else unshared
    most_work = threshold * (work.sum() / dp)
    left = np.arange(lengths.size)
    while True:
        # A document that isn't doubled in a round never is, so the rounds get shorter.
        is_long = lengths[left] / sizes[left] > most_rows
        is_large = work > most_work
        some = is_long | is_large
        left, work, is_long, is_large = left[some], work[some], is_long[some], is_large[some]
        wider = 2 * sizes[left]
        # Sharing must make a rank's part cheaper: between nodes, a short document may cost more.
        shared_work = seconds_of(lengths[left], wider, TYPICAL_ROWS, rates)
        grows = is_large & (shared_work < 0.8 * work) & (wider <= most_ranks)
        grows = (grows | is_long) & (wider <= dp)
        if not grows.any():
            return sizes
        left, work = left[grows], shared_work[grows]
        sizes[left] *= 2


def grouped(
    lengths: Int32Array, num_ranks: Int32Array, dp: int, rates: Rates, *, is_exact: bool = False
) -> Groups:
    """Assign documents to ranks so that the heaviest rank is light.

    Shared documents go first, large groups before small ones, each to the aligned block of ranks with the least
    work; `assign` adds the others.
    """
    work = seconds_of(lengths, num_ranks, TYPICAL_ROWS, rates)
    first_ranks = np.full(lengths.size, -1, np.int32)
    loads = np.zeros(dp)
    shared = np.flatnonzero((num_ranks > 1) & (lengths > 0))
    for document in shared[np.lexsort((-work[shared], -num_ranks[shared]))].tolist():
        size = int(num_ranks[document])
        blocks = loads[: dp // size * size].reshape(-1, size)
        block = int(blocks.max(axis=1).argmin())
        first_ranks[document] = block * size
        loads[block * size : (block + 1) * size] += work[document]
    others = np.flatnonzero((num_ranks == 1) & (lengths > 0))
    ranks = _assigned(work[others], *group_limits(None, None, others.size, dp), loads, _STEPS)
    if is_exact:
        ranks = improve_exactly(work[others], ranks, dp, loads=loads).group_of
    first_ranks[others] = ranks
    return Groups(first_ranks=first_ranks, num_ranks=num_ranks, work=work)


def documents_of_ranks(groups: Groups, lengths: Int32Array, dp: int) -> list[RankDocuments]:
    """Return the documents of each rank, in the order of composition."""
    work, size = groups.work, groups.num_ranks
    ids = np.lexsort((-work, -size))
    ids = ids[groups.first_ranks[ids] >= 0]
    # A shared document is repeated for each of its ranks.
    sizes = size[ids]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ids = np.repeat(ids, sizes)
    ranks = groups.first_ranks[ids] + within
    # With a small dtype, this is a radix sort.
    ids = ids[np.argsort(ranks.astype(np.min_scalar_type(dp)), kind="stable")]
    document_ids = ids.astype(np.int32)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(ranks, minlength=dp))]).tolist()
    lengths, num_ranks, seconds = lengths[ids], size[ids], work[ids]
    return [
        RankDocuments(
            document_ids=document_ids[begin:end],
            lengths=lengths[begin:end],
            num_ranks=num_ranks[begin:end],
            work=seconds[begin:end],
        )
        for begin, end in zip(bounds, bounds[1:])
    ]


# `improve_exactly` improves an assignment by mixed-integer programming with HiGHS.

NODES: Final = 200
"""Nodes of branch and bound: some seconds for the largest problem."""
_MOST: Final = 2048  # most documents times groups of a problem; other documents keep their groups
_GAP: Final = 1e-6
_SCALE: Final = 1000.0  # the heaviest load in the solver's unit, since its tolerances are absolute


class Exact(NamedTuple):
    """An assignment improved by an exact solver."""

    group_of: Int32Array
    """int32 `[num_documents]`: the given one if no better one was found."""
    bound: float
    """A lower bound on the heaviest load, in the unit of work."""
    is_optimal: bool
    """Whether no assignment reduces the heaviest load by more than a millionth."""
    nodes: int
    """Number of nodes used."""


class _Problem(NamedTuple):
    """Documents and groups that the solver may reassign."""

    items: IntArray
    """int64 `[some documents]`: by falling work."""
    groups: IntArray
    """int64 `[some groups]`."""
    loads: FloatArray
    """float64 `[num_groups]`: work of the fixed documents."""
    room: IntArray
    """int64 `[num_groups]`: tokens left beside the fixed documents."""


def improve_exactly(
    work: npt.ArrayLike,
    group_of: Int32Array,
    num_groups: int,
    *,
    tokens: npt.ArrayLike | None = None,
    token_limit: npt.ArrayLike | None = None,
    loads: npt.ArrayLike | None = None,
    nodes: int = NODES,
) -> Exact:
    """Reduce the heaviest load of an assignment by mixed-integer programming, or prove that it is optimal.

    HiGHS (Huangfu & Hall 2018, "Parallelizing the dual revised simplex method") begins with the given assignment,
    uses one thread, and stops after a number of nodes, never by time: the result is the same on every run. Symmetric
    groups are ordered by their heaviest documents. If there are many documents, only those of the heaviest group and
    of the lightest ones are reassigned.

    It takes seconds and gains almost nothing, since `assign` is nearly optimal: on the 21 steps of
    benchmarks/plan/exact.py at most 0.003 %, on three of them. CP-SAT from the same start improved none, and proved
    six to be optimal where this proves three.
    """
    highspy = _solver()
    if isinstance(nodes, bool) or not isinstance(nodes, int | np.integer) or nodes < 1:
        raise SettingError(f"nodes must be a whole number of at least 1, got {nodes!r}")
    values = as_weights(work).astype(np.float64)
    before = group_loads(loads, num_groups)
    sizes, limits = group_limits(tokens, token_limit, values.size, num_groups)
    given = np.asarray(group_of)
    is_whole = given.shape == values.shape and given.dtype.kind in "iu"
    if not is_whole or ((given < 0) | (given >= num_groups)).any():
        raise PlanError(
            f"the assignment given must be {values.size:,} groups from 0 to {num_groups - 1:,}; got {given.dtype} of "
            f"shape {given.shape}"
        )
    room = limits - np.bincount(given, sizes, num_groups).astype(np.int64)
    if (room < 0).any():
        raise PlanError(
            f"the assignment given is over the token limit in {int((room < 0).sum()):,} of {num_groups:,} groups; "
            "begin with one of assign"
        )
    floor = lightest_possible(values, before)
    sums = before + np.bincount(given, values, num_groups)
    if sums.max() <= floor * (1 + _GAP) or not values.size:
        return Exact(given.astype(np.int32), floor, True, 0)
    problem = _problem(values, sizes, given, before, sums, room)
    solved, bound, used = _solve(highspy, problem, values, sizes, given, float(sums.max()), floor, int(nodes))
    after = before + np.bincount(solved, values, num_groups)
    tokens_of = np.bincount(solved, sizes, num_groups)
    best = solved if after.max() < sums.max() and (tokens_of <= limits).all() else given.astype(np.int32)
    reached = min(float(after.max()), float(sums.max()))
    bound = max(floor, min(bound, reached) if problem.items.size == values.size else floor)
    return Exact(best, bound, reached <= bound * (1 + 2 * _GAP), used)


def _solver() -> Any:
    """Import HiGHS."""
    try:
        import highspy
    except ImportError:
        raise MissingExtraError(
            'exact solving needs HiGHS; install it with pip install "varlen[plan]", or plan without it: the plan is '
            "the same or nearly so"
        ) from None
    return highspy


def _silent(highspy: Any) -> Any:
    """Return a solver that prints nothing: its constructor enables callbacks, which prints a banner."""

    def enabled(solver: Any) -> None:
        solver.setOptionValue("output_flag", False)
        highspy.Highs.enableCallbacks(solver)

    solver = type("SilentHighs", (highspy.Highs,), {"enableCallbacks": enabled})()
    solver.setOptionValue("output_flag", False)  # older versions don't enable callbacks
    return solver


def _problem(
    values: FloatArray,
    sizes: IntArray,
    group_of: npt.NDArray[Any],
    before: FloatArray,
    sums: FloatArray,
    room: IntArray,
) -> _Problem:
    """Return the whole problem if it is small; else the heaviest group, and as many light ones as `_MOST` allows."""
    by_load = np.argsort(sums, kind="stable")
    order = np.argsort(-values, kind="stable")
    count = before.size
    while count > 2 and np.isin(group_of, [by_load[-1], *by_load[: count - 1]]).sum() * count > _MOST:
        count -= 1
    groups = np.sort(np.array([by_load[-1], *by_load[: count - 1]], np.int64))
    chosen = order[np.isin(group_of[order], groups)]
    items = chosen[-max(_MOST // count, 1) :]  # the lightest, which fill gaps better
    loads = sums - np.bincount(group_of[items], values[items], before.size)
    free = room + np.bincount(group_of[items], sizes[items], before.size).astype(np.int64)
    return _Problem(items, groups, loads, free)


def _solve(
    highspy: Any,
    problem: _Problem,
    values: FloatArray,
    sizes: IntArray,
    group_of: npt.NDArray[Any],
    heaviest: float,
    floor: float,
    nodes: int,
) -> tuple[Int32Array, float, int]:
    """Return the solver's final assignment, a bound for its problem, and the nodes used."""
    items, groups, loads, room = problem
    scale = _SCALE / heaviest
    number_of = np.zeros(loads.size, np.int64)
    number_of[groups] = np.arange(groups.size)
    begin = number_of[group_of[items]]
    are_alike = bool((loads[groups] == loads[groups[0]]).all() and (room[groups] == room[groups[0]]).all())
    if are_alike:  # break the symmetry: the n-th heaviest document is in one of the first n groups
        _, firsts, numbers = np.unique(begin, return_index=True, return_inverse=True)
        begin = np.argsort(np.argsort(firsts))[numbers]
    last = (
        np.minimum(np.arange(items.size), groups.size - 1)
        if are_alike
        else np.full(items.size, groups.size - 1)
    )
    rows = np.repeat(np.arange(items.size), last + 1)
    columns = np.concatenate([np.arange(group + 1) for group in last])
    solver = _silent(highspy)
    solver.resetGlobalScheduler(True)
    for name, value in (
        ("threads", 1),
        ("random_seed", 0),
        ("mip_max_nodes", nodes),
        ("mip_rel_gap", _GAP),
        ("mip_abs_gap", 0.0),
    ):
        solver.setOptionValue(name, value)
    solver.passModel(
        _model(
            highspy,
            problem,
            values[items] * scale,
            sizes[items],
            rows,
            columns,
            scale,
            max(floor * scale, 0.0),
        )
    )
    start = highspy.HighsSolution()
    start.col_value = [*(begin[rows] == columns).astype(np.float64).tolist(), _SCALE]
    solver.setSolution(start)
    solver.run()
    chosen = np.array(solver.getSolution().col_value)
    solved = group_of.astype(np.int32)
    if chosen.size == rows.size + 1:
        taken = chosen[:-1] > 0.5
        solved[items[rows[taken]]] = groups[columns[taken]]
    info = solver.getInfo()
    return solved, float(info.mip_dual_bound) / scale, int(info.mip_node_count)


def _model(
    highspy: Any,
    problem: _Problem,
    weights: FloatArray,
    sizes: IntArray,
    rows: IntArray,
    columns: IntArray,
    scale: float,
    floor: float,
) -> Any:
    """Build the model: a binary column for each document and group, and a column for the heaviest load.

    Rows: each document is in one group; each group's load is at most the heaviest; each group's tokens fit.
    """
    count, num_groups = weights.size, problem.groups.size
    wide = rows.size
    starts = np.append(np.arange(wide + 1) * 3, wide * 3 + num_groups)
    index = np.concatenate(
        [
            np.stack((rows, count + columns, count + num_groups + columns), 1).ravel(),
            count + np.arange(num_groups),
        ]
    )
    entries = np.stack((np.ones(wide), weights[rows], sizes[rows].astype(np.float64)), 1).ravel()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = wide + 1, count + 2 * num_groups
    lp.col_cost_ = np.append(np.zeros(wide), 1.0)
    lp.col_lower_ = np.append(np.zeros(wide), floor)
    lp.col_upper_ = np.append(np.ones(wide), _SCALE)
    unbounded = np.full(2 * num_groups, -np.inf)
    lp.row_lower_ = np.concatenate([np.ones(count), unbounded])
    above = np.where(problem.room >= 2**60, np.inf, problem.room)[problem.groups]
    lp.row_upper_ = np.concatenate([np.ones(count), -problem.loads[problem.groups] * scale, above])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = starts.astype(np.int32)
    lp.a_matrix_.index_ = index.astype(np.int32)
    lp.a_matrix_.value_ = np.concatenate([entries, -np.ones(num_groups)])
    lp.integrality_ = [highspy.HighsVarType.kInteger] * wide + [highspy.HighsVarType.kContinuous]
    return lp
