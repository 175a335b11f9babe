"""Pack a data set for Megatron-Bridge before training: tokenize once, plan, write Parquet or an index.

Uses bounded memory and all processors; resumable, and the output appears atomically.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from varlen import __version__
from varlen.adapters.megatron.files.metadata import metadata_entry, read_metadata, write_metadata
from varlen.adapters.megatron.files.parquet import PackedParquetWriter
from varlen.adapters.megatron.packing.alignment import aligned_pieces, check_size, longest_aligned, slots_of
from varlen.adapters.megatron.packing.index import INDEX, opened, write_arrays
from varlen.adapters.megatron.packing.release_packs import as_packing, replay_packs
from varlen.adapters.megatron.rows import PackedRows
from varlen.arguments import as_choice, as_count
from varlen.documents.order import DocumentOrder
from varlen.documents.source import Source
from varlen.errors import DocumentsError, LedgerError, SettingError
from varlen.files.losses import nothing_left
from varlen.files.ours import write_json
from varlen.files.written import WORK
from varlen.offline.crew import Crew, Team
from varlen.offline.index import OnProgress, quiet
from varlen.offline.outputs import output_faults
from varlen.offline.pack import PackedSet, make_set, opened_store
from varlen.pack.pieces import Pieces
from varlen.pack.window import WindowPacker
from varlen.regular import read_regular
from varlen.store.store import TokenStore, open_store, weighs
from varlen.types import Int32Array, IntArray, Overlong, Packing

_KIND = "megatron"
_WORK_INDEX = "index"


def pack_for_megatron(
    source: Source | Path,
    output: Path,
    settings: MegatronPackSettings,
    *,
    tokens: Path | None = None,
    metadata_of: Sequence[Path] = (),
    crew: Crew | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = quiet,
) -> PackedSet:
    """Pack a source, or a token store, into a folder that Megatron-Bridge reads directly.

    The folder holds `training_4096.idx.parquet` (or several files, or an index), `4096_metadata.jsonl`, which the
    release needs for constant shapes and CUDA graphs, and a manifest that accounts for every position. Documents are
    tokenized once: if `tokens` keeps them, packing again at another size takes seconds, and an index doesn't write
    them again. The output's bytes depend only on the data, the settings and varlen's version.

    Args:
        source: documents, or the folder of a finished token store.
        output: folder to write; it appears when it is complete.
        settings: how to pack.
        tokens: folder in which tokenized documents are kept, or from which they are read; None keeps nothing.
        metadata_of: folders of other splits at this pack size, or their metadata files, whose entries are written
            beside this one's: the release takes one file for training and validation.
        crew: worker processes; None: this process.
        overwrite: replace packed sets and stores made from something else.
        on_progress: called with work done, all work, and words.

    Returns:
        The folder and its manifest; `manifest["data"]` names the packed files as the release takes them.

    Raises:
        SourceError: a record can't be read, there is no document, or metadata is missing or damaged.
        OverlongDocumentError: a document is longer than a row, and `overlong` is "error". Tokens are kept for a run
            with another setting.
        SettingError: a folder can't be written or holds something else, or `format` is "index" and the tokens aren't
            kept.

    Cost: memory of about 150 bytes per document, and 200 to 300 MB per process; temporary disk space of 2 or 4 bytes
    per token.
    """
    if settings.format == "index" and not isinstance(source, Path) and tokens is None:
        raise SettingError(
            "an index says which tokens stand in which row, so that they must be kept: name a folder for them with "
            "--tokens (tokens=...)"
        )
    has_weights = weighs(open_store(source)) if isinstance(source, Path) else source.encoding.row_weights
    if has_weights:
        raise SettingError(
            "the rows are read with their weights (row_weights), and Megatron's packed files have a mask of 0 and 1 "
            "alone; read them without, or pack them as Parquet or Arrow"
        )
    others = [entry for path in metadata_of for entry in _entries(path, settings.pack_size)]
    settled = {**settings.to_json(), "form": _KIND, "metadata_of": others}

    def write(store: TokenStore, partial: Path, team: Team) -> dict[str, Any]:
        return _written(store, partial, output, settings, others, team, on_progress)

    return make_set(source, output, settled, write, tokens, crew, overwrite, on_progress)


def _entries(path: Path, pack_size: int) -> list[dict[str, int | float]]:
    return read_metadata(path / _metadata_name(pack_size) if path.is_dir() else path, pack_size=pack_size)


def _metadata_name(pack_size: int) -> str:
    return f"{pack_size}_metadata.jsonl"


def _written(
    store: TokenStore,
    partial: Path,
    output: Path,
    settings: MegatronPackSettings,
    others: Sequence[dict[str, int | float]],
    team: Team,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """Write the rows or the index, and the metadata; returns the manifest."""
    on_progress(0, 1, "packing")
    packing = plan_rows(store, settings)
    if not packing.num_packs:
        raise DocumentsError(
            "no document is left to pack: all were dropped, or have a single token and so nothing to predict ("
            f"{nothing_left(packing.ledger, store.losses, settings.pack_size)}); pass --overlong split, or a larger "
            "--capacity"
        )
    targets = _row_targets(store, packing)
    slots = slots_of(packing.lengths, settings.multiple)
    metadata = partial / _metadata_name(settings.pack_size)
    metadata.unlink(missing_ok=True)
    for entry in (*others, metadata_entry(slots, packing.offsets, settings.pack_size)):
        write_metadata(metadata, entry)
    manifest = {
        "varlen": __version__,
        "kind": INDEX if settings.format == "index" else _KIND,
        "fingerprint": "",
        "settings": settings.to_json(),
        "source": {},
        "pad_id": _pad_id(store, settings),
        "num_packs": packing.num_packs,
        "num_documents": packing.num_pieces,
        "num_tokens": packing.num_tokens,
        "num_targets": int(targets.sum()),
        "fill_ratio": packing.fill_ratio,
        "packs_without_target": int((targets == 0).sum()),
        "num_skipped": int(store.manifest.get("num_skipped", 0)),
        "losses": store.losses.to_json(),
        "ledger": asdict(packing.ledger),
        "metadata": metadata.name,
    }
    if settings.format == "index":
        size, crc32 = write_arrays(partial, packing)
        where = os.path.relpath(store.folder.absolute(), output.absolute())
        more = {"tokens": where, "tokens_fingerprint": store.fingerprint, "index_bytes": size, "crc32": crc32}
        return {**manifest, "data": ".", **more}
    parts = _write_parts(store, partial, settings, packing, team, on_progress)
    _check(parts, packing, int(targets.sum()))
    stem = f"{settings.split}_{settings.pack_size}"
    data = parts[0]["name"] if settings.part_tokens is None else f"{stem}_*.idx.parquet"
    return {**manifest, "data": data, "parts": parts}


def _pad_id(store: TokenStore, settings: MegatronPackSettings) -> int:
    """Return the padding token: the EOS, as in the releases, or 0."""
    if settings.pad_id is not None:
        return settings.pad_id
    end = (store.manifest.get("source", {}).get("tokenizer") or {}).get("eos_id")
    return 0 if end is None else int(end)


def _row_targets(store: TokenStore, packing: Packing) -> IntArray:
    """Count the targets of each row, int64 `[rows]`, from the store's loss masks."""
    first = np.concatenate([[0], np.cumsum(store.documents)])
    shards = np.searchsorted(first, packing.document_ids, side="right") - 1
    starts, stops = packing.starts.astype(np.int64), packing.stops.astype(np.int64) + 1
    counts = store.count_targets(shards, packing.document_ids - first[shards], starts, stops)
    targets: IntArray = np.add.reduceat(counts, packing.offsets[:-1])
    return targets


