"""Tables that are kept for the next time: beside the data, else in the user's cache folder, else in memory alone.

What a table depends on is in the name of its file, which has our mark and the SHA-256 of the numbers before
them: so one that is found is right, or is no table at all. One of ours that is damaged is written anew; what somebody
has laid there stays.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from varlen import __version__
from varlen.files.ours import is_there
from varlen.files.token_tables import unfinished
from varlen.regular import open_regular
from varlen.store.tokens import TokenDocuments
from varlen.text.tokenizer import digest
from varlen.types import IntArray

_MARK = b"varlen t"
_HEAD_BYTES = len(_MARK) + 32


class KeptTable:
    """Where a table of int64 is kept, if anywhere."""

    def __init__(self, stores: Sequence[TokenDocuments], num_parts: Sequence[int], depends_on: Any) -> None:
        """Name it.

        Args:
            stores: of which it tells; it lies beside the first.
            num_parts: of each, that it tells of.
            depends_on: what else it depends on, for JSON.
        """
        marks = [store.fingerprint_at(parts) for store, parts in zip(stores, num_parts)]
        folders = [stores[0].tables, _cache_folder()]
        if None in marks:
            folders = []  # the data has no name
        told = json.dumps([__version__, marks, *num_parts, depends_on], sort_keys=True)
        self._paths = [folder / f"{digest(told)}.table" for folder in folders if folder is not None]

    def read(self, is_right: Callable[[IntArray], bool], columns: int | None = None) -> IntArray | None:
        """Return the table; None where there is none, or a damaged one.

        Args:
            is_right: whether an array can be it.
            columns: of a table of two dimensions.
        """
        for path in self._paths:
            try:
                with open(path, "rb", opener=open_regular) as file:
                    content = file.read()
            except (OSError, MemoryError):
                continue
            said, body = content[:_HEAD_BYTES], content[_HEAD_BYTES:]
            if len(body) % (8 * (columns or 1)) or _MARK + hashlib.sha256(body).digest() != said:
                continue
            table: IntArray = np.frombuffer(body, dtype="<i8").astype(np.int64)
            if columns is not None:
                table = table.reshape(-1, columns)
            if is_right(table):
                return table
        return None

    def write(self, table: IntArray) -> None:
        """Keep it whole, or not at all, where that can be done."""
        any(_write(path, table) for path in self._paths)


def _cache_folder() -> Path | None:
    """Return where tables go that can't lie beside their index."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:  # a user without a home
        return None
    return Path(home) / "varlen" / "tables"


def _write(path: Path, table: IntArray) -> bool:
    """Write a table whole or not at all; returns whether it was."""
    if is_there(path) and not _is_ours(path):
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = unfinished(path)
        try:
            content = table.astype("<i8").tobytes()
            part.write_bytes(_MARK + hashlib.sha256(content).digest() + content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _is_ours(path: Path) -> bool:
    """Return whether a file carries our mark, or nothing; a link doesn't."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return not path.is_symlink() and file.read(len(_MARK)) in (_MARK, b"")
    except OSError:
        return False
