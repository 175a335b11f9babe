"""Packed `.npy` files of the releases up to 0.4, read without unpickling them."""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Iterator
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
    RowIds,
    RowReader,
    Spec,
    between,
    from_lists,
    joined,
    resolve_packed,
    row_ids,
    taken,
)
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


# Read a pickle of lists, dictionaries and numbers without running anything in it.
#
# A pickle is a program. This reads its opcodes one by one, knows those that lists of dictionaries of numbers
# and arrays are written with (protocols 2 to 5, numpy 1 and 2), and builds plain values: no name in the
# pickle is looked up or called. Whatever else stands there is refused by its name and place. Numbers go to
# flat arrays as they are read.

_RUN = 4096
"""Numbers that are read at once; pickles hold them by the thousand."""
_REFERENCE_S_A_BYTE = 2e-7
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}
_MARK = object()


class Run:
    """Numbers that stand one after the other, as a flat array: of a stack, or of a list."""

    __slots__ = ("values",)

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values


class Numbers:
    """A list in the making: runs of numbers and other values, in order."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def extend(self, parts: list[Any]) -> None:
        """Add values; those that are single numbers stay so until the list is asked for."""
        self.parts += parts

    def items(self) -> list[Any]:
        """Return every value by itself."""
        return [
            item
            for part in self.parts
            for item in (part.values.tolist() if isinstance(part, Run) else [part])
        ]

    def array(self) -> npt.NDArray[Any] | None:
        """Return the values as one flat array of whole numbers; None where some are none."""
        if all(isinstance(part, Run) for part in self.parts):
            arrays = [part.values for part in self.parts]
            return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
        if not all(isinstance(part, Run) or type(part) in (int, bool) for part in self.parts):
            return None
        try:
            return np.array(self.items(), dtype=np.int64)
        except OverflowError:
            return None


class Reader:
    """The state of reading one pickle: a stack, marks on it, and what was remembered."""

    def __init__(self, data: npt.NDArray[np.uint8], start: int, path: str) -> None:
        """Begin (`data`: uint8, the whole file)."""
        self._data, self._at, self._path = data, start, path
        self._view = memoryview(data)  # type: ignore[arg-type]
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
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
                raise self.refused(begun, code)
            try:
                if step is None:
                    return self._pop()
                step(self, begun)
            except (UnfitError, LookupError, TypeError, ValueError, OverflowError, MemoryError) as error:
                if isinstance(error, SourceError):
                    raise
                raise SourceError(
                    f"{self._path} is damaged at byte {begun:,}: {_name(code)} doesn't fit what stands before it"
                ) from error
        raise self._cut()

    def refused(self, at: int, code: int) -> SourceError:
        """Say that an opcode isn't permitted."""
        return SourceError(
            f"{self._path} holds the pickle opcode {_name(code)} at byte {at:,}, which packed rows don't "
            "have; it was not run: take the file only from who packed it, or pack the data again as Parquet"
        )

    def refuse(self, at: int, what: str) -> SourceError:
        """Say that a name isn't permitted."""
        return SourceError(
            f"{self._path} names {what} at byte {at:,} of its pickle, which packed rows don't have; it was "
            "not looked up or called: take the file only from who packed it, or pack the data again as Parquet"
        )

    def _cut(self) -> SourceError:
        return SourceError(
            f"{self._path} is cut off: its pickle goes on behind byte {len(self._view):,}; copy it again"
        )

    def _numbers(self, begun: int) -> None:
        """Read the numbers from here on."""
        count, self._at = self._number_run(self._data, begun, self._buffer)
        if count == 0:
            raise self._cut()
        values = self._buffer[:count]
        least, most = int(values.min()), int(values.max())
        is_small = least >= -128 and most <= 127
        self._stack.append(Run(values.astype(np.int8) if is_small else values.copy()))

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
        self._stack.append(value)

    def _pop(self) -> Any:
        """Take one value off the stack, of a run its last number."""
        top = self._stack.pop()
        if top is _MARK:
            raise IndexError
        if isinstance(top, Run):
            value = int(top.values[-1])
            if len(top.values) > 1:
                self._stack.append(Run(top.values[:-1]))
            return value
        return top

    def top(self) -> Any:
        """Return what lies on top, which isn't a number."""
        if self._stack[-1] is _MARK:
            raise IndexError
        return self._stack[-1]

    def pop(self, count: int = 1) -> list[Any]:
        """Take values off the stack, in the order in which they were put there."""
        return [self._pop() for _ in range(count)][::-1]

    def to_mark(self) -> list[Any]:
        """Take everything off the stack down to the last mark; runs stay runs."""
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def remember(self, key: int | None = None) -> None:
        """Remember what lies on top."""
        top = self.top()
        self._memo[len(self._memo) if key is None else key] = (
            int(top.values[-1]) if isinstance(top, Run) else top
        )

    def recall(self, key: int) -> None:
        """Put what was remembered on the stack."""
        self._stack.append(self._memo[key])

    def reduce(self, at: int) -> None:
        """Make what a call would have made, if it is one of those permitted."""
        name, arguments = self.pop(2)
        if not isinstance(name, str) or name not in PERMITTED.values() or type(arguments) is not tuple:
            raise self.refused(at, 0x52)
        self.push(reduce(name, [_plain(value) for value in arguments], lambda what: self.refuse(at, what)))

    def build(self, at: int) -> None:
        """Give an array or a kind of numbers its content."""
        (state,) = self.pop()
        if not isinstance(self.top(), Array | Dtype) or type(state) is not tuple:
            raise self.refused(at, 0x62)
        build(self.top(), [_plain(value) for value in state], lambda what: self.refuse(at, what))

    def named(self, at: int, module: Any, name: Any) -> None:
        """Put a permitted name on the stack."""
        if not isinstance(module, Text) or not isinstance(name, Text):
            raise ValueError
        known = PERMITTED.get((module.value, name.value))
        if known is None:
            raise self.refuse(at, f"{module.value}.{name.value}")
        self.push(known)


