"""Rows of a file, in batches and by column; and faults of rows, one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from varlen.errors import SourceError
from varlen.files.losses import Losses, total
from varlen.files.token_tables import flat_values
from varlen.parsed import json_fault

Column = Any  # values of one column, one per row: a list of Python values or an Arrow array

ROW_HASHES = "\0row_hash"  # Column name that no row can have: in served rows, the hash of all rows up to each
MOST_LISTED = 12  # column names that a sentence lists
# Advice for bytes in Parquet and Arrow where text is expected.
READ_AS_TEXT = "where they are UTF-8, read them so: --binary-as-text (binary_as_text=True)"

_RECORD = Losses(records=1)


_SKIPPED = 'on_error="skip" (--on-error skip) leaves such records out and counts them'


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A record, a stretch of rows, or the rest of a file, that can't be read."""

    where: str  # file and row
    why: str  # completes the sentence: "is not valid JSON: ..."
    number: int = 0  # of the row in its file, to sort faults; 0 where it isn't a single row's
    losses: Losses = _RECORD  # what is lost, in its unit
    raises: str = ""  # the error's message where nothing may be skipped; the sentence by default
    is_outside: bool = False  # a disk, network or server failed, so that reading again may succeed

    def __str__(self) -> str:
        return f"{self.where} {self.why}"

    def raised(self, *, may_skip: bool = False) -> SourceError:
        """Return the error to raise where nothing is skipped, though it may be by `on_error`."""
        said = self.raises or str(self)
        is_one = may_skip and self.number and not self.is_outside and "on_error" not in said
        return SourceError(f"{said}; {_SKIPPED}" if is_one else said)

    @property
    def covers(self) -> int:
        """Rows of the file that are lost, as far as known."""
        return self.losses.num_rows


def losses_of(faults: Iterable[Fault]) -> Losses:
    """Add up the losses of faults."""
    return total(fault.losses for fault in faults)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Consecutive rows of one file.

    Invariant: every column has one entry for each of `numbers`.
    """

    columns: Mapping[str, Column]
    numbers: Sequence[int]  # from 1, counted from `base`; blank lines count, so that an editor finds the row
    path: str
    unit: str = "row"  # what is counted: "line", "row", "value", "paragraph"; "" where the file is one row
    # Rows of the file before those that `numbers` count from; called only for messages, since it may read.
    base: Callable[[], int] = int
    faults: tuple[Fault, ...] = ()  # unreadable rows between these; they have no entry in the columns

    def __len__(self) -> int:
        return len(self.numbers)

    def between(self, start: int, stop: int, faults: tuple[Fault, ...]) -> Rows:
        """Return a slice of the rows."""
        columns = {name: _some(column, start, stop) for name, column in self.columns.items()}
        return replace(self, columns=columns, numbers=self.numbers[start:stop], faults=faults)

    def chosen(self, indexes: Sequence[int]) -> Rows:
        """Return the rows at ascending indexes, without faults."""
        columns = {
            name: [column[index] for index in indexes]
            if isinstance(column, list)
            else column.take(_arrow(indexes))
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns, numbers=[self.numbers[index] for index in indexes], faults=())

    @property
    def covers(self) -> int:
        """Rows of the file that these stand for, unreadable ones included."""
        return len(self) + sum(fault.covers for fault in self.faults)

    def where(self, index: int) -> str:
        """Name the file and a row's position in it."""
        return location(self.path, self.unit, self.base() + self.numbers[index])

    def blame(self, wrong: Mapping[int, str]) -> tuple[Fault, ...]:
        """Return the faults of these rows, those found while reading included, in the order of the file."""
        if not wrong:
            return self.faults
        faults = [
            Fault(where=self.where(index), why=why, number=self.base() + self.numbers[index])
            for index, why in wrong.items()
        ]
        return tuple(sorted([*self.faults, *faults], key=lambda fault: fault.number))


def faulty(fault: Fault, names: Sequence[str] = ()) -> Rows:
    """Return no rows, but a fault."""
    return Rows(columns={name: [] for name in names}, numbers=(), path=fault.where, faults=(fault,))


