"""The packs of all epochs end to end, from any position: what a step takes, and where the next one begins."""

from __future__ import annotations

import base64
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from varlen import errors
from varlen.arguments import as_count
from varlen.documents.source import OnError
from varlen.errors import InputError, SettingError, StateError, reading_state
from varlen.feed.agreement import PLAN, Exchange, Exchanges
from varlen.feed.batches import (
    BatchSettings,
    Step,
    check_heard,
    deal_step,
    make_batch,
    no_batch,
    numbers_of,
)
from varlen.feed.checks import ReadPieces, Unreadable, where_of
from varlen.feed.indexed.windows import StorePacks, Windows, end_to_end
from varlen.feed.protocol import Buffers, Ended, Made
from varlen.feed.state import MOST, FeedState, check_micro_batch
from varlen.files.losses import Losses
from varlen.step_plan import StepPlan
from varlen.store.token_files import FileTokens
from varlen.store.tokens import ReadableTokens, TokenDocuments
from varlen.types import Int32Array, IntArray, Ledger

_log = logging.getLogger(__name__)

Grown = tuple[tuple[int, int], ...]
"""Pairs of an epoch and a number of parts: from that epoch on, an epoch holds so many of the store's parts."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Position:
    """Where a pack stands: enough to go on from there after making one window, whatever the store has become."""

    epoch: int = 0
    group: int = 0
    window: int = 0
    """Windows of the group that stand before it."""
    pack: int = 0
    """Packs of the window that stand before it."""
    grown: Grown = ()
    """Parts of the epochs that have begun; empty before the first. Who goes back keeps those of later epochs."""

    @property
    def num_parts(self) -> int:
        """Parts of the epoch."""
        return next(parts for epoch, parts in reversed(self.grown) if epoch <= self.epoch)


class Stream(Protocol):
    """Packs one after the other, from any position that it gave."""

    epochs: int | None

    def take(self, position: Any, count: int) -> tuple[StorePacks, Any, Ledger]:
        """Return the next packs, where those after begin, and what became of the tokens of the windows begun."""

    def check(self, position: Any) -> None:
        """Refuse a position that can't be, as far as the store is there; `take` refuses the others."""

    def passes(self, position: Any) -> int:
        """Return the epochs that are over at a position: of a mixture, those of each source."""

    def tokens(self, position: Any) -> ReadableTokens:
        """Return the documents that packs behind a position name, numbered the same however the data grows."""

    def at(self, position: Any) -> dict[str, Any]:
        """Return a position for JSON."""

    def position(self, at: Mapping[str, Any]) -> Any:
        """Return the position that `at` gave; without one, where training begins."""


_AT_ONCE = 1 << 20
"""Documents of a window that is made for a look at its number of packs; a larger one takes too long."""
_NUMBERS = ("epoch", "group", "window", "pack")


class PackStream:
    """The packs of one epoch after the other.

    An epoch holds the parts that its position says, and where none does yet, those that the store has: a store that
    grows gives its new documents from the next epoch on, and a position saved before gives the same packs as ever.
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
        """Return the next packs, where those after begin, and what became of the tokens of the windows begun.

        There are fewer packs than asked for only where the last epoch ends.

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
                    break  # a whole epoch gave no pack, and so would those after it
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
        return end_to_end(parts), position, ledger

    def check(self, position: Position) -> None:
        """Refuse a position that can't be, as far as the store is there; `take` refuses the others.

        Cost: that of its window, unless it is a huge one.
        """
        windows, parts = self.windows, position.num_parts
        if not windows.is_there(position.group, parts):
            return
        self._refuse_none(position)
        if position.pack and windows.settings.window <= _AT_ONCE:
            window = windows.window(position.epoch, position.group, position.window, parts)
            refuse("pack", position.pack, window.packs.num_packs - 1)

    def _refuse_none(self, position: Position) -> None:
        """Refuse a window that an epoch doesn't have; behind a group's last one is where the next group begins."""
        count = self.windows.num_windows(position.group, position.num_parts)
        if count == 0:  # behind the last one, so that all of them are there
            refuse("group", position.group, self.windows.num_groups(position.num_parts))
        refuse("window", position.window, count)
        if position.window == count:
            refuse("pack", position.pack, 0)

    def passes(self, position: Position) -> int:
        """Return the epochs that are over."""
        return position.epoch

    def tokens(self, _position: Position) -> TokenDocuments:
        """Return the store: what is added to it comes behind what it held."""
        return self.windows.store

    def at(self, position: Position) -> dict[str, Any]:
        """Return a position as numbers, and the store of each epoch that has begun by its fingerprint."""
        store = self.windows.store
        numbers = {name: getattr(position, name) for name in _NUMBERS}
        return {**numbers, "grown": [[*pair, store.fingerprint_at(pair[1])] for pair in position.grown]}

    def position(self, at: Mapping[str, Any]) -> Position:
        """Return the position that `at` gave; without one, where training begins."""
        return self.begun(_as_position(at, self.windows.store))

    def begun(self, position: Position) -> Position:
        """Return a position with the parts of its epoch."""
        if position.grown:
            return position
        return replace(position, grown=((position.epoch, self._num_parts(position.epoch)),))

    def at_window(self, position: Position) -> Position | None:
        """Return the position, or the next window's behind the end of a group or epoch; None at the end."""
        position = self.begun(position)
        if self.epochs is None or position.epoch < self.epochs:
            self._refuse_none(position)
        while self.epochs is None or position.epoch < self.epochs:
            is_whole = position.group == position.window == 0
            # How many groups there are isn't known before all are there; only behind the last one there is no window.
            while count := self.windows.num_windows(position.group, position.num_parts):
                if position.window < count:
                    return position
                position = replace(position, group=position.group + 1, window=0, pack=0)
            if is_whole or position.epoch + 1 == self.epochs:
                return None
            position = self._next_epoch(position)
        return None

    def _next_epoch(self, position: Position) -> Position:
        """Return where the next epoch begins; parts of it are asked for unless the position knows them."""
        epoch, grown = position.epoch + 1, position.grown
        if grown[-1][0] < epoch and self._grows:
            num_parts = self._num_parts(epoch)
            grown = grown if num_parts == grown[-1][1] else (*grown, (epoch, num_parts))
        return Position(epoch=epoch, grown=grown)


