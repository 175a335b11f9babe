"""From data and settings to what makes batches: a token store that is there, one made on the spot, or lanes."""

from __future__ import annotations

import logging
import os
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from varlen.counts import many
from varlen.errors import OverlongDocumentError, SettingError
from varlen.feed.batches import BatchSettings
from varlen.feed.exchange import Exchanges
from varlen.feed.groups import PARTS_A_GROUP
from varlen.feed.settings import LoaderSettings, check_vocabulary
from varlen.feed.spec import IndexedSpec, Spec
from varlen.feed.state import Mode
from varlen.feed.windows import WindowSettings
from varlen.offline.crew import Crew
from varlen.offline.grow import fingerprint_of
from varlen.offline.index import index_source, source_marks
from varlen.source.source import Source, open_source
from varlen.source.store import TokenStore, open_store
from varlen.source.written import read_manifest

_log = logging.getLogger(__name__)
_WINDOW = 1 << 16
_WAIT_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """What a loader runs, and what its state belongs to."""

    mode: Mode
    spec: Spec
    belongs_to: dict[str, Any]
    exchanges: Exchanges | None = None
    """How ranks agree, where they have to."""


def open_data(data: Any, tokenizer: Any, settings: LoaderSettings) -> Opened:
    """Look at the data, and decide how it is fed.

    Args:
        data: documents, or a token store.
        tokenizer: of documents.
        settings: how.

    Raises:
        SourceError: no such data, or it can't be read.
        SettingError: settings that don't go with the data.
        OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".
    """
    folder = _as_store(data)
    if folder is None:
        source = open_source(data, tokenizer, **settings.reading)
        check_vocabulary(source.encoding.tokenizer.vocab_size, source.encoding.tokenizer.name, settings)
        folder = indexed_in_cache(source, settings.cache)
    elif tokenizer is not None or settings.mode == "streaming":
        given = "a tokenizer" if tokenizer is not None else 'mode="streaming"'
        raise SettingError(f"{folder} holds tokens already, which {given} can't change; leave it out")
    return open_indexed(open_store(folder), settings)


def _as_store(data: Any) -> Path | None:
    """Return the folder of a token store, if that is what was named."""
    if isinstance(data, list | tuple) and len(data) == 1:
        data = data[0]
    if not isinstance(data, str | Path):
        return None
    manifest = read_manifest(Path(data).expanduser()) if "://" not in str(data) else None
    return Path(data).expanduser() if manifest is not None and manifest.get("kind") == "tokens" else None


def open_indexed(store: TokenStore, settings: LoaderSettings) -> Opened:
    """Return how a token store is fed.

    Raises:
        SettingError: settings that don't go with the store.
        OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".
    """
    made_by = store.manifest["source"]["tokenizer"]
    check_vocabulary(made_by["vocab_size"], made_by["name"], settings)
    if settings.overlong == "error":
        _check_lengths(store, settings.capacity)
    whole, micro = settings.batch_sizes
    rank, world = settings.ranks
    is_all = settings.scope == "all"
    windows = WindowSettings(
        capacity=settings.capacity,
        window=max(int(store.documents.sum()), 1) if is_all else settings.window or _WINDOW,
        method=settings.method,
        overlong=settings.overlong,
        max_documents=1 if settings.scope == "minibatch" else settings.max_documents,
        document_multiple_of=settings.document_multiple_of,
        seed=settings.order_seed,
    )
    batches = BatchSettings(
        capacity=settings.capacity,
        global_batch_size=whole,
        micro_batch_size=micro,
        dp_world_size=world,
        layout=settings.layout,
        pad_id=settings.pad_id,
        pad_to_multiple_of=settings.pad_to_multiple_of,
        document_multiple_of=settings.document_multiple_of,
        in_order=not settings.shuffle,
    )
    spec = IndexedSpec(
        store=store.folder,
        parts_a_group=max(store.num_parts, 1) if is_all else PARTS_A_GROUP,
        windows=windows,
        batches=batches,
        epochs=settings.epochs,
        rank=rank,
    )
    return Opened(mode="indexed", spec=spec, belongs_to={"data": store.fingerprint, **settings.deciding()})


def _check_lengths(store: TokenStore, capacity: int) -> None:
    """Refuse documents longer than a pack before training, and not in the midst of it.

    Raises:
        OverlongDocumentError: there are some; names the first.
    """
    first, count = "", 0
    for number, name in enumerate(store.shards):
        lengths = np.diff(store.shard(number).offsets)
        long = np.flatnonzero(lengths > capacity)
        count += len(long)
        if len(long) and not first:
            first = f"document {long[0]:,} of shard {name} has {lengths[long[0]]:,} tokens"
    if first:
        raise OverlongDocumentError(
            f"{first}, more than the capacity {capacity:,} ({many(count, 'such document')} in {store.folder}); pass "
            'overlong="split", "truncate" or "drop", or a larger capacity'
        )


def indexed_in_cache(source: Source, cache: Path | None) -> Path:
    """Tokenize documents into a store in the user's cache, or find them there; returns its folder.

    Of several processes that ask for the same store one makes it, and the others wait. If it dies, one of them goes
    on where it stopped.

    Args:
        source: documents.
        cache: folder of such stores; None for the user's.

    Raises:
        SourceError: a record can't be read.
        SettingError: the cache can't be written.
    """
    base = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "varlen"
    marks = source_marks(source)
    folder = base / "stores" / fingerprint_of(marks)[:32]
    crew, told = Crew(processes=_processes(source)), False
    while True:
        try:
            store, was_there = index_source(source, folder, crew=crew, marks=marks)
        except SettingError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            if not told:
                _log.info("another process indexes the data into %s; waiting for it", folder)
                told = True
            time.sleep(_WAIT_S)
            continue
        if not was_there:
            _log.info("indexed %s into %s", many(int(store.documents.sum()), "document"), folder)
        return folder


def _processes(source: Source) -> int:
    """Return how many processes may tokenize: one where the tokenizer can't be handed to others."""
    try:
        pickle.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
