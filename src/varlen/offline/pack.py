"""Pack a data set into files for trainers: tokenize, plan, write; resumable and atomic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from varlen import __version__
from varlen.arguments import as_count
from varlen.counts import many
from varlen.documents.order import STRETCH, DocumentOrder
from varlen.documents.source import Source
from varlen.errors import LedgerError, OverlongDocumentError, SettingError, SourceError
from varlen.files.ours import atomic_file, write_json
from varlen.files.token_tables import list_column, write_table
from varlen.files.written import (
    MANIFEST_OF_ROWS,
    SKIPPED,
    SKIPPED_OF_ROWS,
    WORK,
    check_parts,
    read_manifest,
    with_checksum,
)
from varlen.offline.crew import Crew, Team
from varlen.offline.index import OnProgress, build_store, check_tokenizer, deciding, marks_at_start, quiet
from varlen.offline.outputs import (
    check_output,
    check_overlap,
    finish,
    output_faults,
    remove_work,
    working_folder,
)
from varlen.pack.pieces import applied, check_fit, ways_out
from varlen.pack.window import WindowPacker
from varlen.regular import open_regular, read_regular
from varlen.store.store import TokenStore, open_store, weighs
from varlen.store.tokens import ReadableTokens, lengths_in_order
from varlen.text.tokenizer import digest
from varlen.types import Int32Array, IntArray, Ledger, Method, Overlong, Packing

_TOKENS = "tokens"
# Writes a packed set of a store's tokens into a folder, resuming an earlier run; returns the manifest.
Write: TypeAlias = Callable[[TokenStore, Path, Team], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSet:
    """A finished packed data set."""

    folder: Path
    manifest: dict[str, Any]  # settings, source, ledger and parts, as written beside the rows
    was_there: bool  # whether an earlier run had finished it


def pack_source(
    source: Source | Path,
    output: Path,
    settings: PackSettings,
    *,
    tokens: Path | None = None,
    crew: Crew | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = quiet,
) -> PackedSet:
    """Pack a source, or a token store, into a folder of Parquet or Arrow files with a manifest.

    The rows have the columns of TRL's packed data sets: `input_ids`, `labels` (-100 where nothing is trained,
    including the first token of every document) and `seq_lengths`. The bytes depend on the data, the settings and
    varlen's version, but not on the number of processes or interruptions.

    Cost: memory for a window (`window` documents, about 200 bytes each) and a part per process (about 20 bytes per
    token of `part_tokens`); temporary disk space for the tokens, 2 or 4 bytes each.
    """

    def write(store: TokenStore, partial: Path, team: Team) -> dict[str, Any]:
        return _write(store, partial, settings, team, on_progress)

    settled = settings.to_json()
    return make_set(source, output, settled, write, tokens, crew, overwrite, on_progress)


def make_set(
    source: Source | Path,
    output: Path,
    settings: dict[str, Any],
    write: Write,
    tokens: Path | None = None,
    crew: Crew | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = quiet,
) -> PackedSet:
    """Make a packed set of any form from a source's tokens, unless an earlier run did."""
    output = output.resolve() if output.is_symlink() else output
    tokens = tokens.resolve() if tokens and tokens.is_symlink() else tokens
    check_overlap(source if isinstance(source, Path) else source.files, output, tokens)
    with (crew or Crew()).started() as team:
        if isinstance(source, Path):
            store = open_store(source)
            marks: dict[str, Any] = {"tokens": store.fingerprint, **store.manifest.get("source", {})}
        else:
            marks = marks_at_start(source, output, team, on_progress)
        wanted = digest(json.dumps([__version__, deciding(marks), settings], sort_keys=True))
        while True:
            manifest = read_manifest(output)
            if manifest is not None and manifest.get("fingerprint") == wanted:
                if manifest.get("kind") == "packed":
                    check_parts(output, manifest)
                remove_work(output)
                return PackedSet(folder=output, manifest=manifest, was_there=True)
            if not overwrite:
                check_tokenizer(output, manifest, marks)
            check_output(output, manifest, overwrite=overwrite)
            with working_folder(output, wanted, manifest, keep=_TOKENS) as partial:
                if partial is None:
                    continue
                if not isinstance(source, Path):
                    store_folder = partial / WORK / _TOKENS if tokens is None else tokens
                    anew = overwrite or tokens is None
                    store = build_store(
                        source, store_folder, marks, team=team, on_progress=on_progress, overwrite=anew
                    )
                tokens_folder = None if isinstance(source, Path) else tokens or partial
                manifest = _write_from(store, write, partial, team, tokens_folder)
                manifest["fingerprint"], manifest["source"] = wanted, marks
                with output_faults(output):
                    (partial / SKIPPED).unlink(missing_ok=True)  # left by a run of version 0.1.0
                    _gather_skipped(store, partial / SKIPPED_OF_ROWS)
                manifest = with_checksum(manifest)
                finish(partial, output, manifest, MANIFEST_OF_ROWS)
            return PackedSet(folder=output, manifest=manifest, was_there=False)


