"""From what the user names - paths, folders, globs, URLs - to the files that are read, in a fixed order."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from varlen.counts import many
from varlen.errors import SourceError
from varlen.source.live import ArrowStream, Live
from varlen.source.remote import Listed, list_remote, read_remote
from varlen.source.retry import Retry
from varlen.source.saved import described, refuse_indices
from varlen.source.written import (
    MANIFEST,
    MANIFESTS,
    PARTIAL,
    WORK,
    is_beside_results,
    is_unfinished,
    what_varlen_wrote,
)

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
"""Formats of rows by the end of a file's name; any other file is text."""
TEXT_SUFFIXES = {".txt", ".md", ".rst"}
"""Text files that a folder gives."""
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_ABOUT_DATA = ("readme", "license", "licence", "changelog", "notice", "contributing")
"""Beginnings of the names of text files that speak of the data beside them."""
_ABOUT_PACKS = re.compile(r"\d+_metadata\.jsonl")
"""What Megatron-Bridge, and `varlen pack` for it, write beside packed rows: how many there are, and how long."""
_OF_DATA_SETS = {"dataset_info.json", "dataset_dict.json", "state.json", MANIFEST, "_manifest.json"}


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


def is_url(data: str | Path) -> bool:
    """Whether this names something that isn't a local path."""
    return "://" in str(data)


