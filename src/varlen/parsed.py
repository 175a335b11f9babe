"""Parsing of untrusted JSON, TOML, YAML and Python: invalid or excessive input raises a `ValueError`.

The wrapped parsers recurse, build numbers of any size and follow aliases. Excessive nesting, numbers of hundreds of
digits and aliases that expand to a million values are rejected here, in linear time.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from varlen.errors import described

LARGEST_CONFIGURATION = 2**22  # characters of a configuration in TOML or YAML, whose parsers are slow
_DEEPEST = 100
_TRIES = 20
_LONGEST_NUMBER = 320  # characters of a number: a little more than the largest float has
_MOST_VALUES = 1_000_000
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:"[^"\n]*"|'[^'\n]*'|[\w-]+)[ \t]*\.[ \t]*){100}""")
_DEEP = "brackets, tables or blocks nested too deeply"


class UnreadableError(ValueError):
    """A text isn't of its format, or is excessive."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def parse_json(text: str | bytes) -> Any:
    """Parse JSON."""
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise UnreadableError(_DEEP) from None
    except json.JSONDecodeError as error:
        raise UnreadableError(str(error), error.lineno) from None
    except ValueError as error:
        raise UnreadableError(str(error)) from None


def json_fault(error: json.JSONDecodeError) -> str:
    """Return what is wrong, without the place: some messages of the library end in "at"."""
    return error.msg.removesuffix(" at")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML."""
    import tomllib

    _check_size(text, "TOML")
    if _LONG_KEY.search(text):  # tomllib would take quadratic time
        raise UnreadableError("a key of over 100 parts")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise UnreadableError(_DEEP) from None
    except ValueError as error:  # also for a number of thousands of digits
        raise UnreadableError(described(error)) from None
    for value in _values(table):
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise UnreadableError(f"an integer of {value.bit_length():,} bits; TOML has 64")
    return table


def parse_yaml(text: str) -> Any:
    """Parse YAML without constructing objects that it names."""
    import yaml

    _check_size(text, "YAML")
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, {}, 0)
        return loader.construct_document(node)
    except UnreadableError:
        raise
    except RecursionError:
        raise UnreadableError(_DEEP) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        message = getattr(error, "problem", None) or described(error)
        raise UnreadableError(message, None if mark is None else mark.line + 1) from None
    except Exception as error:  # PyYAML's constructors may raise anything: a date of month 99, an empty !!int
        raise UnreadableError(f"a value that its tag doesn't allow ({described(error)})") from None
    finally:
        if loader is not None:
            loader.dispose()


def parse_python(source: str) -> ast.Module:
    """Parse Python source.

    Until 3.13, CPython keeps one nesting counter for all threads, and fails at random where two of them parse at
    once; this is retried.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(source)
        except SystemError:  # "AST constructor recursion depth mismatch"
            continue
    return ast.parse(source)


def _check_node(node: Any, known: dict[int, int], depth: int) -> int:
    """Return how many values a YAML node expands to, including aliases and merges."""
    line = node.start_mark.line + 1
    before = known.get(id(node))
    if before is not None:
        if before < 0:
            raise UnreadableError("an alias inside the value that it refers to", line)
        return before
    if depth > _DEEPEST:
        raise UnreadableError(_DEEP, line)
    known[id(node)] = -1
    if isinstance(node.value, str):
        if node.tag.rpartition(":")[2] in ("int", "float") and len(node.value) > _LONGEST_NUMBER:
            raise UnreadableError(_too_long(node.value), line)
        count = 1
    else:
        parts = [child for part in node.value for child in (part if isinstance(part, tuple) else (part,))]
        count = 1
        for part in parts:
            count += _check_node(part, known, depth + 1)
    if count > _MOST_VALUES:
        raise UnreadableError(f"aliases and merges that stand for over {_MOST_VALUES:,} values", line)
    known[id(node)] = count
    return count


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise UnreadableError(_too_long(digits))
    return int(digits)


def _too_long(digits: str) -> str:
    return f"a number of {len(digits):,} digits; at most {_LONGEST_NUMBER:,} are read"


def _values(table: dict[str, Any]) -> list[Any]:
    """Return all values of a table, unless it is nested too deeply."""
    values: list[Any] = []
    level: list[Any] = [table]
    for _ in range(_DEEPEST):
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
        values += level
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return values
    raise UnreadableError(_DEEP)


def _check_size(text: str, kind: str) -> None:
    if len(text) > LARGEST_CONFIGURATION:
        raise UnreadableError(
            f"{len(text):,} characters of {kind}; a configuration has {LARGEST_CONFIGURATION:,} at most"
        )
