"""Cuts documents into pieces that fit: overlong policies, the stream of `wrapped`, and groups that share a pack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.arguments import LARGEST, in_words
from varlen.errors import LedgerError, LengthsError, OverlongDocumentError, SettingError
from varlen.pack import kernels_arrange
from varlen.types import Int32Array, IntArray, Method, Overlong

AnyInts = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """The pieces to pack, in input order, and counts of what was cut or left out.

    `documents` and `starts` are None if piece i is document i, whole or truncated.
    """

    lengths: Int32Array
    """int32 `[num_pieces]`: tokens of each piece; 0 for pieces that aren't packed."""
    documents: IntArray | None = None
    """int64 `[num_pieces]`: the document of each piece."""
    starts: Int32Array | None = None
    """int32 `[num_pieces]`: first token of each piece within its document."""
    losses: dict[str, int] = field(default_factory=dict)
    """Ledger entries: tokens and documents truncated, dropped, split."""


# The policies for documents longer than a pack, and the error for all that refuse them.


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A policy for documents longer than a pack."""

    becomes: str
    """Its description, to follow "longer than capacity 8, and"."""
    retained: Callable[[AnyInts, int], AnyInts] = lambda lengths, _: lengths
    """Returns the number of tokens of each document that are packed, from lengths and the capacity."""
    loses: str = ""
    """The ledger entry that counts the other tokens."""
    cuts: bool = False


POLICIES: dict[Overlong, Policy] = {
    "error": Policy(becomes="an error"),
    "split": Policy(becomes="cut into pieces that train as documents of their own", cuts=True),
    "truncate": Policy(
        becomes="cut short",
        retained=lambda lengths, capacity: np.minimum(lengths, lengths.dtype.type(capacity)),
        loses="truncated",
        cuts=True,
    ),
    "drop": Policy(
        becomes="left out",
        retained=lambda lengths, capacity: np.where(lengths > capacity, lengths.dtype.type(0), lengths),
        loses="dropped",
    ),
}
KEEP_WHOLE: tuple[Overlong, ...] = tuple(name for name, policy in POLICIES.items() if not policy.cuts)
"""Policies under which every document that is packed is whole."""
_OTHERS = tuple(name for name in POLICIES if name != "error")


def applied(method: Method, overlong: Overlong) -> Overlong:
    """Return the policy that a method applies: "wrapped" cuts all documents, so that none is too long."""
    return "split" if method == "wrapped" and overlong == "error" else overlong


def ways_out(policies: Sequence[str] = _OTHERS, limit: str = "capacity", *, is_command: bool = False) -> str:
    """Return the ways out for documents that are too long: other policies, or a larger limit."""
    if is_command:
        return f"pass --overlong {in_words(policies, quote='')}, or a larger --{limit}"
    return f"pass overlong={in_words(policies)}, or raise {limit}"


def too_long(
    seen: str, limit: str, out: str, counts: tuple[int, int] | None = None, units: str = "documents"
) -> OverlongDocumentError:
    """Return the error of a document that is too long.

    `counts`: how many are, of how many in all.
    """
    of_all = ""
    if counts is not None:
        of_all = f" ({counts[0]:,} of {counts[1]:,} {units} {'is' if counts[0] == 1 else 'are'} too long)"
    return OverlongDocumentError(f"{seen} but {limit}{of_all}; {out}")


def check_fit(
    parts: Iterable[AnyInts],
    limit: int,
    name: Callable[[int], str] = "document {:,}".format,
    *,
    limit_name: str = "capacity",
    out: str = ways_out(),
    units: str = "documents",
) -> None:
    """Refuse lengths over a limit, naming the first one; documents are numbered through all parts."""
    first, longest, count, before = 0, 0, 0, 0
    for lengths in parts:
        over = np.flatnonzero(lengths > limit)
        if over.size and not count:
            first, longest = before + int(over[0]), int(lengths[over[0]])
        count, before = count + over.size, before + len(lengths)
    if count:
        seen = f"{name(first)} has {longest:,} tokens"
        raise too_long(seen, f"{limit_name} is {limit:,}", out, (count, before), units)


def fit(lengths: Int32Array, capacity: int, overlong: Overlong) -> Pieces:
    """Apply an overlong policy, so that every piece fits in a pack."""
    if not lengths.size or lengths.max() <= capacity:
        return Pieces(lengths=lengths)
    if overlong == "error":
        check_fit([lengths], capacity)
    over = lengths > capacity
    many = int(over.sum())
    if overlong == "split":
        return _split(lengths, capacity, many)
    policy = POLICIES[overlong]
    retained = policy.retained(lengths, capacity)
    lost = int(lengths[over].sum(dtype=np.int64) - retained[over].sum(dtype=np.int64))
    return Pieces(lengths=retained, losses={policy.loses: lost, f"{policy.loses}_documents": many})


def _split(lengths: Int32Array, capacity: int, num_split: int) -> Pieces:
    """Cut every document at multiples of the capacity."""
    wide = lengths.astype(np.int64)
    parts = np.maximum(-(-wide // capacity), 1)
    _check_pieces(int(parts.sum()), capacity)
    documents = np.repeat(np.arange(lengths.size), parts)
    first_piece = np.cumsum(parts) - parts
    starts = (np.arange(documents.size) - first_piece[documents]) * capacity
    pieces = np.minimum(wide[documents] - starts, capacity).astype(np.int32)
    return _cut(lengths, documents, starts.astype(np.int32), pieces, num_split)


def _cut(
    wholes: Int32Array, documents: IntArray, starts: Int32Array, lengths: Int32Array, num_split: int
) -> Pieces:
    """Pieces of documents, in input order, proved to hold every token once."""
    audit_cuts(documents, starts, lengths, wholes)
    return Pieces(lengths=lengths, documents=documents, starts=starts, losses={"split_documents": num_split})


def _check_pieces(num_pieces: int, capacity: int) -> None:
    """Refuse to cut documents into more pieces than 32 bits number."""
    if num_pieces > LARGEST:
        raise LengthsError(
            f"capacity {capacity:,} would cut the documents into {num_pieces:,} pieces, and {LARGEST:,} pieces are "
            "the most of one call; raise capacity or pack the documents in parts"
        )


def wrap(
    lengths: Int32Array, capacity: int, max_documents: int, multiple: int
) -> tuple[Pieces, Int32Array, int]:
    """Lay documents end to end and cut them into full packs; returns pieces, the pack of each, and packs."""
    _check_pieces(int(lengths.sum(dtype=np.int64)) // capacity, capacity)
    kernel = kernels_arrange.wrapped
    settings = (lengths, capacity, max_documents, multiple)
    num_pieces, _ = kernel(*settings, np.empty(0, np.int64), *(np.empty(0, np.int32) for _ in range(3)))
    _check_pieces(num_pieces, capacity)
    documents = np.empty(num_pieces, np.int64)
    starts, stops, pack_of = (np.empty(num_pieces, np.int32) for _ in range(3))
    num_pieces, num_packs = kernel(*settings, documents, starts, stops, pack_of)
    num_split = int((np.bincount(documents, minlength=1) > 1).sum())
    return _cut(lengths, documents, starts, stops - starts, num_split), pack_of, num_packs


@dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    """The units of packing: an item is a piece, or a group of documents that share a pack."""

    slots: Int32Array
    """int32 `[num_items]`: tokens an item takes up; 0 for items that aren't packed."""
    sizes: Int32Array | None
    """int32 `[num_items]`: number of documents of an item; None: one each."""
    item_of: IntArray | None
    """int64 `[num_pieces]`: the item of each piece; None: piece i is item i."""


