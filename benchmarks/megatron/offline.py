"""Packing tokenized chats for Megatron: `pack_for_megatron` beside megatron-bridge's functions, and their memory.

PyPI's newest release, 0.3.1, looks through all packs for every document, and writes `.npy`. Later ones search a tree
and write Parquet; what they do there is published, so the same functions of 0.3.1 are raced with such a tree, in
plain Python, and with varlen's compiled first fit in its place, which no release has.

Each side is a process of its own (`ours`, `theirs`), which has packed a few chats before, so that nothing is loaded
or compiled while it is timed. The peer's chats stand in memory before its time begins, as its own data set hands
them over; varlen reads them from a token store within its time. What is timed ends with the packed file and its
metadata.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import varlen as vl
from benchmarks.checks import WrongResultError, same_documents
from benchmarks.megatron.chats import EOS, Chats, chat_lengths, lengths_named, marked
from benchmarks.rows import Limit, Race, Row, Samples, Step
from benchmarks.stopwatch import measure_call, peak_bytes

FEW = 5000
"""Chats that each side packs before it is timed, so that nothing is loaded or compiled while it is."""


def write_chats(path: str, count: int, longest: int) -> None:
    import pyarrow as pa

    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())})
    with pq.ParquetWriter(path, schema) as writer:
        for part in Chats.parts(count, longest):
            bounds = pa.array(part.offsets.astype(np.int32))
            arrays = [pa.ListArray.from_arrays(bounds, pa.array(v)) for v in (part.tokens, part.mask)]
            writer.write_table(pa.table(arrays, schema=schema), row_group_size=1000)


def index_chats(path: str, folder: str) -> None:
    from varlen.documents.source import open_source
    from varlen.offline.index import index_source

    index_source(open_source([path]), Path(folder))


def ours(store: str, capacity: int, form: str, algorithm: str, folder: str) -> dict[str, float]:
    """Pack with `pack_for_megatron`."""
    from varlen.adapters.megatron import MegatronPackSettings, pack_for_megatron
    from varlen.documents.source import open_source

    settings = MegatronPackSettings(
        pack_size=capacity,
        format=form,  # type: ignore[arg-type]  # as the settings themselves check
        algorithm=algorithm,  # type: ignore[arg-type]
    )
    with tempfile.TemporaryDirectory() as scratch:
        few = f"{scratch}/chats.parquet"
        write_chats(few, FEW, capacity)
        pack_for_megatron(
            open_source([few]), Path(scratch, "packed"), settings, tokens=Path(scratch, "tokens")
        )
    before = _now()
    done = pack_for_megatron(Path(store), Path(folder), settings)
    return {**_taken(before), "fill": done.manifest["fill_ratio"]}


def theirs(count: int, pack_size: int, form: str, first_fit: str, folder: str) -> dict[str, float]:
    """Pack with megatron-bridge's own functions, and write."""
    from benchmarks.peers import megatron_bridge, megatron_published

    others = {"tree": megatron_published.first_fit, "kernel": first_fit_by_kernel}
    if first_fit == "own":
        module = megatron_bridge.package().packing_utils
    else:
        module = megatron_bridge.with_first_fit(others[first_fit])
    examples = Chats.draw(count, pack_size).examples()

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
    return {**_taken(before), "fill": metadata["packing_efficiency"] / 100}


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


def _taken(before: tuple[float, float]) -> dict[str, float]:
    """Return what was taken since, and the most memory of the process."""
    after = _now()
    return {"wall_s": after[0] - before[0], "cpu_s": after[1] - before[1], "peak_bytes": peak_bytes()}


CAPACITY = 4096
ROUNDS = 3
TARGET = 10.0
MILLION = 1_000_000
LIMIT_GB = 1.0
SIZES = (50_000, 100_000, 200_000)
_FIRST_FITS = {
    "own": "create_hist, create_packing_strategy and fill_packing_strategy as 0.3.1 has them; time of its first fit "
    "grows with the square of the documents",
    "tree": "the same with first fit by a tree in Python, as 0.4 and later publish it",
    "kernel": "the same with varlen's compiled first fit in its place, which no release has",
}
_FORMS = {"npy": "np.save", "parquet": "pa.table of lists, row groups of 500"}


@dataclass(frozen=True)
class Contest:
    """What the peer does, and with how many chats."""

    count: int
    first_fit: str
    form: str
    target: float | None = TARGET


CONTESTS = (
    Contest(20_000, "own", "npy"),
    Contest(50_000, "own", "npy"),
    *(Contest(count, "tree", "parquet") for count in SIZES),
    Contest(SIZES[1], "kernel", "parquet"),
    Contest(SIZES[1], "tree", "npy", target=None),
)


def steps() -> list[Step]:
    races = [Step(f"pack {c.count:,} chats, {c.first_fit}, {c.form}", partial(race, c)) for c in CONTESTS]
    return [*races, Step(f"pack {MILLION:,} chats", partial(pack_many, MILLION))]


def race(contest: Contest, rounds: int = ROUNDS) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = tokens_of(contest.count, folder)
        taken: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for number in range(rounds):
            taken[0].append(_ours(store, folder / f"ours{number}"))
            out = folder / f"theirs{number}"
            out.mkdir()
            given = (contest.count, CAPACITY, contest.form, contest.first_fit, out)
            taken[1].append(measure_call(theirs, *given))
            if number == 0:
                _check(contest, folder / "ours0", out)
    return [_race_of(contest, *taken), *_memory_of(contest, *taken)]


