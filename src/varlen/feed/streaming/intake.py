"""What lanes take in: claimed chunks, read side by side, and documents that waited when a state was saved."""

from __future__ import annotations

import copy
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from varlen.arguments import as_count
from varlen.documents.block_reader import BlockReader, Chunk, Raw, Read, encode
from varlen.documents.blocks import Blocks
from varlen.documents.source import Source
from varlen.errors import SourceError, StateError, reading_state
from varlen.feed.state import MOST
from varlen.feed.streaming.lane import (
    RECORD_BITS,
    Arrival,
    Counts,
    LanePacks,
    LaneRecord,
    arrival_of,
    chunk_of,
    joined,
)
from varlen.files.losses import Losses
from varlen.files.rows import losses_of
from varlen.types import Int32Array, IntArray

_TASKS_A_THREAD = 16
"""Many enough that no thread is left with much while others have nothing."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadChunk:
    """What became of a claim."""

    claim: Claim
    path: str
    arrival: Arrival
    faults: tuple[str, ...]
    """Sentences about records that couldn't be read."""
    losses: Losses
    """What these stand for, and what chat templates left out."""
    outside: Losses
    """What those stand for for which not the files are to blame: they may be read in one epoch and not in another."""


class Reading(Protocol):
    """What lanes ask of who reads their chunks; as `Intake` has it."""

    def read(self, claims: Sequence[Claim], soon: Sequence[Chunk] = ()) -> list[ReadChunk | Exception]:
        """Return what each claim brings, or why it brings nothing."""

    def can_wait(self, records: Iterable[LaneRecord]) -> bool:
        """Whether the documents that wait may be read after others."""

    def waiting(self, records: Mapping[int, LaneRecord]) -> dict[int, Arrival]:
        """Return the documents that wait in each lane."""

    def chunks_of(self, ids: Sequence[IntArray]) -> list[Chunk]:
        """Return the chunks that documents are of, each once."""


