"""The text of documents, for those who make their own tokens of it: the demo, which learns its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from varlen.errors import SourceError
from varlen.source.chats.instructions import instruction_messages
from varlen.source.chats.messages import as_messages
from varlen.source.columns import Columns, Kind
from varlen.source.files import Data
from varlen.source.finding import Naming, find
from varlen.source.formats.reading import rows_of
from varlen.source.memory import placed
from varlen.source.rows import Rows, as_list, json_kind

_ASKED = ("instruction", "context", "output")
_READ: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": _ASKED,
    "text": ("text",),
}


def read_texts(data: Data, split: str | None = None) -> Iterator[str]:
    """Yield the text of every document, files in the order of their names and rows in the order of the file.

    Messages become lines of `role: content`; a prompt is followed by its completion. A single text file is cut at its
    blank lines, since one document alone can't be packed with anything. Empty documents are left out. Memory is
    bounded by a few megabytes, or the longest row.

    Args:
        data: a file, a folder, a glob or a URL, or several of them.
        split: of folders that hold several; "all", or None for `train`.

    Raises:
        SourceError: nothing is there, or a file is not what its name says; file and row are named.
    """
    files = find(placed(data), Naming(split=split)).files
    found_any = False
    for file in files:
        for rows, columns in rows_of(file, {}, "paragraph" if len(files) == 1 else "file"):
            if columns is None:
                raise rows.faults[0].raised()
            for text in _texts(rows, columns):
                if text.strip():
                    found_any = True
                    yield text
    if not found_any:
        were = "file was" if len(files) == 1 else "files were"
        raise SourceError(f"{data} holds no text: {len(files):,} {were} read and all documents are empty")


def _texts(rows: Rows, columns: Columns) -> Iterator[str]:
    """Yield the text of each row.

    Raises:
        SourceError: a row is faulty, or holds ready tokens.
    """
    if rows.faults:
        raise rows.faults[0].raised()
    if columns.kind == "tokens":
        raise SourceError(f"{rows.path} holds ready tokens (`input_ids`), but its text is needed here")
    roles = [role for role in _READ[columns.kind] if role in columns.names]
    values = [as_list(rows.columns[columns.names[role]]) for role in roles]
    for index, row in enumerate(zip(*values)):
        try:
            if columns.kind == "instruction":
                yield _text(instruction_messages(*(dict(zip(roles, row)).get(r) for r in _ASKED)), "messages")
            else:
                yield "".join(_text(value, role) for value, role in zip(row, roles))
        except SourceError as error:
            raise SourceError(f"{rows.where(index)} can't be used: {error}") from error


def _text(value: Any, role: str) -> str:
    """Return a text as it is, and messages as lines of role and content."""
    if not isinstance(value, str) or role == "messages":
        if role == "text":
            raise SourceError(f"`text` must be a string, found {json_kind(value)}")
        messages = as_messages(value)
        value = "".join(f"{message['role']}: {message['content'] or ''}\n" for message in messages)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise SourceError("it holds half a character (a lone surrogate)") from error
    return str(value)
