"""Detect what a file holds by its first bytes, which take precedence over its name.

=====================================  ==========================================================================
first bytes                            are those of
=====================================  ==========================================================================
`PAR1`                                 Parquet
`ARROW1`; ff ff ff ff and a length     Arrow, as a file or a stream
zip whose first member is `*.npy`      npz
`{`, and objects line by line          JSON lines: at least two lines that are objects; or one object, possibly
                                       incomplete, with a document field
`[` and an object                      JSON, if the object has a document field
`ustar` at byte 257, `%PDF-`, ...      an unsupported file; the error names its type
anything else                          text; a document with a NUL byte is an error
=====================================  ==========================================================================

Prose, source code, one object over several lines and lists of values stay text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from json.decoder import scanstring  # type: ignore[attr-defined] # of the standard library, in C
from typing import Any

from varlen.files.paths import Format

LOOKED_AT_BYTES = 64 << 10  # read of a file whose name doesn't say its format
MARK_BYTES = 512  # at the beginning of a file; all magic numbers lie in them
_MARKS: dict[bytes, str] = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"FEA1": "a Feather file of version 1",
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"MMIDIDX": "an index of Megatron's",
    b"Obj\x01": "an Avro file",
    b"ORC": "an ORC file",
    b"\x89HDF\r\n": "an HDF5 file",
    b"SQLite format 3": "an SQLite database",
    b"%PDF-": "a PDF",
    b"\x89PNG\r\n": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x7fELF": "a program",
    b"7z\xbc\xaf": "a 7z archive",
}
# Byte order marks of text that isn't UTF-8.
OTHER_TEXT: dict[bytes, str] = {
    b"\xff\xfe\x00\x00": "text in UTF-32",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
_ALL_MARKS = _MARKS | OTHER_TEXT
_FIRST_BYTES = {mark[:1] for mark in _ALL_MARKS}  # checked first: most small files begin with none of these
_NUL_BEHIND = (b"Obj\x01", b"ORC")  # magic numbers that text may begin with; valid only if a NUL byte follows
_TAR, _TAR_AT = b"ustar", 257
_STREAM = b"\xff\xff\xff\xff"
_MOST_SCHEMA_BYTES = 1 << 26
_BLANKS = " \t\r\n"


def mark_of(head: bytes) -> str | None:
    """Return the file type that the first bytes indicate, such as "a tar archive"; None where they may be text."""
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        return "a tar archive"
    if head[:1] in _FIRST_BYTES:
        for mark, kind in _ALL_MARKS.items():
            if head.startswith(mark) and (mark not in _NUL_BEHIND or b"\0" in head):
                return kind
    return "an Arrow stream" if _is_stream(head) else None


def rows_in(head: bytes, fields: Collection[str], *, is_whole: bool) -> Format | None:
    """Return the format of the rows in a file, by its first bytes; None where it holds no rows."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1") or _is_stream(head):
        return "arrow"
    if head.startswith(b"PK\x03\x04"):
        length = int.from_bytes(head[26:28], "little")
        return "npz" if head[30 : 30 + length].endswith(b".npy") else None
    text = (
        head.removeprefix(b"\xef\xbb\xbf")
        .decode(errors="ignore" if not is_whole else "replace")
        .lstrip(_BLANKS)
    )
    if text.startswith("{"):
        return "jsonl" if _are_lines(text, fields, is_whole=is_whole) else None
    if text.startswith("["):
        inside = text[1:].lstrip(_BLANKS)
        return "json" if inside.startswith("{") and not fields_in(inside).isdisjoint(fields) else None
    return None


def _are_lines(text: str, fields: Collection[str], *, is_whole: bool) -> bool:
    """Whether the text, as far as it was read, has one object per line."""
    lines = [line for line in text.split("\n") if line.strip(_BLANKS)]
    whole = lines if is_whole or text.endswith("\n") else lines[:-1]
    if not whole:
        return not fields_in(lines[0]).isdisjoint(fields)
    objects = [_object(line) for line in whole]
    if any(obj is None for obj in objects[:-1]) or objects[0] is None:
        return False
    if len(objects) > 1:
        return objects[1] is not None
    if len(lines) > 1 and not lines[1].lstrip(_BLANKS).startswith("{"):
        return False
    return not objects[0].keys().isdisjoint(fields)


def _object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def fields_in(text: str) -> set[str]:
    """Return the first keys of an object, as far as its text was read."""
    decoder, at = json.JSONDecoder(), 1
    names: set[str] = set()
    try:
        while True:
            at = _past_blanks(text, at)
            if text[at] != '"':
                return names
            name, at = scanstring(text, at + 1, True)
            at = _past_blanks(text, at)
            if text[at] != ":":
                return names
            names.add(name)
            _, at = decoder.raw_decode(text, _past_blanks(text, at + 1))
            at = _past_blanks(text, at)
            if text[at] != ",":
                return names
            at += 1
    except (ValueError, IndexError, RecursionError):
        return names


def _past_blanks(text: str, at: int) -> int:
    while text[at] in _BLANKS:
        at += 1
    return at


def _is_stream(head: bytes) -> bool:
    """Whether bytes begin like an Arrow stream: a marker, and the length of its schema."""
    if not head.startswith(_STREAM) or len(head) < len(_STREAM) + 4:
        return False
    length = int.from_bytes(head[len(_STREAM) : len(_STREAM) + 4], "little", signed=True)
    return 0 < length < _MOST_SCHEMA_BYTES and length % 8 == 0