class Intake:
    """Reads chunks on a few threads; results come in the order asked for."""

    def __init__(self, source: Source, reader: BlockReader, threads: int) -> None:
        self._source, self._reader, self._threads = source, reader, threads
        self._is_alone = reader.num_blocks == 1
        self._begun: dict[Chunk, Future[ReadChunk | Exception]] = {}
        """Chunks that nobody has claimed yet."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="varlen-read") if threads > 1 else None

    def close(self) -> None:
        """End the threads, and close the files."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def read(self, claims: Sequence[Claim], soon: Sequence[Chunk] = ()) -> list[ReadChunk | Exception]:
        """Return what each claim brings, or why it brings nothing; an error hides none of another lane."""
        # A chunk may be claimed twice, in two epochs of little data.
        begun = {chunk: self._begun.pop(chunk, None) for chunk in dict.fromkeys(c.chunk for c in claims)}
        others = [claim for claim in claims if begun[claim.chunk] is None]
        raws = self._rows([claim.chunk for claim in others])
        waits = self._begin(lambda of: self._bring(*of), list(zip(others, raws)))
        if self._pool is not None:
            for chunk in soon:
                if chunk not in self._begun:
                    self._begun[chunk] = self._pool.submit(self._alone, chunk)
        brought = iter(waits())
        found: list[ReadChunk | Exception] = []
        for claim in claims:
            future = begun[claim.chunk]
            one = next(brought) if future is None else future.result()
            found.append(one if isinstance(one, Exception) else replace(one, claim=claim))
        return found

    def _alone(self, chunk: Chunk) -> ReadChunk | Exception:
        """Read a chunk before anybody has claimed it."""
        claim = Claim(lane=-1, epoch=-1, chunk=chunk)
        try:
            return self._bring(claim, self._reader.rows(chunk))
        except Exception as error:
            return error

    def _bring(self, claim: Claim, raw: Raw | Exception) -> ReadChunk | Exception:
        if isinstance(raw, Exception):
            return raw
        try:
            read = encode(raw, self._source)
            arrival = arrival_of(read, claim.chunk, is_alone=self._is_alone)
        except Exception as error:
            return error
        documents = read.documents
        return ReadChunk(
            claim=claim,
            path=raw.path,
            arrival=arrival,
            faults=tuple(map(str, documents.faults)),
            losses=documents.losses,
            outside=losses_of(fault for fault in documents.faults if fault.is_outside),
        )

    def _rows(self, chunks: Sequence[Chunk]) -> list[Raw | Exception]:
        """Read chunks; those that are parts of one stretch one after the other."""
        stretches: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index in sorted(
            range(len(chunks)), key=lambda index: (chunks[index].block, chunks[index].number)
        ):
            stretches[self._reader.stretch_of(chunks[index])].append(index)
        found: dict[int, Raw | Exception] = {}

        def read(indexes: list[int]) -> None:
            for index in indexes:
                try:
                    found[index] = self._reader.rows(chunks[index])
                except Exception as error:
                    found[index] = error

        self._each(read, list(stretches.values()))
        self._reader.forget()
        return [found[index] for index in range(len(chunks))]

    def _each(self, do: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        return self._begin(do, items)()

    def _begin(self, do: Callable[[_Item], _Result], items: Sequence[_Item]) -> Callable[[], list[_Result]]:
        """Begin to do something with each of some items; returns what waits for all results."""
        if self._pool is None or len(items) < 2:
            return lambda: [do(item) for item in items]
        # Small ones go to a thread together: handing one over takes as long as reading it.
        size = -(-len(items) // (_TASKS_A_THREAD * self._threads))
        groups = [items[start : start + size] for start in range(0, len(items), size)]
        results = self._pool.map(lambda group: [do(item) for item in group], groups)
        return lambda: [result for some in results for result in some]

    def can_wait(self, records: Iterable[LaneRecord]) -> bool:
        """Whether the documents that wait may be read after others, at no more cost than before them."""
        wanted = [chunk for chunk, _ in self._wanted(records)]
        return not any(record.is_masked for record in records) and all(map(self._reader.is_cut, wanted))

    def waiting(self, records: Mapping[int, LaneRecord]) -> dict[int, Arrival]:
        """Return the documents that wait in each lane; only they are encoded."""
        wanted = self._wanted(records.values())
        raws = self._rows([chunk for chunk, _ in wanted])
        source = replace(
            self._source, on_error="skip"
        )  # what is bad has been told, and what is wanted is not

        def read(of: tuple[Raw | Exception, IntArray]) -> Read:
            raw, some = of
            if isinstance(raw, Exception):
                raise raw
            return encode(raw, source, some & ((1 << RECORD_BITS) - 1))

        reads = self._each(read, [(raw, some) for raw, (_, some) in zip(raws, wanted)])
        arrivals = [arrival_of(one, chunk, is_alone=self._is_alone) for one, (chunk, _) in zip(reads, wanted)]
        found = joined(arrivals)
        return {lane: _chosen(found, record) for lane, record in records.items()}

    def chunks_of(self, ids: Sequence[IntArray]) -> list[Chunk]:
        """Return the chunks that documents are of, each once, in the order of their numbers."""
        chunks = np.unique(np.concatenate([np.zeros(0, np.int64), *ids]) >> RECORD_BITS)
        return [chunk_of(chunk << RECORD_BITS, is_alone=self._is_alone) for chunk in chunks.tolist()]

    def _wanted(self, records: Iterable[LaneRecord]) -> list[tuple[Chunk, IntArray]]:
        """Return the chunks that hold the documents that wait, and which of their documents these are."""
        ids = np.unique(np.concatenate([np.zeros(0, np.int64), *(one.ids for one in records)]))
        which = np.unique(ids >> RECORD_BITS, return_inverse=True)[1]
        wanted = [(chunk, ids[which == index]) for index, chunk in enumerate(self.chunks_of([ids]))]
        for chunk, _ in wanted:
            if not 0 <= chunk.block < self._reader.num_blocks or not self._reader.has(chunk):
                if (error := self._reader.error_of(chunk.block)) is not None:
                    raise error
                raise StateError(
                    f"documents of block {chunk.block:,}, chunk {chunk.number:,}, waited, which isn't there; "
                    "the state is of other data"
                )
        return wanted


def _chosen(found: Arrival, record: LaneRecord) -> Arrival:
    """Return the pieces that a record names."""
    order = np.argsort(found.ids, kind="stable")
    at = np.searchsorted(found.ids[order], record.ids)
    known = at < len(order)
    known[known] = found.ids[order][at[known]] == record.ids[known]
    index = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(0, np.int64)
    short = ~known
    if known.all():
        short = np.diff(found.offsets)[index] < record.starts + record.lengths
    if short.any():
        raise StateError(
            f"{int(short.sum()):,} of {len(short):,} documents that waited aren't what they were; the data or the "
            "tokenizer has changed: give the loader those of the state, or begin anew"
        )
    tokens, mask = found.pieces(index, record.starts, record.starts + record.lengths)
    return Arrival(
        ids=record.ids,
        firsts=record.starts,
        ages=record.ages,
        offsets=np.concatenate([[0], np.cumsum(record.lengths)]).astype(np.int64),
        tokens=tokens,
        mask=mask,
    )


def by_lane(
    brought: Iterable[ReadChunk | Exception], claims: Sequence[Claim]
) -> dict[int, list[ReadChunk | Exception]]:
    """Return what was brought to each lane, in the order of its claims."""
    found: dict[int, list[ReadChunk | Exception]] = defaultdict(list)
    for one, claim in zip(brought, claims):
        found[claim.lane].append(one)
    return found


# Which lane reads which chunk: every claim is the next of one sequence, and so follows from those before.


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Claimed:
    """How far the input has been claimed."""

    epoch: int = 0
    index: int = 0
    """Blocks of the epoch's order that are claimed."""
    chunk: int = 0
    """Chunks claimed of the next one, where it can't be cut."""


Print = tuple[int, int, str, bool]
"""A block, a chunk of it, the hash of all rows to the chunk's end, and whether the block's rows end there."""


def as_claimed(at: Mapping[str, Any]) -> Claimed:
    """Return a position of a state."""
    with reading_state("a loader"):
        return Claimed(**{name: as_count(at[name], name, 0, MOST) for name in ("epoch", "index", "chunk")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A chunk, and who is to read it."""

    lane: int
    epoch: int
    chunk: Chunk


class Chunks(Protocol):
    """What is asked of who reads blocks, to know which chunk comes next; as `BlockReader` has it."""

    ends: dict[int, tuple[int, str]]

    def has(self, chunk: Chunk) -> bool:
        """Whether there is such a chunk."""

    def is_live(self, block: int) -> bool:
        """Whether a block's rows are given while they are read."""

    def name_of(self, block: int) -> str:
        """Return what a block's file is called in messages."""

    def error_of(self, block: int) -> SourceError | None:
        """Return why a block that can't be cut couldn't be read any further."""

    def print_of(self, chunk: Chunk) -> str:
        """Return the hash of all rows to the end of a chunk."""


class ChunkSequence:
    """The chunks of all epochs, one after the other."""

    def __init__(self, blocks: Blocks, reader: Chunks, seed: int | None, epochs: int | None) -> None:
        self._blocks, self._reader, self._seed, self._epochs = blocks, reader, seed, epochs
        self._order = lru_cache(2)(blocks.order)
        self._about = blocks.chunks_about()

    def until(self, epochs: int | None) -> ChunkSequence:
        """Return the chunks of so many epochs; None for all that there are."""
        if epochs is None:
            return self
        found = copy.copy(self)
        found._epochs = epochs
        return found

    def next(self, at: Claimed) -> tuple[tuple[int, Chunk] | None, Claimed]:
        """Return the epoch and chunk at a position, None where the input has ended, and the position after it."""
        empty_since = at.epoch
        while not self.is_over(at):
            if at.index == len(self._blocks):
                at = Claimed(epoch=at.epoch + 1)
                if at.epoch > empty_since + 1:  # an epoch without a chunk has none in the next either
                    return None, replace(at, epoch=at.epoch - 1)
                continue
            chunk = Chunk(block=int(self._order(self._seed, at.epoch)[at.index]), number=at.chunk)
            after = replace(at, index=at.index + 1, chunk=0)
            if self._reader.has(chunk):
                is_cut = self._blocks.of_parts[chunk.block] > 0
                return (at.epoch, chunk), after if is_cut else replace(at, chunk=at.chunk + 1)
            at = after
        return None, at

    def soon(self, at: Claimed, count: int) -> list[Chunk]:
        """Return chunks of an epoch that come next, at most so many, of those that can be read by themselves."""
        if self.is_over(at):
            return []
        blocks = self._order(self._seed, at.epoch)[at.index : at.index + count]
        return [Chunk(block=block) for block in blocks[self._blocks.of_parts[blocks] == 1].tolist()]

    def is_over(self, at: Claimed) -> bool:
        """Whether no chunk follows, as far as it can be told without reading."""
        is_last = self._epochs is not None and at.epoch >= self._epochs
        return is_last or len(self._blocks) == 0

    @property
    def live_name(self) -> str:
        """What the first of the rows that are given while they are read are called in messages."""
        live = [block for block in range(len(self._blocks)) if self._reader.is_live(block)]
        return self._reader.name_of(live[0]) if live else "the data"

    def prints(self, at: Claimed) -> list[Print]:
        """Return hashes of rows that are given while they are read: of those up to a position, and up to ends."""
        found: list[Print] = []
        if at.chunk and not self.is_over(at):
            block = int(self._order(self._seed, at.epoch)[at.index])
            if self._reader.is_live(block):
                last = at.chunk - 1
                found.append((block, last, self._reader.print_of(Chunk(block=block, number=last)), False))
        return found + [(block, *end, True) for block, end in sorted(self._reader.ends.items())]

    def check(self, prints: Sequence[Print]) -> None:
        """Read rows again up to where a state stands, and require that they are what they were."""
        for block, last, told, is_end in sorted(prints):
            is_known = block < len(self._blocks) and self._reader.is_live(block)
            if not is_known or self._reader.print_of(Chunk(block=block, number=last)) != told:
                if is_known and (error := self._reader.error_of(block)) is not None:
                    raise error
                name = self._reader.name_of(block) if is_known else "the data"
                raise StateError(
                    f"{name} gives other rows than when the state was saved, or the same in another order; make the "
                    "loader with an iterable that gives the same rows each time (seeded alike), or begin anew"
                )
            if is_end:
                self._reader.ends[block] = (last, told)

    def left(self, at: Claimed) -> float:
        """Estimate the chunks that follow."""
        if self._epochs is None:
            return float("inf")
        if self.is_over(at):
            return 0
        epochs = self._epochs - 1 - at.epoch
        order: IntArray = self._order(self._seed, at.epoch)
        return float(self._about[order[at.index :]].sum() - at.chunk + epochs * self._about.sum())


def deal_claims(held: Sequence[int], targets: Sequence[int], brings: float, most: int) -> list[int]:
    """Return the lanes that claim the next chunks, one after the other: always the one that will hold the least.

    >>> deal_claims([5, 0, 9], [9, 9, 9], brings=3, most=4)
    [1, 1, 0, 1]
    """
    lowest = [(float(tokens), lane) for lane, tokens in enumerate(held) if tokens < targets[lane]]
    heapq.heapify(lowest)
    lanes: list[int] = []
    while lowest and len(lanes) < most:
        tokens, lane = heapq.heappop(lowest)
        lanes.append(lane)
        if tokens + brings < targets[lane]:
            heapq.heappush(lowest, (tokens + brings, lane))
    return lanes


# What waited when a state was saved: its lengths are known, so a round is packed first, and read again as needed.


def unread(record: LaneRecord) -> Arrival:
    """Return the documents that a record names with zeros for tokens, which `Unread` replaces."""
    offsets = np.concatenate([[0], np.cumsum(record.lengths)]).astype(np.int64)
    return Arrival(
        ids=record.ids,
        firsts=record.starts,
        ages=record.ages,
        offsets=offsets,
        tokens=np.zeros(int(offsets[-1]), np.int32),
        mask=None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pieces:
    """Pieces end to end, some of which are zeros yet."""

    ids: IntArray
    starts: IntArray
    lengths: IntArray
    tokens: Int32Array


class Unread:
    """Knows which documents were packed without being read, and reads them."""

    def __init__(self, intake: Reading, records: Mapping[int, LaneRecord]) -> None:
        self._intake = intake
        self._waited = {lane: record.ids for lane, record in records.items()}

    def bring(self, packs: Mapping[int, LanePacks], left: Mapping[int, Arrival]) -> None:
        """Put tokens where zeros are."""
        wanted: dict[int, _Pieces] = {}
        for lane, one in packs.items():
            wanted[2 * lane] = _Pieces(
                ids=one.ids, starts=one.starts, lengths=one.stops - one.starts, tokens=one.tokens
            )
        for lane, rest in left.items():
            wanted[2 * lane + 1] = _Pieces(
                ids=rest.ids, starts=rest.firsts, lengths=np.diff(rest.offsets), tokens=rest.tokens
            )
        # A document that came again, in the next epoch, is read again too: its tokens are the same.
        known = {key: np.isin(one.ids, self._waited[key // 2]) for key, one in wanted.items()}
        found = self._intake.waiting(
            {key: _record(one, known[key]) for key, one in wanted.items() if known[key].any()}
        )
        for key, arrival in found.items():
            is_unread = np.repeat(known[key], wanted[key].lengths)
            wanted[key].tokens[is_unread] = arrival.tokens


def _record(pieces: _Pieces, which: npt.NDArray[np.bool_]) -> LaneRecord:
    ids = pieces.ids[which]
    return LaneRecord(
        ids=ids,
        starts=pieces.starts[which],
        lengths=pieces.lengths[which],
        ages=np.zeros(len(ids), np.int32),
        counts=Counts(),
        is_masked=False,
    )
