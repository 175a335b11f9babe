"""Packed rows: read in random order, and collated, beside megatron-bridge; what both give is equal, value for value.

Reading: varlen's reader, of its own files and the releases', beside a cache of a row group. Collating: varlen's
collator and data set beside those of megatron-bridge 0.3.1, for 1 and 8 rows of 4,096 and 32,768 positions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks import WrongResultError, same_outputs
from benchmarks.megatron.chats import EOS, Chats, lengths_named
from benchmarks.peers import megatron_bridge
from benchmarks.peers import megatron_published as published
from benchmarks.rows import Race, Row, Step
from benchmarks.stopwatch import race
from varlen.adapters.megatron import (
    GPTSFTPackedDataset,
    PackedParquet,
    PackedParquetWriter,
    PackedRows,
    RowCollator,
)

CAPACITY = 4096
PACKS = 16_000
"""Packs of the file: 32 row groups of 500, and more decoded bytes than either reader keeps."""
ROWS = 24
"""Rows that one call reads."""
READS = 7
READ_TARGET = 20.0
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def steps() -> list[Step]:
    return [
        Step("packed rows in random order", partial(race_reads, PACKS, ROWS, READS)),
        *(
            Step(f"collate {rows} of {capacity:,}", partial(race_collators, capacity, rows, COLLATE_ROUNDS))
            for capacity in CAPACITIES
            for rows in SIZES
        ),
    ]


def race_reads(packs: int, rows: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        own, other, count = _read_files(packs, Path(folder))
        peer = published.OneGroupReader(other)
        whole = "nothing decoded is kept, as of files far larger than memory"
        defaults = f"the defaults; up to 256 MiB of what was decoded are kept, of {count * CAPACITY * 5 / 1e6:.0f} MB"
        contests = (
            (own, 0, False, READ_TARGET, f"PackedParquet.rows([i]), its own file; {whole}"),
            (own, 0, True, None, f"PackedParquet[i], lists, its own file; {whole}"),
            (other, 0, False, None, f"PackedParquet.rows([i]), the release's file; {whole}"),
            (other, None, False, None, f"PackedParquet.rows([i]), the release's file, {defaults}"),
        )
        return [_race_reader(peer, *contest, count, rows, rounds) for contest in contests]


def _race_reader(
    peer: published.OneGroupReader,
    path: Path,
    kept_bytes: int | None,
    as_lists: bool,
    target: float | None,
    call: str,
    count: int,
    rows: int,
    rounds: int,
) -> Race:
    """Race one way of reading; every row of the file is read once before any is read again."""
    reader = PackedParquet(path) if kept_bytes is None else PackedParquet(path, kept_bytes=kept_bytes)
    order = np.random.default_rng(0).permutation(count)
    for index in order[:rows].tolist():
        same_row(reader[index], peer[index], index)
    ours: Callable[[int], object] = reader.__getitem__ if as_lists else lambda index: reader.rows([index])
    peer_call = (
        f"row groups of {published.ROW_GROUP} packs, the last one read is kept; rewritten in a few lines, "
        "as PyPI doesn't have it; gives lists"
    )
    found = race(
        f"read {rows} packs of {CAPACITY:,} in random order, of {count:,}",
        (call, partial(_read, ours, cycle(order.tolist()), rows)),
        (
            "Megatron-Bridge, as it publishes it",
            peer_call,
            partial(_read, peer.__getitem__, cycle(order.tolist()), rows),
        ),
        rounds=rounds,
        tokens=rows * CAPACITY,
        target=target,
        note=f"files in the page cache; {lengths_named()}",
    )
    reader.close()
    return found


def _read(read: Callable[[int], object], turns: Iterator[int], rows: int) -> None:
    for _, index in zip(range(rows), turns):
        read(index)


def _read_files(packs: int, folder: Path) -> tuple[Path, Path, int]:
    """Write our file and the releases' of the same rows; returns both and how many rows they hold."""
    own, other = folder / "own.idx.parquet", folder / "other.idx.parquet"
    flat = packed(packs)
    with PackedParquetWriter(own) as writer:
        writer.write(as_rows(flat))
    published.write_arrays(*flat, other)
    return own, other, len(flat[2]) - 1


