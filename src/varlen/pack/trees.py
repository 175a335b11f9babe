"""`pack_forest`: a Forest in, a Packing of its trees out; trees that are too long are cut."""

from __future__ import annotations

import heapq
from typing import get_args

import numpy as np

from varlen.arguments import LARGEST, as_choice, as_count, as_seed
from varlen.errors import LedgerError, SettingError
from varlen.forest import Forest, as_forest
from varlen.pack.api import DEFAULT_WORK, as_work, assign
from varlen.pack.pieces import Items, arrange, audit, audit_cuts, check_fit, checksum
from varlen.types import FloatArray, Int32Array, IntArray, Ledger, Method, Packing

_NO_TREES = ("wrapped", "next_fit")
"""Methods that cut anywhere, or leave packs half empty to keep an order that trees don't have."""


def pack_forest(
    forest: Forest,
    capacity: int,
    method: Method = "best_fit_decreasing",
    seed: int | None = None,
    work: tuple[float, float] = DEFAULT_WORK,
) -> Packing:
    """Decide which trees share a pack.

    A tree takes up its own tokens, each once. Trees of a group share a pack if a pack holds them all. A tree that is
    longer than a pack is cut between branches, where the tokens that must be computed again are fewest: a later piece
    repeats those before its first token. Every occurrence of a target is trained in one piece, that of its predicted
    token.

    Args:
        forest: of `vl.fold`.
        capacity: tokens a pack can hold.
        method: as in `vl.pack`; "balanced" gives packs equal work.
        seed: permute the packs; None keeps them in the order of their first tree.
        work: (a, b): a tree of n tokens is a·n plus b times the sum over its tokens of 2·position + 1, which is b·n²
            for a tree without a fork; for "balanced".

    Returns:
        A Packing whose documents are the trees: piece j is the tokens `starts[j]:stops[j]` of tree `document_ids[j]`,
        after the `prefixes[j]` tokens that it repeats.

    Raises:
        OverlongDocumentError: a row is longer than a pack.
        SettingError: a method that keeps no trees whole, or a number out of its range.
        LedgerError: tokens are missing or stand twice; a bug in varlen.

    Cost: that of `vl.pack`, and O(rows log rows) for trees that are cut.

    >>> import varlen as vl
    >>> forest = vl.fold([[1, 2, 3, 4], [1, 2, 5, 6], [7, 8]])
    >>> vl.pack_forest(forest, capacity=8)
    Packing(2 trees in 1 packs of 8 tokens, 100.00% full, 0 tokens of padding)
    >>> vl.pack_forest(forest, capacity=4)
    Packing(2 trees in 3 packs of 4 tokens, 66.67% full, 2 tokens of padding, 2 tokens repeated)
    """
    as_forest(forest, "vl.pack_forest(forest, capacity)")
    as_choice(method, "method", tuple(one for one in get_args(Method) if one not in _NO_TREES))
    capacity, work = as_count(capacity, "capacity"), as_work(work)
    check_fit(
        [np.diff(forest.row_offsets)],
        capacity,
        "row {:,}".format,
        out="shorten such rows, leave them out, or raise capacity: a row sees all of its tokens",
        units="rows",
    )
    lengths = np.diff(forest.tree_offsets).astype(np.int32)
    groups = _groups_of_trees(forest)
    documents, starts, stops, prefixes = _pieces(forest, capacity)
    sizes = (stops - starts).astype(np.int32)
    audit_cuts(documents, starts.astype(np.int32), sizes, lengths)
    slots = (stops - starts + prefixes).astype(np.int32)
    items, item_of = _items(slots, groups[documents], capacity)
    item_work: FloatArray | None = None
    if method == "balanced":
        item_work = np.zeros(len(items.slots))
        np.add.at(item_work, item_of, _work(forest, documents, starts, stops, prefixes, work))
    pack_of, num_packs = assign(method, items, item_work, capacity, LARGEST)
    expected, chosen = checksum(sizes), None if seed is None else as_seed(seed)
    numbers, sizes, offsets = arrange(sizes, pack_of[item_of], num_packs, chosen)
    packed, again = audit(numbers, sizes, offsets, capacity, LARGEST, 1, expected)
    found = Packing(
        document_ids=documents[numbers],
        starts=starts[numbers].astype(np.int32),
        stops=(starts[numbers] + sizes).astype(np.int32),
        offsets=offsets,
        capacity=capacity,
        ledger=Ledger(
            tokens_in=forest.num_tokens,
            packed=packed,
            duplicated=again,
            documents_in=len(lengths),
            split_documents=int((np.bincount(documents, minlength=1) > 1).sum()),
        ).check(),
        method=method,
        groups=groups,
        prefixes=prefixes[numbers].astype(np.int32),
    )
    if found.num_packs and int(found.pack_sums(found.slot_lengths).max()) > capacity:
        raise LedgerError(
            "a pack of trees is over its capacity. This is a bug in varlen; please report the rows"
        )
    return found


