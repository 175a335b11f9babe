"""The packs of all epochs, one after the other, from any position; and one rank's batches of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from varlen import errors
from varlen.arguments import as_count
from varlen.documents.source import OnError
from varlen.errors import SettingError, StateError, reading_state
from varlen.feed.batches import (
    BatchSettings,
    ReadPieces,
    Step,
    StorePacks,
    Unreadable,
    check_labels,
    concatenated,
    deal_step,
    make_batch,
    no_batch,
    numbers_of,
    where_of,
)
from varlen.feed.exchange import PLAN, Exchange, OpenExchange
from varlen.feed.indexed.windows import Windows
from varlen.feed.protocol import Buffers, Ended, Made
from varlen.feed.state import MOST, FeedState, check_micro_batch
from varlen.files.losses import Losses
from varlen.store.token_files import FileTokens
from varlen.store.tokens import ReadableTokens, TokenDocuments
from varlen.types import Int32Array, IntArray, Ledger

_log = logging.getLogger(__name__)

Grown = tuple[tuple[int, int], ...]
"""Pairs (epoch, parts): from that epoch on, each epoch consists of the store's first `parts` parts."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Position:
    """The position of a pack; resuming from it builds one window, and works even if the store has grown since."""

    epoch: int = 0
    group: int = 0
    window: int = 0
    """Index of the window in its group."""
    pack: int = 0
    """Index of the pack in its window."""
    grown: Grown = ()
    """Parts of the epochs begun so far; empty before the first. Going back keeps the entries of later epochs."""

    @property
    def num_parts(self) -> int:
        """Number of parts of the epoch."""
        return next(parts for epoch, parts in reversed(self.grown) if epoch <= self.epoch)


class Stream(Protocol):
    """A sequence of packs that can be read from any position that the stream returned."""

    epochs: int | None

    def take(self, position: Any, count: int) -> tuple[StorePacks, Any, Ledger]:
        """Return the next packs, the position after them, and a ledger of the windows begun."""

    def check(self, position: Any) -> None:
        """Refuse an invalid position, as far as the store exists already; `take` refuses the others."""

    def epochs_done(self, position: Any) -> int:
        """Return the number of epochs completed at a position; of a mixture, those that every source completed."""

    def tokens(self, position: Any) -> ReadableTokens:
        """Return the documents of the packs after a position; their numbers don't change as the data grows."""

    def at(self, position: Any) -> dict[str, Any]:
        """Return a position as JSON values."""

    def position(self, at: Mapping[str, Any]) -> Any:
        """Return the position from the values that `at` returned; from an empty mapping, the beginning."""


_MOST_CHECKED = 1 << 20
"""`check` builds windows of at most so many documents; a larger window takes too long."""
_NUMBERS = ("epoch", "group", "window", "pack")


