"""What varlen itself wrote in a folder: finished results by their manifest, unfinished ones by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PARTIAL, WORK = ".partial", ".work"
"""What the name of an unfinished result ends with, and the folder in it that isn't part of the result."""
LOCK, PLAN = "lock", "plan.json"
"""In that folder: held while a run works, and how many parts of a token store there will be."""
_HEAD_BYTES = 64
_KINDS = {
    "packed": "a packed set",
    "tokens": "a token store",
    "megatron": "a packed set for Megatron-Bridge",
    "megatron-index": "an index of packs",
}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder that varlen wrote, or None where it is something else, however large."""
    try:
        with (folder / "manifest.json").open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if b'"varlen"' not in head:
                return None
            manifest = json.loads(head + file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and "varlen" in manifest else None


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
