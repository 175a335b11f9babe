"""A file of documents: its name, its size, and what its name says that it holds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

from varlen.counts import many
from varlen.errors import SourceError
from varlen.files.retry import Retry
from varlen.files.seen import Seen

# The reader's end of rows that are given one by one while they are read (`serving.py`): a file that is a socket.

END, FAILED = b"\x04\n", b"\x15"
"""The line behind the last row, and the beginning of one that says why there is no next row; no row begins so."""


class ArrowStream(Protocol):
    """Tables of any library, by Arrow's own interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the table's batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """What is known of rows before they come."""

    names: tuple[tuple[str, ...], ...]
    """Of the first rows' columns, row by row."""
    is_once: bool
    """Whether they can be iterated over once only."""


class _Lines:
    """The lines of a pass, as a file that is read from its beginning."""

    def __init__(self, where: str, path: str) -> None:
        import socket  # which few readers need

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
        """Return the next line; none behind the last row."""
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
        """Take no more."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> _Lines:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def open_live(where: str, path: str) -> BinaryIO:
    """Begin a pass."""
    return cast(BinaryIO, _Lines(where, path))


Format = Literal["jsonl", "json", "csv", "tsv", "text", "parquet", "arrow", "npz"]
Compression = Literal["gzip", "zstd"]
Data = str | os.PathLike[str] | Mapping[str, Any] | Iterable[Any] | Callable[[], Iterable[Any]] | ArrowStream
"""A file, folder, glob or URL; rows in memory, in the forms that `memory_forms` has; or a list of such sources."""

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
"""Formats of rows by the end of a file's name; any other file is text, unless its content says that it holds rows."""
TEXT_SUFFIXES = {".txt", ".md", ".rst"}
"""Text files that a folder gives."""
CODE_SUFFIXES = frozenset(
    f".{end}"
    for line in (
        "asm bat c cc clj cmake cpp cs css cu cuh cxx dart el erl ex exs f90 go gradle groovy h hh hpp",
        "hs java jl js jsx kt kts less lisp lua m ml mm nim php pl pm proto ps1 py pyi pyx r rb rs sass",
        "scala scm scss sh sol sql svelte swift tcl ts tsx v vb vhd vim vue zig zsh",
    )
    for end in line.split()
)
"""Source code: names that say text, though a folder doesn't give such files."""
MARKUP_SUFFIXES = frozenset({".adoc", ".bib", ".cls", ".diff", ".htm", ".html", ".org", ".patch", ".srt"}) | {
    *(".sty", ".tex", ".toml", ".vtt", ".xhtml", ".xml", ".yaml", ".yml")
}
"""Markup and settings: the same."""
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}

_LONGEST_PATH = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file of documents."""

    path: str
    """As it is opened: a local path, or a URL."""
    name: str
    """Relative to what the user named, with slashes: the same wherever the data lies."""
    size: int
    """Bytes as stored, or -1 where a server doesn't say."""
    format: Format
    suffix_compression: Compression | None = None
    """What the end of its name says; what the file's first bytes say goes before it."""
    is_told: bool = False
    """The caller says the format, whatever the name does."""
    binary_as_text: bool = False
    """Binary columns of tables are read as UTF-8 text."""
    on_read: Callable[[str, int, int], None] | None = field(default=None, compare=False, repr=False)
    """Told its path and where what is read of it begins and ends, about a megabyte at a time, where it is local."""
    mark: str | None = None
    """What a server said when it was listed that changes whenever its content does: an ETag or a checksum."""
    retry: Retry = field(default=Retry(), compare=False, repr=False)
    """How often and how long a read of it is tried, where it is remote."""
    stored: str | None = None
    """Where it lies, if it holds rows that were given in memory: `path` names those, for messages."""
    content: str | None = None
    """Its fingerprint, where that is known already."""
    seen: Seen | str | None = field(default=None, compare=False, repr=False)
    """What tells, while a run reads it, that it was replaced: of a local file what was seen when it was listed, of a
    remote one what the server said, times among it. Never part of a fingerprint."""
    known: str | None = field(default=None, compare=False, repr=False)
    """The fingerprint that it had when the run began, where it was computed."""
    live: Live | None = None
    """What is known of it, if its rows are given while it is read; it has neither a size nor a content then."""
    hold: object = field(default=None, compare=False, repr=False)
    """What keeps it there as long as it is held."""

    def __str__(self) -> str:
        """Name it as messages do."""
        return self.path

    @property
    def place(self) -> str:
        """Where it is opened, if it is local."""
        return self.stored or self.path

    @property
    def folder(self) -> Path | None:
        """The folder that it lies in, if that is one of the user's."""
        return None if self.is_remote or self.stored is not None else Path(self.path).parent

    @property
    def is_remote(self) -> bool:
        """Whether fsspec opens it."""
        return is_url(self.path)