def kind_of(name: str) -> tuple[Format, Compression | None]:
    """Return format and compression by the end of a name."""
    path = Path(name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    suffix = Path(path.stem).suffix if compression else path.suffix
    return FORMATS.get(suffix, "text"), compression


def find_files(data: Data, leave_out: Sequence[Path] = (), retry: Retry | None = None) -> list[File]:
    """List the files that paths, folders, globs or URLs stand for.

    Each of them gives its files sorted by name, one after the other in the order they were named. Folders that are
    links are followed; one that is met again is not.

    Args:
        data: what is named.
        leave_out: folders that results go to; where they lie in a folder or match a glob, they aren't read.
        retry: how often and how long a listing or a read of remote files is tried; None for the usual.

    Raises:
        SourceError: nothing is there, a file was named twice, or all of them are empty.
    """
    entries = entries_of(data)
    if not entries:
        raise SourceError("no data was named; pass a file, a folder, a glob or a URL")
    unread = [path for out in leave_out if out.name for path in (out, out.with_name(out.name + PARTIAL))]
    files = [file for entry in entries for file in _find(entry, unread, retry or Retry())]
    _refuse_twice(files)
    if all(file.size == 0 for file in files):
        beside = many(len(files) - 1, "file beside it is", "files beside it are")
        more = f", and {beside} too" if len(files) > 1 else ""
        raise SourceError(f"{files[0].path} is empty (0 bytes){more}; was it written to the end?")
    return files


def _refuse_twice(files: Sequence[File]) -> None:
    """Refuse a file that is met twice, by its own name or by that of a link to it.

    Raises:
        SourceError: there is one.
    """
    seen: dict[str, str] = {}
    for file in files:
        place = file.path if file.is_remote else os.path.realpath(file.place)
        first = seen.setdefault(place, file.path)
        if first is file.path:
            continue
        linked = os.path.abspath(first) != os.path.abspath(file.path)  # noqa: PTH100 - leaves links alone
        twice = f"and {first} are links to one file" if linked and not file.is_remote else "is named twice"
        raise SourceError(f"{file.path} {twice}; its documents would be read twice: name it once")


def _find(data: str | Path | File, unread: Sequence[Path], retry: Retry) -> list[File]:
    """List the files of one entry."""
    if isinstance(data, File):
        return [data]
    if not str(data):
        raise SourceError("an empty path was given; pass a file, a folder, or a glob ('.' is this folder)")
    if is_url(data):
        return [_file(listed, retry) for listed in _of_folder(_remote(str(data), retry), str(data))]
    try:
        return _find_local(data, unread)
    except OSError as error:
        raise SourceError(f"{data} can't be read: {error.strerror or error}") from error
    except (RuntimeError, ValueError) as error:  # "~" of nobody, "**" beside other letters
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{data} can't be a path or a glob: {error}") from error


def _find_local(data: str | Path, unread: Sequence[Path]) -> list[File]:
    """List the files of a path or a glob."""
    path = Path(data).expanduser()
    if path.is_file():
        return [_local(path, path.parent)]
    if path.is_dir():
        return _in_folder(path, unread)
    if glob.has_magic(str(path)):
        return _matching(path, data, unread)
    if path.exists():
        raise SourceError(
            f"{data} is neither a file nor a folder (a pipe or a device); save it to a file first"
        )
    raise SourceError(
        f"{data} does not exist; pass a JSONL, JSON, CSV, Parquet, Arrow or text file, a folder of them, or a glob"
        + ('; if it is a text, pass rows: [{"text": text} for text in texts]' if " " in str(data) else "")
    )


def _remote(url: str, retry: Retry) -> list[Listed]:
    """List the files behind a URL; of saved data sets those that are meant.

    Raises:
        SourceError: nothing is there, or a saved data set of several splits, or one whose rows are chosen and
            ordered by indices in another file.
    """
    listing = list_remote(url, retry)
    places = {listed.name: listed.path for listed in listing}
    splits = sorted(name.split("/")[0] for name in places if name.endswith("/state.json"))
    if "dataset_dict.json" in places and len(splits) > 1:
        raise SourceError(
            f"{url} holds several splits ({', '.join(splits)}); name one, such as {url}/{splits[0]}"
        )
    states = [name for name in places if name.rpartition("/")[2] == "state.json"]
    for name in states:
        if name.removesuffix("state.json") + "dataset_info.json" in places:
            refuse_indices(read_remote(places[name], retry), places[name])
    saved = {name.rpartition("/")[0] for name in states}
    # Beside a data set's own files lie what was made of them later.
    return [
        listed
        for listed in listing
        if not (listed.name.rpartition("/")[0] in saved and Path(listed.name).name.startswith("cache-"))
    ]


def _matching(path: Path, data: str | Path, unread: Sequence[Path]) -> list[File]:
    """List what a local glob matches."""
    root, pattern = Path(path.anchor), path.relative_to(path.anchor)
    if pattern.name == "**":  # to older Pythons, folders alone
        pattern /= "*"
    fixed = Path(*_before_magic(path.parts))
    matched = (p for p in root.glob(str(pattern)) if p.is_file() and not is_beside_results(p))
    found = _without(sorted(matched), unread)
    if not found:
        raise SourceError(f"no file matches {data}; quote the pattern so that the shell leaves it alone")
    folders = {p.parent for p in found} - {fixed}
    results = sorted(folder for folder in folders if what_varlen_wrote(folder) is not None)
    if results and any(p.parent not in results for p in found):  # else they are meant
        raise SourceError(_result_in_data(results, str(data)))
    return [_local(p, fixed) for p in found]


def _without(paths: Sequence[Path], unread: Sequence[Path]) -> list[Path]:
    """Leave out what lies in some folders, whatever links lead there."""
    places = {path.resolve() for path in unread if path.exists()}
    if not places:
        return list(paths)
    folders = {path.parent: path.parent.resolve() for path in paths}
    inside = {f for f, real in folders.items() if not places.isdisjoint((real, *real.parents))}
    return [path for path in paths if path.parent not in inside]


def _before_magic(parts: Iterable[str]) -> list[str]:
    """Return the parts of a pattern before the first that is one."""
    fixed: list[str] = []
    for part in parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return fixed or ["."]


def _local(path: Path, root: Path) -> File:
    return _file(_listed(path, root), Retry())


def _listed(path: Path, root: Path) -> Listed:
    return Listed(path=str(path), name=path.relative_to(root).as_posix(), size=path.stat().st_size)


def _file(listed: Listed, retry: Retry) -> File:
    format_, compression = kind_of(listed.name)
    return File(
        path=listed.path,
        name=listed.name,
        size=listed.size,
        format=format_,
        suffix_compression=compression,
        mark=listed.mark,
        retry=retry,
    )


def _in_folder(path: Path, unread: Sequence[Path] = ()) -> list[File]:
    """List a folder's files: those of a saved data set in their order, else all whose names are known."""
    saved = _saved_data_set(path)
    if saved is not None:
        return saved
    every = _without(_walk(path), unread)
    _refuse_results(path, every)
    listing = [_listed(p, path) for p in every]
    return [_file(listed, Retry()) for listed in _of_folder(listing, str(path))]


def _walk(path: Path) -> list[Path]:
    """List all files below a folder, sorted; folders that are links too, each place once."""
    found: list[Path] = []
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(path, onerror=fail, followlinks=True):
        place = os.path.realpath(folder)
        if place in seen:
            subfolders.clear()
            continue
        seen.add(place)
        subfolders.sort()
        found += [Path(folder, name) for name in names]
    return sorted(p for p in found if p.is_file())


def _refuse_results(path: Path, files: Sequence[Path]) -> None:
    """Refuse a folder with results of varlen's below it, whose rows would be read beside what they were made of.

    Raises:
        SourceError: there are some, or the folder itself is half a result.
    """
    if is_unfinished(path):
        raise SourceError(
            f"{path} is an unfinished output; run the command that makes it again, and name what it gives"
        )
    unfinished = {file.parents[1] for file in files if file.parent.name == WORK}
    unfinished &= {file.parent for file in files}  # without rows yet, there is nothing that could be read
    folders = sorted((unfinished | {file.parent for file in files if file.name in MANIFESTS}) - {path})
    shown = [f for f in folders if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    results = [folder for folder in shown if what_varlen_wrote(folder) is not None]
    if results:
        raise SourceError(_result_in_data(results, str(path)))


def _result_in_data(results: Sequence[Path], data: str) -> str:
    """Say that there are results among the data."""
    more = f" ({len(results):,} such folders lie there)" if len(results) > 1 else ""
    return (
        f"{results[0]} is {what_varlen_wrote(results[0])} that varlen wrote{more}, and would be read as data beside "
        f"the rest of {data}; name the files or subfolders to read, or move it elsewhere"
    )


def _of_folder(listing: list[Listed], folder: str) -> list[Listed]:
    """Choose the files of a folder that hold documents.

    What speaks of the data (README.md, LICENSE.txt, metadata of packed rows) isn't data where rows lie beside it;
    names that begin with a dot are left out.

    Raises:
        SourceError: none does.
    """
    shown = [e for e in listing if not any(part.startswith(".") for part in e.name.split("/"))]
    if len(shown) == 1 and shown[0].path == folder:
        return shown
    rows = [e for e in shown if kind_of(e.name)[0] != "text" and Path(e.name).name not in _OF_DATA_SETS]
    rows = [e for e in rows if not _ABOUT_PACKS.fullmatch(Path(e.name).name)] or rows
    names = {entry.path for entry in rows}
    for entry in shown:
        name = Path(entry.name)
        plain = name.with_suffix("") if name.suffix.lower() in COMPRESSIONS else name
        is_about = bool(rows) and name.name.lower().startswith(_ABOUT_DATA)
        if kind_of(entry.name)[0] == "text" and plain.suffix.lower() in TEXT_SUFFIXES and not is_about:
            names.add(entry.path)
    if not names:
        known = ", ".join(sorted(FORMATS.keys() | TEXT_SUFFIXES))
        raise SourceError(
            f"{folder} is a folder without any {known} file, plain or as .gz or .zst; "
            f"name other text files by a glob, such as '{folder.rstrip('/')}/**/*.tex'"
        )
    return [entry for entry in shown if entry.path in names]


def _saved_data_set(path: Path) -> list[File] | None:
    """List the files of a data set saved by Hugging Face's `save_to_disk`; None for any other folder.

    Raises:
        SourceError: its description can't be read, or it holds several splits and none is called "train", or its rows
            are chosen and ordered by indices in another file.
    """
    if (path / "dataset_dict.json").is_file():
        splits = described(path / "dataset_dict.json", "splits")
        chosen = splits[0] if len(splits) == 1 else "train"
        if chosen not in splits:
            named = ", ".join(map(str, splits)) or "none"
            raise SourceError(f"{path} holds several splits ({named}); name one, such as {path}/SPLIT")
        if not (path / str(chosen)).is_dir():
            raise SourceError(
                f"{path / 'dataset_dict.json'} names the split {chosen}, which isn't there; copy it too"
            )
        return _in_folder(path / str(chosen))
    if not ((path / "state.json").is_file() and (path / "dataset_info.json").is_file()):
        return None
    files = [entry.get("filename") for entry in described(path / "state.json", "_data_files")]
    refuse_indices((path / "state.json").read_bytes(), str(path / "state.json"))
    if not files:
        raise SourceError(f"{path / 'state.json'} names no files, so the data set is empty")
    missing = [name for name in files if not isinstance(name, str) or not (path / Path(name).name).is_file()]
    if missing:
        raise SourceError(
            f"{path / 'state.json'} names {missing[0]}, which isn't there ({len(missing):,} of {len(files):,} "
            "files are missing); copy the whole folder"
        )
    return [_local(path / Path(name).name, path) for name in files]
