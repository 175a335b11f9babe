"""Validation of arguments and settings, one function each; error messages say what is accepted."""

from __future__ import annotations

import operator
import re

from varlen.errors import SettingError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
LARGEST = 2**31 - 1  # longest document, largest capacity and most documents in one call: what an int32 holds


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
