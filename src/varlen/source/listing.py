"""What the manifest of a token store lists, held against itself and against the shards that it speaks of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from varlen.errors import SourceError
from varlen.source.losses import stored
from varlen.source.shard import ShardCounts, shard_counts

_MOST = 1 << 47
"""Documents or tokens: bytes of them fit any file system, and sums of them 63 bits."""
_MANY_DOCUMENTS = 1 << 20
"""Of a shard, above which its own description is looked at before anything is made room for."""
_COUNTS = ("num_documents", "num_tokens", "num_targets", "num_skipped")
_COMPARED = ("num_documents", "num_tokens", "num_targets", "dtype", "has_mask", "has_weights", "crc32")


def check_listing(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Require that a manifest agrees with itself; shards of odd sizes are looked at now, others when they are read.

    Args:
        folder: of the store.
        manifest: of it.

    Raises:
        SourceError: it doesn't; says in what.
    """
    why = _wrong_in(manifest)
    if why is not None:
        raise SourceError(f"{folder} has a damaged manifest: {why}; index the data again")
    for listed in manifest["shards"]:
        is_odd = not listed["num_documents"] or not listed["num_tokens"]
        if is_odd or listed["num_documents"] > _MANY_DOCUMENTS:
            check_listed(folder / listed["name"], listed, shard_counts(folder / listed["name"]))


def check_listed(path: Path, listed: Mapping[str, Any], counts: ShardCounts | None) -> None:
    """Require that a shard holds what the manifest says.

    Args:
        path: of the shard.
        listed: what the manifest says of it.
        counts: what it says of itself.

    Raises:
        SourceError: it doesn't.
    """
    if counts is None:
        raise SourceError(
            f"{path} is not a finished shard of tokens, though the manifest lists it; index again"
        )
    for name in _COMPARED:
        is_, said = getattr(counts, name), listed.get(name)
        if name in listed and said != is_:
            raise SourceError(
                f"{path} holds {_said(is_)} {name.removeprefix('num_')}, and the manifest of its store says "
                f"{_said(said)}; put back the one that belongs to the other, or index the data again"
            )


def _said(value: Any) -> str:
    return f"{value:,}" if type(value) is int else repr(value)[:40]


def _wrong_in(manifest: Mapping[str, Any]) -> str | None:
    """Say what a manifest says wrongly; None where it agrees with itself."""
    shards = manifest.get("shards")
    if not isinstance(shards, list) or not all(isinstance(one, dict) for one in shards):
        return "it lists no shards"
    for one in shards:
        name = one.get("name")
        if not isinstance(name, str) or Path(name).name != name or not name.split("-")[0].isdecimal():
            return f"{_said(name)} is no name of a shard"
        for count in _COUNTS:
            if (count in one or count in _COUNTS[:2]) and not _is_count(one.get(count)):
                return f"shard {name} has {_said(one.get(count))} {count.removeprefix('num_')}"
    if len({one["name"] for one in shards}) < len(shards):
        return "it lists a shard twice"
    for count in _COUNTS:
        said = manifest.get(count)
        if count in manifest and all(count in one for one in shards):
            held = sum(one[count] for one in shards)
            if said != held:
                return f"its shards have {held:,} {count.removeprefix('num_')} together, and it says {_said(said)}"
    return _wrong_beside(manifest, shards)


def _wrong_beside(manifest: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> str | None:
    """Say what a manifest says wrongly beside its list of shards."""
    if not isinstance(manifest.get("fingerprint"), str):
        return "it has no fingerprint"
    if "num_parts" in manifest and not _is_count(manifest["num_parts"]):
        return f"it has {_said(manifest['num_parts'])} parts"
    source = manifest.get("source", {})
    if not isinstance(source, dict) or not isinstance(source.get("tokenizer") or {}, dict):
        return "it doesn't say what it was made of"
    stages = manifest.get("grown", [])
    if not isinstance(stages, list) or not all(
        isinstance(one, dict) and _is_count(one.get("parts")) and isinstance(one.get("fingerprint"), str)
        for one in stages
    ):
        return "it doesn't say how it grew"
    try:
        for one in [manifest, *shards]:
            stored(one)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return "it doesn't say what was lost"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST
