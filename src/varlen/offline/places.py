"""Where results go: under another name until they are whole, one run at a time, and never half of them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from varlen.errors import SettingError
from varlen.source.store import read_manifest

PARTIAL = ".partial"
_STATE = "state.json"


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Refuse a place that can't be written, or holds something else, before hours of work are done for it.

    Raises:
        SettingError: a file is there, a folder that isn't empty, or the folder around can't be written.
    """
    if folder.suffix in (".parquet", ".arrow", ".jsonl"):
        raise SettingError(
            f"{folder} names a file, but a packed set is a folder of them; pass {folder.with_suffix('')}"
        )
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()):
        if read_manifest(folder) is None:
            raise SettingError(f"{folder} holds other files; name a new folder")
        if not overwrite:
            raise SettingError(
                f"{folder} holds a set made from other data or settings; name another folder, or pass --overwrite "
                "(overwrite=True)"
            )
    around = folder.absolute().parent
    while not around.exists():
        around = around.parent
    if not around.is_dir() or not os.access(around, os.W_OK):
        raise SettingError(f"{folder} can't be written: no permission in {around}")


@contextmanager
def working_folder(folder: Path, fingerprint: str) -> Iterator[Path]:
    """Give the folder in which a result is made, with what an earlier run of the same left there.

    Args:
        folder: where the result is to stand.
        fingerprint: of all that decides the bytes; what another left is removed.

    Raises:
        SettingError: another run works on it, or it can't be written.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    with disk_faults(folder):
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SettingError(
                    f"another run is writing {folder}; wait for it, or name another folder"
                ) from error
            if _left_by(partial) != fingerprint:
                for entry in partial.iterdir():
                    if entry.name != ".lock":
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                write_json(partial / _STATE, {"fingerprint": fingerprint})
            yield partial


def _left_by(partial: Path) -> str | None:
    """Return the fingerprint of the run that left a folder."""
    try:
        return str(json.loads((partial / _STATE).read_bytes())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finish(partial: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Make a result appear under its own name, all at once.

    Raises:
        SettingError: it can't be written.
    """
    with disk_faults(folder):
        for entry in list(partial.iterdir()):  # left from tasks that were interrupted
            if entry.name.startswith(".") or entry.name == _STATE:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        write_json(partial / "manifest.json", manifest)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


@contextmanager
def disk_faults(place: Path) -> Iterator[None]:
    """Turn faults of writing into a sentence.

    Raises:
        SettingError: the disk is full, or the place can't be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(_existing(place)).free
            raise SettingError(
                f"{place} can't be written: the disk is full ({free / 1e6:,.0f} MB free); make room and run the same "
                "again: what is finished is kept"
            ) from error
        raise SettingError(f"{place} can't be written: {error.strerror or error}") from error


def _existing(place: Path) -> Path:
    return next(folder for folder in (place, *place.absolute().parents) if folder.exists())
