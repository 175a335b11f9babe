"""Read the text of documents from JSONL, Parquet and plain text files, one clear sentence for each fault.

What counts as a document:

- a row of a `.jsonl` (`.ndjson`) or `.parquet` file: its `text`; else its `messages`, flattened to
  `role: content` lines; else its `prompt` followed by its `completion` (either may be a list of messages);
- any other file is plain UTF-8 text, and one document. A single text file given by name is cut at its
  blank lines instead, since one document alone can't be packed with anything.

A folder gives its `.jsonl`, `.ndjson`, `.parquet`, `.txt`, `.md` and `.rst` files, the folders in it
included; name other text files by a glob.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from varlen.errors import SourceError

_ROW_SUFFIXES = {".jsonl", ".ndjson", ".parquet"}
_TEXT_SUFFIXES = {".txt", ".md", ".rst"}
_PARQUET_BATCH_ROWS = 256
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh91AY&SY": "bzip2",
    b"PK\x03\x04": "zip",
}
"""First bytes of compressed files, which would otherwise be called broken text."""


def read_texts(data: str | Path) -> Iterator[str]:
    """Yield the text of every document, files in the order of their names and rows in the order of the file.

    Empty documents are left out, and so are empty files beside others.
    Memory is bounded by the longest row, or by a batch of Parquet rows.

    Args:
        data: a file, a folder or a glob (`**` reaches into folders).

    Raises:
        SourceError: nothing is there, or a file is not what its name says; file and row are named.
    """
    files = find_files(data)
    found_any = False
    for path in files:
        for text in _read_file(path, is_alone=len(files) == 1):
            if text.strip():
                found_any = True
                yield text
    if not found_any:
        were = "file was" if len(files) == 1 else "files were"
        raise SourceError(f"{data} holds no text: {len(files):,} {were} read and all documents are empty")


def find_files(data: str | Path) -> list[Path]:
    """List the files that a path, folder or glob stands for, sorted by name.

    Raises:
        SourceError: no such file, an empty folder, or a glob that matches nothing.
    """
    if not str(data):
        raise SourceError("an empty path was given; pass a file, a folder, or a glob ('.' is this folder)")
    path = Path(data).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        known = _ROW_SUFFIXES | _TEXT_SUFFIXES
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in known and p.is_file())
        if not files:
            raise SourceError(
                f"{data} is a folder without any {', '.join(sorted(known))} file; "
                f"name other text files by a glob, such as '{path / '**' / '*.tex'}'"
            )
        return files
    if glob.has_magic(str(path)):
        root, pattern = Path(path.anchor), path.relative_to(path.anchor)
        if pattern.name == "**":  # to older Pythons, folders alone
            pattern /= "*"
        files = sorted(p for p in root.glob(str(pattern)) if p.is_file())
        if not files:
            raise SourceError(f"no file matches {data}; quote the pattern so that the shell leaves it alone")
        return files
    if path.exists():
        raise SourceError(
            f"{data} is neither a file nor a folder (a pipe or a device); save it to a file first"
        )
    raise SourceError(
        f"{data} does not exist; pass a JSONL, Parquet or text file, a folder of them, or a glob"
    )


def _read_file(path: Path, *, is_alone: bool) -> Iterator[str]:
    """Yield a file's documents, every fault of reading turned into a sentence that names the file."""
    suffix = path.suffix.lower()
    try:
        if path.stat().st_size == 0:
            if is_alone or suffix == ".parquet":  # a Parquet file without rows still has bytes
                raise SourceError(f"{path} is empty (0 bytes)")
            return
        _refuse_compressed(path)
        if suffix == ".parquet":
            yield from _read_parquet(path)
        elif suffix in _ROW_SUFFIXES:
            yield from _read_jsonl(path)
        else:
            yield from _read_plain_text(path, is_alone=is_alone)
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror or error}") from error


def _refuse_compressed(path: Path) -> None:
    """Say of a compressed file that it is one, whatever its name."""
    with path.open("rb") as file:
        first = file.read(max(map(len, _COMPRESSED)))
    for magic, kind in _COMPRESSED.items():
        if first.startswith(magic):
            raise SourceError(f"{path} is compressed ({kind}); unpack it first")


