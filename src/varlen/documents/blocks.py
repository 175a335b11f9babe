"""Blocks: an epoch's input as small stretches of files that can be read in any order, and their order.

::

    a.jsonl      |----|----|----|--|      bytes, which the reader moves to line ends
    b.parquet    |--:--:--|---|           row groups, large ones in parts of their rows
    c.jsonl.gz   ~~~~~~~~~~~~~~~~~        can't be cut: read from its beginning, in chunks

Blocks depend only on names, sizes and the metadata of tables, so that every rank has the same without reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varlen.documents.order import hashed
from varlen.documents.source import Source
from varlen.errors import SourceError
from varlen.files.formats import tables
from varlen.files.formats.reader import columns_of
from varlen.files.paths import File
from varlen.types import IntArray

MOST_BLOCK_BYTES = 1 << 20
FEWEST_BLOCK_BYTES = 4 << 10
BLOCKS_OF_A_LANE = 100  # per epoch for little data, so that the last ones are small compared with the total
CACHED_BYTES = 64 << 20  # tables up to this size stay in memory, so that parts can be read in any order
SPREAD = 8  # large row groups that are read concurrently where they are shuffled
_MOST_PARTS = 1 << 20  # of one row group or record batch
_FEWEST_LIVE_BYTES = 512  # first chunk of served rows, which may end soon; lanes should be about equal then
_ENDLESS = 1 << 50  # approximate bytes of served rows, which may have no end
_UNPACKED = 4  # assumed compression ratio


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """All blocks of an epoch, in file order; arrays have one entry per block."""

    files: IntArray  # int64: index among the source's files
    starts: IntArray  # int64: in bytes, row groups or record batches, depending on the format
    stops: IntArray  # int64: -1 for the end of the file
    parts: IntArray  # int64: index of the part within the stretch
    of_parts: IntArray  # int64: parts of the stretch; 0: read in chunks, whose number is unknown
    sizes: IntArray  # int64: approximate bytes
    block_bytes: int  # maximum bytes of a block, except for its last document
    is_cached: bool = False  # whether rows of tables stay in memory once read
    lanes: int = 1  # number of lanes that the blocks are divided among

    def __len__(self) -> int:
        return len(self.files)

    def where(self, block: int, chunk: int, files: Sequence[File]) -> str:
        """Describe the location of a block, or of a chunk of one that can't be cut."""
        path, start, parts = (
            files[int(self.files[block])].path,
            int(self.starts[block]),
            int(self.of_parts[block]),
        )
        if parts == 0:
            return f"chunk {chunk:,} of {path}"
        part = f" (part {int(self.parts[block]) + 1:,} of {parts:,})" if parts > 1 else ""
        unit = "byte" if files[int(self.files[block])].format == "jsonl" else "row group or batch"
        return (
            f"the lines from {unit} {start:,} of {path}"
            if unit == "byte"
            else f"{unit} {start:,} of {path}{part}"
        )

    def order(self, seed: int | None, epoch: int) -> IntArray:
        """Return the block numbers in the order of an epoch, int64 `[blocks]`."""
        if seed is None:
            return np.arange(len(self))
        seed = int(hashed(np.array([epoch]), seed)[0])
        if self.is_cached:
            return np.argsort(hashed(np.arange(len(self)), seed), kind="stable")
        # Parts of one stretch stay in order and close together, interleaved with those of a few others.
        firsts = np.arange(len(self)) - self.parts
        groups, group_of, sizes = np.unique(firsts, return_inverse=True, return_counts=True)
        shuffled = np.argsort(hashed(groups, seed), kind="stable")
        begins = np.zeros(len(groups), dtype=np.int64)
        begins[shuffled] = np.cumsum(sizes[shuffled]) - sizes[shuffled]
        return np.argsort(begins[group_of] + self.parts * SPREAD, kind="stable")

    def live_bytes(self, before: int) -> int:
        """Return the size of the next chunks of served rows.

        They are as small compared with what was read as other blocks are compared with the total.
        """
        return min(MOST_BLOCK_BYTES, max(_FEWEST_LIVE_BYTES, before // (BLOCKS_OF_A_LANE * self.lanes)))

    def chunks_about(self) -> IntArray:
        """Estimate the number of chunks of each block."""
        return np.where(self.of_parts == 0, -(-self.sizes // self.block_bytes), 1)


def cut_blocks(source: Source, lanes: int) -> Blocks:
    """Cut the files of a source into blocks.

    Cost: reads the metadata of each table.
    """
    stretches = [_stretches(source, file) for file in source.files]
    sizes = [_size(file, some) for file, some in zip(source.files, stretches)]
    block_bytes = block_bytes_for(sum(sizes), lanes)
    rows: list[tuple[int, int, int, int, int, int]] = []
    for index, file in enumerate(source.files):
        cuts = _cut(file, sizes[index], stretches[index], block_bytes, source.text_cut == "file")
        rows += [(index, *cut) for cut in cuts]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    table_bytes = sum(size for size, some in zip(sizes, stretches) if some is not None)
    return Blocks(
        files=columns[0],
        starts=columns[1],
        stops=columns[2],
        parts=columns[3],
        of_parts=columns[4],
        sizes=columns[5],
        block_bytes=block_bytes,
        is_cached=table_bytes <= CACHED_BYTES,
        lanes=lanes,
    )


def block_bytes_for(total_bytes: int, lanes: int) -> int:
    """Return the maximum bytes of a block."""
    return min(MOST_BLOCK_BYTES, max(FEWEST_BLOCK_BYTES, total_bytes // (BLOCKS_OF_A_LANE * lanes)))


def read_by_all(source: Source, blocks: Blocks) -> list[str]:
    """Name the files that can't be cut, each of which every rank reads completely."""
    return [source.files[index].path for index in blocks.files[blocks.of_parts == 0].tolist()]


def _stretches(source: Source, file: File) -> list[int] | None:
    """Return the bytes of a table's row groups or record batches; None for other files."""
    if file.format not in ("parquet", "arrow"):
        return None
    try:
        columns = columns_of(file, source.encoding.columns)
        return tables.stretch_sizes(file, list(columns.names.values()) if columns is not None else [])
    except SourceError:
        if source.on_error == "raise":
            raise
        return []  # reading reports it


def _size(file: File, stretches: Sequence[int] | None) -> int:
    if stretches is not None:
        return sum(stretches)
    return max(file.size, 1) * (_UNPACKED if file.suffix_compression else 1)


def _cut(
    file: File, size: int, stretches: Sequence[int] | None, block_bytes: int, is_whole: bool
) -> list[tuple[int, int, int, int, int]]:
    """Return start, stop, part, number of parts and size of each block of a file."""
    if file.live is not None:
        return [(0, -1, 0, 0, _ENDLESS)]
    if file.size == 0 and stretches is None:
        return []
    if stretches is not None:
        return _cut_table(stretches, block_bytes) or [(0, -1, 0, 1, 1)]
    if file.format == "jsonl" and file.suffix_compression is None and file.size >= 0:
        starts = range(0, file.size, block_bytes)
        return [
            (start, -1 if start + block_bytes >= size else start + block_bytes, 0, 1, block_bytes)
            for start in starts
        ]
    if (file.format == "text" and is_whole) or (file.size >= 0 and size <= block_bytes):
        return [(0, -1, 0, 1, size)]
    return [(0, -1, 0, 0, size)]


def _cut_table(sizes: Sequence[int], block_bytes: int) -> list[tuple[int, int, int, int, int]]:
    """Combine small row groups into blocks, and cut large ones into parts."""
    cuts: list[tuple[int, int, int, int, int]] = []
    first = filled = 0
    for group, size in enumerate(sizes):
        if filled and filled + size > block_bytes:
            cuts.append((first, group, 0, 1, filled))
            first, filled = group, 0
        if size > block_bytes:
            parts = min(-(-size // block_bytes), _MOST_PARTS)
            cuts += [(first, group + 1, part, parts, size // parts) for part in range(parts)]
            first, filled = group + 1, 0
        else:
            filled += size
    if first < len(sizes):
        cuts.append((first, len(sizes), 0, 1, max(filled, 1)))
    return cuts