@dataclass(frozen=True, slots=True)
class _Shared:
    """What every process that writes parts needs."""

    folder: Path
    store: Path
    fingerprint: str
    settings: MegatronPackSettings


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one file."""

    name: str
    start: int
    stop: int


def _write_parts(
    store: TokenStore,
    partial: Path,
    settings: MegatronPackSettings,
    packing: Packing,
    team: Team,
    on_progress: OnProgress,
) -> list[dict[str, Any]]:
    """Write all files, whose rows processes read by an index in the work folder; returns the counts of each."""
    write_arrays(partial / WORK / _WORK_INDEX, packing)
    shared = _Shared(partial, store.folder, store.fingerprint, settings)
    parts = _parts(settings, packing)
    total = packing.num_tokens
    if len(parts) == 1 and team.is_here(is_one=True):
        return [write_part(shared, parts[0], on_progress, total)]
    written, done = [], 0
    for counts in team.run(write_part, shared, parts, is_one=len(parts) == 1):
        written.append(counts)
        done += counts["num_tokens"]
        on_progress(done, total, "writing")
    return sorted(written, key=lambda counts: counts["first_pack"])


def _parts(settings: MegatronPackSettings, packing: Packing) -> list[_Part]:
    """Divide rows into files of about equally many stored tokens."""
    stem = f"{settings.split}_{settings.pack_size}"
    if settings.part_tokens is None:
        return [_Part(f"{stem}.idx.parquet", 0, packing.num_packs)]
    slots = np.cumsum(slots_of(packing.lengths, settings.multiple).astype(np.int64) + 1)
    ends = slots[packing.offsets[1:] - 1]
    numbers = (ends - 1) // settings.part_tokens
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), packing.num_packs]
    return [
        _Part(f"{stem}_{number:05d}.idx.parquet", start, stop)
        for number, (start, stop) in enumerate(zip(cuts, cuts[1:]))
    ]


def write_part(
    shared: _Shared, part: _Part, on_progress: OnProgress = quiet, total: int = 1
) -> dict[str, Any]:
    """Write one file, unless an earlier run did; returns its counts."""
    path, note = shared.folder / part.name, shared.folder / WORK / f"{part.name}.json"
    written = _already_written(path, note)
    if written is not None:
        return written
    store = opened_store(shared.store, shared.fingerprint)
    folder = shared.folder / WORK / _WORK_INDEX
    index = opened(
        folder, store, shared.fingerprint, shared.settings.multiple, _pad_id(store, shared.settings)
    )
    documents = tokens = targets = 0
    with PackedParquetWriter(path, row_group_tokens=shared.settings.row_group_tokens) as writer:
        for rows in _ahead(index.batches_of(part.start, part.stop)):
            writer.write(rows)
            documents += rows.num_documents
            tokens += 0 if rows.seq_lengths is None else int(rows.seq_lengths.sum(dtype=np.int64))
            targets += int(np.count_nonzero(rows.loss_mask))
            on_progress(tokens, total, "writing")
    counts = {
        "name": part.name,
        "first_pack": part.start,
        "num_packs": part.stop - part.start,
        "num_documents": documents,
        "num_tokens": tokens,
        "num_targets": targets,
        "bytes": path.stat().st_size,
    }
    with output_faults(shared.folder):
        write_json(note, counts)
    return counts


def _already_written(path: Path, note: Path) -> dict[str, Any] | None:
    """Return the counts of a file that an earlier run completed; None if there is none."""
    try:
        counts: dict[str, Any] = json.loads(read_regular(note))
        return counts if path.stat().st_size == counts["bytes"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _ahead(batches: Iterator[PackedRows]) -> Iterator[PackedRows]:
    """Yield batches, reading one ahead in a thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        following = pool.submit(next, batches, None)
        while (rows := following.result()) is not None:
            following = pool.submit(next, batches, None)
            yield rows


