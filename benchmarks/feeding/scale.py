"""Section `feed_scale`: a loader over a thousand million documents, none of which is kept.

It goes on in the middle of an epoch, and counts the packs of some windows, in fresh processes.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.inputs import CAPACITY
from benchmarks.rows import Limit, Row, Step
from benchmarks.stopwatch import measure_call
from varlen.documents.order import hashed
from varlen.types import IntArray

DOCUMENTS = 1_000_000_000
PARTS = 3_000
LEAST_RATE = 5e6
MOST_RESTORE_S = 1.0
WINDOWS = 40
RUNS = 3


class SyntheticLengths:
    """Stands in for a store: lengths are hashes of where a document stands, log-normal in shape."""

    tables: Path | None = None
    fingerprint = "synthetic"

    def __init__(self, num_documents: int = DOCUMENTS, num_parts: int = PARTS) -> None:
        bounds = np.linspace(0, num_documents, num_parts + 1).astype(np.int64)
        self.num_parts = num_parts
        self.documents: IntArray = np.diff(bounds)
        self.tokens: IntArray = self.documents * 600  # about
        self.parts: IntArray = np.arange(num_parts)
        self._before = bounds[:-1]

    def fingerprint_at(self, num_parts: int) -> str | None:
        """Return None, so that no table is kept."""

    def wait_for(self, num_parts: int) -> None:
        """Return at once."""

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        share = ((hashed(self._before[shards] + documents, 7) >> np.uint64(11)) + 0.5) / 2**53
        lengths: IntArray = np.clip(np.exp(6 + np.log(share / (1 - share)) / 1.55), 1, CAPACITY).astype(
            np.int64
        )
        return lengths


def taken(capacity: int, windows: int) -> dict[str, float]:
    """Go on in the middle of an epoch, and count the packs of so many windows, once kernels are loaded."""
    from varlen.feed.indexed.stream import PackStream, Position
    from varlen.feed.indexed.table import WindowTable
    from varlen.feed.indexed.windows import WindowSettings
    from varlen.feed.spec import grouped

    def stream_of(store: Any) -> PackStream:
        return PackStream(grouped(store, WindowSettings(capacity=capacity)), 1)

    store: Any = SyntheticLengths()
    for window in range(3):
        stream_of(store).take(Position(window=window), 1)
    middle = stream_of(store)
    group = middle.windows.num_groups(store.num_parts) // 2
    begun = time.perf_counter()
    middle = stream_of(store)
    middle.take(Position(group=group, window=20, pack=9, grown=((0, store.num_parts),)), 64)
    restore_s = time.perf_counter() - begun
    small = SyntheticLengths(windows * (1 << 16), 16)
    table = WindowTable(stream_of(small))
    table.epoch(1, 16)
    wall, cpu = time.perf_counter(), time.process_time()
    table.epoch(0, 16)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"restore_s": restore_s, "wall_s": wall, "cpu_s": cpu, "documents": int(small.documents.sum())}


def steps() -> list[Step]:
    return [Step(f"{DOCUMENTS:,} documents", _measure)]


def _measure() -> list[Row]:
    """Go on in the middle of an epoch, and count the packs of some windows, in fresh processes."""
    runs = [measure_call(taken, CAPACITY, WINDOWS) for _ in range(RUNS)]
    restores = [run["restore_s"] for run in runs]
    millions = [1e6 * run["cpu_s"] / run["documents"] for run in runs]
    rate = f"{1 / median(millions):.3g} M documents/s of processor time; {runs[0]['wall_s']:.3g} s in all"
    return [
        Limit.of_times(
            f"going on at document {DOCUMENTS // 2:,} of {DOCUMENTS:,}: to the packs of the next step",
            restores,
            MOST_RESTORE_S,
            "kernels are loaded",
        ),
        Limit.of_times(
            "the window table, for a million documents on one core", millions, 1e6 / LEAST_RATE, rate
        ),
    ]


SECTIONS = {"feed_scale": steps}
