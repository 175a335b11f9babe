"""One row of a batch as a batch of its own."""

from __future__ import annotations

import numpy as np

from varlen.batch.packed import PackedBatch, on_host
from varlen.errors import SettingError


def row(batch: PackedBatch, index: int) -> PackedBatch:
    """Return one row; arrays are views of the batch's where they can be, boundaries start at 0 again.

    Raises:
        SettingError: no such row.
    """
    rows, width = (int(size) for size in batch.input_ids.shape)
    if not -rows <= index < rows:
        raise SettingError(f"row {index} is out of range: this batch has {rows} rows")
    index %= rows
    if rows == 1:
        return batch
    begin, end = int(batch.pack_offsets[index]), int(batch.pack_offsets[index + 1])
    here = slice(index, index + 1)
    slots = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    bounds = on_host(slots)
    first = int(np.searchsorted(bounds, index * width))
    last = int(np.searchsorted(bounds, (index + 1) * width))
    logical = batch.cu_seqlens[first : last + 1] - batch.cu_seqlens[first]
    physical = slots[first : last + 1] - slots[first]
    segments = slice(begin, end)
    lengths = batch.document_lengths[segments]
    tokens = batch.input_ids[here][batch.segment_ids[here] >= 0]
    return batch.replace(
        input_ids=batch.input_ids[here],
        labels=batch.labels[here],
        position_ids=batch.position_ids[here],
        segment_ids=batch.segment_ids[here],
        shift_labels=None if batch.shift_labels is None else batch.shift_labels[here],
        columns={name: column[here] for name, column in batch.columns.items()},
        cu_seqlens=logical,
        cu_seqlens_padded=None if bool((logical == physical).all()) else physical,
        max_seqlen=int(lengths.max()) if len(lengths) else 0,
        document_ids=batch.document_ids[segments],
        document_starts=batch.document_starts[segments],
        document_lengths=lengths,
        document_targets=batch.document_targets[segments],
        document_groups=None if batch.document_groups is None else batch.document_groups[segments],
        pack_ids=batch.pack_ids[here],
        pack_offsets=batch.pack_offsets[index : index + 2] - begin,
        max_token_id=int(tokens.max()) if len(tokens) else -1,
        num_targets=int(batch.document_targets[segments].sum()),
    )