def _check(parts: Sequence[dict[str, Any]], packing: Packing, targets: int) -> None:
    planned = {
        "num_packs": packing.num_packs,
        "num_documents": packing.num_pieces,
        "num_tokens": packing.num_tokens,
        "num_targets": targets,
    }
    for name, number in planned.items():
        written = sum(part[name] for part in parts)
        if written != number:
            raise LedgerError(
                f"{name}: {written:,} were written, but {number:,} planned: a bug in varlen; please report it"
            )


# Planning the rows of a packed set from the lengths in a token store: by the releases' algorithms or varlen's.


def plan_rows(store: TokenStore, settings: MegatronPackSettings) -> Packing:
    """Return the packing of the store's documents into rows.

    Cost: about 100 bytes per document.
    """
    lengths = _lengths(store)
    if settings.algorithm in RELEASES:
        return _replayed(lengths, settings)
    positions = np.maximum(lengths - 1, 0)
    pieces = aligned_pieces(
        positions,
        settings.pack_size,
        multiple=settings.multiple,
        longest=settings.longest,
        overlong=settings.overlong,
    )
    order = _order(store, pieces, settings.seed if settings.shuffle else None)
    items, offsets = _windowed(pieces.lengths[order], settings)
    sizes = settings.pack_size, settings.multiple
    rows = order[items]
    return as_packing(positions, pieces, rows, offsets, *sizes, settings.overlong, settings.algorithm)


