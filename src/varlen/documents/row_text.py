"""Rows of Python values as JSON lines: what `json.dumps` writes, and a sentence for each row that JSON can't hold.

A key that a row hasn't stays absent, which a table couldn't say. Arrays of numpy, torch and Arrow become lists. A
column that no document is made of may hold anything: what JSON can't hold of it is null.

A row that can't be used becomes a line that is a JSON string: the reader of such files tells it as the row's fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from varlen.errors import SourceError
from varlen.files.columns import ROLES, find_columns
from varlen.files.formats.jsonl import MOST_RECORD_BYTES
from varlen.files.rows import json_kind

_dumps = json.JSONEncoder(allow_nan=False).encode
_FLUSHED = 1 << 20
_LOOKED_AT, _MOST_LOOKED_AT = 8, 1000
"""Rows with names that tell what all hold, as `reading` looks at them, and rows among which they are looked for."""
_Wrong = (TypeError, ValueError, RecursionError, OverflowError)


def write_rows(
    rows: Iterable[Any], named: Mapping[str, str], where: str, write: Callable[[bytes], object]
) -> int:
    """Write rows as lines; returns how many."""
    lines: list[str] = []
    size = count = 0
    given = raised_by_rows(rows, where)
    seen, names = first_rows(given)
    used = used_columns(names, named, where)
    for row in chain(seen, given):
        line = row_line(row, used)
        lines.append(line)
        size, count = size + len(line), count + 1
        if size >= _FLUSHED:
            write("".join(lines).encode())
            lines, size = [], 0
    write("".join(lines).encode())
    return count


def raised_by_rows(rows: Iterable[Any], where: str) -> Iterator[Any]:
    """Yield rows; what is raised by whoever gives them is told as a fault of the source."""
    count = 0
    try:
        for row in rows:
            count += 1
            yield row
    except GeneratorExit:
        raise
    except Exception as error:
        raise SourceError(f"{where} failed after row {count:,}: {type(error).__name__}: {error}") from error


def first_rows(rows: Iterator[Any]) -> tuple[list[Any], tuple[tuple[str, ...], ...]]:
    """Take the first rows, as many as tell what all hold; returns them, and the names of those that have any."""
    seen: list[Any] = []
    names: list[tuple[str, ...]] = []
    for row in rows:
        seen.append(row)
        if isinstance(row, Mapping) and row:
            names.append(tuple(name for name in row if isinstance(name, str)))
        if len(names) == _LOOKED_AT or len(seen) == _MOST_LOOKED_AT:
            break
    return seen, tuple(one for one in names if one)


def used_columns(names: Iterable[tuple[str, ...]], named: Mapping[str, str], where: str) -> frozenset[str]:
    """Return the columns that documents are made of, as first rows tell; all that may be where they don't."""
    used: set[str] = set()
    for one in names:
        with suppress(SourceError):  # reading will tell, or another row is what this one isn't
            used.update(find_columns(one, named, where, are_fields=True).fields.names)
    return frozenset(used or (*ROLES, *named.values()))


def row_line(row: Any, used: frozenset[str]) -> str:
    """Return a row as a line."""
    if not isinstance(row, Mapping):
        return fault_line(f"is {_called(row)}, not a mapping with named fields such as `text`")
    try:
        plain = row if isinstance(row, dict) else dict(row)
    except Exception as error:  # of whoever made it
        return fault_line(f"can't be read: {type(error).__name__}: {error}")
    try:
        line = _dumps(plain)
    except _Wrong:
        line = _slowly(plain, used)
    if len(line) >= MOST_RECORD_BYTES:
        return fault_line(f"takes {len(line) >> 20:,} MB as JSON, more than {MOST_RECORD_BYTES >> 20:,} MB")
    return line + "\n"


def fault_line(why: str) -> str:
    """Return the line of a row that can't be used."""
    return _dumps(why) + "\n"


def _slowly(row: dict[Any, Any], used: frozenset[str]) -> str:
    """Return a row, or why it can't be used, where JSON can't hold all of it as it is."""
    fields: list[str] = []
    for name, value in row.items():
        if not isinstance(name, str):
            continue  # no document is made of it
        try:
            text = (_with_arrays if name in used else _dumps)(value)
        except _Wrong as error:
            if name in used:
                return _dumps(_why(name, value, error))
            text = "null"
        fields.append(f"{_dumps(name)}: {text}")
    return "{" + ", ".join(fields) + "}"


def _plain(value: Any) -> Any:
    """Return what JSON can hold in place of an array, a number of a library's own or a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    numpy, torch, arrow = (sys.modules.get(name) for name in ("numpy", "torch", "pyarrow"))
    if (
        numpy is not None
        and isinstance(value, numpy.ndarray | numpy.generic)
        and value.dtype.kind in "biufUO"
    ):
        return value.tolist()
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if arrow is not None and isinstance(value, arrow.Array | arrow.ChunkedArray):
        return value.to_pylist()
    if arrow is not None and isinstance(value, arrow.Scalar):
        return value.as_py()
    return json.JSONEncoder().default(value)  # raises


_with_arrays = json.JSONEncoder(allow_nan=False, default=_plain).encode


def _why(name: str, value: Any, error: Exception) -> str:
    """Say which value of a column JSON can't hold."""
    if isinstance(error, RecursionError) or "Circular" in str(error):
        return f"nests too deeply in `{name}`, or holds itself"
    place, found = _culprit(name, value)
    if isinstance(found, Mapping):
        return f"holds an object in `{place}` whose keys aren't all strings; JSON has no other keys"
    out = (
        "decode it to text first"
        if isinstance(found, bytes | bytearray)
        else "turn it into text or numbers first"
    )
    return f"holds {_called(found)} in `{place}`, for which JSON has no form; {out}"


def _culprit(place: str, value: Any) -> tuple[str, Any]:
    """Return the first value within one that JSON can't hold, and where it stands."""
    if isinstance(value, Mapping):
        inside = ((f"{place}.{key}", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        inside = ((f"{place}[{index}]", one) for index, one in enumerate(value))
    else:
        try:
            plain = _plain(value)
        except TypeError:
            return place, value
        return _culprit(place, plain) if isinstance(plain, list | dict) else (place, plain)
    for where, one in inside:
        try:
            _with_arrays(one)
        except _Wrong:
            return _culprit(where, one)
    return place, value


def _called(value: Any) -> str:
    """Name what a value is."""
    if isinstance(value, float):
        return "NaN or infinity" if value - value != 0 else "a number"
    kind = json_kind(value)
    if kind in ("object", "array", "string", "boolean", "number"):
        return f"a JSON {kind}"
    return kind if value is None else f"{type(value).__module__}.{kind}".removeprefix("builtins.")
