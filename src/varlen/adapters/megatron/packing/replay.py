"""Megatron-Bridge's own packs, from lengths and its seed alone: which documents share a row, and in which order.

The release counts lengths, shuffles the list of them with NumPy's legacy generator, packs first-fit, and then takes
documents of each length in a random order of their own. So a set that it packed can be made again, checked, or
written at another size, without its hours or its memory.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.adapters.megatron.packing.alignment import aligned_pieces, slots_of
from varlen.arguments import LARGEST, as_choice, as_count
from varlen.errors import LedgerError
from varlen.pack.assign import assign
from varlen.pack.lengths import as_lengths
from varlen.pack.pieces import Items, Pieces, arrange
from varlen.types import Int32Array, IntArray, Ledger, Method, Overlong, Packing

Algorithm: TypeAlias = Literal["first_fit_shuffle", "first_fit_decreasing", "first_fit"]
"""Of the releases; `first_fit` takes documents from short to long."""


class Draws(Protocol):
    """What packing draws from: a `numpy.random.RandomState`, or `numpy.random` itself."""

    def shuffle(self, x: Any, /) -> None:
        """Permute an array in place."""

    def permutation(self, x: Any, /) -> Any:
        """Return a permutation of so many numbers."""


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

    Equal to the release in every pack, document and place (0.6 seeds the generator itself; 0.3 to 0.5 take NumPy's
    global one, so the same packs come from them after `numpy.random.seed(seed)`). Documents longer than a pack are
    an error here, where 0.3 to 0.5 fail with an IndexError and 0.6 leaves them out with a warning; `overlong="drop"`
    gives the packs of 0.6 and counts what is gone.

    Args:
        lengths: `[documents]`: positions of input, `len(input_ids) - 1`. A document of one token has none, and gets
            a place in a row all the same, as in the release.
        pack_size: positions of a row.
        seed: of the release.
        algorithm: "first_fit_shuffle", its default, or "first_fit_decreasing".
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

    Cost: O(n log n) time; about 60 bytes a document. 10^6 documents take a quarter of a second.

    >>> replay_packs([3, 5, 2, 4], pack_size=8, seed=0).to_lists()
    [[3, 0], [1, 2]]
    """
    as_choice(algorithm, "algorithm", get_args(Algorithm))
    as_choice(overlong, "overlong", get_args(Overlong))
    seed = as_count(seed, "seed", 0, 2**32 - 1)
    positions = as_lengths(lengths)
    pieces = aligned_pieces(positions, pack_size, multiple=multiple, longest=longest, overlong=overlong)
    kept = kept_pieces(positions, pieces)
    slots = slots_of(pieces.lengths[kept], multiple)
    items, offsets = drawn(slots, pack_size, algorithm, np.random.RandomState(seed))
    return as_packing(positions, pieces, kept[items], offsets, pack_size, multiple, overlong, algorithm)


def kept_pieces(positions: Int32Array, pieces: Pieces) -> IntArray:
    """Return the numbers of the pieces to pack: all but those of dropped documents, int64."""
    if "dropped" not in pieces.losses:
        return np.arange(len(pieces.lengths))
    return np.flatnonzero((pieces.lengths > 0) | (positions == 0)).astype(np.int64)


def drawn(slots: Int32Array, pack_size: int, algorithm: str, draws: Draws) -> tuple[IntArray, IntArray]:
    """Pack items as the release does, with the same draws in the same order.

    Args:
        slots: int32 `[items]` from 0 to `pack_size`.

    Returns:
        Items in the order of rows, int64 `[items]`, and int64 `[rows + 1]`, where each row's begin.
    """
    by_length = _sorted(slots)
    turns = in_turn(slots[by_length], algorithm, draws)
    placed, offsets = packed_in_turn(turns, pack_size, "first_fit")
    taken = by_length.copy()
    lengths = slots[by_length]
    bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for start, stop in zip(bounds, bounds[1:]):
        if stop - start > 1:  # the release takes them from the end; one alone costs no draw
            taken[start:stop] = by_length[start:stop][draws.permutation(stop - start)[::-1]]
    items = np.empty(len(slots), np.int64)
    items[_sorted(turns[placed])] = taken
    return items, offsets


def in_turn(rising: Int32Array, algorithm: str, draws: Draws) -> Int32Array:
    """Return lengths in the order in which an algorithm takes them.

    Args:
        rising: int32, sorted.
    """
    if algorithm.endswith("_decreasing"):
        return np.ascontiguousarray(rising[::-1])
    if not algorithm.endswith("_shuffle"):
        return rising
    order = rising.copy()
    draws.shuffle(order)  # an array draws as a list does
    return order


def packed_in_turn(slots: Int32Array, pack_size: int, method: Method) -> tuple[IntArray, IntArray]:
    """Pack items in the order given, as the releases' `first_fit` does where lengths are odd.

    An item longer than a pack gets one of its own, and an empty one goes where there is room: into the first pack
    that isn't such an item's.

    Args:
        slots: int32 `[items]`.

    Returns:
        Numbers of the items, row by row in their turn, int64 `[items]`, and int64 `[rows + 1]`. Rows stand in the
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
        placed, _, offsets = arrange(slots, pack_of, num_packs, None)
    return placed, offsets


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

    Args:
        positions: int32 `[documents]` as given.
        items: int64: numbers of the pieces, row by row.
        offsets: int64 `[rows + 1]`.
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
        method="first_fit_decreasing"
        if algorithm == "first_fit_decreasing"
        else _METHODS.get(algorithm, "first_fit"),
        overlong=overlong,
        document_multiple_of=multiple,
    )


_METHODS: dict[str, Method] = {
    "best_fit": "best_fit",
    "best_fit_shuffle": "best_fit",
    "best_fit_decreasing": "best_fit_decreasing",
    "first_fit_decreasing": "first_fit_decreasing",
}


def _sorted(lengths: Int32Array) -> IntArray:
    """Return the order from short to long, equal lengths as they come; 16 bits are sorted by radix, at once."""
    if lengths.max(initial=0) < 2**16:
        return np.argsort(lengths.astype(np.uint16), kind="stable")
    return np.argsort(lengths, kind="stable")