def _lengths(store: TokenStore) -> Int32Array:
    """Return the number of tokens of every document, int32 `[documents]`."""
    parts = [np.zeros(0, dtype=np.int32)]
    for index in range(len(store.shards)):
        with store.shard(index) as shard:
            shard.check_offsets()
            parts.append(np.diff(shard.offsets).astype(np.int32))
    return np.concatenate(parts)


def _replayed(lengths: Int32Array, settings: MegatronPackSettings) -> Packing:
    """Pack by a release's algorithm, which leaves out documents without a token, but not those of a single token."""
    nonempty = np.flatnonzero(lengths > 0).astype(np.int64)
    packing = replay_packs(
        lengths[nonempty] - 1,
        settings.pack_size,
        settings.seed,
        algorithm=settings.algorithm,  # type: ignore[arg-type]  # one of the releases'
        overlong=settings.overlong,
        multiple=settings.multiple,
        longest=settings.longest,
    )
    empty = len(lengths) - len(nonempty)
    ledger = replace(
        packing.ledger, documents_in=len(lengths), empty_documents=packing.ledger.empty_documents + empty
    )
    return replace(packing, document_ids=nonempty[packing.document_ids], ledger=ledger)


def _order(store: TokenStore, pieces: Pieces, seed: int | None) -> IntArray:
    """Return the order of the pieces: by shuffled documents, or by the store's if `seed` is None."""
    order = DocumentOrder(store.documents, seed)
    first = np.concatenate([[0], np.cumsum(store.documents)])
    documents = [np.zeros(0, dtype=np.int64)]
    for number in range(order.num_stretches):
        shards, within = order.stretch(number)
        documents.append(first[shards] + within)
    shuffled = np.concatenate(documents)
    if pieces.documents is None:
        return shuffled
    ranks = np.empty(len(shuffled), dtype=np.int64)
    ranks[shuffled] = np.arange(len(shuffled))
    return np.argsort(ranks[pieces.documents], kind="stable").astype(np.int64)


def _windowed(lengths: Int32Array, settings: MegatronPackSettings) -> tuple[IntArray, IntArray]:
    """Pack pieces in windows, in the order given; returns the pieces row by row, and each row's offset."""
    packer = WindowPacker(
        capacity=settings.pack_size,
        window=settings.window,
        method=settings.algorithm,  # type: ignore[arg-type]  # `_replayed` handles those of the releases
        max_documents=settings.max_documents,
        document_multiple_of=settings.multiple,
    )
    steps = range(0, len(lengths), settings.window)
    packings = [packer.add(lengths[start : start + settings.window]) for start in steps]
    packings.append(packer.flush())
    shifts = np.cumsum([0, *(packing.num_pieces for packing in packings)])
    offsets = [packing.offsets[1:] + shift for packing, shift in zip(packings, shifts)]
    items = np.concatenate([packing.document_ids for packing in packings])
    return items, np.concatenate([np.zeros(1, dtype=np.int64), *offsets])


