"""Which lane reads which chunk: every claim is the next of one sequence, and so follows from those before."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from varlen.documents.block_reader import Chunk
from varlen.documents.blocks import Blocks
from varlen.errors import SourceError, StateError
from varlen.feed.state import MOST
from varlen.pack.lengths import as_count
from varlen.types import IntArray


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
    """Return a position of a state.

    Raises:
        StateError: it is none.
    """
    try:
        return Claimed(**{name: as_count(at[name], name, 0, MOST) for name in ("epoch", "index", "chunk")})
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is no state of a loader: {type(error).__name__} {error}") from None


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
        """Take the blocks of an epoch, who reads them, the seed of their order and how many epochs there are."""
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
        """Return the epoch and chunk at a position, None where the input has ended, and the position after it.

        Raises:
            SourceError: a file that can't be cut can't be opened.
        """
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
        """Read rows again up to where a state stands, and require that they are what they were.

        Args:
            prints: of the state.

        Raises:
            StateError: they aren't.
            SourceError: they can't be read that far.
        """
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

    Args:
        held: tokens of each lane.
        targets: what each is to hold.
        brings: tokens that a chunk brings, about.
        most: claims at most; few where the input may soon end, so that the next ones can even out what these bring.

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