def entries_of(data: Data) -> list[Any]:
    """Return the sources that data names, rows in memory among them as files."""
    return [data] if isinstance(data, str | os.PathLike | File) else list(cast(Iterable[Any], data))


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Files of a folder that hold data and aren't read, for one reason."""

    why: str
    """A noun phrase: "split test"."""
    num_files: int
    num_bytes: int
    """As far as their sizes are known."""
    names: tuple[str, ...]
    """Of the first few, relative to what the user named."""


def unread(left_out: Sequence[LeftOut], taken: Sequence[str]) -> str | None:
    """Say which split is read, what of folders isn't, and how to read it; None where all is."""
    if not left_out:
        return None
    shown = [
        f"{one.why} ({many(one.num_files, 'file')}, {many(one.num_bytes, 'byte')}: "
        f"{', '.join(one.names[:3])}{', ...' if one.num_files > 3 else ''})"
        for one in left_out
    ]
    read = f"split {' and '.join(taken)} is read; " if taken else ""
    way_out = "; --split NAME (split=) reads another, all everything" if taken else ""
    return f"{read}left out: {', '.join(shown)}{way_out}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the caller's data stands for."""

    files: tuple[File, ...]
    left_out: tuple[LeftOut, ...] = ()
    """Of folders: other splits, caches, links that lead nowhere."""
    taken: tuple[str, ...] = ()
    """Splits that were taken of folders with several, once each."""


def is_url(data: str | Path) -> bool:
    """Whether this names something that isn't a local path."""
    return "://" in str(data)


def kind_of(name: str) -> tuple[Format, Compression | None]:
    """Return format and compression by the end of a name."""
    suffix, compression = _ends(name)
    return FORMATS.get(suffix, "text"), compression


def says_text(name: str) -> bool:
    """Whether the end of a name says that the file holds text."""
    return _ends(name)[0] in TEXT_SUFFIXES | CODE_SUFFIXES | MARKUP_SUFFIXES


def is_code(name: str) -> bool:
    """Whether the end of a name says source code."""
    return _ends(name)[0] in CODE_SUFFIXES


def suffix_of(name: str) -> str:
    """Return the end of a name before that of a compression, in lower case; "" where there is none."""
    return _ends(name)[0]


def _ends(name: str) -> tuple[str, Compression | None]:
    stem, suffix = _without_suffix(name.lower().rpartition("/")[2])
    compression = COMPRESSIONS.get(suffix)
    return (_without_suffix(stem)[1] if compression else suffix), compression


def _without_suffix(name: str) -> tuple[str, str]:
    """Return stem and suffix as pathlib does, which takes ten times as long."""
    at = name.rfind(".")
    return (name[:at], name[at:]) if 0 < at < len(name) - 1 else (name, "")


def refuse_text(entry: str, what: str) -> None:
    """Refuse a string that can't be meant as a path, with the line to write."""
    if "\n" in entry or len(entry) > _LONGEST_PATH:
        raise SourceError(
            f"{what} is a text ({entry[:40]!r} ...), and strings name files; for rows of texts pass "
            '[{"text": text} for text in texts]'
        )
