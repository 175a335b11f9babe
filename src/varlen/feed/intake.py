"""What lanes take in: claimed chunks, read side by side, and documents that waited when a state was saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from varlen.documents.block_reader import BlockReader, Chunk, Raw, Read, encode
from varlen.documents.source import Source
from varlen.errors import StateError
from varlen.feed.claims import Claim
from varlen.feed.lane import RECORD_BITS, Arrival, arrival_of, chunk_of, joined
from varlen.feed.record import LaneRecord
from varlen.files.losses import Losses
from varlen.files.rows import losses_of
from varlen.types import IntArray

_TASKS_A_THREAD = 16
"""Many enough that no thread is left with much while others have nothing."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Brought:
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

    def read(self, claims: Sequence[Claim], soon: Sequence[Chunk] = ()) -> list[Brought | Exception]:
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
        """Take the documents, who reads their blocks, and how many blocks are read side by side."""
        self._source, self._reader, self._threads = source, reader, threads
        self._is_alone = reader.num_blocks == 1
        self._begun: dict[Chunk, Future[Brought | Exception]] = {}
        """Chunks that nobody has claimed yet."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="varlen-read") if threads > 1 else None

    def close(self) -> None:
        """End the threads, and close the files."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def read(self, claims: Sequence[Claim], soon: Sequence[Chunk] = ()) -> list[Brought | Exception]:
        """Return what each claim brings, or why it brings nothing; an error hides none of another lane.

        Args:
            claims: whose chunks are wanted.
            soon: chunks that will be wanted next: they are read meanwhile, and while nothing is asked for.
        """
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
        found: list[Brought | Exception] = []
        for claim in claims:
            future = begun[claim.chunk]
            one = next(brought) if future is None else future.result()
            found.append(one if isinstance(one, Exception) else replace(one, claim=claim))
        return found

    def _alone(self, chunk: Chunk) -> Brought | Exception:
        """Read a chunk before anybody has claimed it."""
        claim = Claim(lane=-1, epoch=-1, chunk=chunk)
        try:
            return self._bring(claim, self._reader.rows(chunk))
        except Exception as error:
            return error

    def _bring(self, claim: Claim, raw: Raw | Exception) -> Brought | Exception:
        if isinstance(raw, Exception):
            return raw
        try:
            read = encode(raw, self._source)
            arrival = arrival_of(read, claim.chunk, is_alone=self._is_alone)
        except Exception as error:
            return error
        documents = read.documents
        return Brought(
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
        """Whether the documents that wait may be read after others, at no more cost than before them.

        Raises:
            StateError: they aren't there.
        """
        wanted = [chunk for chunk, _ in self._wanted(records)]
        return not any(record.is_masked for record in records) and all(map(self._reader.is_cut, wanted))

    def waiting(self, records: Mapping[int, LaneRecord]) -> dict[int, Arrival]:
        """Return the documents that wait in each lane; only they are encoded.

        Raises:
            StateError: they aren't there, or are shorter than they were.
            SourceError: a file can't be read any more.
        """
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
        """Return the chunks that hold the documents that wait, and which of their documents these are.

        Raises:
            StateError: there are no such chunks.
            SourceError: their file can't be read that far.
        """
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
    """Return the pieces that a record names.

    Raises:
        StateError: a document isn't there, or has fewer tokens than it had.
    """
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
    brought: Iterable[Brought | Exception], claims: Sequence[Claim]
) -> dict[int, list[Brought | Exception]]:
    """Return what was brought to each lane, in the order of its claims."""
    found: dict[int, list[Brought | Exception]] = defaultdict(list)
    for one, claim in zip(brought, claims):
        found[claim.lane].append(one)
    return found
