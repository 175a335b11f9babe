"""The batches of one rank out of a token store, from any state, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy.typing as npt

from varlen.batch.packed import PackedBatch
from varlen.feed.batches import BatchSettings, Step, make_batch, plan_step
from varlen.feed.state import IndexedState
from varlen.feed.stream import PackStream, Position
from varlen.source.store import TokenStore


class IndexedFeed:
    """Makes batches; it holds no place of its own, so that any state gives the same bytes at any time."""

    def __init__(self, store: TokenStore, stream: PackStream, settings: BatchSettings, rank: int) -> None:
        """Take the documents, the packs of all epochs, and which rank this is."""
        self._store, self._stream, self._settings, self._rank = store, stream, settings, rank
        self._step = lru_cache(2)(self._make_step)  # all batches of a step come from one plan

    @property
    def micro_batches(self) -> int:
        """Batches of a step."""
        settings = self._settings
        return settings.global_batch_size // (settings.dp_world_size * settings.micro_batch_size)

    def step(self, state: IndexedState) -> tuple[Step, Position] | None:
        """Return the step that a state is in, and where the one after it begins; None at the end.

        Raises:
            OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".
            SourceError: the store is damaged.
        """
        return self._step(state.step, state.position)

    def _make_step(self, number: int, position: Position) -> tuple[Step, Position] | None:
        packs, after = self._stream.take(position, self._settings.global_batch_size)
        return (plan_step(self._store, packs, number, self._settings), after) if packs.num_packs else None

    def make(
        self, state: IndexedState, out: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> tuple[PackedBatch, IndexedState] | None:
        """Return the batch that follows a state, and the state after it; None at the end.

        Args:
            state: what has been taken.
            out: arrays to fill, as `vl.collate` takes them.

        Raises:
            OverlongDocumentError: a document is longer than a pack, and `overlong` is "error".
            SourceError: the store is damaged.
        """
        found = self.step(state)
        if found is None:
            return None
        step, after = found
        batch = make_batch(self._store, step, self._rank, state.micro_batch, self._settings, out)
        if state.micro_batch + 1 < self.micro_batches:
            return batch, replace(state, micro_batch=state.micro_batch + 1)
        return batch, IndexedState(step=state.step + 1, position=after)