# The settings of offline packing for Megatron-Bridge; all of them affect the bytes that are written.

OfflineAlgorithm: TypeAlias = Literal[
    "best_fit", "best_fit_decreasing", "balanced", "next_fit", "first_fit_shuffle", "first_fit_decreasing"
]
"""varlen's, on windows of shuffled documents, and two of the releases, whose packs they give: not `Method`'s."""
RELEASES = ("first_fit_shuffle", "first_fit_decreasing")
SetFormat: TypeAlias = Literal["parquet", "index"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronPackSettings:
    """How documents are packed into rows for Megatron-Bridge."""

    pack_size: int
    """Positions of a row: `packed_sequence_size`. A row stores one token more for each of its documents."""
    format: SetFormat = "parquet"
    """"parquet", which releases from 0.4 on read, or "index": references to the kept tokens, without a copy."""
    algorithm: OfflineAlgorithm = "best_fit"
    """"first_fit_shuffle" and "first_fit_decreasing" give the packs of Megatron-Bridge 0.6 at this seed; "best_fit"
    is fuller, and its rows are random samples too; "balanced" evens out the work of rows."""
    multiple: int = 1
    """`pad_seq_to_mult`: documents are padded to a multiple of it; `alignment` computes it."""
    longest: int | None = None
    """Maximum positions of a document (`max_single_sequence_length`); None: those of a row."""
    overlong: Overlong = "error"
    """Policy for longer documents."""
    max_documents: int | None = None
    """Maximum documents per row, which bounds the number of boundaries for CUDA graphs; None: no limit."""
    shuffle: bool = True
    """Whether documents are permuted before packing, as in the releases."""
    seed: int = 0
    """Seed of the shuffle."""
    split: str = "training"
    """Prefix of the file's name: "training" or "validation"."""
    pad_id: int | None = None
    """Padding token; None: the EOS, as in the releases."""
    window: int = 1 << 16
    """Number of documents that varlen's algorithms pack together."""
    part_tokens: int | None = None
    """Stored tokens per file, about, so that processes can write in parallel; None: a single file."""
    row_group_tokens: int = 1 << 15
    """Stored tokens per row group, which are decoded to read one row."""

    def __post_init__(self) -> None:
        as_choice(self.algorithm, "algorithm", get_args(OfflineAlgorithm))
        as_choice(self.overlong, "overlong", get_args(Overlong))
        as_choice(self.format, "format", get_args(SetFormat))
        for name in ("pack_size", "multiple", "window", "row_group_tokens"):
            object.__setattr__(self, name, as_count(getattr(self, name), name))
        for name in ("longest", "max_documents", "part_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_count(getattr(self, name), name))
        object.__setattr__(self, "seed", as_count(self.seed, "seed", 0, 2**32 - 1))
        if self.pad_id is not None:
            object.__setattr__(self, "pad_id", as_count(self.pad_id, "pad_id", 0))
        check_size(self.pack_size, self.multiple, "pack_size")
        longest_aligned(self.pack_size, self.multiple, self.longest)
        if self.longest is not None and self.longest > self.pack_size:
            raise SettingError(
                f"longest is {self.longest:,}, but a row holds {self.pack_size:,} positions; pass at most that, or a "
                "larger pack_size"
            )
        if self.algorithm in RELEASES and (self.max_documents is not None or not self.shuffle):
            given = "documents in order" if self.max_documents is None else "max_documents"
            raise SettingError(
                f'algorithm="{self.algorithm}" packs as the releases do, which know no {given}; choose "best_fit", '
                "or leave that out"
            )
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.split):
            raise SettingError(f'split begins the names of files, such as "training"; got {self.split!r}')

    def to_json(self) -> dict[str, Any]:
        """Return all settings by name."""
        return asdict(self)
