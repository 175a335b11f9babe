"""Lengths that were counted before: an `.npy` or `.npz` file, or a text of one whole number a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.errors import SourceError

if TYPE_CHECKING:
    import numpy.typing as npt

    from varlen.store.lengths import Lengths

_MOST_DIGITS = 18
"""Of a number that int64 holds."""


def counted(data: Sequence[str]) -> Lengths | None:
    """Return the lengths that one file holds, or None where arguments name something else.

    Args:
        data: as given.

    Raises:
        SourceError: an `.npy` file of something else than lengths, or a text of which half the lines are lengths.
    """
    if len(data) != 1 or not Path(data[0]).is_file():
        return None
    path = Path(data[0])
    if path.suffix == ".npz":
        return _stored(path)
    return _array(path) if path.suffix == ".npy" else _lines(path) if path.suffix == ".txt" else None


def _array(path: Path) -> Lengths:
    """Read an array of numpy's."""
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} is not a readable .npy file: {error}") from error
    return _checked(path, found)


def _stored(path: Path) -> Lengths | None:
    """Read arrays of numpy's by name; None where they are documents."""
    import zipfile
    import zlib

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            if "lengths" in arrays.files:
                return _checked(path, arrays["lengths"])
            names = arrays.files
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SourceError(f"{path} is not a readable .npz file: {error}") from error
    if {"input_ids", "ids", "tokens"} & set(names):
        return None
    raise SourceError(
        f"{path} must hold lengths as `lengths`, or documents as `input_ids` and `offsets`; it holds "
        f"{', '.join(f'`{name}`' for name in names[:5]) or 'nothing'}"
    )


def _checked(path: Path, found: npt.NDArray[Any]) -> Lengths:
    """Take an array as lengths."""
    import numpy as np

    from varlen.store.lengths import Lengths

    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise SourceError(
            f"{path} must hold lengths, a row of whole numbers from 0; it holds {found.dtype} of shape {found.shape}"
        )
    below = np.flatnonzero(found < 0)
    if below.size:
        raise SourceError(
            f"{path} must hold lengths from 0; number {below[0]:,} is {found[below[0]]:,} ({below.size:,} of "
            f"{found.size:,} are below 0)"
        )
    return Lengths(lengths=found.astype(np.int64), targets=None, excerpts={}, skipped=(), are_counted=True)


def _lines(path: Path) -> Lengths | None:
    """Read a text of numbers; None where most lines are something else, and the text a document.

    Raises:
        SourceError: half the lines or more are lengths, and some are not.
    """
    import numpy as np

    from varlen.store.lengths import Lengths

    try:
        with path.open(encoding="ascii") as file:
            lines = [(number, line.strip()) for number, line in enumerate(file, 1) if line.strip()]
    except UnicodeDecodeError:
        return None
    wrong = [(number, words) for number, words in lines if not words.isdigit() or len(words) > _MOST_DIGITS]
    if not lines or 2 * len(wrong) > len(lines):
        return None
    if wrong:
        number, words = wrong[0]
        raise SourceError(
            f"{path} holds a length a line, but line {number:,} is {words[:40]!r}, no whole number from 0 "
            f"({len(wrong):,} of {len(lines):,} lines are none); mend or remove them, or give a document as .jsonl"
        )
    found = np.array([int(words) for _, words in lines], np.int64)
    return Lengths(lengths=found, targets=None, excerpts={}, skipped=(), are_counted=True)
