"""Validation of arguments and settings, one function each; error messages say what is accepted."""

from __future__ import annotations

import inspect
import math
import operator
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Real
from types import NoneType
from typing import Any, Concatenate, Literal, ParamSpec, get_args, get_origin, get_type_hints

from varlen.errors import SettingError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
LARGEST = 2**31 - 1  # longest document, largest capacity and most documents in one call: what an int32 holds
MEMORY_FRACTION = 0.92  # share of a GPU's memory that plans may use, unless a setting says another


def as_count(value: object, name: str, least: int = 1, most: int = LARGEST) -> int:
    """Return a setting as an integer from `least` to `most`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise SettingError(f"{name} must be a whole number of at least {least}, got {value!r}") from None
    if isinstance(value, bool) or not least <= number <= most:
        raise SettingError(f"{name} must be a whole number from {least} to {most:,}, got {value!r}")
    return number


def check_multiple(capacity: int, multiple: int, name: str) -> None:
    """Raise unless a capacity is a multiple, naming the nearest that are."""
    if capacity % multiple:
        below, above = capacity // multiple * multiple, (capacity // multiple + 1) * multiple
        near = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise SettingError(
            f"capacity {capacity:,} is not a multiple of {name} {multiple:,}; the nearest: {near}"
        )


def as_choice(value: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise unless a value is one of the choices."""
    if value not in choices:
        raise SettingError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def in_words(choices: Sequence[str], quote: str = '"') -> str:
    """Return choices as they are written in code.

    >>> print(in_words(("split", "truncate", "drop")))
    "split", "truncate" or "drop"
    """
    *before, end = (f"{quote}{choice}{quote}" for choice in choices)
    return f"{', '.join(before)} or {end}" if before else end


def as_seed(seed: object) -> int:
    """Return a seed as an integer from 0 to 2^64 - 1."""
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        raise SettingError(f"seed must be a whole number or None, got {seed!r}") from None
    if isinstance(seed, bool) or not 0 <= number < 2**64:
        raise SettingError(f"seed must be from 0 to 2^64 - 1, got {seed!r}")
    return number


TOKENS = "4096, 4k (of 1,024) or 1m"  # accepted forms of a number of tokens, for messages and help


def as_tokens(given: object, name: str) -> int:
    """Read a number of tokens, as every option and setting that counts tokens takes it.

    >>> as_tokens("256k", "--capacity"), as_tokens("1M", "--capacity"), as_tokens("8_192", "--capacity")
    (262144, 1048576, 8192)
    """
    match = (
        re.fullmatch(r"(\d[\d_,]{0,20})\s*([km]?)", given.strip().lower(), re.ASCII)
        if isinstance(given, str)
        else None
    )
    value = int(re.sub("[_,]", "", match[1])) * _UNITS[match[2]] if match else 0
    if isinstance(given, int) and not isinstance(given, bool):
        value = given
    if not 1 <= value <= LARGEST:
        raise SettingError(
            f"{name} must be a whole number of tokens from 1 to {LARGEST:,}, such as {TOKENS}; got {given!r}"
        )
    return value


# Options: settings that are declared once, as fields of a frozen dataclass; all that depends on them is made of that.

_Given = ParamSpec("_Given")


def explained(text: str, least: int | None = None, most: int = LARGEST) -> Mapping[str, Any]:
    """Return what a field says of an option: what it is for, and of whole numbers that are checked their range."""
    return {"text": text, "least": least, "most": most}


def option(default: Any, text: str, least: int | None = None, most: int = LARGEST) -> Any:
    """Return a field of a dataclass of options."""
    return field(default=default, metadata=explained(text, least, most))


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """An option as it was declared."""

    type: Any
    default: Any
    """`MISSING` where there is none."""
    text: str
    least: int | None
    most: int

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that it may be of, without None."""
        found = (self.type,) if get_origin(self.type) in (None, Literal, Mapping) else get_args(self.type)
        return tuple(one for one in found if one is not NoneType)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be; none where it is no choice."""
        return tuple(word for one in self.types if get_origin(one) is Literal for word in get_args(one))


@cache
def options_of(kind: Any) -> dict[str, Declared]:
    """Return the options that a dataclass declares: its own, then those of the dataclass that it extends."""
    hints, known = get_type_hints(kind), {one.name: one for one in fields(kind)}
    names = [name for base in kind.__mro__ for name in inspect.get_annotations(base)]
    return {
        name: Declared(type=hints[name], default=known[name].default, **known[name].metadata)
        for name in names
    }


def check_options(settings: Any) -> None:
    """Refuse choices, switches, counts and seconds out of range; counts become Python's own whole numbers."""
    for name, one in options_of(settings.__class__).items():
        value = getattr(settings, name)
        if value is None and NoneType in get_args(one.type):
            continue
        if one.choices:
            as_choice(value, name, one.choices)
        elif one.least is not None:
            object.__setattr__(settings, name, as_count(value, name, one.least, one.most))
        elif one.type is float:
            check_seconds(value, name)
        elif one.type is bool:
            check_switch(value, name)


def check_seconds(value: object, name: str) -> None:
    """Require a time that may be waited for."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise SettingError(f"{name} must be a positive number of seconds, and finite, got {value!r}")


def check_temperature(value: object) -> None:
    """Require a finite number above 0, of Python or numpy."""
    if not (isinstance(value, Real) and 0 < float(value) < math.inf):
        raise SettingError(f"temperature={value!r}; it must be a number above 0")


def check_switch(value: object, name: str) -> None:
    """Require True or False, also as numpy has them, or as 1 and 0."""
    is_bit = isinstance(value, int) and value in (0, 1)
    if not is_bit and type(value).__name__ not in ("bool", "bool_"):
        raise SettingError(f"{name} must be True or False, got {value!r}")


def takes(
    kind: Callable[_Given, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Given], None]]:
    """Give an `__init__` the signature of a dataclass of options, for people and for type checkers."""

    def with_signature(function: Callable[..., None]) -> Callable[Concatenate[Any, _Given], None]:
        given, start = (
            inspect.signature(kind).parameters,
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
        )
        options = [given[name].replace(annotation=one.type) for name, one in options_of(kind).items()]
        function.__signature__ = inspect.Signature([start, *options])  # type: ignore[attr-defined]
        return function

    return with_signature


def with_arguments(text: str | None, kind: Any, width: int = 116) -> str:
    """Return a docstring in which `{arguments}` has become the lines that explain the options of a dataclass."""
    lines = [
        textwrap.fill(f"{name}: {one.text}", width, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, one in options_of(kind).items()
    ]
    return inspect.cleandoc(text or "").replace("    {arguments}", "\n".join(lines))