def _write_from(
    store: TokenStore, write: Write, partial: Path, team: Team, folder: Path | None
) -> dict[str, Any]:
    """Write all files of a set; an error says where new tokens are kept, if anywhere."""
    try:
        return write(store, partial, team)
    except OverlongDocumentError as error:
        if folder is None:
            raise
        raise OverlongDocumentError(
            f"{error}; the tokens are kept in {folder}, so that the same run with one of these goes on from there"
        ) from error
    finally:
        opened_store.cache_clear()  # open files would keep a removed store's space


def _write(
    store: TokenStore, partial: Path, settings: PackSettings, team: Team, on_progress: OnProgress
) -> dict[str, Any]:
    """Write all parts; return the manifest."""
    plan = PartPlans(store, settings)
    total = max(int(store.tokens.sum()), 1)
    parts: list[PartCounts] = []
    done = 0
    on_progress(0, total, "packing")
    for counts in team.run(write_part, (store.folder, store.fingerprint, partial, settings), plan):
        parts.append(counts)
        done += counts.num_tokens
        on_progress(done, total, "packing")
    parts.sort(key=lambda counts: (len(counts.name), counts.name))
    if not parts:
        were = many(plan.ledger.dropped_documents, "document is", "documents are")
        reasons = [
            f"{were} longer than {many(settings.capacity, 'token')} and dropped",
            *store.losses.sentences(),
        ]
        raise OverlongDocumentError(
            f"no document is left to pack: {'; '.join(reasons)}; {ways_out(['split'], is_command=True)}"
        )
    ledger = plan.ledger.check()
    packs, packed = sum(p.num_packs for p in parts), sum(p.num_tokens for p in parts)
    if packed != ledger.packed:
        raise LedgerError(
            f"{packed:,} tokens were written, but {ledger.packed:,} planned: a bug in varlen; please report it"
        )
    return {
        "varlen": __version__,
        "kind": "packed",
        "fingerprint": "",
        "settings": settings.to_json(),
        "source": {},
        "num_packs": packs,
        "num_tokens": packed,
        "num_targets": sum(p.num_targets for p in parts),
        "fill_ratio": packed / (packs * settings.capacity),
        "packs_without_target": sum(p.packs_without_target for p in parts),
        "num_skipped": int(store.manifest.get("num_skipped", 0)),
        "losses": store.losses.to_json(),
        "ledger": asdict(ledger),
        "long_tokens": plan.long_tokens,
        "parts": [asdict(p) for p in parts],
    }


def _gather_skipped(store: TokenStore, path: Path) -> None:
    """Concatenate the shards' lists of skipped records."""
    if not store.losses.of_reading:
        return
    with path.open("wb") as gathered:
        for shard in store.shards:
            listed = store.folder / shard / SKIPPED
            if listed.is_file():
                gathered.write(listed.read_bytes())


# Plan the rows of a packed set from the lengths in a store, window by window and file by file.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartPlan:
    """The rows of one file: row r holds the pieces `offsets[r]:offsets[r + 1]`."""

    number: int
    shards: IntArray  # int64 `[pieces]`: the shard of each piece's document
    documents: IntArray  # int64 `[pieces]`: the document's number within its shard
    starts: IntArray
    stops: IntArray  # int64 `[pieces]`: the piece is its document's tokens [start, stop)
    offsets: IntArray  # int64 `[rows + 1]`


