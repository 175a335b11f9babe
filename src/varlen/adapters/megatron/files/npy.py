"""Packed `.npy` files of the releases up to 0.4, read without unpickling them."""

from __future__ import annotations

import math
import os
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.adapters.megatron.files import kernels
from varlen.adapters.megatron.files.reader import (
    COLUMNS,
    LENGTHS,
    MASK,
    PackedReader,
    Spec,
    between,
    from_lists,
    joined,
    resolve_packed,
    taken,
)
from varlen.adapters.megatron.rows import PackedRows
from varlen.errors import DocumentsError, SourceError
from varlen.regular import open_regular
from varlen.types import IntArray

_CORES = ("numpy.core", "numpy._core")
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
        One pass, and memory for twice the rows: 5 bytes per token each.
    """
    data, start, shape = _opened(path)
    value = Reader(data, start, str(path)).read()
    items = _each(value.content) if isinstance(value, Array) and isinstance(value.content, list) else None
    if items is None or len(shape) != 1 or len(items) != shape[0]:
        raise SourceError(f"{path} is damaged: it must hold a list of {shape} rows, and its pickle doesn't")
    del value
    if not items:
        raise SourceError(f"{path} holds no row; pack the data again")
    return _rows(items, str(path), _MOST_TIMES * len(data), masks=masks)


def _opened(path: str | Path) -> tuple[npt.NDArray[np.uint8], int, tuple[int, ...]]:
    """Return a file's bytes, read as they are needed, where its pickle begins, and the shape of its array."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise SourceError(f"{path} is empty (0 bytes); was it written to the end?")
            data = np.memmap(file, dtype=np.uint8, mode="r")
            file.seek(0)
            major, minor = np.lib.format.read_magic(file)
            shape, _, dtype = getattr(np.lib.format, f"read_array_header_{major}_{minor}")(file)
            start = file.tell()
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, AttributeError, EOFError, SyntaxError, TypeError, TokenError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{path} isn't an array that np.save wrote, or is cut off; copy it again") from None
    if dtype != np.dtype(object):
        raise SourceError(f"{path} holds numbers ({dtype}), and no list of packed rows")
    return data, start, shape


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
                raise DocumentsError(f"{where(index)} has no `{name}`; rows have `{'`, `'.join(COLUMNS)}`")
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
    content = value
    if isinstance(value, Array):
        content = value.content if len(value.shape) == 1 else None
    found = _flat(content) if isinstance(content, list) else content
    if not isinstance(found, np.ndarray):
        raise DocumentsError(f"{where}: `{name}` must be a list of whole numbers, got {_kind(value)}")
    return found


