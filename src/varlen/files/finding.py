"""Resolve paths, folders, globs and URLs to the files that are read, in a fixed order."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from varlen.counts import many
from varlen.errors import SourceError
from varlen.files.columns import DOCUMENT_FIELDS
from varlen.files.folders import Chosen, Folder, choose_files, dangling_links
from varlen.files.opening import rows_at
from varlen.files.paths import Data, File, Format, Found, LeftOut, entries_of, is_text_name, is_url, kind_of
from varlen.files.remote import Listed, list_remote, read_remote
from varlen.files.retry import USUAL, Retry
from varlen.files.seen import Seen
from varlen.files.splits import ALL, no_such_split
from varlen.files.written import (
    MANIFESTS,
    PARTIAL,
    WORK,
    check_parts,
    is_beside_results,
    is_unfinished,
    read_manifest,
    what_varlen_wrote,
)
from varlen.regular import read_regular

_THREADS = 16  # that inspect remote files concurrently


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """How the caller wants files to be selected and read."""

    split: str | None = None  # for folders with several: its name, or "all"; None for `train`
    format: Format | None = None  # of every file; None: detected by name and content
    binary_as_text: bool = False  # read binary columns of tables as UTF-8 text
    fields: Collection[str] = ()  # document columns with unusual names
    leave_out: Sequence[Path] = ()  # output folders, skipped where a folder or a glob contains them
    retry: Retry = USUAL


def find(data: Data, naming: Naming | None = None) -> Found:
    """List the files that paths, folders, globs or URLs resolve to, and the files in their folders that aren't read.

    Each entry gives its files sorted by name; entries keep their order. Folders that are symbolic links are followed;
    a folder reached twice is read once. A file, and whatever a glob matches, is always read.
    """
    naming = naming or Naming()
    entries = entries_of(data)
    if not entries:
        raise SourceError("no data was named; pass a file, a folder, a glob or a URL")
    entries_found = [_find(entry, naming) for entry in entries]
    files = [file for entry in entries_found for file in entry.files]
    if naming.split not in (None, ALL) and not any(entry.is_folder for entry in entries_found):
        raise SourceError(
            f"{no_such_split(str(naming.split), {}, str(entries[0]))}: files and globs are read as they are named"
        )
    _refuse_twice(files)
    if all(file.size == 0 for file in files):
        beside = many(len(files) - 1, "file beside it is", "files beside it are")
        more = f", and {beside} too" if len(files) > 1 else ""
        raise SourceError(f"{files[0].path} is empty (0 bytes){more}; was it written to the end?")
    return Found(
        files=tuple(files),
        left_out=tuple(group for entry in entries_found for group in entry.left_out),
        taken=tuple(dict.fromkeys(split for entry in entries_found for split in entry.taken)),
    )


def _refuse_twice(files: Sequence[File]) -> None:
    """Raise if a file is listed twice, by name or through a link."""
    seen: dict[str, str] = {}
    for file in files:
        location = file.path if file.is_remote else os.path.realpath(file.local_path)
        first = seen.setdefault(location, file.path)
        if first is file.path:
            continue
        linked = os.path.abspath(first) != os.path.abspath(file.path)  # noqa: PTH100 - leaves links alone
        twice = f"and {first} are links to one file" if linked and not file.is_remote else "is named twice"
        raise SourceError(f"{file.path} {twice}; its documents would be read twice: name it once")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """The files that one entry of the caller's data resolves to."""

    files: list[File]
    is_folder: bool = False
    left_out: tuple[LeftOut, ...] = ()
    taken: tuple[str, ...] = ()


def _find(data: str | Path | File, naming: Naming) -> _Entry:
    if isinstance(data, File):  # rows in memory, whose format is known
        return _Entry(files=[replace(data, binary_as_text=naming.binary_as_text)])
    if not str(data):
        raise SourceError("an empty path was given; pass a file, a folder, or a glob ('.' is this folder)")
    if is_url(data):
        return _find_remote(str(data), naming)
    try:
        return _find_local(data, naming)
    except OSError as error:
        raise SourceError(f"{data} can't be read: {error.strerror or error}") from error
    except (RuntimeError, ValueError) as error:  # "~" of an unknown user, "**" beside other characters
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{data} can't be a path or a glob: {error}") from error


