"""`assign`: documents to data-parallel groups, the heaviest group as light as can be within its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.errors import LengthsError, PlanError, SettingError
from varlen.plan import kernels_assign
from varlen.plan.partition import as_weights, partition
from varlen.types import FloatArray, Int32Array, IntArray

STEPS: Final = 2**21
"""Steps of search, each about the time of a look at a memory address: some milliseconds in all."""
ENOUGH: Final = 1e-4
"""Over a bound by so little, a heaviest group is light enough: no clock tells the two apart."""
_NEAR: Final = 4
"""Documents on either side that are looked at for a swap, since the nearest may not fit a group's memory."""
_WHOLE: Final = 24
"""So many documents, or fewer, are searched through as a whole."""
_NODES: Final = 2**12
"""Of one search through some documents of three groups."""
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
    """Give documents to groups so that the heaviest group is light.

    Several ways to begin (from heavy to light, Graham 1969, "Bounds on Multiprocessing Timing Anomalies"; the largest
    differencing method, Karmarkar & Karp 1982, "The Differencing Method of Set Partitioning") are improved by
    exchanges between two groups. What is still over the bound is searched: few documents as a whole, many by
    dividing anew, time and again, the light documents of the heaviest group and two others (branch and bound, as in
    Korf 1998, "A complete anytime algorithm for number partitioning", with work counted and never the clock).

    Args:
        work: `[num_documents]` numbers of at least 0: what each costs, in any unit.
        num_groups: data-parallel groups. They may be more than documents; some are empty then.
        tokens: `[num_documents]` whole numbers; needed where there is a limit.
        token_limit: tokens that a group can hold: one number, or `[num_groups]` of them.
        loads: `[num_groups]` numbers of at least 0: what each group has to do before, in the unit of `work`.
        steps: work of the search in all. It bounds time; equal input and steps give an equal answer anywhere.

    Returns:
        int32 `[num_documents]`: the group of each. Groups that begin alike stand in the order of their first
        documents.

    Raises:
        LengthsError: work, tokens or loads that are negative, not finite or of a wrong shape.
        SettingError: a number of groups or of steps below 1, or a limit without tokens.
        PlanError: the documents don't fit the limits; says what would do.

    Cost: O(n·(num_groups + log n)), and `steps`.

    >>> assign([9.0, 1.0, 2.0, 3.0, 3.0], 2).tolist()
    [0, 1, 1, 1, 1]
    """
    values = as_weights(work).astype(np.float64)
    for name, number in (("the number of groups", num_groups), ("steps", steps)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
            raise SettingError(f"{name} must be a whole number of at least 1, got {number!r}")
    before = group_loads(loads, num_groups)
    sizes, limits = group_limits(tokens, token_limit, values.size, num_groups)
    are_alike = bool((before == before[0]).all() and (limits == limits[0]).all())
    if num_groups == 1 or not values.size:
        _check_room(sizes, limits)
        return np.zeros(values.size, np.int32)
    with jit.sized(3e-7 * (steps + values.size * num_groups)):
        found = _searched(values, sizes, limits, before, steps)
    return _in_order_of_first(found, num_groups) if are_alike else found


def lightest_possible(work: FloatArray, loads: FloatArray) -> float:
    """Return what the heaviest group weighs at least, in the unit of work.

    Args:
        work: float64 `[num_documents]`.
        loads: float64 `[num_groups]`: of the groups before.
    """
    rising = np.sort(loads)
    filled = (np.cumsum(rising) + work.sum()) / np.arange(1, loads.size + 1)
    # Work flows to the lightest groups first, up to a level that the others stand above.
    levels = filled[np.append(filled[:-1] <= rising[1:], True)]
    return max(float(levels[0]), float(rising[-1]), float(rising[0] + work.max(initial=0.0)))


def _searched(
    values: FloatArray, sizes: IntArray, limits: IntArray, before: FloatArray, steps: int
) -> Int32Array:
    """The best of the ways found; groups in any order."""
    order = np.argsort(-values, kind="stable").astype(np.int32)
    enough = lightest_possible(values, before) * (1 + ENOUGH)
    best, heaviest = None, np.inf
    for group_of in _beginnings(order, values, sizes, limits, before):
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


def _beginnings(
    order: Int32Array,
    values: FloatArray,
    sizes: IntArray,
    limits: IntArray,
    before: FloatArray,
) -> Iterator[Int32Array]:
    """Yield one or two ways to begin with, within the limits; the second is made only where it is asked for.

    Raises:
        PlanError: none was found.
    """
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
    """A way that minds memory alone, since one that minded work found no room.

    Raises:
        PlanError: none was found.
    """
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
        f"{limits.size:,} groups that hold {_said(limits)} tokens each; with {int(over.max()):,} more tokens a group "
        "they fit. Allow those, take more groups, or cut or merge the longest documents"
    )


def _check_room(sizes: IntArray, limits: IntArray) -> None:
    """Require that no document is over every limit, nor all of them together over all limits.

    Raises:
        PlanError: they are.
    """
    over = sizes > limits.max()
    if over.any():
        first = int(np.argmax(over))
        raise PlanError(
            f"document {first:,} of {int(sizes[first]):,} tokens fits no group, which holds {_said(limits)} tokens "
            f"at most ({int(over.sum()):,} of {sizes.size:,} documents don't); raise the limit to "
            f"{int(sizes.max()):,}, or let several ranks share it"
        )
    if int(sizes.sum()) > int(limits.sum(dtype=np.float64)):
        raise PlanError(
            f"{sizes.size:,} documents have {int(sizes.sum()):,} tokens, and {limits.size:,} groups of "
            f"{_said(limits)} tokens hold {int(limits.sum()):,}; raise the limit to at least "
            f"{-(-int(sizes.sum()) // limits.size):,}, or take fewer documents or more groups"
        )


def _said(limits: IntArray) -> str:
    low, high = int(limits.min()), int(limits.max())
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _fits(group_of: Int32Array, sizes: IntArray, limits: IntArray) -> bool:
    held = np.zeros(limits.size, np.int64)
    np.add.at(held, group_of, sizes)
    return bool((held <= limits).all())


def _heaviest(values: FloatArray, group_of: Int32Array, before: FloatArray) -> float:
    return float((before + np.bincount(group_of, values, before.size)).max())


def _in_order_of_first(group_of: Int32Array, num_groups: int) -> Int32Array:
    """The same groups, numbered as their first documents stand."""
    used, begins = np.unique(group_of, return_index=True)
    rank = np.zeros(num_groups, np.int32)
    rank[used[np.argsort(begins, kind="stable")]] = np.arange(used.size, dtype=np.int32)
    return rank[group_of]


def group_loads(loads: npt.ArrayLike | None, num_groups: int) -> FloatArray:
    """Return what groups have to do before, float64 `[num_groups]`.

    Args:
        loads: `[num_groups]` numbers of at least 0; None for 0.
        num_groups: how many groups there are.

    Raises:
        LengthsError: they are no numbers of at least 0, or not as many as groups.
    """
    if loads is None:
        return np.zeros(num_groups)
    try:
        found = as_weights(loads).astype(np.float64)
    except LengthsError as error:
        raise LengthsError(f"the loads of groups before: {error}") from None
    if found.size != num_groups:
        raise LengthsError(f"there are {found.size:,} loads for {num_groups:,} groups; pass one a group")
    return found


def group_limits(
    tokens: npt.ArrayLike | None, token_limit: npt.ArrayLike | None, count: int, num_groups: int
) -> tuple[IntArray, IntArray]:
    """Return tokens int64 `[num_documents]` and limits int64 `[num_groups]`, without effect where there is no limit.

    Args:
        tokens: `[num_documents]` whole numbers.
        token_limit: one for all groups, or one for each; None: none.
        count: how many documents there are.
        num_groups: how many groups.

    Raises:
        LengthsError: tokens that are no whole numbers of at least 0, or not as many as documents.
        SettingError: limits that aren't, or limits without tokens.
    """
    if token_limit is None:
        return np.zeros(count, np.int64), np.full(num_groups, _UNLIMITED, np.int64)
    if tokens is None:
        raise SettingError("token_limit needs tokens: pass the length of each document")
    sizes = as_weights(tokens)
    if sizes.size != count or (sizes != np.floor(sizes)).any():
        raise LengthsError(
            f"tokens must be {count:,} whole numbers, one a document; got {sizes.size:,}"
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
