"""Kernels that measure packed rows and write their batch; `tests/oracles/megatron_batches.py` defines their results.

All take packed rows as arrays: `input_ids` and `loss_mask` `[stored tokens]`, `offsets` and `document_offsets` int64
`[rows + 1]`, and `starts` int64 `[documents]`, counted within the row. A document stored as n tokens is n - 1 inputs.
`lengths`, int64 `[documents]`, are the real inputs of each document; positions behind them are padding.
"""

# Kernels mix Python and numpy integers, which numba types by itself.
# mypy: disable-error-code="assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.jit import compiled

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Values = NDArray[Any]


@compiled
def measure_rows(
    input_ids: Values,
    loss_mask: Values,
    offsets: Int64,
    starts: Int64,
    document_offsets: Int64,
    given: Int64,
    keep_supervised: int,
    eos_id: int,
    lengths: Int64,
    used: Int64,
) -> tuple[int, int]:
    """Find how much of each document is real, and refuse rows that no memory may be read for.

    `given` are the real inputs of each document, where they are known. Else by `keep_supervised`: 2: all inputs are
    real; 1: the inputs behind the last one that is no `eos_id`, or is trained, are padding; 0: the same, trained or
    not. Writes `lengths`, and int64 `[rows]` `used`, the inputs of each row with the padding in its documents.
    Returns the first row that is no packed row, or -1; and 1 if a document holds padding, else 0.
    """
    differs = 0
    for row in range(offsets.size - 1):
        begin, end = offsets[row], offsets[row + 1]
        first, last = document_offsets[row], document_offsets[row + 1]
        if begin < 0 or end < begin or end > input_ids.size or end > loss_mask.size:
            return row, 0
        if first < 0 or last <= first or last > starts.size or starts[first] != 0:
            return row, 0
        for document in range(first, last):
            stop = starts[document + 1] if document + 1 < last else end - begin
            size = stop - starts[document] - 1
            if size < 0 or starts[document] < 0 or stop > end - begin:
                return row, 0
            real = size
            if given.size > 0:
                real = given[document]
                if real < 0 or real > size:
                    return row, 0
            elif keep_supervised < 2:
                source = begin + starts[document]
                while real > 0 and input_ids[source + real - 1] == eos_id:
                    if keep_supervised == 1 and loss_mask[source + real - 1] != 0:
                        break
                    real -= 1
            if real != size:
                differs = 1
            lengths[document] = real
        used[row] = end - begin - (last - first)
    return -1, differs


@compiled
def fill_rows(
    input_ids: Values,
    loss_mask: Values,
    offsets: Int64,
    starts: Int64,
    document_offsets: Int64,
    lengths: Int64,
    silent: Values,
    answer_only: int,
    eos_in_loss: int,
    eos_id: int,
    pad_id: int,
    tokens: Int64,
    labels: Int64,
    mask: Values,
    positions: Int64,
) -> None:
    """Write tokens, labels, loss mask and positions of checked rows.

    `silent`, bool `[rows]` or empty, are rows that train nothing. `answer_only` is 1 to train where the loss mask
    says, 0 to train on every real input; with `eos_in_loss` 0 no input that is `eos_id` is trained. `pad_id` is the
    token and the label behind a row's last document. Writes int64 `[rows, width]`; `mask` may be float32.
    """
    for row in range(offsets.size - 1):
        begin, last = offsets[row], document_offsets[row + 1]
        quiet = silent.size > 0 and silent[row]
        at = 0
        for document in range(document_offsets[row], last):
            stop = starts[document + 1] if document + 1 < last else offsets[row + 1] - begin
            size = stop - starts[document] - 1
            source = begin + starts[document]
            # Views, indexed from 0: the compiler then knows that no index is negative, and takes several at once.
            to_tokens, to_labels = tokens[row, at : at + size], labels[row, at : at + size]
            to_positions, to_mask = positions[row, at : at + size], mask[row, at : at + size]
            ids, weights = input_ids[source : source + size + 1], loss_mask[source : source + size]
            for index in range(size):
                to_tokens[index] = ids[index]
            for index in range(size):
                to_labels[index] = ids[index + 1]
            for index in range(size):
                to_positions[index] = index
            real = 0 if quiet else lengths[document]
            if answer_only == 1 and eos_in_loss == 1:
                for index in range(real):
                    to_mask[index] = weights[index]
            else:
                for index in range(real):
                    weight = weights[index] if answer_only == 1 else 1
                    to_mask[index] = weight if eos_in_loss == 1 or ids[index] != eos_id else 0
            to_mask[real:] = 0
            at += size
        tokens[row, at:] = pad_id
        labels[row, at:] = pad_id
        positions[row, at:] = 0
        mask[row, at:] = 0


@compiled
def lay_boundaries(
    offsets: Int64,
    starts: Int64,
    document_offsets: Int64,
    lengths: Int64,
    width: int,
    tail: int,
    multiple: int,
    tail_is_real: int,
    most: int,
    logical: Int32,
    physical: Int32,
    counts: Int64,
    longest: Int32,
) -> None:
    """Write where documents and the padding behind them end, in real inputs and in positions.

    Padding behind the documents is cut into segments of at most `tail` positions, a multiple of `multiple` (0: no
    limit), each a multiple of it; `tail_is_real` 1 counts it among the real inputs. `most` is the limit of a row's
    entries: segments of the padding become longer so that they fit. Writes int32 `[rows, entries]` `logical` and
    `physical`, whose last value is repeated up to the end; int64 `[rows]` `counts`, the entries before the repeats;
    and `longest`, the most positions of one segment.
    """
    for row in range(offsets.size - 1):
        entry, real, end, widest = 1, 0, 0, 0
        logical[row, 0], physical[row, 0] = 0, 0
        last = document_offsets[row + 1]
        for document in range(document_offsets[row], last):
            stop = starts[document + 1] if document + 1 < last else offsets[row + 1] - offsets[row]
            size = stop - starts[document] - 1
            real += lengths[document]
            end += size
            widest = max(widest, size)
            logical[row, entry], physical[row, entry] = real, end
            entry += 1
        gap = width - end
        if gap > 0:
            segments = 1 if tail == 0 else (gap + tail - 1) // tail
            segments = max(1, min(segments, most - entry))
            unit = (gap + segments - 1) // segments
            unit = (unit + multiple - 1) // multiple * multiple
            while end < width:
                size = min(unit, width - end)
                end += size
                real += size * tail_is_real
                widest = max(widest, size)
                logical[row, entry], physical[row, entry] = real, end
                entry += 1
        counts[row], longest[row] = entry, widest
        for index in range(entry, logical.shape[1]):
            logical[row, index], physical[row, index] = real, end
