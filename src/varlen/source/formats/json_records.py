r"""Where the record after a damaged one begins in a text of JSON values, as far as that is plain.

::

    [\n  {"text": "a"},\n  {"text": "b},\n  {"text": "c"}]    a line that begins as that of the damaged record does
    [{"text": "a"}, {"text": nul}, {"text": "c"}]             behind the bracket that closes it
    [{"text": "a"}, {"text": "b}, {"text": "c"}]              where an object begins by the name that others begin by

The first of these is taken that is there. Who reads on there may find that the record is damaged too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice

_LINE = re.compile(r"(?:\A|\n)([ \t]*),?[ \t]*\[?[ \t]*\Z")
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+'
"""Without the quote that closes it; possessive, since a match that can be undone takes 60 bytes a character."""
_PARTS = re.compile(rf'{_STRING}(?P<close>"?)|[{{}}\[\]]', re.DOTALL)
_BRACKETS = re.compile(r"[{}\[\]]")
_BLANK = r"[ \t\r\n]*"
_BEHIND = re.compile(rf"{_BLANK}(?:,{_BLANK}[{{\]]|\{{|\]{_BLANK}\Z)")
_FIRST_NAME = re.compile(rf'\{{{_BLANK}({_STRING}"){_BLANK}:', re.DOTALL)
_DECODER = json.JSONDecoder()
_MOST_SCANNED, _MOST_PARTS = 64 << 20, 1 << 20
"""Characters, and strings and brackets, in which the bracket that closes a record is looked for."""
_BEFORE = 256
"""Characters before a record that are looked at for the beginning of its line."""


def next_record(text: str, start: int, key: str, *, is_begun: bool, is_all: bool) -> int | None:
    """Return where to go on behind a damaged record, before a comma or at a record; None: nobody can tell.

    Args:
        text: with all that was read so far.
        start: of the damaged record.
        key: the name by which the last object that could be read begins; "" where there is none, and the name by
            which the damaged one begins is taken.
        is_begun: something stands before the text.
        is_all: nothing follows the text.
    """
    before = _LINE.search(text, max(start - _BEFORE, 0), start)
    if before is not None and is_begun and before.start() == 0 and text[0] != "\n":
        before = None
    line = None if before is None else _next_line(text, start, before[1])
    limit = len(text) if line is None else line
    end = _closing(text, start, min(limit, start + _MOST_SCANNED), is_all=is_all)
    alike = None
    if line is None and (before is None or is_all or end is not None):
        own = _FIRST_NAME.match(text, start)
        name = own[1] if own is not None and not key else json.dumps(key, ensure_ascii=False) if key else ""
        alike = _next_alike(text, start, end, name) if name else None
    return next((found for found in (alike, end, line) if found is not None), None)


def _next_line(text: str, start: int, indent: str) -> int | None:
    """Return the next record whose line begins as this one's; None where none follows."""
    found = re.compile(rf"\n{indent}(?:,[ \t]*)?\{{").search(text, start)
    return None if found is None else found.end() - 1


def _closing(text: str, start: int, stop: int, *, is_all: bool) -> int | None:
    """Return what stands behind the bracket that closes a record, if a record or the end may follow there."""
    if text[start] not in "{[":
        return None
    depth = 0
    for at in islice(_brackets(text, start, stop), _MOST_PARTS):
        if text[at] in "{[":
            depth += 1
        elif text[at] in "}]":
            depth -= 1
            if depth == 0:
                end = at + 1
                is_last = is_all and not text[end:].strip(" \t\r\n")
                return end if is_last or _BEHIND.match(text, end) else None
    return None


def _brackets(text: str, start: int, stop: int) -> Iterator[int]:
    """Yield where brackets outside of strings and strings begin; of a string that isn't closed, its brackets."""
    for part in _PARTS.finditer(text, start, stop):
        if part["close"] == "":  # nor are those that would begin within it
            yield from (found.start() for found in _BRACKETS.finditer(text, part.start(), stop))
            return
        yield part.start()


def _next_alike(text: str, start: int, end: int | None, name: str) -> int | None:
    """Return the next object that begins by a name, can be read, and stands before where this one seems to end."""
    begins = re.compile(rf"[,}}]{_BLANK}(\{{{_BLANK}{re.escape(name)}{_BLANK}:)")
    for found in begins.finditer(text, start + 1, len(text) if end is None else end):
        try:
            _DECODER.raw_decode(text, found.start(1))
        except (ValueError, RecursionError):
            continue
        return found.start(1)
    return None
