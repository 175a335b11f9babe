"""Packed `.npy` files of the releases up to 0.4, read without unpickling them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.files.flat import COLUMNS, LENGTHS, MASK, between, from_lists, joined, taken
from varlen.adapters.megatron.files.paths import Spec, resolve_packed
from varlen.adapters.megatron.files.permitted import Array
from varlen.adapters.megatron.files.pickled import Numbers, Reader
from varlen.adapters.megatron.files.reader import RowIds, RowReader, row_ids
from varlen.adapters.megatron.rows import PackedRows
from varlen.errors import DocumentsError, SourceError
from varlen.regular import open_regular, require_regular

_MOST_TIMES = 64
"""Numbers for each byte of a file, since rows may stand for one another: more is an attack."""
_BATCH_TOKENS = 1 << 20


def read_packed_npy(path: str | Path, *, masks: bool = True) -> PackedRows:
    """Read packed rows that `np.save` wrote as a list of dictionaries.

    Megatron-Bridge up to 0.3 packs into such files, and all its releases read them. They hold a pickle, which is read
    here opcode by opcode: nothing in it is run, looked up or called, and whatever isn't a list of rows is refused.

    Args:
        path: of the file.
        masks: read `loss_mask`; else it need not be there, and is 1 throughout.

    Raises:
        SourceError: it is missing, cut off, damaged, holds an opcode or a name that packed rows don't have, or no
            rows; says which, and where.
        DocumentsError: a row's boundaries, ids or mask are none; says which.

    Cost:
        One pass, and memory for twice the rows: 5 bytes a token each.
    """
    data = _content(path)
    with_header = _header(path)
    if with_header is None:
        raise SourceError(f"{path} isn't an array that np.save wrote, or is cut off; copy it again")
    shape, dtype, start = with_header
    if dtype != np.dtype(object):
        raise SourceError(f"{path} holds numbers ({dtype}), and no list of packed rows")
    value = Reader(data, start, str(path)).read()
    items = value.content.items() if isinstance(value, Array) and isinstance(value.content, Numbers) else None
    if items is None or len(shape) != 1 or len(items) != shape[0]:
        raise SourceError(
            f"{path} is damaged: it must hold a list of {shape} rows, but its pickle holds another"
        )
    del value
    if not items:
        raise SourceError(f"{path} holds no row; pack the data again")
    return _rows(items, str(path), _MOST_TIMES * len(data), masks=masks)


def _content(path: str | Path) -> npt.NDArray[np.uint8]:
    """Return a file's bytes, read as they are needed."""
    try:
        said = Path(path).stat()
        require_regular(said.st_mode)
        if said.st_size == 0:
            raise SourceError(f"{path} is empty (0 bytes); was it written to the end?")
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror or error}") from error


def _header(path: str | Path) -> tuple[tuple[int, ...], np.dtype[Any], int] | None:
    """Return shape and kind of an array, and where its content begins; None where it is no array."""
    with open(path, "rb", opener=open_regular) as file:
        try:
            version = np.lib.format.read_magic(file)
            read: Any = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read(file)
        except (ValueError, KeyError, EOFError, SyntaxError, TypeError, TokenError):
            return None
        return shape, dtype, file.tell()


def _rows(items: list[Any], path: str, most: int, *, masks: bool) -> PackedRows:
    """Return rows of the values that a pickle held; the values are given up on the way."""
    found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*COLUMNS, LENGTHS)}
    count = 0

    def where(row: int) -> str:
        return f"{path} row {row + 1:,}"

    for index, row in enumerate(items):
        items[index] = None
        if not isinstance(row, dict):
            raise DocumentsError(f"{where(index)} must be a dictionary with `input_ids`, got {_kind(row)}")
        for name in (*COLUMNS, LENGTHS):
            if name == LENGTHS and name not in row:
                continue
            if name == MASK and not masks:
                found[name].append(np.ones(len(found[COLUMNS[0]][-1]), np.int8))
                continue
            if name not in row:
                raise DocumentsError(
                    f"{where(index)} has no `{name}`; packed rows have `{'`, `'.join(COLUMNS)}`"
                )
            found[name].append(_values(row[name], name, where(index)))
            count += len(found[name][-1])
        if count > most:
            raise SourceError(
                f"{path} stands for more than {most:,} numbers in {most // _MOST_TIMES:,} bytes; it repeats its "
                "rows, and no packed file does"
            )
    if len(found[LENGTHS]) not in (0, len(items)):
        raise DocumentsError(
            f"{path}: {len(found[LENGTHS]):,} of {len(items):,} rows have `{LENGTHS}`; all must, or none"
        )
    return from_lists(found, where)


def _values(value: Any, name: str, where: str) -> npt.NDArray[Any]:
    """Return one row's numbers, small ones in a byte each."""
    array = value.array() if isinstance(value, Numbers) else None
    if isinstance(value, Array):
        content = value.content
        array = content.array() if isinstance(content, Numbers) else content
        if len(value.shape) != 1:
            array = None
    if array is None:
        raise DocumentsError(f"{where}: `{name}` must be a list of whole numbers, got {_kind(value)}")
    return array


def _kind(value: Any) -> str:
    """Name what a pickle held."""
    if isinstance(value, Numbers):
        return "a list with other values"
    names = {"str": "a string", "dict": "a dictionary", "int": "a number", "NoneType": "nothing"}
    return names.get(type(value).__name__, type(value).__name__)


class PackedNpy(RowReader):
    """Packed rows of `.npy` files, all in memory: that is what the format allows."""

    def __init__(self, spec: Spec, *, wait_s: float = 0.0, masks: bool = True) -> None:
        """Read the files.

        Args:
            spec: a file, a glob, a folder, or several.
            wait_s: seconds to wait for files that another node has just written to a network file system.
            masks: as of `read_packed_npy`.

        Raises:
            SourceError: nothing is there, or a file can't be read.
            DocumentsError: a row isn't a packed row.
        """
        self.paths = resolve_packed(spec, wait_s=wait_s)
        self._rows = joined([read_packed_npy(path, masks=masks) for path in self.paths])
        self.num_rows = self._rows.num_rows

    def rows(self, indices: RowIds) -> PackedRows:
        """Return some rows, in the order asked for.

        Args:
            indices: of rows over all files; repeated ones are given again, negative ones count from the end.
        """
        return taken(self._rows, row_ids(indices, self.num_rows))

    def batches(self) -> Iterator[PackedRows]:
        """Yield all rows in order, about a million tokens or one row at a time."""
        step = max(1, _BATCH_TOKENS * self.num_rows // max(len(self._rows.input_ids), 1))
        for start in range(0, self.num_rows, step):
            yield between(self._rows, start, min(start + step, self.num_rows))