class Text:
    """A string of the pickle, apart from the names that this reader puts on the stack."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value


def _plain(value: Any) -> Any:
    """Return a string of the pickle as one; other values as they are."""
    return value.value if isinstance(value, Text) else value


def _name(code: int) -> str:
    return _NAMES.get(code, f"{code:#04x}, which is unknown")


def _each(parts: list[Any]) -> list[Any]:
    """Return values one by one."""
    return [value for part in parts for value in (part.values.tolist() if isinstance(part, Run) else [part])]


def _append(reader: Reader, values: list[Any]) -> None:
    target = reader.top()
    if not isinstance(target, Numbers):
        raise TypeError
    target.extend(values)


def _set(reader: Reader, values: list[Any]) -> None:
    target, each = reader.top(), _each(values)
    if type(target) is not dict or len(each) % 2 or not all(isinstance(key, Text) for key in each[::2]):
        raise TypeError
    target.update(zip((key.value for key in each[::2]), map(_plain, each[1::2])))


def _protocol(reader: Reader, _: int) -> None:
    if not 2 <= (version := reader.number(1)) <= 5:
        raise SourceError(f"{reader._path} is a pickle of protocol {version}; 2 to 5 are read")


def _text(size: int) -> Callable[[Reader, int], None]:
    return lambda r, _: r.push(Text(bytes(r.take(r.number(size))).decode("utf-8", "surrogatepass")))


def _bytes(size: int) -> Callable[[Reader, int], None]:
    return lambda r, _: r.push(bytes(r.take(r.number(size))))


def _long(size: int) -> Callable[[Reader, int], None]:
    return lambda r, _: r.push(int.from_bytes(r.take(r.number(size)), "little", signed=True))


_STOP = 0x2E
_NUMBERS = frozenset(b"KMJ\x88\x89")
_STEPS: dict[int, Callable[[Reader, int], Any]] = {
    0x80: _protocol,
    0x95: lambda r, _: r.take(8),  # FRAME
    0x28: lambda r, _: r.push(_MARK),
    0x30: lambda r, _: r.pop(),
    0x31: lambda r, _: r.to_mark(),
    0x4E: lambda r, _: r.push(None),
    0x8A: _long(1),
    0x58: _text(4),
    0x8C: _text(1),
    0x8D: _text(8),
    0x42: _bytes(4),
    0x43: _bytes(1),
    0x8E: _bytes(8),
    0x96: _bytes(8),  # BYTEARRAY8
    0x5D: lambda r, _: r.push(Numbers()),
    0x7D: lambda r, _: r.push({}),
    0x29: lambda r, _: r.push(()),
    0x74: lambda r, _: r.push(tuple(_each(r.to_mark()))),
    0x85: lambda r, _: r.push(tuple(r.pop(1))),
    0x86: lambda r, _: r.push(tuple(r.pop(2))),
    0x87: lambda r, _: r.push(tuple(r.pop(3))),
    0x61: lambda r, _: (lambda values: _append(r, values))(r.pop()),
    0x65: lambda r, _: (lambda values: _append(r, values))(r.to_mark()),
    0x73: lambda r, _: (lambda values: _set(r, values))(r.pop(2)),
    0x75: lambda r, _: (lambda values: _set(r, values))(r.to_mark()),
    0x71: lambda r, _: r.remember(r.number(1)),
    0x72: lambda r, _: r.remember(r.number(4)),
    0x94: lambda r, _: r.remember(),
    0x68: lambda r, _: r.recall(r.number(1)),
    0x6A: lambda r, _: r.recall(r.number(4)),
    0x63: lambda r, at: r.named(at, Text(r.line()), Text(r.line())),
    0x93: lambda r, at: r.named(at, *r.pop(2)),
    0x52: lambda r, at: r.reduce(at),
    0x62: lambda r, at: r.build(at),
}
"""What each opcode that is permitted does; no other does anything."""


# The names that a pickle of packed rows may hold, and what each stands for: plain values, and nothing is called.

PERMITTED: dict[tuple[str, str], str] = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    ("collections", "OrderedDict"): "OrderedDict",
}
for _module in ("numpy.core", "numpy._core"):
    PERMITTED[f"{_module}.multiarray", "_reconstruct"] = "_reconstruct"
    PERMITTED[f"{_module}.multiarray", "scalar"] = "scalar"
    PERMITTED[f"{_module}.numeric", "_frombuffer"] = "_frombuffer"

_KINDS = {"O", "b", "b1", *(f"{kind}{width}" for kind in "iu" for width in (1, 2, 4, 8))}
Refuse = Callable[[str], SourceError]


class UnfitError(Exception):
    """What stands in a pickle doesn't fit together; who reads it says where."""


