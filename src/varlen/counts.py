"""Counted nouns and bytes for messages."""

from __future__ import annotations


def many(number: int, one: str, several: str | None = None) -> str:
    """Write a number of things.

    >>> many(1, "record"), many(2500, "record"), many(0, "row was", "rows were")
    ('1 record', '2,500 records', '0 rows were')
    """
    return f"{number:,} {one}" if number == 1 else f"{number:,} {several or one + 's'}"


def as_size(value_bytes: float) -> str:
    """Write bytes in MB or GB of 10⁶ and 10⁹.

    >>> as_size(596_480), as_size(431_000_000), as_size(2_890_000_000)
    ('0.6 MB', '431 MB', '2.9 GB')
    """
    if value_bytes >= 1e9:
        return f"{value_bytes / 1e9:,.1f} GB"
    return f"{value_bytes / 1e6:.{1 if value_bytes < 1e7 else 0}f} MB"
