"""The accepted forms of rows in memory: detect them, their columns, and how to read their rows.

No library is imported for this: if an object is of a library's class, the library is loaded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varlen.counts import many
from varlen.documents.row_text import write_rows
from varlen.documents.serving import Serving
from varlen.documents.spool import TABLE, TEXT_ROWS, Sink, spool
from varlen.errors import SourceError, described
from varlen.files.columns import find_columns
from varlen.files.paths import File, refuse_text
from varlen.files.rows import listed

_log = logging.getLogger(__name__)
_READ_ROWS = 1024  # rows of a data set that are read at a time
_MEDIA = {"Image", "Audio", "Video", "Pdf", "Nifti"}  # features of `datasets` that hold media
# Classes whose objects are sources.
_SETS = (
    ("datasets", "Dataset"),
    ("datasets", "DatasetDict"),
    ("datasets", "IterableDataset"),
    ("pyarrow", "Table"),
    ("pyarrow", "RecordBatch"),
    ("pandas", "DataFrame"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objects:
    """Rows of Python values."""

    where: str
    rows: Callable[[], Iterable[Any]]
    is_iterable: bool = False  # whether their number is unknown
    is_once: bool = False  # whether they can be iterated over only once


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of Arrow arrays."""

    where: str
    names: Sequence[str]
    batches: Callable[[list[str]], Iterable[Any]]  # from column names to tables or record batches
    media: Mapping[str, str]  # kinds of media by column name


Rows = Objects | Table


def rows_in(data: Any) -> Rows | None:
    """Return the rows in `data`; None where it is a list of paths or of several sources."""
    for of_form in (_of_datasets, _of_arrow, _of_pandas, _of_mapping):
        rows = of_form(data)
        if rows is not None:
            return rows
    if isinstance(data, list | tuple):
        return _of_list(data)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, bytes | bytearray):
        return _of_numbered(data)
    if callable(data) or hasattr(data, "__iter__"):
        return _of_iterable(data)
    raise SourceError(_unknown(data))


def _unknown(data: Any) -> str:
    return (
        f"a {type(data).__module__}.{type(data).__name__} is no source; pass a file, a folder, a glob or a URL, or "
        "rows: a list of dicts, a datasets.Dataset, an Arrow table, a DataFrame, or a function that returns an "
        "iterator of rows"
    ).replace("builtins.", "")


def _of_list(data: Sequence[Any]) -> Rows | None:
    """Return rows, unless a list holds paths and other sources."""
    if not any(isinstance(entry, Mapping) and not _is_split(entry) for entry in data):
        for number, entry in enumerate(data):
            _refuse_nameless(entry, number)
        return None
    others = [entry for entry in data if isinstance(entry, os.PathLike | File) or _is_set(entry)]
    if others:
        raise SourceError(
            f"a list holds rows and other sources, such as a {type(others[0]).__name__}; put the rows into a list "
            "of their own: [rows, other]"
        )
    return Objects(where=f"memory (list of {many(len(data), 'row')})", rows=lambda: data)


def _refuse_nameless(entry: Any, number: int) -> None:
    """Raise for texts, tokens or messages in a list of sources, with the call to write instead."""
    if isinstance(entry, str):
        refuse_text(entry, f"entry {number:,} of the list")
    first = (
        next(iter(entry), None)
        if isinstance(entry, list | tuple) or type(entry).__name__ == "ndarray"
        else None
    )
    is_message = isinstance(first, Mapping) and ("role" in first or "from" in first)
    if is_message:
        raise SourceError(
            f"entry {number:,} of the list is a list of messages; say so: "
            '[{"messages": messages} for messages in chats]'
        )
    if first is not None and not isinstance(first, str | Mapping) and hasattr(first, "__index__"):
        raise SourceError(
            f"entry {number:,} of the list is a list of numbers; where these are token ids, say so: "
            '[{"input_ids": ids} for ids in documents]'
        )


def _is_set(entry: Any) -> bool:
    return any(_is(entry, *name) for name in _SETS)


