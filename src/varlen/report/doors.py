"""What packs documents of ours, each way under its own name, run on lengths as it runs on documents.

`varlen pack` and the loader take documents in random order and window by window, with a packer that keeps packs
random samples; `vl.pack` takes lengths at once, in the order in which they are given. Their packs differ, so each is
measured by the code that makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from varlen.feed.settings import LoaderSettings
from varlen.feed.streaming.foreseen import BYTES_A_TOKEN, indexed_packs, streamed_packs
from varlen.offline.pack import PackSettings, Plan
from varlen.pack.api import pack
from varlen.store.blank import BlankTokens
from varlen.types import Int32Array, IntArray, Method, Overlong

STEP_PACKS = 8
"""Packs of a step that a loader is measured with: streaming has as many lanes."""
MOST_STREAMED, MOST_STREAMED_PACKS = 10_000, 4_000
"""Documents, and packs that they fill, that streaming is measured on; its rounds take a while."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """Packs that documents were put into: pack p holds the pieces `offsets[p]:offsets[p + 1]`."""

    overlong: Overlong
    lengths: IntArray | Int32Array
    """`[pieces]`."""
    offsets: IntArray
    """int64 `[packs + 1]`."""
    document_ids: IntArray | None = None
    """int64 `[pieces]`: the number of each piece's document in the data, where it is known."""
    split_documents: int = 0

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Given:
    """The documents that are packed, as they stand in the data."""

    lengths: Int32Array
    """int32 `[documents]`, empty ones too."""
    ids: IntArray
    """int64 `[documents]`: the number of each in the data."""
    parts: IntArray | None
    """int64: documents of each part of the data that is tokenized by itself; None: it is one."""
    bytes_a_token: int = BYTES_A_TOKEN
    """Of the files, about."""

    def streamed(self, capacity: int) -> Int32Array:
        """Return those that streaming is measured on at a capacity: all, or evenly spread ones."""
        size, packs = self.lengths.size, int(self.lengths.sum(dtype=np.int64)) / capacity
        most = min(MOST_STREAMED, max(1, int(size * MOST_STREAMED_PACKS / packs))) if packs else size
        if size <= most:
            return self.lengths
        return self.lengths[np.linspace(0, size - 1, most).astype(np.int64)]


def by_pack(given: Given, capacity: int, method: Method, *, is_named: bool = True) -> Packed:
    """Pack as `varlen pack --method` does; `is_named`: whether it is to be known which documents stand in packs."""
    tokens = BlankTokens(given.lengths, given.parts)
    plan = Plan(tokens, PackSettings(capacity=capacity, method=method))
    found = [packing for packing in plan.packings() if packing.num_packs]
    sizes = np.concatenate([np.zeros(0, np.int64), *(np.diff(packing.offsets) for packing in found)])
    first = np.concatenate([[0], np.cumsum(tokens.documents)])
    located = [plan.located(packing.document_ids) for packing in found] if is_named else []
    return Packed(
        overlong=PackSettings(capacity=capacity).overlong,
        document_ids=np.concatenate(
            [np.zeros(0, np.int64), *(given.ids[first[shards] + numbers] for shards, numbers in located)]
        )
        if is_named
        else None,
        lengths=np.concatenate([np.zeros(0, np.int32), *(packing.lengths for packing in found)]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        split_documents=plan.ledger.split_documents,
    )


def by_lengths(given: Given, capacity: int, method: Method) -> Packed:
    """Pack as `vl.pack(lengths, method=)` does, in the order of the data, and split what is longer."""
    packing = pack(given.lengths, capacity, method, "split")
    return Packed(
        overlong="split",
        lengths=packing.lengths,
        offsets=packing.offsets,
        document_ids=given.ids[packing.document_ids],
        split_documents=packing.ledger.split_documents,
    )


def by_index(given: Given, capacity: int) -> Packed:
    """Pack as `vl.PackedLoader` does with a token store."""
    settings = _loader(capacity)
    lengths, offsets = indexed_packs(given.lengths, given.parts, settings)
    return Packed(overlong=settings.overlong, lengths=lengths, offsets=offsets)


def by_stream(given: Given, capacity: int) -> Packed:
    """Pack as `vl.PackedLoader` does with documents that it reads as they come."""
    settings = _loader(capacity)
    lengths, offsets = streamed_packs(given.streamed(capacity), settings, given.bytes_a_token)
    return Packed(overlong=settings.overlong, lengths=lengths, offsets=offsets)


def _loader(capacity: int) -> LoaderSettings:
    """Return a loader's settings as they are unless changed; nothing is read, so rank 0 of 1 may ask anywhere."""
    return LoaderSettings(capacity=capacity, global_batch_size=STEP_PACKS, dp_rank=0, dp_world_size=1)
