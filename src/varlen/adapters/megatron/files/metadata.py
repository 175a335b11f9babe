"""The metadata beside packed files, from which the constant batch shapes for CUDA graphs are computed.

`NAME_metadata.jsonl` is one JSON array in the releases, in spite of its name: every run appends an object to it, one
for each split as a rule, and readers take the largest and smallest of all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.rows import PackedRows
from varlen.counts import many
from varlen.errors import LengthsError, SettingError, SourceError
from varlen.files.ours import atomic_file, disk_faults
from varlen.regular import read_regular_text

Entry: TypeAlias = dict[str, int | float]
"""One run's description of its packs, by the releases' names."""

_NEEDED = ("dataset_max_seqlen", "max_samples_per_bin", "pack_size", "min_packed_seqlen")
_RATIOS = ("packing_factor", "packing_efficiency")


class PackCounts:
    """Running counts of packs, from which an entry is made."""

    def __init__(self) -> None:
        self.num_packs = self.num_documents = self.num_tokens = 0
        self._longest = self._most_documents = 0
        self._shortest_pack: int | None = None

    def add(self, lengths: npt.NDArray[np.integer[Any]], offsets: npt.NDArray[np.integer[Any]]) -> PackCounts:
        """Add packs.

        Args:
            lengths: `[documents]`, positions of input of each document, alignment padding included.
            offsets: `[packs + 1]`; pack p holds the documents `offsets[p]:offsets[p + 1]`.

        Returns:
            These counts.
        """
        if len(offsets) < 2:
            return self
        running = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        sums = running[offsets[1:]] - running[offsets[:-1]]
        self.num_packs += len(sums)
        self.num_documents += len(lengths)
        self.num_tokens += int(running[-1])
        self._longest = max(self._longest, int(np.max(lengths, initial=0)))
        self._most_documents = max(self._most_documents, int(np.diff(offsets).max()))
        least = int(sums.min())
        self._shortest_pack = least if self._shortest_pack is None else min(self._shortest_pack, least)
        return self

    def add_rows(self, rows: PackedRows) -> PackCounts:
        """Add packed rows.

        Args:
            rows: documents in them are stored with one token more than they have positions.
        """
        return self.add(rows.stored_lengths - 1, rows.document_offsets)

    def entry(self, pack_size: int) -> Entry:
        """Return the entry that Megatron-Bridge would write for these packs, with the same key order and rounding.

        Args:
            pack_size: positions that a pack may hold.

        Raises:
            LengthsError: there are no packs, or a document is longer than the pack size.
        """
        if self._shortest_pack is None:
            raise LengthsError("there are no packs to write metadata of; pack at least one document")
        if self._longest > pack_size:
            raise LengthsError(
                f"a document has {self._longest:,} positions, but the pack size is {pack_size:,}; pack_size must be "
                "what the documents were packed into"
            )
        return self.figures(pack_size)

    def figures(self, pack_size: int) -> Entry:
        """Return the entry even if a document is longer than a pack.

        Args:
            pack_size: positions that a pack may hold.
        """
        return {
            "dataset_max_seqlen": self._longest,
            "max_samples_per_bin": self._most_documents,
            "packing_factor": round(self.num_documents / self.num_packs, 2),
            "packing_efficiency": round(self.num_tokens / self.num_packs / pack_size * 100, 2),
            "pack_size": pack_size,
            "min_packed_seqlen": self._shortest_pack or 0,
        }


def metadata_entry(lengths: npt.ArrayLike, offsets: npt.ArrayLike, pack_size: int) -> Entry:
    """Return the entry that Megatron-Bridge writes for these packs.

    Args:
        lengths, offsets: as in `PackCounts.add`.
        pack_size: positions that a pack can hold.

    Raises:
        LengthsError: there are no packs, or a document is longer than the pack size.

    >>> metadata_entry([3, 4, 5], [0, 2, 3], pack_size=8)  # doctest: +NORMALIZE_WHITESPACE
    {'dataset_max_seqlen': 5, 'max_samples_per_bin': 2, 'packing_factor': 1.5, 'packing_efficiency': 75.0,
     'pack_size': 8, 'min_packed_seqlen': 5}
    """
    counts = PackCounts().add(np.asarray(lengths, dtype=np.int64), np.asarray(offsets, dtype=np.int64))
    return counts.entry(pack_size)


def metadata_path(packed: str | Path, pack_size: int) -> Path:
    """Return where the releases keep the metadata of packs: `PACK_metadata.jsonl` in the same folder.

    Args:
        packed: a packed file.
        pack_size: positions that a pack can hold.
    """
    return Path(packed).parent / f"{pack_size}_metadata.jsonl"


def read_metadata(path: str | Path, *, pack_size: int | None = None) -> list[Entry]:
    """Return the entries of a metadata file, those of all runs, in order.

    Args:
        path: of one JSON array, as the releases write it; one object, or one on each line, are read too.
        pack_size: the one that all entries must have; None for any.

    Raises:
        SourceError: the file isn't there or isn't JSON, or an entry lacks a key, holds something else, or contradicts
            itself, another entry or `pack_size`; names the file, the entry and the key.
    """
    where = str(path)
    try:
        text = read_regular_text(path)
    except FileNotFoundError as error:
        raise SourceError(
            f"{where} isn't there: constant shapes (pad_cu_seqlens) are computed from the metadata beside packed "
            "files; varlen.adapters.megatron.write_metadata writes it"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{where} can't be read: {getattr(error, 'strerror', None) or error}") from error
    entries = _parsed(text, where)
    if not entries:
        raise SourceError(f"{where} holds no entry; pack the data again")
    for number, entry in enumerate(entries, 1):
        _check(entry, f"{where} entry {number:,}")
    sizes = [entry["pack_size"] for entry in entries]
    wanted = sizes[0] if pack_size is None else pack_size
    for number, size in enumerate(sizes, 1):
        if size != wanted:
            other = f"entry 1 has {wanted:,}" if pack_size is None else f"packed_sequence_size is {wanted:,}"
            raise SourceError(
                f"{where} entry {number:,}: `pack_size` is {size:,}, but {other}; a pack size has its own file"
            )
    return entries


def combined_metadata(entries: Sequence[Mapping[str, Any]]) -> Entry:
    """Return the extremes over all runs, as the releases' readers compute them.

    Args:
        entries: of `read_metadata`.

    Returns:
        The largest `max_samples_per_bin` and `dataset_max_seqlen`, and the smallest `min_packed_seqlen`.

    Raises:
        SettingError: there are no entries.
    """
    if not entries:
        raise SettingError("metadata has no entries; read them with read_metadata")
    return {
        "max_samples_per_bin": max(int(entry["max_samples_per_bin"]) for entry in entries),
        "dataset_max_seqlen": max(int(entry["dataset_max_seqlen"]) for entry in entries),
        "min_packed_seqlen": min(int(entry["min_packed_seqlen"]) for entry in entries),
    }


def write_metadata(
    path: str | Path, entry: Mapping[str, int | float], *, append: bool = True, repeat: bool = False
) -> None:
    """Write an entry into a metadata file, one JSON array as the releases write it, whole or not at all.

    Args:
        path: of the file.
        entry: of `metadata_entry`.
        append: keep the entries that are there already, as of the other split; False: this is the only one.
        repeat: append an entry that is there already too, as the releases do on every run.

    Raises:
        SourceError: what is there can't be read or contradicts the entry.
        SettingError: the file can't be written.
    """
    path = Path(path)
    new = dict(entry)
    _check(new, "the entry")
    entries = read_metadata(path, pack_size=int(new["pack_size"])) if append and path.exists() else []
    if repeat or new not in entries:
        entries.append(new)
    with disk_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial:
            partial.write_text(json.dumps(entries), encoding="utf-8")


def _parsed(text: str, where: str) -> list[Any]:
    """Return the entries of a JSON array, one object, or one of them on each line."""
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.splitlines() if line.strip()]
        first = str(error)
    entries: list[Any] = []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = first if len(lines) == 1 or number == 1 else f"line {number:,}: {error}"
            raise SourceError(f"{where} isn't JSON, or was cut off: {what}") from error
        entries += one if isinstance(one, list) else [one]
    return entries


def _check(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise SourceError(f"{where} must be an object, got {type(entry).__name__}")
    missing = [key for key in _NEEDED if key not in entry]
    if missing:
        raise SourceError(
            f"{where} has no `{missing[0]}` ({many(len(missing), 'key')} of {len(_NEEDED)} missing); pack it again"
        )
    for key in _NEEDED:
        least = 1 if key in ("pack_size", "max_samples_per_bin") else 0
        if type(entry[key]) is not int or entry[key] < least:
            raise SourceError(f"{where}: `{key}` must be a whole number from {least} on, got {entry[key]!r}")
    for key in _RATIOS:
        if key in entry and (type(entry[key]) not in (int, float) or not entry[key] >= 0):
            raise SourceError(f"{where}: `{key}` must be a number from 0 on, got {entry[key]!r}")
    size, most = entry["pack_size"], entry["max_samples_per_bin"]
    together = "`max_samples_per_bin` documents of `dataset_max_seqlen`", most * entry["dataset_max_seqlen"]
    limits = [
        ("dataset_max_seqlen", "`pack_size`", size),
        ("min_packed_seqlen", "`pack_size`", size),
        ("min_packed_seqlen", *together),
        ("packing_factor", "`max_samples_per_bin`", most + 0.005),
        ("packing_efficiency", "a full pack in percent", 100),
    ]
    for key, words, limit in limits:
        if entry.get(key, 0) > limit:
            raise SourceError(
                f"{where} contradicts itself: `{key}` is {entry[key]:,}, more than {words}, {limit:,}"
            )