class PartPlans:
    """Iterates over the parts of a packed set; memory is bounded by a window and a part, not by the set."""

    def __init__(self, store: ReadableTokens, settings: PackSettings) -> None:
        self._store, self._settings = store, settings
        self.long_tokens = 0  # tokens of documents longer than a row, in the parts yielded so far
        self._order = DocumentOrder(store.documents, settings.seed if settings.shuffle else None)
        self._packer = WindowPacker(
            capacity=settings.capacity,
            window=settings.window,
            method=settings.method,
            overlong=settings.overlong,
            max_documents=settings.max_documents,
        )

    @property
    def ledger(self) -> Ledger:
        """The balance of all tokens, once all parts were yielded."""
        return self._packer.ledger

    def __iter__(self) -> Iterator[PartPlan]:
        if applied(self._settings.method, self._settings.overlong) == "error":
            name = "document {:,} (counted from 0 in the order of the data)".format
            parts = lengths_in_order(self._store)
            check_fit(parts, self._settings.capacity, name, out=ways_out(is_command=True))
        waiting: list[Packing] = []
        number = 0
        for packing in self.packings():
            waiting.append(packing)
            while sum(p.num_tokens for p in waiting) >= self._settings.part_tokens:
                part, waiting = self._cut(waiting, number)
                yield part
                number += 1
        while any(p.num_packs for p in waiting):
            part, waiting = self._cut(waiting, number)
            yield part
            number += 1

    def packings(self) -> Iterator[Packing]:
        """Yield packs as windows fill; document ids are positions in the order."""
        for stretch in range(self._order.num_stretches):
            shards, documents = self._order.stretch(stretch)
            self._store.will_need(shards, documents)
            lengths = self._store.lengths(shards, documents)
            self.long_tokens += int(lengths[lengths > self._settings.capacity].sum())
            yield self._packer.add(lengths)
        yield self._packer.flush()

    def _cut(self, waiting: list[Packing], number: int) -> tuple[PartPlan, list[Packing]]:
        """Take as many packs as a part holds; return the part, and the packs left."""
        joined = _join(waiting)
        ends = np.cumsum(joined.pack_sums(joined.lengths)) if joined.num_packs else np.zeros(0)
        rows = min(int(np.searchsorted(ends, self._settings.part_tokens)) + 1, joined.num_packs)
        pieces = int(joined.offsets[rows])
        shards, documents = self.located(joined.document_ids[:pieces])
        part = PartPlan(
            number=number,
            shards=shards,
            documents=documents,
            starts=joined.starts[:pieces].astype(np.int64),
            stops=joined.stops[:pieces].astype(np.int64),
            offsets=joined.offsets[: rows + 1].copy(),
        )
        return part, [_tail(joined, rows)] if rows < joined.num_packs else []

    def located(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return shards and numbers of the documents at positions of the order."""
        shards, documents = np.empty_like(positions), np.empty_like(positions)
        for stretch in np.unique(positions // STRETCH).tolist():
            at = positions // STRETCH == stretch
            held_shards, held_documents = self._order.stretch(stretch)
            shards[at] = held_shards[positions[at] - stretch * STRETCH]
            documents[at] = held_documents[positions[at] - stretch * STRETCH]
        return shards, documents


def _join(packings: list[Packing]) -> Packing:
    """Concatenate packings."""
    if len(packings) == 1:
        return packings[0]
    shifts = np.cumsum([0] + [p.num_pieces for p in packings[:-1]])
    offsets = np.concatenate([[0], *(p.offsets[1:] + shift for p, shift in zip(packings, shifts))])
    return _like(
        packings[0],
        np.concatenate([p.document_ids for p in packings]),
        np.concatenate([p.starts for p in packings]),
        np.concatenate([p.stops for p in packings]),
        offsets.astype(np.int64),
    )


def _tail(packing: Packing, rows: int) -> Packing:
    """Return a packing without its first rows."""
    pieces = int(packing.offsets[rows])
    return _like(
        packing,
        packing.document_ids[pieces:],
        packing.starts[pieces:],
        packing.stops[pieces:],
        packing.offsets[rows:] - pieces,
    )


def _like(
    packing: Packing, ids: IntArray, starts: Int32Array, stops: Int32Array, offsets: IntArray
) -> Packing:
    tokens = int((stops.astype(np.int64) - starts).sum())
    return Packing(
        document_ids=ids,
        starts=starts,
        stops=stops,
        offsets=offsets,
        capacity=packing.capacity,
        ledger=Ledger(tokens_in=tokens, packed=tokens),
        method=packing.method,
        overlong=packing.overlong,
    )


# Write the rows of one part to a Parquet or Arrow file, atomically.

_IGNORED = -100
_ROW_GROUP_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCounts:
    """The content of a written file."""

    name: str
    num_packs: int
    num_pieces: int
    num_tokens: int
    num_targets: int
    packs_without_target: int
    sha256: str
    num_bytes: int = 0  # 0 if unknown: version 0.1.0 didn't record it


def write_part(shared: tuple[Path, str, Path, PackSettings], part: PartPlan) -> PartCounts:
    """Write one part, unless an earlier run did."""
    store_folder, fingerprint, folder, settings = shared
    name = f"part-{part.number:05d}.{settings.format}"
    note = folder / WORK / f"{name}.json"
    written = _written(folder, note)
    if written is not None:
        return written
    columns, labels = _columns(opened_store(store_folder, fingerprint), part, settings)
    with output_faults(folder):
        with atomic_file(folder / name) as partial:
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
    """Return the part that an earlier run wrote, if it is intact."""
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
    """Open a store once per process."""
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
    """Return the columns of a part, those of TRL's packed data sets first, and the flat labels."""
    lengths = part.stops - part.starts
    begins = np.cumsum(lengths) - lengths
    tokens, mask = store.gather(part.shards, part.documents, part.starts, lengths)
    labels = tokens.copy()
    if mask is not None:
        labels[mask == 0] = _IGNORED
    labels[begins] = _IGNORED  # in the row, the token before it belongs to another document
    bounds = _row_bounds(part)
    columns = {
        "input_ids": list_column(tokens, bounds),
        "labels": list_column(labels, bounds),
        "seq_lengths": list_column(lengths.astype(np.int32), part.offsets),
    }
    if weighs(store):  # in all parts, as all files of a set have the same columns
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


# The settings of a packed data set, all of which determine its bytes.

OutputFormat = Literal["parquet", "arrow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """How documents are packed and written."""

    capacity: int  # tokens per row
    method: Method = "best_fit"  # of `vl.pack`; best fit keeps rows nearly random samples of the documents
    overlong: Overlong = "split"  # for documents longer than `capacity`; split loses no token
    max_documents: int | None = None  # maximum documents per row; None for no limit
    shuffle: bool = True  # permute documents before packing
    seed: int = 0  # of the shuffle
    window: int = 1 << 16  # documents packed at a time; memory grows with it
    format: OutputFormat = "parquet"
    # Also write `position_ids`: 0, 1, ... in each document.
    position_ids: bool = False
    trace: bool = False  # also write `document_ids` and `document_starts`: the origin of each piece
    part_tokens: int = 1 << 23  # approximate tokens per file; memory grows with it

    def __post_init__(self) -> None:
        choices: dict[str, Sequence[Any]] = {
            "method": get_args(Method),
            "overlong": get_args(Overlong),
            "format": get_args(OutputFormat),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise SettingError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        for name, least in {"capacity": 1, "window": 1, "part_tokens": 1, "seed": 0}.items():
            object.__setattr__(self, name, as_count(getattr(self, name), name, least, 2**63 - 1))
        if self.max_documents is not None:
            object.__setattr__(self, "max_documents", as_count(self.max_documents, "max_documents"))
        if self.capacity + self.part_tokens >= 2**31:  # a part ends with the row that fills it
            raise SettingError(
                f"capacity and part_tokens must be below 2^31 together, got {self.capacity:,} and "
                f"{self.part_tokens:,}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return all settings by name."""
        return asdict(self)
