"""Columns whose rows share their values, files of them, and what a program of a test says of its memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

PEAK = """def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
"""
"""What a process of its own calls; what `resource` says begins with the peak of the process that started it."""
MB = 1 << 20


def text_column(texts, indices):
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(texts))


def chats(rows, per_row, texts, indices):
    """A column of messages whose contents are shared."""
    count = rows * per_row
    roles = text_column(["user", "assistant"], np.arange(count) % 2)
    messages = pa.StructArray.from_arrays([roles, text_column(texts, indices)], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(np.arange(0, count + 1, per_row), pa.int32()), messages)


def write(path, column, *, name="text", is_dictionary=False, **named):
    """Write a column; unless it is to be read as a dictionary, with no word of how it was made."""
    table = pa.table({name: column})
    pq.write_table(table, path, store_schema=is_dictionary, **named)
    return path


def undone(kind):
    """The same type without dictionaries."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_list(kind):
        return pa.list_(undone(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, undone(field.type)) for field in kind])
    return kind
