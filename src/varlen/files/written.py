"""What varlen itself wrote in a folder: finished results by their manifest, unfinished ones by their names.

Readers of Parquet and Arrow folders (pyarrow, pandas, `load_dataset`, Ray, Spark) take every file of a folder for
rows unless its name begins with a dot, so what lies beside packed rows has such a name. A token store is read by
varlen alone, and keeps names that `cp STORE/*` takes along. Version 0.1.0 gave packed sets the names of stores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varlen.errors import SourceError
from varlen.regular import MOST_JSON_BYTES, open_regular, require_regular

PARTIAL, WORK = ".partial", ".work"
"""What the name of an unfinished result ends with, and the folder in it that isn't part of the result."""
LOCK, PLAN = "lock", "plan.json"
"""In that folder: held while a run works, and how many parts of a token store there will be."""
MANIFEST, MANIFEST_OF_ROWS = "manifest.json", ".manifest.json"
"""What is written last: of token stores, and beside packed rows."""
MANIFESTS = (MANIFEST_OF_ROWS, MANIFEST)
SKIPPED, SKIPPED_OF_ROWS = "skipped.log", ".skipped.log"
"""Records that were left out, one a line: of a shard of a token store, and beside packed rows."""
_HEAD_BYTES = 64
_SEAL = "checksum"
"""Of all else in a manifest; version 0.1.0 wrote none."""
_OF_ROWS = ("settings", "source", "num_packs", "ledger", "packs_without_target", "parts")
"""What a manifest of packed rows has, at least."""
_KINDS = {
    "packed": "a packed set",
    "tokens": "a token store",
    "megatron": "a packed set for Megatron-Bridge",
    "megatron-index": "an index of packs",
}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder that varlen wrote, or None where it is something else, however large."""
    found = _found(folder)
    return None if found is None else found[1]


def manifest_name(folder: Path) -> str:
    """Return the name of the manifest of a packed set, which this version or 0.1.0 wrote."""
    found = _found(folder)
    return MANIFEST_OF_ROWS if found is None else found[0].name


def skipped_path(folder: Path) -> Path:
    """Return where the records are listed that were left out of a packed set, by this version or 0.1.0."""
    path = folder / SKIPPED_OF_ROWS
    return path if path.exists() or not (folder / SKIPPED).exists() else folder / SKIPPED


def _found(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    for name in MANIFESTS:
        try:
            with open(folder / name, "rb", opener=open_regular) as file:
                head = file.read(_HEAD_BYTES)
                manifest = json.loads(head + file.read(MOST_JSON_BYTES)) if b'"varlen"' in head else None
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(manifest, dict) and "varlen" in manifest:
            if not is_sealed(manifest):
                raise SourceError(
                    f"{folder / name} isn't what was written: its checksum is another; copy it again, or make the "
                    "result anew"
                )
            return folder / name, manifest
    return None


def check_parts(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Require that the files of a packed set are those that its manifest lists, by name and size."""
    missing = [name for name in _OF_ROWS if name not in manifest]
    if len(missing) < len(_OF_ROWS) and missing:
        raise SourceError(f"{folder} has a damaged manifest: `{missing[0]}` is missing; pack the data again")
    parts = manifest.get("parts", [])
    if not isinstance(parts, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and Path(one["name"]).name == one["name"]
        for one in parts
    ):
        raise SourceError(f"{folder} has a damaged manifest: it lists no parts; pack the data again")
    for one in parts:
        try:
            said = (folder / one["name"]).stat()
            require_regular(said.st_mode)
        except OSError as error:
            raise SourceError(
                f"{folder} lists {len(parts):,} parts, of which {one['name']} can't be read "
                f"({error.strerror or error}); copy the whole folder again, or pack the data again"
            ) from error
        if one.get("num_bytes") not in (None, 0, said.st_size):
            raise SourceError(
                f"{folder / one['name']} has {said.st_size:,} bytes, and {one['num_bytes']} were written; copy it "
                "again, or pack the data again"
            )


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest as it is written: with a checksum of its own."""
    return {**manifest, _SEAL: _seal_of(manifest)}


def is_sealed(manifest: Mapping[str, Any]) -> bool:
    """Whether what was written is as it was; without a checksum, as version 0.1.0 wrote it, nobody knows."""
    return _SEAL not in manifest or manifest[_SEAL] == _seal_of(manifest)


def _seal_of(manifest: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in manifest.items() if name != _SEAL}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def is_beside_results(path: Path) -> bool:
    """Return whether a file lies beside the rows of a result of varlen's, and holds none."""
    names = (*MANIFESTS, SKIPPED, SKIPPED_OF_ROWS)
    return path.name in names and read_manifest(path.parent) is not None


def what_varlen_wrote(folder: Path) -> str | None:
    """Return what a folder is in words, if varlen wrote it, and else None."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return _KINDS.get(str(manifest.get("kind")), "a result")
    return "an unfinished output" if is_unfinished(folder) else None


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder holds what a run has not finished."""
    named = folder.resolve().name  # "." has no name of its own
    return named.endswith(PARTIAL) and (folder / WORK).is_dir() and read_manifest(folder) is None


def split_documents(folder: Path) -> int:
    """Return how many documents were cut into pieces in a packed set; 0 where there is none."""
    manifest = read_manifest(folder) or {}
    ledger = manifest.get("ledger")
    count = ledger.get("split_documents") if isinstance(ledger, dict) else 0
    return count if manifest.get("kind") == "packed" and isinstance(count, int) else 0
