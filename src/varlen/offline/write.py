"""Write the rows of one part to a Parquet or Arrow file, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import SourceError
from varlen.files.token_tables import list_column, write_table
from varlen.files.written import WORK
from varlen.offline.places import disk_faults, made_whole, write_json
from varlen.offline.plan import PartPlan
from varlen.offline.settings import PackSettings
from varlen.regular import open_regular, read_regular
from varlen.store.store import TokenStore, open_store
from varlen.store.tokens import weighs

_IGNORED = -100
_ROW_GROUP_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCounts:
    """What a written file holds."""

    name: str
    num_packs: int
    num_pieces: int
    num_tokens: int
    num_targets: int
    packs_without_target: int
    sha256: str
    num_bytes: int = 0
    """0: not known, as version 0.1.0 didn't note it."""


def write_part(shared: tuple[Path, str, Path, PackSettings], part: PartPlan) -> PartCounts:
    """Write one part, unless an earlier run did.

    Args:
        shared: folder and fingerprint of the token store, where the parts go, and how they are to be.
        part: its rows.

    Raises:
        SettingError: the disk is full, or the folder can't be written.
        SourceError: the token store is damaged.
    """
    store_folder, fingerprint, folder, settings = shared
    name = f"part-{part.number:05d}.{settings.format}"
    note = folder / WORK / f"{name}.json"
    written = _written(folder, note)
    if written is not None:
        return written
    columns, labels = _columns(opened_store(store_folder, fingerprint), part, settings)
    with disk_faults(folder):
        with made_whole(folder / name) as partial:
            write_table(columns, partial, settings.format, max(_ROW_GROUP_TOKENS // settings.capacity, 1))
            sha256, num_bytes = _sha256(partial), partial.stat().st_size
        bounds = _row_bounds(part).tolist()
        rows = zip(bounds, bounds[1:])
        targets = np.array([np.count_nonzero(labels[start:stop] != _IGNORED) for start, stop in rows])
        counts = PartCounts(
            name=name,
            num_packs=len(part.offsets) - 1,
            num_pieces=len(part.documents),
            num_tokens=len(labels),
            num_targets=int(targets.sum()),
            packs_without_target=int((targets == 0).sum()),
            sha256=sha256,
            num_bytes=num_bytes,
        )
        write_json(note, asdict(counts))
    return counts


def _written(folder: Path, note: Path) -> PartCounts | None:
    """Return what an earlier run wrote, if it is there and whole."""
    try:
        counts = PartCounts(**json.loads(read_regular(note)))
        return counts if _sha256(folder / counts.name) == counts.sha256 else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _sha256(path: Path) -> str:
    with open(path, "rb", opener=open_regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=2)
def opened_store(folder: Path, fingerprint: str) -> TokenStore:
    """Open a store once a process.

    Args:
        folder: of the store.
        fingerprint: of what it holds, since another may come to stand at the same place.

    Raises:
        SourceError: it holds something else.
    """
    store = open_store(folder)
    if store.fingerprint != fingerprint:
        raise SourceError(f"{folder} was replaced while it was read; pack it again")
    return store


def _row_bounds(part: PartPlan) -> npt.NDArray[np.int64]:
    """Return where each row's tokens begin and end."""
    ends = np.concatenate([[0], np.cumsum(part.stops - part.starts)]).astype(np.int64)
    return ends[part.offsets]


def _columns(
    store: TokenStore, part: PartPlan, settings: PackSettings
) -> tuple[dict[str, Any], npt.NDArray[np.int32]]:
    """Make the columns of a part: those of TRL's packed data sets first; returns the flat labels too."""
    lengths = part.stops - part.starts
    begins = np.cumsum(lengths) - lengths
    tokens, mask = store.gather(part.shards, part.documents, part.starts, lengths)
    labels = tokens.copy()
    if mask is not None:
        labels[mask == 0] = _IGNORED
    labels[begins] = _IGNORED  # what stands before it in the row is another document
    bounds = _row_bounds(part)
    columns = {
        "input_ids": list_column(tokens, bounds),
        "labels": list_column(labels, bounds),
        "seq_lengths": list_column(lengths.astype(np.int32), part.offsets),
    }
    if weighs(store):  # in all parts, as the columns of a set are the same in all of its files
        weights = np.ones(len(tokens), np.float32) if mask is None else mask.astype(np.float32)
        columns["loss_weights"] = list_column(np.where(labels == _IGNORED, np.float32(0), weights), bounds)
    if settings.position_ids:
        positions = np.arange(len(tokens), dtype=np.int64) - np.repeat(begins, lengths)
        columns["position_ids"] = list_column(positions.astype(np.int32), bounds)
    if settings.trace:
        before = np.concatenate([[0], np.cumsum(store.documents)])
        columns["document_ids"] = list_column(before[part.shards] + part.documents, part.offsets)
        columns["document_starts"] = list_column(part.starts.astype(np.int32), part.offsets)
    return columns, labels
