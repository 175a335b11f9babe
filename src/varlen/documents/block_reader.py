"""Read blocks on request, and encode their rows.

Files that must be read from the beginning stay open, so that requests in order read them once.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from varlen.documents.blocks import SPREAD, Blocks
from varlen.documents.documents import Documents, encode_rows, none_of
from varlen.documents.source import Source
from varlen.errors import SourceError
from varlen.files.columns import Columns
from varlen.files.formats import tables
from varlen.files.formats.lost import rest_of
from varlen.files.formats.reader import columns_of, rows_in
from varlen.files.losses import total
from varlen.files.opening import compression_of
from varlen.files.rows import ROW_HASHES, Column, Rows, faulty
from varlen.files.seen import check_unchanged
from varlen.text.loss_masks import end_to_end
from varlen.types import IntArray

_OPEN = 2 * SPREAD  # maximum number of open tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The unit of reading: a block, or a chunk of one that can't be cut."""

    block: int
    number: int = 0  # index of the chunk within its block; 0 where the block is a single chunk


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Raw:
    """A chunk's rows before encoding."""

    chunk: Chunk
    path: str
    rows: tuple[Rows, ...]
    columns: Columns | None  # None where there are only faults


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Read:
    """A chunk's documents."""

    documents: Documents  # including all faults of the chunk
    records: IntArray  # int64 `[num_documents]`: identifies each document within the chunk


def encode(raw: Raw, source: Source, wanted: IntArray | None = None) -> Read:
    """Encode a chunk's rows."""
    parts: list[Documents] = []
    records: list[IntArray] = []
    before = 0
    is_ready = raw.columns is not None and raw.columns.kind == "tokens"
    for some in raw.rows:
        rows, known = some, np.arange(len(some))
        if wanted is not None and not is_ready:
            known = wanted[(wanted >= before) & (wanted < before + len(some))] - before
            rows = some.chosen(known.tolist())
        if raw.columns is None or not len(rows):
            documents = none_of(rows.faults)
        else:
            documents = encode_rows(rows, raw.columns, source.encoding)
        if documents.faults and source.on_error == "raise":
            raise documents.faults[0].raised(may_skip=True)
        of = known if documents.rows is None else known[documents.rows]
        # A row of token ids may be several documents, and encoding all of them is cheap.
        records.append(before + (np.arange(len(documents)) if is_ready else of))
        before += len(documents) if is_ready else len(some)
        parts.append(documents)
    read = Read(documents=_end_to_end(parts), records=_joined(records))
    return _only(read, wanted) if wanted is not None and is_ready else read


def _end_to_end(parts: Sequence[Documents]) -> Documents:
    """Concatenate documents."""
    if len(parts) == 1:
        return parts[0] if parts[0].rows is None else replace(parts[0], rows=None)
    masks = end_to_end([part.loss_mask for part in parts], [len(part.tokens) for part in parts])
    lengths = _joined([part.lengths for part in parts])
    return Documents(
        tokens=np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        loss_mask=masks,
        faults=tuple(fault for part in parts for fault in part.faults),
        losses=total(part.losses for part in parts),
    )


def _only(read: Read, wanted: IntArray) -> Read:
    """Return selected documents of a chunk."""
    documents, chosen = read.documents, np.flatnonzero(np.isin(read.records, wanted))
    bounds = documents.offsets
    index = _joined([np.arange(bounds[d], bounds[d + 1]) for d in chosen.tolist()])
    lengths = documents.lengths[chosen]
    some = replace(
        documents,
        tokens=documents.tokens[index],
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        loss_mask=None if documents.loss_mask is None else documents.loss_mask[index],
    )
    return Read(documents=some, records=read.records[chosen])


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64)


