"""What a library says in an error, in one line and not cut within a word."""

from __future__ import annotations

from textwrap import shorten


def said(error: BaseException, most: int = 300) -> str:
    """Return an error's words, or that it has none."""
    return shorten(str(error), most, placeholder=" …") or "no word of why"


def named(error: BaseException, most: int = 300) -> str:
    """Return an error's type and words."""
    words = shorten(str(error), most, placeholder=" …")
    return f"{type(error).__name__}: {words}" if words else f"{type(error).__name__}, and no word of why"
