"""Packing tokenized chats for Megatron: `pack_for_megatron` beside megatron-bridge's functions, and their memory.

PyPI's newest release, 0.3.1, looks through all packs for every document, and writes `.npy`. Later ones search a tree
and write Parquet; what they do there is published, so the same functions of 0.3.1 are raced with such a tree, in
plain Python, and with varlen's compiled first fit in its place, which no release has.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.checks import WrongResultError, same_documents
from benchmarks.child import measure
from benchmarks.megatron_data import Chats, chat_lengths, lengths_named, marked
from benchmarks.rows import Contestant, Limit, Race, Row
from benchmarks.step import Step
from benchmarks.stopwatch import Samples

SECTION = "megatron"
CAPACITY = 4096
ROUNDS = 3
TARGET = 10.0
MILLION = 1_000_000
LIMIT_GB = 1.0
SIZES = (50_000, 100_000, 200_000)
_PROGRAM = (
    "import sys; from benchmarks import megatron_contestants as c; getattr(c, sys.argv[1])(*sys.argv[2:])"
)
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
    """Return what is measured."""
    races = [Step(f"pack {c.count:,} chats, {c.first_fit}, {c.form}", partial(race, c)) for c in CONTESTS]
    return [*races, Step(f"pack {MILLION:,} chats", partial(pack_many, MILLION))]


def race(contest: Contest, rounds: int = ROUNDS) -> list[Row]:
    """Race one contest in alternating rounds of processes; a row of their memory beside it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = tokens_of(contest.count, folder)
        taken: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for number in range(rounds):
            taken[0].append(_ours(store, folder / f"ours{number}"))
            theirs = folder / f"theirs{number}"
            theirs.mkdir()
            taken[1].append(
                _measure("theirs", contest.count, CAPACITY, contest.form, contest.first_fit, theirs)
            )
            if number == 0:
                _check(contest, folder / "ours0", theirs)
    return [_race_of(contest, *taken), *_memory_of(contest, *taken)]


def _race_of(contest: Contest, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> Race:
    cpu_ratio = statistics.median(peer["cpu_s"] / mine["cpu_s"] for peer, mine in zip(theirs, ours))
    return Race(
        section=SECTION,
        what=f"pack {contest.count:,} tokenized chats into rows of {CAPACITY:,}, and write them",
        ours=Contestant(
            name="varlen",
            call="pack_for_megatron, from a token store to Parquet and metadata",
            samples=_samples(ours),
            fill=ours[0]["fill"],
        ),
        peer=Contestant(
            name="megatron-bridge 0.3.1"
            if contest.first_fit == "own"
            else "megatron-bridge 0.3.1 and what it publishes",
            call=f"{_FIRST_FITS[contest.first_fit]}; {_FORMS[contest.form]} and the metadata",
            samples=_samples(theirs),
            fill=theirs[0]["fill"],
        ),
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
    rows = []
    for name, runs in (("varlen", ours), ("megatron-bridge", theirs)):
        peaks = [run["peak_bytes"] / 1e9 for run in runs]
        rows.append(
            Limit(
                section=SECTION,
                what=f"{name}: most memory of the process that packs {contest.count:,} chats",
                value=max(peaks),
                unit="GB",
                limit=LIMIT_GB if name == "varlen" else None,
                samples=peaks,
            )
        )
    return rows


def pack_many(count: int) -> list[Row]:
    """Pack more chats than the peer has room for, with varlen alone; positions are counted, and memory is limited."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = tokens_of(count, folder)
        taken = [_ours(store, folder / f"ours{number}") for number in range(ROUNDS)]
        metadata = pq.ParquetFile(_parquet(folder / "ours0")).metadata
        packed = taken[0]["fill"] * metadata.num_rows * CAPACITY
        given = chat_tokens(count) - count
        if round(packed) != given:
            raise WrongResultError(f"{round(packed):,} positions were packed, {given:,} given")
    walls = [run["wall_s"] for run in taken]
    peaks = [run["peak_bytes"] / 1e9 for run in taken]
    beyond = "the peer's lists of so many tokens need more memory than this machine has; its time isn't extrapolated"
    return [
        Limit(
            section=SECTION,
            what=f"varlen: pack {count:,} tokenized chats, {chat_tokens(count):,} tokens, and write them",
            value=float(np.median(walls)),
            unit="s",
            limit=None,
            samples=walls,
            note=beyond,
        ),
        Limit(
            section=SECTION,
            what=f"varlen: most memory of the process that packs {count:,} chats",
            value=max(peaks),
            unit="GB",
            limit=LIMIT_GB,
            samples=peaks,
        ),
    ]


def tokens_of(count: int, folder: Path, longest: int = CAPACITY) -> Path:
    """Draw chats and make their token store, in processes of their own; returns its folder."""
    chats, store = folder / "chats.parquet", folder / "tokens"
    _measure("write_chats", chats, count, longest)
    _measure("index_chats", chats, store)
    chats.unlink()
    return store


def chat_tokens(count: int) -> int:
    """Return the tokens of so many chats."""
    return int((chat_lengths(count, CAPACITY) + 1).sum())


def _ours(store: Path, out: Path) -> dict[str, float]:
    return dict(_measure("ours", store, CAPACITY, "parquet", "best_fit", out))


def _measure(*arguments: object) -> Mapping[str, Any]:
    return measure(_PROGRAM, *map(str, arguments))


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

    Returns:
        Tokens with their masks in one number, int64; the stored tokens of each document; the positions of each row.
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
    """Return the values and offsets of a list column."""
    return column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy().astype(np.int64)


def _joined(rows: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and offsets of lists of rows."""
    bounds = np.cumsum([0, *(len(row[name]) for row in rows)])
    return np.concatenate([np.array(row[name], np.int64) for row in rows]), bounds


def _samples(runs: list[dict[str, float]]) -> Samples:
    return Samples(wall_s=[run["wall_s"] for run in runs], cpu_s=[run["cpu_s"] for run in runs])
