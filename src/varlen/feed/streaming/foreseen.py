"""The packs that a loader would build, computed from documents' lengths alone, before anything is tokenized.

Both modes run as in training, over documents of blank tokens: the windows and groups of a token store, or the lanes
and rounds of streaming. Only the bounds of a file's blocks aren't known; they are estimated from the lengths, with a
fixed number of bytes per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from varlen.arguments import LARGEST
from varlen.documents.block_reader import Chunk
from varlen.documents.blocks import Blocks, block_bytes_for
from varlen.errors import SourceError
from varlen.feed.exchange import Solo
from varlen.feed.indexed.stream import PackStream, Position
from varlen.feed.indexed.windows import PARTS_A_GROUP
from varlen.feed.opening import batch_settings, streaming_settings, usual_window, window_settings
from varlen.feed.settings import LoaderSettings
from varlen.feed.spec import grouped
from varlen.feed.streaming.feed import round_settings
from varlen.feed.streaming.intake import ChunkSequence, Claim, ReadChunk, blank_arrival
from varlen.feed.streaming.lane import RECORD_BITS, Arrival, LaneRecord, chunk_of, document_ids
from varlen.feed.streaming.rounds import Rounds
from varlen.files.losses import NO_LOSSES
from varlen.store.blank import BlankTokens
from varlen.types import Int32Array, IntArray

PackedLengths = tuple[IntArray, IntArray]
"""int64 `[pieces]`: the length of each; and `[packs + 1]`: pack p holds the pieces `offsets[p]:offsets[p + 1]`."""
BYTES_A_TOKEN = 4
"""Approximate bytes of text per token."""


def indexed_packs(lengths: Int32Array, shards: IntArray | None, settings: LoaderSettings) -> PackedLengths:
    """Return the packs of an epoch of a token store.

    Args:
        lengths: int32 `[documents]`, including empty documents.
        shards: int64 `[parts]`: number of documents of each part of the store; None: one part.
    """
    tokens = BlankTokens(lengths, shards)
    windows = grouped(tokens, window_settings(settings, usual_window(settings)), PARTS_A_GROUP)
    packs = PackStream(windows, 1).take(Position(), LARGEST)[0]
    return packs.lengths, packs.offsets


def streamed_packs(
    lengths: Int32Array, settings: LoaderSettings, bytes_a_token: int = BYTES_A_TOKEN
) -> PackedLengths:
    """Return the packs of an epoch in streaming mode, without the masked packs at its end.

    Args:
        lengths: int32 `[documents]`, including empty documents.
    """
    chosen = streaming_settings(settings)
    chunks = _Chunks(lengths, bytes_a_token, chosen.lanes)
    sequence = ChunkSequence(chunks.blocks, chunks, chosen.seed, chosen.epochs)
    rounds = Rounds(
        sequence,
        chunks,
        Solo(),
        round_settings(chosen, batch_settings(settings), chunks.blocks.block_bytes),
        range(chosen.lanes),
    )
    pieces: list[IntArray] = [np.zeros(0, np.int64)]
    sizes: list[IntArray] = [np.zeros(0, np.int64)]
    for one in rounds.run({}, 0):
        for packs in one.packs.values():
            pieces.append(packs.lengths)
            sizes.append(np.diff(packs.offsets))
    counts = np.concatenate(sizes)
    return np.concatenate(pieces), np.concatenate([[0], np.cumsum(counts[counts > 0])]).astype(np.int64)


class _Chunks:
    """Blocks of documents of known lengths; implements `Chunks` and `ChunkReader` without files."""

    def __init__(self, lengths: Int32Array, bytes_a_token: int, lanes: int) -> None:
        ends = np.cumsum(lengths, dtype=np.int64) * bytes_a_token
        total = int(ends[-1]) if ends.size else 0
        block_bytes = block_bytes_for(total, lanes)
        count = -(-total // block_bytes)
        # A document belongs to the block in which it begins, like a line of a file.
        begins = np.concatenate([[0], ends[:-1]]) if ends.size else ends
        cuts = np.searchsorted(begins, np.arange(count + 1) * block_bytes)
        cuts[-1:] = lengths.size
        self._lengths, self._cuts = lengths, cuts
        self.ends: dict[int, tuple[int, str]] = {}
        numbers = np.arange(count)
        self.blocks = Blocks(
            files=np.zeros(count, np.int64),
            starts=numbers * block_bytes,
            stops=(numbers + 1) * block_bytes,
            parts=np.zeros(count, np.int64),
            of_parts=np.ones(count, np.int64),
            sizes=np.full(count, block_bytes),
            block_bytes=block_bytes,
            is_cached=True,
            lanes=lanes,
        )

    def has(self, chunk: Chunk) -> bool:
        """Return whether a chunk exists; each block is one chunk."""
        return chunk.number == 0

    def is_live(self, block: int) -> bool:  # noqa: ARG002 - none is
        """Return False: no block is an iterable."""
        return False

    def name_of(self, block: int) -> str:
        """Name a block."""
        return f"block {block:,}"

    def error_of(self, block: int) -> SourceError | None:  # noqa: ARG002 - all can be read
        """Return None: every block can be read."""
        return None

    def row_hash_of(self, chunk: Chunk) -> str:  # noqa: ARG002 - none has rows that come while they are read
        """Return no hash, as only those of iterables are used."""
        return ""

    def read(
        self,
        claims: Sequence[Claim],
        soon: Sequence[Chunk] = (),  # noqa: ARG002 - nothing has to be read ahead
    ) -> list[ReadChunk | Exception]:
        """Return the blank documents of each claim."""
        return [self._bring(claim) for claim in claims]

    def _bring(self, claim: Claim) -> ReadChunk:
        block = claim.chunk.block
        lengths = self._lengths[self._cuts[block] : self._cuts[block + 1]].astype(np.int64)
        arrival = Arrival(
            ids=document_ids(block, 0, np.arange(lengths.size), is_single=len(self.blocks) == 1),
            firsts=np.zeros(lengths.size, np.int64),
            ages=np.zeros(lengths.size, np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            tokens=np.zeros(int(lengths.sum()), np.int32),
            mask=None,
        )
        return ReadChunk(
            claim=claim,
            path=self.name_of(block),
            arrival=arrival,
            faults=(),
            losses=NO_LOSSES,
            outside=NO_LOSSES,
        )

    def can_wait(self, records: Iterable[LaneRecord]) -> bool:  # noqa: ARG002 - there are none
        """Return True: at the beginning of training no document waits."""
        return True

    def waiting(self, records: Mapping[int, LaneRecord]) -> dict[int, Arrival]:
        """Return the waiting documents with blank tokens."""
        return {lane: blank_arrival(record) for lane, record in records.items()}

    def chunks_of(self, ids: Sequence[IntArray]) -> list[Chunk]:
        """Return the chunks of documents."""
        chunks = np.unique(np.concatenate([np.zeros(0, np.int64), *ids]) >> RECORD_BITS)
        return [chunk_of(one << RECORD_BITS, is_single=len(self.blocks) == 1) for one in chunks.tolist()]
