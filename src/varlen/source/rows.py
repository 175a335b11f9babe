"""Rows of a file, some at a time and column by column; and what is wrong with a row, in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from varlen.errors import SourceError
from varlen.source.cells import NotJson, decode_column
from varlen.source.lists import flat_values
from varlen.source.losses import Losses, total

Column = Any
"""Values of one column, one a row: a list of Python values or an Arrow array."""

PRINT = "\0print"
"""Name of a column that no row can have: of rows that are given while they are read, the hash of all rows to each."""
MOST_LISTED = 12
"""Names of columns that a sentence lists before it stops."""
READ_AS_TEXT = "where they are UTF-8, read them so: --binary-as-text (binary_as_text=True)"
"""What to do about bytes of Parquet and Arrow in the place of text."""

_RECORD = Losses(records=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A record, a stretch of rows, or the rest of a file, that can't be read."""

    where: str
    """File and row."""
    why: str
    """Goes on from there: "is not valid JSON: ..."."""
    number: int = 0
    """Of the row in its file, to list faults in order; 0 where it isn't one row's."""
    losses: Losses = _RECORD
    """What it stands for, in the unit of the loss."""
    raises: str = ""
    """What the error says where nothing may be skipped; the sentence unless given."""
    is_outside: bool = False
    """Whether not the file is at fault but what it lies on, so that the same read may succeed another time."""

    def __str__(self) -> str:
        """Join both to a sentence."""
        return f"{self.where} {self.why}"

    def raised(self) -> SourceError:
        """Return the error to be raised where nothing may be skipped."""
        return SourceError(self.raises or str(self))

    @property
    def covers(self) -> int:
        """Rows of the file that it stands for, as far as they are known."""
        return self.losses.num_rows


def losses_of(faults: Iterable[Fault]) -> Losses:
    """Return what faults stand for, together."""
    return total(fault.losses for fault in faults)


def zero() -> int:
    """Return 0, where nothing stands before."""
    return 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Consecutive rows of one file.

    Invariant: every column has one entry for each of `numbers`.
    """

    columns: Mapping[str, Column]
    numbers: Sequence[int]
    """Number of each row, from 1, counted from `base`; blank lines count, so that an editor finds the row."""
    path: str
    unit: str = "row"
    """What is counted: "line", "row", "value", "paragraph"; "" where the file is one row."""
    base: Callable[[], int] = zero
    """Rows of the file before those that `numbers` count from; called for messages alone, since it may read."""
    faults: tuple[Fault, ...] = field(default=())
    """Rows between these that can't be read; they have no entry in the columns."""

    def __len__(self) -> int:
        """Count the rows that could be read."""
        return len(self.numbers)

    def between(self, start: int, stop: int, faults: tuple[Fault, ...]) -> Rows:
        """Return some of the rows, by index.

        Args:
            start: the first.
            stop: one past the last.
            faults: of those that can't be read, which belong to these.
        """
        columns = {name: _some(column, start, stop) for name, column in self.columns.items()}
        return replace(self, columns=columns, numbers=self.numbers[start:stop], faults=faults)

    def chosen(self, indexes: Sequence[int]) -> Rows:
        """Return some of the rows, by index, ascending, without faults.

        Args:
            indexes: which.
        """
        columns = {
            name: [column[index] for index in indexes]
            if isinstance(column, list)
            else column.take(_arrow(indexes))
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns, numbers=[self.numbers[index] for index in indexes], faults=())

    @property
    def covers(self) -> int:
        """Rows of the file that these stand for: those that can't be read too."""
        return len(self) + sum(fault.covers for fault in self.faults)

    def where(self, index: int) -> str:
        """Name the file and a row's place in it.

        Args:
            index: of the row among these.
        """
        return place(self.path, self.unit, self.base() + self.numbers[index])

    def blame(self, wrong: Mapping[int, str]) -> tuple[Fault, ...]:
        """Return the faults of these rows, those that reading found among them, in the order of the file.

        Args:
            wrong: why a row can't be used, by its index among these.
        """
        if not wrong:
            return self.faults
        found = [
            Fault(where=self.where(index), why=why, number=self.base() + self.numbers[index])
            for index, why in wrong.items()
        ]
        return tuple(sorted([*self.faults, *found], key=lambda fault: fault.number))


def faulty(fault: Fault, names: Sequence[str] = ()) -> Rows:
    """Return no row but a fault.

    Args:
        fault: of rows that can't be read.
        names: of the columns.
    """
    return Rows(columns={name: [] for name in names}, numbers=(), path=fault.where, faults=(fault,))


def _some(column: Column, start: int, stop: int) -> Column:
    return column[start:stop] if isinstance(column, list) else column.slice(start, stop - start)


def _arrow(indexes: Sequence[int]) -> Any:
    import pyarrow as pa

    return pa.array(list(indexes), type=pa.int64())


def place(path: str, unit: str, number: int) -> str:
    """Name a file and a place in it."""
    return f"{path} {unit} {number:,}" if unit else path


def as_list(column: Column, prune: Callable[[Any], Any] | None = None) -> list[Any]:
    """Return a column as the Python values that its type means.

    What Arrow can't turn into one stays as it is, and a cell of JSON type that holds none is `NotJson`; both
    are to be refused by row.

    Args:
        column: of rows.
        prune: takes away what a cell of a table holds only since other rows do, such as keys without a value.
    """
    if isinstance(column, list):
        return column
    try:
        if str(column.type) in _LISTS:
            return _numbers(column)
        values = list(column.to_pylist())
    except Exception:  # text that isn't UTF-8, dates beyond Python's, keys that stand twice in an object
        values = [_value(value) for value in column]
    return decode_column(column.type, values, prune)


_LISTS = {
    f"{kind}<{name}: int{bits}>"
    for kind in ("list", "large_list")
    for name in ("item", "element")
    for bits in (32, 64)
}
"""Arrow types of token ids."""


def _numbers(column: Any) -> list[Any]:
    """Return lists of whole numbers, many times as fast as Arrow makes them one by one."""
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
    """List names of columns for a sentence, the first twelve of them."""
    if not names:
        return "none"
    more = f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    return ", ".join(f"`{name}`" for name in names[:MOST_LISTED]) + more


def json_kind(value: object) -> str:
    """Name a value's kind in JSON's words."""
    kinds: dict[type, str] = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
    }
    if isinstance(value, NotJson):
        return value.said
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def found_kind(value: object) -> str:
    """Name a value's kind, and of bytes how they are read as text."""
    return f"bytes; {READ_AS_TEXT}" if isinstance(value, bytes) else json_kind(value)
