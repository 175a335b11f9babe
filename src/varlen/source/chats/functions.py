"""What chat templates may call beside jinja's own, and what of jinja's own is written anew, within `limits`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from itertools import islice
from typing import Any

from jinja2.filters import make_attrgetter
from jinja2.utils import Cycler, pass_environment

from varlen.source.chats import limits
from varlen.source.chats.asking import plain_sum
from varlen.source.chats.limits import TooLongError, check_text

_MOST_CHUNKS = 2**12
_LONGEST_FORM = 1000


def concat(pieces: Iterable[str]) -> str:
    """Return what a macro or block has written."""
    pieces = pieces if isinstance(pieces, list) else list(pieces)
    if (length := sum(map(len, pieces))) > limits.LARGE:
        check_text(length, "a macro or block")
    return "".join(pieces)


@pass_environment
def sum_up(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Sum up, as jinja does."""
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    return plain_sum(iterable, start)


def make_cycler(*items: Any) -> Cycler:
    """Return what gives one of its items after the other."""
    return Cycler(*limits.made(items))


def strftime_now(form: str) -> str:
    """Return the time of day in a form.

    Raises:
        TooLongError: it is more than the limit.
    """
    if len(form) > _LONGEST_FORM:
        raise TooLongError(f"the form of a time has {len(form):,} characters; {_LONGEST_FORM:,} at most")
    return datetime.now().strftime(form)


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stand for `dict` without being the class, whose methods a template could reach."""
    made: dict[Any, Any] = limits.made(dict(*args, **kwargs))
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON for a reader that is a model: no HTML escapes, every script in its own letters.

    Raises:
        TooLongError: it is more than the limit.
    """
    for option in (indent, *(separators or ())):
        if (len(option) if isinstance(option, str) else option or 0) > _LONGEST_FORM:
            raise TooLongError(
                f"'tojson' asks for an indent or separator of more than {_LONGEST_FORM:,} characters"
            )
    if isinstance(value, str) and len(value) > limits.LARGEST:
        raise TooLongError(
            f"'tojson' is asked to write {len(value):,} characters; {limits.LARGEST:,} at most"
        )
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    chunks, pieces, length = encoder.iterencode(value), [], 0
    while some := "".join(islice(chunks, _MOST_CHUNKS)):
        pieces.append(some)
        length += len(some)
        check_text(length, "'tojson'")
    return "".join(pieces)
