"""Stores that grow: more files become parts of their own, behind those that are there.

A manifest lists the stages that a store went through, each with the fingerprint that it had then. What was there
keeps its names, places and bytes, so whoever reads it reads on, and takes in the rest when it opens the store anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from varlen import __version__
from varlen.documents.source import Source
from varlen.errors import SettingError
from varlen.files.ours import sync
from varlen.files.written import MANIFEST, PLAN, WORK, read_manifest, sealed
from varlen.offline.outputs import disk_faults, part_of, remove_unfinished, write_json
from varlen.store.store import STORE_FORMAT, STORE_FORMATS
from varlen.store.tokens import ROW_WEIGHTS
from varlen.text.tokenizer import ByteTokenizer, digest


def fingerprint_of_marks(marks: dict[str, Any], grown: Sequence[dict[str, Any]] = ()) -> str:
    """Return what changes with the tokens of a store and their order."""
    stages = [list(grown)] if grown else []
    return digest(json.dumps([STORE_FORMAT, __version__, deciding(marks), *stages], sort_keys=True))


def deciding(marks: dict[str, Any]) -> dict[str, Any]:
    """Return those marks of a source that its tokens depend on: not what of its folders isn't read."""
    return {name: value for name, value in unnamed(marks).items() if name not in ("left_out", "taken")}


def unnamed(marks: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies a source without its tokenizer's name: folders are moved, and their ids stay."""
    tokenizer = marks.get("tokenizer") or {}
    if not tokenizer or tokenizer.get("name") == ByteTokenizer().name:
        return marks
    return {**marks, "tokenizer": {**tokenizer, "name": ""}}


TOLD = ("tokenizer", ROW_WEIGHTS)
"""Marks of a source that are told while a store is made of it."""


def write_plan(partial: Path, fingerprint: str, num_parts: int, told: Mapping[str, Any]) -> None:
    """Say how many parts a token store will have, and of what, for those who read it while it is made."""
    with disk_faults(partial):
        write_json(
            partial / WORK / PLAN,
            sealed({"fingerprint": fingerprint, "num_parts": num_parts, **told}),
        )


def in_stored_order(
    source: Source, marks: dict[str, Any], manifest: dict[str, Any] | None
) -> tuple[Source, dict[str, Any]]:
    """Put the files that a store was made of before those that are new, whatever their names; others stay."""
    known_files = _files(manifest)
    if not known_files:
        return source, marks
    places: dict[str, list[int]] = {}
    for number, file in enumerate(marks["files"]):
        places.setdefault(json.dumps(file, sort_keys=True), []).append(number)
    order: list[int] = []
    for known in known_files:
        same = places.get(json.dumps(known, sort_keys=True))
        if not same:
            return source, marks
        order.append(same.pop(0))
    order += sorted(number for left in places.values() for number in left)
    return (
        replace(source, files=tuple(source.files[number] for number in order)),
        {**marks, "files": [marks["files"][number] for number in order]},
    )


def stages_before(manifest: dict[str, Any] | None, marks: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the stages that a store will have behind it; none where it is to be made from the beginning."""
    count = len(_files(manifest))
    if manifest is None or not 0 < count <= len(marks["files"]):
        return []
    grown = list(manifest.get("grown", ()))
    if count == len(marks["files"]):
        return grown
    was = fingerprint_of_marks({**marks, "files": marks["files"][:count]}, grown)
    if manifest.get("fingerprint") != was or "num_parts" not in manifest:
        return []
    stage = {
        "files": count,
        "parts": manifest["num_parts"],
        "shards": len(manifest["shards"]),
        "num_documents": manifest["num_documents"],
        "fingerprint": was,
    }
    return [*grown, stage]


def _files(manifest: dict[str, Any] | None) -> list[Any]:
    """Return the files that a store was made of; none where there is no store."""
    if manifest is None or manifest.get("kind") != "tokens" or manifest.get("format") not in STORE_FORMATS:
        return []
    found = manifest.get("source", {}).get("files")
    return found if isinstance(found, list) else []


def take_back(partial: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Fetch shards that a run moved into the store before it ended too early to list them."""
    if read_manifest(folder) != manifest:
        raise SettingError(f"{folder} was changed by another run meanwhile; run the same again")
    listed = {shard["name"] for shard in manifest["shards"]}
    with disk_faults(folder):
        for shard in sorted(path.parent for path in folder.glob("*/shard.json")):
            part = part_of(shard.name)
            is_left = part is not None and part >= manifest["num_parts"] and not shard.is_symlink()
            if is_left and shard.name not in listed:
                shutil.rmtree(partial / shard.name, ignore_errors=True)
                shard.replace(partial / shard.name)


def append(partial: Path, folder: Path, names: Sequence[str], manifest: dict[str, Any]) -> None:
    """Move shards into a store, and then list them, all at once."""
    with disk_faults(folder):
        for name in names:
            (partial / name).replace(folder / name)
        sync(folder)
        write_json(folder / MANIFEST, sealed(manifest))
        sync(folder)
        remove_unfinished(partial)
