"""`.npz` files of token ids: `input_ids` (or `ids`, `tokens`) end to end, `offsets`, and what goes with them.

Arrays are read straight from the archive, piece by piece; one that would need Python objects is refused, since
unpickling could run code.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from varlen.errors import SourceError, VarlenError
from varlen.source.files import File
from varlen.source.lists import list_column
from varlen.source.opening import open_seekable
from varlen.source.retry import first_line
from varlen.source.rows import Rows, listed

_BATCH_VALUES = 1 << 20
_SPELLINGS = {"ids": "input_ids", "tokens": "input_ids"}
_BOUNDARIES = ("offsets", "seq_lengths")
"""Arrays that hold no value per token."""


def column_names(file: File) -> list[str]:
    """Return the arrays of a file but for its boundaries, `ids` and `tokens` called `input_ids`.

    Raises:
        SourceError: the file isn't such an archive.
    """
    with _archive(file) as archive:
        return [name for name in _members(archive) if name not in _BOUNDARIES]


def read(file: File, wanted: Sequence[str]) -> Iterator[Rows]:
    """Yield the documents of a file as Arrow lists.

    Args:
        file: to be read.
        wanted: columns, of those that `column_names` gives.

    Raises:
        SourceError: the arrays don't fit each other, or the file can't be read.
    """
    with _archive(file) as archive:
        members = _members(archive)
        offsets = _offsets(archive, members, file)
        streams = {name: _Stream(archive, members[name], file) for name in wanted}
        wrong = [name for name, stream in streams.items() if stream.num_values != offsets[-1]]
        if wrong:
            raise SourceError(
                f"{file.path}: `{wrong[0]}` has {streams[wrong[0]].num_values:,} values, but `offsets` ends at "
                f"{int(offsets[-1]):,}"
            )
        document = 0
        while document < len(offsets) - 1:
            enough = int(np.searchsorted(offsets, offsets[document] + _BATCH_VALUES))
            stop = min(max(enough, document + 1), len(offsets) - 1)
            count = int(offsets[stop] - offsets[document])
            if count >= 2**31:
                raise SourceError(f"{file.path} row {document + 1:,} holds {count:,} tokens; cut it")
            bounds = offsets[document : stop + 1] - offsets[document]
            columns = {name: list_column(stream.take(count), bounds) for name, stream in streams.items()}
            yield Rows(columns=columns, numbers=range(document + 1, stop + 1), path=file.path)
            document = stop


def count_rows(file: File, _start: int, _stop: int | None) -> int:
    """Count the documents of a file.

    Raises:
        SourceError: its offsets can't be read.
    """
    with _archive(file) as archive:
        return len(_offsets(archive, _members(archive), file)) - 1


def _members(archive: zipfile.ZipFile) -> dict[str, str]:
    """Return the member that each array stands in."""
    found = {name.removesuffix(".npy"): name for name in archive.namelist()}
    return {_SPELLINGS.get(name, name): member for name, member in found.items()}


def _offsets(archive: zipfile.ZipFile, members: dict[str, str], file: File) -> npt.NDArray[np.int64]:
    """Return where documents begin, checked."""
    if "offsets" not in members:
        raise SourceError(
            f"{file.path} has no array `offsets` (where documents begin); it has {listed(list(members))}"
        )
    stream = _Stream(archive, members["offsets"], file)
    offsets = stream.take(stream.num_values).astype(np.int64)
    if len(offsets) == 0 or offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        raise SourceError(f"{file.path}: `offsets` must begin with 0 and never fall")
    return offsets


class _Stream:
    """One array of an archive, taken from its beginning to its end."""

    def __init__(self, archive: zipfile.ZipFile, member: str, file: File) -> None:
        self._stream: IO[bytes] = archive.open(member)
        self._member, self._path = member, file.path
        version = np.lib.format.read_magic(self._stream)
        read_header: Any = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, self._dtype = read_header(self._stream)
        if self._dtype.kind not in "iub" or len(shape) != 1 or shape[0] < 0:
            raise SourceError(
                f"{file.path}: `{member.removesuffix('.npy')}` must be one row of whole numbers, "
                f"got {self._dtype} of shape {list(shape)}"
            )
        self.num_values = int(shape[0])

    def take(self, count: int) -> npt.NDArray[Any]:
        """Return the next values."""
        wanted = count * self._dtype.itemsize
        content = self._stream.read(wanted)
        if len(content) < wanted:
            raise SourceError(f"{self._path}: `{self._member.removesuffix('.npy')}` ends too early")
        values = np.frombuffer(content, dtype=self._dtype)
        return values.astype(self._dtype.newbyteorder("=")) if not self._dtype.isnative else values


@contextmanager
def _archive(file: File) -> Iterator[zipfile.ZipFile]:
    """Open an archive; whatever is wrong with it names the file."""
    with open_seekable(file) as stored:
        try:
            with zipfile.ZipFile(stored) as archive:
                yield archive
        except VarlenError:
            raise
        except Exception as error:  # zipfile, its four ways to pack and numpy's headers raise a dozen kinds
            said = first_line(error)
            why = (
                f"is not a readable .npz file: {said}"
                if file.size
                else "is empty (0 bytes), not an .npz file"
            )
            raise SourceError(f"{file.path} {why}") from error