def _groups_of_trees(forest: Forest) -> IntArray:
    """Return the group of each tree, int64 `[trees]`."""
    has_tokens = np.diff(forest.row_offsets) > 0
    first = forest.row_tokens[forest.row_offsets[:-1][has_tokens]]
    groups = np.zeros(forest.num_trees, np.int64)
    groups[np.searchsorted(forest.tree_offsets, first, side="right") - 1] = forest.row_groups[has_tokens]
    return groups


def _pieces(forest: Forest, capacity: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return tree, start, stop and repeated tokens of each piece; starts and stops are within the tree."""
    bounds = forest.tree_offsets
    long = np.flatnonzero(np.diff(bounds) > capacity)
    places = [np.zeros(1, np.int64)] * len(bounds[:-1])
    if long.size:
        cuts = forest.segment_offsets[:-1][_may_begin(forest)]
        repeated = forest.position_ids[cuts]
        for tree in long.tolist():
            begin, end = bounds[tree], bounds[tree + 1]
            within = slice(*np.searchsorted(cuts, (begin + 1, end)))
            chosen = cheapest_cuts(
                np.concatenate([[0], cuts[within] - begin, [end - begin]]),
                np.concatenate([[0], repeated[within]]),
                capacity,
            )
            places[tree] = chosen
    counts = np.array([len(each) for each in places], np.int64)
    documents = np.repeat(np.arange(len(places)), counts)
    starts = np.concatenate([*places, np.empty(0, np.int64)])
    ends = np.append(starts[1:], 0)
    is_last = np.append(documents[1:] != documents[:-1], [True] * bool(documents.size))
    stops = np.where(is_last, np.diff(bounds)[documents], ends)
    prefixes = forest.position_ids[bounds[documents] + starts].astype(np.int64)
    return documents, starts, stops, prefixes


def _may_begin(forest: Forest) -> IntArray:
    """Return the segments at which a piece may begin: a row ends before each, so every row fits before or after it.

    Any other place repeats more: between a fork and its first branch, all before the fork is needed on both sides.
    """
    numbers = np.arange(forest.num_segments)
    return np.flatnonzero((forest.segment_parents >= 0) & (forest.segment_parents != numbers - 1))


def cheapest_cuts(places: IntArray, repeated: IntArray, capacity: int) -> IntArray:
    """Return where the pieces of a tree begin, so that they repeat the fewest tokens, and then are fewest.

    Args:
        places: int64 `[n + 1]`, rising: where a piece may begin, from 0, and the end of the tree.
        repeated: int64 `[n]`: the tokens that a piece from there repeats.
        capacity: tokens that a piece may take up, the repeated ones included.
    """
    count = len(places) - 1
    before = np.zeros(count + 1, np.int64)
    waiting: list[tuple[int, int, int]] = []
    cost = [(0, 0)] * (count + 1)
    for at in range(count + 1):
        if at:
            while places[at] - places[waiting[0][2]] + repeated[waiting[0][2]] > capacity:
                heapq.heappop(waiting)
            tokens, pieces, before[at] = waiting[0]
            cost[at] = (tokens, pieces)
        if at < count:
            heapq.heappush(waiting, (cost[at][0] + int(repeated[at]), cost[at][1] + 1, at))
    chosen = [int(before[count])]
    while chosen[-1]:
        chosen.append(int(before[chosen[-1]]))
    found: IntArray = places[np.array(chosen[::-1])]
    return found


def _items(slots: Int32Array, groups: IntArray, capacity: int) -> tuple[Items, IntArray]:
    """Return the units of packing, a group where a pack holds it, else each of its pieces; and that of each piece."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    totals = np.bincount(inverse, slots, minlength=1).astype(np.int64)
    numbers = np.arange(len(slots))
    keys = np.where(totals[inverse] <= capacity, first[inverse], numbers) if len(slots) else numbers
    item_of: IntArray = np.unique(keys, return_inverse=True)[1].astype(np.int64)
    item_slots = np.bincount(item_of, slots).astype(np.int32) if len(slots) else np.empty(0, np.int32)
    return Items(slots=item_slots, sizes=None, item_of=item_of), item_of


def _work(
    forest: Forest,
    documents: IntArray,
    starts: IntArray,
    stops: IntArray,
    prefixes: IntArray,
    work: tuple[float, float],
) -> FloatArray:
    """Return the work of each piece, float64 `[pieces]`."""
    pairs = np.zeros(forest.num_tokens + 1)
    np.cumsum(2.0 * forest.position_ids + 1.0, out=pairs[1:])
    bounds = forest.tree_offsets[documents]
    attended = pairs[bounds + stops] - pairs[bounds + starts] + prefixes.astype(np.float64) ** 2
    found: FloatArray = work[0] * (stops - starts + prefixes) + work[1] * attended
    if not np.isfinite(found).all():
        raise SettingError(f"work {work} is too large: the work of a tree is no finite number")
    return found
