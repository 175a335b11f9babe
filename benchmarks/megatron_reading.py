"""Packed rows in random order: varlen's reader, of its own files and the releases', beside a cache of a row group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks import WrongResultError
from benchmarks.megatron_data import Chats, lengths_named
from benchmarks.peers import megatron_published as published
from benchmarks.rows import Contestant, Race, Row
from benchmarks.step import Step
from benchmarks.stopwatch import alternate
from varlen.adapters.megatron import PackedParquet, PackedParquetWriter, PackedRows

SECTION = "megatron"
CAPACITY = 4096
PACKS = 16_000
"""Packs of the file: 32 row groups of 500, and more decoded bytes than either reader keeps."""
ROWS = 24
"""Rows that one call reads."""
ROUNDS = 7
TARGET = 20.0
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def steps() -> list[Step]:
    """Return what is measured."""
    return [Step("packed rows in random order", partial(race, PACKS, ROWS, ROUNDS))]


def race(packs: int, rows: int, rounds: int) -> list[Row]:
    """Race shuffled reads: our file, our file as lists, the releases' file, the same with what we keep by default.

    Args:
        packs: of the file.
        rows: read by a call.
        rounds: of each race.
    """
    with tempfile.TemporaryDirectory() as folder, _files(packs, Path(folder)) as (own, other, count):
        peer = published.OneGroupReader(other)
        whole = "nothing decoded is kept, as of files far larger than memory"
        contests = (
            (own, 0, False, TARGET, f"PackedParquet.rows([i]), its own file; {whole}"),
            (own, 0, True, None, f"PackedParquet[i], lists, its own file; {whole}"),
            (other, 0, False, None, f"PackedParquet.rows([i]), the release's file; {whole}"),
            (
                other,
                None,
                False,
                None,
                f"PackedParquet.rows([i]), the release's file, the defaults; {_kept(count)}",
            ),
        )
        return [_race(peer, *contest, count, rows, rounds) for contest in contests]


def _race(
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
    samples = alternate(
        partial(_read, ours, _turns(order), rows),
        partial(_read, peer.__getitem__, _turns(order), rows),
        rounds=rounds,
    )
    reader.close()
    return Race(
        section=SECTION,
        what=f"read {rows} packs of {CAPACITY:,} in random order, of {count:,}",
        ours=Contestant(name="varlen", call=call, samples=samples[0]),
        peer=Contestant(
            name="Megatron-Bridge, as it publishes it",
            call=f"row groups of {published.ROW_GROUP} packs, the last one read is kept; rewritten in a few lines, "
            "as PyPI doesn't have it; gives lists",
            samples=samples[1],
        ),
        tokens=rows * CAPACITY,
        target=target,
        note=f"files in the page cache; {lengths_named()}",
    )


def _kept(count: int) -> str:
    """Say how much of a file what the reader keeps by default is."""
    whole = count * CAPACITY * 5 / 1e6
    return f"up to 256 MiB of what was decoded are kept, of {whole:.0f} MB"


def _turns(order: np.ndarray) -> Iterator[int]:
    """Yield the rows of a file in one random order, again and again."""
    while True:
        yield from order.tolist()


def _read(read: Callable[[int], object], turns: Iterator[int], rows: int) -> None:
    """Read the next rows."""
    for _, index in zip(range(rows), turns):
        read(index)


@contextmanager
def _files(packs: int, folder: Path) -> Iterator[tuple[Path, Path, int]]:
    """Write our file and the releases' of the same rows; yields both and how many rows they hold."""
    own, other = folder / "own.idx.parquet", folder / "other.idx.parquet"
    flat = packed(packs)
    with PackedParquetWriter(own) as writer:
        writer.write(as_rows(flat))
    published.write_arrays(*flat, other)
    count = len(flat[2]) - 1
    del flat
    yield own, other, count


def packed(packs: int, capacity: int = CAPACITY) -> Rows:
    """Return so many packed rows of chats, best fit."""
    lengths = 320  # a little more than the mean, so that there are too many rows rather than too few
    return first_rows(
        Chats.draw(max(packs * capacity // lengths * 5 // 4, 100), capacity).rows(capacity), packs
    )


def first_rows(flat: Rows, packs: int) -> Rows:
    """Return the first of some packed rows.

    Raises:
        WrongResultError: there are fewer.
    """
    tokens, mask, offsets, starts, document_offsets = flat
    if len(offsets) <= packs:
        raise WrongResultError(f"{len(offsets) - 1:,} packs were made, {packs:,} are needed")
    end, last = offsets[packs], document_offsets[packs]
    return tokens[:end], mask[:end], offsets[: packs + 1], starts[:last], document_offsets[: packs + 1]


def as_rows(flat: Rows) -> PackedRows:
    """Return packed rows as varlen holds them."""
    tokens, mask, offsets, starts, document_offsets = flat
    return PackedRows(
        input_ids=tokens,
        loss_mask=mask,
        offsets=offsets.astype(np.int64),
        seq_start_id=starts.astype(np.int64),
        document_offsets=document_offsets.astype(np.int64),
    )


def same_row(ours: dict[str, Any], theirs: dict[str, Any], index: int) -> None:
    """Check that two readers give the same row.

    Raises:
        WrongResultError: says what differs.
    """
    for name, value in theirs.items():
        if list(ours[name]) != list(value):
            raise WrongResultError(f"row {index:,}: {name} differs between the readers")