def _is(value: Any, module: str, name: str) -> bool:
    """Whether a value is of a library's class, without importing the library."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _of_numbered(data: Any) -> Rows:
    """Return the rows of an indexable object, such as a torch data set."""
    where = f"memory ({type(data).__name__} of {many(len(data), 'row')})"
    return Objects(where=where, rows=lambda: (data[number] for number in range(len(data))))


def _of_iterable(data: Any) -> Rows:
    """Return the rows of a function that returns an iterator, or of an iterable."""
    name = getattr(data, "__name__", type(data).__name__)
    is_once = not callable(data) and iter(data) is data
    rows = data if callable(data) else lambda: iter(data)
    return Objects(where=f"memory ({name})", rows=rows, is_iterable=True, is_once=is_once)


def _of_mapping(data: Any) -> Rows | None:
    """Return the rows of a dict of columns."""
    if not isinstance(data, Mapping):
        return None
    if _is_split(data):
        return rows_in(data[_split(data, "a dict")])
    lengths: dict[str, int] = {}
    for name, column in data.items():
        if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__"):
            raise SourceError(
                f"a dict is a dict of columns, and `{name}` is a {type(column).__name__}, not a list of values; for "
                "one row pass a list of it: [row]"
            )
        lengths[str(name)] = len(column)
    if len(set(lengths.values())) > 1:
        (first, one), (other, two) = next(
            (a, b) for a in lengths.items() for b in lengths.items() if a[1] != b[1]
        )
        raise SourceError(f"a dict of columns has {one:,} values in `{first}` and {two:,} in `{other}`")
    num_rows = next(iter(lengths.values()), 0)
    columns = {name: _plain_column(column) for name, column in data.items()}
    where = f"memory (dict of {many(num_rows, 'row')})"
    return Objects(where=where, rows=lambda: (dict(zip(columns, row)) for row in zip(*columns.values())))


def _plain_column(column: Any) -> Any:
    """Return a column as Python values."""
    return column.to_pylist() if hasattr(column, "to_pylist") else column


def _is_split(data: Any) -> bool:
    """Whether a mapping is one from split names to data sets."""
    return isinstance(data, Mapping) and bool(data) and all(map(_is_set, data.values()))


def _split(splits: Mapping[Any, Any], what: str) -> Any:
    """Return the default split."""
    chosen = next(iter(splits)) if len(splits) == 1 else "train"
    if chosen not in splits:
        first = next(iter(splits), "")
        raise SourceError(
            f"{what} holds several splits ({listed([str(name) for name in splits])}), none called `train`; pass one: "
            f"data[{first!r}]"
        )
    if len(splits) > 1:
        left = [str(name) for name in splits if name != chosen]
        _log.info("of %s the split `train` is read; left out: %s", what, listed(left))
    return chosen


def _of_pandas(data: Any) -> Rows | None:
    """Return the rows of a pandas DataFrame; missing values are null."""
    if not _is(data, "pandas", "DataFrame"):
        return None
    names = list(data.columns)
    _refuse_twice(names, "a DataFrame")

    def rows() -> Iterator[dict[Any, Any]]:
        columns = [_column_of(data[name]) for name in names]
        return (dict(zip(names, row)) for row in zip(*columns))

    return Objects(where=f"memory (DataFrame of {many(len(data), 'row')})", rows=rows)


def _column_of(series: Any) -> list[Any]:
    """Return the values of a pandas column."""
    missing = series.isna().tolist()
    return [None if is_missing else value for value, is_missing in zip(series.tolist(), missing)]


def _refuse_twice(names: Sequence[Any], what: str) -> None:
    """Raise if two columns have the same name."""
    twice = [name for name in dict.fromkeys(names) if list(names).count(name) > 1]
    if twice:
        raise SourceError(f"{what} has several columns of the name `{twice[0]}`; rename or drop all but one")


def _of_arrow(data: Any) -> Rows | None:
    """Return the rows of an Arrow table, batch, reader or data set, or of an Arrow C stream."""
    count = ""
    read: Callable[[list[str]], Iterable[Any]]
    if _is(data, "pyarrow", "Table") or _is(data, "pyarrow", "RecordBatch"):
        schema, read = data.schema, lambda wanted: [data.select(wanted)]
        count = f" of {many(data.num_rows, 'row')}"
    elif _is(data, "pyarrow.dataset", "Dataset"):
        schema, read = data.schema, lambda wanted: data.to_batches(columns=wanted)
    elif _is(data, "pandas", "DataFrame"):
        return None
    else:
        reader = _reader(data)
        if reader is None:
            return None
        schema, read = reader.schema, lambda wanted: (batch.select(wanted) for batch in reader)
    name = type(data).__name__
    _refuse_twice(schema.names, f"a {name}")
    return Table(where=f"memory ({name}{count})", names=schema.names, batches=read, media={})


def _reader(data: Any) -> Any:
    """Return a record batch reader; None where `data` is, or exports, no stream."""
    if _is(data, "pyarrow", "RecordBatchReader"):
        return data
    if not hasattr(data, "__arrow_c_stream__"):
        return None
    import pyarrow as pa

    try:
        return pa.RecordBatchReader.from_stream(data)
    except (pa.ArrowException, TypeError, ValueError):  # of a single column, without a name
        return None


def _of_datasets(data: Any) -> Rows | None:
    """Return the rows of a Hugging Face data set, with its selection, order and transform."""
    if _is(data, "datasets", "DatasetDict") or _is(data, "datasets", "IterableDatasetDict"):
        return rows_in(data[_split(data, f"a {type(data).__name__}")])
    if not _is(data, "datasets", "Dataset"):
        return None
    where = f"memory (Dataset of {many(len(data), 'row')})"
    shown = data.format
    if shown["type"] == "custom":  # a transform may make anything of a row
        return Objects(where=where, rows=lambda: _transformed(data))
    names = data.column_names if shown["output_all_columns"] else shown["columns"] or data.column_names

    def batches(wanted: list[str]) -> Iterable[Any]:
        chosen = data.with_format("arrow").select_columns(wanted)
        return chosen.iter(_READ_ROWS)  # type: ignore[no-any-return]

    media = {name: kind for name in names if (kind := _media(data.features.get(name)))}
    return Table(where=where, names=list(names), batches=batches, media=media)


def _transformed(data: Any) -> Iterator[dict[str, Any]]:
    """Yield rows as a data set's transform returns them."""
    for start in range(0, len(data), _READ_ROWS):
        columns = data[start : start + _READ_ROWS]
        for row in zip(*columns.values()):
            yield dict(zip(columns, row))


