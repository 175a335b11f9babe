"""`improve_exactly`: an assignment handed to HiGHS, which lightens it or proves how light it can be."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from varlen.errors import MissingExtraError, PlanError, SettingError
from varlen.plan.assign import group_limits, group_loads, lightest_possible
from varlen.plan.partition import as_weights
from varlen.types import FloatArray, Int32Array, IntArray

NODES: Final = 200
"""Of branch and bound, some seconds for the largest problem that is handed over."""
_MOST: Final = 2048
"""Documents times groups of a problem, at most; what else there is, stays as it is."""
_GAP: Final = 1e-6
_SCALE: Final = 1000.0
"""The heaviest group before, in the solver's numbers: its tolerances are absolute."""


class Exact(NamedTuple):
    """What an exact solver made of an assignment."""

    group_of: Int32Array
    """int32 `[num_documents]`: as it was, unless a lighter way was found."""
    bound: float
    """What the heaviest group weighs at least, in the unit of work."""
    is_optimal: bool
    """Whether no way has a heaviest group that is lighter by more than a millionth."""
    nodes: int
    """Nodes that were used."""


class _Problem(NamedTuple):
    """Documents and groups that the solver may rearrange."""

    items: IntArray
    """int64 `[some documents]`: by falling work."""
    groups: IntArray
    """int64 `[some groups]`."""
    loads: FloatArray
    """float64 `[num_groups]`: work of all groups that stays."""
    room: IntArray
    """int64 `[num_groups]`: tokens that they could hold besides."""


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
    """Lighten the heaviest group of an assignment by mixed-integer programming, or prove that it can't be.

    HiGHS (Huangfu & Hall 2018, "Parallelizing the dual revised simplex method") begins with the assignment given and
    stops after a number of nodes, never by the clock, with one thread: the same answer on every run. Groups that
    begin alike are told apart by the heaviest documents that they hold. Where there are many documents, those of the
    heaviest group and of the lightest ones are rearranged, and the others stay.

    Args:
        work: as for `assign`, as are `num_groups`, `tokens`, `token_limit` and `loads`.
        group_of: int32 `[num_documents]`: what `assign` returned, within the limits.
        num_groups: data-parallel groups.
        tokens: `[num_documents]`.
        token_limit: of each group.
        loads: `[num_groups]`: what each group has to do before.
        nodes: most nodes of branch and bound.

    Raises:
        MissingExtraError: highspy isn't installed.
        SettingError: a number of nodes below 1.
        PlanError: the assignment given is none, or over the limits.

    Cost: seconds. They bring next to nothing, since `assign` leaves next to nothing: on the 21 steps of
        benchmarks/plan_exact.py at most 0.003 %, on three of them. CP-SAT from the same start lightened none, and
        proved six to be optimal where this proves three.
    """
    highspy = _solver()
    if isinstance(nodes, bool) or not isinstance(nodes, int | np.integer) or nodes < 1:
        raise SettingError(f"nodes must be a whole number of at least 1, got {nodes!r}")
    values = as_weights(work).astype(np.float64)
    before = group_loads(loads, num_groups)
    sizes, limits = group_limits(tokens, token_limit, values.size, num_groups)
    given = np.asarray(group_of)
    if (
        given.shape != values.shape
        or given.dtype.kind not in "iu"
        or ((given < 0) | (given >= num_groups)).any()
    ):
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
    found, bound, used = _solve(highspy, problem, values, sizes, given, float(sums.max()), floor, int(nodes))
    after = before + np.bincount(found, values, num_groups)
    held = np.bincount(found, sizes, num_groups)
    best = found if after.max() < sums.max() and (held <= limits).all() else given.astype(np.int32)
    reached = min(float(after.max()), float(sums.max()))
    bound = max(floor, min(bound, reached) if problem.items.size == values.size else floor)
    return Exact(best, bound, reached <= bound * (1 + 2 * _GAP), used)


def _solver() -> Any:
    """The package of the solver.

    Raises:
        MissingExtraError: it isn't installed.
    """
    try:
        import highspy
    except ImportError:
        raise MissingExtraError(
            'exact solving needs HiGHS; install it with pip install "varlen[plan]", or plan without it: the plan is '
            "the same or nearly so"
        ) from None
    return highspy


def _silent(highspy: Any) -> Any:
    """A solver that prints nothing: what it prints once a process comes when callbacks are enabled, as it is made."""

    def enabled(solver: Any) -> None:
        solver.setOptionValue("output_flag", False)
        highspy.Highs.enableCallbacks(solver)

    solver = type("SilentHighs", (highspy.Highs,), {"enableCallbacks": enabled})()
    solver.setOptionValue("output_flag", False)  # older ones enable none
    return solver


def _problem(
    values: FloatArray,
    sizes: IntArray,
    group_of: npt.NDArray[Any],
    before: FloatArray,
    sums: FloatArray,
    room: IntArray,
) -> _Problem:
    """All there is, if that is little; else the heaviest group, and as many of the lightest as there is room for."""
    by_load = np.argsort(sums, kind="stable")
    order = np.argsort(-values, kind="stable")
    count = before.size
    while count > 2 and np.isin(group_of, [by_load[-1], *by_load[: count - 1]]).sum() * count > _MOST:
        count -= 1
    groups = np.sort(np.array([by_load[-1], *by_load[: count - 1]], np.int64))
    chosen = order[np.isin(group_of[order], groups)]
    items = chosen[-max(_MOST // count, 1) :]  # light ones fill gaps better
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
    """The assignment that the solver has in the end, a bound for its problem, and the nodes used."""
    items, groups, loads, room = problem
    scale = _SCALE / heaviest
    number_of = np.zeros(loads.size, np.int64)
    number_of[groups] = np.arange(groups.size)
    begin = number_of[group_of[items]]
    are_alike = bool((loads[groups] == loads[groups[0]]).all() and (room[groups] == room[groups[0]]).all())
    if are_alike:  # the n-th heaviest document stands in one of the first n groups
        _, firsts, numbers = np.unique(begin, return_index=True, return_inverse=True)
        begin = np.argsort(np.argsort(firsts))[numbers]
    last = (
        np.minimum(np.arange(items.size), groups.size - 1)
        if are_alike
        else np.full(items.size, groups.size - 1)
    )
    rows = np.repeat(np.arange(items.size), last + 1)
    columns = np.concatenate([np.arange(one + 1) for one in last])
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
    found = group_of.astype(np.int32)
    if chosen.size == rows.size + 1:
        taken = chosen[:-1] > 0.5
        found[items[rows[taken]]] = groups[columns[taken]]
    info = solver.getInfo()
    return found, float(info.mip_dual_bound) / scale, int(info.mip_node_count)


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
    """A column for each document and group that it may stand in, and one for the heaviest group's work.

    Rows: each document stands once; each group's work is no more than the heaviest's; each group's tokens fit.
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
