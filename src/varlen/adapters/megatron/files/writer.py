"""What every writer of packed rows does, whatever kind of file it writes: whole files or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from varlen.adapters.megatron.files.reader import as_stored, from_dicts
from varlen.adapters.megatron.rows import PackedRows
from varlen.errors import DocumentsError, SettingError
from varlen.files.ours import disk_faults, sync, unfinished

_ROWS_AT_A_TIME = 64
"""Rows given as dictionaries that are made flat at once."""


class WholeFiles(ABC):
    """Files that appear under their names, the last one last, when `close` returns; none if a `with` block raises."""

    def __init__(self, path: Path, *paths: Path) -> None:
        self.path, self._paths, self._is_done = path, paths, False
        self._partial = [unfinished(path) for path in self._paths]
        with disk_faults(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def _finish(self) -> None:
        """Write what is left, and close the files."""

    @abstractmethod
    def _give_up(self) -> None:
        """Close the files as they are."""

    def close(self) -> None:
        """Write what is left, and let the files appear.

        Raises:
            DocumentsError: nothing was written.
            SettingError: the disk is full.
        """
        if self._is_done:
            return
        try:
            with disk_faults(self.path):
                self._finish()
                for partial in self._partial:
                    sync(partial)
                for partial, path in zip(self._partial, self._paths):
                    partial.replace(path)
                sync(self.path.absolute().parent)
            self._is_done = True
        finally:
            self.abort()

    def abort(self) -> None:
        """Leave nothing, unless the files were closed."""
        if not self._is_done:
            self._is_done = True
            self._give_up()
        for partial in self._partial:
            partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the files, or leave none if the block raised."""
        if kind is None:
            self.close()
        else:
            self.abort()


class PackedWriter(WholeFiles):
    """What writes packed rows, streamed; the file appears when `close` returns."""

    def __init__(self, path: Path, *paths: Path) -> None:
        super().__init__(path, *paths)
        self.num_rows = self.num_tokens = 0
        self._has_lengths = False

    def write(self, rows: PackedRows) -> None:
        """Add rows.

        Args:
            rows: in the order in which they are to be read.

        Raises:
            DocumentsError: a row isn't a packed row; says which, counted over all that was written. Or only some rows
                know their lengths.
            SettingError: the disk is full, or the file is closed already.
        """
        if self._is_done:
            raise SettingError(f"{self.path} is closed; open another writer")
        if rows.num_rows == 0:
            return
        rows = as_stored(rows, self.num_rows)
        has_lengths = rows.seq_lengths is not None
        if self.num_rows and has_lengths != self._has_lengths:
            raise DocumentsError(
                f"{self.path}: the rows from {self.num_rows:,} on have {'' if has_lengths else 'no '}`seq_lengths`, "
                f"and those before have {'none' if has_lengths else 'them'}; give all or none"
            )
        self._has_lengths = has_lengths
        self._add(rows)
        self.num_rows += rows.num_rows
        self.num_tokens += len(rows.input_ids)

    @abstractmethod
    def _add(self, rows: PackedRows) -> None:
        """Write checked rows, or keep them for the next call."""


def write_dicts(writer: PackedWriter, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows given as dictionaries."""
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        some = rows[start : start + _ROWS_AT_A_TIME]
        writer.write(from_dicts(some, lambda row, start=start: f"row {start + row:,}"))  # type: ignore[misc]
