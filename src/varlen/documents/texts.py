"""The text of documents, for callers that tokenize it themselves: the demo, which trains its tokenizer."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from varlen.documents.chat_rows import instruction_messages
from varlen.documents.memory import spooled
from varlen.errors import SourceError
from varlen.files.columns import Columns, Kind
from varlen.files.finding import Naming, find
from varlen.files.formats.reader import rows_of
from varlen.files.paths import Data
from varlen.files.rows import Rows, as_list, json_kind
from varlen.parsed import parse_python
from varlen.text.messages import as_messages

_ASKED = ("instruction", "context", "output")
_READ: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": _ASKED,
    "text": ("text",),
}


def read_texts(data: Data, split: str | None = None) -> Iterator[str]:
    """Yield the text of every document, in file and row order.

    Messages become lines of `role: content`; a prompt is followed by its completion. A single text file is cut at
    blank lines, since one document alone can't be packed with anything. Empty documents are left out. Memory is
    bounded by a few megabytes, or the longest row.
    """
    files = find(spooled(data), Naming(split=split)).files
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
        raise SourceError(
            f"{data} holds no text: {len(files):,} {were} read and all documents are empty; name files that hold text"
        )


def _texts(rows: Rows, columns: Columns) -> Iterator[str]:
    """Yield the text of each row."""
    if rows.faults:
        raise rows.faults[0].raised()
    if columns.kind == "tokens":
        raise SourceError(
            f"{rows.path} holds ready tokens (`input_ids`), but its text is needed here; give rows with "
            "text or messages"
        )
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


# The Python sources of the running interpreter as documents: real, long-tailed text, available everywhere.
#
# Top-level functions and classes of every module are separate documents; about 5 % of the modules, chosen by a hash
# of their names, stay whole and make the tail long. Tests and third-party packages are left out by name, so that two
# machines with the same Python version have the same documents whether or not the tests are installed.

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "__pycache__"}
_WHOLE_MODULES_PERCENT = 5


def interpreter_texts(folder: Path | None = None) -> Iterator[str]:
    """Yield functions, classes and some whole modules of the standard library, in file order.

    Deterministic: the same files give the same documents in the same order. Files that don't parse or decode are left
    out; parsing all of the standard library takes about 3 s.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(root).parts[:-1])
    )
    found_any = False
    for path in files:
        for text in _module_texts(path, path.relative_to(root).as_posix()):
            found_any = True
            yield text
    if not found_any:
        raise SourceError(f"this interpreter has no Python sources in {root}; pass your own text with --data")


def _module_texts(path: Path, name: str) -> Iterator[str]:
    """Yield a module whole, or its top-level functions and classes with their decorators."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's own invalid escapes don't concern the user
            tree = parse_python(source)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return
    if _stays_whole(name):
        if source.strip():
            yield source
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield "".join(lines[first - 1 : node.end_lineno])


def _stays_whole(name: str) -> bool:
    """Choose by a hash of the module's name, so that the choice is the same on every machine."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < _WHOLE_MODULES_PERCENT