def _find_local(data: str | Path, naming: Naming) -> _Entry:
    path = Path(data).expanduser()
    if path.is_file():
        return _as_named([_listed(path, path.parent)], naming)
    if path.is_dir():
        return _of_folder(_local_folder(path, naming), naming)
    if path.is_symlink():
        raise SourceError(dangling_links([str(data)]))
    if glob.has_magic(str(path)):
        return _as_named(_matching(path, data, _unread(naming)), naming)
    if path.exists():
        raise SourceError(
            f"{data} is neither a file nor a folder (a pipe or a device); save it to a file first"
        )
    raise SourceError(
        f"{data} does not exist; pass a JSONL, JSON, CSV, Parquet, Arrow or text file, a folder of them, or a glob"
        + ('; if it is a text, pass rows: [{"text": text} for text in texts]' if " " in str(data) else "")
    )


def _unread(naming: Naming) -> list[Path]:
    """Return the output folders, and the folders in which outputs are prepared."""
    return [path for out in naming.leave_out if out.name for path in (out, out.with_name(out.name + PARTIAL))]


def _find_remote(url: str, naming: Naming) -> _Entry:
    listing, kind = list_remote(url, naming.retry)
    if kind != "folder":
        return _as_named(listing, naming)
    folder = Folder(
        path=url,
        listing=listing,
        read=lambda entry: read_remote(entry.path, naming.retry),
        look=lambda entries: _look([_file(entry, naming) for entry in entries], naming),
    )
    return _of_folder(folder, naming)


def _as_named(listing: Sequence[Listed], naming: Naming) -> _Entry:
    """Return files named individually: all are read; the content of those with uninformative names is inspected."""
    files = [_file(entry, naming) for entry in listing]
    unknown = [
        file
        for file in files
        if not file.is_format_given and file.format == "text" and not is_text_name(file.name)
    ]
    seen = {
        file.path: format_ for file, format_ in zip(unknown, _look(unknown, naming)) if format_ is not None
    }
    return _Entry(files=[replace(f, format=seen[f.path]) if f.path in seen else f for f in files])


def _of_folder(folder: Folder, naming: Naming) -> _Entry:
    """Return the files of a folder that hold documents."""
    chosen: Chosen = choose_files(folder, naming.split, naming.format)
    files = [_file(entry, naming) for entry in chosen.entries]
    if naming.format is None:
        files = [replace(file, format=chosen.formats.get(file.path, file.format)) for file in files]
    return _Entry(files=files, is_folder=True, left_out=chosen.summary(), taken=chosen.taken)


def _look(files: Sequence[File], naming: Naming) -> list[Format | None]:
    """Return the row format of each file, by its first bytes; None if unreadable, which is reported later."""
    fields = DOCUMENT_FIELDS.union(naming.fields)

    def look(file: File) -> Format | None:
        try:
            return rows_at(file, fields)
        except SourceError:
            return None

    if not any(file.is_remote for file in files):
        return [look(file) for file in files]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="varlen-look") as threads:
        return list(threads.map(look, files))


def _matching(path: Path, data: str | Path, unread: Sequence[Path]) -> list[Listed]:
    fixed = Path(*_before_magic(path.parts))
    pattern = path.relative_to(fixed)
    if pattern.name == "**":  # older Pythons match folders only
        pattern /= "*"
    matched = sorted(fixed.glob(str(pattern)))
    gone = [str(p) for p in matched if p.is_symlink() and not p.exists()]
    if gone:
        raise SourceError(dangling_links(gone))
    files = _without([p for p in matched if p.is_file() and not is_beside_results(p)], unread)
    if not files:
        raise SourceError(f"no file matches {data}; quote the pattern so that the shell leaves it alone")
    folders = {p.parent for p in files} - {fixed}
    results = sorted(folder for folder in folders if what_varlen_wrote(folder) is not None)
    # If all files are in results, the results are what the user means.
    if results and any(p.parent not in results for p in files):
        raise SourceError(_result_in_data(results, str(data)))
    return [_listed(p, fixed) for p in files]


