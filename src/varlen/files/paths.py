"""A file of documents: its name, its size, and the format that its name indicates."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from varlen.counts import many
from varlen.errors import SourceError
from varlen.files.retry import USUAL, Retry
from varlen.files.seen import Seen

# The reader of rows that are served while they are read (`documents/serving.py`): a socket read like a file.

# The line after the last row, and the prefix of a line that says why there is no next row; no row begins like these.
END, FAILED = b"\x04\n", b"\x15"


class ArrowStream(Protocol):
    """Tables of any library, through Arrow's C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the table's batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """What is known of served rows before they are read."""

    names: tuple[tuple[str, ...], ...]  # keys of the first rows, one tuple per row
    is_once: bool  # whether they can be iterated over only once


class LiveRows:
    """The lines of one pass over served rows, as a file read from its beginning."""

    def __init__(self, where: str, path: str) -> None:
        import socket  # rarely needed

        self._where, self._socket = where, socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise SourceError(
                f"{where} can't be read any more: the loader that it was given to is closed; make another"
            ) from error
        self._file = self._socket.makefile("rb", 1 << 16)
        self._is_over = False

    def readline(self, limit: int = -1) -> bytes:
        """Return the next line; b"" after the last row."""
        if self._is_over:
            return b""
        line = self._file.readline(limit)
        if line == END:
            self._is_over = True
            return b""
        if line.startswith(FAILED):
            raise SourceError(json.loads(line[len(FAILED) :]))
        if not line:
            raise SourceError(f"{self._where} ended in the middle: the process that gives its rows is gone")
        return line

    def close(self) -> None:
        """Disconnect."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> LiveRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Format = Literal["jsonl", "json", "csv", "tsv", "text", "parquet", "arrow", "npz"]
FORMAT_NAMES: dict[Format, str] = {
    "jsonl": "JSON lines",
    "json": "JSON",
    "csv": "CSV",
    "tsv": "TSV",
    "text": "text",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "npz": "npz",
}
Compression = Literal["gzip", "zstd"]
# A file, folder, glob or URL; rows in memory, in the forms that `memory_forms` accepts; or a list of such sources.
Data = str | os.PathLike[str] | Mapping[str, Any] | Iterable[Any] | Callable[[], Iterable[Any]] | ArrowStream

# Row formats by suffix; any other file is text, unless its content shows that it holds rows.
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".npz": "npz",
}
TEXT_SUFFIXES = {".txt", ".md", ".rst"}  # text files that are read from a folder
# Source code: text if named, but not read from a folder.
CODE_SUFFIXES = frozenset(
    f".{end}"
    for line in (
        "asm bat c cc clj cmake cpp cs css cu cuh cxx dart el erl ex exs f90 go gradle groovy h hh hpp",
        "hs java jl js jsx kt kts less lisp lua m ml mm nim php pl pm proto ps1 py pyi pyx r rb rs sass",
        "scala scm scss sh sol sql svelte swift tcl ts tsx v vb vhd vim vue zig zsh",
    )
    for end in line.split()
)
# Markup and configuration: likewise.
MARKUP_SUFFIXES = frozenset({".adoc", ".bib", ".cls", ".diff", ".htm", ".html", ".org", ".patch", ".srt"}) | {
    *(".sty", ".tex", ".toml", ".vtt", ".xhtml", ".xml", ".yaml", ".yml")
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}

_LONGEST_PATH = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of documents, and how it is to be read."""

    path: str  # as it is opened: a local path, or a URL
    name: str  # relative to what the user named, with slashes: the same wherever the data lies
    size: int  # bytes as stored, or -1 where a server doesn't report it
    format: Format
    suffix_compression: Compression | None = None  # by its suffix; the file's first bytes take precedence
    is_format_given: bool = False  # the caller gave the format
    binary_as_text: bool = False  # read binary columns of tables as UTF-8 text
    # Called with the path and the byte range that was read, about a megabyte at a time, for local files.
    on_read: Callable[[str, int, int], None] | None = field(default=None, compare=False, repr=False)
    mark: str | None = None  # ETag or checksum that the server listed, which changes with the content
    retry: Retry = field(default=USUAL, compare=False, repr=False)  # for remote files
    stored: str | None = None  # where rows given in memory lie; `path` then names them, for messages
    content: str | None = None  # its fingerprint, if known
    # Identifies the file that was listed, to detect a replacement during a run: the status of a local file, or what a
    # server reports, times included. Never part of a fingerprint.
    seen: Seen | str | None = field(default=None, compare=False, repr=False)
    known: str | None = field(default=None, compare=False, repr=False)  # at the beginning of the run
    live: Live | None = None  # set if its rows are served while it is read; size and content are then unknown
    hold: object = field(default=None, compare=False, repr=False)  # keeps the file while referenced

    def __str__(self) -> str:
        return self.path

    @property
    def local_path(self) -> str:
        """Where it is opened, if it is local."""
        return self.stored or self.path

    @property
    def folder(self) -> Path | None:
        """The folder that holds it, if that is one of the user's."""
        return None if self.is_remote or self.stored is not None else Path(self.path).parent

    @property
    def is_remote(self) -> bool:
        """Whether it is behind a URL."""
        return is_url(self.path)


def entries_of(data: Data) -> list[Any]:
    """Return the list of sources in `data`, a single one as a list."""
    return [data] if isinstance(data, str | os.PathLike | File) else list(cast(Iterable[Any], data))


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Data files of a folder that aren't read, for one reason."""

    why: str  # a noun phrase: "split test"
    num_files: int
    num_bytes: int  # as far as sizes are known
    names: tuple[str, ...]  # of the first few, relative to what the user named


def unread(left_out: Sequence[LeftOut], taken: Sequence[str]) -> str | None:
    """Return a note on the split that is read and the files that aren't; None if all are read."""
    if not left_out:
        return None
    shown = [
        f"{group.why} ({many(group.num_files, 'file')}, {many(group.num_bytes, 'byte')}: "
        f"{', '.join(group.names[:3])}{', ...' if group.num_files > 3 else ''})"
        for group in left_out
    ]
    read = f"split {' and '.join(taken)} is read; " if taken else ""
    way_out = "; --split NAME (split=) reads another split, --split all reads all of them" if taken else ""
    return f"{read}left out: {', '.join(shown)}{way_out}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The files that the caller's data resolves to."""

    files: tuple[File, ...]
    left_out: tuple[LeftOut, ...] = ()  # of folders: other splits, caches, broken links
    taken: tuple[str, ...] = ()  # splits chosen from folders with several, without duplicates


def is_url(data: str | Path) -> bool:
    """Whether this is a URL rather than a local path."""
    return "://" in str(data)


def kind_of(name: str) -> tuple[Format, Compression | None]:
    """Return format and compression by a name's suffixes."""
    suffix, compression = _suffixes(name)
    return FORMATS.get(suffix, "text"), compression


def is_text_name(name: str) -> bool:
    """Whether a name's suffix is one of text."""
    return _suffixes(name)[0] in TEXT_SUFFIXES | CODE_SUFFIXES | MARKUP_SUFFIXES


def is_code(name: str) -> bool:
    """Whether a name's suffix is one of source code."""
    return _suffixes(name)[0] in CODE_SUFFIXES


def suffix_of(name: str) -> str:
    """Return the suffix of a name, in lower case, before that of a compression; "" where there is none."""
    return _suffixes(name)[0]


def _suffixes(name: str) -> tuple[str, Compression | None]:
    stem, suffix = _without_suffix(name.lower().rpartition("/")[2])
    compression = COMPRESSIONS.get(suffix)
    return (_without_suffix(stem)[1] if compression else suffix), compression


def _without_suffix(name: str) -> tuple[str, str]:
    """Return stem and suffix as pathlib does, which takes ten times as long."""
    at = name.rfind(".")
    return (name[:at], name[at:]) if 0 < at < len(name) - 1 else (name, "")


def refuse_text(entry: str, what: str) -> None:
    """Raise if a string can't be meant as a path, with the call to write instead."""
    if "\n" in entry or len(entry) > _LONGEST_PATH:
        raise SourceError(
            f"{what} is text ({entry[:40]!r} ...), but a string must name a file; to pass texts, use "
            '[{"text": text} for text in texts]'
        )
