"""Lay out the segments of a batch: sizes, positions, boundaries and token sources, before anything is written."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from varlen.batch import kernels
from varlen.batch.packed import Layout
from varlen.errors import DocumentsError, SettingError
from varlen.ragged import Documents, Ragged, as_ragged
from varlen.types import Int32Array, IntArray, Overlong, Packing

_EXACTNESS: dict[Overlong, int] = {"error": 2, "drop": 2, "split": 1, "truncate": 0}


class Segments(NamedTuple):
    """The segments of a batch in row-major order."""

    shape: tuple[int, int]
    """Rows and width of the batch's arrays."""
    documents: IntArray
    """int64 `[segments]`: the document of each segment."""
    first_tokens: Int32Array
    """int32 `[segments]`: the segment's first token within its document."""
    lengths: Int32Array
    """int32 `[segments]`."""
    begins: IntArray
    """int64 `[segments]`: first position of each segment in the flattened batch, rising."""
    pack_offsets: IntArray
    """int64 `[packs + 1]`: where each pack's segments begin."""
    cu_seqlens: Int32Array
    """int32 `[segments + padding segments + 1]`: logical boundaries."""
    cu_slots: Int32Array | None
    """int32, same shape: physical boundaries where they differ, else None."""
    targets: Int32Array
    """int32 `[segments]`: tokens but the first: the targets if nothing is masked."""
    num_targets: int
    """Their sum."""
    tokens: npt.NDArray[Any]
    """`[num_values]`: the documents' values end to end."""
    sources: IntArray
    """int64 `[segments]`: index of each segment's first token in `tokens`."""
    bounds: tuple[IntArray, IntArray]
    """Offsets of the documents in `tokens`, and the row of each segment's document in these offsets."""
    max_seqlen: int
    min_seqlen: int


