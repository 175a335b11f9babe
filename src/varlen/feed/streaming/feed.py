"""One rank's batches directly from documents; nothing is written, and steps don't depend on the number of ranks.

The unit of distribution is the lane. A step takes equally many packs of every lane; rank r of W runs the lanes r::W;
a lane's packs depend only on data, settings and seed (see rounds.py). So each step has the same set of packs at any
world size that divides the number of lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from varlen.documents.block_reader import BlockReader, Chunk
from varlen.documents.blocks import cut_blocks, read_by_all
from varlen.documents.source import Source
from varlen.errors import SettingError, StateError
from varlen.feed.batches import BatchSettings, Contents, check_labels, deal, fill_batch, no_batch, work_of
from varlen.feed.exchange import OpenExchange, Solo
from varlen.feed.prefetch import AheadSettings, Prefetcher
from varlen.feed.protocol import Buffers, Ended, Made
from varlen.feed.state import FeedState, check_micro_batch
from varlen.feed.streaming.intake import ChunkSequence, Intake
from varlen.feed.streaming.lane import RECORD_BITS, LanePacks, LaneSettings, chunk_of
from varlen.feed.streaming.rounds import Round, Rounds, RoundSettings, check_round_state, round_state_of
from varlen.files.losses import NO_LOSSES
from varlen.pack.passes import Passes
from varlen.text.loss_masks import end_to_end
from varlen.types import FloatArray, IntArray, Ledger, Method, Overlong

_NOTHING = Ledger(tokens_in=0, packed=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingSettings:
    """Everything that the packs depend on apart from the data and the batch; and how far ahead they are prepared."""

    lanes: int
    seed: int | None = 0
    """Seed of the shuffle of blocks and of each lane's documents; None: their order in the data."""
    epochs: int | None = 1
    """None: without end."""
    method: Method = "best_fit"
    overlong: Overlong = "split"
    max_documents: int | None = None
    window_packs: int = 32
    """Packs per lane that are built together, about."""
    min_fill: float = 0.995
    """Fraction of the capacity from which a pack counts as full."""
    max_age: int = 16
    """Rounds that a document waits at most for a pack that it fills."""
    ahead: AheadSettings = field(default_factory=AheadSettings)
    threads: int = 2
    """Threads that read blocks."""


