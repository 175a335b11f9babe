"""`pack`: lengths in, a complete and checked Packing out; `lower_bound`: the fewest packs that are possible."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.arguments import LARGEST, as_choice, as_count, as_seed, check_multiple
from varlen.errors import SettingError
from varlen.pack import in_python, kernels, kernels_arrange
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import (
    Items,
    Pieces,
    applied,
    arrange,
    as_groups,
    audit,
    check_fit,
    checksum,
    fit,
    gather_groups,
    slots_of,
    wrap,
)
from varlen.types import FloatArray, Int32Array, IntArray, Ledger, Method, Overlong, Packing

DEFAULT_WORK = (49152.0, 1.0)
"""Work of a token and of a squared token, 12 · hidden size to 1: causal attention in a model of width 4,096."""

# Upper estimates of what the methods take in Python; `jit.sized` compiles only where that is worth it.
_PIECE_S: dict[Method, float] = {"wrapped": 3e-6, "best_fit": 4e-6}  # per piece; other methods take 1.5e-6
_INSERT_S = 1e-10  # per piece and distinct free space: best fit keeps a sorted list of free spaces
_SEARCH_S: dict[Method, float] = {
    "first_fit": 1e-7,
    "first_fit_decreasing": 1e-7,
    "balanced": 3e-7,
}  # per pair


def pack(
    lengths: npt.ArrayLike,
    capacity: int,
    method: Method = "best_fit_decreasing",
    overlong: Overlong = "error",
    max_documents: int | None = None,
    document_multiple_of: int = 1,
    groups: npt.ArrayLike | None = None,
    seed: int | None = None,
    work: tuple[float, float] = DEFAULT_WORK,
) -> Packing:
    """Decide which documents share a pack.

    Methods, all deterministic; equal lengths keep input order:

    - "best_fit_decreasing": places documents from long to short, each where the least space stays free. This
      fills packs best, with documents of similar lengths. It is the default here; `varlen pack` and `PackedLoader`
      shuffle documents and pack by "best_fit".
    - "first_fit_decreasing": places documents from long to short, each into the first pack with space.
    - "best_fit", "first_fit": the same in input order; a pack's documents stay a random sample.
    - "next_fit": keeps one pack open, and documents in input order.
    - "balanced": places documents from most to least work, each into the pack with the least work that has
      space. Packs get equal work at about the fill of best-fit-decreasing, whose packs are returned where
      balancing doesn't lower the cost.
    - "wrapped": lays documents end to end and cuts every `capacity` tokens; every pack but the last is full.

    Args:
        lengths: `[num_documents]` tokens of each document, whole numbers from 0; list, numpy, Arrow or torch.
        capacity: tokens a pack can hold.
        method: see above.
        overlong: what happens to documents longer than `capacity`: "error", "split" into pieces that train as
            documents of their own (the default of `varlen pack` and `PackedLoader`), "truncate" or "drop". The
            ledger counts lost tokens.
        max_documents: most pieces a pack may hold; None for no limit.
        document_multiple_of: round the space each piece takes up to this multiple (2·CP, or its least common
            multiple with CP·TP); `capacity` must be a multiple too.
        groups: `[num_documents]` whole numbers; documents with the same number share a pack (preference
            pairs, rollout groups).
        seed: permute the packs; None keeps them in the order of their first document.
        work: (a, b): a document of s tokens is a·s + b·s² of work; for "balanced".

    Returns:
        A Packing whose ledger balances. Packs are ordered by their first document, and pieces within a pack by
        input order. Documents of length 0 are counted and skipped.

    Raises:
        LengthsError: negative, fractional, NaN or too large lengths; the message names the first and counts them.
        OverlongDocumentError: a document doesn't fit and `overlong` is "error".
        SettingError: a setting out of range, or two that contradict each other.

    Cost: O(num_documents + capacity) time and memory for best-fit-decreasing, next-fit and wrapped, with a
    factor log(num_packs) for the others; up to num_packs instead with `groups` of several sizes and
    `max_documents`.

    >>> import varlen as vl
    >>> vl.pack([5, 2, 6, 3], capacity=8)
    Packing(4 documents in 2 packs of 8 tokens, 100.00% full, 0 tokens of padding)
    """
    as_choice(method, "method", get_args(Method))
    checked = as_lengths(lengths)
    capacity = as_count(capacity, "capacity")
    multiple = as_count(document_multiple_of, "document_multiple_of")
    most_documents = LARGEST if max_documents is None else as_count(max_documents, "max_documents")
    check_multiple(capacity, multiple, "document_multiple_of")
    as_choice(overlong, "overlong", get_args(Overlong))
    seed = None if seed is None else as_seed(seed)
    work = as_work(work)
    group_ids = None if groups is None else as_groups(groups, checked.size)
    counts = {
        "tokens_in": int(checked.sum(dtype=np.int64)),
        "documents_in": checked.size,
        "empty_documents": int(checked.size - np.count_nonzero(checked)),
    }

    sizes = (counts["tokens_in"], checked.size, capacity, most_documents, multiple)
    with jit.sized(_reference_s(method, overlong, group_ids is not None, *sizes)):
        if method == "wrapped":
            if group_ids is not None:
                raise SettingError(
                    'method="wrapped" cuts documents anywhere and keeps no groups; choose another'
                )
            policy = applied(method, overlong)
            whole = Pieces(lengths=checked) if policy == "split" else fit(checked, capacity, policy)
            pieces, pack_of, num_packs = wrap(whole.lengths, capacity, most_documents, multiple)
            pieces.losses.update(whole.losses)
        else:
            pieces, items = _items(checked, capacity, most_documents, multiple, overlong, group_ids)
            work_of_items = item_work(pieces.lengths, items, work) if method == "balanced" else None
            pack_of, num_packs = assign(method, items, work_of_items, capacity, most_documents)
            if items.item_of is not None:
                pack_of = np.where(pieces.lengths > 0, pack_of[items.item_of], np.int32(-1)).astype(np.int32)
            del items
        del checked, lengths

        expected = checksum(pieces.lengths)
        numbers, stops, offsets = arrange(pieces.lengths, pack_of, num_packs, seed)
        documents, starts, losses = pieces.documents, pieces.starts, pieces.losses
        del pieces, pack_of  # with 10^8 documents, the result needs this memory
        packed, again = audit(numbers, stops, offsets, capacity, most_documents, multiple, expected)
        ledger = Ledger(packed=packed, duplicated=again, **counts, **losses).check()
        first = np.zeros(numbers.size, np.int32) if starts is None else starts[numbers]
        return Packing(
            document_ids=numbers if documents is None else documents[numbers],
            starts=first,
            stops=stops if starts is None else stops + first,
            offsets=offsets,
            capacity=capacity,
            ledger=ledger,
            method=method,
            overlong=overlong,
            document_multiple_of=multiple,
            groups=group_ids,
        )


def _reference_s(
    method: Method,
    overlong: Overlong,
    grouped: bool,
    tokens: int,
    documents: int,
    capacity: int,
    max_documents: int,
    multiple: int,
) -> float:
    """Return an upper estimate of the seconds that packing takes in Python, before anything is cut."""
    cuts = method == "wrapped" or overlong == "split"
    pieces = documents + (tokens // capacity if cuts else 0)
    packs = min(pieces, 2 * (tokens + pieces * (multiple - 1)) // capacity + 2 * pieces // max_documents + 1)
    # Packs with too few document slots left for the next group are skipped one by one in every search.
    skip_s = 1e-7 if grouped and max_documents < documents else 0.0
    insert_s = _INSERT_S * min(packs, capacity) if method == "best_fit" else 0.0
    return pieces * (_PIECE_S.get(method, 1.5e-6) + insert_s + packs * _SEARCH_S.get(method, skip_s))


def _items(
    lengths: Int32Array,
    capacity: int,
    max_documents: int,
    multiple: int,
    overlong: Overlong,
    groups: IntArray | None,
) -> tuple[Pieces, Items]:
    """Apply the overlong policy, and join documents of a group into one item."""
    if groups is not None:
        return gather_groups(lengths, groups, capacity, max_documents, multiple, overlong)
    pieces = fit(lengths, capacity, overlong)
    return pieces, Items(slots=slots_of(pieces.lengths, multiple), sizes=None, item_of=None)


def item_work(lengths: Int32Array, items: Items, work: tuple[float, float]) -> FloatArray:
    """Return the work of every item, a·s + b·s² summed over its documents, float64 `[num_items]`."""
    tokens = lengths.astype(np.float64)
    with np.errstate(over="ignore"):
        piece_work: FloatArray = work[0] * tokens + work[1] * tokens * tokens
        total = piece_work.sum()
    if not np.isfinite(total):
        raise SettingError(f"work {work} is too large: the work of all documents is no finite number")
    if items.item_of is None:
        return piece_work
    item_work = np.zeros(items.slots.size, np.float64)
    np.add.at(item_work, items.item_of, piece_work)
    return item_work


def as_work(work: object) -> tuple[float, float]:
    """Return the work of a token and of a squared token, checked."""
    try:
        linear, quadratic = (float(part) for part in work)  # type: ignore[attr-defined]
        if isinstance(work, (str, bytes)):
            raise TypeError
    except (TypeError, ValueError):
        raise SettingError(f"work must be two numbers (a, b) for a·s + b·s², got {work!r}") from None
    if not (0 <= linear < np.inf and 0 <= quadratic < np.inf and linear + quadratic > 0):
        raise SettingError(f"work must be two numbers of at least 0, one of them above 0; got {work!r}")
    return linear, quadratic


def lower_bound(
    lengths: npt.ArrayLike, capacity: int, max_documents: int | None = None, document_multiple_of: int = 1
) -> int:
    """Return a number of packs that no packing of whole documents can go below.

    The larger of two bounds by Martello and Toth (1990). L1 is all tokens over the capacity, rounded up. L2 takes,
    for every threshold t, one pack for each document longer than half the capacity; documents of at least t tokens
    can only fill the space that is left in those of at most capacity - t.

    Args:
        lengths: `[num_documents]` whole numbers from 0; documents of length 0 need no pack.
        capacity: tokens a pack can hold.
        max_documents: most documents a pack may hold.
        document_multiple_of: the space that a document takes is rounded up to this multiple.

    Raises:
        LengthsError: invalid lengths.
        OverlongDocumentError: a document is longer than the capacity.

    Cost: O(num_documents log num_documents) time.

    >>> lower_bound([5, 5, 5], capacity=8)
    3
    """
    checked = as_lengths(lengths)
    capacity = as_count(capacity, "capacity")
    multiple = as_count(document_multiple_of, "document_multiple_of")
    check_multiple(capacity, multiple, "document_multiple_of")
    check_fit([checked], capacity, out="cut or drop them first: the bound holds for whole documents")
    slots = slots_of(checked, multiple)
    values, counts = np.unique(slots[slots > 0], return_counts=True)
    if not values.size:
        return 0
    documents = int(counts.sum())
    most = documents if max_documents is None else as_count(max_documents, "max_documents")
    return max(
        -(-documents // most), _martello_toth(values.astype(np.int64), counts.astype(np.int64), capacity)
    )


def _martello_toth(values: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], capacity: int) -> int:
    """Return L2 over distinct lengths (rising) and their counts; the threshold 0 gives L1."""
    documents = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * values)])
    half = int(np.searchsorted(values, capacity // 2, side="right"))  # values[:half] <= capacity / 2
    thresholds = np.concatenate([[0], values[:half]])
    # Longer than capacity - t.
    big = np.maximum(np.searchsorted(values, capacity - thresholds, side="right"), half)
    small = np.searchsorted(values, thresholds, side="left")
    medium_packs = documents[big] - documents[half]
    space = medium_packs * capacity - (tokens[big] - tokens[half])
    rest = tokens[half] - tokens[np.minimum(small, half)] - space
    packs = documents[-1] - documents[half]
    return int((packs + np.maximum(0, -(-rest // capacity))).max())


# Assign items to packs: calls the kernel of each method.

FILL_PIECE_S = 6e-5  # upper estimate of what `fill` takes per piece in Python
_LARGEST_TABLE = 1 << 24  # capacity for kernels, whose tables take up to 40 bytes per amount of free space


def assign(
    method: Method, items: Items, item_work: FloatArray | None, capacity: int, max_documents: int
) -> tuple[Int32Array, int]:
    """Return the pack of each item, int32 or -1, and the number of packs, by any method but "wrapped"."""
    slots = items.slots
    if capacity > slots.size:
        # The tables of kernels grow with the capacity; one that holds all tokens is enough.
        capacity = min(capacity, max(int(slots.sum(dtype=np.int64)), 1))
    fitting = in_python if capacity > _LARGEST_TABLE or jit.in_python() else kernels
    pack_of = np.empty(slots.size, np.int32)
    if method == "best_fit_decreasing" and (items.sizes is None or max_documents >= items.sizes.sum()):
        return pack_of, fitting.best_fit_decreasing(slots, capacity, max_documents, pack_of)
    sizes = np.ones(slots.size, np.int32) if items.sizes is None else items.sizes
    if method == "next_fit":
        return pack_of, kernels.next_fit(slots, sizes, capacity, max_documents, pack_of)
    if method == "balanced":
        assert item_work is not None
        return _balance(slots, sizes, item_work, capacity, max_documents)
    order = np.arange(slots.size, dtype=np.int32)
    if method in ("first_fit_decreasing", "best_fit_decreasing"):
        if fitting is kernels:
            kernels.descending(slots, int(slots.max(initial=0)), order)
        else:
            order[:] = np.argsort(-slots, kind="stable")
    if method in ("best_fit", "best_fit_decreasing"):
        return pack_of, fitting.best_fit(order, slots, sizes, capacity, max_documents, pack_of)
    assert method in ("first_fit", "first_fit_decreasing"), method
    most = _most_packs(slots, sizes, capacity, max_documents)
    return pack_of, kernels.first_fit(order, slots, sizes, capacity, max_documents, most, pack_of)


def _most_packs(slots: Int32Array, sizes: Int32Array, capacity: int, max_documents: int) -> int:
    """Return an upper bound on the packs that a method opens if it opens one only where no pack has space.

    Any two such packs together hold more than `capacity` tokens or more than `max_documents` documents.
    """
    tokens = int(slots.sum(dtype=np.int64))
    documents = int(sizes.sum(dtype=np.int64))
    return min(slots.size, 2 * (tokens // capacity + documents // max_documents) + 4) + 1


def spread(
    num_packs: int,
    slots: Int32Array,
    sizes: Int32Array,
    item_work: FloatArray,
    capacity: int,
    max_documents: int,
) -> tuple[Int32Array, int]:
    """Balance work over `num_packs` packs, or a few more where not all items fit."""
    order = np.argsort(-item_work, kind="stable").astype(np.int32)
    best: tuple[Int32Array, int] | None = None
    for _ in range(3):  # if packs were added, a rerun that begins with them balances better
        most = num_packs + _most_packs(slots, sizes, capacity, max_documents)
        settings = (capacity, max_documents, num_packs, most)
        pack_of = np.empty(slots.size, np.int32)
        used = kernels.balanced(order, slots, sizes, item_work, *settings, pack_of)
        if best is not None and used > best[1]:
            break
        best = (pack_of, used)
        if used == num_packs:
            break
        num_packs = used
    assert best is not None
    return best


def fill(
    order: Int32Array,
    slots: Int32Array,
    capacity: int,
    min_fill: float,
    max_documents: int,
    *,
    from_first: bool = False,
) -> tuple[Int32Array, int]:
    """Fill a pack around each piece of `order` with other pieces in input order; see `kernels_arrange.fill`.

    Returns the pack of each piece or -1, and the number of packs.
    """
    pack_of, least = np.empty(slots.size, np.int32), -int(-min_fill * capacity // 1)
    return pack_of, kernels_arrange.fill(order, slots, capacity, least, max_documents, from_first, pack_of)


def _balance(
    slots: Int32Array, sizes: Int32Array, item_work: FloatArray, capacity: int, max_documents: int
) -> tuple[Int32Array, int]:
    """Balance work over the packs of best-fit-decreasing, or return those where balancing costs more."""
    dense = Items(slots=slots, sizes=sizes, item_of=None)
    fullest, num_packs = assign("best_fit_decreasing", dense, None, capacity, max_documents)
    even = spread(num_packs, slots, sizes, item_work, capacity, max_documents)
    return even if _cost(*even, item_work) <= _cost(fullest, num_packs, item_work) else (fullest, num_packs)


def _cost(pack_of: Int32Array, num_packs: int, item_work: FloatArray) -> float:
    """Return the largest work of a pack times the number of packs: parallel packs wait for the largest."""
    is_packed = pack_of >= 0
    work = np.bincount(pack_of[is_packed], weights=item_work[is_packed], minlength=1)
    return num_packs * float(work.max())
