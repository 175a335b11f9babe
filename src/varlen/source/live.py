"""The reader's end of rows that are given one by one while they are read (`serving.py`): a file that is a socket."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import BinaryIO, Protocol, cast

from varlen.errors import SourceError

END, FAILED = b"\x04\n", b"\x15"
"""The line behind the last row, and the beginning of one that says why there is no next row; no row begins so."""


class ArrowStream(Protocol):
    """Tables of any library, by Arrow's own interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the table's batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """What is known of rows before they come."""

    names: tuple[tuple[str, ...], ...]
    """Of the first rows' columns, row by row."""
    is_once: bool
    """Whether they can be iterated over once only."""


class _Lines:
    """The lines of a pass, as a file that is read from its beginning."""

    def __init__(self, where: str, path: str) -> None:
        import socket  # which few readers need

        self._where, self._socket = where, socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise SourceError(
                f"{where} can't be read any more: the loader that it was given to is closed; make another"
            ) from error
        self._file = self._socket.makefile("rb", 1 << 16)
        self._is_over = False

    def readline(self, limit: int = -1) -> bytes:
        """Return the next line; none behind the last row.

        Raises:
            SourceError: there is no next row, for a reason that is told, or nobody gives rows any more.
        """
        if self._is_over:
            return b""
        line = self._file.readline(limit)
        if line == END:
            self._is_over = True
            return b""
        if line.startswith(FAILED):
            raise SourceError(json.loads(line[len(FAILED) :]))
        if not line:
            raise SourceError(f"{self._where} ended in the middle: the process that gives its rows is gone")
        return line

    def close(self) -> None:
        """Take no more."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> _Lines:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def open_live(where: str, path: str) -> BinaryIO:
    """Begin a pass.

    Args:
        where: what the rows are called in messages.
        path: of the socket.

    Raises:
        SourceError: nobody gives rows there.
    """
    return cast(BinaryIO, _Lines(where, path))
