"""Outputs: written under another name until they are complete, by one run at a time, and renamed atomically.

::

    OUT.partial/               renamed to OUT when it is complete
      part-00000.parquet ...   the output
      .work/                   removed after the rename
        lock                   held while a run works
        state.json             the run's fingerprint
        plan.json              the final number of parts of a token store, for concurrent readers
        part-00000.json ...    notes of finished tasks, which a later run reuses; of a token store 00000.json ...

A file is flushed to disk before it gets its name, and a note is written after the file that it describes, so notes
are valid even after a power failure.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from varlen import __version__
from varlen.errors import SettingError
from varlen.files.ours import (
    NO_LOCKS,
    check_names,
    disk_faults,
    is_folder,
    may_be_used,
    open_own,
    refuse_link,
    remove_entry,
    remove_marked,
    sync,
    write_json,
)
from varlen.files.paths import File
from varlen.files.written import (
    LOCK,
    MANIFESTS,
    PARTIAL,
    PLAN,
    SKIPPED,
    SKIPPED_OF_ROWS,
    STATE,
    WORK,
    read_manifest,
    with_checksum,
)
from varlen.regular import read_regular
from varlen.store.shard import SHARD_FILES
from varlen.store.store import TABLES

_LOCK_S = 0.5  # time to try for a lock: readers of an unfinished store hold it for a moment
_MOST_ATTEMPTS = 100


def check_output(folder: Path, manifest: dict[str, Any] | None, *, overwrite: bool) -> None:
    """Raise if an output can't be written, or its name is taken, before hours of work are done for it.

    `manifest` is the folder's when it was last read: another run may finish the output meanwhile.
    """
    if folder.suffix in (".parquet", ".arrow", ".jsonl"):
        raise SettingError(
            f"{folder} names a file, but a packed set is a folder of them; pass {folder.with_suffix('')}"
        )
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file; name a folder")
    if manifest is None and folder.is_dir() and any(folder.iterdir()) and read_manifest(folder) is None:
        raise SettingError(f"{folder} holds other files; name a new folder")
    if manifest is not None:
        if not overwrite:
            raise SettingError(
                f"{folder} holds a set made from other data or settings; name another folder, or pass --overwrite "
                "(overwrite=True)"
            )
        check_replaced(folder, manifest)
    around = folder.absolute().parent
    while not around.exists():
        around = around.parent
    if not around.is_dir():
        raise SettingError(f"{folder} can't be written: {around} is a file; name another folder")
    if not os.access(around, os.W_OK):
        raise SettingError(f"{folder} can't be written: no permission in {around}; name another folder")


def check_overlap(data: Sequence[File] | Path, output: Path, tokens: Path | None = None) -> None:
    """Raise if an output overlaps the data."""
    for path in (output, tokens):
        if path is not None and path.name in ("", ".."):
            raise SettingError(
                f"{path} has no name that a result could take; name a new folder, such as packed"
            )
    if tokens is not None and tokens.resolve() == output.resolve():
        raise SettingError(f"tokens and output are the same folder, {output}; name two")
    if isinstance(data, Path):
        read, written = {data}, [output]
    else:
        read = {file.folder for file in data if file.folder is not None}
        written = [output, tokens] if tokens else [output]
    targets = {resolved for path in written for resolved in (path.resolve(), partial_of(path).resolve())}
    for folder in sorted(read):
        overlap = targets.intersection([folder.resolve(), *folder.resolve().parents])
        if overlap:
            raise SettingError(
                f"{folder} is to be read, but {overlap.pop()} is to be written; name an output outside the data"
            )


def partial_of(folder: Path) -> Path:
    """Return the folder in which an output is prepared."""
    return folder.with_name(folder.name + PARTIAL)


@contextmanager
def working_folder(
    folder: Path, fingerprint: str, manifest: dict[str, Any] | None, *, keep: str = LOCK
) -> Iterator[Path | None]:
    """Yield the folder in which an output is prepared, with what an earlier run of the same settings left there.

    Yields None if another run changed the output after its `manifest` was read: the caller looks at it again. A run
    that fails before anything was finished leaves nothing behind.
    """
    partial = partial_of(folder)
    with output_faults(folder):
        check_unfinished(partial)
        lock = _locked(partial, folder)
    try:
        if read_manifest(folder) != manifest:
            if not _holds_finished(partial):
                remove_unfinished(partial)
            yield None
            return
        with output_faults(folder):
            if fingerprint_in(partial) != fingerprint:
                clear_unfinished(partial, keep)
                write_json(partial / WORK / STATE, {"varlen": __version__, "fingerprint": fingerprint})
        yield partial
    except BaseException:
        if not _holds_finished(partial):
            remove_unfinished(partial)
        raise
    finally:
        lock.close()


def _holds_finished(partial: Path) -> bool:
    """Whether a later run can resume: from a manifest of tokens, or from notes of parts."""
    return any(
        note.name in MANIFESTS or (note.parent.name == WORK and note.name not in (STATE, PLAN))
        for note in partial.rglob("*.json")
    )


def _locked(partial: Path, folder: Path) -> IO[bytes]:
    """Return a folder's held lock, created if need be; released by closing it, or when the process ends."""
    path = partial / WORK / LOCK
    attempts = _MOST_ATTEMPTS
    while True:
        attempts -= 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_own(path, "move it away, or name another output")
        except (FileExistsError, FileNotFoundError):
            if not attempts:
                raise
            continue  # another run finished meanwhile, and renamed the folder
        try:
            _take_lock(lock)
        except BlockingIOError as error:
            lock.close()
            raise SettingError(
                f"another run is writing {folder}; wait for it, or name another folder"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                lock.close()
                raise
        # An earlier run may have finished since, and renamed the folder with the lock in it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()


def _take_lock(lock: IO[bytes]) -> None:
    """Take a lock that others may hold for a moment."""
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)