def refuse(name: str, number: int, most: int) -> None:
    """Refuse a number of a position that is too large."""
    if number > max(most, 0):
        raise StateError(
            f"the state begins at {name} {number:,}, and there are none behind {max(most, 0):,}; it was changed. "
            "Load it as it was saved, or an earlier one"
        )


def _had(store: TokenDocuments, num_parts: int, mark: Any) -> bool:
    """Whether a store is the one that a state of an earlier version names, as far as that version looked."""
    is_it = isinstance(store, FileTokens) and isinstance(mark, str) and store.had_fingerprint(num_parts, mark)
    if is_it:
        _log.warning(
            "the state is of an earlier version, which took samples of an index of tokens; these are the same, and "
            "the rest of it wasn't compared"
        )
    return is_it


def _as_position(at: Mapping[str, Any], store: TokenDocuments) -> Position:
    """Return where a step begins."""
    if not at:
        return Position()
    with reading_state("a loader"):
        numbers = {name: as_count(at[name], name, 0, MOST) for name in _NUMBERS}
        stages = [
            (as_count(e, "epoch", 0, MOST), as_count(n, "parts", 0, MOST), mark) for e, n, mark in at["grown"]
        ]
    epochs = [epoch for epoch, _, _ in stages]
    if not epochs or epochs[0] > numbers["epoch"] or epochs != sorted(set(epochs)):
        raise StateError(f"this is no state of a loader: its store grows at epochs {epochs}")
    for epoch, num_parts, mark in stages:
        if store.fingerprint_at(num_parts) != mark and not _had(store, num_parts, mark):
            raise StateError(
                f"epoch {epoch:,} was begun with a store of {num_parts:,} parts and the fingerprint {mark!r}; this "
                f"one has {store.num_parts:,} parts and {store.fingerprint!r}, and didn't grow from it. Name that "
                "store, or begin anew"
            )
    return Position(**numbers, grown=tuple((epoch, parts) for epoch, parts, _ in stages))


# The batches of one rank out of a token store, from any state, one after the other.

