"""Counted nouns for messages."""

from __future__ import annotations


def many(number: int, one: str, several: str | None = None) -> str:
    """Write a number of things.

    >>> many(1, "record"), many(2500, "record"), many(0, "row was", "rows were")
    ('1 record', '2,500 records', '0 rows were')
    """
    return f"{number:,} {one}" if number == 1 else f"{number:,} {several or one + 's'}"
