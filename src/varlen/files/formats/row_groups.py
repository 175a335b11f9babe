"""Row groups of Parquet files in batches that are bounded by what they decode to.

A value that many rows share is stored once, so that a few kilobytes may stand for terabytes. How many bytes rows
take is known once they are decoded; before, the file's description bounds it: no value is longer than the dictionary
that it stands in. So a batch has as many rows as the last ones let expect, and never more than fit into `_MOST_BYTES`
if each value were the longest. Where single rows could be too long by that bound, strings are read as dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from varlen.errors import SourceError
from varlen.files.formats.damage import is_damage
from varlen.files.formats.decoded import (
    BATCH_BYTES,
    MOST_ROWS,
    batch_sizes,
    cuts,
    list_counts,
    pieces,
    plain,
    row_sizes,
)
from varlen.files.paths import File
from varlen.files.rows import Fault, location
from varlen.types import IntArray

# Column chunks are streamed through a small buffer: row groups may exceed memory.
OPENED: dict[str, Any] = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
# Of a batch, if each of its values were the longest; and of the first batch, before sizes are known.
_MOST_BYTES, _FIRST_BYTES = 512 << 20, 64 << 20
_MOST_ROW_BYTES = 1 << 30  # of a row, by the same bound; above it, strings are read as dictionaries
_STRING_BYTES = 2**31 - 1  # of one row, in Arrow's lists of strings
_PAGE_BYTES = 1 << 20
_VALUES, _FEW_VALUES = (1 << 20, 256)  # of a batch of dictionaries; of possibly long strings
_SHORT_BYTES = 64 << 10  # dictionaries of at most so many bytes hold no long value
_WORTHWHILE = 16  # a column this many times its dictionary: search that for its longest value
_GROWTH = 4  # maximum growth of a batch's rows from one batch to the next
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
# Ratio of decoded to encoded size from which a row group's decoded size is used, and from which it is inspected.
_AMPLIFIED, _MAYBE_AMPLIFIED = 8, 32
_EXAMINED_BYTES = 16 << 20  # row groups that can't decode to more aren't inspected
_INDEX_BYTES = 32  # bytes per value after the dictionary above which values are more than dictionary indices


@dataclass(frozen=True, kw_only=True, slots=True)
class TooLarge:
    """A row that takes more than Arrow's arrays hold."""

    num_bytes: int
    num_rows: int = 1

    def fault(self, file: File, before: int) -> Fault:
        """Return the fault of the row, given the number of rows before it."""
        why = f"decodes to {self.num_bytes:,} bytes, more than an array of strings holds (2 GB); cut it"
        return Fault(where=location(file.path, "row", before + 1), why=why, number=before + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A leaf column, for all row groups."""

    index: int
    width: int | None  # bytes of every value; None for byte strings
    is_nested: bool
    is_shared: bool  # whether Arrow reads it as a dictionary


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leaf:
    """A leaf column of one row group."""

    column: Column
    path: str
    values: int
    encoded: int
    compression: str
    dictionary_at: int | None  # offset of its dictionary, if it has one
    behind_dictionary: int  # compressed bytes after the dictionary
    has_prefixes: bool  # whether values are delta-encoded against the one before

    @property
    def decoded(self) -> int:
        """Decoded bytes if no value is shared."""
        return max(self.encoded, self.values * (self.column.width or 0))


def batches(
    table: Any, stored: BinaryIO, wanted: list[str], columns: Sequence[Column], group: int
) -> Iterator[Any | TooLarge]:
    """Yield the rows of a row group, a few megabytes at a time."""
    if table.metadata.row_group(group).num_rows == 0:
        return
    leaves = _leaves(table, group, columns)
    limit = _limit(table, stored, group, leaves)
    if limit is None:
        yield from _by_dictionaries(table, stored, group, wanted, leaves)
    else:
        yield from _decoded(table, group, wanted, leaves, limit)


def sizes(table: Any, stored: BinaryIO, wanted: Sequence[str]) -> list[int]:
    """Estimate the bytes of each row group: the encoded size, unless it decodes to many times as much.

    Deterministic for a file. Of the row groups whose metadata allows a much larger size, the first, the middle and
    the last are decoded, and all of them if one decodes to more.
    """
    columns = columns_of(table, wanted)
    leaves: list[list[_Leaf]] = []
    for group in range(table.num_row_groups):
        with _reported_by_reading():
            leaves.append([])
            leaves[group] = _leaves(table, group, columns)
    described = [_described(some) for some in leaves]
    doubtful = [group for group, some in enumerate(leaves) if any(map(_is_doubtful, some))]

    def look(groups: Sequence[int]) -> dict[int, int]:
        decoded = {}
        for group in groups:
            with _reported_by_reading():
                decoded[group] = _decoded_bytes(table, stored, group, leaves[group])
        return {group: size for group, size in decoded.items() if size > _AMPLIFIED * described[group]}

    decoded = look(sorted({doubtful[index] for index in (0, len(doubtful) // 2, -1)}) if doubtful else [])
    if decoded:
        decoded |= look([group for group in doubtful if group not in decoded])
    return [decoded.get(group, size) for group, size in enumerate(described)]


@contextmanager
def _reported_by_reading() -> Iterator[None]:
    """Pass over damage, which is a fault once the rows are read."""
    try:
        yield
    except Exception as error:
        if not is_damage(error):
            raise


def _described(leaves: Sequence[_Leaf]) -> int:
    """Return a row group's bytes according to its metadata."""
    encoded = sum(leaf.encoded for leaf in leaves)
    decoded = sum(leaf.decoded for leaf in leaves)
    return decoded if decoded > _AMPLIFIED * encoded else encoded


def _is_doubtful(leaf: _Leaf) -> bool:
    """Whether values may be far longer than what is stored of each."""
    if leaf.column.width is not None or leaf.values * leaf.encoded <= _EXAMINED_BYTES:
        return False
    if leaf.has_prefixes:
        return leaf.encoded < leaf.values * _INDEX_BYTES
    return leaf.dictionary_at is not None and leaf.behind_dictionary < leaf.values * _INDEX_BYTES


def _decoded_bytes(table: Any, stored: BinaryIO, group: int, leaves: Sequence[_Leaf]) -> int:
    """Return the decoded bytes of a row group, reading only columns that may decode to many times their size."""
    encoded = _described(leaves)
    total, rows = 0, table.metadata.row_group(group).num_rows
    for leaf in leaves:
        size = leaf.encoded
        if _is_doubtful(leaf) and _is_repeated(leaf, stored, _MAYBE_AMPLIFIED * encoded):
            few = max(rows * (_FEW_VALUES if leaf.has_prefixes else MOST_ROWS) // leaf.values, 1)
            reading = _as_dictionaries(table, stored, [leaf])
            read = reading.iter_batches(few, row_groups=[group], columns=[leaf.path], use_threads=False)
            size = sum(int(row_sizes(batch.column(0)).sum()) for batch in read)
        total += max(size, leaf.encoded)
    return total


def _is_repeated(leaf: _Leaf, stored: BinaryIO, num_bytes: int) -> bool:
    """Whether values may exceed so many bytes because most of them are repeated."""
    if leaf.dictionary_at is None:
        return leaf.values * _longest(leaf, stored) > num_bytes
    page = dictionary_page(stored, leaf.dictionary_at)
    if page is None:
        return True
    return page.entries * _AMPLIFIED < leaf.values and leaf.values * page.decoded > num_bytes


def columns_of(table: Any, wanted: Sequence[str]) -> list[Column]:
    """Describe the wanted leaf columns of a table."""
    kinds = [kind for field in table.schema_arrow for kind in _leaf_types(field.type)]
    columns = []
    for index in range(len(table.schema)):
        column = table.schema.column(index)
        if not any(column.path == name or column.path.startswith(f"{name}.") for name in wanted):
            continue
        kind = column.physical_type
        columns.append(
            Column(
                index=index,
                width=column.length if kind.startswith("FIXED") else _WIDTHS.get(kind),
                is_nested=column.max_repetition_level > 0,
                is_shared=len(kinds) == len(table.schema) and _is_dictionary(kinds[index]),
            )
        )
    return columns


def column_chunks(table: Any, group: int, indices: Sequence[int]) -> list[Any]:
    """Return the metadata of a row group's columns, by index of the leaf column.

    Raises what reading the columns raises where the metadata is damaged, or encrypted.
    """
    # `column()` ends the process where the metadata is damaged. To read no row checks it, and decodes nothing.
    list(table.reader.iter_batches(0, row_groups=[group], column_indices=indices, use_threads=False))
    shape = table.metadata.row_group(group)
    return [shape.column(index) for index in indices]


def _leaves(table: Any, group: int, columns: Sequence[Column]) -> list[_Leaf]:
    """Describe the leaf columns of a row group."""
    leaves = []
    for column, chunk in zip(columns, column_chunks(table, group, [column.index for column in columns])):
        encodings, begin, stored = chunk.encodings, chunk.data_page_offset, chunk.total_compressed_size
        at = chunk.dictionary_page_offset if chunk.has_dictionary_page else None
        if at is None and ("RLE_DICTIONARY" in encodings or "PLAIN_DICTIONARY" in encodings):
            at = begin  # some writers don't record its offset
        leaves.append(
            _Leaf(
                column=column,
                path=chunk.path_in_schema,
                values=chunk.num_values,
                encoded=chunk.total_uncompressed_size,
                compression=chunk.compression,
                dictionary_at=at,
                behind_dictionary=stored if at is None else stored - max(begin - at, 0),
                has_prefixes="DELTA_BYTE_ARRAY" in encodings,
            )
        )
    return leaves


def _leaf_types(kind: Any) -> Iterator[Any]:
    """Yield the types of a column's leaves, in Parquet's order."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if kind.num_fields == 0 or _is_dictionary(kind):
        yield kind
        return
    for index in range(kind.num_fields):
        yield from _leaf_types(kind.field(index).type)


def _is_dictionary(kind: Any) -> bool:
    return hasattr(kind, "index_type")


def _longest(leaf: _Leaf, stored: BinaryIO) -> int:
    """Return an upper bound for the length of a column's shared strings."""
    if leaf.dictionary_at is None:
        return min(leaf.encoded, _PAGE_BYTES) if leaf.has_prefixes else 0
    page = dictionary_page(stored, leaf.dictionary_at)
    if page is None:
        return leaf.encoded
    if page.decoded > _SHORT_BYTES and page.decoded * _WORTHWHILE <= leaf.encoded:
        return longest_entry(stored, page, leaf.compression)
    return min(page.decoded, leaf.encoded)


def _limit(table: Any, stored: BinaryIO, group: int, leaves: Sequence[_Leaf]) -> Callable[[int], int] | None:
    """Return a function from a row to how many rows to decode from there; None if single rows may be too large."""
    rows = table.metadata.row_group(group).num_rows
    share, row_bytes = 0.0, None
    for leaf in leaves:
        if (
            leaf.column.width is not None
            or leaf.column.is_shared
            or leaf.values * leaf.encoded <= _MOST_BYTES
        ):
            continue
        longest = _longest(leaf, stored)
        if (
            leaf.dictionary_at is not None
            and leaf.column.is_nested
            and leaf.values * longest > _MOST_ROW_BYTES
        ):
            most = _counts(table, stored, group, leaf, leaves) * longest
            if most.max() > _MOST_ROW_BYTES:
                return None
            row_bytes = most if row_bytes is None else row_bytes + most
        else:
            share += longest * leaf.values / rows
    flat = max(int(_MOST_BYTES / share), 1) if share else MOST_ROWS
    if row_bytes is None:
        return lambda _: flat
    ends = np.cumsum(row_bytes)

    def most_rows(at: int) -> int:
        before = int(ends[at - 1]) if at else 0
        return min(flat, max(int(np.searchsorted(ends, before + _MOST_BYTES, "right")) - at, 1))

    return most_rows


def _counts(table: Any, stored: BinaryIO, group: int, leaf: _Leaf, leaves: Sequence[_Leaf]) -> IntArray:
    """Count the values of each row, using the smallest sibling column."""
    parent = leaf.path.rpartition(".")[0]
    beside = [other for other in leaves if other.path.rpartition(".")[0] == parent and other.column.is_nested]
    least = min(beside, key=lambda other: other.encoded)
    is_short = least.column.width is not None or least.values * least.encoded <= _MOST_BYTES
    reading = table if is_short else _as_dictionaries(table, stored, [least])
    read = reading.iter_batches(MOST_ROWS, row_groups=[group], columns=[least.path], use_threads=False)
    return np.concatenate([list_counts(batch.column(0)) for batch in read])


def _as_dictionaries(table: Any, stored: BinaryIO, leaves: Sequence[_Leaf]) -> Any:
    """Open the same file anew with strings as dictionaries, in which shared values take space once."""
    import pyarrow.parquet as pq

    # Arrow can't read delta-encoded strings as dictionaries.
    paths = [leaf.path for leaf in leaves if leaf.column.width is None and not leaf.has_prefixes]
    return pq.ParquetFile(stored, metadata=table.metadata, read_dictionary=paths, **OPENED)


def _decoded(
    table: Any, group: int, wanted: list[str], leaves: Sequence[_Leaf], limit: Callable[[int], int]
) -> Iterator[Any]:
    """Yield the rows of a row group, with large batches cut and small ones joined."""
    read = _adapted(table, group, wanted, leaves, limit)
    for batch in read if any(leaf.column.is_shared for leaf in leaves) else _joined(read):
        yield from pieces(batch)


def _adapted(
    table: Any, group: int, wanted: list[str], leaves: Sequence[_Leaf], limit: Callable[[int], int]
) -> Iterator[Any]:
    """Yield the rows of a row group, in batches sized by the rows read so far."""
    rows = table.metadata.row_group(group).num_rows
    # A dictionary is rebuilt for every batch, and takes space once, however many rows share it.
    most = MOST_ROWS if any(leaf.column.is_shared for leaf in leaves) else 0
    first = max(limit(0) * _FIRST_BYTES // _MOST_BYTES, 1) if limit(0) < MOST_ROWS else MOST_ROWS
    count = min(max(_fitting(sum(leaf.decoded for leaf in leaves), rows), most), first)
    at = 0
    for batch in table.iter_batches(count, row_groups=[group], columns=wanted, use_threads=False):
        at += batch.num_rows
        fitting = min(_fitting(batch.nbytes, batch.num_rows), _GROWTH * batch.num_rows)
        table.reader.set_batch_size(min(max(fitting, most), limit(at)))
        yield batch


def _fitting(num_bytes: int, rows: int) -> int:
    """Return how many rows to read at a time, if so many take so many bytes."""
    return max(min(BATCH_BYTES * rows // max(num_bytes, 1), MOST_ROWS), 1)


def _joined(read: Iterator[Any]) -> Iterator[Any]:
    """Join small batches."""
    import pyarrow as pa

    held: list[Any] = []
    size = rows = 0
    for batch in read:
        if held and (size + batch.nbytes > BATCH_BYTES or rows + batch.num_rows > MOST_ROWS):
            yield held[0] if len(held) == 1 else pa.concat_batches(held)
            held, size, rows = [], 0, 0
        held.append(batch)
        size, rows = size + batch.nbytes, rows + batch.num_rows
    if held:
        yield held[0] if len(held) == 1 else pa.concat_batches(held)


def _by_dictionaries(
    table: Any, stored: BinaryIO, group: int, wanted: list[str], leaves: Sequence[_Leaf]
) -> Iterator[Any | TooLarge]:
    """Yield the rows of a row group with large single rows, without decoding more than is yielded."""
    import pyarrow as pa

    rows, values = table.metadata.row_group(group).num_rows, max(leaf.values for leaf in leaves)
    reading = _as_dictionaries(table, stored, leaves)
    most = _FEW_VALUES if any(leaf.has_prefixes for leaf in leaves) else _VALUES
    few = max(min(rows * most // max(values, 1), MOST_ROWS), 1)
    schema = None
    for batch in reading.iter_batches(few, row_groups=[group], columns=wanted, use_threads=False):
        if schema is None:
            kinds = table.schema_arrow
            schema = pa.schema([kinds.field(name) for name in batch.schema.names])
        sizes = batch_sizes(batch)
        for start, stop in cuts(sizes, 2 * BATCH_BYTES, MOST_ROWS):
            size = int(sizes[start:stop].sum())
            if size > _STRING_BYTES:
                yield TooLarge(num_bytes=size)
                continue
            piece = batch.slice(start, stop - start)
            decoded = [plain(column, field.type) for column, field in zip(piece.columns, schema)]
            yield pa.RecordBatch.from_arrays(decoded, schema=schema)


# The dictionary page of a Parquet column: its decoded size, and its longest value.
#
# Its header is a struct in Thrift's compact protocol, parsed as far as needed.

_HEADER_BYTES = 256
_DICTIONARY_PAGE = 2
_TYPE, _DECODED, _STORED, _ENTRIES = (1,), (2,), (3,), (7, 1)  # field numbers in a page's header
_TRUE, _FALSE, _FIRST_NUMBER, _LAST_NUMBER, _STRUCT = 1, 2, 4, 6, 12  # Thrift's field types
_LENGTH_BYTES = 4  # of the length before each value
_CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "ZSTD": "zstd", "LZ4": "lz4_raw"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DictionaryPage:
    """The location and size of a column's dictionary."""

    begin: int  # after the header
    stored: int  # bytes
    decoded: int  # bytes
    entries: int


def dictionary_page(stored: BinaryIO, at: int) -> DictionaryPage | None:
    """Return the dictionary page at an offset, or None where there is none."""
    stored.seek(at)
    try:
        numbers, end = _struct(stored.read(_HEADER_BYTES), 0)
    except (IndexError, SourceError):
        return None
    sizes = [numbers.get(field, -1) for field in (_STORED, _DECODED, _ENTRIES)]
    if numbers.get(_TYPE) != _DICTIONARY_PAGE or min(sizes) < 0:
        return None
    return DictionaryPage(begin=at + end, stored=sizes[0], decoded=sizes[1], entries=sizes[2])


def longest_entry(stored: BinaryIO, page: DictionaryPage, compression: str) -> int:
    """Return the bytes of a dictionary's longest string; those of all where unknown."""
    import pyarrow as pa

    stored.seek(page.begin)
    content = stored.read(page.stored)
    try:
        if compression != "UNCOMPRESSED":
            content = pa.decompress(content, page.decoded, _CODECS[compression], asbytes=True)
    except (KeyError, OSError, ValueError, NotImplementedError):
        return page.decoded
    at = longest = 0
    while at + _LENGTH_BYTES <= len(content):
        length = int.from_bytes(content[at : at + _LENGTH_BYTES], "little")
        longest = max(longest, length)
        at += _LENGTH_BYTES + length
    return longest if at == len(content) else page.decoded


def _struct(content: bytes, at: int, path: tuple[int, ...] = ()) -> tuple[dict[tuple[int, ...], int], int]:
    """Return the numbers of a struct by field path, and where it ends."""
    numbers: dict[tuple[int, ...], int] = {}
    field = 0
    while content[at]:
        kind, step = content[at] & 15, content[at] >> 4
        at += 1
        if step:
            field += step
        else:
            field, at = _number(content, at)
        if _FIRST_NUMBER <= kind <= _LAST_NUMBER:
            numbers[*path, field], at = _number(content, at)
        elif kind == _STRUCT:
            inner, at = _struct(content, at, (*path, field))
            numbers |= inner
        elif kind not in (_TRUE, _FALSE):
            raise SourceError(f"a field of kind {kind} in the header of a page")
    return numbers, at + 1


def _number(content: bytes, at: int) -> tuple[int, int]:
    """Return a zigzag varint, and where it ends."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return (value >> 1) ^ -(value & 1), at
