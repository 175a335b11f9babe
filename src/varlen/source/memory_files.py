"""The files that rows in memory become: written to a spool, or served while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from varlen.errors import SourceError
from varlen.source.columns import find_columns
from varlen.source.files import File
from varlen.source.memory_forms import Objects, Rows, Table, rows_in
from varlen.source.row_text import write_rows
from varlen.source.serving import Serving
from varlen.source.spool import TABLE, TEXT_ROWS, Sink, Spooled, spool

_BATCH_ROWS = 1024
_BATCH_BYTES = 4 << 20
"""A record batch of more bytes is cut in halves."""


def file_of(data: Any, columns: Mapping[str, str], cache: Path | None, *, is_streamed: bool) -> File | None:
    """Return the file that data becomes if it is rows in memory; None for a list of paths.

    Args:
        data: of `memory.placed`, as the others are.
        columns: by role.
        cache: folder for it.
        is_streamed: whether iterables are read while they are iterated over.

    Raises:
        SourceError: rows of a form that isn't read, without a column of documents, or none at all.
        SettingError: they can't be written.
    """
    found = rows_in(data)
    if found is None:
        return None
    if isinstance(found, Objects) and found.is_iterable and is_streamed:
        return _served(found, columns)
    return _written(found, columns, cache)


def _served(rows: Objects, columns: Mapping[str, str]) -> File:
    """Return the file of rows that are given while it is read."""
    serving = Serving(rows.rows, rows.where, columns, is_once=rows.is_once)
    return File(
        path=rows.where,
        name="memory",
        size=-1,
        format="jsonl",
        stored=str(serving.path),
        content="of an iterable",  # which states tell by what was read of it
        live=serving.live,
        hold=serving,
    )


def _written(rows: Rows, columns: Mapping[str, str], cache: Path | None) -> File:
    """Return the file of some rows."""
    if isinstance(rows, Table):
        wanted = _wanted(rows, columns)
        counted = [0]
        spooled = spool(lambda sink: _write_table(rows, wanted, sink, counted), TABLE, cache)
    else:
        counted = [0]
        spooled = spool(lambda sink: _write_objects(rows, columns, sink, counted), TEXT_ROWS, cache)
    if not counted[0]:
        spooled.hold.release()
        raise SourceError(f"{rows.where} holds no row; pass some")
    return _file(rows, spooled)


def _file(rows: Rows, spooled: Spooled) -> File:
    is_table = isinstance(rows, Table)
    return File(
        path=rows.where,
        name=f"memory{Path(TABLE if is_table else TEXT_ROWS).suffix}",
        size=spooled.size,
        format="arrow" if is_table else "jsonl",
        stored=str(spooled.path),
        content=spooled.content,
        hold=spooled.hold,
    )


def _write_objects(rows: Objects, columns: Mapping[str, str], sink: Sink, counted: list[int]) -> None:
    counted[0] = write_rows(rows.rows(), columns, rows.where, sink.write)


def _wanted(table: Table, columns: Mapping[str, str]) -> list[str]:
    """Return the columns that documents are made of.

    Raises:
        SourceError: there are none, or they hold pictures or sounds.
    """
    found = find_columns(table.names, columns, table.where).names.values()
    wanted = [name for name in dict.fromkeys(table.names) if name in set(found)]
    media = [name for name in wanted if name in table.media]
    if media:
        raise SourceError(
            f"{table.where} holds {table.media[media[0]]} in `{media[0]}`, and documents are made of text or tokens; "
            f"take the column away (remove_columns({media[0]!r})), or name another (columns=)"
        )
    return wanted


def _write_table(table: Table, wanted: list[str], sink: Sink, counted: list[int]) -> None:
    """Write record batches that are cut by the rows alone."""
    import pyarrow as pa

    writer: Any = None
    try:
        for batch in _cut(table.batches(wanted)):
            if writer is None:
                writer = pa.ipc.new_file(pa.PythonFile(sink, mode="w"), batch.schema)
            writer.write_batch(batch)
            counted[0] += batch.num_rows
    except pa.ArrowException as error:
        raise SourceError(f"{table.where} can't be read: {str(error).splitlines()[0]}") from error
    finally:
        if writer is not None:
            writer.close()


def _cut(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield record batches of the same rows wherever tables are cut."""
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
    """Yield a table's rows in batches that aren't too large, with nothing but the rows behind them."""
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
