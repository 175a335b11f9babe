"""What a worker runs: a feed, which makes batches from a state on, each with the state that follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from varlen.batch.collate import Out
from varlen.batch.packed import PackedBatch
from varlen.feed.state import FeedState
from varlen.files.losses import Losses
from varlen.types import Ledger

Buffers = Callable[[], Out | None]
"""Returns the buffers for the next batch, as `vl.collate` takes them; None for new arrays. It may wait."""


def new_arrays() -> None:
    """Return no buffers, so that a batch gets new arrays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCounts:
    """What a batch holds, counted where it is made: counting on a device would have to wait for it."""

    tokens: int
    """Of documents, padding not counted."""
    positions: int
    """Padding counted."""
    targets: int
    """Labels."""
    masked_packs: int
    """Packs without any document, where the data ends, or ended before more epochs were asked for."""
    packs_without_targets: int
    """Packs of documents that train nothing."""


def counts_of(batch: PackedBatch) -> BatchCounts:
    """Count what a batch in host memory holds."""
    bounds = batch.pack_offsets
    targets = np.zeros(len(batch.document_targets) + 1, dtype=np.int64)
    np.cumsum(batch.document_targets, out=targets[1:])
    before = targets[bounds]
    masked = int(np.count_nonzero(bounds[1:] == bounds[:-1]))
    return BatchCounts(
        tokens=int(batch.document_lengths.sum()),
        positions=batch.input_ids.size,
        targets=batch.num_targets,
        masked_packs=masked,
        packs_without_targets=int(np.count_nonzero(before[1:] == before[:-1])) - masked,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """A batch, and the state after it."""

    batch: PackedBatch
    state: FeedState
    ledger: Ledger | None = None
    """What became of the tokens of the window that begins with this batch, over all ranks; None if none begins."""
    skipped: int = 0
    """Pieces of this batch that couldn't be read."""
    losses: Losses | None = None
    """Of documents in streaming: what was lost of the sources of that window, over all ranks; None where nothing."""
    counts: BatchCounts | None = None
    """What the batch holds; filled in by workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The end of the last epoch, and what came after the last batch."""

    ledger: Ledger | None = None
    """What became of the tokens of windows that gave no batch, over all ranks."""
    losses: Losses | None = None
    """What was lost of their sources."""


class Feed(Protocol):
    """Makes the batches of one rank."""

    def with_position(self, state: FeedState) -> FeedState:
        """Return a checked state with its position, also for the empty state with which training begins."""

    def batches(self, state: FeedState, buffers: Buffers) -> Iterator[Made | Ended]:
        """Yield the batches that follow a state, to the end of the last epoch; the bytes are the same each time.

        `Ended` follows if there is anything that no batch reported.
        """


class Worker(Protocol):
    """Runs a feed ahead of the trainer, in a thread or in a process."""

    @property
    def ready(self) -> int:
        """Batches that are waiting to be taken."""

    @property
    def restarts(self) -> int:
        """Workers that died and were replaced."""

    @property
    def copies(self) -> int:
        """Batches copied since the trainer held all slots."""

    def start(self, state: FeedState) -> None:
        """Begin after a state; batches made before are dropped."""

    def take(self, deadline_s: float) -> tuple[Made | Ended, int]:
        """Return the next batch, or the end, and how many batches were ready before."""

    def closer(self) -> Callable[[], None]:
        """Return a function that ends the worker, without a reference to it."""

    def close(self) -> None:
        """End the worker, and release its memory."""
