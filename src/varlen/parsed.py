"""JSON, TOML, YAML and Python of strangers: what can't be read, or stands for too much, is a `ValueError`.

The parsers that this wraps recurse, build numbers of any size and follow aliases. Here, brackets nested too deeply,
numbers of hundreds of digits and aliases that stand for a million values are refused, in a time that grows with the
text.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

LARGEST_CONFIGURATION = 2**22
"""Characters of a configuration in TOML or YAML, whose parsers are slow."""
_DEEPEST = 100
_TRIES = 20
_LONGEST_NUMBER = 320
"""Characters of a number: a little more than the largest that floating point holds."""
_MOST_VALUES = 1_000_000
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:"[^"\n]*"|'[^'\n]*'|[\w-]+)[ \t]*\.[ \t]*){100}""")
_DEEP = "brackets, tables or blocks nested too deeply"


class UnreadableError(ValueError):
    """A text isn't of its format, or stands for too much."""

    def __init__(self, said: str, line: int | None = None) -> None:
        """Take what is wrong, and the line where that is known."""
        super().__init__(said)
        self.line = line


def parse_json(text: str | bytes) -> Any:
    """Return what JSON holds."""
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise UnreadableError(_DEEP) from None
    except json.JSONDecodeError as error:
        raise UnreadableError(str(error), error.lineno) from None
    except ValueError as error:
        raise UnreadableError(str(error)) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return what TOML holds."""
    import tomllib

    _check_size(text, "TOML")
    if _LONG_KEY.search(text):  # which takes tomllib a time that grows with its square
        raise UnreadableError("a key of over 100 parts")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise UnreadableError(_DEEP) from None
    except ValueError as error:  # of a number of thousands of digits, too
        raise UnreadableError(_first_line(error)) from None
    for value in _values(table):
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise UnreadableError(f"an integer of {value.bit_length():,} bits; TOML has 64")
    return table


def parse_yaml(text: str) -> Any:
    """Return what YAML holds, without running anything that it names."""
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
        said = getattr(error, "problem", None) or _first_line(error)
        raise UnreadableError(said, None if mark is None else mark.line + 1) from None
    except (
        Exception
    ) as error:  # PyYAML's constructors let what they call raise: a date of month 99, an empty !!int
        raise UnreadableError(f"a value that its tag doesn't allow ({_first_line(error)})") from None
    finally:
        if loader is not None:
            loader.dispose()


def parse_python(source: str) -> ast.Module:
    """Return the syntax of Python source.

    CPython counts how deeply it nests in one place for all threads, and until 3.13 fails at random where two of them
    parse at once; it is tried again then.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(source)
        except SystemError:  # "AST constructor recursion depth mismatch"
            continue
    return ast.parse(source)


def _check_node(node: Any, known: dict[int, int], depth: int) -> int:
    """Return how many values a part of YAML stands for, with what its aliases repeat and its merges copy."""
    line = node.start_mark.line + 1
    found = known.get(id(node))
    if found is not None:
        if found < 0:
            raise UnreadableError("an alias within what it stands for", line)
        return found
    if depth > _DEEPEST:
        raise UnreadableError(_DEEP, line)
    known[id(node)] = -1
    if isinstance(node.value, str):
        if node.tag.rpartition(":")[2] in ("int", "float") and len(node.value) > _LONGEST_NUMBER:
            raise UnreadableError(f"a number of {len(node.value):,} digits", line)
        count = 1
    else:
        parts = [one for part in node.value for one in (part if isinstance(part, tuple) else (part,))]
        count = 1
        for part in parts:
            count += _check_node(part, known, depth + 1)
    if count > _MOST_VALUES:
        raise UnreadableError(f"aliases and merges that stand for over {_MOST_VALUES:,} values", line)
    known[id(node)] = count
    return count


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise UnreadableError(f"a number of {len(digits):,} digits")
    return int(digits)


def _values(table: dict[str, Any]) -> list[Any]:
    """Return all that stands in a table that isn't nested too deeply."""
    found: list[Any] = []
    level: list[Any] = [table]
    for _ in range(_DEEPEST):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        found += level
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return found
    raise UnreadableError(_DEEP)


def _check_size(text: str, kind: str) -> None:
    if len(text) > LARGEST_CONFIGURATION:
        raise UnreadableError(
            f"{len(text):,} characters of {kind}; a configuration has {LARGEST_CONFIGURATION:,} at most"
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
