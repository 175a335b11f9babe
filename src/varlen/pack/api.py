"""`pack`: lengths in, a complete and checked Packing out; and `lower_bound`, which no packing can be below."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.arguments import LARGEST, as_choice, as_count, as_seed, check_multiple
from varlen.errors import OverlongDocumentError, SettingError
from varlen.pack.assign import assign
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import (
    Items,
    Pieces,
    arrange,
    as_groups,
    audit,
    checksum,
    fit,
    gather_groups,
    slots_of,
    wrap,
)
from varlen.types import FloatArray, Int32Array, IntArray, Ledger, Method, Overlong, Packing

DEFAULT_WORK = (49152.0, 1.0)
"""Work of a token and of a squared token, as 12 · hidden size to 1: causal attention in a model of width 4,096."""

_PIECE_S: dict[Method, float] = {"wrapped": 3e-6, "best_fit": 4e-6}
"""Seconds a piece that the references of these methods take; those of the others take 1.5e-6."""

_KEEP_S = 1e-10
"""Seconds a piece and amount of free space that best fit takes to keep a list of amounts in order."""

_SEARCH_S: dict[Method, float] = {"first_fit": 1e-7, "first_fit_decreasing": 1e-7, "balanced": 3e-7}
"""Seconds a piece and pack of those references that look at every pack for every piece."""


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

    - "best_fit_decreasing": from long to short, each where the least space stays free. The fullest packs, of
      documents alike in length. The default here; what reads documents (`varlen pack`, `PackedLoader`) shuffles,
      and packs by "best_fit".
    - "first_fit_decreasing": from long to short, each into the first pack with space.
    - "best_fit", "first_fit": the same in input order; a pack's documents stay a random sample.
    - "next_fit": one open pack; keeps documents in input order.
    - "balanced": from most to least work, each into the pack with the least work that has space; equal work
      a pack at about the fill of best-fit-decreasing, whose packs it keeps where none are cheaper: where the
      longest documents or packs with no space to spare leave nothing to even out.
    - "wrapped": documents end to end, cut every `capacity` tokens; every pack but the last is full.

    Args:
        lengths: `[num_documents]` tokens of each document, whole numbers from 0; list, numpy, Arrow or torch.
        capacity: tokens a pack can hold.
        method: see above.
        overlong: what becomes of documents longer than `capacity`: "error", "split" into pieces that train as
            documents of their own (the default of what reads documents), "truncate" or "drop". What is lost stands
            in the ledger.
        max_documents: most pieces a pack may hold; None for no limit.
        document_multiple_of: round the space each piece takes up to this multiple (2·CP, or its least common
            multiple with CP·TP); `capacity` must be a multiple too.
        groups: `[num_documents]` whole numbers; documents with the same number share a pack (preference
            pairs, rollout groups).
        seed: permute the packs; None keeps them in the order of their first document.
        work: (a, b): a document of s tokens is a·s + b·s² of work; for "balanced".

    Returns:
        A Packing whose ledger balances. Packs stand in the order of their first document and pieces within a
        pack in input order. Documents of length 0 are counted and skipped.

    Raises:
        LengthsError: negative, fractional, NaN or too large lengths, named with how many there are.
        OverlongDocumentError: a document doesn't fit and `overlong` is "error".
        SettingError: a setting out of range, or two that contradict each other.

    Cost: O(num_documents + capacity) time and memory for best-fit-decreasing, next-fit and wrapped, with a
    factor log(num_packs) for the others; up to num_packs in its place where `groups` of several sizes meet
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
            policy: Overlong = "split" if overlong == "error" else overlong
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
        placed, stops, offsets = arrange(pieces.lengths, pack_of, num_packs, seed)
        documents, starts, losses = pieces.documents, pieces.starts, pieces.losses
        del pieces, pack_of  # 10^8 documents: what is not needed any more makes room for the result
        packed, again = audit(placed, stops, offsets, capacity, most_documents, multiple, expected)
        ledger = Ledger(packed=packed, duplicated=again, **counts, **losses).check()
        first = np.zeros(placed.size, np.int32) if starts is None else starts[placed]
        return Packing(
            document_ids=placed if documents is None else documents[placed],
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
    """Return about how many seconds the references take at most, from what is known before anything is cut."""
    cuts = method == "wrapped" or overlong == "split"
    pieces = documents + (tokens // capacity if cuts else 0)
    packs = min(pieces, 2 * (tokens + pieces * (multiple - 1)) // capacity + 2 * pieces // max_documents + 1)
    # Groups of several sizes leave packs with too few places for the next, and every search passes by those.
    passing = 1e-7 if grouped and max_documents < documents else 0.0
    keeping = _KEEP_S * min(packs, capacity) if method == "best_fit" else 0.0
    return pieces * (_PIECE_S.get(method, 1.5e-6) + keeping + packs * _SEARCH_S.get(method, passing))


def _items(
    lengths: Int32Array,
    capacity: int,
    max_documents: int,
    multiple: int,
    overlong: Overlong,
    groups: IntArray | None,
) -> tuple[Pieces, Items]:
    """Apply the overlong policy and join what must share a pack."""
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


# The provable minimum number of packs, to say how far any packing could still be improved.


def lower_bound(
    lengths: npt.ArrayLike, capacity: int, max_documents: int | None = None, document_multiple_of: int = 1
) -> int:
    """Return a number of packs that no packing of whole documents can go below.

    The larger of two bounds by Martello and Toth (1990): L1, all tokens over the capacity, rounded up; and L2,
    which for every threshold t keeps documents longer than capacity - t apart, gives every document above half
    a capacity a pack of its own, and lets those of at least t fill only the space that is left there.

    Args:
        lengths: `[num_documents]` whole numbers from 0; documents of length 0 need no pack.
        capacity: tokens a pack can hold.
        max_documents: most documents a pack may hold.
        document_multiple_of: space a document takes up is rounded up to this multiple.

    Raises:
        LengthsError: lengths that can't be.
        OverlongDocumentError: a document longer than the capacity.

    Cost: O(num_documents log num_documents) time.

    >>> lower_bound([5, 5, 5], capacity=8)
    3
    """
    checked = as_lengths(lengths)
    capacity = as_count(capacity, "capacity")
    multiple = as_count(document_multiple_of, "document_multiple_of")
    check_multiple(capacity, multiple, "document_multiple_of")
    if checked.size and checked.max() > capacity:
        first = int(np.argmax(checked > capacity))
        raise OverlongDocumentError(
            f"document {first:,} has {checked[first]:,} tokens but capacity is {capacity:,} "
            f"({int((checked > capacity).sum()):,} of {checked.size:,} documents are too long); "
            "cut or drop them first: a bound speaks of whole documents"
        )
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
    """L2 over distinct lengths (rising) and how often each occurs; the threshold 0 gives L1."""
    documents = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * values)])
    half = int(np.searchsorted(values, capacity // 2, side="right"))  # values[:half] <= capacity / 2
    thresholds = np.concatenate([[0], values[:half]])
    big = np.searchsorted(values, capacity - thresholds, side="right")  # longer than capacity - t
    big = np.maximum(big, half)
    small = np.searchsorted(values, thresholds, side="left")
    alone = documents[-1] - documents[big]
    halves = documents[big] - documents[half]
    space = halves * capacity - (tokens[big] - tokens[half])
    rest = tokens[half] - tokens[np.minimum(small, half)] - space
    return int((alone + halves + np.maximum(0, -(-rest // capacity))).max())
