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

from varlen.errors import SourceError, VarlenError, described
from varlen.files.columns import DOCUMENT_FIELDS
from varlen.files.opening import open_seekable, other_content
from varlen.files.paths import File
from varlen.files.rows import Rows, listed
from varlen.files.token_tables import list_column

_BATCH_VALUES = 1 << 20
_NARROW = np.dtype(np.int32)
_SPELLINGS = {"ids": "input_ids", "tokens": "input_ids"}
_BOUNDARIES = ("offsets", "seq_lengths")  # arrays without a value per token


def column_names(file: File) -> list[str]:
    """Return the array names except boundaries, with `ids` and `tokens` as `input_ids`."""
    with _archive(file) as archive:
        return [name for name in _members(archive) if name not in _BOUNDARIES]


def read(file: File, wanted: Sequence[str]) -> Iterator[Rows]:
    """Yield the documents of a file as Arrow lists."""
    with _archive(file) as archive:
        members = _members(archive)
        _, total = _checked(archive, members, file)
        streams = {name: _Stream(archive, members[name], file) for name in wanted}
        wrong = [name for name, stream in streams.items() if stream.num_values != total]
        if wrong:
            raise SourceError(
                f"{file.path}: `{wrong[0]}` has {streams[wrong[0]].num_values:,} values, but `offsets` ends at "
                f"{total:,}"
            )
        document = 0
        for bounds in _bounds(_Stream(archive, members["offsets"], file)):
            count, stop = int(bounds[-1]), document + len(bounds) - 1
            if count >= 2**31:
                raise SourceError(f"{file.path} row {document + 1:,} holds {count:,} tokens; cut it")
            columns = {name: list_column(stream.take(count), bounds) for name, stream in streams.items()}
            yield Rows(columns=columns, numbers=range(document + 1, stop + 1), path=file.path)
            document = stop


def count_rows(file: File, _start: int, _stop: int | None) -> int:
    """Count the documents of a file."""
    with _archive(file) as archive:
        return _checked(archive, _members(archive), file)[0]


def _members(archive: zipfile.ZipFile) -> dict[str, str]:
    """Return the archive member of each array."""
    arrays = {name.removesuffix(".npy"): name for name in archive.namelist()}
    return {_SPELLINGS.get(name, name): member for name, member in arrays.items()}


def _checked(archive: zipfile.ZipFile, members: dict[str, str], file: File) -> tuple[int, int]:
    """Validate the offsets piece by piece; return the number of documents and of values."""
    if "offsets" not in members:
        raise SourceError(
            f"{file.path} has no array `offsets` (where documents begin); it has {listed(list(members))}"
        )
    last, is_sound, begins = 0, False, True
    stream = _Stream(archive, members["offsets"], file)
    for piece in _pieces(stream):
        is_sound = (
            (not begins or piece[0] == 0) and piece[0] >= last and bool((piece[1:] >= piece[:-1]).all())
        )
        if not is_sound:
            break
        last, begins = int(piece[-1]), False
    if not is_sound:
        raise SourceError(f"{file.path}: `offsets` must begin with 0 and never fall")
    return stream.num_values - 1, last


def _pieces(stream: _Stream) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the values of an array in pieces."""
    for start in range(0, stream.num_values, _BATCH_VALUES):
        yield stream.take(min(_BATCH_VALUES, stream.num_values - start)).astype(np.int64)


def _bounds(stream: _Stream) -> Iterator[npt.NDArray[np.int64]]:
    """Yield offsets, from 0, of groups of documents with few values in total, or of one with many."""
    last = np.zeros(0, dtype=np.int64)
    for piece in _pieces(stream):
        offsets = np.concatenate([last, piece])
        first = 0
        while first < len(offsets) - 1:
            enough = int(np.searchsorted(offsets, offsets[first] + _BATCH_VALUES))
            stop = min(max(enough, first + 1), len(offsets) - 1)
            yield offsets[first : stop + 1] - offsets[first]
            first = stop
        last = offsets[-1:]


class _Stream:
    """One array of an archive, read from beginning to end."""

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
        if archive.getinfo(member).file_size < self.num_values * self._dtype.itemsize:
            raise self._too_short()

    def _too_short(self) -> SourceError:
        return SourceError(f"{self._path}: `{self._member.removesuffix('.npy')}` ends too early")

    def take(self, count: int) -> npt.NDArray[Any]:
        """Return the next values; many of them as int32 if they fit, in half the space."""
        if count <= _BATCH_VALUES or self._dtype.itemsize <= _NARROW.itemsize:
            return self._next(count)
        values: npt.NDArray[Any] = np.empty(count, dtype=_NARROW)
        for start in range(0, count, _BATCH_VALUES):
            some = self._next(min(_BATCH_VALUES, count - start))
            if values.dtype == _NARROW and (some > np.iinfo(_NARROW).max).any() | (some < 0).any():
                values = values.astype(some.dtype)  # they are reported where ids are checked
            values[start : start + len(some)] = some
        return values

    def _next(self, count: int) -> npt.NDArray[Any]:
        wanted = count * self._dtype.itemsize
        content = self._stream.read(wanted)
        if len(content) < wanted:
            raise self._too_short()
        values = np.frombuffer(content, dtype=self._dtype)
        return values.astype(self._dtype.newbyteorder("=")) if not self._dtype.isnative else values


@contextmanager
def _archive(file: File) -> Iterator[zipfile.ZipFile]:
    """Open an archive; errors name the file."""
    with open_seekable(file) as stored:
        try:
            with zipfile.ZipFile(stored) as archive:
                yield archive
        except VarlenError:
            raise
        except Exception as error:  # zipfile, its four compressions and numpy's headers raise a dozen kinds
            if (other := other_content(file, DOCUMENT_FIELDS)) is not None:
                raise SourceError(other) from error
            message = described(error)
            why = (
                f"is not a readable .npz file: {message}"
                if file.size
                else "is empty (0 bytes), not an .npz file"
            )
            raise SourceError(f"{file.path} {why}") from error
