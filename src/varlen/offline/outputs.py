"""Where results go: under another name until they are whole, one run at a time, and never half of them.

::

    OUT.partial/               becomes OUT by one rename, when it is whole
      part-00000.parquet ...   what goes with it
      .work/                   what doesn't: removed after the rename
        lock                   held while a run works
        state.json             what the run makes
        plan.json              how many parts a token store will have, for those who read it already
        part-00000.json ...    notes of finished tasks, which a later run takes over

A file's content is on the disk before the file gets its name, and a note is written after what it speaks of, so
that a note can be believed after a power cut too.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from varlen import __version__
from varlen.errors import SettingError
from varlen.files.ours import open_own
from varlen.files.paths import File
from varlen.files.token_tables import sync, unfinished
from varlen.files.written import LOCK, MANIFESTS, PARTIAL, PLAN, WORK, read_manifest, sealed
from varlen.offline.owned import (
    STATE,
    check_replaced,
    check_unfinished,
    clear_unfinished,
    fingerprint_in,
    remove_unfinished,
    remove_work,
    replaced_place,
)

_LOCK_S = 0.5
"""How long a lock is tried for: those who wait for a store hold it for a moment, to see whether anybody does."""
_FREE = "varlen_free_bytes"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""What file systems of many machines say where they have no locks: then it is up to the user."""


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Refuse a place that can't be written, or holds something else, before hours of work are done for it."""
    if folder.suffix in (".parquet", ".arrow", ".jsonl"):
        raise SettingError(
            f"{folder} names a file, but a packed set is a folder of them; pass {folder.with_suffix('')}"
        )
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()):
        manifest = read_manifest(folder)
        if manifest is None:
            raise SettingError(f"{folder} holds other files; name a new folder")
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


def check_places(data: Sequence[File] | Path, output: Path, tokens: Path | None = None) -> None:
    """Refuse to write where something is read from."""
    for place in (output, tokens):
        if place is not None and place.name in ("", ".."):
            raise SettingError(
                f"{place} has no name that a result could take; name a new folder, such as packed"
            )
    if tokens is not None and tokens.resolve() == output.resolve():
        raise SettingError(f"tokens and output are the same folder, {output}; name two")
    if isinstance(data, Path):
        read, written = {data}, [output]
    else:
        read = {file.folder for file in data if file.folder is not None}
        written = [output, tokens] if tokens else [output]
    places = {place for path in written for place in (path.resolve(), partial_of(path).resolve())}
    for folder in sorted(read):
        found = places.intersection([folder.resolve(), *folder.resolve().parents])
        if found:
            raise SettingError(
                f"{folder} is to be read, but {found.pop()} is to be written; name an output outside the data"
            )


def partial_of(folder: Path) -> Path:
    """Return where a result is made until it is whole."""
    return folder.with_name(folder.name + PARTIAL)


@contextmanager
def working_folder(folder: Path, fingerprint: str, *, keep: str = LOCK) -> Iterator[Path]:
    """Give the folder in which a result is made, with what an earlier run of the same left there.

    What failed before anything was finished leaves nothing.
    """
    partial = partial_of(folder)
    with disk_faults(folder):
        check_unfinished(partial)
        lock = _locked(partial, folder)
    try:
        with disk_faults(folder):
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
    """Return whether a later run takes anything over: tokens by their manifest, or parts by their notes."""
    return any(
        note.name in MANIFESTS or (note.parent.name == WORK and note.name not in (STATE, PLAN))
        for note in partial.rglob("*.json")
    )


def _locked(partial: Path, folder: Path) -> IO[bytes]:
    """Return the open lock of a folder, which is made if need be; closing it, or dying, gives it back."""
    while True:
        (partial / WORK).mkdir(parents=True, exist_ok=True)
        path = partial / WORK / LOCK
        lock = open_own(path, "move it away, or name another output")
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
        # The run before may have finished since, and renamed the folder with the lock in it.
        if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
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
    """Make a result appear under its own name, all at once."""
    with disk_faults(folder):
        for left in partial.glob(".*.part"):  # of a manifest, by a run that ended just then
            left.unlink()
        for other in MANIFESTS:  # by a run of version 0.1.0 that ended just then
            (partial / other).unlink(missing_ok=True)
        write_json(partial / name, sealed(manifest))
        if folder.exists():
            check_replaced(folder, read_manifest(folder) or {})  # somebody may have written there meanwhile
            folder.replace(replaced_place(partial))
        partial.replace(folder)
        sync(folder.absolute().parent)
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove what the making of a finished result left beside it."""
    remove_work(folder)


@contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """Give a name to write a file under, which has its own when it is on the disk, or leaves nothing."""
    part = unfinished(path)
    try:
        yield part
        sync(part)
        part.replace(path)
    except OSError as error:
        note_free(error, path)
        raise
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    with made_whole(path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def note_free(error: OSError, place: Path) -> int | None:
    """Note how much is free while a disk is full, before what can't be finished is removed."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    if not hasattr(error, _FREE):
        setattr(error, _FREE, shutil.disk_usage(_existing(place)).free)
    return int(getattr(error, _FREE))


def free_words(error: OSError, place: Path) -> str:
    """Say how much is free, where an error says that the disk is full; arguments as in `note_free`."""
    free = note_free(error, place)
    return "" if free is None else f" ({free / 1e6:,.0f} MB free)"


@contextmanager
def disk_faults(place: Path) -> Iterator[None]:
    """Turn faults of writing into a sentence."""
    try:
        yield
    except OSError as error:
        free = free_words(error, place)
        if free:
            is_kept = _holds_finished(place if place.name.endswith(PARTIAL) else partial_of(place))
            raise SettingError(
                f"{place} can't be written: the disk is full{free}; make room and run the same "
                f"again{': what is finished is kept' if is_kept else ''}"
            ) from error
        raise SettingError(f"{place} can't be written: {error.strerror or error}") from error


def _existing(place: Path) -> Path:
    return next(folder for folder in (place, *place.absolute().parents) if folder.exists())