def finish(partial: Path, folder: Path, manifest: dict[str, Any], name: str) -> None:
    """Move a complete output to its own name atomically."""
    with output_faults(folder):
        for left in partial.glob(".*.part"):  # a manifest's, left by a run that ended at this point
            left.unlink()
        for other in MANIFESTS:  # left by a run of version 0.1.0 that ended at this point
            (partial / other).unlink(missing_ok=True)
        write_json(partial / name, with_checksum(manifest))
        if folder.exists():
            check_replaced(
                folder, read_manifest(folder) or {}
            )  # another program may have written there meanwhile
            folder.replace(replaced_path(partial))
        partial.replace(folder)
        sync(folder.absolute().parent)
    remove_work(folder)


@contextmanager
def output_faults(folder: Path) -> Iterator[None]:
    """Turn errors of writing an output into a SettingError."""
    partial = folder if folder.name.endswith(PARTIAL) else partial_of(folder)
    with disk_faults(folder, keeps_work=lambda: _holds_finished(partial)):
        yield


# Recognize varlen's own files in an output folder, finished or not.

_BESIDE = {*MANIFESTS, SKIPPED, SKIPPED_OF_ROWS, WORK, TABLES}
_SHARD = re.compile(r"(\d{5,})-\d{4,}")
_IN_THE_MAKING = r"\..+\.[0-9a-f]{12}\.part"
_MADE = re.compile(
    r"part-\d{5,}\.(parquet|arrow)|\d+_metadata\.jsonl|\w+_\d+(_\d{5,})?\.idx\.parquet"
    rf"|(offsets|documents|positions|starts)\.npy|{_IN_THE_MAKING}"
)
_TABLE = re.compile(rf"[0-9a-f]+\.table|{_IN_THE_MAKING}")
_INDEX = {f"{name}.npy" for name in ("offsets", "documents", "positions", "starts")}


def part_of(shard: str) -> int | None:
    """Return the part number in a shard's folder name; None for other names."""
    match = _SHARD.fullmatch(shard)
    return None if match is None else int(match[1])


