"""How long the documents of packed rows are on average: what the releases compute the work of a step from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from varlen.adapters.megatron.files.opening import open_packed
from varlen.adapters.peers import raises_too
from varlen.arguments import as_count
from varlen.errors import DocumentsError


@raises_too(AssertionError)
def get_seqlen_list(elem: Mapping[str, Any]) -> tuple[list[int], int]:
    """Return the positions of each document of a packed row, and of all.

    Args:
        elem: a row with `input_ids` and `seq_start_id`.

    >>> get_seqlen_list({"input_ids": [5, 6, 7, 8, 9], "seq_start_id": [0, 2]})
    ([1, 2], 3)
    """
    bounds = [*(int(start) for start in elem["seq_start_id"]), len(elem["input_ids"])]
    lengths = [stop - start - 1 for start, stop in zip(bounds, bounds[1:])]
    return lengths, sum(lengths)


def calculate_avg_seqlen(
    dataset_file: str, gbs: int, max_seq_len: int, drop_remainder: bool
) -> tuple[float, float, float, float]:
    """Return what the documents of a packed set are like on average.

    The numbers are the release's, of `input_ids` and `seq_start_id` alone; Parquet is read a million tokens at a
    time, and a `.npy` file's pickle isn't run.

    Args:
        dataset_file: packed rows: Parquet (a file, glob or folder), or `.npy`.
        gbs: rows of a global batch.
        max_seq_len: not used, as in the release.
        drop_remainder: leave out the rows after the last whole batch.

    Returns:
        Of a row: documents, positions; of a document: its positions squared; of a row: the sum of these squares.

    Raises:
        DocumentsError: no whole batch is there, or no document.
        SourceError: the file isn't there or is damaged.
    """
    del max_seq_len
    size = as_count(gbs, "gbs")
    with open_packed(dataset_file, masks=False) as reader:
        count = reader.num_rows // size * size if drop_remainder else reader.num_rows
        if count == 0:
            raise DocumentsError(
                f"{dataset_file} has {reader.num_rows:,} rows, fewer than a global batch of {size:,}; pass a smaller "
                "gbs, or drop_remainder=False"
            )
        documents = tokens = squares = taken = 0
        for rows in reader.batches():
            some = min(rows.num_rows, count - taken)
            held = int(rows.document_offsets[some])
            lengths = rows.stored_lengths[:held] - 1
            documents += held
            tokens += int(lengths.sum())
            squares += int(np.square(lengths).sum())
            taken += some
            if taken == count:
                break
    if documents == 0:
        raise DocumentsError(f"{dataset_file} has rows without a document; pack the data again")
    return documents / count, tokens / count, squares / documents, squares / count
