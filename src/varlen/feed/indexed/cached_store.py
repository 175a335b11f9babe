"""The store that a loader makes of its documents, in the user's cache: made once, whoever asks for it first."""

from __future__ import annotations

import logging
import os
import pickle
import stat
import time
from pathlib import Path

from varlen.counts import many
from varlen.documents.source import Source
from varlen.errors import SettingError, StalledError
from varlen.files.ours import entries_below
from varlen.files.written import LOCK, PARTIAL, WORK
from varlen.offline.crew import Crew
from varlen.offline.grow import fingerprint_of
from varlen.offline.index import index_source, source_marks
from varlen.offline.processors import processors

_log = logging.getLogger(__name__)
_WAIT_S = 0.5


def indexed_in_cache(source: Source, cache: Path | None, patience_s: float) -> Path:
    """Tokenize documents into a store in the user's cache, or find them there; returns its folder.

    Of several processes that ask for the same store one makes it, and the others wait. If it dies, one of them goes
    on where it stopped.
    """
    base = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "varlen"
    marks = source_marks(source)
    folder = base / "stores" / fingerprint_of(marks)[:32]
    crew, told = Crew(processes=_processes(source)), False
    since, seen = time.monotonic(), _written(folder)
    while True:
        try:
            store, was_there = index_source(source, folder, crew=crew, marks=marks)
        except SettingError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            if not told:
                _log.info("another process indexes the data into %s; waiting for it", folder)
                told = True
            written = _written(folder)
            if written != seen:
                since, seen = time.monotonic(), written
            elif time.monotonic() - since >= patience_s:
                raise StalledError(_stopped(folder, time.monotonic() - since)) from error
            time.sleep(_WAIT_S)
            continue
        if not was_there:
            _log.info("indexed %s into %s", many(int(store.documents.sum()), "document"), folder)
        return folder


def _processes(source: Source) -> int:
    """Return how many processes may tokenize: one where the tokenizer can't be handed to others."""
    try:
        pickle.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError):
        return 1
    return processors()


def _written(folder: Path) -> list[tuple[str, int, int]]:
    """Return what has been written of a store so far: it changes while somebody goes on."""
    return sorted(
        (str(path), status.st_size, status.st_mtime_ns)
        for path, status in entries_below(folder.with_name(folder.name + PARTIAL))
        # Every process that tries the lock opens it, which changes its time.
        if path.name != LOCK and stat.S_ISREG(status.st_mode)
    )


def _stopped(folder: Path, seconds: float) -> str:
    partial = folder.with_name(folder.name + PARTIAL)
    lock = partial / WORK / LOCK
    return (
        f"{_holder(lock)} holds {lock}, and has written nothing into {partial} for {seconds:,.0f} s; end it and the "
        "next loader goes on where it stopped, or pass deadline_s to wait longer"
    )


def _holder(lock: Path) -> str:
    """Name the process that holds a lock, as far as this system tells."""
    try:
        inode = lock.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 2345 08:01:67890 0 EOF
            if "->" not in words and words[1] == "FLOCK" and int(words[5].rpartition(":")[2]) == inode:
                return f"process {words[4]}"
    except (OSError, ValueError, IndexError):  # of other systems, or on other machines
        pass
    return "another process"
