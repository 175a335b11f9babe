"""Rows in memory become files, so that every reader, worker and fingerprint takes them as it takes any other file.

::

    list of dicts, dict of columns,      ─ JSON lines ─┐
    DataFrame, map-style data set                      ├─► spool (spool.py) ─► File ─► readers, workers, fingerprints
    Table, RecordBatch, reader of such,  ─ Arrow IPC ──┘
    datasets.Dataset, __arrow_c_stream__
    function, iterable (streaming)       ─ JSON lines over a socket (serving.py) ─► File of unknown size

Workers are interpreters of their own, to which no object of the trainer's is handed: they get the name of a file.
Objects are written as JSON, in which an absent key stays absent, and tables as Arrow, in which ids stay arrays.
Written are the columns that documents are made of. The fingerprint is that of the bytes: equal rows in equal
form have it in every process, so several ranks share one file, and a state goes on with the rows that it was saved
with and refuses others. What is written follows from the rows alone, however a table is cut into chunks. Messages
name the rows by what was given: `memory (list of 40 rows) row 17`, rows counted from 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varlen.documents.held import Held
from varlen.files.paths import File, entries_of, refuse_text


def placed(
    data: Any,
    columns: Mapping[str, str] | None = None,
    cache: Path | None = None,
    *,
    is_streamed: bool = False,
) -> Any:
    """Replace rows in memory by files; paths, URLs and files stay as they are."""
    if isinstance(data, str):
        refuse_text(data, "data")
    if isinstance(data, str | os.PathLike | File):
        return data
    from varlen.documents.memory_forms import file_of  # rarely needed

    file = file_of(data, columns or {}, cache, is_streamed=is_streamed)
    if file is not None:
        return file
    entries = [placed(entry, columns, cache, is_streamed=is_streamed) for entry in data]
    return data if all(a is b for a, b in zip(entries, data)) else entries


def let_go(data: Any) -> None:
    """Release the files of rows in memory."""
    for entry in entries_of(data):
        if isinstance(entry, File) and isinstance(entry.hold, Held):
            entry.hold.release()
