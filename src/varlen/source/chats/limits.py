"""How large the values of a template may grow: each operation that can make more than it takes is asked beforehand.

A text has a limit, and so has all that stands in a list, tuple or mapping that the template makes, where what stands
in it twice counts twice: lists of lists of the same list are short, and their text isn't. So the text of every value
is bounded, and what makes no more than it takes (`trim`, `upper`, a comparison) needs no limit of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from jinja2.exceptions import TemplateError

from varlen.source.chats.watch import account, current

LONGEST = 2**20
"""Characters, items or bits that one number of a template may ask for; more is a mistake or an attack."""
LARGEST_TEXT = 2**27
"""Bytes of one text."""
LARGEST = 2**25
"""Characters of all that stands in a list or mapping that a template makes."""
MOST_ITEMS = 2**21
"""Pieces of one text, or items that one filter takes at once."""
MOST_UNASKED = 4
"""Values that become one before it is asked how large that is; each of them is within the limit."""
LARGE = 2**12
"""Characters from which on it is counted what a template makes."""
_DEEPEST = 200
_VIEWS: tuple[type, ...] = (type({}.items()), type({}.keys()), type({}.values()))
_CONTAINERS = (list, tuple, dict, set, frozenset, *_VIEWS)


class TooLongError(TemplateError):
    """A template asked for more text than a chat can have."""


def check_number(length: int) -> None:
    """Refuse a number that would be a very large size.

    Raises:
        TooLongError: it is.
    """
    if length > LONGEST:
        raise TooLongError(
            f"one expression asks for {length:.3g} characters, items or bits; {LONGEST:,} at most"
        )


def check_text(length: int, what: str) -> None:
    """Refuse an operation that would make a very large text.

    Args:
        length: of what it would make, at most.
        what: the operation.

    Raises:
        TooLongError: it is too large.
    """
    if length > LARGEST_TEXT:
        raise TooLongError(
            f"{what} asks for a text of {length:.3g} characters; {LARGEST_TEXT:,} bytes at most"
        )
    if length > LARGE:
        account(length)


def within(value: Any) -> Any:
    """Return a value that an expression has made, unless it is very large."""
    if type(value) is str:
        if len(value) > LARGE:
            _check_made(value)
        return value
    return made(value) if isinstance(value, _CONTAINERS) else _within_odd(value)


def _within_odd(value: Any) -> Any:
    if isinstance(value, str | bytes) and len(value) > LARGE:
        _check_made(value)
    return value


def _check_made(value: str | bytes) -> None:
    size = sys.getsizeof(value)
    if size > LARGEST_TEXT:
        raise TooLongError(f"one expression makes a text of {size:.3g} bytes; {LARGEST_TEXT:,} at most")
    account(size)


def made(value: Any) -> Any:
    """Return a list, tuple or mapping that a template has made, unless what stands in it is very large.

    Raises:
        TooLongError: it is more than the limit.
    """
    run = current()
    if run is None:
        return value
    if run.known is None:
        run.known = {}
    size, depth = _measured(value, run.known)
    if size > LARGEST:
        raise TooLongError(
            f"a {type(value).__name__} holds {size:.3g} characters, counting what stands in it repeatedly; "
            f"{LARGEST:,} at most"
        )
    if depth > _DEEPEST:
        raise TooLongError(f"a {type(value).__name__} is nested more than {_DEEPEST} deep")
    return value


def repeated(value: Any, once: Any, times: int) -> Any:
    """Return what stands in something `times` times, unless that is very large.

    Raises:
        TooLongError: it is more than the limit.
    """
    run = current()
    if run is None or isinstance(value, str | bytes):
        return within(value)
    size = size_of(once) * max(times, 0)
    if size > LARGEST:
        raise TooLongError(f"'*' asks for {size:.3g} characters in a list; {LARGEST:,} at most")
    run.known = {} if run.known is None else run.known
    depth = run.known[id(once)][2] if id(once) in run.known else 1
    run.known[id(value)] = (value, size, depth)
    return value


def joined(parts: tuple[Any, ...], join: Callable[[Iterable[Any]], Any]) -> Any:
    """Return several values as one text (`~`)."""
    if len(parts) <= MOST_UNASKED:  # each of them is within the limit
        return within(join(parts))
    check_text(sum(map(size_of, parts)), "'~'")
    return join(parts)


def size_of(value: Any) -> int:
    """Return about how many characters a value takes when it is written."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, _CONTAINERS):
        run = current()
        if run is not None and run.known is None:
            run.known = {}
        return _measured(value, {} if run is None else run.known or {})[0]
    return 16


def _measured(value: Any, known: dict[int, Any]) -> tuple[int, int]:
    """Return how much stands in a container, and how deep it is.

    Args:
        value: the container.
        known: what was measured before, by identity; what this measures is added.
    """
    found = known.get(id(value))
    if found is not None and found[0] is value:
        return found[1], found[2]
    items: Iterable[Any] = value
    if isinstance(value, dict):
        items = (one for pair in value.items() for one in pair)
    size, depth = 2, 0
    for item in items:
        if type(item) is str:
            size += len(item) + 4
        elif isinstance(item, _CONTAINERS):
            if len(known) > MOST_ITEMS:
                raise TooLongError(f"it makes more than {MOST_ITEMS:,} lists and mappings")
            inner, below = _measured(item, known)
            size += inner + 2
            depth = max(depth, below)
        else:
            size += size_of(item) + 2
    known[id(value)] = (value, size, depth + 1)
    return size, depth + 1


def items_of(values: Any) -> Any:
    """Return what a filter takes all of, unless these are very many.

    Raises:
        TooLongError: it is more than the limit.
    """
    if isinstance(values, str | bytes):
        if len(values) > MOST_ITEMS:
            raise TooLongError(f"a filter takes {len(values):,} characters as items; {MOST_ITEMS:,} at most")
        return values
    if isinstance(values, _CONTAINERS) or not hasattr(values, "__iter__"):
        return values
    items = list(islice(values, MOST_ITEMS + 1))
    if len(items) > MOST_ITEMS:
        raise TooLongError(f"a filter takes more than {MOST_ITEMS:,} items")
    return items