def padding_segment(multiple: int) -> int:
    """Return the positions of a full padding segment: a multiple of the slots' multiple, at most 128 if possible.

    Attention over padding costs the square of a segment; 128 keeps it negligible.
    """
    return max(multiple, 128 // multiple * multiple)


def lay_out(
    packing: Packing, pack_ids: IntArray, layout: Layout, pad_to_multiple_of: int, documents: Documents
) -> Segments:
    """Place the segments of some packs and locate their tokens."""
    multiple = packing.document_multiple_of
    width = packing.capacity if layout == "rows" else 0
    _check_width(width, pad_to_multiple_of)
    each = padding_segment(multiple)
    packed = (packing.document_ids, packing.starts, packing.stops, packing.offsets, pack_ids, width)
    count, entries, positions, longest, shortest, bad = kernels.measure(
        *packed, multiple, math.lcm(multiple, pad_to_multiple_of), each, packing.num_documents
    )
    if bad >= 0:
        raise SettingError(_what_is_wrong(packing, pack_ids, bad))
    if positions >= 2**31:
        raise SettingError(
            f"{positions:,} positions in one batch are more than int32 boundaries can count (2^31 - 1); "
            "build fewer packs at a time"
        )
    ragged, rows = as_ragged(
        documents, packing.num_documents, partial(_documents_of, packing, pack_ids), "documents"
    )
    wide = np.empty(3 * count + pack_ids.size + 1, np.int64)
    narrow = np.empty((3, count), np.int32)
    boundaries = np.empty((2 if multiple > 1 else 1, entries), np.int32)
    num_targets, wrong, first = kernels.lay_segments(
        *packed,
        positions,
        multiple,
        each,
        np.empty(0, np.int64) if rows is None else rows,
        ragged.offsets,
        ragged.values.size,
        packing.capacity,
        exactness(packing),
        wide,
        narrow,
        boundaries[0],
        boundaries[-1],
    )
    segment_documents = wide[:count]
    rows = segment_documents if rows is None else rows
    if wrong:
        refuse_mismatch(
            ragged, rows[first], segment_documents[first], narrow[:2, first], (wrong, count), "documents"
        )
    return Segments(
        shape=(pack_ids.size, width) if width else (1, positions),
        documents=segment_documents,
        begins=wide[count : 2 * count],
        sources=wide[2 * count : 3 * count],
        pack_offsets=wide[3 * count :],
        first_tokens=narrow[0],
        lengths=narrow[1],
        targets=narrow[2],
        num_targets=num_targets,
        tokens=ragged.values,
        bounds=(ragged.offsets, rows),
        cu_seqlens=boundaries[0],
        cu_slots=None if multiple == 1 or np.array_equal(boundaries[0], boundaries[1]) else boundaries[1],
        max_seqlen=longest,
        min_seqlen=shortest,
    )


def _check_width(width: int, pad_to_multiple_of: int) -> None:
    """Require that the width of rows is a multiple; the flat layout's width of 0 is a multiple of anything."""
    if width % pad_to_multiple_of:
        below = width // pad_to_multiple_of * pad_to_multiple_of
        near = f"{below:,} or {below + pad_to_multiple_of:,}" if below else f"{pad_to_multiple_of:,}"
        raise SettingError(
            f"rows are as wide as the capacity, and capacity {width:,} is not a multiple of pad_to_multiple_of "
            f"{pad_to_multiple_of:,}; the nearest: {near}"
        )


def _documents_of(packing: Packing, pack_ids: IntArray) -> IntArray:
    """Return the document of every segment of some packs, in order."""
    begins, ends = packing.offsets[pack_ids].tolist(), packing.offsets[pack_ids + 1].tolist()
    spans = [packing.document_ids[begin:end] for begin, end in zip(begins, ends)]
    return np.concatenate([np.empty(0, np.int64), *spans])


def exactness(packing: Packing) -> int:
    """Return how exactly pieces must end, as `whole` of the kernels: 0 anywhere, 1 at a cut or end, 2 at the end.

    A piece of a split document ends the document or is as long as a pack. A truncated one may end anywhere, since a
    Packing can also be made by hand.
    """
    return 0 if packing.method == "wrapped" else _EXACTNESS[packing.overlong]


def refuse_mismatch(
    ragged: Ragged, row: int, document: int, piece: Int32Array, counts: tuple[int, int], name: str
) -> None:
    """Raise an error that names how a document differs from what was packed."""
    offsets, num_values = ragged.offsets, ragged.values.size
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        first = int(np.argmax(falls))
        raise DocumentsError(
            f"{name}: offsets must rise, but document {first:,} begins at {offsets[first]:,} and ends at "
            f"{offsets[first + 1]:,} ({int(falls.sum()):,} of {falls.size:,} documents)"
        )
    begin, end = int(offsets[row]), int(offsets[row + 1])
    if begin < 0 or end > num_values:
        seen = f"its offsets {begin:,} to {end:,} lie outside of the {num_values:,} values"
    else:
        seen = f"it has {end - begin:,} values here but was packed up to token {int(piece.sum()):,}"
    raise DocumentsError(
        f"{name}: document {document:,} doesn't match the packing: {seen} "
        f"({counts[0]:,} of {counts[1]:,} segments in this batch don't match)"
    )


def _what_is_wrong(packing: Packing, pack_ids: IntArray, bad: int) -> str:
    """Return why a pack can't be laid out: no such pack, invalid pieces, or more tokens than the capacity."""
    pack = int(pack_ids[bad])
    outside = (pack_ids < 0) | (pack_ids >= packing.num_packs)
    if outside[bad]:
        packs = f"packs 0 to {packing.num_packs - 1:,}" if packing.num_packs else "no packs"
        return (
            f"pack id {pack} is out of range: this packing has {packs} "
            f"({int(outside.sum()):,} of {pack_ids.size:,} pack ids are out of range)"
        )
    begin, end = packing.offsets[pack : pack + 2].tolist()
    if not 0 <= begin <= end <= packing.num_pieces:
        return (
            f"pack {pack:,} holds pieces {begin:,} to {end:,} of {packing.num_pieces:,}; "
            "make packings with vl.pack, which never gives such a pack"
        )
    pieces = zip(packing.document_ids[begin:end], packing.starts[begin:end], packing.stops[begin:end])
    for document, start, stop in pieces:
        if not (0 <= document < packing.num_documents and 0 <= start < stop):
            return (
                f"pack {pack:,} holds tokens {start:,} to {stop:,} of document {document:,}, and the packing has "
                f"{packing.num_documents:,} documents; a piece is of one of them and has a token at least: make "
                "packings with vl.pack"
            )
    slots = packing.slot_lengths[begin:end]
    return (
        f"pack {pack:,} takes up {int(slots.sum()):,} tokens, over the packing's capacity of "
        f"{packing.capacity:,}; make packings with vl.pack, which never gives such a pack"
    )


def as_number(value: object, name: str, least: int, most: int = 2**31 - 1) -> int:
    """Return a setting as a whole number within its limits."""
    if type(value) is int and least <= value <= most:
        return value
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise SettingError(f"{name} must be a whole number from {least:,} to {most:,}, got {value!r}")
    return number


def as_pack_ids(values: Sequence[int] | npt.ArrayLike) -> IntArray:
    """Return pack numbers as int64, one-dimensional."""
    try:
        array = np.atleast_1d(np.asarray(values))
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DocumentsError(f"pack_ids can't be read as whole numbers: {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DocumentsError(
            f"pack_ids must be whole numbers in one dimension, got {array.dtype} {array.shape}"
        )
    return (
        np.minimum(array, np.uint64(2**63 - 1)).astype(np.int64)
        if array.dtype == np.uint64
        else array.astype(np.int64)
    )


def check_layout(layout: object) -> None:
    """Require a layout."""
    if layout not in get_args(Layout):
        raise SettingError(f"layout must be one of {', '.join(get_args(Layout))}; got {layout!r}")
