"""Text files: one document per file, paragraph or line."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, Literal, cast

from varlen.errors import SourceError
from varlen.files.columns import DOCUMENT_FIELDS
from varlen.files.contents import LOOKED_AT_BYTES, fields_in, rows_in
from varlen.files.opening import open_plain
from varlen.files.paths import File
from varlen.files.rows import BATCH_SIZE, Found, Rows, gather, location

Cut = Literal["file", "paragraph", "line"]
_MOST_DOCUMENT_BYTES = 256 << 20


def read(file: File, cut: Cut) -> Iterator[Rows]:
    """Yield the documents of a text file in a column `text`."""
    with open_plain(file) as stream:
        _refuse_rows(file, stream)
        documents = _whole(stream, file.path) if cut == "file" else _parts(stream, file.path, cut)
        unit = "" if cut == "file" else "line"
        # No document is empty, so a batch reaches its size before its number of rows.
        yield from gather(_rows(documents), names=["text"], path=file.path, unit=unit, most_rows=BATCH_SIZE)


def _refuse_rows(file: File, stream: BinaryIO) -> None:
    """Raise if a file with a suffix of text holds JSON rows, unless the caller gave the format."""
    if file.is_format_given:
        return
    head = cast(io.BufferedReader, stream).peek(LOOKED_AT_BYTES)[:LOOKED_AT_BYTES]
    if head[:4].strip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
        return
    rows = rows_in(head, DOCUMENT_FIELDS, is_whole=len(head) < LOOKED_AT_BYTES)
    if rows is not None and not fields_in(head.decode(errors="replace").lstrip("\ufeff \t\r\n[")).isdisjoint(
        DOCUMENT_FIELDS
    ):
        raise SourceError(
            f"{file.path} holds JSON rows, though its suffix is that of text; rename it, or pass its format: "
            f'--read-as {rows} or --read-as text (format="{rows}", format="text")'
        )


def _rows(documents: Iterator[tuple[int, bytes]]) -> Iterator[Found]:
    for line, content in documents:
        try:
            text = content.decode()
            if "\0" in text:
                at = content.index(b"\0")
                why = f"is not text: byte {at:,} is NUL; leave it out, or pass --read-as (format=)"
                yield line, len(content), why
            else:
                yield line, len(content), [text.removeprefix("\ufeff" if line == 1 else "")]
        except UnicodeDecodeError as error:
            bad = f"byte {error.start:,} is 0x{content[error.start]:02x}"
            why = f"is not UTF-8 text ({bad}); convert it, or pass --read-as (format=) if it isn't text"
            yield line, len(content), why


def _whole(stream: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the whole file, unless it is empty."""
    content = stream.read(_MOST_DOCUMENT_BYTES + 1)
    if len(content) > _MOST_DOCUMENT_BYTES:
        raise SourceError(
            f"{path} is one document of more than {_MOST_DOCUMENT_BYTES >> 20:,} MB; "
            'cut it: --text-cut paragraph or line (text_cut="paragraph")'
        )
    if content:
        yield 1, content


def _parts(stream: BinaryIO, path: str, cut: Cut) -> Iterator[tuple[int, bytes]]:
    """Yield paragraphs or lines without their last line end, and the number of each one's first line."""
    gathered: list[bytes] = []
    begins, num_bytes, number = 1, 0, 0
    while line := stream.readline(_MOST_DOCUMENT_BYTES):
        number += 1
        is_blank = not line.strip(b"\xef\xbb\xbf \t\r\n" if number == 1 else None)
        if not is_blank:
            begins = begins if gathered else number
            gathered.append(line)
            num_bytes += len(line)
        if num_bytes >= _MOST_DOCUMENT_BYTES:
            raise SourceError(
                f"{location(path, 'line', begins)} begins a {cut} of more than {_MOST_DOCUMENT_BYTES >> 20:,} MB; "
                "put blank lines or line ends between documents"
            )
        if gathered and (is_blank or cut == "line"):
            yield begins, _joined(gathered)
            gathered, num_bytes = [], 0
    if gathered:
        yield begins, _joined(gathered)


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(lines).replace(b"\r\n", b"\n").rstrip(b"\n")
