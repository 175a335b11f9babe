"""Batches of packed rows: varlen's collator and data set beside those of megatron-bridge 0.3.1, value for value."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks import same_outputs
from benchmarks.megatron_data import EOS, lengths_named
from benchmarks.megatron_reading import as_rows, first_rows, packed
from benchmarks.peers import megatron_bridge, megatron_published
from benchmarks.rows import Contestant, Race, Row
from benchmarks.step import Step
from benchmarks.stopwatch import alternate
from varlen.adapters.megatron import GPTSFTPackedDataset, PackedParquetWriter, RowCollator

SECTION = "megatron"
CAPACITIES = (4096, 32_768)
SIZES = (1, 8)
ROUNDS = 15
TARGET = 50.0
RELEASE = "megatron-bridge 0.3.1"


def steps() -> list[Step]:
    """Return what is measured."""
    return [
        Step(f"collate {rows} of {capacity:,}", partial(race, capacity, rows, ROUNDS))
        for capacity in CAPACITIES
        for rows in SIZES
    ]


def race(capacity: int, rows: int, rounds: int) -> list[Row]:
    """Race the collator on rows in memory, then reading by number and collating, of rows of one size.

    Args:
        capacity: positions of a row.
        rows: of a batch.
        rounds: of each race.
    """
    with tempfile.TemporaryDirectory() as folder:
        flat = first_rows(packed(rows, capacity), rows)
        own, other = _files(flat, Path(folder))
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
        return [
            _race(
                f"collate {what}",
                (
                    "RowCollator(rows), flat arrays in memory; the release's keys and values",
                    partial(collate, stored),
                ),
                ("collate_fn(items), lists in memory", partial(theirs.collate_fn, items)),
                rows * capacity,
                rounds,
                TARGET,
            ),
            _race(
                f"take {what} by number, and collate",
                (
                    "GPTSFTPackedDataset of Parquet, row groups decoded before are kept: __getitems__, collate_fn",
                    ours_end_to_end,
                ),
                (
                    "GPTSFTPackedDataset of .npy, all of it in memory: __getitem__, collate_fn",
                    theirs_end_to_end,
                ),
                rows * capacity,
                rounds,
                None,
            ),
        ]


def _race(
    what: str,
    ours: tuple[str, Callable[[], Any]],
    theirs: tuple[str, Callable[[], Any]],
    tokens: int,
    rounds: int,
    target: float | None,
) -> Race:
    """Check that both give the same batch, and time them."""
    same_outputs(ours[1](), theirs[1]())
    samples = alternate(ours[1], theirs[1], rounds=rounds)
    return Race(
        section=SECTION,
        what=what,
        ours=Contestant(name="varlen", call=ours[0], samples=samples[0]),
        peer=Contestant(name=RELEASE, call=theirs[0], samples=samples[1]),
        tokens=tokens,
        target=target,
        note=f"equal in every key, dtype and value; {lengths_named()}",
    )


def _files(flat: tuple[np.ndarray, ...], folder: Path) -> tuple[Path, Path]:
    """Write the same rows as our Parquet and as its `.npy`; returns both."""
    own, other = folder / "own.idx.parquet", folder / "other.npy"
    with PackedParquetWriter(own) as writer:
        writer.write(as_rows(flat))
    np.save(other, lists(own))
    return own, other


def lists(path: Path) -> list[dict[str, list[int]]]:
    """Return the rows of a packed Parquet file as the releases hold them."""
    reader = megatron_published.OneGroupReader(path)
    rows = []
    for index in range(len(reader)):
        row = reader[index]
        rows.append(
            {
                "input_ids": row["input_ids"],
                "loss_mask": row["loss_mask"],
                "seq_start_id": row["seq_boundaries"][:-1],
            }
        )
    return rows