def _some(column: Column, start: int, stop: int) -> Column:
    return column[start:stop] if isinstance(column, list) else column.slice(start, stop - start)


def _arrow(indexes: Sequence[int]) -> Any:
    import pyarrow as pa

    return pa.array(list(indexes), type=pa.int64())


def location(path: str, unit: str, number: int) -> str:
    """Name a file and a position in it."""
    return f"{path} {unit} {number:,}" if unit else path


def as_list(column: Column, prune: Callable[[Any], Any] | None = None) -> list[Any]:
    """Return a column as the Python values that its type means.

    Text that isn't UTF-8 becomes b"", anything else that Arrow can't convert stays as it is, and an invalid cell of
    JSON type becomes `NotJson`; all are to be reported as faults of their rows.
    """
    if isinstance(column, list):
        return column
    try:
        if str(column.type) in _LISTS:
            return _numbers(column)
        values = list(column.to_pylist())
    except Exception:  # text that isn't UTF-8, dates beyond Python's, duplicate keys in an object
        values = [_value(value) for value in column]
    return decode_column(column.type, values, prune)


# Arrow types of token ids.
_LISTS = {
    f"{kind}<{name}: int{bits}>"
    for kind in ("list", "large_list")
    for name in ("item", "element")
    for bits in (32, 64)
}


def _numbers(column: Any) -> list[Any]:
    """Return lists of integers, many times as fast as Arrow's conversion."""
    flat = flat_values(column)
    if flat is None:
        return list(column.to_pylist())
    numbers, bounds = flat[0].tolist(), flat[1].tolist()
    return [numbers[a:b] for a, b in zip(bounds, bounds[1:])]


def _value(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return b""
    except Exception:
        return value


def listed(names: Sequence[str]) -> str:
    """List column names for a sentence, at most twelve."""
    if not names:
        return "none"
    more = f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    return ", ".join(f"`{name}`" for name in names[:MOST_LISTED]) + more


def json_kind(value: object) -> str:
    """Name a value's kind in JSON's terms."""
    kinds: dict[type, str] = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
    }
    if isinstance(value, NotJson):
        return value.why
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def found_kind(value: object) -> str:
    """Name a value's kind; for bytes, add how to read them as text."""
    return f"bytes; {READ_AS_TEXT}" if isinstance(value, bytes) else json_kind(value)


# Decode cells of Arrow columns to the Python values that their types mean.
#
# `arrow.json` (`datasets.Json`) holds JSON as text, alone or within lists, structs and maps, and a map is an object;
# `to_pylist` gives the text, and a list of pairs.

Decode = Callable[[Any], Any]
_JSON = "arrow.json"


@dataclass(frozen=True, slots=True)
class NotJson:
    """An invalid cell of JSON type."""

    why: str


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A value whose nulls were written by its author, and whose keys aren't shared with other rows."""

    value: Any


def refuse(why: str) -> NoReturn:
    """Raise a SourceError."""
    raise SourceError(why)


class _UnreadableError(Exception):
    """A cell that can't be decoded, and why."""


def decode_column(type_: Any, values: list[Any], prune: Decode | None) -> list[Any]:
    """Return the cells of a column decoded by its type."""
    decode = _decoder(type_)
    if decode is None:
        return values if prune is None else [prune(value) for value in values]
    cells: list[Any] = []
    for value in values:
        try:
            cell = decode(value)
            cells.append(_plain(cell if prune is None else prune(cell)))
        except _UnreadableError as error:
            cells.append(NotJson(str(error)))
    return cells


def _decoder(type_: Any) -> Decode | None:
    """Return the decoder for the values of a type; None where they need no decoding."""
    import pyarrow as pa

    kinds = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return _from_json if type_.extension_name == _JSON else _decoder(type_.storage_type)
    if kinds.is_dictionary(type_) or kinds.is_run_end_encoded(type_):
        return _decoder(type_.value_type)
    if kinds.is_map(type_):
        return _map_decoder(_decoder(type_.key_type), _decoder(type_.item_type))
    if kinds.is_struct(type_):
        fields = (type_.field(index) for index in range(type_.num_fields))
        decoders = {field.name: decode for field in fields if (decode := _decoder(field.type)) is not None}
        return _struct_decoder(decoders) if decoders else None
    if getattr(type_, "value_type", None) is not None:  # lists of all kinds
        decode = _decoder(type_.value_type)
        return None if decode is None else _list_decoder(decode)
    return None


