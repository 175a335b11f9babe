"""Stores, loaders over them, and files of tokens, written as their formats say."""

import json
import struct
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import varlen as vl
from varlen.documents.documents import Documents
from varlen.documents.source import open_source
from varlen.files.losses import Losses
from varlen.files.rows import Fault
from varlen.files.written import read_manifest
from varlen.offline import index as index_module
from varlen.offline.index import index_source
from varlen.store.shard import ShardWriter
from varlen.store.store import TokenStore, open_store

Batch = list[tuple[list[int], list[int] | None]]


def documents_of(batch: Batch, faults: int = 0) -> Documents:
    tokens = [token for ids, _ in batch for token in ids]
    marks = [mark for ids, mask in batch for mark in (mask or [1] * len(ids))]
    has_mask = any(mask is not None for _, mask in batch)
    return Documents(
        tokens=np.array(tokens, dtype=np.int32),
        offsets=np.cumsum([0, *(len(ids) for ids, _ in batch)]).astype(np.int64),
        loss_mask=np.array(marks, dtype=np.uint8) if has_mask else None,
        faults=tuple(Fault(where=f"a.jsonl line {n}", why="is bad") for n in range(faults)),
        losses=Losses(records=faults),
    )


def write_store(folder: Path, shards: list[list[Batch]]) -> TokenStore:
    listed: list[dict[str, Any]] = []
    for number, batches in enumerate(shards):
        writer = ShardWriter(folder / f"{number}")
        for batch in batches:
            writer.append(documents_of(batch))
        counts = writer.close()
        sizes = {"num_documents": counts.num_documents, "num_tokens": counts.num_tokens}
        listed.append({"name": f"{number}", **sizes})
    manifest = {"varlen": "1", "kind": "tokens", "format": 1, "fingerprint": "f", "shards": listed}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return open_store(folder)


def write_arrow(
    table: pa.Table, path: Path, rows: int, as_file: bool = False, compression: str | None = None
) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink:
        writer = (pa.ipc.new_file if as_file else pa.ipc.new_stream)(sink, table.schema, options=options)
        with writer:
            writer.write_table(table, max_chunksize=rows)


KINDS = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def joined(sequences: list[list[int]]) -> list[int]:
    return [token for sequence in sequences for token in sequence]


def write_pair(prefix: Path, documents: list[list[list[int]]], kind: int = 8, modes: bool = False) -> None:
    dtype = np.dtype(KINDS[kind])
    sequences = [sequence for document in documents for sequence in document]
    sizes = [len(sequence) for sequence in sequences]
    begins = np.cumsum([0, *sizes])[:-1] * dtype.itemsize
    Path(f"{prefix}.bin").write_bytes(np.array(joined(sequences), dtype=dtype).tobytes())
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, kind, len(sequences), len(documents) + 1)
        + np.array(sizes, dtype=np.int32).tobytes()
        + begins.astype(np.int64).tobytes()
        + np.cumsum([0, *(len(document) for document in documents)]).astype(np.int64).tobytes()
        + (np.zeros(len(sequences), dtype=np.int8).tobytes() if modes else b"")
    )


NAMES = ("input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens", "document_ids", "pack_ids")


def random_store(folder, shards=4, documents=60, longest=30, seed=5):
    """A token store with a loss mask in every other shard; empty and overlong documents are among them."""
    rng = np.random.default_rng(seed)
    store = write_store(
        folder,
        [
            [
                [
                    (rng.integers(0, 99, n).tolist(), None if shard % 2 else rng.integers(0, 2, n).tolist())
                    for n in rng.integers(0, longest, documents)
                ]
            ]
            for shard in range(shards)
        ],
    )
    manifest = {
        **store.manifest,
        "fingerprint": f"seed {seed}",
        "source": {"tokenizer": {"name": "bytes", "vocab_size": 260}},
    }
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    return store.folder


def loader_of(store, **changes):
    usual = {
        "capacity": 32,
        "global_batch_size": 24,
        "window": 50,
        "seed": 3,
        "worker": "thread",
        "epochs": 2,
    }
    return vl.PackedLoader(store, **{**usual, **changes})


streaming_of = partial(loader_of, capacity=256, global_batch_size=12, window=8)
"""A loader that streams texts in small packs."""


def content(batch):
    """Everything of a batch that training depends on."""
    return (*(getattr(batch, name).tobytes() for name in NAMES), batch.step_num_targets)


def drained(loader):
    """The content of all batches that are left, and the state before the first and after each."""
    found, states = [], [loader.state_dict()]
    for batch in loader:
        found.append(content(batch))
        states.append(loader.state_dict())
    return found, states


def index_until(data, folder, notes, monkeypatch):
    """Index, killed when so many parts are finished."""
    real, calls = index_module.write_json, []

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) > 1 + notes:  # before its first part an index says what it is of
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(index_module, "write_json", dying)
        with pytest.raises(KeyboardInterrupt):
            index_source(open_source(data), folder)


def count_openings(monkeypatch: Any, folder: Path) -> Counter[str]:
    """Count from now on how often this process opens a store, and reads its manifest."""
    counts: Counter[str] = Counter()
    opening = TokenStore.__init__

    def opened(self: TokenStore, where: Path, *arguments: Any, **named: Any) -> None:
        counts["opened"] += where == folder
        opening(self, where, *arguments, **named)

    def read(where: Path) -> Any:
        counts["read"] += where == folder
        return read_manifest(where)

    monkeypatch.setattr(TokenStore, "__init__", opened)
    for name, module in list(sys.modules.items()):
        if name.startswith("varlen.") and hasattr(module, "read_manifest"):
            monkeypatch.setattr(module, "read_manifest", read)
    return counts