def _without(paths: Sequence[Path], unread: Sequence[Path]) -> list[Path]:
    """Leave out paths below some folders, with links resolved."""
    excluded = {path.resolve() for path in unread if path.exists()}
    if not excluded:
        return list(paths)
    folders = {path.parent: path.parent.resolve() for path in paths}
    inside = {f for f, real in folders.items() if not excluded.isdisjoint((real, *real.parents))}
    return [path for path in paths if path.parent not in inside]


def _before_magic(parts: Iterable[str]) -> list[str]:
    """Return the parts of a pattern before the first one with wildcards that isn't the name of a folder."""
    fixed: list[str] = []
    for part in parts:
        if glob.has_magic(part) and not Path(*fixed, part).is_dir():
            break
        fixed.append(part)
    return fixed or ["."]


def _listed(path: Path, root: Path, *, is_gone: bool = False) -> Listed:
    seen = None if is_gone else Seen.of(path.stat())
    size = -1 if seen is None else seen.size
    return Listed(path=str(path), name=path.relative_to(root).as_posix(), size=size, seen=seen)


def _file(listed: Listed, naming: Naming) -> File:
    format_, compression = kind_of(listed.name)
    return File(
        path=listed.path,
        name=listed.name,
        size=listed.size,
        format=naming.format or format_,
        suffix_compression=compression,
        is_format_given=naming.format is not None,
        binary_as_text=naming.binary_as_text,
        mark=listed.mark,
        seen=listed.seen,
        retry=naming.retry,
    )


def _local_folder(path: Path, naming: Naming) -> Folder:
    """List a folder; raise if it contains results of varlen beside data."""
    every, gone = _walk(path)
    unread = _unread(naming)
    files = _without(every, unread)
    _refuse_results(path, files)
    manifest = read_manifest(path)
    if manifest is not None and manifest.get("kind") == "packed":
        check_parts(path, manifest)
    gone = _without(gone, unread)
    listing = [*(_listed(p, path) for p in files), *(_listed(p, path, is_gone=True) for p in gone)]
    order = {str(p): number for number, p in enumerate(sorted([*files, *gone]))}
    return Folder(
        path=str(path),
        listing=sorted(listing, key=lambda entry: order[entry.path]),
        read=lambda entry: read_regular(entry.path),
        look=lambda entries: _look([_file(entry, naming) for entry in entries], naming),
        gone=frozenset(map(str, gone)),
    )


def _walk(path: Path) -> tuple[list[Path], list[Path]]:
    """List all files below a folder, linked folders included, each location once; and broken links."""
    paths: list[Path] = []
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(path, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders.sort()
        paths += [Path(folder, name) for name in names]
    files = {p: p.is_file() for p in sorted(paths)}
    gone = [p for p, is_file in files.items() if not is_file and p.is_symlink() and not p.exists()]
    return [p for p, is_file in files.items() if is_file], gone


def _refuse_results(path: Path, files: Sequence[Path]) -> None:
    """Raise if a folder contains results of varlen, which would be read in addition to their source data."""
    if is_unfinished(path):
        raise SourceError(
            f"{path} is an unfinished output; run the command that makes it again, and name what it gives"
        )
    unfinished = {file.parents[1] for file in files if file.parent.name == WORK}
    unfinished &= {file.parent for file in files}  # without rows, there is nothing that could be read
    folders = sorted((unfinished | {file.parent for file in files if file.name in MANIFESTS}) - {path})
    shown = [f for f in folders if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    results = [folder for folder in shown if what_varlen_wrote(folder) is not None]
    if results:
        raise SourceError(_result_in_data(results, str(path)))


def _result_in_data(results: Sequence[Path], data: str) -> str:
    more = f" ({len(results):,} such folders lie there)" if len(results) > 1 else ""
    return (
        f"{results[0]} is {what_varlen_wrote(results[0])} that varlen wrote{more}, and would be read as data beside "
        f"the rest of {data}; name the files or subfolders to read, or move it elsewhere"
    )
