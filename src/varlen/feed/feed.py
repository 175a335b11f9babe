"""What a worker runs: from a state, batch after batch, each with the state that follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from varlen.batch.collate import Out
from varlen.batch.packed import PackedBatch
from varlen.feed.state import FeedState
from varlen.types import Ledger

Buffers = Callable[[], Out | None]
"""Gives what the next batch is to fill, as `vl.collate` takes it; None for new arrays. It may wait."""


def new_arrays() -> None:
    """Let a batch have arrays of its own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """A batch, and where whoever has taken it stands."""

    batch: PackedBatch
    state: FeedState
    """After this batch."""
    ledger: Ledger | None = None
    """What became of the tokens of the window that begins with this batch, over all ranks; None where none does."""
    skipped: int = 0
    """Records of that window that couldn't be read, over all ranks."""


class Feed(Protocol):
    """Makes the batches of one rank."""

    def batches(self, state: FeedState, buffers: Buffers) -> Iterator[Made]:
        """Yield the batches that follow a state, to the end of the last epoch; the same bytes whenever it is asked.

        Args:
            state: of which the first batch is the next.
            buffers: called once before each batch.
        """