def _read_jsonl(path: Path) -> Iterator[str]:
    """Yield the text of each line, blank lines left out."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number:,}"
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise SourceError(f"{where} is not valid UTF-8 (byte {error.start:,} of the line)") from error
            except json.JSONDecodeError as error:
                raise SourceError(
                    f"{where} is not valid JSON: {error.msg} at column {error.colno:,}"
                ) from error
            except (ValueError, RecursionError) as error:
                raise SourceError(
                    f"{where} can't be read: a number of too many digits, or brackets nested too deeply"
                ) from error
            if not isinstance(row, dict):
                raise SourceError(f"{where} is a JSON {_json_kind(row)}, not an object with a `text` field")
            yield _row_text(row, where)


def _read_parquet(path: Path) -> Iterator[str]:
    """Yield the text of each row; only the columns that carry text are read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = [field.name for field in file.schema_arrow]
            columns = _text_columns(names, str(path))
            row_number = 0
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    row_number += 1
                    yield _row_text(row, f"{path} row {row_number:,}")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(f"{path} is not a readable Parquet file: {first_line}") from error


def _read_plain_text(path: Path, *, is_alone: bool) -> Iterator[str]:
    """Yield the whole file, or its paragraphs where it is the only file."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not UTF-8 text (byte {error.start:,} is 0x{content[error.start]:02x}); "
            "convert it, or name it .parquet or .jsonl if it is that"
        ) from error
    if is_alone:
        yield from re.split(r"\n[ \t]*\n\s*", text.replace("\r\n", "\n"))
    else:
        yield text


def _text_columns(names: list[str], where: str) -> list[str]:
    """Choose the columns that hold a row's text."""
    if "text" in names:
        return ["text"]
    if "messages" in names:
        return ["messages"]
    if "prompt" in names and "completion" in names:
        return ["prompt", "completion"]
    seen = ", ".join(f"`{name}`" for name in names[:12]) or "none"
    raise SourceError(
        f"{where} has no column of text: need `text`, `messages`, or `prompt` and `completion`, found {seen}"
    )


def _row_text(row: Mapping[str, Any], where: str) -> str:
    """Flatten one row to the text of its document."""
    parts = [_value_text(row[name], name, where) for name in _text_columns(list(row), where)]
    return "".join(parts)


def _value_text(value: Any, name: str, where: str) -> str:
    """Return a string as it is, and a list of messages as `role: content` lines."""
    if isinstance(value, str) and name != "messages":
        return _well_formed(value, name, where)
    if isinstance(value, list) and name != "text":
        return "".join(_message_text(message, name, where) for message in value)
    wanted = {"text": "a string", "messages": "a list of messages"}.get(
        name, "a string or a list of messages"
    )
    raise SourceError(f"{where}: `{name}` must be {wanted}, found {_json_kind(value)}")


def _message_text(message: Any, name: str, where: str) -> str:
    """Flatten one message; content given in parts keeps the parts that are text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise SourceError(f"{where}: every entry of `{name}` must be an object with `role` and `content`")
    content = message["content"]
    if isinstance(content, list):
        content = "".join(_part_text(part, where) for part in content)
    if content is None:  # a turn that only calls a tool
        content = ""
    if not isinstance(content, str):
        raise SourceError(f"{where}: the `content` of a message must be text, found {_json_kind(content)}")
    return _well_formed(f"{message['role']}: {content}\n", name, where)


def _part_text(part: Any, where: str) -> str:
    """Return the text of one part of a message; an image or another kind has none."""
    text = part.get("text") if isinstance(part, dict) else part
    if text is not None and not isinstance(text, str):
        raise SourceError(f"{where}: the parts of a message must hold text, found {_json_kind(text)}")
    return text or ""


def _well_formed(text: str, name: str, where: str) -> str:
    """Refuse text that no tokenizer can take: JSON can spell half a character (a lone surrogate)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SourceError(
            f"{where}: `{name}` holds half a character (a lone surrogate at position {error.start:,})"
        ) from error
    return text


def _json_kind(value: Any) -> str:
    """Name a value's kind in JSON's words."""
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
