"""The page of a Parquet column that holds its shared values: how much it decodes to, and its longest value.

Its header is a struct of Thrift's compact form, read as far as it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from varlen.errors import SourceError

_HEADER_BYTES = 256
_DICTIONARY_PAGE = 2
_TYPE, _DECODED, _STORED, _ENTRIES = (1,), (2,), (3,), (7, 1)
"""Fields of a page's header."""
_TRUE, _FALSE, _FIRST_NUMBER, _LAST_NUMBER, _STRUCT = 1, 2, 4, 6, 12
"""Kinds of Thrift's fields."""
_LENGTH_BYTES = 4
"""Before each value."""
_CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "ZSTD": "zstd", "LZ4": "lz4_raw"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DictionaryPage:
    """Where the shared values of a column stand."""

    begin: int
    """Of what follows the header."""
    stored: int
    """Bytes."""
    decoded: int
    """Bytes."""
    entries: int


def dictionary_page(stored: BinaryIO, at: int) -> DictionaryPage | None:
    """Return the dictionary page that begins at a place, or None where none does.

    Args:
        stored: the file; where it is read next isn't kept.
        at: where the page begins.
    """
    stored.seek(at)
    try:
        numbers, end = _struct(stored.read(_HEADER_BYTES), 0)
    except (IndexError, SourceError):
        return None
    sizes = [numbers.get(field, -1) for field in (_STORED, _DECODED, _ENTRIES)]
    if numbers.get(_TYPE) != _DICTIONARY_PAGE or min(sizes) < 0:
        return None
    return DictionaryPage(begin=at + end, stored=sizes[0], decoded=sizes[1], entries=sizes[2])


def longest_entry(stored: BinaryIO, page: DictionaryPage, compression: str) -> int:
    """Return the bytes of the longest string of a dictionary; those of all where that can't be told.

    Args:
        stored: the file; where it is read next isn't kept.
        page: of `dictionary_page`.
        compression: what Parquet calls it.
    """
    import pyarrow as pa

    stored.seek(page.begin)
    content = stored.read(page.stored)
    try:
        if compression != "UNCOMPRESSED":
            content = pa.decompress(content, page.decoded, _CODECS[compression], asbytes=True)
    except (KeyError, OSError, ValueError, NotImplementedError):
        return page.decoded
    at = longest = 0
    while at + _LENGTH_BYTES <= len(content):
        length = int.from_bytes(content[at : at + _LENGTH_BYTES], "little")
        longest = max(longest, length)
        at += _LENGTH_BYTES + length
    return longest if at == len(content) else page.decoded


def _struct(content: bytes, at: int, path: tuple[int, ...] = ()) -> tuple[dict[tuple[int, ...], int], int]:
    """Return the numbers of a struct by the path of their fields, and where it ends.

    Raises:
        SourceError: a field of a kind that page headers of dictionaries don't have.
        IndexError: it isn't over where the content is.
    """
    numbers: dict[tuple[int, ...], int] = {}
    field = 0
    while content[at]:
        kind, step = content[at] & 15, content[at] >> 4
        at += 1
        if step:
            field += step
        else:
            field, at = _number(content, at)
        if _FIRST_NUMBER <= kind <= _LAST_NUMBER:
            numbers[*path, field], at = _number(content, at)
        elif kind == _STRUCT:
            inner, at = _struct(content, at, (*path, field))
            numbers |= inner
        elif kind not in (_TRUE, _FALSE):
            raise SourceError(f"a field of kind {kind} in the header of a page")
    return numbers, at + 1


def _number(content: bytes, at: int) -> tuple[int, int]:
    """Return a number of a varying count of bytes, and where it ends."""
    found = shift = 0
    while True:
        byte = content[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return (found >> 1) ^ -(found & 1), at
