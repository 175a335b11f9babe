"""`PackedLoader`: documents in, packed batches out, made ahead by a worker; the same bytes whatever happens."""

from __future__ import annotations

import difflib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

from varlen.arguments import as_count, options_of, takes, with_arguments
from varlen.batch.packed import PackedBatch
from varlen.documents.source import Mixture
from varlen.errors import SettingError, UnknownLengthError
from varlen.feed.lookup import IndexedLookup, StepDocuments, StreamingLookup
from varlen.feed.opening import Opened, OpenTokens, open_data, warn_overlong_read
from varlen.feed.protocol import BatchCounts, Ended, Worker
from varlen.feed.settings import FREE, LoaderArguments, LoaderSettings
from varlen.feed.spec import release
from varlen.feed.state import MOST, PLANS, FeedState, from_json, to_json
from varlen.feed.worker.device import DeviceWorker
from varlen.feed.worker.process import ProcessWorker
from varlen.feed.worker.ring import slot_bytes
from varlen.feed.worker.thread import ThreadWorker
from varlen.files.losses import NO_LOSSES, Losses
from varlen.files.paths import Data
from varlen.types import Int32Array, IntArray, Ledger

# What a loader can't be: copied, read in a fork, or asked for single items.


class OfOneProcess:
    """A reader with a worker, of the process that made it."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def _is_fork(self) -> bool:
        """Whether this process came from the one that made it."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        """Refuse to read in a fork."""
        if self._is_fork:
            raise SettingError(
                f"this loader was made in process {self._process}, and this is a fork of it, process {os.getpid()}, "
                "without the worker that makes the batches; make a loader in the process that reads it"
            )

    def _unless_forked(self, close: Callable[[], None]) -> Callable[[], None]:
        """Return what ends the worker, and does nothing in a fork: the worker is the other process's."""
        process = self._process
        return lambda: close() if os.getpid() == process else None

    def __getitem__(self, _: object) -> PackedBatch:
        """Refuse to be a data set of single items, as PyTorch's DataLoader asks for them."""
        raise SettingError(
            "a PackedLoader gives whole batches in their order and no single items, so a DataLoader around it has "
            "nothing to do; iterate it as it is: for batch in loader"
        )

    def __bool__(self) -> bool:
        """Be true, without counting anything."""
        return True

    def __reduce__(self) -> str:
        """Refuse to be copied: there is one position, and one worker."""
        raise SettingError(
            "a loader can't be copied or handed to another process; make another one, and load this one's state_dict"
        )


