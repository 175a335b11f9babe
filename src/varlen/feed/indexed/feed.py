"""The batches of one rank out of a token store, from any state, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from varlen.arguments import as_count
from varlen.documents.source import OnError
from varlen.errors import InputError, SettingError, StateError
from varlen.feed.bad_documents import ReadPieces, Unreadable, where_of
from varlen.feed.batches import (
    BatchSettings,
    Step,
    check_heard,
    make_batch,
    no_batch,
    numbers_of,
    plan_step,
)
from varlen.feed.indexed.stream import Stream
from varlen.feed.indexed.windows import StorePacks
from varlen.feed.protocol import Buffers, Ended, Made
from varlen.feed.state import FeedState, check_micro_batch
from varlen.files.losses import Losses
from varlen.types import IntArray, Ledger

_NOTHING = Ledger(tokens_in=0, packed=0)
_PACKS, _PRINT, _DOCUMENTS = "packs", "print", "documents"
"""What a state says beside its position: of a step that has begun, how many packs it has and which they are; of a
mixture's window that has begun, its documents. Where the data ends, there are fewer, and so with other epochs."""


class IndexedFeed:
    """Makes batches; it holds no place of its own, so that any state gives the same bytes at any time."""

    def __init__(
        self,
        stream: Stream,
        settings: BatchSettings,
        rank: int,
        on_error: OnError = "raise",
        losses: Callable[[], Losses] = Losses,
    ) -> None:
        """Take the packs of all epochs, and how one rank's batches are made of them."""
        self._stream, self._settings, self._rank, self.losses = stream, settings, rank, losses
        self._unreadable = Unreadable(on_error, settings.pad_id)

    @property
    def stream(self) -> Stream:
        """The packs of all epochs."""
        return self._stream

    @property
    def step_packs(self) -> int:
        """Packs of a step, over all ranks."""
        return self._settings.global_batch_size

    def state(self, step: int, position: Any) -> FeedState:
        """Return the state in which a step is the next, which begins at a position."""
        return FeedState(step=step, at=self._stream.at(position))

    def packs(self, state: FeedState) -> tuple[StorePacks, IntArray]:
        """Return the packs of the step that a state is in, none behind the last one, and each piece's document."""
        position = self.position(state)
        packs = self._stream.take(position, self.step_packs)[0]
        return packs, numbers_of(self._stream.tokens(position), packs.shards, packs.documents)

    def where(self, document_id: int, state: FeedState) -> str:
        """Say where a document lies, as batches that follow a state name it."""
        return where_of(self._stream.tokens(self.position(state)), document_id)

    def steps(self, state: FeedState) -> Iterator[tuple[Step, FeedState, FeedState, Ledger] | Ledger]:
        """Yield the steps from the one that a state is in, the states before and after each, and its ledger.

        A step without any target trains nothing: it is left out, on every rank alike, though it is counted. What is
        counted behind the last step comes at the end, alone.
        """
        number, position, ledger = state.step, self.position(state), _NOTHING
        count = self._packs_begun(state)
        has_begun = number > 0 or state.micro_batch > 0
        heard = self._stream.passes(position)
        while True:
            before = FeedState(step=number, at=self._stream.at(position))
            packs, position, entered = self._stream.take(position, count)
            count = self._settings.global_batch_size
            ledger = ledger.and_then(entered)
            if packs.num_packs == 0:
                if not has_begun:
                    raise self._nothing(ledger)
                yield ledger
                return
            step = plan_step(self._stream.tokens(position), packs, number, self._settings)
            number += 1
            if step.num_targets:
                yield step, before, FeedState(step=number, at=self._stream.at(position)), ledger
                ledger, heard, has_begun = _NOTHING, self._stream.passes(position), True
            check_heard(self._stream.passes(position), heard)

    def _nothing(self, ledger: Ledger) -> InputError:
        """Return the error of data of which nothing is left to train on."""
        return no_batch(ledger, self.losses(), self._settings.capacity)

    def batches(self, state: FeedState, buffers: Buffers) -> Iterator[Made | Ended]:
        """Yield the batches that follow a state, and what they haven't told of."""
        first = state.micro_batch
        pieces = ReadPieces(self._stream.tokens(self.position(state)), self._unreadable)
        ledger: Ledger | None
        for found in self.steps(state):
            if isinstance(found, Ledger):
                if found != _NOTHING:
                    yield Ended(ledger=found)
                return
            step, before, after, entered = found
            ledger = None if first else entered  # of a step that was begun it is known
            begun = before
            if self._settings.micro_batches > 1:
                told = {_PACKS: step.packs.num_packs, _PRINT: step.packs.print}
                begun = replace(before, at={**before.at, **told})
            for number in range(first, self._settings.micro_batches):
                is_last = number + 1 == self._settings.micro_batches
                skipped = pieces.skipped
                batch = make_batch(pieces, step, self._rank, number, self._settings, buffers())
                now = after if is_last else replace(begun, micro_batch=number + 1)
                yield Made(batch=batch, state=now, ledger=ledger, skipped=pieces.skipped - skipped)
                ledger = None
            first = 0

    def begun(self, state: FeedState) -> FeedState:
        """Return a state that says where it stands, also where training begins."""
        check_micro_batch(state, self._settings.micro_batches)
        if (state.step or state.micro_batch) and not state.at:
            raise StateError(
                f"the state is in step {state.step:,}, and doesn't say where that begins; it was changed. Load it as "
                "it was saved, or an earlier one"
            )
        position = self.position(state)
        if state.at:
            self._stream.check(position)
        at = self._stream.at(position)
        if state.micro_batch:
            self._check_step(state, position)
            at |= {name: state.at[name] for name in (_PACKS, _PRINT) if name in state.at}
        if state.at and state.at.get(_DOCUMENTS, at.get(_DOCUMENTS)) != at.get(_DOCUMENTS):
            raise StateError(
                f"the state stands in a window of {state.at[_DOCUMENTS]} documents, which has {at.get(_DOCUMENTS)} "
                "here: with other epochs a mixture ends elsewhere, and its last window is packed otherwise. Pass the "
                "epochs of the state, load one from before that window, or begin anew"
            )
        return replace(state, at=at)

    def _packs_begun(self, state: FeedState) -> int:
        """Return the packs of the step that a state is in, as far as it says: fewer where the data ended in it."""
        size = self._settings.global_batch_size
        if not state.micro_batch or _PACKS not in state.at:  # states of 0.1.0 don't say it
            return size
        try:
            return as_count(state.at[_PACKS], _PACKS, 1, size)
        except SettingError as error:
            raise StateError(f"this is no state of a loader: {error}") from None

    def _check_step(self, state: FeedState, position: Any) -> None:
        """Refuse a state within a step that would hold other packs here than those of which some were taken."""
        count = self._packs_begun(state)
        if _PRINT in state.at and self._stream.take(position, count)[0].print != state.at[_PRINT]:
            raise StateError(
                f"the state is within step {state.step:,}, which holds other packs here: with other epochs the data "
                "ends elsewhere. Pass the epochs of the state, load one from where a step begins, or begin anew"
            )

    def position(self, state: FeedState) -> Any:
        """Return where the step of a state begins, and which parts of the store its epochs hold."""
        return self._stream.position(state.at)
