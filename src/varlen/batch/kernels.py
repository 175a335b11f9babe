"""Kernels that lay segments out and fill a batch's arrays in one pass; every kernel writes the padding as it goes.

`tests/oracles/batch.py` defines in plain Python what each returns. Arguments that kernels share:

- `document_ids`, `starts`, `stops`, `offsets`: of the Packing; `pack_ids`: the packs of the batch.
- `width`: of a row, 0 for one flat row; `multiple`: slots are lengths rounded up to it; `padding_segment`: most
  positions in one segment of padding.
- `token_offsets` int32 or int64 `[documents + 1]`: where each document's values begin, of `num_values` in all.
- `capacity`, `whole`: pieces may end anywhere (0), end their document or are as long as the capacity (1), or end
  their document (2).
- `sources` int64 `[segments]`: index of each segment's first token; `lengths` int32 `[segments]`; `begins` int64
  `[segments]`, rising: first position of each segment in the flattened batch.
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
    """Measure a batch before anything is allocated, and find invalid packs.

    Returns the numbers of segments, of entries in cu_seqlens and of positions; the longest and the shortest segment;
    and the index of the first pack id that is out of range or whose pack is wider than a row or has invalid pieces,
    or -1. The flat row's length is rounded up to `pad_multiple`.
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
    """Write `sources`, the index of each segment's first value; returns how many segments don't match, and the first.

    `documents` is the row of each segment's document in `token_offsets`.
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

    Written are `wide`, int64 `[3 * segments + packs + 1]`: the document of each segment, its first position in the
    flattened batch, the index of its first token, and where each pack's segments begin; `narrow`, int32
    `[3, segments]`: each segment's first token within its document, its length, and its targets (all tokens but the
    first); and logical and physical boundaries. `homes` are the rows of documents in `token_offsets`, of size 0 where
    they equal the documents' numbers.

    Returns the number of targets, the number of segments whose tokens don't match, and the first of them.
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
    """Return the smallest and largest value of all segments; 0 and -1 if there are none."""
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
    begins: Int64,
    pad_id: int,
    input_ids: Int32,
    labels: Int32,
    position_ids: Int32,
    segment_ids: Int32,
) -> int:
    """Fill ids, labels (every token but a segment's first), positions and segment ids, int32 `[rows, width]` each.

    Returns the largest id; -1 where there is none, and 2^31 or more where one is below 0 (ids are compared as
    unsigned numbers, so that this check costs nothing).
    """
    size, width = input_ids.size, input_ids.shape[1]
    all_ids, all_labels = input_ids.reshape(size), labels.reshape(size)
    all_positions, all_owners = position_ids.reshape(size), segment_ids.reshape(size)
    largest = np.uint32(0)
    done = 0
    row_end = 0
    number = np.int32(0)
    for segment in range(sources.size + 1):
        at = begins[segment] if segment < sources.size else size
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
    """Run `measure`, `lay_segments` and `assemble` in one call.

    A small batch takes most of its time for creating arrays, which is three times as fast here as in Python. `tokens`
    are any integers but uint64; `is_wide`: their range must be checked.

    Returns whether all is valid (else the rest must not be used); `wide`, `narrow` and the boundaries of
    `lay_segments` (one row of boundaries if `multiple` is 1); int32 `[4, rows, width]`: ids, labels, positions and
    segment ids; the number of targets; the longest and the shortest segment; the largest id.
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
    sources, begins = wide[2 * count : 3 * count], wide[count : 2 * count]
    if fits and is_wide:
        low, high = value_range(tokens, sources, narrow[1])
        fits = low >= -(2**31) and high < 2**31
    if fits:
        arrays = (block[0], block[1], block[2], block[3])
        largest = assemble(tokens, sources, narrow[1], begins, pad_id, *arrays)
        fits = largest < 2**31
    return fits, wide, narrow, boundaries, block, targets, longest, shortest, largest


@compiled(in_python=in_python.mask_labels)
def mask_labels(
    values: Values,
    value_sources: Int64,
    mask: Values,
    mask_sources: Int64,
    lengths: Int32,
    begins: Int64,
    labels: Int32,
    targets: Int32,
) -> None:
    """Write given labels where the mask is not 0, -100 elsewhere and at every segment's first token.

    `mask` has size 0 if nothing is masked. `targets`, the number of labels other than -100 in each segment, is
    written.
    """
    for segment in range(lengths.size):
        length = np.int64(lengths[segment])
        source = values[value_sources[segment] : value_sources[segment] + length]
        written = labels[begins[segment] : begins[segment] + length]
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
    values: Values, sources: Int64, lengths: Int32, begins: Int64, pad: Values, column: Values
) -> None:
    """Fill any other per-token column, `pad[0]` at padding."""
    done = 0
    for segment in range(sources.size + 1):
        at = begins[segment] if segment < sources.size else column.size
        column[done:at] = pad[0]
        if segment == sources.size:
            break
        length = np.int64(lengths[segment])
        source = values[sources[segment] : sources[segment] + length]
        written = column[at : at + length]
        for index in range(length):
            written[index] = source[index]
        done = at + length


@compiled(in_python=in_python.fill_flat_row)
def fill_flat_row(
    ids: Values,
    targets: Values,
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
    """Write one flat row of whole documents: ids, labels, positions, segment numbers and boundaries, then padding.

    `separator` is the first label of every document. Without `with_ids` or `with_labels`, `input_ids` or `labels`
    hold the values already. `position_ids` and `owners` (segment numbers) have size 0 where they aren't wanted.
    `ends` gets 0 and the end of each segment.

    Returns the number of segments, the longest of them, padding included, and whether an id is below 0.
    """
    tokens, width = ids.size, input_ids.size
    # One loop over the whole array is limited by memory bandwidth; a loop per document takes 1.5 times as long.
    if with_ids:
        for index in range(tokens):
            input_ids[index] = ids[index]
    if with_labels:
        for index in range(tokens):
            labels[index] = targets[index]
    bits = np.int64(0)  # bitwise or of all ids: negative if any is
    begin, segments, longest = 0, 0, 0
    ends[0] = 0
    for size in sizes:
        if size == 0:
            continue
        labels[begin] = separator
        if position_ids.size:
            positions, own = position_ids[begin : begin + size], ids[begin : begin + size]
            for index in range(size):  # limited by its writes, so that the reads are free
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
