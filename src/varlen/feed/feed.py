"""What a worker runs: from a state, batch after batch, each with the state that follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from varlen.batch.packed import PackedBatch
from varlen.feed.state import FeedState

Buffers = Callable[[], Mapping[str, npt.NDArray[Any]] | None]
"""Gives the arrays that the next batch is to fill, as `vl.collate` takes them; None for new ones. It may wait."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """A batch, and where whoever has taken it stands."""

    batch: PackedBatch
    state: FeedState
    """After this batch."""


class Feed(Protocol):
    """Makes the batches of one rank."""

    def batches(self, state: FeedState, buffers: Buffers) -> Iterator[Made]:
        """Yield the batches that follow a state, to the end of the last epoch; the same bytes whenever it is asked.

        Args:
            state: of which the first batch is the next.
            buffers: called once before each batch.
        """