def _flat(parts: list[Any]) -> npt.NDArray[Any] | None:
    """Return a list as one flat array of whole numbers, small ones in a byte each; None where some are none."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    if not all(isinstance(part, np.ndarray) or type(part) in (int, bool) for part in parts):
        return None
    try:
        return np.array(_each(parts), dtype=np.int64)
    except OverflowError:
        return None


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list with other values"
    names = {"str": "a string", "dict": "a dictionary", "int": "a number", "NoneType": "nothing"}
    return names.get(type(value).__name__, type(value).__name__)


class PackedNpy(PackedReader):
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

    def _rows_of(self, ids: IntArray) -> PackedRows:
        return taken(self._rows, ids)

    def batches(self) -> Iterator[PackedRows]:
        """Yield all rows in order, about a million tokens or one row at a time."""
        step = max(1, _BATCH_TOKENS * self.num_rows // max(len(self._rows.input_ids), 1))
        for start in range(0, self.num_rows, step):
            yield between(self._rows, start, min(start + step, self.num_rows))


# A pickle is a program. This reads its opcodes one by one, knows those that lists of dictionaries of numbers and
# arrays are written with (protocols 2 to 5, numpy 1 and 2), and builds plain values: no name in the pickle is looked
# up or called. Any other opcode or name is refused, with its place. Numbers go to flat arrays as they are read: on
# the stack and in a list an array stands for the numbers in it.

_RUN = 4096
"""Numbers that are read at once; pickles hold them by the thousand."""
_REFERENCE_S_A_BYTE = 2e-7
_OPCODES = {ord(op.code): op.name for op in pickletools.opcodes}


class Name(str):
    """A permitted name, apart from the strings of the pickle."""

    __slots__ = ()


@dataclass(slots=True)
class Dtype:
    """A kind of numbers, or of objects."""

    kind: str
    is_swapped: bool = False

    def of(self, content: Any) -> npt.NDArray[Any]:
        """Return the numbers that some bytes are."""
        if self.kind == "O" or not isinstance(content, bytes):
            raise TypeError
        return np.frombuffer(content, np.dtype(self.kind).newbyteorder(">" if self.is_swapped else "<"))


@dataclass(slots=True)
class Array:
    """An array in the making; `content` is a flat array of numbers, or the list of an array of objects."""

    content: Any = None
    shape: tuple[int, ...] = (0,)

    def fill(self, shape: Any, content: npt.NDArray[Any]) -> Array:
        """Take numbers, as many as the shape says."""
        self.shape, self.content = tuple(int(size) for size in shape), content
        if math.prod(self.shape) != len(content):
            raise ValueError
        return self


_NAMES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    *((f"{core}.multiarray", name) for core in _CORES for name in ("_reconstruct", "scalar")),
    *((f"{core}.numeric", "_frombuffer") for core in _CORES),
}
"""The names that a pickle of packed rows may hold."""
_KINDS = {"O", "b", "b1", *(f"{kind}{width}" for kind in "iu" for width in (1, 2, 4, 8))}


class Reader:
    """The state of reading one pickle: a stack, those below the marks, and what was remembered."""

    def __init__(self, data: npt.NDArray[np.uint8], start: int, path: str) -> None:
        self._data, self._at, self.path = data, start, path
        self._view = memoryview(data)  # type: ignore[arg-type]
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._buffer = np.empty(_RUN, dtype=np.int32)
        with jit.sized(_REFERENCE_S_A_BYTE * len(data)):
            self._number_run = kernels.number_run

    def read(self) -> Any:
        """Return what the pickle holds."""
        view, size = self._view, len(self._view)
        while self._at < size:
            begun, code = self._at, view[self._at]
            if code in _NUMBERS:
                self._numbers(begun)
                continue
            self._at += 1
            step = _STEPS.get(code)
            if step is None and code != _STOP:
                raise self._refused(begun, code)
            try:
                if step is None:
                    return self.pop()
                step(self, begun)
            except SourceError:
                raise
            except (LookupError, TypeError, ValueError, OverflowError, MemoryError) as error:
                raise SourceError(
                    f"{self.path} is damaged at byte {begun:,}: {_opcode(code)} doesn't fit what stands before it"
                ) from error
        raise self._cut()

    def _refused(self, at: int, code: int) -> SourceError:
        return SourceError(
            f"{self.path} holds the pickle opcode {_opcode(code)} at byte {at:,}, which packed rows don't "
            "have; it was not run: use the file only from a source that you trust, or pack the data again as Parquet"
        )

    def _refused_name(self, at: int, what: str) -> SourceError:
        return SourceError(
            f"{self.path} names {what} at byte {at:,} of its pickle, which packed rows don't have; it was "
            "not looked up or called: use the file only from a source that you trust, or pack the data again as "
            "Parquet"
        )

    def _cut(self) -> SourceError:
        return SourceError(
            f"{self.path} is cut off at byte {len(self._view):,}, in its pickle; copy it again"
        )

    def _numbers(self, begun: int) -> None:
        count, self._at = self._number_run(self._data, begun, self._buffer)
        if count == 0:
            raise self._cut()
        values = self._buffer[:count]
        is_small = int(values.min()) >= -128 and int(values.max()) <= 127
        self.stack.append(values.astype(np.int8) if is_small else values.copy())

    def take(self, size: int) -> memoryview:
        """Return the next bytes."""
        if size < 0 or self._at + size > len(self._view):
            raise self._cut()
        found = self._view[self._at : self._at + size]
        self._at += size
        return found

    def number(self, size: int) -> int:
        """Return the next bytes as a number from 0 on."""
        return int.from_bytes(self.take(size), "little")

    def counted(self, size: int) -> bytes:
        """Return the bytes whose number the next bytes are."""
        return bytes(self.take(self.number(size)))

    def text(self, size: int) -> str:
        """Return the text whose number of bytes the next bytes are."""
        return self.counted(size).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        """Return text up to the end of a line."""
        window = bytes(self._view[self._at : self._at + 1024])
        end = window.find(b"\n")
        if end < 0:
            raise self._cut()
        self._at += end + 1
        return window[:end].decode("utf-8")

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def pop(self) -> Any:
        """Take one value off the stack, of numbers the last one."""
        top = self.stack.pop()
        if not isinstance(top, np.ndarray):
            return top
        if len(top) > 1:
            self.stack.append(top[:-1])
        return int(top[-1])

    def last(self, count: int) -> list[Any]:
        """Take values off the stack, in the order in which they were put there."""
        return [self.pop() for _ in range(count)][::-1]

    def mark(self) -> None:
        """Begin another stack."""
        self._below.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        """Take everything off the stack down to the last mark; numbers stay arrays."""
        found, self.stack = self.stack, self._below.pop()
        return found

    def remember(self, key: int) -> None:
        """Remember what lies on top."""
        top = self.stack[-1]
        self.memo[key] = int(top[-1]) if isinstance(top, np.ndarray) else top

    def append(self, values: list[Any]) -> None:
        """Add values to the list on top."""
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        target += values

    def set(self, values: list[Any]) -> None:
        """Add keys and values to the dictionary on top."""
        target, each = self.stack[-1], _each(values)
        if type(target) is not dict or len(each) % 2 or not all(type(key) is str for key in each[::2]):
            raise TypeError
        target.update(zip(each[::2], each[1::2]))

    def begin(self, version: int) -> None:
        """Require a protocol that is read."""
        if not 2 <= version <= 5:
            raise SourceError(f"{self.path} is a pickle of protocol {version}; 2 to 5 are read")

    def named(self, at: int, module: Any, name: Any) -> None:
        """Put a permitted name on the stack."""
        if type(module) is not str or type(name) is not str:
            raise ValueError
        if (module, name) not in _NAMES:
            raise self._refused_name(at, f"{module}.{name}")
        self.push(Name(name))

    def reduce(self, at: int) -> None:
        """Make what a call would have made, if it is one of those permitted."""
        name, arguments = self.last(2)
        if not isinstance(name, Name) or type(arguments) is not tuple:
            raise self._refused(at, 0x52)
        self.push(self._made(at, name, *arguments))

    def _made(self, at: int, name: Name, *arguments: Any) -> Any:
        """Return what a call of a permitted name stands for."""
        if name == "dtype":
            kind = str(arguments[0])
            kind = "O" if kind in ("O", "O8", "O4", "|O") else kind.lstrip("|<>=")
            if kind not in _KINDS:
                raise self._refused_name(at, f"numbers of the kind {kind!r}")
            return Dtype(kind)
        if name == "_reconstruct" and arguments[0] == "ndarray":
            return Array()
        if name == "scalar":
            kind, content = arguments
            return int(_dtype(kind).of(content)[0])
        if name == "encode":
            text, encoding = arguments
            if encoding != "latin1":
                raise ValueError
            return str(text).encode("latin1")
        if name == "_frombuffer":
            content, kind, shape, _ = arguments
            return Array().fill(shape, _dtype(kind).of(content))
        if name == "OrderedDict" and not arguments:
            return {}
        raise self._refused_name(at, f"a call of {name}")

    def build(self, at: int) -> None:
        """Give an array its content, or a kind of numbers its byte order."""
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, Array | Dtype) or type(state) is not tuple:
            raise self._refused(at, 0x62)
        if isinstance(target, Dtype):
            if any(part is not None for part in state[2:5]) or state[1] not in ("<", ">", "|", "="):
                raise self._refused_name(at, "numbers with fields")
            target.is_swapped = state[1] == ">"
            return
        _, shape, kind, _, content = state
        if _dtype(kind).kind == "O":
            target.shape, target.content = tuple(shape), content
        else:
            target.fill(shape, kind.of(content))


def _dtype(kind: Any) -> Dtype:
    if not isinstance(kind, Dtype):
        raise TypeError
    return kind


def _opcode(code: int) -> str:
    return _OPCODES.get(code, f"{code:#04x}, which is unknown")


def _each(parts: list[Any]) -> list[Any]:
    """Return values one by one."""
    return [one for part in parts for one in (part.tolist() if isinstance(part, np.ndarray) else [part])]


_STOP = 0x2E
_NUMBERS = frozenset(b"KMJ\x88\x89")
_STEPS: dict[int, Callable[[Reader, int], Any]] = {
    0x80: lambda r, _: r.begin(r.number(1)),
    0x95: lambda r, _: r.take(8),  # FRAME
    0x28: lambda r, _: r.mark(),
    0x30: lambda r, _: r.pop(),
    0x31: lambda r, _: r.to_mark(),
    0x4E: lambda r, _: r.push(None),
    0x8A: lambda r, _: r.push(int.from_bytes(r.counted(1), "little", signed=True)),
    0x58: lambda r, _: r.push(r.text(4)),
    0x8C: lambda r, _: r.push(r.text(1)),
    0x8D: lambda r, _: r.push(r.text(8)),
    0x42: lambda r, _: r.push(r.counted(4)),
    0x43: lambda r, _: r.push(r.counted(1)),
    0x8E: lambda r, _: r.push(r.counted(8)),
    0x96: lambda r, _: r.push(r.counted(8)),  # BYTEARRAY8
    0x5D: lambda r, _: r.push([]),
    0x7D: lambda r, _: r.push({}),
    0x29: lambda r, _: r.push(()),
    0x74: lambda r, _: r.push(tuple(_each(r.to_mark()))),
    0x85: lambda r, _: r.push(tuple(r.last(1))),
    0x86: lambda r, _: r.push(tuple(r.last(2))),
    0x87: lambda r, _: r.push(tuple(r.last(3))),
    0x61: lambda r, _: r.append(r.last(1)),
    0x65: lambda r, _: r.append(r.to_mark()),
    0x73: lambda r, _: r.set(r.last(2)),
    0x75: lambda r, _: r.set(r.to_mark()),
    0x71: lambda r, _: r.remember(r.number(1)),
    0x72: lambda r, _: r.remember(r.number(4)),
    0x94: lambda r, _: r.remember(len(r.memo)),
    0x68: lambda r, _: r.push(r.memo[r.number(1)]),
    0x6A: lambda r, _: r.push(r.memo[r.number(4)]),
    0x63: lambda r, at: r.named(at, r.line(), r.line()),
    0x93: lambda r, at: r.named(at, *r.last(2)),
    0x52: lambda r, at: r.reduce(at),
    0x62: lambda r, at: r.build(at),
}
"""What each opcode that is permitted does; no other does anything."""