class BlockReader:
    """Reads the rows of chunks; several threads may request chunks of different stretches."""

    def __init__(self, source: Source, blocks: Blocks) -> None:
        self._source, self._blocks = source, blocks
        self._lock = threading.Lock()
        self._columns: dict[int, Columns | None] = {}
        self._tables: OrderedDict[tuple[int, int], TableCursor] = OrderedDict()
        self._streams: dict[int, StreamCursor] = {}
        # By block with served rows: the last chunk of the last complete pass, and its hash.
        self.ends: dict[int, tuple[int, str]] = {}

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def is_cut(self, chunk: Chunk) -> bool:
        """Whether a chunk is found without reading what precedes it in its file."""
        return bool(self._blocks.of_parts[chunk.block])

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk exists; in a block that can't be cut, reads on to it and keeps it for `rows`."""
        if self._blocks.of_parts[chunk.block]:
            return chunk.number == 0
        stream = self._streams.get(chunk.block)
        if stream is None or stream.lacks(chunk.number):
            stream = self._stream(chunk.block)
        if stream.has(chunk.number):
            return True
        if self.is_live(chunk.block) and chunk.number:
            self.ends[chunk.block] = (chunk.number - 1, stream.row_hash_of(chunk.number - 1))
        return False

    def _stream(self, block: int) -> StreamCursor:
        """Begin to read a block that can't be cut, possibly again."""
        before = self._streams.get(block)
        if before is not None:
            before.close()
        chunk_bytes = self._blocks.live_bytes if self.is_live(block) else lambda _: self._blocks.block_bytes
        rows = self._rows_of(int(self._blocks.files[block]))
        self._streams[block] = StreamCursor(rows, chunk_bytes, before)
        return self._streams[block]

    def is_live(self, block: int) -> bool:
        """Whether a block's rows are served while they are read, so that no file fingerprint identifies them."""
        return self._source.files[int(self._blocks.files[block])].live is not None

    def name_of(self, block: int) -> str:
        """Return the path of a block's file, for messages."""
        return self._source.files[int(self._blocks.files[block])].path

    def error_of(self, block: int) -> SourceError | None:
        """Return the error that stopped reading a block that can't be cut, if any."""
        stream = self._streams.get(block)
        return None if stream is None else stream.error

    def row_hash_of(self, chunk: Chunk) -> str:
        """Return the hash of all rows up to the end of a chunk; "" where there is no such chunk."""
        stream = self._streams.get(chunk.block) or self._stream(chunk.block)
        return stream.row_hash_of(chunk.number)

    def stretch_of(self, chunk: Chunk) -> tuple[int, int]:
        """Return a key of chunks that one thread must read in order."""
        return int(self._blocks.files[chunk.block]), int(self._blocks.starts[chunk.block])

    def rows(self, chunk: Chunk) -> Raw:
        """Read a chunk's rows, as far as possible."""
        blocks, block = self._blocks, chunk.block
        index, start, stop, part, of_parts = (
            int(of[block])
            for of in (blocks.files, blocks.starts, blocks.stops, blocks.parts, blocks.of_parts)
        )
        if of_parts == 0:
            rows = self._streams[block].chunk(chunk.number)
        elif of_parts == 1:
            rows = list(self._rows_of(index, start, stop))
        else:
            rows = self._table(index, start, stop).part(part, of_parts)
        file = self._source.files[index]
        check_unchanged(file.local_path, file.seen)  # also if faults are skipped
        return Raw(chunk=chunk, path=file.path, rows=tuple(rows), columns=self._columns.get(index))

    def forget(self) -> None:
        """Release chunks that were requested, and the least recently used tables."""
        for block, stream in list(self._streams.items()):
            stream.forget()
            if stream.is_over:
                self._streams.pop(block).close()
        while not self._blocks.is_cached and len(self._tables) > _OPEN:
            self._tables.popitem(last=False)[1].close()

    def close(self) -> None:
        """Close all files."""
        for table in self._tables.values():
            table.close()
        for stream in self._streams.values():
            stream.close()
        self._tables.clear()
        self._streams.clear()

    def _table(self, index: int, start: int, stop: int) -> TableCursor:
        with self._lock:
            table = self._tables.get((index, start))
            if table is None:
                table = self._tables[index, start] = TableCursor(
                    lambda: self._rows_of(index, start, stop),
                    lambda: tables.count_rows(self._source.files[index], start, stop),
                    self._blocks.is_cached,
                )
            self._tables.move_to_end((index, start))
        return table

    def _rows_of(self, index: int, start: int = 0, stop: int = -1) -> Iterator[Rows]:
        """Yield the rows of a stretch of a file, and last the fault of what can't be read."""
        file, end = self._source.files[index], None if stop < 0 else stop
        try:
            columns = self._columns_of(index)
        except SourceError as error:
            yield faulty(rest_of(file, error, start=start, stop=end))
            return
        if columns is not None:
            yield from rows_in(file, columns.fields, self._source.text_cut, start, end)

    def _columns_of(self, index: int) -> Columns | None:
        """Return what the rows of a file hold."""
        file = self._source.files[index]
        if index not in self._columns:
            columns = columns_of(file, self._source.encoding.columns)
            # After reading the first rows, a local file's compression is known.
            if file.format == "jsonl" and not file.suffix_compression and compression_of(file) is not None:
                raise SourceError(f"{file.path} is compressed, though its name doesn't say so; rename it")
            self._columns[index] = columns
        return self._columns[index]


