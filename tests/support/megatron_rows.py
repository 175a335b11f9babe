"""Packed rows to try, and the files that Megatron-Bridge's releases make of them, written as they write them."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

Row = dict[str, Any]
NAMES = ("input_ids", "loss_mask", "seq_start_id")


@st.composite
def packed_rows(draw: st.DrawFn, most: int = 5, lengths: bool | None = None) -> list[Row]:
    """Rows as the releases' `fill_packing_strategy` returns them; some with the true lengths of padded documents."""
    has_lengths = draw(st.booleans()) if lengths is None else lengths
    rows = []
    for _ in range(draw(st.integers(1, most))):
        row: Row = {name: [] for name in NAMES} | ({"seq_lengths": []} if has_lengths else {})
        for _ in range(draw(st.integers(1, 4))):
            ids = draw(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 300), min_size=1, max_size=7))
            row["seq_start_id"].append(len(row["input_ids"]))
            row["input_ids"] += ids
            row["loss_mask"] += draw(
                st.lists(st.booleans() | st.integers(0, 1), min_size=len(ids), max_size=len(ids))
            )
            if has_lengths:
                row["seq_lengths"].append(draw(st.integers(0, len(ids) - 1)))
        rows.append(row)
    return rows


def many_rows(count: int, width: int, seed: int = 0) -> list[Row]:
    """Rows of one width, each of some documents."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        starts = [0, *sorted(rng.sample(range(1, width), min(3, width - 1)))]
        ids = [rng.randrange(128_000) for _ in range(width)]
        rows.append({"input_ids": ids, "loss_mask": [rng.randrange(2) for _ in ids], "seq_start_id": starts})
    return rows


def plain(row: Row) -> Row:
    """A row's columns as whole numbers, without what a reader adds."""
    return {name: [int(value) for value in row[name]] for name in (*NAMES, "seq_lengths") if name in row}


def write_parquet(path: Path, rows: list[Row], dialect: str = "0.6", group: int = 500) -> Path:
    """Write rows as a release does: masks of 8 bits from 0.6 on, before that of whatever Arrow finds."""
    mask: Any = [row["loss_mask"] for row in rows]
    if dialect == "0.6":
        mask = pa.array([[int(value) for value in one] for one in mask], type=pa.list_(pa.int8()))
    table = {name: [row[name] for row in rows] for name in NAMES} | {"loss_mask": mask}
    pq.write_table(pa.table(table), path, row_group_size=group)
    return path


def saved(rows: Any, protocol: int = 4, module: str = "numpy._core") -> bytes:
    """What `np.save` makes of a list of rows, by any protocol, in the spelling of numpy 1 or 2."""
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    content = pickle.dumps(array, protocol=protocol)
    if module != "numpy._core":
        long, short = b"numpy._core.", module.encode() + b"."
        for tail in (b"multiarray", b"numeric"):
            name, other = long + tail, short + tail
            content = content.replace(bytes([0x8C, len(name)]) + name, bytes([0x8C, len(other)]) + other)
            content = content.replace(b"c" + name, b"c" + other)
    return header(len(rows)) + content


def header(count: int) -> bytes:
    """The beginning of an `.npy` file of objects."""
    stream = io.BytesIO()
    shape = {"descr": "|O", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(stream, shape)
    return stream.getvalue()
