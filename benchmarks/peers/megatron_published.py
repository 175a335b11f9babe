"""What Megatron-Bridge publishes of its releases from 0.4 on, in our own words: first fit by a tree, packed Parquet.

PyPI has none of those releases, so their files can't be run here. First fit finds a pack with room in a tree, in
plain Python. Written is a table of Python lists, in row groups of 500 packs, with pyarrow's defaults. Read is the row
group that holds a row, whole, and the last one is kept; a row is given as lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP = 500
"""Packs in a row group."""
_COLUMNS = ("input_ids", "loss_mask", "seq_start_id")


def first_fit(seqlens: Sequence[int], pack_size: int) -> list[list[int]]:
    """Put lengths, in turn, each into the first pack with room: a tree over all packs that there could be."""
    leaves = 1
    while leaves < len(seqlens):
        leaves *= 2
    room = [pack_size] * (2 * leaves)  # of a node, the most that a pack below it has
    packs: list[list[int]] = []
    for length in seqlens:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node - leaves == len(packs):
            packs.append([length])
        else:
            packs[node - leaves].append(length)
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return packs


def write(rows: Sequence[Mapping[str, list[Any]]], path: str | Path) -> None:
    masks = [[int(value) for value in row["loss_mask"]] for row in rows]
    columns = {
        "input_ids": pa.array([row["input_ids"] for row in rows]),
        "loss_mask": pa.array(masks, type=pa.list_(pa.int8())),
        "seq_start_id": pa.array([row["seq_start_id"] for row in rows]),
    }
    pq.write_table(pa.table(columns), path, row_group_size=ROW_GROUP)


def write_arrays(
    tokens: np.ndarray,
    mask: np.ndarray,
    offsets: np.ndarray,
    starts: np.ndarray,
    document_offsets: np.ndarray,
    path: str | Path,
) -> None:
    """Write the same file as `write` does, sooner, from flat arrays: what a reader finds doesn't depend on it."""

    def lists(values: np.ndarray, bounds: np.ndarray) -> Any:
        return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(values))

    columns = {
        "input_ids": lists(tokens.astype(np.int64), offsets),
        "loss_mask": lists(mask.astype(np.int8), offsets),
        "seq_start_id": lists(starts.astype(np.int64), document_offsets),
    }
    pq.write_table(pa.table(columns), path, row_group_size=ROW_GROUP)


class OneGroupReader:
    """Reads packs of one file in any order, and keeps the row group it read last."""

    def __init__(self, path: str | Path) -> None:
        self._file = pq.ParquetFile(path)
        sizes = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        self._bounds = np.cumsum([0, *sizes])
        self._kept = -1
        self._table: Any = None

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return a pack as lists: `input_ids`, `seq_boundaries` and `loss_mask`."""
        group = int(np.searchsorted(self._bounds, index, side="right")) - 1
        if group != self._kept:
            self._table = self._file.read_row_group(group, columns=list(_COLUMNS))
            self._kept = group
        at = index - int(self._bounds[group])
        ids, mask, starts = (self._table.column(name)[at].as_py() for name in _COLUMNS)
        return {"input_ids": ids, "seq_boundaries": [*starts, len(ids)], "loss_mask": mask}
