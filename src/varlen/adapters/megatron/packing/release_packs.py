"""Megatron-Bridge's own packs, from lengths and its seed alone: which documents share a row, and in which order.

The release counts lengths, shuffles the list of them with NumPy's legacy generator, packs first-fit, and then takes
documents of each length in a random order of their own. So a set that it packed can be made again, checked, or
written at another size, without its hours or its memory.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.adapters.megatron.files.metadata import PackCounts
from varlen.adapters.megatron.packing.alignment import aligned_pieces, slots_of
from varlen.arguments import LARGEST, as_choice, as_count
from varlen.counts import many
from varlen.errors import DocumentsError, LedgerError, SettingError
from varlen.pack.api import assign
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import KEEP_WHOLE, Items, Pieces, arrange, too_long
from varlen.types import Int32Array, IntArray, Ledger, Method, Overlong, Packing

Algorithm: TypeAlias = Literal["first_fit_shuffle", "first_fit_decreasing", "first_fit"]
"""Of the releases; `first_fit` takes documents from short to long."""


Draws: TypeAlias = Any
"""What packing draws from: a `numpy.random.RandomState`, or `numpy.random` itself."""


def replay_packs(
    lengths: npt.ArrayLike,
    pack_size: int,
    seed: int = 0,
    *,
    algorithm: Algorithm = "first_fit_shuffle",
    overlong: Overlong = "error",
    multiple: int = 1,
    longest: int | None = None,
) -> Packing:
    """Return the packs that Megatron-Bridge makes of documents of these lengths.

    Equal to the release in every pack, document and position (0.6 seeds the generator itself; 0.3 to 0.5 take NumPy's
    global one, so the same packs come from them after `numpy.random.seed(seed)`). Documents longer than a pack are
    an error here, where 0.3 to 0.5 fail with an IndexError and 0.6 leaves them out with a warning; `overlong="drop"`
    gives the packs of 0.6 and counts what is gone.

    Args:
        lengths: `[documents]`: positions of input, `len(input_ids) - 1`. A document of one token has none, and gets
            a place in a row all the same, as in the release.
        pack_size: positions of a row.
        seed: of the release.
        algorithm: "first_fit_shuffle", its default, "first_fit_decreasing", or "first_fit".
        overlong: what becomes of documents longer than a row, as in `vl.pack`.
        multiple: `pad_seq_to_mult`; the release packs the padded lengths.
        longest: most positions of a document, where that is less than `pack_size`.

    Returns:
        A Packing whose pieces are positions, in the release's order of packs and of documents within each; its
        ledger balances. A row stores one token more of each piece than it has positions.

    Raises:
        OverlongDocumentError: a document doesn't fit and `overlong` is "error".
        LengthsError: negative or fractional lengths.
        SettingError: a setting out of its range.

    Cost: O(n log n) time; about 60 bytes per document. 10^6 documents take a quarter of a second.

    >>> replay_packs([3, 5, 2, 4], pack_size=8, seed=0).to_lists()
    [[3, 0], [1, 2]]
    """
    as_choice(algorithm, "algorithm", get_args(Algorithm))
    as_choice(overlong, "overlong", get_args(Overlong))
    seed = as_count(seed, "seed", 0, 2**32 - 1)
    positions = as_lengths(lengths)
    pieces = aligned_pieces(positions, pack_size, multiple=multiple, longest=longest, overlong=overlong)
    retained = retained_pieces(positions, pieces)
    slots = slots_of(pieces.lengths[retained], multiple)
    items, offsets = drawn(slots, pack_size, algorithm, np.random.RandomState(seed))
    return as_packing(positions, pieces, retained[items], offsets, pack_size, multiple, overlong, algorithm)


def retained_pieces(positions: Int32Array, pieces: Pieces) -> IntArray:
    """Return the numbers of the pieces to pack: all but those of dropped documents, int64."""
    if "dropped" not in pieces.losses:
        return np.arange(len(pieces.lengths))
    return np.flatnonzero((pieces.lengths > 0) | (positions == 0)).astype(np.int64)


def drawn(slots: Int32Array, pack_size: int, algorithm: str, draws: Draws) -> tuple[IntArray, IntArray]:
    """Pack slots (int32 `[items]`, 0 to `pack_size`) as the release does, with the same draws in the same order.

    Returns the items in the order of rows, int64 `[items]`, and where each row begins, int64 `[rows + 1]`.
    """
    by_length = _sorted(slots)
    turns = in_turn(slots[by_length], algorithm, draws)
    by_row, offsets = packed_in_turn(turns, pack_size, "first_fit")
    taken = by_length.copy()
    lengths = slots[by_length]
    bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for start, stop in zip(bounds, bounds[1:]):
        if stop - start > 1:  # the release takes them from the end; one alone costs no draw
            taken[start:stop] = by_length[start:stop][draws.permutation(stop - start)[::-1]]
    items = np.empty(len(slots), np.int64)
    items[_sorted(turns[by_row])] = taken
    return items, offsets


def in_turn(rising: Int32Array, algorithm: str, draws: Draws) -> Int32Array:
    """Return lengths in the order in which an algorithm takes them (`rising`: int32, sorted)."""
    if algorithm.endswith("_decreasing"):
        return np.ascontiguousarray(rising[::-1])
    if not algorithm.endswith("_shuffle"):
        return rising
    order = rising.copy()
    draws.shuffle(order)  # draws the same numbers as shuffling a list
    return order


def packed_in_turn(slots: Int32Array, pack_size: int, method: Method) -> tuple[IntArray, IntArray]:
    """Pack slots (int32 `[items]`) in the order given, empty and overlong ones as the releases do.

    An item longer than a pack gets one of its own, and an empty one goes into the first pack that isn't such an
    item's. Returns the numbers of the items row by row, int64 `[items]`, and where each row begins, int64 `[rows +
    1]`.
    """
    over, empty = slots > pack_size, slots == 0
    room = np.where(over, np.int32(0), slots) if over.any() else slots
    packs = min(len(slots), 2 * int(room.sum(dtype=np.int64)) // pack_size + 1)
    with jit.sized(len(slots) * (4e-6 + packs * 1e-7)):
        items = Items(slots=room, sizes=None, item_of=None)
        pack_of, num_packs = assign(method, items, None, pack_size, LARGEST)
        if empty.any():
            pack_of[empty], num_packs = 0, max(num_packs, 1)
        if over.any():
            count = int(over.sum())
            pack_of[over] = np.arange(num_packs, num_packs + count, dtype=np.int32)
            num_packs += count
        by_row, _, offsets = arrange(slots, pack_of, num_packs, None)
    return by_row, offsets


def as_packing(
    positions: Int32Array,
    pieces: Pieces,
    items: IntArray,
    offsets: IntArray,
    pack_size: int,
    multiple: int,
    overlong: Overlong,
    algorithm: str,
) -> Packing:
    """Return pieces in rows as a Packing, once it is certain that each stands in one row, and fits.

    `items` are the numbers of the pieces, row by row, and `offsets` int64 `[rows + 1]`.
    """
    lengths = pieces.lengths[items]
    starts = np.zeros(len(items), np.int32) if pieces.starts is None else pieces.starts[items]
    seen = np.bincount(items, minlength=len(pieces.lengths))
    filled = np.concatenate([[0], np.cumsum(slots_of(lengths, multiple), dtype=np.int64)])
    if seen.max(initial=0) > 1 or np.diff(filled[offsets]).max(initial=0) > pack_size:
        raise LedgerError(
            "documents stand in two rows, or a row overflows. This is a bug in varlen; please report the lengths and "
            "the settings"
        )
    ledger = Ledger(
        tokens_in=int(positions.sum(dtype=np.int64)),
        packed=int(lengths.sum(dtype=np.int64)),
        documents_in=len(positions),
        empty_documents=int((positions == 0).sum()),
        **pieces.losses,
    ).check()
    return Packing(
        document_ids=items if pieces.documents is None else pieces.documents[items],
        starts=starts,
        stops=starts + lengths,
        offsets=offsets,
        capacity=pack_size,
        ledger=ledger,
        method=_method(algorithm),
        overlong=overlong,
        document_multiple_of=multiple,
    )


def _method(algorithm: str) -> Method:
    """Return the method of an algorithm, whatever order it takes documents in."""
    return algorithm.removesuffix("_shuffle")  # type: ignore[return-value]


def _sorted(lengths: Int32Array) -> IntArray:
    """Return the order from short to long, equal lengths as they come; radix sort makes 16 bits quick."""
    if lengths.max(initial=0) < 2**16:
        return np.argsort(lengths.astype(np.uint16), kind="stable")
    return np.argsort(lengths, kind="stable")


# Megatron-Bridge's packing functions under their own names: histogram, strategy, fill, first fit.
#
# Equal to the release's in what they return, whatever it is given that it can pack, under the same state of NumPy's
# global generator; 10 to 1,000 times faster. Where the release fails in silence or with a bare IndexError, these say
# what is wrong.

PACKING_ALGOS = ["first_fit_decreasing", "first_fit_shuffle"]
"""What the release's own preparation takes."""
PACKING_ALGORITHMS = (*PACKING_ALGOS, "first_fit", "best_fit_decreasing", "best_fit_shuffle", "best_fit")
"""What `create_packing_strategy` takes here. Best fit is as quick and leaves fewer rows half empty; in shuffled order
a row's documents stay a random sample."""

Item = TypeVar("Item")
Document = dict[str, Any]
Bins: TypeAlias = list[list[Item]]
"""The items of each bin: lists in lists, as the release has them."""
Documents: TypeAlias = dict[int, list[Document]]
"""Documents by length."""
_log = logging.getLogger(__name__)
_GLOBAL: Draws = np.random  # the generator that the release draws from


def find_first_bin_that_fits(bins: Sequence[Any], s: int, bin_size: int) -> int:
    """Return the number of the first bin with room for `s`, or -1.

    Args:
        bins: the lengths in each bin, or what they add up to.
        s: length to place.
        bin_size: what a bin holds.

    >>> find_first_bin_that_fits([[900, 90], [100]], 20, 1000), find_first_bin_that_fits([990], 20, 1000)
    (1, -1)
    """
    for number, held in enumerate(bins):
        if (sum(held) if isinstance(held, Iterable) else held) + s <= bin_size:
            return number
    return -1


def first_fit(
    seqlens: Sequence[Item], pack_size: int, *, item_lengths: Sequence[int] | None = None
) -> Bins[Item]:
    """Put items, in the order given, each into the first bin with room.

    Args:
        seqlens: lengths, or any objects where `item_lengths` says how long each is.
        pack_size: what a bin holds; a longer item gets a bin of its own.
        item_lengths: `[items]`.

    Returns:
        The items of each bin, bins as opened.

    Raises:
        DocumentsError: `item_lengths` has another number of entries than `seqlens`.
        LengthsError: negative or fractional lengths.

    >>> first_fit(["a", "b", "c", "d"], 10, item_lengths=[5, 3, 2, 7])
    [['a', 'b', 'c'], ['d']]
    """
    lengths = _lengths_of(seqlens, item_lengths)
    return _in_bins(seqlens, np.arange(len(lengths)), lengths, pack_size, "first_fit")


def first_fit_decreasing(
    seqlens: Sequence[Item], pack_size: int, *, item_lengths: Sequence[int] | None = None
) -> Bins[Item]:
    """Put items, from long to short, each into the first bin with room; the result is as that of `first_fit`.

    Equal lengths keep their order.

    Args:
        seqlens, pack_size, item_lengths: as in `first_fit`.

    >>> first_fit_decreasing([1111, 8192, 4096, 1000], 2048)
    [[8192], [4096], [1111], [1000]]
    """
    lengths = _lengths_of(seqlens, item_lengths)
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    return _in_bins(seqlens, order, lengths, pack_size, "first_fit")


def first_fit_shuffle(
    seqlens: Sequence[Item], pack_size: int, *, item_lengths: Sequence[int] | None = None
) -> Bins[Item]:
    """Put items, in random order, each into the first bin with room; the result is as that of `first_fit`.

    The order is drawn from NumPy's global generator, as in the release: `numpy.random.seed` makes it the same again.

    Args:
        seqlens, pack_size, item_lengths: as in `first_fit`.
    """
    lengths = _lengths_of(seqlens, item_lengths)
    order = np.arange(len(lengths))
    _GLOBAL.shuffle(order)
    return _in_bins(seqlens, order, lengths, pack_size, "first_fit")


def create_hist(
    dataset: Iterable[Document], truncate_seq_len: int, *, overlong: str = "error"
) -> tuple[Documents, list[int]]:
    """Return documents by length, and how many there are of each; a length is `len(input_ids) - 1`.

    Releases 0.3 to 0.5 fail with an IndexError at a document longer than `truncate_seq_len`; 0.6 leaves it out with
    a warning. Here it is an error, or with `overlong="drop"` left out with the warning. A document without tokens
    is left out with a warning too, where the releases count it as one of the longest.

    Args:
        dataset: documents with `input_ids`.
        truncate_seq_len: most positions of a document.
        overlong: "error" or "drop".

    Returns:
        Documents by length, and int `[truncate_seq_len + 1]`.

    Raises:
        OverlongDocumentError: a document is longer, and `overlong` is "error".
    """
    as_choice(overlong, "overlong", KEEP_WHOLE)
    most = as_count(truncate_seq_len, "truncate_seq_len", 0)
    sequences: Documents = defaultdict(list)
    histogram = [0] * (most + 1)
    beyond: list[tuple[int, int]] = []
    empty = 0
    for number, document in enumerate(dataset):
        positions = len(document["input_ids"]) - 1
        if 0 <= positions <= most:
            sequences[positions].append(document)
            histogram[positions] += 1
        elif positions < 0:
            empty += 1
        else:
            beyond.append((number, positions))
    skipped = len(beyond)
    if skipped and overlong == "error":
        first, length = beyond[0]
        seen = f"document {first:,} has {length + 1:,} tokens, {length:,} positions of input,"
        out = 'cut them before, or pass overlong="drop" to leave them out'
        raise too_long(seen, f"truncate_seq_len is {most:,}", out, (skipped, number + 1))
    if skipped:
        _log.warning("left out %s longer than %d positions", many(skipped, "document"), most)
    if empty:
        _log.warning("left out %s without a token", many(empty, "document"))
    return sequences, histogram


def create_packing_strategy(
    histogram: Sequence[int], pack_size: int, packing_algorithm: str = "first_fit"
) -> tuple[Bins[int], dict[str, Any]]:
    """Pack lengths, given by how many there are of each.

    Args:
        histogram: documents of each length from 0 on.
        pack_size: positions of a row.
        packing_algorithm: of `PACKING_ALGORITHMS`. The best-fit ones are varlen's.

    Returns:
        The lengths in each row, and the release's metadata: `dataset_max_seqlen`, `max_samples_per_bin`,
        `packing_factor`, `packing_efficiency` (per cent), `pack_size`, `min_packed_seqlen`.

    Raises:
        SettingError: an algorithm of another name.
        DocumentsError: there is no document.
    """
    if packing_algorithm not in PACKING_ALGORITHMS:
        raise SettingError(
            f"packing_algorithm must be one of {', '.join(PACKING_ALGORITHMS)}; got {packing_algorithm!r}"
        )
    pack_size = as_count(pack_size, "pack_size")
    counts = as_lengths(histogram)
    rising = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if not len(rising):
        raise DocumentsError("the histogram counts no document, so there is nothing to pack")
    turns = in_turn(rising, packing_algorithm, _GLOBAL)
    method = _method(packing_algorithm)
    by_row, offsets = packed_in_turn(turns, pack_size, "first_fit" if method.startswith("first") else method)
    lengths = turns[by_row]
    held = lengths.tolist()
    assignments = [held[start:stop] for start, stop in pairwise(offsets.tolist())]
    return assignments, PackCounts().add(lengths, offsets).figures(pack_size)


def fill_packing_strategy(
    assignments: Bins[int],
    sequences: Mapping[int, Sequence[Document]],
    pack_size: int,
    pad_id: int,  # noqa: ARG001  # the release takes it and pads nothing either
) -> list[Document]:
    """Put documents into the places that lengths were given.

    Documents of a length are taken in a random order, drawn from NumPy's global generator as the release draws it.

    Args:
        assignments: the lengths in each row, of `create_packing_strategy`.
        sequences: documents by length, of `create_hist`: `input_ids`, and `loss_mask` or `answer_start_idx`.
        pack_size: positions of a row.
        pad_id: not used.

    Returns:
        Rows of `input_ids`, `loss_mask`, which stands at the input that a target belongs to, and `seq_start_id`.

    Raises:
        DocumentsError: a document has neither mask, or one of another length than its tokens; or places and
            documents don't match.
    """
    stacks: dict[int, list[tuple[list[int], list[Any]]]] = {}
    for length in range(pack_size + 1):
        group = sequences.get(length, ())
        if len(group):
            masks = _masks(group, length)
            order: list[int] = _GLOBAL.permutation(len(group)).tolist()
            stacks[length] = [(_plain(group[number]["input_ids"]), masks[number]) for number in order]
    rows = [_filled(lengths, stacks) for lengths in assignments]
    left = sum(map(len, stacks.values()))
    if left:
        raise DocumentsError(
            f"{many(left, 'document is', 'documents are')} left over: the assignments have no place for them; make "
            "them from the histogram of the same documents"
        )
    return rows


def _lengths_of(items: Sequence[Any], lengths: Sequence[int] | None) -> Int32Array:
    if lengths is not None and len(lengths) != len(items):
        raise DocumentsError(
            f"seqlens and item_lengths must have the same number of entries, got {len(items):,} and {len(lengths):,}"
        )
    return as_lengths(items if lengths is None else lengths)


def _in_bins(
    items: Sequence[Item], order: npt.NDArray[np.intp], lengths: Int32Array, pack_size: int, method: Method
) -> Bins[Item]:
    by_row, offsets = packed_in_turn(lengths[order], as_count(pack_size, "pack_size"), method)
    taken = [items[number] for number in order[by_row].tolist()]
    return [taken[start:stop] for start, stop in pairwise(offsets.tolist())]


def _masks(group: Sequence[Document], length: int) -> Bins[Any]:
    """Return the mask of each document at its inputs: one place earlier than at its tokens."""
    masks: Bins[Any] = []
    has_masks = all("loss_mask" in document for document in group)
    for document in group:
        size = len(document["input_ids"])
        if has_masks:
            mask = _plain(document["loss_mask"])
            if len(mask) != size:
                raise DocumentsError(
                    f"a document of length {length:,} has {size:,} `input_ids`, but "
                    f"{len(mask):,} values of `loss_mask`"
                )
            masks.append([*mask[1:], False])
            continue
        if "answer_start_idx" not in document:
            raise DocumentsError(
                f"a document of length {length:,} has no `loss_mask`, or another of its length hasn't, and it has no "
                f"`answer_start_idx` either; it has {', '.join(map(repr, document))}"
            )
        first = min(max(int(document["answer_start_idx"]) - 1, 0), size)
        masks.append([False] * first + [True] * (size - first))
    return masks


def _plain(values: Any) -> list[Any]:
    if isinstance(values, list):
        return values
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _filled(lengths: Sequence[int], stacks: Mapping[int, list[tuple[list[int], list[Any]]]]) -> Document:
    """Return a row; documents are taken off the stacks."""
    ids: list[int] = []
    mask: list[Any] = []
    starts: list[int] = []
    for length in lengths:
        stack = stacks.get(length)
        if not stack:
            raise DocumentsError(
                f"the assignments have more places of length {length:,} than there are documents; make them from the "
                "histogram of the same documents"
            )
        tokens, trained = stack.pop()
        starts.append(len(ids))
        ids += tokens
        mask += trained
    return {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}
