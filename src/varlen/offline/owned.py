"""Which entries of a result's folder, finished or in the making, are those that varlen wrote."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from varlen.errors import SettingError
from varlen.files.ours import check_names, is_there, mark_of_folder, refuse_link, remove_entry, remove_marked
from varlen.files.written import LOCK, MANIFESTS, SKIPPED, SKIPPED_OF_ROWS, WORK
from varlen.regular import read_regular
from varlen.store.shard import SHARD_FILES
from varlen.store.store import TABLES

STATE = "state.json"
"""Among the work: what a run makes; the mark of an unfinished result."""
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
    """Return the part that a folder of this name holds a shard of; None where it is no shard's."""
    found = _SHARD.fullmatch(shard)
    return None if found is None else int(found[1])


def is_made(path: Path) -> bool:
    """Return whether an entry of an unfinished result has a name of those that varlen gives there, and no link."""
    named = path.name in _BESIDE or _SHARD.fullmatch(path.name) or _MADE.fullmatch(path.name)
    return bool(named) and not path.is_symlink()


def check_unfinished(partial: Path) -> None:
    """Refuse to work where somebody else's folder has the name of an unfinished result."""
    way_out = "move it away, or name another output"
    refuse_link(partial, way_out)
    refuse_link(partial / WORK, way_out)
    if not partial.is_dir():
        if not is_there(partial):
            return
        raise SettingError(f"{partial} is a file, and the result is made in a folder of that name; {way_out}")
    if not mark_of_folder(
        partial, f"{WORK}/{STATE}", lambda found: isinstance(found.get("fingerprint"), str)
    ):
        raise SettingError(
            f"{partial} isn't varlen's: it has the name in which the result is made, and no mark of an unfinished "
            f"one ({WORK}/{STATE}); {way_out}"
        )
    check_names(partial, is_made, way_out)
    _check_within(partial, way_out)


def clear_unfinished(partial: Path, keep: str) -> None:
    """Remove what a run that made something else left in a folder of `check_unfinished`."""
    work = partial / WORK
    for entry in [*partial.iterdir(), *work.iterdir()]:
        is_kept = entry.name in (WORK, LOCK) or (entry.parent == work and entry.name.startswith(keep))
        if not is_kept and (entry.parent == work or is_made(entry)):
            remove_entry(entry)


def remove_unfinished(partial: Path) -> None:
    """Remove a folder in which nobody goes on; what somebody has laid there stays."""
    if partial.is_symlink() or not partial.is_dir():
        return
    for entry in partial.iterdir():
        if entry.name != WORK and is_made(entry):
            remove_entry(entry)
    remove_work(partial)
    if not any(partial.iterdir()):
        partial.rmdir()


def remove_work(folder: Path) -> None:
    """Remove what the making of a result left beside it, if that carries our mark."""
    work = folder / WORK
    if not work.is_symlink() and mark_of_folder(work, STATE, lambda found: "fingerprint" in found):
        remove_marked(work, STATE)


def check_replaced(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuse to replace a finished result beside whose files somebody has laid others."""
    listed = {str(one.get("name")) for key in ("parts", "shards") for one in manifest.get(key) or ()}
    listed |= {str(manifest.get("metadata")), str(manifest.get("data"))}
    listed |= _INDEX if manifest.get("data") == "." else set()

    def is_ours(path: Path) -> bool:
        part = part_of(path.name)
        is_moved = part is not None and part >= int(
            manifest.get("num_parts", 0)
        )  # by a run that ended just then
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
    """Refuse to clear or replace a folder in whose shards or tables somebody has laid something of theirs."""

    def is_ours(path: Path) -> bool:
        is_table = path.parent.name == TABLES and _TABLE.fullmatch(path.name)
        return bool(is_table or path.name in SHARD_FILES) and path.is_file() and not path.is_symlink()

    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:  # another run has finished it just now
        return
    for entry in entries:
        if (entry.name == TABLES or _SHARD.fullmatch(entry.name)) and entry.is_dir():
            check_names(entry, is_ours, way_out)


def fingerprint_in(partial: Path) -> str | None:
    """Return the fingerprint of the run that left a folder."""
    try:
        return str(json.loads(read_regular(partial / WORK / STATE))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def replaced_place(partial: Path) -> Path:
    """Return a name among the work for the result that is replaced; what an earlier run put there is gone."""
    place = partial / WORK / "replaced"
    shutil.rmtree(place, ignore_errors=True)
    return place