def is_made(path: Path) -> bool:
    """Whether an entry of an unfinished output has a name that varlen uses there, and is no link."""
    named = path.name in _BESIDE or _SHARD.fullmatch(path.name) or _MADE.fullmatch(path.name)
    return bool(named) and not path.is_symlink()


def check_unfinished(partial: Path) -> None:
    """Raise if the folder for an unfinished output wasn't written by varlen."""
    way_out = "move it away, or name another output"
    if not is_folder(partial, "the result is made in", way_out):
        return
    refuse_link(partial / WORK, way_out)
    if not may_be_used(partial, f"{WORK}/{STATE}", lambda marker: isinstance(marker.get("fingerprint"), str)):
        raise SettingError(
            f"{partial} isn't varlen's: it has the name in which the result is made, and no mark of an unfinished "
            f"one ({WORK}/{STATE}); {way_out}"
        )
    check_names(partial, is_made, way_out)
    _check_within(partial, way_out)


def clear_unfinished(partial: Path, keep: str) -> None:
    """Remove the files of a run with other settings from a folder that passed `check_unfinished`."""
    work = partial / WORK
    for entry in [*partial.iterdir(), *work.iterdir()]:
        is_retained = entry.name in (WORK, LOCK) or (entry.parent == work and entry.name.startswith(keep))
        if not is_retained and (entry.parent == work or is_made(entry)):
            remove_entry(entry)


def remove_unfinished(partial: Path) -> None:
    """Remove an unfinished output that won't be resumed; foreign files stay."""
    if partial.is_symlink() or not partial.is_dir():
        return
    for entry in partial.iterdir():
        if entry.name != WORK and is_made(entry):
            remove_entry(entry)
    remove_work(partial)
    with suppress(OSError):  # foreign files are left in it, or another run has just locked it
        partial.rmdir()


def remove_work(folder: Path) -> None:
    """Remove the work folder, if it has our marker."""
    work = folder / WORK
    if not work.is_symlink() and may_be_used(work, STATE, lambda marker: "fingerprint" in marker):
        remove_marked(work, STATE, LOCK)  # another run may lock a new file as soon as this one is gone


def check_replaced(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise if a finished output that is to be replaced holds foreign files."""
    listed = {str(entry.get("name")) for key in ("parts", "shards") for entry in manifest.get(key) or ()}
    listed |= {str(manifest.get("metadata")), str(manifest.get("data"))}
    listed |= _INDEX if manifest.get("data") == "." else set()

    def is_ours(path: Path) -> bool:
        part = part_of(path.name)
        # A run may have ended after moving shards here and before listing them.
        is_moved = part is not None and part >= int(manifest.get("num_parts", 0))
        return not path.is_symlink() and (
            path.name in _BESIDE
            or path.name in listed
            or is_moved
            or re.fullmatch(_IN_THE_MAKING, path.name) is not None
        )

    way_out = "move it away, or name another folder"
    check_names(folder, is_ours, way_out)
    _check_within(folder, way_out)


def _check_within(folder: Path, way_out: str) -> None:
    """Raise if the shards or tables in a folder hold foreign files."""

    def is_ours(path: Path) -> bool:
        is_table = path.parent.name == TABLES and _TABLE.fullmatch(path.name)
        return bool(is_table or path.name in SHARD_FILES) and path.is_file() and not path.is_symlink()

    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:  # another run has just finished it
        return
    for entry in entries:
        if (entry.name == TABLES or _SHARD.fullmatch(entry.name)) and entry.is_dir():
            check_names(entry, is_ours, way_out)


def fingerprint_in(partial: Path) -> str | None:
    """Return the fingerprint of the run that left a folder, or None."""
    try:
        return str(json.loads(read_regular(partial / WORK / STATE))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def replaced_path(partial: Path) -> Path:
    """Return a name in the work folder for the replaced output, removing an earlier one."""
    path = partial / WORK / "replaced"
    shutil.rmtree(path, ignore_errors=True)
    return path