# Cursors in files that are read from the beginning: parts of row groups, chunks of files that can't be cut.


class TableCursor:
    """Row groups or record batches whose rows are requested part by part; requests in order read them once."""

    def __init__(
        self, open_: Callable[[], Iterator[Rows]], count: Callable[[], int], is_cached: bool
    ) -> None:
        self._open, self._count, self._is_cached = open_, count, is_cached
        self._total: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._reading = self._open()
        self._held: list[Rows] = []
        self._first = self._read = 0  # rows before those held, and before those not yet read
        self._is_over = False

    def part(self, number: int, of: int) -> list[Rows]:
        """Return one of `of` parts with about the same number of rows.

        Faults that cover rows belong to the part in which these begin, others to the part that meets them. If rows
        can't be counted, the first part has everything.
        """
        if self._total is None:
            try:
                self._total = self._count()
            except SourceError:
                return list(self._reading) if number == 0 else []
        start, stop = (self._total * n // of for n in (number, number + 1))
        if start < self._first:
            self.close()
            self._begin()
        is_last = number + 1 == of
        while self._read < stop or (is_last and not self._is_over):
            self._step(self._total)
            if not self._is_cached:
                while self._held and self._first + max(self._held[0].covers, 1) <= start:
                    self._first += self._held.pop(0).covers
        return self._between(start, stop, stop + is_last)

    def _step(self, total: int) -> None:
        some = next(self._reading, None)
        if some is None:
            self._read, self._is_over = total, True  # a fault covers the rest
            return
        self._held.append(some)
        self._read += some.covers

    def _between(self, start: int, stop: int, stop_of_bytes: int) -> list[Rows]:
        batches, at = [], self._first
        for some in self._held:
            a, b = max(start - at, 0), min(stop - at, some.covers)
            if a < b or (some.covers == 0 and start <= at < stop_of_bytes):
                batches.append(_share(some, a, b) if some.covers else some)
            at += some.covers
        return batches

    def close(self) -> None:
        """Close the file."""
        close = getattr(self._reading, "close", None)
        if close is not None:
            close()


def _share(rows: Rows, start: int, stop: int) -> Rows:
    """Return a range of rows, counting unreadable ones, which come first."""
    at, faults = 0, []
    for fault in rows.faults:
        if start <= at < stop:
            faults.append(fault)
        at += fault.covers
    return rows.between(max(start - at, 0), max(stop - at, 0), tuple(faults))


class StreamCursor:
    """A file read from its beginning, in chunks of about as many bytes."""

    def __init__(
        self, rows: Iterator[Rows], chunk_bytes: Callable[[int], int], before: StreamCursor | None = None
    ) -> None:
        self._rows, self._chunk_bytes = rows, chunk_bytes
        self._num_bytes = 0
        self._row_hashes = array("Q")  # hash of all rows to the end of each chunk; 0 where rows have none
        self._chunks: dict[int, Rows] = {}  # chunks read and not yet released, by number
        self._before: dict[int, Rows] = {} if before is None else {**before._before, **before._chunks}
        self._found = self._asked = 0
        self._is_read = False
        self.error: SourceError | None = None  # why the file can't be read to its end
        self.is_over = False  # whether a chunk beyond the last was requested

    def has(self, number: int) -> bool:
        """Whether a chunk exists; reads on to it."""
        self._read_to(number, number)
        self._asked = max(self._asked, number + 1)
        self.is_over = number >= self._found
        return not self.is_over

    def _read_to(self, number: int, wanted: int) -> None:
        """Read on to a chunk; those before `wanted` aren't kept."""
        while self._found <= number and not self._is_read:
            some = next(self._rows, None)
            if some is None:
                self._is_read = True
                break
            bounds, num_bytes = _chunk_bounds(some, self._chunk_bytes(self._num_bytes))
            self._num_bytes += num_bytes
            for start, stop in zip(bounds, bounds[1:]):
                self._add(some.between(start, stop, some.faults if start == 0 else ()), wanted)

    def chunk(self, number: int) -> list[Rows]:
        """Return a chunk that was found by this cursor or the previous one."""
        return [self._chunks[number] if number in self._chunks else self._before[number]]

    def lacks(self, number: int) -> bool:
        """Whether a chunk was read and released."""
        return number < self._found and number not in self._chunks

    def row_hash_of(self, number: int) -> str:
        """Return the hash of all rows to the end of a chunk, reading on to it; "" where there is none."""
        self._read_to(number, number + 1)
        return f"{self._row_hashes[number]:016x}" if number < self._found and self._row_hashes[number] else ""

    def _add(self, chunk: Rows, wanted: int) -> None:
        if self._found >= wanted:
            self._chunks[self._found] = chunk
        if not len(chunk) and any(fault.number == 0 for fault in chunk.faults):
            self.error = chunk.faults[-1].raised()
        row_hashes = chunk.columns.get(ROW_HASHES)
        before = self._row_hashes[-1] if self._found else 0
        self._row_hashes.append(int(row_hashes[-1], 16) if row_hashes else before)
        self._found += 1

    def forget(self) -> None:
        """Release the chunks that were requested."""
        for number in [n for n in self._chunks if n < self._asked]:
            del self._chunks[number]
        self._before.clear()

    def close(self) -> None:
        """Close the file."""
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()


def _chunk_bounds(rows: Rows, chunk_bytes: int) -> tuple[list[int], int]:
    """Return where to cut rows into chunks of about as many bytes, and the total bytes."""
    sizes = np.zeros(len(rows), dtype=np.int64)
    for name, column in rows.columns.items():
        if name != ROW_HASHES:
            sizes += _row_sizes(column)
    chunk = (np.cumsum(sizes) - sizes) // chunk_bytes
    inner = np.flatnonzero(np.diff(chunk)) + 1
    return [0, *inner.tolist(), len(rows)], int(sizes.sum())


def _row_sizes(column: Column) -> IntArray:
    """Estimate the bytes of each value of a column."""
    if isinstance(column, list):
        return np.fromiter(map(_value_size, column), dtype=np.int64, count=len(column))
    return np.full(len(column), column.nbytes // max(len(column), 1), dtype=np.int64)


def _value_size(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_value_size, value.values())) + 8 * len(value)
    if isinstance(value, list):
        return sum(map(_value_size, value)) + 8 * len(value)
    return 8


# Progress: the parts that are done, and the bytes read of the current one.


class ReadProgress:
    """Reports progress as parts are done and as bytes are read."""

    def __init__(self, sizes: Sequence[int], on_progress: Callable[[int, int, str], None]) -> None:
        self._sizes, self._total = sizes, max(sum(sizes), 1)
        self._on_progress = on_progress
        self._done = self._parts = self._read = 0
        self._reached: dict[str, int] = {}
        on_progress(0, self._total, "tokenizing")

    def read(self, path: str, start: int, stop: int) -> None:
        """Record that bytes [start, stop) of a file were read for the first unfinished part.

        A file is opened several times, to detect its format; its bytes count once. Bytes of tables count only when a
        part is done, since a table's end is read first.
        """
        reached = self._reached.get(path, 0)
        if stop <= reached:
            return
        self._reached[path] = stop
        self._read += stop - max(start, reached)
        within = min(self._read, self._sizes[self._parts]) if self._parts < len(self._sizes) else 0
        self._on_progress(self._done + within, self._total, "tokenizing")

    def finish(self, part: int) -> None:
        """Record that a part is done."""
        self._done += self._sizes[part]
        self._parts += 1
        self._read = 0
        self._on_progress(self._done, self._total, "tokenizing")