class StreamingFeed:
    """Builds batches; it has no position of its own, so the same state always gives the same bytes.

    Memory of a rank that runs n lanes, with c = capacity and w = `window_packs`, in tokens of 4 bytes (5 with a loss
    mask, 8 with weights)::

        n · ((w + 32) · c + claim)        documents waiting in the lanes; twice that during packing
        ahead.most_bytes + n · w · c      rounds that are ready (bytes), and the one that is being taken
        2 MB                              the next blocks, read while lanes are packed

    where claim is the tokens of a chunk (a block of at most 1 MB, or the longest document), and 32 spare packs are
    needed if few documents are shorter than a pack, otherwise 8. Chunks also hold their text while they are read.
    """

    def __init__(
        self,
        source: Source,
        settings: StreamingSettings,
        batch: BatchSettings,
        rank: int,
        open_exchange: OpenExchange | None = None,
        *,
        logs_skipped: bool = True,
    ) -> None:
        """Take documents, and the settings of packing and batches; opens each table, and reads no other file."""
        _check(settings, batch)
        self._source, self._settings, self._batch, self._rank = source, settings, batch, rank
        self._blocks = cut_blocks(source, settings.lanes)
        self._own = range(rank, settings.lanes, batch.dp_world_size)
        self._rounds = round_settings(settings, batch, self._blocks.block_bytes)
        self._is_solo = open_exchange is None or batch.dp_world_size == 1
        self._open_exchange = Solo if self._is_solo or open_exchange is None else open_exchange
        self._logged: set[Chunk] | None = set() if logs_skipped else None

    @property
    def read_by_all(self) -> list[str]:
        """Files that can't be cut, so that every rank reads all of each."""
        return read_by_all(self._source, self._blocks)

    @property
    def block_bytes(self) -> int:
        """Maximum bytes of a block; its last document may exceed it."""
        return self._blocks.block_bytes

    @property
    def step_packs(self) -> int:
        """Packs per step, over all ranks."""
        return self._batch.global_batch_size

    def for_one_rank(self) -> StreamingFeed:
        """Return a feed for one rank with one batch per step, for lookups of the documents of steps."""
        size = self._batch.global_batch_size
        whole = replace(
            self._batch, dp_world_size=1, micro_batch_size=size, layout="rows", pad_to_multiple_of=1
        )
        return StreamingFeed(self._source, self._settings, whole, 0, logs_skipped=False)

    def where(self, document_id: int) -> str:
        """Describe a document for messages: its file, the chunk of the file, and its record in the chunk."""
        record = document_id & ((1 << RECORD_BITS) - 1)
        chunk = chunk_of(document_id, is_single=len(self._blocks) == 1)
        return f"record {record:,} of {self._blocks.where(chunk.block, chunk.number, self._source.files)}"

    def with_position(self, state: FeedState) -> FeedState:
        """Return a checked state with its position, also for the beginning of training.

        States of version 0.1.0 have no position before the first batch.
        """
        if state.micro_batch:
            check_micro_batch(state, self._batch.micro_batches)
        begins = state.at.get("step", 0)
        if not isinstance(begins, int) or not 0 <= begins <= state.step:
            raise StateError(
                f"the state is at step {state.step:,}, but its round begins at {begins!r}; it was changed. "
                "Load it as it was saved, or an earlier one"
            )
        check_round_state(state.at, self._settings.lanes, self._settings.seed, self._settings.epochs)
        return replace(state, at=round_state_of(state.at, self._settings.lanes).to_at())

    def batches(self, state: FeedState, buffers: Buffers) -> Iterator[Made | Ended]:
        """Yield the batches that follow a state, then the counts that no batch carries.

        A step without targets trains nothing: every rank leaves it out, though it has a number.
        """
        state = self.with_position(state)
        exchange = self._open_exchange()
        reader = BlockReader(self._source, self._blocks)
        intake = Intake(self._source, reader, self._settings.threads)
        sequence = ChunkSequence(self._blocks, reader, self._settings.seed, self._settings.epochs)
        lanes = range(self._settings.lanes) if self._is_solo else self._own
        rounds = Rounds(sequence, intake, exchange, self._rounds, lanes, self._logged)
        ahead = Prefetcher(lambda: rounds.run(state.at, state.step), self._settings.ahead, exchange.close)
        last_epoch, silent_rounds, epochs = _whole_epochs(state.at), 0, _epochs_begun(state.at)
        ledger, losses, has_begun = _NOTHING, NO_LOSSES, state.step > 0 or state.micro_batch > 0
        try:
            for part in ahead:
                epochs = _epochs_begun(part.after)
                if any(part.targets):
                    last_epoch, silent_rounds, has_begun = _whole_epochs(part.after), 0, True
                silent_rounds += 1
                if silent_rounds > self._settings.max_age + 1:  # no document can have waited longer
                    check_labels(_whole_epochs(part.after), last_epoch)
                if (state.step, state.micro_batch) <= (part.step, 0) and part.step == part.bounds[0]:
                    new_ledger, new_losses = part.accounts
                    ledger, losses = ledger.and_then(new_ledger), losses + new_losses
                for made in self._of_round(part, state, buffers):
                    if ledger != _NOTHING or losses:
                        made = replace(
                            made, ledger=None if ledger == _NOTHING else ledger, losses=losses or None
                        )
                        ledger, losses = _NOTHING, NO_LOSSES
                    yield made
            if not has_begun:
                raise no_batch(ledger, losses, self._batch.capacity, epochs)
            if ledger != _NOTHING or losses:
                yield Ended(ledger=ledger, losses=losses)
        finally:
            ahead.close()
            intake.close()

    def _of_round(self, part: Round, state: FeedState, buffers: Buffers) -> Iterator[Made]:
        """Yield the batches of a round that follow a state."""
        micro_batches = self._batch.micro_batches
        works = {
            lane: work_of(packs.lengths, packs.offsets, self._batch.work)
            for lane, packs in part.packs.items()
        }
        for number in range(max(part.step, state.step), part.step + part.num_steps):
            num_targets = part.targets[number - part.step]
            if num_targets == 0:
                continue
            first = state.micro_batch if number == state.step else 0
            assigned = self._assigned(works, number - part.step)
            is_last_step = number + 1 == part.bounds[1]
            after = FeedState(step=number + 1, at=part.after if is_last_step else part.before)
            before = FeedState(step=number, at=part.before)
            for micro_batch in range(first, micro_batches):
                is_last = micro_batch + 1 == micro_batches
                size = self._batch.micro_batch_size
                numbers = assigned[micro_batch * size : (micro_batch + 1) * size]
                contents = self._contents(part, number, numbers)
                batch = fill_batch(contents, num_targets, self._batch, buffers(), self.where)
                now = after if is_last else replace(before, micro_batch=micro_batch + 1)
                yield Made(batch=batch, state=now)

    def _assigned(self, works: Mapping[int, FloatArray], step: int) -> IntArray:
        """Return the numbers of this rank's packs among those of a step, batch after batch, by descending work."""
        size = self._rounds.step_packs
        numbers = np.concatenate([lane * size + np.arange(size) for lane in self._own])
        work = np.zeros((len(self._own), size))
        for row, lane in zip(work, self._own):
            of_step = works[lane][step * size : (step + 1) * size]
            row[: len(of_step)] = of_step
        mine: IntArray = numbers[deal(work.ravel(), 1, self._batch.micro_batch_size)[0]]
        return mine

    def _contents(self, part: Round, step: int, numbers: IntArray) -> Contents:
        """Return the pieces of the given packs of a step."""
        size = self._rounds.step_packs
        packs: list[LanePacks] = []
        for number in numbers.tolist():
            index = (step - part.step) * size + number % size
            packs.append(part.packs[number // size].pack(index))
        masks = end_to_end([pack.mask for pack in packs], [len(pack.tokens) for pack in packs])
        return Contents(
            tokens=np.concatenate([pack.tokens for pack in packs]),
            mask=masks,
            lengths=np.concatenate([pack.lengths for pack in packs]),
            offsets=np.cumsum([0, *(len(pack.ids) for pack in packs)]),
            document_ids=np.concatenate([pack.ids for pack in packs]),
            document_starts=np.concatenate([pack.starts for pack in packs]),
            pack_ids=step * self._batch.global_batch_size + numbers,
        )


def round_settings(settings: StreamingSettings, batch: BatchSettings, block_bytes: int) -> RoundSettings:
    """Return the settings of rounds."""
    passes = Passes(
        capacity=batch.capacity,
        method=settings.method,
        max_documents=settings.max_documents,
        multiple=batch.document_multiple_of,
        min_fill=settings.min_fill,
    )
    return RoundSettings(
        lanes=settings.lanes,
        step_packs=batch.global_batch_size // settings.lanes,
        lane=LaneSettings(
            passes=passes, overlong=settings.overlong, max_age=settings.max_age, seed=settings.seed
        ),
        window_packs=settings.window_packs,
        block_bytes=block_bytes,
    )


def _whole_epochs(at: Mapping[str, Any]) -> int:
    """Return the number of epochs that are completely claimed where a round begins."""
    return int(at["claimed"]["epoch"]) if "claimed" in at else 0


def _epochs_begun(at: Mapping[str, Any]) -> int:
    """Return the number of epochs that are at least partly claimed where a round begins."""
    return _whole_epochs(at) + bool("claimed" in at and (at["claimed"]["index"] or at["claimed"]["chunk"]))


def _check(settings: StreamingSettings, batch: BatchSettings) -> None:
    """Refuse a global batch size, lanes and ranks that don't divide each other."""
    lanes, size, world = settings.lanes, batch.global_batch_size, batch.dp_world_size
    if lanes < 1 or size % lanes:
        raise SettingError(
            f"global_batch_size {size:,} must be a multiple of {lanes:,} lanes, which give as many packs each"
        )
    if lanes % world:
        fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise SettingError(
            f"{lanes:,} lanes can't be dealt to {world:,} ranks; run {fitting} ranks, or pass other lanes"
        )
    if size % (world * batch.micro_batch_size):
        raise SettingError(
            f"global_batch_size {size:,} must be a multiple of {world:,} ranks times micro_batch_size "
            f"{batch.micro_batch_size:,}"
        )