def _from_json(text: Any) -> Any:
    if text is None:
        return None
    try:
        return _Decoded(json.loads(text))
    except json.JSONDecodeError as error:
        raise _UnreadableError(
            f"text that is not valid JSON ({json_fault(error)} at position {error.pos:,}), in a column of JSON"
        ) from None
    except (ValueError, RecursionError, TypeError):
        raise _UnreadableError(
            "text with a number of too many digits, or brackets nested too deeply, in a column of JSON"
        ) from None


def _list_decoder(decode: Decode) -> Decode:
    return lambda value: [decode(entry) for entry in value] if isinstance(value, list | tuple) else value


def _struct_decoder(decoders: dict[str, Decode]) -> Decode:
    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: decoders[key](held) if key in decoders else held for key, held in value.items()}

    return decode


def _map_decoder(of_keys: Decode | None, of_items: Decode | None) -> Decode:
    def decode(value: Any) -> Any:
        if value is None:
            return None
        pairs = [
            (of_keys(key) if of_keys else key, of_items(item) if of_items else item) for key, item in value
        ]
        keys = [key for key, _ in pairs]
        if not all(isinstance(key, str) for key in keys):
            raise _UnreadableError("a map whose keys aren't text")
        if len(set(keys)) < len(keys):
            raise _UnreadableError("a map that holds a key twice")
        return _Decoded(dict(pairs))

    return decode


def _plain(value: Any) -> Any:
    """Unwrap a decoded value."""
    if isinstance(value, _Decoded):
        return _plain_map(value.value)
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def _plain_map(value: Any) -> Any:
    """Unwrap the items of a map, which may be wrapped themselves; those of JSON are not."""
    if isinstance(value, dict) and any(isinstance(held, _Decoded | dict | list) for held in value.values()):
        return {key: _plain(held) for key, held in value.items()}
    return value


# Gather single rows, as readers find them, into batches.

# A row's number, its size, and its values by column; or why it can't be read; or None where it is blank.
Found = tuple[int, int, list[Any] | str | None]


class Lost(str):
    """Why more than a row can't be read, and what is lost."""

    losses: Losses

    @classmethod
    def of(cls, why: str, losses: Losses) -> Lost:
        """Attach the losses to the message."""
        lost = cls(why)
        lost.losses = losses
        return lost


BATCH_SIZE = 1 << 20  # bytes or characters of rows that fill a batch
_MOST_ROWS = 4096


def gather(
    rows_found: Iterable[Found],
    *,
    names: Sequence[str],
    path: str,
    unit: str,
    base: Callable[[], int] = int,  # returns 0
    most_rows: int = _MOST_ROWS,
    count_faults: bool = False,
    size: int = BATCH_SIZE,
) -> Iterator[Rows]:
    """Yield rows in batches of about `size` bytes, at most `most_rows`.

    If reading fails, the rows before come first.
    """
    taken: list[list[Any]] = []
    numbers: list[int] = []
    faults: list[Fault] = []
    filled = 0

    def rows() -> Rows:
        columns = {name: [values[index] for values in taken] for index, name in enumerate(names)}
        return Rows(columns=columns, numbers=numbers, path=path, unit=unit, base=base, faults=tuple(faults))

    try:
        for number, more, values in rows_found:
            filled += more
            if isinstance(values, list):
                taken.append(values)
                numbers.append(number)
            elif values is not None:
                at = base() + number
                losses = values.losses if isinstance(values, Lost) else _RECORD
                faults.append(
                    Fault(where=location(path, unit, at), why=str(values), number=at, losses=losses)
                )
            count = len(numbers) + len(faults) if count_faults else len(numbers)
            if filled >= size or count >= most_rows:
                yield rows()
                taken, numbers, faults, filled = [], [], [], 0
    except Exception:  # the rows before it are complete
        if numbers or faults:
            yield rows()
        raise
    if numbers or faults:
        yield rows()