class PackStream:
    """The packs of a store's epochs, one after the other.

    An epoch has the parts that its position records; a new epoch has those that the store has when it begins. So
    documents that are added to a store come from the next epoch on, and a saved position always gives the same packs.
    """

    def __init__(
        self,
        windows: Windows,
        epochs: int | None,
        num_parts: Callable[[int], int] | None = None,
        *,
        grows: bool = True,
    ) -> None:
        self.windows, self.epochs, self._grows = windows, epochs, grows
        now = windows.store.num_parts
        self._num_parts = num_parts or (lambda _: now)

    def take(self, position: Position, count: int) -> tuple[StorePacks, Position, Ledger]:
        """Return the next packs, the position after them, and a ledger of the windows begun.

        There are fewer than `count` packs only at the end of the last epoch.

        Cost: that of the windows that hold them.
        """
        parts: list[StorePacks] = []
        ledger = Ledger(tokens_in=0, packed=0)
        taken, at_start = 0, -1
        while taken < count:
            here = self.at_window(position)
            if here is None:
                break
            if here.epoch != position.epoch or (here.group, here.window, here.pack) == (0, 0, 0):
                if at_start == taken:
                    break  # a whole epoch has no pack, so later epochs have none either
                at_start = taken
            window = self.windows.window(here.epoch, here.group, here.window, here.num_parts)
            packs = window.packs
            refuse("pack", here.pack, packs.num_packs - 1)
            if here.pack == 0:
                ledger = ledger.and_then(window.ledger)
            stop = min(here.pack + count - taken, packs.num_packs)
            parts.append(packs.slice(here.pack, stop))
            taken += stop - here.pack
            is_over = stop == packs.num_packs
            position = replace(here, window=here.window + is_over, pack=0 if is_over else stop)
        return concatenated(parts), position, ledger

    def check(self, position: Position) -> None:
        """Refuse an invalid position, as far as the store exists already; `take` refuses the others.

        Cost: that of its window, unless the window is huge.
        """
        windows, parts = self.windows, position.num_parts
        if not windows.is_known(position.group, parts):
            return
        self._refuse_missing(position)
        if position.pack and windows.settings.window <= _MOST_CHECKED:
            window = windows.window(position.epoch, position.group, position.window, parts)
            refuse("pack", position.pack, window.packs.num_packs - 1)

    def _refuse_missing(self, position: Position) -> None:
        """Refuse a window that an epoch doesn't have; one after a group's last window means the next group."""
        count = self.windows.num_windows(position.group, position.num_parts)
        if count == 0:  # after the last group, so that the number of groups is known
            refuse("group", position.group, self.windows.num_groups(position.num_parts))
        refuse("window", position.window, count)
        if position.window == count:
            refuse("pack", position.pack, 0)

    def epochs_done(self, position: Position) -> int:
        """Return the number of epochs completed."""
        return position.epoch

    def tokens(self, _position: Position) -> TokenDocuments:
        """Return the store; a store only grows at its end, so its numbers don't change."""
        return self.windows.store

    def at(self, position: Position) -> dict[str, Any]:
        """Return a position as JSON values, with the store's fingerprint for each entry of `grown`."""
        store = self.windows.store
        numbers = {name: getattr(position, name) for name in _NUMBERS}
        return {**numbers, "grown": [[*pair, store.fingerprint_at(pair[1])] for pair in position.grown]}

    def position(self, at: Mapping[str, Any]) -> Position:
        """Return the position from the values that `at` returned; from an empty mapping, the beginning."""
        return self.with_parts(_as_position(at, self.windows.store))

    def with_parts(self, position: Position) -> Position:
        """Return a position whose `grown` is set: to the store's parts if it was empty."""
        if position.grown:
            return position
        return replace(position, grown=((position.epoch, self._num_parts(position.epoch)),))

    def at_window(self, position: Position) -> Position | None:
        """Return the position, moved to the next window if it is at the end of a group or epoch; None at the end."""
        position = self.with_parts(position)
        if self.epochs is None or position.epoch < self.epochs:
            self._refuse_missing(position)
        while self.epochs is None or position.epoch < self.epochs:
            is_whole = position.group == position.window == 0
            # The number of groups isn't known until all exist; a group without windows comes after the last one.
            while count := self.windows.num_windows(position.group, position.num_parts):
                if position.window < count:
                    return position
                position = replace(position, group=position.group + 1, window=0, pack=0)
            if is_whole or position.epoch + 1 == self.epochs:
                return None
            position = self._next_epoch(position)
        return None

    def _next_epoch(self, position: Position) -> Position:
        """Return the position of the next epoch; asks for its number of parts unless the position has it."""
        epoch, grown = position.epoch + 1, position.grown
        if grown[-1][0] < epoch and self._grows:
            num_parts = self._num_parts(epoch)
            grown = grown if num_parts == grown[-1][1] else (*grown, (epoch, num_parts))
        return Position(epoch=epoch, grown=grown)


def refuse(name: str, number: int, most: int) -> None:
    """Refuse a number of a position that is too large."""
    if number > max(most, 0):
        raise StateError(
            f"the state begins at {name} {number:,}, and there are none beyond {max(most, 0):,}; it was changed. "
            "Load it as it was saved, or an earlier one"
        )


def _had(store: TokenDocuments, num_parts: int, mark: Any) -> bool:
    """Return whether a store has the fingerprint that an earlier version computed from samples, and log it."""
    is_same = (
        isinstance(store, FileTokens) and isinstance(mark, str) and store.had_fingerprint(num_parts, mark)
    )
    if is_same:
        _log.warning(
            "the state is of an earlier version, whose fingerprint covers only samples of a token index; the "
            "samples agree, and the rest of the index wasn't compared"
        )
    return is_same


def _as_position(at: Mapping[str, Any], store: TokenDocuments) -> Position:
    """Read a position from a state; refuses one of another store."""
    if not at:
        return Position()
    with reading_state("a loader"):
        numbers = {name: as_count(at[name], name, 0, MOST) for name in _NUMBERS}
        stages = [
            (as_count(e, "epoch", 0, MOST), as_count(n, "parts", 0, MOST), mark) for e, n, mark in at["grown"]
        ]
    epochs = [epoch for epoch, _, _ in stages]
    if not epochs or epochs[0] > numbers["epoch"] or epochs != sorted(set(epochs)):
        raise StateError(
            f"this is no state of a loader: its store grows at epochs {epochs}; it was changed. Load it as it "
            "was saved, or an earlier one"
        )
    for epoch, num_parts, mark in stages:
        if store.fingerprint_at(num_parts) != mark and not _had(store, num_parts, mark):
            raise StateError(
                f"epoch {epoch:,} was begun with a store of {num_parts:,} parts and the fingerprint {mark!r}; this "
                f"one has {store.num_parts:,} parts and {store.fingerprint!r}, and didn't grow from it. Name that "
                "store, or start over"
            )
    return Position(**numbers, grown=tuple((epoch, parts) for epoch, parts, _ in stages))


