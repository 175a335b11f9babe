"""The three ways in which Megatron-Bridge's releases spell packed batches and settings."""

from __future__ import annotations

from typing import Literal, TypeAlias

from varlen.errors import SettingError

Dialect: TypeAlias = Literal["0.4", "0.5", "0.6"]
"""`"0.4"`: releases 0.3 to 0.4.2; `"0.5"`: 0.5.0 and 0.5.1; `"0.6"`: 0.6.0 and later."""

DIALECTS: tuple[Dialect, ...] = ("0.4", "0.5", "0.6")
NEWEST: Dialect = "0.6"


def as_dialect(dialect: str) -> Dialect:
    """Return a dialect by its name, or by the release that speaks it.

    >>> as_dialect("v0.3.1"), as_dialect("0.5.0"), as_dialect("0.7")
    ('0.4', '0.5', '0.6')
    """
    release = _release(dialect)
    if release is not None:
        if release >= (0, 6):
            return "0.6"
        if release >= (0, 3):
            return "0.5" if release == (0, 5) else "0.4"
    raise SettingError(
        f"{dialect!r} names no dialect of Megatron-Bridge; pass one of {', '.join(map(repr, DIALECTS))}, or a "
        "release from 0.3 on"
    )


def is_before_parquet(dialect: str) -> bool:
    """Return whether a release is 0.3, whose packed files are `.npy` alone; it speaks the dialect of 0.4.

    >>> is_before_parquet("0.3.1"), is_before_parquet("0.4")
    (True, False)
    """
    return _release(dialect) == (0, 3)


def _release(name: str) -> tuple[int, int] | None:
    """Return the first two numbers of a release, or None where it has none."""
    parts = str(name).removeprefix("v").split(".")
    if len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal():
        return int(parts[0]), int(parts[1])
    return None
