"""What is lost where the rest of a file, or of a stretch of it, can't be read: rows if the file tells, or bytes."""

from __future__ import annotations

import zlib

from varlen.errors import SourceError
from varlen.source.files import File
from varlen.source.formats import arrays, tables
from varlen.source.losses import Losses
from varlen.source.opening import compression_of, open_stored
from varlen.source.rows import Fault

_PIECE = 1 << 12
_GZIP = 31
"""Bits of a window, and that a header stands before it, in zlib's words."""


def rest_of(
    file: File,
    error: SourceError,
    *,
    rows: int = 0,
    read_to: int = 0,
    start: int = 0,
    stop: int | None = None,
) -> Fault:
    """Return the fault of what follows in a file.

    Args:
        file: of which something can't be read.
        error: says why.
        rows: of the stretch that were read, or are faults of their own.
        read_to: byte up to which the file was read then; 0 where nothing of it was.
        start: of the stretch, in the unit in which the format is cut.
        stop: of the stretch; None: the file's end.
    """
    said = str(error)
    return Fault(
        where=file.path,
        why=f"(what is left of it): {said.removeprefix(f'{file.path} ')}",
        losses=_losses(file, rows, read_to, start, stop),
        raises=said,
    )


def _losses(file: File, rows: int, read_to: int, start: int, stop: int | None) -> Losses:
    if file.format in ("parquet", "arrow", "npz"):
        try:
            count = arrays.count_rows if file.format == "npz" else tables.count_rows
            return Losses(rows=max(count(file, start, stop) - rows, 0)) or Losses(records=1)
        except SourceError:
            # Of several stretches of one file, the first counts it.
            return Losses(num_bytes=max(file.size, 1)) if start == 0 else Losses()
    if file.live is not None:
        return Losses(records=1)  # nobody knows how many rows would have come
    end = file.size if stop is None else stop
    try:
        packed = compression_of(file)
    except SourceError:
        packed = None
    if packed == "gzip" and read_to:
        bad = _gzip_fault(file)
        if bad is None:
            return Losses(cut_files=1)
        return Losses(num_bytes=max(file.size - bad, 1))
    return Losses(num_bytes=max(end - max(start, min(read_to, end)), 1))


def _gzip_fault(file: File) -> int | None:
    """Return the byte about which a gzip file is damaged; None where it ends too early, and is sound up to there."""
    unpacker, at = zlib.decompressobj(_GZIP), 0
    try:
        with open_stored(file) as stored:
            while piece := stored.read(_PIECE):
                while piece:
                    unpacker.decompress(piece)
                    piece = unpacker.unused_data
                    if unpacker.eof:
                        unpacker = zlib.decompressobj(_GZIP)
                at += _PIECE
    except (zlib.error, SourceError, OSError):
        return at
    return None
