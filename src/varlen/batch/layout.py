"""Where every segment of a batch stands: sizes, places and boundaries, before any token is read."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from varlen import jit
from varlen.batch.packed import Layout
from varlen.errors import SettingError
from varlen.types import Int32Array, IntArray, Packing

_kernel = functools.partial(jit.kernel, "varlen.batch", "kernels")


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
    places: IntArray
    """int64 `[segments]`: first position of each segment in the flattened batch."""
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
    max_seqlen: int
    min_seqlen: int


def padding_segment(multiple: int) -> int:
    """Positions in a full padding segment: at most 128 where slots allow, and a multiple of theirs.

    Attention over padding costs the square of a segment; 128 keeps it negligible.
    """
    return max(multiple, 128 // multiple * multiple)


def lay_out(packing: Packing, pack_ids: IntArray, layout: Layout, pad_to_multiple_of: int) -> Segments:
    """Place the segments of some packs.

    Raises:
        SettingError: a pack number out of range, a pack over the capacity, too many positions for int32
            boundaries, or a multiple that doesn't divide the capacity.
    """
    multiple = packing.document_multiple_of
    width = packing.capacity if layout == "rows" else 0
    if width % pad_to_multiple_of:
        below = width // pad_to_multiple_of * pad_to_multiple_of
        near = f"{below:,} or {below + pad_to_multiple_of:,}" if below else f"{pad_to_multiple_of:,}"
        raise SettingError(
            f"rows are as wide as the capacity, and capacity {width:,} is not a multiple of pad_to_multiple_of "
            f"{pad_to_multiple_of:,}; the nearest: {near}"
        )
    each = padding_segment(multiple)
    plan = (packing.starts, packing.stops, packing.offsets, pack_ids, width, multiple)
    count, entries, positions, longest, shortest, bad = _kernel("measure")(
        *plan, math.lcm(multiple, pad_to_multiple_of), each
    )
    if bad >= 0:
        raise SettingError(_what_is_wrong(packing, pack_ids, bad))
    if positions >= 2**31:
        raise SettingError(
            f"{positions:,} positions in one batch are more than int32 boundaries can count (2^31 - 1); "
            "build fewer packs at a time"
        )
    wide = np.empty(2 * count + pack_ids.size + 1, np.int64)
    narrow = np.empty((3, count), np.int32)
    boundaries = np.empty((2 if multiple > 1 else 1, entries), np.int32)
    num_targets = _kernel("lay_segments")(
        packing.document_ids,
        *plan[:5],
        positions,
        multiple,
        each,
        wide,
        narrow,
        boundaries[0],
        boundaries[-1],
    )
    return Segments(
        shape=(pack_ids.size, width) if width else (1, positions),
        documents=wide[:count],
        places=wide[count : 2 * count],
        pack_offsets=wide[2 * count :],
        first_tokens=narrow[0],
        lengths=narrow[1],
        targets=narrow[2],
        num_targets=num_targets,
        cu_seqlens=boundaries[0],
        cu_slots=None if multiple == 1 or np.array_equal(boundaries[0], boundaries[1]) else boundaries[1],
        max_seqlen=longest,
        min_seqlen=shortest,
    )


def _what_is_wrong(packing: Packing, pack_ids: IntArray, bad: int) -> str:
    """Say why a pack can't be laid out: it isn't there, or it is over the capacity."""
    pack = int(pack_ids[bad])
    outside = (pack_ids < 0) | (pack_ids >= packing.num_packs)
    if outside[bad]:
        packs = f"packs 0 to {packing.num_packs - 1:,}" if packing.num_packs else "no packs"
        return (
            f"pack id {pack} is out of range: this packing has {packs} "
            f"({int(outside.sum()):,} of {pack_ids.size:,} pack ids are out of range)"
        )
    slots = packing.slot_lengths[packing.offsets[pack] : packing.offsets[pack + 1]]
    return (
        f"pack {pack:,} takes up {int(slots.sum()):,} tokens, over the packing's capacity of "
        f"{packing.capacity:,}; make packings with vl.pack, which never gives such a pack"
    )