class PackedLoader(OfOneProcess):
    """An asynchronous, exactly resumable stream of packed batches, for one data-parallel rank.

    ::

        with vl.PackedLoader("store", capacity=8192, global_batch_size=64) as loader:
            for batch in loader:
                ...

    It is its own iterator: iterating again goes on where the last loop stopped, and gives nothing once all epochs
    are over. Every document comes exactly once an epoch. The set of packs of a step doesn't depend on the number of
    ranks, all of which get the same number of batches. `state_dict` is a small mapping for JSON, the same on every
    rank, that counts what was taken and not what was made ahead; with it a loader goes on from any batch with the
    same bytes, and from any step on another number of ranks.

    Args:
        {arguments}

    Raises:
        SettingError: a setting out of its range, or that doesn't go with the others; forgotten ranks.
        SourceError: no such data, or it can't be read.
        OverlongDocumentError: `overlong="error"` and a document of a token store is longer than a pack.
    """

    @takes(LoaderArguments)
    def __init__(self, source: Data | Mixture, tokenizer: Any = None, **options: Any) -> None:
        known = options_of(LoaderSettings)
        if unknown := [name for name in options if name not in known]:
            nearest = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)[0]
            raise SettingError(f"PackedLoader has no argument {unknown[0]!r}; the nearest is {nearest}")
        self._settings = LoaderSettings(**options)
        self._begin(source, tokenizer)

    def _begin(self, source: Data | Mixture | OpenTokens, tokenizer: Any) -> None:
        """Open the data and prepare the worker."""
        settings = self._settings
        super().__init__()
        self._opened = open_data(source, tokenizer, settings)
        self._plans = self._opened.plans
        self.plan_wait_s = 0.0
        """Seconds of the last wait for a batch that were spent on its plan; 0 without plans."""
        self._state = self._opened.feed.with_position(FeedState())
        self._is_running = self._is_over = self._is_closed = False
        self._meter = LoaderMeter(
            None if self._opened.overlong_settled else partial(warn_overlong_read, settings=settings)
        )
        self._noted = self._meter.noted
        self._remembers = self._opened.remembers
        self._worker = make_worker(self._opened, settings)
        self._take, self._deadline_s = self._worker.take, settings.deadline_s
        self._end = weakref.finalize(self, self._unless_forked(self._worker.closer()))

    @cached_property
    def _lookup(self) -> IndexedLookup | StreamingLookup:
        """What finds steps."""
        return self._opened.lookup()

    @property
    def settings(self) -> LoaderSettings:
        """What it was asked for."""
        return self._settings

    @property
    def mode(self) -> str:
        """How the data is fed: "indexed" or "streaming"."""
        return self._opened.mode

    @property
    def has_weights(self) -> bool:
        """Whether batches may hold `target_weights`, as rows are read with `row_weights`, or were for the store."""
        return self._opened.has_weights

    @property
    def micro_batches(self) -> int:
        """Batches that each rank takes in a step."""
        whole, micro = self._settings.batch_sizes
        return whole // (self._settings.dealt_ranks * micro)

    @property
    def step(self) -> int:
        """Steps that were taken whole; where one is begun, its number."""
        return self._state.step

    def start_prefetch(self) -> None:
        """Have batches made from now on, before the first is asked for: while a model loads, for instance.

        Raises:
            SettingError: the loader is closed.
        """
        if self._is_closed:
            raise SettingError("the loader is closed; make a new one, and load the state of this one")
        self._settings.check_reader()  # again: a process group may have been initialised since
        self._check_process()
        if not self._is_running and not self._is_over:
            self._worker.start(self._state)
            self._is_running = True

    def __iter__(self) -> PackedLoader:
        """Return itself: a loop goes on where the last one stopped."""
        self.start_prefetch()
        return self

    def __next__(self) -> PackedBatch:
        if not self._is_running or self._is_fork:
            self.start_prefetch()
        start_s = time.perf_counter()
        try:
            made, ready = (Ended(), 0) if self._is_over else self._take(self._deadline_s)
        except BaseException:
            self._is_running = False  # the next call begins after the last batch that was taken
            raise
        if isinstance(made, Ended):
            self._is_over, self._is_running = True, False
            self._meter.end(made)
            raise StopIteration
        took = time.perf_counter() - start_s
        self._noted.append((made.counts, took, ready, made.skipped, made.ledger, made.losses))
        if len(self._noted) >= MOST_NOTED:
            self._meter.add_up()
        self._state = made.state
        if self._remembers:
            self._lookup.remember(made.state)
        if self._plans is not None:
            plan, self.plan_wait_s = self._plans.take(made.state.step - 1, start_s)
            return made.batch.replace(plan=plan)
        return made.batch

    def state_dict(self) -> dict[str, Any]:
        """Return what was taken, as a mapping for JSON: after the last batch, the same on every rank.

        With plans it also says how the steps were planned that this rank has read and not yet given: `merge_states`
        takes what all ranks say.
        """
        state = to_json(self._state, self._opened.mode, self._opened.belongs_to)
        return state if self._plans is None else {**state, PLANS: self._plans.state(self._state.step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a state.

        Args:
            state: of `state_dict`, of any rank; the number of ranks and `micro_batch_size` may be others where it
                stands at the beginning of a step; `epochs` may be others anywhere, in streaming more of them.

        Raises:
            StateError: of other data or settings, which are named; nothing has changed then.
        """
        found = self._opened.feed.with_position(
            from_json(state, self._opened.mode, self._opened.belongs_to, FREE)
        )
        self._go_to(found, state.get(PLANS, {}))

    def _go_to(self, state: FeedState, plans: Mapping[str, Any] | None = None) -> None:
        if self._plans is not None:
            self._plans.go_on(plans)
        was_running, self._state, self._is_over = self._is_running, state, False
        self._is_running = False
        if was_running:
            self.start_prefetch()

    def seek(self, step: int) -> None:
        """Go to the beginning of a step, to skip a bad stretch or to recover without a state.

        Args:
            step: from 0; in streaming a step after the last one is not an error: no batch follows.

        Raises:
            SettingError: it has no such step.

        Cost: with known lengths, looking into the window table of the epochs before, which is made once at several
        million documents a second and kept. In streaming a step that lies ahead, or further back than the last
        rounds, is reached by preparing what comes before it.
        """
        found = self._lookup.state_at(as_count(step, "step", 0, MOST), self._state)
        self._go_to(self._opened.feed.with_position(found))

    def __len__(self) -> int:
        """Count the batches of all epochs that this rank takes, those that were taken included.

        Steps that are left out since none of their packs has a label are counted too: finding them takes reading.
        """
        try:
            return self._lookup.num_steps(self._state) * self.micro_batches
        except SettingError as error:
            raise UnknownLengthError(
                f"{error}; a loop needs no length: for batch in loader, and no DataLoader around it"
            ) from error

    def documents(self, step: int) -> StepDocuments:
        """Return which documents a step holds, of all ranks: to find what made a loss spike.

        Args:
            step: from 0; in streaming one of the last rounds.

        Raises:
            SettingError: it has no such step, or doesn't remember it.

        Cost: of `seek`, and planning the step again; in streaming its round is read again.
        """
        return self._lookup.documents(as_count(step, "step", 0, MOST), self._state)

    def lengths(self, step: int) -> Int32Array | None:
        """Return the tokens of each document of a step, as `documents` lists them: what `vl.Planner` asks for.

        Args:
            step: from 0; None is returned behind the last one. No token is read.

        Raises:
            SettingError: in streaming, where lengths aren't known before documents are read.

        Cost: that of `documents`. A store that grows may change steps of epochs that haven't begun.
        """
        return self._lookup.lengths(as_count(step, "step", 0, MOST), self._state)

    def all_lengths(self) -> Iterator[IntArray]:
        """Yield the tokens of all documents of the data, whole, whichever of them the packs of the epochs hold.

        Yields:
            int64, at most 2**20 at a time: document n is the one that `where(n)` describes.

        Raises:
            SettingError: in streaming, where lengths aren't known before documents are read.

        Cost: no token is read.
        """
        return self._lookup.all_lengths(self._state)

    def where(self, document_id: int) -> str:
        """Return where a document lies in the data, for messages.

        Args:
            document_id: of `batch.document_ids`, or of `documents`.
        """
        return self._lookup.where(int(document_id), self._state)

    def stats(self) -> LoaderStats:
        """Return counts and times since the loader was made."""
        return self._meter.stats(self._worker, self._opened.losses())

    def close(self) -> None:
        """Leave no process, thread, memory or file behind; batches that are held keep their bytes."""
        self._is_closed, self._is_running = True, False
        self._end.detach()
        if not self._is_fork:
            if self._plans is not None:
                self._plans.close()
            self._worker.close()
            release(self._opened.spec)

    def __repr__(self) -> str:
        settings, (rank, world) = self._settings, self._settings.ranks
        return (
            f"PackedLoader({self.mode}, {settings.global_batch_size:,} packs of {settings.capacity:,} a step, rank "
            f"{rank:,} of {world:,}, at step {self.step:,})"
        )

    def __enter__(self) -> PackedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


PackedLoader.__doc__ = with_arguments(PackedLoader.__doc__, LoaderArguments)

# What a loader has done so far, and how long the trainer waited for it.


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """Counts of this rank since its loader was made, but for the ledger, which is of all ranks."""

    batches: int = 0
    """Taken by the trainer."""
    tokens: int = 0
    """Of documents in these batches, padding not counted."""
    positions: int = 0
    """Of these batches, padding counted."""
    targets: int = 0
    """Labels in them."""
    masked_packs: int = 0
    """Packs without any document, where the data ends, or ended before more epochs were asked for."""
    packs_without_targets: int = 0
    """Packs of documents that train nothing."""
    waited_s: float = 0.0
    """Time in which the trainer stood still for a batch, the first one's not counted."""
    first_s: float = 0.0
    """Time for which it stood still for the first one."""
    late: int = 0
    """Batches that it had to wait for, the first one not counted."""
    queued: int = 0
    """Sum over batches of those that were ready when one was taken."""
    copies: int = 0
    """Batches copied since the trainer held all slots of the ring."""
    restarts: int = 0
    """Workers that died and were replaced."""
    skipped: int = 0
    """Of documents in streaming: rows that couldn't be read, over all ranks, once however many epochs there are. Of
    tokens: pieces of documents that this rank couldn't read, and has masked in its batches, where they count as
    tokens; ranks add up."""
    losses: Losses
    """What the source holds that no token stands for, over all ranks: in streaming of all that was read since the
    loader was made, in each epoch anew; of a token store all that it lost when it was made."""
    ledger: Ledger
    """What became of the tokens of all windows begun since the loader was made, over all ranks."""

    @property
    def fill_ratio(self) -> float:
        """Tokens a position; 1.0 before the first batch."""
        return self.tokens / self.positions if self.positions else 1.0

    @property
    def readiness(self) -> float:
        """Share of batches that were there when they were asked for, the first one not counted."""
        return 1 - self.late / (self.batches - 1) if self.batches > 1 else 1.0

    @property
    def queue_depth(self) -> float:
        """Batches that were ready when one was taken, on the average."""
        return self.queued / self.batches if self.batches else 0.0


_OF_BATCHES = tuple(field.name for field in fields(BatchCounts))
MOST_NOTED = 64
"""Batches whose counts are added up at a time."""
Note = tuple[BatchCounts | None, float, int, int, Ledger | None, Losses | None]
"""Of a batch: what it holds, the seconds that it was waited for, the batches that were ready when it was asked for,
the pieces skipped, what became of tokens and what was lost, as `Made` has them."""


class LoaderMeter:
    """Adds up, cheaply: it runs in the trainer's process at every batch.

    After a step of the trainer nothing of this is in the processor's caches, where a dozen additions take as long as
    a loop over many batches. So a batch is only noted, and notes are added up some dozens at a time.
    """

    def __init__(self, warn_overlong: Callable[[Ledger], bool] | None = None) -> None:
        self._warn_overlong = warn_overlong
        names = [field.name for field in fields(LoaderStats) if field.name not in ("ledger", "losses")]
        self._counts: dict[str, float] = dict.fromkeys(names, 0)
        self._ledger, self._losses = Ledger(tokens_in=0, packed=0), NO_LOSSES
        self.noted: list[Note] = []
        """Batches are appended here directly, since a call would take longer."""

    def add_up(self) -> None:
        """Add up what was noted."""
        counts = self._counts
        for found, waited_s, ready, skipped, ledger, losses in self.noted:
            is_first = counts["batches"] == 0
            counts["batches"] += 1
            for name in _OF_BATCHES:
                counts[name] += getattr(found, name)
            counts["queued"] += ready
            counts["first_s" if is_first else "waited_s"] += waited_s
            counts["late"] += ready == 0 and not is_first
            counts["skipped"] += skipped
            self._enter(ledger, losses)
        self.noted.clear()

    def end(self, ended: Ended) -> None:
        """Enter what no batch has told."""
        self.add_up()
        self._enter(ended.ledger, ended.losses)

    def _enter(self, ledger: Ledger | None, losses: Losses | None) -> None:
        if ledger is not None:
            self._ledger = self._ledger.and_then(ledger)
            if self._warn_overlong is not None and self._warn_overlong(self._ledger):
                self._warn_overlong = None
        if losses is not None:
            self._losses += losses
            self._counts["skipped"] += losses.num_rows

    def stats(self, worker: Worker, before: Losses) -> LoaderStats:
        """Return what was entered so far, beside what the worker counts."""
        self.add_up()
        counted = {"copies": worker.copies, "restarts": worker.restarts}
        whole = {name: value if name.endswith("_s") else int(value) for name, value in self._counts.items()}
        return LoaderStats(
            **{**whole, **counted},  # type: ignore[arg-type]
            losses=before + self._losses,
            ledger=self._ledger,
        )


# The worker that makes a loader's batches: a process or a thread, and behind it a device.


_SHARE = 1.25
"""A slot has room for this many times a rank's even part of a step; larger batches go in their message."""


def make_worker(opened: Opened, settings: LoaderSettings) -> Worker:
    """Return the worker of these settings; it makes no batch before `Worker.start`."""
    multiple = settings.pad_to_multiple_of if settings.batch_layout == "flat" else 1
    positions = settings.batch_sizes[1] * settings.capacity
    if settings.plan is not None and settings.ranks[1] > 1:
        positions = min(positions, math.ceil(_SHARE * positions / settings.ranks[1]))
    positions = -(-positions // multiple) * multiple
    worker: Worker
    if settings.worker == "process":
        size = slot_bytes(positions, has_weights=opened.has_weights)
        worker = ProcessWorker(opened.spec, settings.ring_slots, size, opened.open_exchange)
    else:
        worker = ThreadWorker(opened.spec, settings.ring_slots, opened.open_exchange, opened.held)
    if settings.device is None:
        return worker
    try:
        return DeviceWorker(worker, settings.device)
    except BaseException:
        worker.close()
        raise