class Dtype:
    """A kind of numbers, or of objects."""

    __slots__ = ("is_swapped", "kind")

    def __init__(self, kind: str) -> None:
        self.kind, self.is_swapped = kind, False

    def numbers(self) -> np.dtype[Any]:
        """Return it as numpy's own; raises UnfitError for objects."""
        if self.kind == "O":
            raise UnfitError
        return np.dtype(self.kind).newbyteorder(">" if self.is_swapped else "<")


class Array:
    """An array in the making; `content` is a flat array of numbers, or the list of an array of objects."""

    __slots__ = ("content", "shape")

    def __init__(self) -> None:
        self.content: Any = None
        self.shape: tuple[int, ...] = (0,)


def reduce(name: str, arguments: list[Any], refuse: Refuse) -> Any:
    """Return what a call of a permitted name stands for."""
    if name == "dtype":
        kind = str(arguments[0])
        kind = "O" if kind in ("O", "O8", "O4", "|O") else kind.lstrip("|<>=")
        if kind not in _KINDS:
            raise refuse(f"numbers of the kind {kind!r}")
        return Dtype(kind)
    if name == "_reconstruct" and arguments[0] == "ndarray":
        return Array()
    if name == "scalar":
        kind, content = arguments
        return int(np.frombuffer(_as_bytes(content), dtype=_numbers(kind), count=1)[0])
    if name == "encode":
        if len(arguments) != 2 or arguments[1] != "latin1":
            raise UnfitError
        return str(arguments[0]).encode("latin1")
    if name == "_frombuffer":
        buffer, kind, shape, _ = arguments
        array = Array()
        _fill(array, shape, np.frombuffer(_as_bytes(buffer), dtype=_numbers(kind)))
        return array
    if name == "OrderedDict" and not arguments:
        return {}
    raise refuse(f"a call of {name}")


def build(target: Array | Dtype, state: list[Any], refuse: Refuse) -> None:
    """Give a kind of numbers its byte order, or an array its content."""
    if isinstance(target, Dtype):
        if any(part is not None for part in state[2:5]) or state[1] not in ("<", ">", "|", "="):
            raise refuse("numbers with fields")
        target.is_swapped = state[1] == ">"
        return
    _, shape, kind, _, content = state
    if isinstance(kind, Dtype) and kind.kind == "O":
        target.shape, target.content = tuple(shape), content
        return
    _fill(target, shape, np.frombuffer(_as_bytes(content), dtype=_numbers(kind)))


def _numbers(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, Dtype):
        raise UnfitError
    return kind.numbers()


def _as_bytes(content: Any) -> bytes:
    if not isinstance(content, bytes):
        raise UnfitError
    return content


def _fill(array: Array, shape: Any, content: npt.NDArray[Any]) -> None:
    """Give an array its numbers, as many as its shape says."""
    sizes = tuple(int(size) for size in shape)
    if math.prod(sizes) != len(content):
        raise UnfitError
    array.shape, array.content = sizes, content