# One rank's batches from a token store or mixture, from any state.

_NOTHING = Ledger(tokens_in=0, packed=0)
_PACKS, _CHECKSUM, _DOCUMENTS = "packs", "print", "documents"
"""Keys of a state beside its position: within a step, its number of packs and their checksum; within a mixture's
window, its number of documents. Each can be smaller at the end of the data, which depends on the epochs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanRequests:
    """How a feed requests the plans of its steps."""

    open_exchange: OpenExchange
    ahead: int
    """Number of steps after the requested one whose lengths are sent with a request."""


def _pieces_of_rank(
    exchange: Exchange, rank: int, step: int, lengths: Int32Array, next_lengths: Mapping[int, Int32Array]
) -> npt.NDArray[np.bool_]:
    """Return the pieces that the plan of a step gives a rank, bool `[num_pieces]`."""
    request = [step, lengths.tolist(), {number: some.tolist() for number, some in next_lengths.items()}]
    reply = exchange.all(PLAN, {rank: request})[rank]
    if "error" in reply:
        raise getattr(errors, reply["error"], errors.PlanError)(reply["message"])
    mine = np.zeros(len(lengths), bool)
    mine[reply["mine"]] = True
    return mine


_Item = TypeVar("_Item")


def _with_next(items: Iterator[_Item], ahead: int) -> Iterator[tuple[_Item, list[_Item]]]:
    """Yield each item with up to `ahead` following ones; an error is raised only when its own item is due."""
    waiting: deque[_Item] = deque()
    fault: Exception | None = None
    is_over = False
    while True:
        while not is_over and len(waiting) <= ahead:
            try:
                waiting.append(next(items))
            except StopIteration:
                is_over = True
            except Exception as error:
                is_over, fault = True, error
        if not waiting:
            if fault is not None:
                raise fault
            return
        first = waiting.popleft()
        yield first, list(waiting)


class IndexedFeed:
    """Builds batches; it has no position of its own, so the same state always gives the same bytes."""

    def __init__(
        self,
        stream: Stream,
        settings: BatchSettings,
        rank: int,
        on_error: OnError = "raise",
        losses: Callable[[], Losses] = Losses,
        plans: PlanRequests | None = None,
    ) -> None:
        """Take the packs of all epochs, the settings of one rank's batches, and the source of its plans, if any."""
        self.stream, self._settings, self._rank, self.losses = stream, settings, rank, losses
        self._plans = plans
        self._unreadable = Unreadable(on_error, settings.pad_id)

    @property
    def step_packs(self) -> int:
        """Packs per step, over all ranks."""
        return self._settings.global_batch_size

    def state(self, step: int, position: Any) -> FeedState:
        """Return the state before a step that begins at a position."""
        return FeedState(step=step, at=self.stream.at(position))

    def packs(self, state: FeedState) -> tuple[StorePacks, IntArray]:
        """Return the packs of a state's step (none after the last step), and each piece's document."""
        position = self.position(state)
        packs = self.stream.take(position, self.step_packs)[0]
        return packs, numbers_of(self.stream.tokens(position), packs.shards, packs.documents)

    def where(self, document_id: int, state: FeedState) -> str:
        """Describe a document for messages, by its number in the batches that follow a state."""
        return where_of(self.stream.tokens(self.position(state)), document_id)

    def steps(self, state: FeedState) -> Iterator[tuple[Step, FeedState, FeedState, Ledger] | Ledger]:
        """Yield the steps from a state's step on, each with the states before and after it, and its ledger.

        A step without targets trains nothing: every rank leaves it out, though it has a number and its documents are
        counted. What is counted after the last yielded step comes at the end, as a ledger alone.
        """
        number, position, ledger = state.step, self.position(state), _NOTHING
        count = self._packs_begun(state)
        has_begun = number > 0 or state.micro_batch > 0
        last_epoch = self.stream.epochs_done(position)
        while True:
            before = FeedState(step=number, at=self.stream.at(position))
            packs, position, entered = self.stream.take(position, count)
            count = self._settings.global_batch_size
            ledger = ledger.and_then(entered)
            if packs.num_packs == 0:
                if not has_begun:
                    raise no_batch(ledger, self.losses(), self._settings.capacity)
                yield ledger
                return
            step = deal_step(self.stream.tokens(position), packs, number, self._settings)
            number += 1
            if step.num_targets:
                yield step, before, FeedState(step=number, at=self.stream.at(position)), ledger
                ledger, last_epoch, has_begun = _NOTHING, self.stream.epochs_done(position), True
            check_labels(self.stream.epochs_done(position), last_epoch)

    def batches(self, state: FeedState, buffers: Buffers) -> Iterator[Made | Ended]:
        """Yield the batches that follow a state, then the counts that no batch carries."""
        first = state.micro_batch
        pieces = ReadPieces(self.stream.tokens(self.position(state)), self._unreadable)
        if self._plans is not None:
            yield from self._planned_batches(state, pieces, buffers, self._plans)
            return
        ledger: Ledger | None
        for item in self.steps(state):
            if isinstance(item, Ledger):
                if item != _NOTHING:
                    yield Ended(ledger=item)
                return
            step, before, after, entered = item
            ledger = None if first else entered  # a state within a step comes after its ledger
            within = before
            if self._settings.micro_batches > 1:
                packs = {_PACKS: step.packs.num_packs, _CHECKSUM: step.packs.checksum}
                within = replace(before, at={**before.at, **packs})
            for number in range(first, self._settings.micro_batches):
                is_last = number + 1 == self._settings.micro_batches
                skipped = pieces.skipped
                batch = make_batch(pieces, step, self._rank, number, self._settings, buffers())
                now = after if is_last else replace(within, micro_batch=number + 1)
                yield Made(batch=batch, state=now, ledger=ledger, skipped=pieces.skipped - skipped)
                ledger = None
            first = 0

    def _planned_batches(
        self, state: FeedState, pieces: ReadPieces, buffers: Buffers, plans: PlanRequests
    ) -> Iterator[Made | Ended]:
        """Yield one batch per step: the pieces that the step's plan assigns to this rank."""
        exchange = plans.open_exchange()
        for item, following in _with_next(self.steps(state), plans.ahead):
            if isinstance(item, Ledger):
                if item != _NOTHING:
                    yield Ended(ledger=item)
                return
            step, _, after, entered = item
            skipped, out = pieces.skipped, buffers()
            next_steps = [one[0] for one in following if not isinstance(one, Ledger)]
            next_lengths = {one.number: one.lengths for one in next_steps}
            # What a plan calls documents are the step's pieces, pack after pack.
            mine = _pieces_of_rank(exchange, self._rank, step.number, step.lengths, next_lengths)
            batch = make_batch(pieces, step, 0, 0, self._settings, out, mine)
            yield Made(batch=batch, state=after, ledger=entered, skipped=pieces.skipped - skipped)

    def with_position(self, state: FeedState) -> FeedState:
        """Return a checked state with its position, also for the beginning of training."""
        if state.micro_batch:
            check_micro_batch(state, self._settings.micro_batches)
        if (state.step or state.micro_batch) and not state.at:
            raise StateError(
                f"the state is in step {state.step:,}, and doesn't say where that begins; it was changed. Load it as "
                "it was saved, or an earlier one"
            )
        position = self.position(state)
        if state.at:
            self.stream.check(position)
        at = self.stream.at(position)
        if state.micro_batch:
            self._check_step(state, position)
            at |= {name: state.at[name] for name in (_PACKS, _CHECKSUM) if name in state.at}
        if state.at and state.at.get(_DOCUMENTS, at.get(_DOCUMENTS)) != at.get(_DOCUMENTS):
            raise StateError(
                f"the state stands in a window of {state.at[_DOCUMENTS]} documents, which has {at.get(_DOCUMENTS)} "
                "here: with other epochs a mixture ends elsewhere, and its last window is packed otherwise. Pass the "
                "epochs of the state, load one from before that window, or start over"
            )
        return replace(state, at=at)

    def _packs_begun(self, state: FeedState) -> int:
        """Return the number of packs of a state's step; a state within the last step records a smaller number."""
        size = self._settings.global_batch_size
        if not state.micro_batch or _PACKS not in state.at:  # states of 0.1.0 have no such entry
            return size
        try:
            return as_count(state.at[_PACKS], _PACKS, 1, size)
        except SettingError as error:
            raise StateError(f"this is no state of a loader: {error}") from None

    def _check_step(self, state: FeedState, position: Any) -> None:
        """Refuse a state within a step if the step has other packs here than when it was saved."""
        count = self._packs_begun(state)
        if _CHECKSUM in state.at and self.stream.take(position, count)[0].checksum != state.at[_CHECKSUM]:
            raise StateError(
                f"the state is within step {state.step:,}, which holds other packs here: with other epochs the data "
                "ends elsewhere. Pass the epochs of the state, load one from where a step begins, or start over"
            )

    def position(self, state: FeedState) -> Any:
        """Return the position at which a state's step begins."""
        return self.stream.position(state.at)
