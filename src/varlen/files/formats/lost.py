"""Count what is lost where the rest of a file, or of a stretch, can't be read: in rows if known, else in bytes."""

from __future__ import annotations

from dataclasses import replace

from varlen.errors import SourceError
from varlen.files.formats import npz, tables
from varlen.files.losses import NO_LOSSES, Losses
from varlen.files.opening import TRUNCATED, compression_of, fault_of_gzip, open_stored
from varlen.files.paths import File
from varlen.files.retry import is_outside
from varlen.files.rows import Fault


def rest_of(
    file: File,
    error: SourceError,
    *,
    rows: int = 0,
    read_to: int = 0,
    start: int = 0,
    stop: int | None = None,
) -> Fault:
    """Return the fault for the rest of a file."""
    message = str(error)
    return Fault(
        where=file.path,
        why=f"(what is left of it): {message.removeprefix(f'{file.path} ')}",
        losses=_losses(file, error, rows, read_to, start, stop),
        raises=message,
        is_outside=is_outside(error),
    )


def _losses(file: File, error: SourceError, rows: int, read_to: int, start: int, stop: int | None) -> Losses:
    if file.format in ("parquet", "arrow", "npz"):
        try:
            count = npz.count_rows if file.format == "npz" else tables.count_rows
            return Losses(rows=max(count(file, start, stop) - rows, 0)) or Losses(records=1)
        except SourceError:
            # Of several stretches of one file, only the first counts it.
            return Losses(num_bytes=max(file.size, 1)) if start == 0 else NO_LOSSES
    if file.live is not None:
        return Losses(records=1)  # the number of rows that were lost is unknown
    end = file.size if stop is None else stop
    try:
        packed = compression_of(file)
    except SourceError:
        packed = None
    if packed is not None and read_to and TRUNCATED in str(error):
        return Losses(cut_files=1)
    if packed == "gzip" and read_to:
        try:
            with open_stored(replace(file, on_read=None)) as stored:
                read_to = fault_of_gzip(stored)
        except (SourceError, OSError):
            pass
    return Losses(num_bytes=max(end - max(start, min(read_to, end)), 1))
