"""The input of lanes: claimed chunks, read in parallel, and documents that were waiting when a state was saved."""

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
"""Enough tasks that all threads end at about the same time."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadChunk:
    """The documents of a claimed chunk."""

    claim: Claim
    path: str
    arrival: Arrival
    faults: tuple[str, ...]
    """Messages about records that couldn't be read."""
    losses: Losses
    """Losses of these records, and what chat templates left out."""
    outside: Losses
    """The losses whose cause is a disk or server, not the file: another epoch may be able to read these records."""


class ChunkReader(Protocol):
    """The methods of `Intake` that `Rounds` uses."""

    def read(self, claims: Sequence[Claim], soon: Sequence[Chunk] = ()) -> list[ReadChunk | Exception]:
        """Return the documents of each claim, or its error."""

    def can_wait(self, records: Iterable[LaneRecord]) -> bool:
        """Return whether the waiting documents can be read later."""

    def waiting(self, records: Mapping[int, LaneRecord]) -> dict[int, Arrival]:
        """Return the waiting documents of each record, by the records' keys; encodes only these."""

    def chunks_of(self, ids: Sequence[IntArray]) -> list[Chunk]:
        """Return the chunks of documents, without duplicates."""


class Intake:
    """Reads chunks on several threads; results are in the order of the claims."""

    def __init__(self, source: Source, reader: BlockReader, threads: int) -> None:
        self._source, self._reader, self._threads = source, reader, threads
        self._is_single = reader.num_blocks == 1
        self._early: dict[Chunk, Future[ReadChunk | Exception]] = {}
        """Chunks being read that aren't claimed yet."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="varlen-read") if threads > 1 else None

    def close(self) -> None:
        """End the threads, and close the files."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def read(self, claims: Sequence[Claim], soon: Sequence[Chunk] = ()) -> list[ReadChunk | Exception]:
        """Return the documents of each claim, or its error; begins to read the chunks `soon`."""
        # A chunk may be claimed twice, in two epochs of little data.
        early = {chunk: self._early.pop(chunk, None) for chunk in dict.fromkeys(c.chunk for c in claims)}
        others = [claim for claim in claims if early[claim.chunk] is None]
        raws = self._rows([claim.chunk for claim in others])
        waits = self._begin(lambda of: self._bring(*of), list(zip(others, raws)))
        if self._pool is not None:
            for chunk in soon:
                if chunk not in self._early:
                    self._early[chunk] = self._pool.submit(self._read_early, chunk)
        fresh = iter(waits())
        results: list[ReadChunk | Exception] = []
        for claim in claims:
            future = early[claim.chunk]
            result = next(fresh) if future is None else future.result()
            results.append(result if isinstance(result, Exception) else replace(result, claim=claim))
        return results

    def _read_early(self, chunk: Chunk) -> ReadChunk | Exception:
        """Read a chunk before it is claimed."""
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
            arrival = arrival_of(read, claim.chunk, is_single=self._is_single)
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
        """Read the rows of chunks; chunks of the same stretch are read sequentially."""
        stretches: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index in sorted(
            range(len(chunks)), key=lambda index: (chunks[index].block, chunks[index].number)
        ):
            stretches[self._reader.stretch_of(chunks[index])].append(index)
        rows: dict[int, Raw | Exception] = {}

        def read(indexes: list[int]) -> None:
            for index in indexes:
                try:
                    rows[index] = self._reader.rows(chunks[index])
                except Exception as error:
                    rows[index] = error

        self._each(read, list(stretches.values()))
        self._reader.forget()
        return [rows[index] for index in range(len(chunks))]

    def _each(self, do: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        return self._begin(do, items)()

    def _begin(self, do: Callable[[_Item], _Result], items: Sequence[_Item]) -> Callable[[], list[_Result]]:
        """Start `do` on each item; returns a function that waits for all results."""
        if self._pool is None or len(items) < 2:
            return lambda: [do(item) for item in items]
        # Several items form a task, as submitting a task takes as long as reading a small chunk.
        size = -(-len(items) // (_TASKS_A_THREAD * self._threads))
        groups = [items[start : start + size] for start in range(0, len(items), size)]
        results = self._pool.map(lambda group: [do(item) for item in group], groups)
        return lambda: [result for some in results for result in some]

    def can_wait(self, records: Iterable[LaneRecord]) -> bool:
        """Return whether the waiting documents can be read later at no extra cost."""
        wanted = [chunk for chunk, _ in self._wanted(records)]
        return not any(record.is_masked for record in records) and all(map(self._reader.is_cut, wanted))

    def waiting(self, records: Mapping[int, LaneRecord]) -> dict[int, Arrival]:
        """Return the waiting documents of each record, by the records' keys; encodes only these."""
        wanted = self._wanted(records.values())
        raws = self._rows([chunk for chunk, _ in wanted])
        source = replace(self._source, on_error="skip")  # bad records were reported, and none of them waits

        def read(rows: tuple[Raw | Exception, IntArray]) -> Read:
            raw, ids = rows
            if isinstance(raw, Exception):
                raise raw
            return encode(raw, source, ids & ((1 << RECORD_BITS) - 1))

        reads = self._each(read, [(raw, ids) for raw, (_, ids) in zip(raws, wanted)])
        parts = [arrival_of(one, chunk, is_single=self._is_single) for one, (chunk, _) in zip(reads, wanted)]
        documents = joined(parts)
        return {key: _chosen(documents, record) for key, record in records.items()}

    def chunks_of(self, ids: Sequence[IntArray]) -> list[Chunk]:
        """Return the chunks of documents, without duplicates, in ascending order."""
        chunks = np.unique(np.concatenate([np.zeros(0, np.int64), *ids]) >> RECORD_BITS)
        return [chunk_of(chunk << RECORD_BITS, is_single=self._is_single) for chunk in chunks.tolist()]

    def _wanted(self, records: Iterable[LaneRecord]) -> list[tuple[Chunk, IntArray]]:
        """Return the chunks of the waiting documents, each with the numbers of its waiting documents."""
        ids = np.unique(np.concatenate([np.zeros(0, np.int64), *(record.ids for record in records)]))
        which = np.unique(ids >> RECORD_BITS, return_inverse=True)[1]
        wanted = [(chunk, ids[which == index]) for index, chunk in enumerate(self.chunks_of([ids]))]
        for chunk, _ in wanted:
            if not 0 <= chunk.block < self._reader.num_blocks or not self._reader.has(chunk):
                if (error := self._reader.error_of(chunk.block)) is not None:
                    raise error
                raise StateError(
                    f"the state has waiting documents of block {chunk.block:,}, chunk {chunk.number:,}, which this "
                    "data doesn't have; give the loader the data of the state, or start over"
                )
        return wanted


def _chosen(documents: Arrival, record: LaneRecord) -> Arrival:
    """Return the pieces of a record, taken from read documents."""
    order = np.argsort(documents.ids, kind="stable")
    at = np.searchsorted(documents.ids[order], record.ids)
    known = at < len(order)
    known[known] = documents.ids[order][at[known]] == record.ids[known]
    index = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(0, np.int64)
    short = ~known
    if known.all():
        short = np.diff(documents.offsets)[index] < record.starts + record.lengths
    if short.any():
        raise StateError(
            f"{int(short.sum()):,} of {len(short):,} documents that waited aren't what they were; the data or the "
            "tokenizer has changed: give the loader those of the state, or start over"
        )
    tokens, mask = documents.pieces(index, record.starts, record.starts + record.lengths)
    return Arrival(
        ids=record.ids,
        firsts=record.starts,
        ages=record.ages,
        offsets=np.concatenate([[0], np.cumsum(record.lengths)]).astype(np.int64),
        tokens=tokens,
        mask=mask,
    )


def by_lane(
    results: Iterable[ReadChunk | Exception], claims: Sequence[Claim]
) -> dict[int, list[ReadChunk | Exception]]:
    """Return the results of each lane's claims, in their order."""
    lanes: dict[int, list[ReadChunk | Exception]] = defaultdict(list)
    for result, claim in zip(results, claims):
        lanes[claim.lane].append(result)
    return lanes


# Assignment of chunks to lanes: lanes claim the chunks of one sequence in order, by what each lane holds.


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Claimed:
    """How far the input has been claimed."""

    epoch: int = 0
    index: int = 0
    """Number of blocks, in the epoch's order, that are completely claimed."""
    chunk: int = 0
    """Number of chunks claimed of the next block, if that can't be cut in advance."""


RowsHash = tuple[int, int, str, bool]
"""A block, a chunk of it, the hash of all rows to the chunk's end, and whether the block's rows end there."""


def as_claimed(at: Mapping[str, Any]) -> Claimed:
    """Read a position from a state."""
    with reading_state("a loader"):
        return Claimed(**{name: as_count(at[name], name, 0, MOST) for name in ("epoch", "index", "chunk")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A chunk, and the lane that takes it."""

    lane: int
    epoch: int
    chunk: Chunk


class Chunks(Protocol):
    """The methods of `BlockReader` that `ChunkSequence` uses."""

    ends: dict[int, tuple[int, str]]

    def has(self, chunk: Chunk) -> bool:
        """Return whether a chunk exists."""

    def is_live(self, block: int) -> bool:
        """Return whether a block's rows come from an iterable."""

    def name_of(self, block: int) -> str:
        """Return the name of a block's file for messages."""

    def error_of(self, block: int) -> SourceError | None:
        """Return the error that stopped the reading of a block that can't be cut."""

    def row_hash_of(self, chunk: Chunk) -> str:
        """Return the hash of all rows to the end of a chunk."""


class ChunkSequence:
    """The chunks of all epochs, one after the other."""

    def __init__(self, blocks: Blocks, reader: Chunks, seed: int | None, epochs: int | None) -> None:
        self._blocks, self._reader, self._seed, self._epochs = blocks, reader, seed, epochs
        self._order = lru_cache(2)(blocks.order)
        self._about = blocks.chunks_about()

    def until(self, epochs: int | None) -> ChunkSequence:
        """Return the sequence of the first `epochs` epochs; None: this sequence."""
        if epochs is None:
            return self
        shorter = copy.copy(self)
        shorter._epochs = epochs
        return shorter

    def next(self, at: Claimed) -> tuple[tuple[int, Chunk] | None, Claimed]:
        """Return the epoch and chunk at a position (None at the end of the input), and the position after it."""
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
        """Return chunks among the epoch's next `count` blocks that can be read independently of others."""
        if self.is_over(at):
            return []
        blocks = self._order(self._seed, at.epoch)[at.index : at.index + count]
        return [Chunk(block=block) for block in blocks[self._blocks.of_parts[blocks] == 1].tolist()]

    def is_over(self, at: Claimed) -> bool:
        """Return whether no chunk follows, as far as is known without reading."""
        is_last = self._epochs is not None and at.epoch >= self._epochs
        return is_last or len(self._blocks) == 0

    @property
    def live_name(self) -> str:
        """Name of the first iterable for messages."""
        live = [block for block in range(len(self._blocks)) if self._reader.is_live(block)]
        return self._reader.name_of(live[0]) if live else "the data"

    def row_hashes(self, at: Claimed) -> list[RowsHash]:
        """Return hashes of iterables' rows: up to a position, and up to the ends that are known."""
        row_hashes: list[RowsHash] = []
        if at.chunk and not self.is_over(at):
            block = int(self._order(self._seed, at.epoch)[at.index])
            if self._reader.is_live(block):
                last = at.chunk - 1
                row_hashes.append(
                    (block, last, self._reader.row_hash_of(Chunk(block=block, number=last)), False)
                )
        return row_hashes + [(block, *end, True) for block, end in sorted(self._reader.ends.items())]

    def check(self, row_hashes: Sequence[RowsHash]) -> None:
        """Read iterables' rows again up to a state's position, and refuse rows with other hashes."""
        for block, last, saved, is_end in sorted(row_hashes):
            is_known = block < len(self._blocks) and self._reader.is_live(block)
            if not is_known or self._reader.row_hash_of(Chunk(block=block, number=last)) != saved:
                if is_known and (error := self._reader.error_of(block)) is not None:
                    raise error
                name = self._reader.name_of(block) if is_known else "the data"
                raise StateError(
                    f"{name} gives other rows than when the state was saved, or the same in another order; make the "
                    "loader with an iterable that gives the same rows each time (seeded alike), or start over"
                )
            if is_end:
                self._reader.ends[block] = (last, saved)

    def left(self, at: Claimed) -> float:
        """Estimate the number of chunks that follow."""
        if self._epochs is None:
            return float("inf")
        if self.is_over(at):
            return 0
        epochs = self._epochs - 1 - at.epoch
        order: IntArray = self._order(self._seed, at.epoch)
        return float(self._about[order[at.index :]].sum() - at.chunk + epochs * self._about.sum())


def deal_claims(held: Sequence[int], targets: Sequence[int], tokens_a_chunk: float, most: int) -> list[int]:
    """Return the lanes of the next claims: each time the lane that holds the least, earlier claims included.

    Lanes hold `held` tokens and need `targets`; a chunk is estimated to have `tokens_a_chunk`.

    >>> deal_claims([5, 0, 9], [9, 9, 9], tokens_a_chunk=3, most=4)
    [1, 1, 0, 1]
    """
    lowest = [(float(tokens), lane) for lane, tokens in enumerate(held) if tokens < targets[lane]]
    heapq.heapify(lowest)
    lanes: list[int] = []
    while lowest and len(lanes) < most:
        tokens, lane = heapq.heappop(lowest)
        lanes.append(lane)
        if tokens + tokens_a_chunk < targets[lane]:
            heapq.heappush(lowest, (tokens + tokens_a_chunk, lane))
    return lanes


# Documents that were waiting when a state was saved: lengths are known, so the round is packed before they are read.


def blank_arrival(record: LaneRecord) -> Arrival:
    """Return the documents of a record with zeros for tokens, which `PostponedReads` replaces."""
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
    """Pieces end to end; the tokens of some are still zeros."""

    ids: IntArray
    starts: IntArray
    lengths: IntArray
    tokens: Int32Array


class PostponedReads:
    """Documents that were packed before they were read."""

    def __init__(self, intake: ChunkReader, records: Mapping[int, LaneRecord]) -> None:
        self._intake = intake
        self._waited = {lane: record.ids for lane, record in records.items()}

    def bring(self, packs: Mapping[int, LanePacks], left: Mapping[int, Arrival]) -> None:
        """Read the documents of packs, and those left for the next round; replaces their zeros."""
        # Keys are 2 * lane for the lane's packs, and 2 * lane + 1 for what is left for the next round.
        wanted: dict[int, _Pieces] = {}
        for lane, some in packs.items():
            wanted[2 * lane] = _Pieces(
                ids=some.ids, starts=some.starts, lengths=some.lengths, tokens=some.tokens
            )
        for lane, rest in left.items():
            wanted[2 * lane + 1] = _Pieces(
                ids=rest.ids, starts=rest.firsts, lengths=np.diff(rest.offsets), tokens=rest.tokens
            )
        # A document that was read in the next epoch too is replaced by the same tokens.
        known = {key: np.isin(pieces.ids, self._waited[key // 2]) for key, pieces in wanted.items()}
        arrivals = self._intake.waiting(
            {key: _record(pieces, known[key]) for key, pieces in wanted.items() if known[key].any()}
        )
        for key, arrival in arrivals.items():
            is_blank = np.repeat(known[key], wanted[key].lengths)
            wanted[key].tokens[is_blank] = arrival.tokens


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
