"""The batches of one rank out of a token store, from any state, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from varlen.errors import StateError
from varlen.feed.batches import BatchSettings, Step, make_batch, plan_step
from varlen.feed.feed import Buffers, Made
from varlen.feed.state import MOST, FeedState
from varlen.feed.stream import PackStream, Position
from varlen.pack.lengths import as_count
from varlen.source.store import TokenStore


class IndexedFeed:
    """Makes batches; it holds no place of its own, so that any state gives the same bytes at any time."""

    def __init__(self, store: TokenStore, stream: PackStream, settings: BatchSettings, rank: int) -> None:
        """Take the documents, the packs of all epochs, and which rank this is."""
        self._store, self._stream, self._settings, self._rank = store, stream, settings, rank

    def steps(self, state: FeedState) -> Iterator[tuple[Step, FeedState]]:
        """Yield the steps from the one that a state is in, and the state where each has been taken.

        A step without any target trains nothing: it is left out, on every rank alike, though it is counted.

        Raises:
            StateError: the state is none of a token store.
            OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".
            SourceError: the store is damaged.
        """
        number, position = state.step, _as_position(state.at)
        while True:
            packs, position = self._stream.take(position, self._settings.global_batch_size)
            if packs.num_packs == 0:
                return
            step = plan_step(self._store, packs, number, self._settings)
            number += 1
            if step.num_targets:
                yield step, FeedState(step=number, at=asdict(position))

    def batches(self, state: FeedState, buffers: Buffers) -> Iterator[Made]:
        """Yield the batches that follow a state.

        Args:
            state: of which the first batch is the next.
            buffers: called once before each batch.

        Raises:
            StateError: the state is none of a token store.
            OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".
            SourceError: the store is damaged.
        """
        first = state.micro_batch
        for step, after in self.steps(state):
            here = replace(state, step=step.number, micro_batch=0)
            for number in range(first, self._settings.micro_batches):
                is_last = number + 1 == self._settings.micro_batches
                batch = make_batch(self._store, step, self._rank, number, self._settings, buffers())
                yield Made(batch=batch, state=after if is_last else replace(here, micro_batch=number + 1))
            first, state = 0, after


def _as_position(at: Mapping[str, Any]) -> Position:
    """Return where a step begins.

    Raises:
        StateError: nothing of the kind.
    """
    if not at:
        return Position()
    try:
        return Position(**{name: as_count(at[name], name, 0, MOST) for name in ("epoch", "window", "pack")})
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is no state of a loader: {type(error).__name__} {error}") from None
