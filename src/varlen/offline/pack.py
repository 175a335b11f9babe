"""Pack a data set into files that a trainer reads: tokenize, plan, write; resumable, and finished or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from varlen import __version__
from varlen.counts import many
from varlen.documents.source import Source
from varlen.errors import LedgerError, OverlongDocumentError
from varlen.files.written import (
    MANIFEST_OF_ROWS,
    SKIPPED,
    SKIPPED_OF_ROWS,
    WORK,
    check_parts,
    read_manifest,
    sealed,
)
from varlen.offline.crew import Crew, Team
from varlen.offline.grow import deciding
from varlen.offline.index import OnProgress, build_store, check_tokenizer, look_at, quiet
from varlen.offline.places import (
    check_output,
    check_places,
    disk_faults,
    finish,
    tidy,
    working_folder,
)
from varlen.offline.plan import Plan
from varlen.offline.settings import PackSettings
from varlen.offline.write import PartCounts, opened_store, write_part
from varlen.store.store import TokenStore, open_store
from varlen.text.tokenizer import digest

_TOKENS = "tokens"
Write: TypeAlias = Callable[[TokenStore, Path, Team], dict[str, Any]]
"""Writes a set of a store's tokens into a folder, where an earlier run may have begun; returns the manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSet:
    """A finished packed data set."""

    folder: Path
    manifest: dict[str, Any]
    """As written beside the rows: settings, source, ledger, parts."""
    was_there: bool
    """An earlier run had finished it."""


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

    The rows have the columns of TRL's packed data sets: `input_ids`, `labels` (-100 where nothing is trained, at the
    first token of every document too) and `seq_lengths`. The bytes depend on the data, the settings and varlen's
    version, not on who does the work or how often it was interrupted.

    Args:
        source: documents, or the folder of a finished token store.
        output: folder to write; it appears when it is whole.
        settings: how to pack.
        tokens: keep the tokenized documents in this folder, or take them from it, to pack them again without
            tokenizing; None keeps nothing.
        crew: who does the work; None: this process.
        overwrite: replace packed sets and stores made from something else.
        on_progress: called with work done, all work, and words.

    Raises:
        SourceError: a record can't be read, or there is no document.
        OverlongDocumentError: a document is longer than a row, and `overlong` is "error"; or all are, and it is
            "drop". The tokens are kept for a run with another setting.
        SettingError: a folder can't be written, or holds something else.

    Cost: memory of a window (`window` documents, about 200 bytes each) and of a part for each process (about 20 bytes
    a token of `part_tokens`); disk for the tokens, 2 or 4 bytes each, while it works.
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
    """Make a packed set of any form from a source's tokens, unless an earlier run did.

    Args:
        source: documents, or the folder of a finished token store.
        output: folder to write; it appears when it is whole.
        settings: all that decides the bytes.
        write: writes the set, resumably.
        tokens: as `pack_source` has them, like what follows.
        crew: who does the work; None: this process.
        overwrite: replace packed sets and stores made from something else.
        on_progress: called with work done, all work, and words.

    Raises:
        SourceError: a record can't be read, or there is no document.
        OverlongDocumentError: what `write` says; the tokens are kept.
        SettingError: a folder can't be written, or holds something else.
    """
    output = output.resolve() if output.is_symlink() else output
    tokens = tokens.resolve() if tokens and tokens.is_symlink() else tokens
    check_places(source if isinstance(source, Path) else source.files, output, tokens)
    with (crew or Crew()).hired() as team:
        return _made(source, output, settings, write, tokens, team, overwrite, on_progress)


def _made(
    source: Source | Path,
    output: Path,
    settings: dict[str, Any],
    write: Write,
    tokens: Path | None,
    team: Team,
    overwrite: bool,
    on_progress: OnProgress,
) -> PackedSet:
    """Make a set, unless an earlier run did; arguments as in `make_set`."""
    if isinstance(source, Path):
        store = open_store(source)
        marks: dict[str, Any] = {"tokens": store.fingerprint, **store.manifest.get("source", {})}
    else:
        marks = look_at(source, output, team, on_progress)
    wanted = digest(json.dumps([__version__, deciding(marks), settings], sort_keys=True))
    manifest = read_manifest(output)
    if manifest is not None and manifest.get("fingerprint") == wanted:
        if manifest.get("kind") == "packed":
            check_parts(output, manifest)
        tidy(output)
        return PackedSet(folder=output, manifest=manifest, was_there=True)
    if not overwrite:
        check_tokenizer(output, manifest, marks)
    check_output(output, overwrite=overwrite)
    with working_folder(output, wanted, keep=_TOKENS) as partial:
        check_output(output, overwrite=overwrite)  # the run that had the lock may have finished
        if not isinstance(source, Path):
            kept = partial / WORK / _TOKENS if tokens is None else tokens
            store = build_store(
                source,
                kept,
                marks,
                team=team,
                on_progress=on_progress,
                overwrite=overwrite or tokens is None,
            )
        try:
            manifest = write(store, partial, team)
        except OverlongDocumentError as error:
            if isinstance(source, Path):
                raise
            raise OverlongDocumentError(
                f"{error}; the tokens are kept in {partial if tokens is None else tokens}, so that the same run with "
                "one of these goes on from there"
            ) from error
        finally:
            opened_store.cache_clear()  # open files would keep a removed store's space
        manifest["fingerprint"], manifest["source"] = wanted, marks
        with disk_faults(output):
            (partial / SKIPPED).unlink(missing_ok=True)  # by a run of version 0.1.0
            _gather_skipped(store, partial / SKIPPED_OF_ROWS)
        manifest = sealed(manifest)
        finish(partial, output, manifest, MANIFEST_OF_ROWS)
    return PackedSet(folder=output, manifest=manifest, was_there=False)


def _write(
    store: TokenStore, partial: Path, settings: PackSettings, team: Team, on_progress: OnProgress
) -> dict[str, Any]:
    """Write all parts; returns the manifest."""
    plan = Plan(store, settings)
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
        said = [
            f"{were} longer than {many(settings.capacity, 'token')} and dropped",
            *store.losses.sentences(),
        ]
        raise OverlongDocumentError(
            f"no document is left to pack: {'; '.join(said)}; pass --overlong split, or a larger --capacity"
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
    """Put the lists of what was skipped together."""
    if not store.losses.of_reading:
        return
    with path.open("wb") as gathered:
        for shard in store.shards:
            listed = store.folder / shard / SKIPPED
            if listed.is_file():
                gathered.write(listed.read_bytes())
