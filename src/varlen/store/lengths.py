"""The lengths of documents, for inspection: read and tokenized, stored, or given."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tokenize import TokenError

import numpy as np

from varlen.documents.block_reader import ReadProgress
from varlen.documents.documents import Documents, targets_of
from varlen.documents.source import Source
from varlen.errors import SourceError
from varlen.files.losses import NO_LOSSES, Losses, nothing_read
from varlen.regular import open_regular
from varlen.store.store import TokenStore
from varlen.types import IntArray

OnProgress = Callable[[int, int, str], None]
_EXCERPT_TOKENS = 32
# Exceptions that damaged archives cause in the standard library and numpy.
_DAMAGED = (
    *(OSError, ValueError, TypeError, EOFError, OverflowError, SyntaxError, RuntimeError),
    *(MemoryError, TokenError, zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lengths:
    """How long documents are."""

    lengths: IntArray  # int64 `[num_documents]`, including empty ones
    targets: IntArray | None  # int64 `[num_documents]`: labels; None where every token is trained on
    excerpts: dict[int, str]  # the beginnings of some documents, by number
    skipped: Sequence[str]  # records that couldn't be read
    losses: Losses = NO_LOSSES  # these, and what chat templates left out
    unread: str | None = None  # which split was read, and what was left out of folders
    sources: tuple[tuple[str, int], ...] = ()  # each file's name and number of documents, in order, if known
    parts: IntArray | None = None  # int64: documents of each part tokenized separately; None: unknown, or one
    are_bytes: bool = False  # whether bytes were counted, since no tokenizer was given
    are_counted: bool = False  # whether lengths were given, so that there are no tokens to pack


def read_lengths(source: Source, on_progress: OnProgress, excerpts_wanted: int = 0) -> Lengths:
    """Read and tokenize a source, and keep only the lengths."""
    lengths: list[IntArray] = []
    targets: list[IntArray] = []
    skipped: list[str] = []
    losses = NO_LOSSES
    excerpts: dict[int, str] = {}
    has_mask = False
    parts, count = source.parts(), 0
    documents_in, documents_of = np.zeros(len(parts), np.int64), np.zeros(len(source.files), np.int64)
    read_progress = ReadProgress([source.part_bytes(part) for part in parts], on_progress)
    watched = source.watched(read_progress.read)
    for number, part in enumerate(parts):
        for span, documents in ((one, some) for one in part for some in watched.read((one,))):
            if count < excerpts_wanted:
                excerpts |= _excerpts(source, documents, count, excerpts_wanted - count)
            count += len(documents)
            documents_in[number] += len(documents)
            documents_of[span.file] += len(documents)
            lengths.append(documents.lengths)
            targets.append(targets_of(documents))
            has_mask |= documents.loss_mask is not None
            skipped += map(str, documents.faults)
            losses += documents.losses
        read_progress.finish(number)
    if not any(some.any() for some in lengths):
        paths = [file.path for file in source.files]
        raise SourceError(nothing_read(paths, count, losses, next(iter(skipped), None)))
    return Lengths(
        lengths=np.concatenate(lengths),
        targets=np.concatenate(targets) if has_mask else None,
        excerpts=excerpts,
        skipped=skipped,
        losses=losses,
        unread=source.unread(),
        sources=tuple(zip(_names(source), documents_of.tolist(), strict=True)),
        parts=documents_in,
        are_bytes=source.counts_bytes(),
    )


def _names(source: Source) -> list[str]:
    """Return the names of a source's files, or their paths where two have the same name."""
    names = [file.name for file in source.files]
    return names if len(set(names)) == len(names) else [file.path for file in source.files]


def _excerpts(source: Source, documents: Documents, first: int, limit: int) -> dict[int, str]:
    """Return the beginnings of documents."""
    starts, stops = documents.offsets[:-1], documents.offsets[1:]
    spans = islice(zip(starts.tolist(), stops.tolist()), limit)
    decode = source.encoding.tokenizer.decode
    return {
        first + index: decode(documents.tokens[start : min(stop, start + _EXCERPT_TOKENS)].tolist())
        for index, (start, stop) in enumerate(spans)
    }


def stored_lengths(store: TokenStore) -> Lengths:
    """Return the lengths of a token store's documents."""
    shards = [store.shard(index) for index in range(len(store.shards))]
    has_mask = any(shard.counts.has_mask for shard in shards)
    return Lengths(
        lengths=np.concatenate([np.diff(shard.offsets) for shard in shards]),
        targets=np.concatenate([shard.targets() for shard in shards]) if has_mask else None,
        excerpts={},
        skipped=(),
        losses=store.losses,
        parts=np.bincount(store.parts, store.documents).astype(np.int64),
    )


def counted_lengths(path: Path) -> Lengths | None:
    """Return the array `lengths` of an `.npz` file, or None where it has none."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            with zipfile.ZipFile(file) as archive:
                if "lengths.npy" not in archive.namelist():
                    return None
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                lengths = stored["lengths"]
    except _DAMAGED as error:
        raise SourceError(f"{path} is not a readable .npz file: {error}") from error
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (len(lengths) and lengths.min() < 0):
        raise SourceError(f"{path}: `lengths` must be a row of whole numbers from 0, got {lengths.dtype}")
    return Lengths(lengths=lengths.astype(np.int64), targets=None, excerpts={}, skipped=(), are_counted=True)