def _race_of(contest: Contest, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> Race:
    cpu_ratio = statistics.median(peer["cpu_s"] / mine["cpu_s"] for peer, mine in zip(theirs, ours))
    release = "megatron-bridge 0.3.1" + ("" if contest.first_fit == "own" else " and what it publishes")
    settings = f"{_FIRST_FITS[contest.first_fit]}; {_FORMS[contest.form]} and the metadata"
    return Race.of(
        f"pack {contest.count:,} tokenized chats into rows of {CAPACITY:,}, and write them",
        ("pack_for_megatron, from a token store to Parquet and metadata", _samples(ours)),
        (release, settings, _samples(theirs)),
        (ours[0]["fill"], theirs[0]["fill"]),
        tokens=chat_tokens(contest.count),
        target=contest.target,
        note="wall time; each in a process of its own that has packed before; varlen reads on in a thread while it "
        f"writes, {cpu_ratio:.1f}x in processor time; the peer's chats stand in memory already; {lengths_named()}",
        by_wall=True,
    )


def _memory_of(contest: Contest, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[Limit]:
    """Return the most that a process of either held, where the contest is one of those by size."""
    if (contest.first_fit, contest.form) != ("tree", "parquet"):
        return []
    return [
        Limit.of_peaks(
            f"{name}: most memory of the process that packs {contest.count:,} chats",
            [run["peak_bytes"] for run in runs],
            LIMIT_GB if name == "varlen" else None,
        )
        for name, runs in (("varlen", ours), ("megatron-bridge", theirs))
    ]


def pack_many(count: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = tokens_of(count, folder)
        taken = [_ours(store, folder / f"ours{number}") for number in range(ROUNDS)]
        metadata = pq.ParquetFile(_parquet(folder / "ours0")).metadata
        packed = taken[0]["fill"] * metadata.num_rows * CAPACITY
        given = chat_tokens(count) - count
        if round(packed) != given:
            raise WrongResultError(f"{round(packed):,} positions were packed, {given:,} given")
    beyond = "the peer's lists of so many tokens need more memory than this machine has; its time isn't extrapolated"
    what = f"varlen: pack {count:,} tokenized chats, {chat_tokens(count):,} tokens, and write them"
    most = f"varlen: most memory of the process that packs {count:,} chats"
    return [
        Limit.of_times(what, [run["wall_s"] for run in taken], None, beyond),
        Limit.of_peaks(most, [run["peak_bytes"] for run in taken], LIMIT_GB),
    ]


def tokens_of(count: int, folder: Path, longest: int = CAPACITY) -> Path:
    chats, store = folder / "chats.parquet", folder / "tokens"
    measure_call(write_chats, chats, count, longest)
    measure_call(index_chats, chats, store)
    chats.unlink()
    return store


def chat_tokens(count: int) -> int:
    return int((chat_lengths(count, CAPACITY) + 1).sum())


def _ours(store: Path, out: Path) -> dict[str, float]:
    found: dict[str, float] = measure_call(ours, store, CAPACITY, "parquet", "best_fit", out)
    return found


def _parquet(folder: Path) -> Path:
    (path,) = folder.glob("*.parquet")
    return path


def _check(contest: Contest, ours: Path, theirs: Path) -> None:
    """Check that both wrote every chat once, with its mask, and no row over capacity."""
    chats = Chats.draw(contest.count, CAPACITY)
    for folder in (ours, theirs):
        tokens, sizes, widths = written(folder)
        same_documents(tokens, sizes, chats.marked, chats.offsets)
        if int(widths.max()) > CAPACITY:
            raise WrongResultError(f"a row of {int(widths.max()):,} positions, the capacity is {CAPACITY:,}")


def written(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read what either side wrote, with pyarrow or NumPy alone.

    Tokens with their masks in one number; the stored tokens of each document; the positions of each row.
    """
    if (folder / "packed.npy").exists():
        rows = np.load(folder / "packed.npy", allow_pickle=True)
        ids, mask, starts = (_joined(rows, name) for name in ("input_ids", "loss_mask", "seq_start_id"))
    else:
        table = pq.read_table(_parquet(folder))
        ids, mask, starts = (
            _flat(table[name].combine_chunks()) for name in ("input_ids", "loss_mask", "seq_start_id")
        )
    begins = starts[0] + np.repeat(ids[1][:-1], np.diff(starts[1]))
    sizes = np.diff(np.append(begins, ids[1][-1]))
    return marked(ids[0], mask[0]), sizes, np.diff(ids[1]) - np.diff(starts[1])


def _flat(column: Any) -> tuple[np.ndarray, np.ndarray]:
    return column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy().astype(np.int64)


def _joined(rows: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    bounds = np.cumsum([0, *(len(row[name]) for row in rows)])
    return np.concatenate([np.array(row[name], np.int64) for row in rows]), bounds


def _samples(runs: list[dict[str, float]]) -> Samples:
    return Samples(wall_s=[run["wall_s"] for run in runs], cpu_s=[run["cpu_s"] for run in runs])
