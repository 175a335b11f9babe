"""Reads blocks: the rows of each, as they are asked for, and what rows become once they are encoded.

What must be read from its beginning stays open, so that asking for it in order reads it once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from varlen.errors import SourceError
from varlen.source.blocks import SPREAD, Blocks
from varlen.source.columns import Columns
from varlen.source.cursors import StreamCursor, TableCursor
from varlen.source.documents import Documents, encode_rows, none_of
from varlen.source.formats import tables
from varlen.source.formats.lost import rest_of
from varlen.source.formats.reading import columns_of, rows_in
from varlen.source.loss_masks import end_to_end
from varlen.source.losses import total
from varlen.source.opening import compression_of
from varlen.source.rows import Rows, faulty
from varlen.source.seen import check_told
from varlen.source.source import Source
from varlen.types import IntArray

_OPEN = 2 * SPREAD
"""Tables that stay open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What is read in one go: a block, or the next chunk of one that can't be cut."""

    block: int
    number: int = 0
    """Of the chunk within its block; 0 where the block is one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Raw:
    """A chunk's rows, not yet encoded."""

    chunk: Chunk
    path: str
    rows: tuple[Rows, ...]
    columns: Columns | None
    """What they hold; None where there are none but faults."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Read:
    """A chunk's documents."""

    documents: Documents
    """Whose faults are all of the chunk."""
    records: IntArray
    """int64 `[num_documents]`: what tells each from the others of the chunk."""


def encode(raw: Raw, source: Source, wanted: IntArray | None = None) -> Read:
    """Turn a chunk's rows into documents.

    Args:
        raw: the rows.
        source: that they are of.
        wanted: records to be encoded, ascending; None for all. Those that the chunk hasn't are left out.

    Raises:
        SourceError: something can't be read, and `on_error` is "raise".
        SettingError: the tokenizer fails.
    """
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
            raise documents.faults[0].raised()
        of = known if documents.rows is None else known[documents.rows]
        # Of ready tokens a row may be several documents, and encoding them all costs little.
        records.append(before + (np.arange(len(documents)) if is_ready else of))
        before += len(documents) if is_ready else len(some)
        parts.append(documents)
    read = Read(documents=_end_to_end(parts), records=_joined(records))
    return _only(read, wanted) if wanted is not None and is_ready else read


def _end_to_end(parts: Sequence[Documents]) -> Documents:
    """Put documents one after the other."""
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
    """Return some of a chunk's documents."""
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
    """Gives the rows of chunks; several threads may ask for chunks of different stretches."""

    def __init__(self, source: Source, blocks: Blocks) -> None:
        """Take the files, and how they are cut."""
        self._source, self._blocks = source, blocks
        self._lock = threading.Lock()
        self._columns: dict[int, Columns | None] = {}
        self._tables: OrderedDict[tuple[int, int], TableCursor] = OrderedDict()
        self._streams: dict[int, StreamCursor] = {}
        self.ends: dict[int, tuple[int, str]] = {}
        """Of blocks whose rows are given while they are read: the last chunk of the last whole pass, and its hash."""

    @property
    def num_blocks(self) -> int:
        """Blocks that there are."""
        return len(self._blocks)

    def is_cut(self, chunk: Chunk) -> bool:
        """Whether a chunk is found without reading what comes before it in its file.

        Args:
            chunk: of a block that there is.
        """
        return bool(self._blocks.of_parts[chunk.block])

    def has(self, chunk: Chunk) -> bool:
        """Whether there is such a chunk; of a block that can't be cut, reads on to it and keeps it for `rows`.

        Args:
            chunk: of a block; one before those that were forgotten costs reading from the beginning.
        """
        if self._blocks.of_parts[chunk.block]:
            return chunk.number == 0
        stream = self._streams.get(chunk.block)
        if stream is None or stream.lacks(chunk.number):
            stream = self._stream(chunk.block)
        if stream.has(chunk.number):
            return True
        if self.is_live(chunk.block) and chunk.number:
            self.ends[chunk.block] = (chunk.number - 1, stream.print_of(chunk.number - 1))
        return False

    def _stream(self, block: int) -> StreamCursor:
        """Begin to read a block that can't be cut, again if need be."""
        before = self._streams.get(block)
        if before is not None:
            before.close()
        chunk_bytes = self._blocks.live_bytes if self.is_live(block) else lambda _: self._blocks.block_bytes
        rows = self._rows_of(int(self._blocks.files[block]))
        self._streams[block] = StreamCursor(rows, chunk_bytes, before)
        return self._streams[block]

    def is_live(self, block: int) -> bool:
        """Whether a block's rows are given while they are read, so that no file's fingerprint tells them."""
        return self._source.files[int(self._blocks.files[block])].live is not None

    def name_of(self, block: int) -> str:
        """Return what a block's file is called in messages."""
        return self._source.files[int(self._blocks.files[block])].path

    def error_of(self, block: int) -> SourceError | None:
        """Return why a block that can't be cut couldn't be read any further, if it was read that far."""
        stream = self._streams.get(block)
        return None if stream is None else stream.error

    def print_of(self, chunk: Chunk) -> str:
        """Return the hash of all rows to the end of a chunk, after reading on to it; "" where there is no such chunk.

        Args:
            chunk: of a block whose rows are given while they are read.
        """
        stream = self._streams.get(chunk.block) or self._stream(chunk.block)
        return stream.print_of(chunk.number)

    def stretch_of(self, chunk: Chunk) -> tuple[int, int]:
        """Return what tells chunks that one thread is to read one after the other, in the order of their blocks.

        Args:
            chunk: any.
        """
        return int(self._blocks.files[chunk.block]), int(self._blocks.starts[chunk.block])

    def rows(self, chunk: Chunk) -> Raw:
        """Read a chunk's rows, as far as they can be read.

        Args:
            chunk: one that `has` has found, where its block can't be cut.
        """
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
        check_told(file.place, file.seen)  # also where what can't be read is skipped
        return Raw(chunk=chunk, path=file.path, rows=tuple(rows), columns=self._columns.get(index))

    def forget(self) -> None:
        """Let go of chunks that were asked for, and of tables that haven't been asked for lately."""
        for block, stream in list(self._streams.items()):
            stream.forget()
            if stream.is_over:
                self._streams.pop(block).close()
        while not self._blocks.is_kept and len(self._tables) > _OPEN:
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
                    self._blocks.is_kept,
                )
            self._tables.move_to_end((index, start))
        return table

    def _rows_of(self, index: int, start: int = 0, stop: int = -1) -> Iterator[Rows]:
        """Yield the rows of a stretch of a file, none but a fault behind those that can be read."""
        file, end = self._source.files[index], None if stop < 0 else stop
        try:
            columns = self._columns_of(index)
        except SourceError as error:
            yield faulty(rest_of(file, error, start=start, stop=end))
            return
        if columns is not None:
            yield from rows_in(file, columns, self._source.text_cut, start, end)

    def _columns_of(self, index: int) -> Columns | None:
        """Return what the rows of a file hold.

        Raises:
            SourceError: nobody knows.
        """
        file = self._source.files[index]
        if index not in self._columns:
            if file.format == "jsonl" and not file.suffix_compression and compression_of(file) is not None:
                raise SourceError(f"{file.path} is compressed, though its name doesn't say so; rename it")
            self._columns[index] = columns_of(file, self._source.encoding.columns)
        return self._columns[index]
