"""Stores and files of tokens, written as their formats say."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from varlen.documents.documents import Documents
from varlen.files.losses import Losses
from varlen.files.rows import Fault
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
    """Write documents, each of some sequences, as the format says."""
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
