"""Packing chats for Megatron, each side in a process of its own: what is timed, and the memory that it takes.

Each has packed a few chats before, so that nothing is loaded or compiled while it is timed. The peer's chats stand in
memory before its time begins, as its own data set hands them over; varlen reads them from a token store within its
time. What is timed ends with the packed file and its metadata.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import varlen as vl
from benchmarks.megatron_data import EOS, Chats
from benchmarks.memory import peak_bytes

FEW = 5000
"""Chats that each side packs before it is timed, so that nothing is loaded or compiled while it is."""


def write_chats(path: str, count: str, longest: str, is_quiet: bool = False) -> None:
    """Write a file of tokenized chats, a part at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())})
    with pq.ParquetWriter(path, schema) as writer:
        for part in Chats.parts(int(count), int(longest)):
            bounds = pa.array(part.offsets.astype(np.int32))
            arrays = [pa.ListArray.from_arrays(bounds, pa.array(v)) for v in (part.tokens, part.mask)]
            writer.write_table(pa.table(arrays, schema=schema), row_group_size=1000)
    if not is_quiet:
        print(json.dumps({}))


def index_chats(path: str, folder: str) -> None:
    """Make the token store of a file of tokenized chats."""
    from varlen.documents.source import open_source
    from varlen.offline.index import index_source

    index_source(open_source([path]), Path(folder))
    print(json.dumps({}))


def ours(store: str, capacity: str, form: str, algorithm: str, folder: str) -> None:
    """Pack with `pack_for_megatron`.

    Args:
        store: a token store's folder.
        capacity: positions of a row, and most of a chat.
        form: "parquet" or "index".
        algorithm: of `MegatronPackSettings`.
        folder: to make.
    """
    from varlen.adapters.megatron import MegatronPackSettings, pack_for_megatron
    from varlen.documents.source import open_source

    settings = MegatronPackSettings(
        pack_size=int(capacity),
        format=form,  # type: ignore[arg-type]  # as the settings themselves check
        algorithm=algorithm,  # type: ignore[arg-type]
    )
    with tempfile.TemporaryDirectory() as scratch:
        write_chats(f"{scratch}/chats.parquet", str(FEW), capacity, is_quiet=True)
        pack_for_megatron(
            open_source([f"{scratch}/chats.parquet"]),
            Path(scratch, "packed"),
            settings,
            tokens=Path(scratch, "tokens"),
        )
    before = _now()
    done = pack_for_megatron(Path(store), Path(folder), settings)
    _print(before, fill=done.manifest["fill_ratio"])


def theirs(count: str, capacity: str, form: str, first_fit: str, folder: str) -> None:
    """Pack with megatron-bridge's own functions, and write.

    Args:
        count: of chats.
        capacity: positions of a row, and most of a chat.
        form: "npy", as 0.3.1 writes, or "parquet", as later releases do.
        first_fit: "own", of 0.3.1; or in its place "tree", as later releases have it, or "kernel", varlen's.
        folder: that is written to.
    """
    from benchmarks.peers import megatron_bridge, megatron_published

    others = {"tree": megatron_published.first_fit, "kernel": first_fit_by_kernel}
    if first_fit == "own":
        module = megatron_bridge.package().packing_utils
    else:
        module = megatron_bridge.with_first_fit(others[first_fit])
    pack_size = int(capacity)
    examples = Chats.draw(int(count), pack_size).examples()

    def pack(given: np.ndarray, out: Path) -> dict[str, Any]:
        sequences, histogram = module.create_hist(given, pack_size)
        np.random.seed(0)  # noqa: NPY002 - the generator that it draws from
        packs, metadata = module.create_packing_strategy(histogram, pack_size, megatron_bridge.ALGORITHM)
        rows = module.fill_packing_strategy(packs, sequences, pack_size, EOS)
        if form == "npy":
            np.save(out / "packed.npy", rows)
        else:
            megatron_published.write(rows, out / "packed.idx.parquet")
        (out / "packed_metadata.jsonl").write_text(json.dumps([metadata]))
        return metadata

    with tempfile.TemporaryDirectory() as scratch:
        pack(examples[:FEW], Path(scratch))
    gc.collect()
    before = _now()
    metadata = pack(examples, Path(folder))
    _print(before, fill=metadata["packing_efficiency"] / 100)


def first_fit_by_kernel(seqlens: list[int], pack_size: int) -> list[list[int]]:
    """Return what megatron-bridge's `first_fit` returns, from a compiled kernel."""
    lengths = np.array(seqlens, np.int64)
    packing = vl.pack(lengths, capacity=pack_size, method="first_fit")
    placed = lengths[packing.document_ids].tolist()
    bounds = packing.offsets.tolist()
    return [placed[a:b] for a, b in zip(bounds, bounds[1:])]


def _now() -> tuple[float, float]:
    times = os.times()
    return time.perf_counter(), sum(times[:4])


def _print(before: tuple[float, float], **more: Any) -> None:
    """Print what was taken since, as JSON."""
    after = _now()
    taken: dict[str, Any] = {"wall_s": after[0] - before[0], "cpu_s": after[1] - before[1]}
    print(json.dumps({**taken, "peak_bytes": peak_bytes(), **more}))
