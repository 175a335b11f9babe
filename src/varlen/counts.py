"""How many of something, in words: as they are written, and as users give them."""

from __future__ import annotations

import re

from varlen.errors import SettingError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_LARGEST = 2**31 - 1
TOKENS = "4096, 4k (of 1,024) or 1m"
"""How a number of tokens is given, for messages and help."""


def many(number: int, one: str, several: str | None = None) -> str:
    """Write a number of things.

    Args:
        number: how many.
        one: what one of them is called.
        several: what more or fewer of them are called; None: the same with an "s".

    >>> many(1, "record"), many(2500, "record"), many(0, "row was", "rows were")
    ('1 record', '2,500 records', '0 rows were')
    """
    return f"{number:,} {one}" if number == 1 else f"{number:,} {several or one + 's'}"


def as_tokens(given: object, name: str) -> int:
    """Read a number of tokens, as every option and setting that counts tokens takes it.

    Args:
        given: 8192, or a text: 8192, 256k (of 1,024) or 1m.
        name: of the option or setting.

    Raises:
        SettingError: it isn't one; says what is taken.

    >>> as_tokens("256k", "--capacity"), as_tokens("1M", "--capacity"), as_tokens("8_192", "--capacity")
    (262144, 1048576, 8192)
    """
    found = (
        re.fullmatch(r"(\d[\d_,]{0,20})\s*([km]?)", given.strip().lower(), re.ASCII)
        if isinstance(given, str)
        else None
    )
    value = int(re.sub("[_,]", "", found[1])) * _UNITS[found[2]] if found else 0
    if isinstance(given, int) and not isinstance(given, bool):
        value = given
    if not 1 <= value <= _LARGEST:
        raise SettingError(
            f"{name} must be a whole number of tokens from 1 to {_LARGEST:,}, such as {TOKENS}; got {given!r}"
        )
    return value
