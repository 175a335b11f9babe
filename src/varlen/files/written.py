"""What varlen wrote in a folder: finished results, recognized by their manifest, and unfinished ones, by their names.

Readers of Parquet and Arrow folders (pyarrow, pandas, `load_dataset`, Ray, Spark) take every file of a folder for
rows unless its name begins with a dot, so the other files beside packed rows have such names. A token store is read
by varlen only, and keeps names that `cp STORE/*` copies. Version 0.1.0 gave packed sets the names of stores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varlen.errors import SourceError
from varlen.regular import MOST_JSON_BYTES, open_regular, require_regular

PARTIAL, WORK = ".partial", ".work"  # suffix of an unfinished result, and its folder of temporary files
LOCK, PLAN = "lock", "plan.json"  # in the work folder: held during a run; the number of parts
STATE = "state.json"  # in the work folder: the run's fingerprint, and the marker of an unfinished output
MANIFEST, MANIFEST_OF_ROWS = "manifest.json", ".manifest.json"  # written last: of stores, of packed sets
MANIFESTS = (MANIFEST_OF_ROWS, MANIFEST)
# Skipped records, one per line: of a shard of a token store, and beside packed rows.
SKIPPED, SKIPPED_OF_ROWS = "skipped.log", ".skipped.log"
_HEAD_BYTES = 64
_CHECKSUM = "checksum"  # of the rest of a manifest; version 0.1.0 wrote none
# Keys that every manifest of packed rows has.
_OF_ROWS = ("settings", "source", "num_packs", "ledger", "packs_without_target", "parts")
_KINDS = {
    "packed": "a packed set",
    "tokens": "a token store",
    "megatron": "a packed set for Megatron-Bridge",
    "megatron-index": "an index of packs",
}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder that varlen wrote; None for any other folder."""
    located = _located(folder)
    return None if located is None else located[1]


def manifest_name(folder: Path) -> str:
    """Return the name of a packed set's manifest, as written by this version or 0.1.0."""
    located = _located(folder)
    return MANIFEST_OF_ROWS if located is None else located[0].name


def skipped_path(folder: Path) -> Path:
    """Return the path of a packed set's list of skipped records, as written by this version or 0.1.0."""
    path = folder / SKIPPED_OF_ROWS
    return path if path.exists() or not (folder / SKIPPED).exists() else folder / SKIPPED


def _located(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    for name in MANIFESTS:
        try:
            with open(folder / name, "rb", opener=open_regular) as file:
                head = file.read(_HEAD_BYTES)
                manifest = json.loads(head + file.read(MOST_JSON_BYTES)) if b'"varlen"' in head else None
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(manifest, dict) and "varlen" in manifest:
            if not matches_checksum(manifest):
                raise SourceError(
                    f"{folder / name} doesn't match its checksum; copy it again, or make the result again"
                )
            return folder / name, manifest
    return None


def check_parts(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise unless the files of a packed set match its manifest by name and size."""
    missing = [name for name in _OF_ROWS if name not in manifest]
    if len(missing) < len(_OF_ROWS) and missing:
        raise SourceError(f"{folder} has a damaged manifest: `{missing[0]}` is missing; pack the data again")
    parts = manifest.get("parts", [])
    if not isinstance(parts, list) or not all(
        isinstance(part, dict)
        and isinstance(part.get("name"), str)
        and Path(part["name"]).name == part["name"]
        for part in parts
    ):
        raise SourceError(f"{folder} has a damaged manifest: it lists no parts; pack the data again")
    for part in parts:
        try:
            status = (folder / part["name"]).stat()
            require_regular(status.st_mode)
        except OSError as error:
            raise SourceError(
                f"{folder} lists {len(parts):,} parts, of which {part['name']} can't be read "
                f"({error.strerror or error}); copy the whole folder again, or pack the data again"
            ) from error
        if part.get("num_bytes") not in (None, 0, status.st_size):
            raise SourceError(
                f"{folder / part['name']} has {status.st_size:,} bytes, and {part['num_bytes']} were written; "
                "copy it again, or pack the data again"
            )


def with_checksum(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with its checksum."""
    return {**manifest, _CHECKSUM: _checksum_of(manifest)}


def matches_checksum(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest matches its checksum; True without one, as in version 0.1.0."""
    return _CHECKSUM not in manifest or manifest[_CHECKSUM] == _checksum_of(manifest)


def _checksum_of(manifest: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in manifest.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def is_beside_results(path: Path) -> bool:
    """Whether a file lies beside the rows of a result of varlen's, and holds none itself."""
    names = (*MANIFESTS, SKIPPED, SKIPPED_OF_ROWS)
    return path.name in names and read_manifest(path.parent) is not None


def what_varlen_wrote(folder: Path) -> str | None:
    """Describe a folder that varlen wrote; None for any other."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return _KINDS.get(str(manifest.get("kind")), "a result")
    return "an unfinished output" if is_unfinished(folder) else None


def is_unfinished(folder: Path) -> bool:
    """Whether a folder holds an unfinished result."""
    named = folder.resolve().name  # "." has no name of its own
    return named.endswith(PARTIAL) and (folder / WORK).is_dir() and read_manifest(folder) is None


def split_documents(folder: Path) -> int:
    """Return how many documents of a packed set were split; 0 for other folders."""
    manifest = read_manifest(folder) or {}
    ledger = manifest.get("ledger")
    count = ledger.get("split_documents") if isinstance(ledger, dict) else 0
    return count if manifest.get("kind") == "packed" and isinstance(count, int) else 0
