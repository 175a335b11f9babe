"""Finds steps: where one begins, how many there are, and which documents of all ranks it holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from varlen.errors import SettingError
from varlen.feed.indexed.stream import IndexedFeed, PackStream
from varlen.feed.indexed.table import WindowTable
from varlen.feed.mixture.stream import MixedStream
from varlen.feed.mixture.table import MixedTable
from varlen.feed.protocol import Ended, new_arrays
from varlen.feed.state import FeedState
from varlen.feed.streaming.feed import StreamingFeed
from varlen.feed.streaming.rounds import beginning_of
from varlen.store.tokens import lengths_in_order
from varlen.types import Int32Array, IntArray

_KEPT = 16
"""Rounds of streaming whose positions are remembered, so that their steps can be found."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepDocuments:
    """What a step holds, over all ranks: pack p has the pieces `offsets[p]:offsets[p + 1]`."""

    step: int
    pack_ids: IntArray
    """int64 `[packs]`: as batches have them."""
    document_ids: IntArray
    """int64 `[pieces]`: as batches have them."""
    starts: IntArray
    stops: IntArray
    """int64 `[pieces]`: the piece is its document's tokens [start, stop)."""
    offsets: IntArray
    """int64 `[packs + 1]`."""


class IndexedLookup:
    """Steps of documents of known lengths; the window table finds any of them."""

    def __init__(self, feed: IndexedFeed) -> None:
        self._feed, stream = feed, feed.stream
        self._table: WindowTable | MixedTable
        if isinstance(stream, MixedStream):
            self._table = MixedTable(stream)
        elif isinstance(stream, PackStream):
            self._table = WindowTable(stream)
        self._last = FeedState()

    def num_steps(self, state: FeedState) -> int:
        """Return the number of steps of all epochs, including those without targets."""
        return -(-self._table.num_packs(self._parts(state)) // self._feed.step_packs)

    def _parts(self, state: FeedState) -> Any:
        """Return the parts of the epochs, or sources, of a state."""
        position = self._feed.position(state)
        if isinstance(self._table, MixedTable):
            self._table.set_current(state.step * self._feed.step_packs, position)
        return position.grown

    def state_at(self, step: int, state: FeedState) -> FeedState:
        """Return the state in which a step is the next."""
        if step < 0:
            raise SettingError(f"step {step:,} is none: steps are counted from 0")
        position, is_there = self._table.find(step * self._feed.step_packs, self._parts(state))
        # Steps are counted only behind the end, since that takes the tables of all epochs.
        if not is_there and self._feed.stream.epochs is not None and step > (count := self.num_steps(state)):
            raise SettingError(f"step {step:,} is none of the {count:,} steps of this loader")
        return self._feed.state(step, position)

    def remember(self, state: FeedState) -> None:
        """Record the windows of a mixture that training has passed."""
        last, self._last = self._last, state
        was_gone_on_from = (last.step, last.micro_batch) < (state.step, state.micro_batch) and last.at
        if was_gone_on_from and isinstance(self._table, MixedTable):
            self._table.note_passed(last.step * self._feed.step_packs, last.at)

    def documents(self, step: int, state: FeedState) -> StepDocuments:
        """Return the documents of a step; arguments and errors as in `state_at`."""
        packs, ids = self._feed.packs(self.state_at(step, state))
        if packs.num_packs == 0:
            raise SettingError(f"step {step:,} would be the next after the last one")
        return StepDocuments(
            step=step,
            pack_ids=step * self._feed.step_packs + np.arange(packs.num_packs),
            document_ids=ids,
            starts=packs.starts,
            stops=packs.stops,
            offsets=packs.offsets,
        )

    def lengths(self, step: int, state: FeedState) -> Int32Array | None:
        """Return the tokens of each piece of a step, int32 `[pieces]`, or None behind the last step."""
        position, is_there = self._table.find(step * self._feed.step_packs, self._parts(state))
        if not is_there:
            return None
        packs = self._feed.packs(self._feed.state(step, position))[0]
        return packs.lengths.astype(np.int32)

    def all_lengths(self, state: FeedState) -> Iterator[IntArray]:
        """Yield the tokens of all documents that exist, in the order of their numbers."""
        return lengths_in_order(self._feed.stream.tokens(self._feed.position(state)))

    def where(self, document_id: int, state: FeedState) -> str:
        """Return where a document lies, given its number in batches of this state."""
        return self._feed.where(document_id, state)


class StreamingLookup:
    """Steps of streaming; those of the last rounds are found by reading their documents again."""

    def __init__(self, feed: StreamingFeed) -> None:
        self._feed = feed
        self._rounds: OrderedDict[int, Any] = OrderedDict()
        self._beginning: dict[str, Any] = {}

    def num_steps(self, _state: FeedState) -> int:
        """Refuse: the number isn't known."""
        raise SettingError(
            "how many steps there are isn't known before the documents are tokenized; index them (varlen index) "
            "where that is needed"
        )

    def state_at(self, step: int, state: FeedState) -> FeedState:
        """Return the state in which a step is the next, from the last round before it that is remembered."""
        self.remember(state)
        known = [begin for begin in self._rounds if begin <= step]
        # Rounds in between are prepared, but their batches aren't made.
        return FeedState(step=step, at=self._rounds[max(known)] if known else beginning_of(state.at))

    def remember(self, state: FeedState) -> None:
        """Record the position of the round of a state."""
        beginning = beginning_of(state.at)
        if beginning != self._beginning:  # a run with other epochs has other rounds
            self._rounds.clear()
            self._beginning = beginning
        begin = int(state.at.get("step", 0))
        if begin not in self._rounds:
            self._rounds[begin] = state.at
            if len(self._rounds) > _KEPT:
                self._rounds.popitem(last=False)

    def documents(self, step: int, state: FeedState) -> StepDocuments:
        """Return the documents of a step of the last rounds."""
        at = self.state_at(step, state)
        if step > state.step or step < min(self._rounds):
            raise SettingError(
                f"step {step:,} isn't one of the last rounds, which begin at {min(self._rounds):,} and have come to "
                f"{state.step:,}; what was in others isn't remembered"
            )
        for made in self._feed.for_one_rank().batches(replace(at, micro_batch=0), new_arrays):
            if isinstance(made, Ended):
                break
            batch = made.batch
            if int(batch.pack_ids[0]) // self._feed.step_packs != step:
                break  # it had no targets, and was left out
            return StepDocuments(
                step=step,
                pack_ids=batch.pack_ids,
                document_ids=batch.document_ids,
                starts=batch.document_starts.astype(np.int64),
                stops=batch.document_starts.astype(np.int64) + batch.document_lengths,
                offsets=batch.pack_offsets,
            )
        raise SettingError(f"step {step:,} held nothing to train on, and was left out")

    def lengths(self, _step: int, _state: FeedState) -> Int32Array | None:
        """Refuse: lengths of coming steps aren't known."""
        raise SettingError(
            "the lengths of coming steps aren't known before their documents are tokenized; index them (varlen "
            "index) where steps are to be planned ahead"
        )

    def all_lengths(self, _state: FeedState) -> Iterator[IntArray]:
        """Refuse, as `lengths` does."""
        raise SettingError(
            "the lengths of documents aren't known before they are tokenized; index them (varlen index)"
        )

    def where(self, document_id: int, _state: FeedState) -> str:
        """Return where a document lies, given its number; the state isn't needed."""
        return self._feed.where(document_id)