_NOTHING = Ledger(tokens_in=0, packed=0)
_PACKS, _PRINT, _DOCUMENTS = "packs", "print", "documents"
"""What a state says beside its position: of a step that has begun, how many packs it has and which they are; of a
mixture's window that has begun, its documents. Where the data ends, there are fewer, and so with other epochs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlans:
    """Where a feed asks for the plans of its steps."""

    exchanges: Exchanges
    ahead: int
    """Steps after the next one whose lengths are told too."""


def _planned(
    exchange: Exchange, rank: int, step: int, lengths: Int32Array, soon: Mapping[int, Int32Array]
) -> StepPlan:
    """Return the plan of a step that is about to be read."""
    from varlen.plan.serialize import plan_from_bytes  # which feeds without plans don't wait for

    told = [step, lengths.tolist(), {number: some.tolist() for number, some in soon.items()}]
    found = exchange.all(PLAN, {rank: told})[rank]
    if "error" in found:
        raise getattr(errors, found["error"], errors.PlanError)(found["said"])
    return plan_from_bytes(base64.b64decode(found["plan"]))


_Item = TypeVar("_Item")


def _with_next(items: Iterator[_Item], ahead: int) -> Iterator[tuple[_Item, list[_Item]]]:
    """Yield each item with those that follow it; an error of one that is looked at early is raised in its place."""
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
    """Makes batches; it holds no place of its own, so that any state gives the same bytes at any time."""

    def __init__(
        self,
        stream: Stream,
        settings: BatchSettings,
        rank: int,
        on_error: OnError = "raise",
        losses: Callable[[], Losses] = Losses,
        plans: StepPlans | None = None,
    ) -> None:
        """Take the packs of all epochs, and how one rank's batches are made of them; its plans, where it has some."""
        self.stream, self._settings, self._rank, self.losses = stream, settings, rank, losses
        self._plans = plans
        self._unreadable = Unreadable(on_error, settings.pad_id)

    @property
    def step_packs(self) -> int:
        """Packs of a step, over all ranks."""
        return self._settings.global_batch_size

    def state(self, step: int, position: Any) -> FeedState:
        """Return the state in which a step is the next, which begins at a position."""
        return FeedState(step=step, at=self.stream.at(position))

    def packs(self, state: FeedState) -> tuple[StorePacks, IntArray]:
        """Return the packs of the step that a state is in, none behind the last one, and each piece's document."""
        position = self.position(state)
        packs = self.stream.take(position, self.step_packs)[0]
        return packs, numbers_of(self.stream.tokens(position), packs.shards, packs.documents)

    def where(self, document_id: int, state: FeedState) -> str:
        """Say where a document lies, as batches that follow a state name it."""
        return where_of(self.stream.tokens(self.position(state)), document_id)

    def steps(self, state: FeedState) -> Iterator[tuple[Step, FeedState, FeedState, Ledger] | Ledger]:
        """Yield the steps from the one that a state is in, the states before and after each, and its ledger.

        A step without any target trains nothing: it is left out, on every rank alike, though it is counted. What is
        counted behind the last step comes at the end, alone.
        """
        number, position, ledger = state.step, self.position(state), _NOTHING
        count = self._packs_begun(state)
        has_begun = number > 0 or state.micro_batch > 0
        heard = self.stream.passes(position)
        while True:
            before = FeedState(step=number, at=self.stream.at(position))
            packs, position, entered = self.stream.take(position, count)
            count = self._settings.global_batch_size
            ledger = ledger.and_then(entered)
            if packs.num_packs == 0:
                if not has_begun:
                    raise self._nothing(ledger)
                yield ledger
                return
            step = deal_step(self.stream.tokens(position), packs, number, self._settings)
            number += 1
            if step.num_targets:
                yield step, before, FeedState(step=number, at=self.stream.at(position)), ledger
                ledger, heard, has_begun = _NOTHING, self.stream.passes(position), True
            check_heard(self.stream.passes(position), heard)

    def _nothing(self, ledger: Ledger) -> InputError:
        """Return the error of data of which nothing is left to train on."""
        return no_batch(ledger, self.losses(), self._settings.capacity)

    def batches(self, state: FeedState, buffers: Buffers) -> Iterator[Made | Ended]:
        """Yield the batches that follow a state, and what they haven't told of."""
        first = state.micro_batch
        pieces = ReadPieces(self.stream.tokens(self.position(state)), self._unreadable)
        if self._plans is not None:
            yield from self._shares(state, pieces, buffers, self._plans)
            return
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

    def _shares(
        self, state: FeedState, pieces: ReadPieces, buffers: Buffers, plans: StepPlans
    ) -> Iterator[Made | Ended]:
        """Yield of each step what this rank computes by the step's plan, as one batch."""
        exchange = plans.exchanges(0)
        for found, soon in _with_next(self.steps(state), plans.ahead):
            if isinstance(found, Ledger):
                if found != _NOTHING:
                    yield Ended(ledger=found)
                return
            step, _, after, entered = found
            skipped, out = pieces.skipped, buffers()
            later = {one[0].number: one[0].lengths for one in soon if not isinstance(one, Ledger)}
            plan = _planned(exchange, self._rank, step.number, step.lengths, later)
            mine = plan.documents_of(self._rank)
            batch = make_batch(pieces, step, 0, 0, self._settings, out, mine)
            yield Made(batch=batch, state=after, ledger=entered, skipped=pieces.skipped - skipped)

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
            self.stream.check(position)
        at = self.stream.at(position)
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
        if _PRINT in state.at and self.stream.take(position, count)[0].print != state.at[_PRINT]:
            raise StateError(
                f"the state is within step {state.step:,}, which holds other packs here: with other epochs the data "
                "ends elsewhere. Pass the epochs of the state, load one from where a step begins, or begin anew"
            )

    def position(self, state: FeedState) -> Any:
        """Return where the step of a state begins, and which parts of the store its epochs hold."""
        return self.stream.position(state.at)