def packed(packs: int, capacity: int = CAPACITY) -> Rows:
    lengths = 320  # a little more than the mean, so that there are too many rows rather than too few
    return first_rows(
        Chats.draw(max(packs * capacity // lengths * 5 // 4, 100), capacity).rows(capacity), packs
    )


def first_rows(flat: Rows, packs: int) -> Rows:
    """Return the first of some packed rows."""
    tokens, mask, offsets, starts, document_offsets = flat
    if len(offsets) <= packs:
        raise WrongResultError(f"{len(offsets) - 1:,} packs were made, {packs:,} are needed")
    end, last = offsets[packs], document_offsets[packs]
    return tokens[:end], mask[:end], offsets[: packs + 1], starts[:last], document_offsets[: packs + 1]


def as_rows(flat: Rows) -> PackedRows:
    tokens, mask, offsets, starts, document_offsets = flat
    return PackedRows(
        input_ids=tokens,
        loss_mask=mask,
        offsets=offsets.astype(np.int64),
        seq_start_id=starts.astype(np.int64),
        document_offsets=document_offsets.astype(np.int64),
    )


def same_row(ours: dict[str, Any], theirs: dict[str, Any], index: int) -> None:
    for name, value in theirs.items():
        if list(ours[name]) != list(value):
            raise WrongResultError(f"row {index:,}: {name} differs between the readers")


CAPACITIES = (4096, 32_768)
SIZES = (1, 8)
COLLATE_ROUNDS = 15
COLLATE_TARGET = 50.0
RELEASE = "megatron-bridge 0.3.1"


def race_collators(capacity: int, rows: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        flat = first_rows(packed(rows, capacity), rows)
        own, other = _collate_files(flat, Path(folder))
        theirs = megatron_bridge.dataset(other, seq_length=capacity, eos_id=EOS, pad_to_max_length=True)
        items = [theirs[index] for index in range(rows)]
        settings: dict[str, Any] = {
            "max_seq_length": capacity,
            "pad_to_max_length": True,
            "dialect": "0.4",
            "compatible": True,
        }
        stored = as_rows(flat)
        collate = RowCollator(eos_id=EOS, **settings)
        dataset = GPTSFTPackedDataset(own, megatron_bridge.Numbers(EOS), **settings)
        numbers = list(range(rows))

        def ours_end_to_end() -> Any:
            return dataset.collate_fn(dataset.__getitems__(numbers))

        def theirs_end_to_end() -> Any:
            return theirs.collate_fn([theirs[index] for index in numbers])

        what = f"{rows} row{'s' * (rows > 1)} of {capacity:,}"
        from_memory = "RowCollator(rows), flat arrays in memory; the release's keys and values"
        by_number = (
            "GPTSFTPackedDataset of Parquet, row groups decoded before are kept: __getitems__, collate_fn",
            "GPTSFTPackedDataset of .npy, all of it in memory: __getitem__, collate_fn",
        )
        race_of = partial(_race_collator, tokens=rows * capacity, rounds=rounds)
        return [
            race_of(
                f"collate {what}",
                (from_memory, partial(collate, stored)),
                ("collate_fn(items), lists in memory", partial(theirs.collate_fn, items)),
                target=COLLATE_TARGET,
            ),
            race_of(
                f"take {what} by number, and collate",
                (by_number[0], ours_end_to_end),
                (by_number[1], theirs_end_to_end),
                target=None,
            ),
        ]


def _race_collator(
    what: str,
    ours: tuple[str, Callable[[], Any]],
    theirs: tuple[str, Callable[[], Any]],
    tokens: int,
    rounds: int,
    target: float | None,
) -> Race:
    same_outputs(ours[1](), theirs[1]())
    note = f"equal in every key, dtype and value; {lengths_named()}"
    return race(what, ours, (RELEASE, *theirs), rounds=rounds, tokens=tokens, target=target, note=note)


def _collate_files(flat: tuple[np.ndarray, ...], folder: Path) -> tuple[Path, Path]:
    """Write the same rows as our Parquet and as its `.npy`; returns both."""
    own, other = folder / "own.idx.parquet", folder / "other.npy"
    with PackedParquetWriter(own) as writer:
        writer.write(as_rows(flat))
    np.save(other, lists(own))
    return own, other


def lists(path: Path) -> list[dict[str, list[int]]]:
    reader = published.OneGroupReader(path)
    rows = (reader[index] for index in range(len(reader)))
    return [
        {
            **{name: row[name] for name in ("input_ids", "loss_mask")},
            "seq_start_id": row["seq_boundaries"][:-1],
        }
        for row in rows
    ]