def _media(feature: Any) -> str | None:
    """Return the class name of a feature's media type, if it has one."""
    if isinstance(feature, Mapping):
        inside: Iterable[Any] = feature.values()
    elif isinstance(feature, list | tuple):
        inside = feature
    else:
        name = type(feature).__name__
        if name in _MEDIA:
            return name
        inside = [getattr(feature, "feature", None)] if hasattr(feature, "feature") else []
    return next((kind for inner in inside if (kind := _media(inner))), None)


# Rows in memory as files: written to a spool, or served while they are read.

_BATCH_ROWS = 1024
_BATCH_BYTES = 4 << 20  # larger record batches are cut in halves


def file_of(
    data: Any, columns: Mapping[str, str], cache: str | Path | None, *, is_streamed: bool
) -> File | None:
    """Return the file for rows in memory; None for a list of paths."""
    rows = rows_in(data)
    if rows is None:
        return None
    if isinstance(rows, Objects) and rows.is_iterable and is_streamed:
        return _served(rows, columns)
    return _written(rows, columns, cache)


def _served(rows: Objects, columns: Mapping[str, str]) -> File:
    """Return the file of rows that are served while it is read."""
    serving = Serving(rows.rows, rows.where, columns, is_once=rows.is_once)
    return File(
        path=rows.where,
        name="memory",
        size=-1,
        format="jsonl",
        stored=str(serving.path),
        content="of an iterable",  # states identify it by the hash of what was read
        live=serving.live,
        hold=serving,
    )


def _written(rows: Rows, columns: Mapping[str, str], cache: str | Path | None) -> File:
    num_rows = 0
    wanted = _wanted(rows, columns) if isinstance(rows, Table) else []

    def write(sink: Sink) -> None:
        nonlocal num_rows
        if isinstance(rows, Table):
            num_rows = _write_table(rows, wanted, sink)
        else:
            num_rows = write_rows(rows.rows(), columns, rows.where, sink.write)

    name = TABLE if isinstance(rows, Table) else TEXT_ROWS
    spooled = spool(write, name, cache)
    if not num_rows:
        spooled.hold.release()
        raise SourceError(f"{rows.where} holds no row; pass some")
    return File(
        path=rows.where,
        name=f"memory{Path(name).suffix}",
        size=spooled.size,
        format="arrow" if name == TABLE else "jsonl",
        stored=str(spooled.path),
        content=spooled.content,
        hold=spooled.hold,
    )


def _wanted(table: Table, columns: Mapping[str, str]) -> list[str]:
    """Return the columns that documents are made of."""
    used = find_columns(table.names, columns, table.where).names.values()
    wanted = [name for name in dict.fromkeys(table.names) if name in set(used)]
    media = [name for name in wanted if name in table.media]
    if media:
        raise SourceError(
            f"{table.where} holds {table.media[media[0]]} in `{media[0]}`, and documents are made of text or tokens; "
            f"take the column away (remove_columns({media[0]!r})), or name another (columns=)"
        )
    return wanted


def _write_table(table: Table, wanted: list[str], sink: Sink) -> int:
    """Write record batches whose boundaries depend only on the rows; return the number of rows."""
    import pyarrow as pa

    writer: Any = None
    num_rows = 0
    try:
        for batch in _cut(table.batches(wanted)):
            if writer is None:
                writer = pa.ipc.new_file(pa.PythonFile(sink, mode="w"), batch.schema)
            writer.write_batch(batch)
            num_rows += batch.num_rows
    except pa.ArrowException as error:
        raise SourceError(f"{table.where} can't be read: {described(error)}") from error
    finally:
        if writer is not None:
            writer.close()
    return num_rows


def _cut(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield record batches with the same boundaries however tables are chunked."""
    import pyarrow as pa

    waiting: list[Any] = []
    rows = 0
    for table in tables:
        whole = pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table
        at = 0
        while at < whole.num_rows:
            some = whole.slice(at, _BATCH_ROWS - rows)
            waiting.append(some)
            at, rows = at + some.num_rows, rows + some.num_rows
            if rows == _BATCH_ROWS:
                yield from _batches(pa.concat_tables(waiting))
                waiting, rows = [], 0
    if waiting:
        yield from _batches(pa.concat_tables(waiting))


def _batches(table: Any) -> Iterator[Any]:
    """Yield a table's rows in batches of bounded size, without other rows in their buffers."""
    import pyarrow as pa

    columns = [
        column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        for column in table.columns
    ]
    plain = pa.Table.from_arrays(columns, names=table.column_names).combine_chunks()
    if plain.nbytes > _BATCH_BYTES and plain.num_rows > 1:
        half = plain.num_rows // 2
        yield from _batches(plain.slice(0, half))
        yield from _batches(plain.slice(half))
    else:
        yield from plain.to_batches()