def slots_of(lengths: Int32Array, multiple: int) -> Int32Array:
    """Tokens that pieces take up: their lengths rounded up to a multiple."""
    if multiple == 1:
        return lengths
    return (-(-lengths.astype(np.int64) // multiple) * multiple).astype(np.int32)


def as_groups(groups: npt.ArrayLike, num_documents: int) -> IntArray:
    """Return group numbers as int64 `[num_documents]`, checked."""
    wanted = f"groups must be one whole number per document, [{num_documents:,}]"
    try:
        array = np.asarray(groups)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise LengthsError(f"{wanted}; they can't be read as an array: {error}") from None
    if array.shape != (num_documents,) or (array.size and array.dtype.kind not in "iu"):
        raise LengthsError(f"{wanted}; got shape {array.shape} and dtype {array.dtype}")
    return array.astype(np.int64)


def gather_groups(
    lengths: Int32Array,
    groups: IntArray,
    capacity: int,
    max_documents: int,
    multiple: int,
    overlong: Overlong,
) -> tuple[Pieces, Items]:
    """Join the documents of each group into one item, in the order of the groups' first documents."""
    if overlong not in KEEP_WHOLE:
        raise SettingError(
            f'overlong="{overlong}" would cut a group of documents that must stay together; '
            f"with groups, use overlong={in_words(KEEP_WHOLE)}"
        )
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    item_of = rank[inverse]
    document_slots = -(-lengths.astype(np.int64) // multiple) * multiple
    slots = np.zeros(len(first), np.int64)
    np.add.at(slots, item_of, document_slots)
    sizes = np.bincount(item_of, weights=lengths > 0, minlength=len(first)).astype(np.int64)
    wrong = (slots > capacity) | (sizes > max_documents)
    lost = wrong[item_of]
    if wrong.any() and overlong == "error":
        item = int(np.argmax(wrong))
        group = groups[np.argmax(item_of == item)]
        limit = f"{capacity:,} tokens" + (
            f" and {max_documents:,} documents" if max_documents < LARGEST else ""
        )
        seen = f"group {group} takes up {slots[item]:,} tokens in {sizes[item]:,} documents"
        out = ways_out([name for name in KEEP_WHOLE if name != "error"], "the limit")
        raise too_long(seen, f"a pack holds {limit}", out, (int(wrong.sum()), len(slots)), "groups")
    retained = np.where(lost, np.int32(0), lengths) if lost.any() else lengths
    losses = {
        "dropped": int(lengths[lost].sum(dtype=np.int64)),
        "dropped_documents": int((lengths[lost] > 0).sum()),
    }
    items = Items(
        slots=np.where(wrong, 0, slots).astype(np.int32), sizes=sizes.astype(np.int32), item_of=item_of
    )
    return Pieces(lengths=retained, losses=losses), items


# An assignment of pieces to packs, laid out as the arrays of a Packing and audited.


def shuffled(seed: int, size: int) -> IntArray:
    """Return a random permutation, int64 `[size]`, the same for a seed on every machine and version."""
    order = np.empty(size, np.int64)
    kernels_arrange.permutation(np.uint64(seed), order)
    return order


def arrange(
    lengths: Int32Array, pack_of: Int32Array, num_packs: int, seed: int | None
) -> tuple[IntArray, Int32Array, IntArray]:
    """Sort pieces by pack: packs are ordered by their first piece, or at random.

    Args:
        lengths: int32 `[num_pieces]`.
        pack_of: int32 `[num_pieces]`: packs as opened, -1 for pieces that are not packed. Its memory holds the
            lengths afterwards: at 10^8 pieces, memory that was never touched costs more than the sorting.

    Returns:
        Piece numbers int64 `[num_packed]`, rising within a pack, their lengths int32 `[num_packed]`, and
        offsets int64 `[num_packs + 1]`.
    """
    used = kernels_arrange.rank_packs(pack_of, np.full(num_packs, -1, np.int32))
    if used != num_packs:
        raise LedgerError(
            f"{num_packs:,} packs were opened and {num_packs - used:,} of them left empty. "
            "This is a bug in varlen; please report the lengths and the settings"
        )
    if seed is not None:
        kernels_arrange.renumber(pack_of, shuffled(seed, num_packs))
    length_bits = max(int(lengths.max(initial=0)), 1).bit_length()
    # A word is 63 bits; 2^11 packs, some 20,000 pieces, are sorted within a core's cache.
    shift = min(11, 63 - length_bits - max(pack_of.size, 1).bit_length())
    begin = np.zeros(-(-num_packs >> shift) + 1 if num_packs else 1, np.int64)
    largest = int(kernels_arrange.batch_bounds(pack_of, shift, begin))
    words = np.empty(int(begin[-1]), np.int64)
    kernels_arrange.gather_batches(pack_of, lengths, shift, length_bits, begin.copy(), words)
    packed_lengths, offsets = pack_of[: words.size], np.zeros(num_packs + 1, np.int64)
    space = np.empty(largest, np.int64), np.empty((1 << shift) + 1, np.int64)
    kernels_arrange.order_batches(words, begin, shift, length_bits, *space, offsets, packed_lengths)
    return words, packed_lengths, offsets


def checksum(lengths: Int32Array) -> int:
    """Return a 64-bit number that any loss, swap or repetition of a piece would change; see `audit`."""
    return int(kernels_arrange.checksum(lengths))


def audit_cuts(documents: IntArray, starts: Int32Array, lengths: Int32Array, wholes: Int32Array) -> None:
    """Require that pieces, in input order, make up their documents: each begins where the one before ended.

    `audit` then follows the pieces by number and length into the packs.

    Args:
        documents: int64 `[num_pieces]`.
        starts: int32 `[num_pieces]`.
        lengths: int32 `[num_pieces]`.
        wholes: int32 `[num_documents]`: tokens of each document that must be packed.
    """
    wrong = int(kernels_arrange.misplaced(documents, starts, lengths, wholes))
    if wrong:
        raise LedgerError(
            f"documents were cut so that {wrong:,} of {documents.size:,} pieces miss or repeat tokens. "
            "This is a bug in varlen; please report the lengths and the settings"
        )


def audit(
    pieces: IntArray,
    lengths: Int32Array,
    offsets: IntArray,
    capacity: int,
    max_documents: int,
    multiple: int,
    expected: int,
) -> tuple[int, int]:
    """Count the tokens in finished packs, and those that are in them twice.

    Pieces are compared with the input by an order-independent checksum of their numbers and lengths; repetitions are
    counted only if it differs.

    Args:
        pieces: int64 `[num_packed]`.
        lengths: int32 `[num_packed]`.
        offsets: int64 `[num_packs + 1]`.
    """
    tokens, overfull, total = kernels_arrange.audit(pieces, lengths, offsets, capacity, multiple)
    crowded = int((np.diff(offsets) > max_documents).sum())
    if overfull or crowded or int(total) != expected:
        _, first = np.unique(pieces, return_index=True)
        again = tokens - int(lengths[first].sum(dtype=np.int64))
        raise LedgerError(
            f"{overfull:,} of {offsets.size - 1:,} packs hold more than {capacity:,} tokens, {crowded:,} "
            f"more than {max_documents:,} pieces, {again:,} tokens stand twice, and the pieces packed "
            f"{'match' if int(total) == expected else 'differ from'} those given. "
            "This is a bug in varlen; please report the lengths and the settings"
        )
    return tokens, 0
