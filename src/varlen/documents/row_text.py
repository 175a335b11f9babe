"""Rows of Python values as JSON lines, with a message for each row that JSON can't represent.

A key that a row lacks stays absent, unlike in a table. Arrays of numpy, torch and Arrow become lists. In columns that
documents aren't made of, values that JSON can't represent become null.

A row that can't be used becomes a JSON string with the reason, which the reader of such files reports as the row's
fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from varlen.errors import SourceError, described
from varlen.files.columns import ROLES, find_columns
from varlen.files.formats.jsonl import MOST_RECORD_BYTES
from varlen.files.rows import json_kind

_dumps = json.JSONEncoder(allow_nan=False).encode
_FLUSHED = 1 << 20
# Rows with keys that are inspected to find the columns, and rows that are searched for them.
_LOOKED_AT, _MOST_LOOKED_AT = 8, 1000
_Wrong = (TypeError, ValueError, RecursionError, OverflowError)


def write_rows(
    rows: Iterable[Any], named: Mapping[str, str], where: str, write: Callable[[bytes], object]
) -> int:
    """Write rows as lines; return how many."""
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
    """Yield rows; an exception of the iterable becomes a SourceError."""
    count = 0
    try:
        for row in rows:
            count += 1
            yield row
    except GeneratorExit:
        raise
    except Exception as error:
        raise SourceError(f"{where} failed after row {count:,}: {described(error, kind=True)}") from error


def first_rows(rows: Iterator[Any]) -> tuple[list[Any], tuple[tuple[str, ...], ...]]:
    """Take as many first rows as needed to find the columns; return them, and the keys of those that have any."""
    seen: list[Any] = []
    names: list[tuple[str, ...]] = []
    for row in rows:
        seen.append(row)
        if isinstance(row, Mapping) and row:
            names.append(tuple(name for name in row if isinstance(name, str)))
        if len(names) == _LOOKED_AT or len(seen) == _MOST_LOOKED_AT:
            break
    return seen, tuple(keys for keys in names if keys)


def used_columns(names: Iterable[tuple[str, ...]], named: Mapping[str, str], where: str) -> frozenset[str]:
    """Return the columns that documents are made of, by the first rows; all possible ones if these don't decide."""
    used: set[str] = set()
    for keys in names:
        with suppress(SourceError):  # reading reports it, or other rows differ from this one
            used.update(find_columns(keys, named, where, are_fields=True).fields.names)
    return frozenset(used or (*ROLES, *named.values()))


def row_line(row: Any, used: frozenset[str]) -> str:
    """Return a row as a line."""
    if not isinstance(row, Mapping):
        return fault_line(f"is {_called(row)}, not a mapping with named fields such as `text`")
    try:
        plain = row if isinstance(row, dict) else dict(row)
    except Exception as error:  # of the user's class
        return fault_line(f"can't be read: {described(error, kind=True)}")
    try:
        line = _dumps(plain)
    except _Wrong:
        line = _slowly(plain, used)
    if len(line) >= MOST_RECORD_BYTES:
        return fault_line(f"takes {len(line) >> 20:,} MB as JSON, more than {MOST_RECORD_BYTES >> 20:,} MB")
    return line + "\n"


def fault_line(why: str) -> str:
    """Return the line for a row that can't be used."""
    return _dumps(why) + "\n"


def _slowly(row: dict[Any, Any], used: frozenset[str]) -> str:
    """Return a row, or why it can't be used, converting field by field."""
    fields: list[str] = []
    for name, value in row.items():
        if not isinstance(name, str):
            continue  # never a document column
        try:
            text = (_with_arrays if name in used else _dumps)(value)
        except _Wrong as error:
            if name in used:
                return _dumps(_why(name, value, error))
            text = "null"
        fields.append(f"{_dumps(name)}: {text}")
    return "{" + ", ".join(fields) + "}"


def _plain(value: Any) -> Any:
    """Convert arrays, library scalars and mappings to what JSON can represent."""
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
    """Return which value of a column JSON can't represent, with its path and the way out."""
    if isinstance(error, RecursionError) or "Circular" in str(error):
        return f"nests too deeply in `{name}`, or holds itself"
    path, culprit = _culprit(name, value)
    if isinstance(culprit, Mapping):
        return f"holds an object in `{path}` whose keys aren't all strings; JSON has no other keys"
    out = (
        "decode it to text first"
        if isinstance(culprit, bytes | bytearray)
        else "turn it into text or numbers first"
    )
    return f"holds {_called(culprit)} in `{path}`, for which JSON has no form; {out}"


def _culprit(path: str, value: Any) -> tuple[str, Any]:
    """Return the first nested value that JSON can't represent, and its path."""
    if isinstance(value, Mapping):
        inside = ((f"{path}.{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        inside = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    else:
        try:
            plain = _plain(value)
        except TypeError:
            return path, value
        return _culprit(path, plain) if isinstance(plain, list | dict) else (path, plain)
    for where, item in inside:
        try:
            _with_arrays(item)
        except _Wrong:
            return _culprit(where, item)
    return path, value


def _called(value: Any) -> str:
    """Name what a value is."""
    if isinstance(value, float):
        return "NaN or infinity" if value - value != 0 else "a number"
    kind = json_kind(value)
    if kind in ("object", "array", "string", "boolean", "number"):
        return f"a JSON {kind}"
    return kind if value is None else f"{type(value).__module__}.{kind}".removeprefix("builtins.")
