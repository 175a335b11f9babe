"""Kernels that lay segments out and fill a batch's arrays in one pass, compiled by numba.

`tests/oracles/batch.py` says in plain Python what each must return. Arrays of tokens are one-dimensional views of the
batch; every kernel writes padding as it goes, so no array is written twice.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.batch import in_python
from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Values = NDArray[Any]

IGNORE = -100


@compiled
def measure(
    document_ids: Int64,
    starts: Int32,
    stops: Int32,
    offsets: Int64,
    pack_ids: Int64,
    width: int,
    multiple: int,
    pad_multiple: int,
    padding_segment: int,
    num_documents: int,
) -> tuple[int, int, int, int, int, int]:
    """Size up a batch before anything is allocated, and find packs that no memory may be read for.

    Args:
        document_ids: int64 `[num_pieces]`, of the packing.
        starts: int32 `[num_pieces]`.
        stops: int32 `[num_pieces]`.
        offsets: int64 `[num_packs + 1]`.
        pack_ids: int64 `[packs]`: which packs.
        width: width of a row, or 0 for one flat row.
        multiple: slots are lengths rounded up to it.
        pad_multiple: the flat row's length is rounded up to it.
        padding_segment: most positions in one padding segment.
        num_documents: documents that pieces may be of.

    Returns:
        Number of segments; of entries in cu_seqlens; of positions; the longest segment and the shortest; and
        the index of the first pack id that is out of range or whose pack is wider than a row, has pieces that
        are not there or holds a piece without tokens or of no document; or -1.
    """
    segments = 0
    entries = 1
    positions = 0
    longest = 0
    shortest = 2**31
    for index in range(pack_ids.size):
        pack = pack_ids[index]
        if pack < 0 or pack >= offsets.size - 1:
            return 0, 0, 0, 0, 0, index
        if offsets[pack] < 0 or offsets[pack + 1] < offsets[pack] or offsets[pack + 1] > stops.size:
            return 0, 0, 0, 0, 0, index
        used = 0
        for piece in range(offsets[pack], offsets[pack + 1]):
            document = document_ids[piece]
            length = np.int64(stops[piece]) - starts[piece]
            if length < 1 or starts[piece] < 0 or document < 0 or document >= num_documents:
                return 0, 0, 0, 0, 0, index
            longest = max(longest, length)
            shortest = min(shortest, length)
            used += (length + multiple - 1) // multiple * multiple if multiple > 1 else length
        segments += offsets[pack + 1] - offsets[pack]
        if width > 0:
            if used > width:
                return 0, 0, 0, 0, 0, index
            entries += (width - used + padding_segment - 1) // padding_segment
            used = width
        positions += used
    if width == 0:
        padding = (positions + pad_multiple - 1) // pad_multiple * pad_multiple - positions
        entries += (padding + padding_segment - 1) // padding_segment
        positions += padding
    return segments, entries + segments, positions, longest, shortest, -1


@compiled
def locate(
    documents: Int64,
    first_tokens: Int32,
    lengths: Int32,
    token_offsets: Values,
    num_values: int,
    capacity: int,
    whole: int,
    sources: Int64,
) -> tuple[int, int]:
    """Find each segment's first value, and refuse documents that are not what was packed.

    Args:
        documents: int64 `[segments]`: index of each segment's document in `token_offsets`.
        first_tokens: int32 `[segments]`.
        lengths: int32 `[segments]`.
        token_offsets: int32 or int64 `[documents + 1]`: where each document's values begin.
        num_values: values in all.
        capacity: of the packing; a piece that doesn't end its document must be this long.
        whole: 0 if pieces may end anywhere, 1 if they end their documents or are full, 2 if they end them.
        sources: int64 `[segments]`, written.

    Returns:
        The number of segments that are wrong, and the first of them.
    """
    wrong = 0
    first = -1
    for segment in range(documents.size):
        document = documents[segment]
        begin = np.int64(token_offsets[document])
        size = np.int64(token_offsets[document + 1]) - begin
        stop = np.int64(first_tokens[segment]) + lengths[segment]
        fits = begin >= 0 and size >= stop and begin + size <= num_values
        if whole > 0 and stop < size and not (whole == 1 and lengths[segment] == capacity):
            fits = False
        if not fits:
            wrong += 1
            if first < 0:
                first = segment
        sources[segment] = begin + first_tokens[segment]
    return wrong, first


@compiled
def lay_segments(
    document_ids: Int64,
    starts: Int32,
    stops: Int32,
    offsets: Int64,
    pack_ids: Int64,
    width: int,
    positions_in_all: int,
    multiple: int,
    padding_segment: int,
    homes: Int64,
    token_offsets: Values,
    num_values: int,
    capacity: int,
    whole: int,
    wide: Int64,
    narrow: Int32,
    cu_seqlens: Int32,
    cu_slots: Int32,
) -> tuple[int, int, int]:
    """Place every segment of a batch, write its boundaries, and find its tokens as `locate` does.

    Args:
        document_ids: int64 `[num_pieces]`, of the packing; as are starts, stops and offsets.
        starts: int32 `[num_pieces]`.
        stops: int32 `[num_pieces]`.
        offsets: int64 `[num_packs + 1]`.
        pack_ids: int64 `[packs]`: which packs, in range.
        width: width of a row, or 0 for one flat row.
        positions_in_all: as `measure` counted them.
        multiple: slots are lengths rounded up to it.
        padding_segment: most positions in one padding segment.
        homes: int64 `[segments]`: index of each segment's document in `token_offsets`; of size 0 where that is the
            document's number.
        token_offsets: as for `locate`, and so are the three numbers that follow.
        num_values: values in all.
        capacity: of the packing.
        whole: where pieces may end.
        wide: int64 `[3 * segments + packs + 1]`, written: the document of each segment, its first position in
            the flattened batch, the index of its first token, and where each pack's segments begin.
        narrow: int32 `[3, segments]`, written: each segment's first token within its document, its length, and its
            targets (all tokens but the first).
        cu_seqlens: int32 `[entries]`, written: logical boundaries.
        cu_slots: int32 `[entries]`, written: physical boundaries.

    Returns:
        The targets if every token is one, the number of segments whose tokens don't match, and the first of them.
    """
    count = narrow.shape[1]
    segment = 0
    entry = 0
    at = 0
    targets = 0
    cu_seqlens[0] = 0
    cu_slots[0] = 0
    wide[3 * count] = 0
    for index in range(pack_ids.size):
        pack = pack_ids[index]
        for piece in range(offsets[pack], offsets[pack + 1]):
            length = np.int64(stops[piece] - starts[piece])
            slot = (length + multiple - 1) // multiple * multiple if multiple > 1 else length
            wide[segment] = document_ids[piece]
            wide[count + segment] = at
            narrow[0, segment] = starts[piece]
            narrow[1, segment] = length
            narrow[2, segment] = length - 1
            cu_seqlens[entry + 1] = cu_seqlens[entry] + length
            cu_slots[entry + 1] = cu_slots[entry] + slot
            entry += 1
            segment += 1
            at += slot
            targets += length - 1
        wide[3 * count + index + 1] = segment
        row_end = (index + 1) * width if width > 0 else at
        if width == 0 and index == pack_ids.size - 1:
            row_end = positions_in_all
        while at < row_end:
            padding = min(padding_segment, row_end - at)
            cu_seqlens[entry + 1] = cu_seqlens[entry] + padding
            cu_slots[entry + 1] = cu_slots[entry] + padding
            entry += 1
            at += padding
    documents = homes if homes.size else wide[:count]
    tokens = (token_offsets, num_values, capacity, whole, wide[2 * count : 3 * count])
    wrong, first = locate(documents, narrow[0], narrow[1], *tokens)
    return targets, wrong, first


@compiled(in_python=in_python.value_range)
def value_range(values: Values, sources: Int64, lengths: Int32) -> tuple[int, int]:
    """Smallest and largest value of all segments; 0 and -1 if there are none."""
    low = 0
    high = -1
    seen = False
    for segment in range(sources.size):
        part = values[sources[segment] : sources[segment] + lengths[segment]]
        if part.size == 0:
            continue
        least = part[0]
        most = part[0]
        for index in range(part.size):
            least = min(least, part[index])
            most = max(most, part[index])
        low = min(low, np.int64(least)) if seen else np.int64(least)
        high = max(high, np.int64(most)) if seen else np.int64(most)
        seen = True
    return low, high


@compiled(in_python=in_python.assemble)
def assemble(
    tokens: Values,
    sources: Int64,
    lengths: Int32,
    places: Int64,
    pad_id: int,
    input_ids: Int32,
    labels: Int32,
    position_ids: Int32,
    segment_ids: Int32,
) -> int:
    """Fill ids, labels (every token but a segment's first), positions and segment ids.

    Args:
        tokens: any integers, one-dimensional.
        sources: int64 `[segments]`: index of each segment's first token.
        lengths: int32 `[segments]`.
        places: int64 `[segments]`, rising: first position of each segment in the flattened batch.
        pad_id: value of `input_ids` at padding.
        input_ids: int32 `[rows, width]`, written; so are the others.
        labels: int32, written.
        position_ids: int32, written.
        segment_ids: int32, written: the number of a segment within the row in which it begins.

    Returns:
        The largest id; -1 where there is none, and 2^31 or more where one is below 0 (read as unsigned, they are the
        largest, so that looking for them costs nothing).
    """
    size, width = input_ids.size, input_ids.shape[1]
    all_ids, all_labels = input_ids.reshape(size), labels.reshape(size)
    all_positions, all_owners = position_ids.reshape(size), segment_ids.reshape(size)
    largest = np.uint32(0)
    done = 0
    row_end = 0
    number = np.int32(0)
    for segment in range(sources.size + 1):
        at = places[segment] if segment < sources.size else size
        if done < at:
            all_ids[done:at] = pad_id
            all_labels[done:at] = IGNORE
            all_positions[done:at] = 0
            all_owners[done:at] = -1
        if segment == sources.size:
            break
        while at >= row_end:
            row_end += width
            number = np.int32(0)
        length = np.int64(lengths[segment])
        source = tokens[sources[segment] : sources[segment] + length]
        ids = all_ids[at : at + length]
        targets = all_labels[at : at + length]
        for index in range(length):
            token = np.int32(source[index])
            ids[index] = token
            targets[index] = token
            largest = max(largest, np.uint32(token))
        targets[0] = IGNORE
        positions = all_positions[at : at + length]
        owners = all_owners[at : at + length]
        for index in range(length):
            positions[index] = np.int32(index)
            owners[index] = number
        number += np.int32(1)
        done = at + length
    return np.int64(largest) if sources.size else np.int64(-1)


@compiled
def plain_batch(
    document_ids: Int64,
    starts: Int32,
    stops: Int32,
    offsets: Int64,
    pack_ids: Int64,
    width: int,
    multiple: int,
    pad_multiple: int,
    padding_segment: int,
    tokens: Values,
    token_offsets: Values,
    capacity: int,
    whole: int,
    is_wide: bool,
    pad_id: int,
) -> tuple[bool, Int64, Int32, Int32, Int32, int, int, int, int]:
    """Do what `measure`, `lay_segments` and `assemble` do, one after the other.

    Arrays made here cost a third of what they cost made one by one in Python, and the rest of a small batch is
    little else.

    Args:
        document_ids: int64 `[num_pieces]`, of the packing; as are starts, stops and offsets.
        starts: int32 `[num_pieces]`.
        stops: int32 `[num_pieces]`.
        offsets: int64 `[num_packs + 1]`.
        pack_ids: int64 `[packs]`: which packs.
        width: width of a row, or 0 for one flat row.
        multiple: slots are lengths rounded up to it.
        pad_multiple: the flat row's length is rounded up to it.
        padding_segment: most positions in one padding segment.
        tokens: any integers but uint64, one-dimensional.
        token_offsets: int32 or int64 `[documents + 1]`: where each document's tokens begin.
        capacity: of the packing.
        whole: where pieces may end, as `locate` takes it.
        is_wide: whether tokens may be no int32; they are looked through then.
        pad_id: value of the ids at padding.

    Returns:
        Whether all is right, else nothing that follows is to be used; the segments' int64 and int32 numbers
        and the boundaries as `lay_segments` writes them (one row of boundaries where `multiple` is 1); int32
        `[4, rows, width]`: ids, labels, positions and segment ids; the targets; the longest and the shortest
        segment; the largest id.
    """
    packed = (document_ids, starts, stops, offsets, pack_ids, width)
    sizes = measure(*packed, multiple, pad_multiple, padding_segment, token_offsets.size - 1)
    count, entries, positions, longest, shortest, bad = sizes
    fits = bad < 0 and positions < 2**31
    if not fits:
        count, entries, positions = 0, 0, 0
    wide = np.empty(3 * count + pack_ids.size + 1, np.int64)
    narrow = np.empty((3, count), np.int32)
    boundaries = np.empty((2 if multiple > 1 else 1, entries), np.int32)
    rows = pack_ids.size if width > 0 else 1
    block = np.empty((4, rows if fits else 0, width if width > 0 else positions), np.int32)
    targets = 0
    largest = -1
    if fits:
        plan = (*packed, positions, multiple, padding_segment)
        found = (np.empty(0, np.int64), token_offsets, tokens.size, capacity, whole)
        written = (wide, narrow, boundaries[0], boundaries[boundaries.shape[0] - 1])
        targets, wrong, _ = lay_segments(*plan, *found, *written)
        fits = wrong == 0
    sources, places = wide[2 * count : 3 * count], wide[count : 2 * count]
    if fits and is_wide:
        low, high = value_range(tokens, sources, narrow[1])
        fits = low >= -(2**31) and high < 2**31
    if fits:
        arrays = (block[0], block[1], block[2], block[3])
        largest = assemble(tokens, sources, narrow[1], places, pad_id, *arrays)
        fits = largest < 2**31
    return fits, wide, narrow, boundaries, block, targets, longest, shortest, largest


# Kernels that write given labels, masks and other per-token columns.


@compiled(in_python=in_python.mask_labels)
def mask_labels(
    values: Values,
    value_sources: Int64,
    mask: Values,
    mask_sources: Int64,
    lengths: Int32,
    places: Int64,
    labels: Int32,
    targets: Int32,
) -> None:
    """Write given labels where the mask is not 0, -100 elsewhere and at every segment's first token.

    Args:
        values: any integers, one-dimensional: the labels.
        value_sources: int64 `[segments]`: index of each segment's first label.
        mask: any numbers, one-dimensional; of size 0 where nothing is masked.
        mask_sources: int64 `[segments]`, read only with a mask.
        lengths: int32 `[segments]`.
        places: int64 `[segments]`: first position of each segment.
        labels: int32, one-dimensional, written where segments stand.
        targets: int32 `[segments]`, written: labels other than -100.
    """
    for segment in range(lengths.size):
        length = np.int64(lengths[segment])
        source = values[value_sources[segment] : value_sources[segment] + length]
        written = labels[places[segment] : places[segment] + length]
        if mask.size:
            kept = mask[mask_sources[segment] : mask_sources[segment] + length]
            for index in range(length):
                written[index] = np.int32(source[index]) if kept[index] else IGNORE
        else:
            for index in range(length):
                written[index] = np.int32(source[index])
        written[0] = IGNORE
        count = 0
        for index in range(length):
            count += written[index] != IGNORE
        targets[segment] = count


@compiled(in_python=in_python.copy_column)
def copy_column(
    values: Values, sources: Int64, lengths: Int32, places: Int64, pad: Values, column: Values
) -> None:
    """Fill any other per-token column, `pad[0]` at padding."""
    done = 0
    for segment in range(sources.size + 1):
        at = places[segment] if segment < sources.size else column.size
        column[done:at] = pad[0]
        if segment == sources.size:
            break
        length = np.int64(lengths[segment])
        source = values[sources[segment] : sources[segment] + length]
        written = column[at : at + length]
        for index in range(length):
            written[index] = source[index]
        done = at + length


# The kernel that fills one flat row of whole documents.

Whole = NDArray[Any]


@compiled(in_python=in_python.fill_flat_row)
def fill_flat_row(
    ids: Whole,
    targets: Whole,
    sizes: Int64,
    separator: int,
    first_position: int,
    pad_id: int,
    padding_segment: int,
    with_ids: bool,
    with_labels: bool,
    input_ids: Int64,
    labels: Int64,
    position_ids: Int64,
    owners: Int32,
    ends: Int32,
) -> tuple[int, int, int]:
    """Write labels, positions, the number of each segment and the boundaries of documents end to end, then padding.

    Args:
        ids: int32 or int64 `[tokens]`.
        targets: int32 or int64 `[tokens]`; the ids where nobody gave labels.
        sizes: int64 `[documents]`, none below 0, that add up to the tokens.
        separator: the first label of every document.
        first_position: position of every document's first token, and at padding.
        pad_id: value of the ids at padding.
        padding_segment: most positions in one segment of padding.
        with_ids: write the ids; else they stand there.
        with_labels: write the labels; else they stand there, their separators apart.
        input_ids: int64 `[width]`.
        labels: int64 `[width]`.
        position_ids: int64 `[width]`, written; of size 0 where nobody asked for it.
        owners: int32 `[width]`, written: 0 for the first segment; of size 0 where nobody asked for it.
        ends: int32, written: where each segment ends, from 0; of a size that is enough for all.

    Returns:
        Segments, the longest of them, padding included, and whether an id is below 0.
    """
    tokens, width = ids.size, input_ids.size
    # Plain loops over whole arrays run at the speed of memory; a loop a document takes half as long again.
    if with_ids:
        for index in range(tokens):
            input_ids[index] = ids[index]
    if with_labels:
        for index in range(tokens):
            labels[index] = targets[index]
    bits = np.int64(0)  # the sign of all ids is that of any
    begin, segments, longest = 0, 0, 0
    ends[0] = 0
    for size in sizes:
        if size == 0:
            continue
        labels[begin] = separator
        if position_ids.size:
            positions, own = position_ids[begin : begin + size], ids[begin : begin + size]
            for index in range(size):  # bound by what it writes, so that it reads for nothing
                positions[index] = first_position + index
                bits |= np.int64(own[index])
        else:
            for index in range(begin, begin + size):
                bits |= np.int64(ids[index])
        if owners.size:
            owners[begin : begin + size] = segments
        begin += size
        segments += 1
        ends[segments] = begin
        longest = max(longest, size)
    input_ids[tokens:] = pad_id
    labels[tokens:] = IGNORE
    if position_ids.size:
        position_ids[tokens:] = first_position
    while begin < width:
        end = min(begin + padding_segment, width)
        if owners.size:
            owners[begin:end] = segments
        longest = max(longest, end - begin)
        begin = end
        segments += 1
        ends[segments] = end
    return segments, longest, int(bits < 0)
