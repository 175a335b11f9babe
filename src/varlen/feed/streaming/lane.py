"""A lane: its waiting documents, the packs of a round, and its record in a state."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.arguments import as_count
from varlen.documents.block_reader import Chunk, Read
from varlen.documents.order import hashed
from varlen.errors import SettingError, SourceError, StateError, reading_state
from varlen.feed.state import MOST
from varlen.files.losses import NO_LOSSES, Losses
from varlen.pack.passes import Passes, Waiting, arrived, take
from varlen.pack.pieces import POLICIES, applied, check_fit, slots_of
from varlen.text.loss_masks import Mask, all_weigh_one, as_marks, end_to_end
from varlen.types import Int32Array, IntArray, Overlong

BLOCK_BITS, CHUNK_BITS, RECORD_BITS = 25, 18, 20
"""Bits of a document's number: its block, the chunk of a block that can't be cut, and its record in the chunk."""


def document_ids(block: int, chunk: int, records: IntArray, *, is_single: bool = False) -> IntArray:
    """Return numbers unique within a data set, the same in every epoch; `is_single`: the data is one block."""
    most = int(records.max()) if len(records) else 0
    chunk_bits = CHUNK_BITS + (BLOCK_BITS if is_single else 0)
    if block >= 1 << BLOCK_BITS or chunk >= 1 << chunk_bits or most >= 1 << RECORD_BITS:
        raise SourceError(
            f"record {most:,} of chunk {chunk:,} of block {block:,} is beyond what streaming can tell apart "
            f"({1 << RECORD_BITS:,}, {1 << chunk_bits:,}, {1 << BLOCK_BITS:,}); index the data instead (varlen index)"
        )
    return (((block << CHUNK_BITS) | chunk) << RECORD_BITS) + records


def chunk_of(document_id: int, *, is_single: bool = False) -> Chunk:
    """Return the chunk of a document."""
    number = document_id >> RECORD_BITS
    if is_single:
        return Chunk(block=0, number=number)
    return Chunk(block=number >> CHUNK_BITS, number=number & ((1 << CHUNK_BITS) - 1))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrival:
    """Documents, or their remaining parts, end to end."""

    ids: IntArray
    """int64 `[documents]`."""
    firsts: IntArray
    """int64 `[documents]`: index of the first token within the document; above 0 if earlier tokens are packed."""
    ages: Int32Array
    """int32 `[documents]`: number of rounds that each has waited."""
    offsets: IntArray
    """int64 `[documents + 1]`."""
    tokens: Int32Array
    mask: Mask | None

    def pieces(self, index: IntArray, starts: IntArray, stops: IntArray) -> tuple[Int32Array, Mask | None]:
        """Gather the tokens of pieces, and their mask."""
        firsts = self.offsets[index]
        parts = [slice(*part) for part in zip((firsts + starts).tolist(), (firsts + stops).tolist())]

        def gathered(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([values[:0], *(values[part] for part in parts)])

        return gathered(self.tokens), None if self.mask is None else gathered(self.mask)


def arrival_of(read: Read, chunk: Chunk, *, is_single: bool = False) -> Arrival:
    """Return a chunk's documents as an arrival; `is_single` as in `document_ids`."""
    documents = read.documents
    return Arrival(
        ids=document_ids(chunk.block, chunk.number, read.records, is_single=is_single),
        firsts=np.zeros(len(documents), np.int64),
        ages=np.zeros(len(documents), np.int32),
        offsets=documents.offsets,
        tokens=documents.tokens,
        mask=documents.loss_mask,
    )


def joined(parts: Sequence[Arrival]) -> Arrival:
    """Put documents end to end."""
    mask = end_to_end([part.mask for part in parts], [len(part.tokens) for part in parts])
    none, none32 = np.zeros(0, np.int64), np.zeros(0, np.int32)
    lengths = np.concatenate([none, *(np.diff(part.offsets) for part in parts)])
    return Arrival(
        ids=np.concatenate([none, *(part.ids for part in parts)]),
        firsts=np.concatenate([none, *(part.firsts for part in parts)]),
        ages=np.concatenate([none32, *(part.ages for part in parts)]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.concatenate([none32, *(part.tokens for part in parts)]),
        mask=mask,
    )


def shuffle_keys(ids: IntArray, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Return sort keys that shuffle the documents of a round."""
    return hashed(ids, int(hashed(np.array([epoch]), seed + 1)[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What a lane has read since training began."""

    documents: int = 0
    tokens: int = 0
    claims: int = 0
    losses: Losses = NO_LOSSES
    """Records that can't be read, and what chat templates leave out."""
    empty_documents: int = 0
    split_documents: int = 0
    truncated: int = 0
    """Tokens, as `dropped`."""
    truncated_documents: int = 0
    dropped: int = 0
    dropped_documents: int = 0

    def plus(self, more: Mapping[str, Any]) -> Counts:
        """Return the sums."""
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        counts = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**counts, "losses": self.losses.to_json()}

    @staticmethod
    def losses_in(values: Mapping[str, Any]) -> Losses:
        """Read only the losses from the values of `to_json`."""
        return Losses.from_json(values["losses"] if "losses" in values else {"records": values["skipped"]})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Counts:
        """Read the values of `to_json`; states of version 0.1.0 hold a number of skipped records, and no losses."""
        names = [one.name for one in fields(cls) if one.name != "losses"]
        losses = cls.losses_in(values)
        for number in losses.numbers():
            as_count(number, "losses", 0, MOST)
        return cls(**{name: as_count(values[name], name, 0, MOST) for name in names}, losses=losses)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LanePacks:
    """Packs of one lane in a round: pack p holds the pieces `offsets[p]:offsets[p + 1]`."""

    ids: IntArray
    """int64 `[pieces]`: the document of each."""
    starts: IntArray
    stops: IntArray
    """int64 `[pieces]`: the piece is its document's tokens [start, stop)."""
    offsets: IntArray
    """int64 `[packs + 1]`."""
    bounds: IntArray
    """int64 `[packs + 1]`: offset of each pack's first token."""
    tokens: Int32Array
    """int32: tokens of all pieces, end to end."""
    mask: Mask | None

    @property
    def lengths(self) -> IntArray:
        """int64 `[pieces]`: tokens of each."""
        return self.stops - self.starts

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    def pack(self, number: int) -> LanePacks:
        """Return one pack; a pack without pieces if there are fewer packs."""
        pack = self.between(number, number + 1)
        return pack if pack.num_packs else replace(pack, offsets=np.array([0, 0]), bounds=np.array([0, 0]))

    def between(self, start: int, stop: int) -> LanePacks:
        """Return views of the packs [start, stop), as far as they exist."""
        start, stop = min(start, self.num_packs), min(stop, self.num_packs)
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        tokens = slice(int(self.bounds[start]), int(self.bounds[stop]))
        return LanePacks(
            ids=self.ids[first:last],
            starts=self.starts[first:last],
            stops=self.stops[first:last],
            offsets=self.offsets[start : stop + 1] - first,
            bounds=self.bounds[start : stop + 1] - tokens.start,
            tokens=self.tokens[tokens],
            mask=None if self.mask is None else self.mask[tokens],
        )

    @property
    def targets(self) -> IntArray:
        """int64 `[packs]`: labels of each pack: all supervised tokens except the first token of each piece."""
        lengths = self.lengths
        ends = np.cumsum(lengths)
        if self.mask is None:
            each = np.maximum(lengths - 1, 0)
        else:
            before = np.concatenate([[0], np.cumsum(as_marks(self.mask), dtype=np.int64)])
            each = before[ends] - before[np.minimum(ends - lengths + 1, ends)]
        return np.add.reduceat(each, self.offsets[:-1]) if len(self.offsets) > 1 else np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSettings:
    """Packing settings of a lane."""

    passes: Passes
    overlong: Overlong
    max_age: int
    seed: int | None
    """Seed of the shuffle of a round's documents; None: their order in the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The amount of waiting documents of a lane."""

    tokens: int
    """Tokens that they take up in packs, padding included."""
    short: int
    """Number of pieces shorter than a pack."""
    pieces: int

    def plus(self, more: Held) -> Held:
        """Return the sums."""
        return Held(
            tokens=self.tokens + more.tokens, short=self.short + more.short, pieces=self.pieces + more.pieces
        )

    def to_json(self) -> dict[str, int]:
        """Return JSON values, for other ranks."""
        return {"tokens": self.tokens, "short": self.short, "pieces": self.pieces}


def held_by(lengths: IntArray, settings: LaneSettings) -> Held:
    """Return the amount of documents of these lengths."""
    capacity, multiple = settings.passes.capacity, settings.passes.multiple
    lengths = POLICIES[settings.overlong].retained(lengths, capacity)
    return Held(
        tokens=int(slots_of(lengths.astype(np.int32), multiple).sum(dtype=np.int64)),
        short=int((lengths % capacity > 0).sum()),
        pieces=int((-(-lengths // capacity)).sum()),
    )


class Lane:
    """The waiting documents of one lane: few between rounds; during a round, claimed documents are added."""

    def __init__(self, settings: LaneSettings, carried: Arrival, counts: Counts) -> None:
        self._settings, self.counts = settings, counts
        self._arrived, self._epochs = [carried], [0]
        self.held = held_by(np.diff(carried.offsets), settings)

    def add(self, arrival: Arrival, epoch: int, path: str, losses: Losses) -> None:
        """Add the documents of a claim, and count its losses."""
        lengths = np.diff(arrival.offsets)
        if applied(self._settings.passes.method, self._settings.overlong) == "error":
            check_fit([lengths], self._settings.passes.capacity, lambda _: f"a document of {path}")
        self.counts = self.counts.plus(
            {
                "documents": len(lengths),
                "tokens": int(lengths.sum()),
                "claims": 1,
                "losses": losses,
                "empty_documents": int((lengths == 0).sum()),
            }
        )
        self._arrived.append(arrival)
        self._epochs.append(epoch)
        self.held = self.held.plus(held_by(lengths, self._settings))

    def pack(self, count: int | None) -> tuple[LanePacks, Arrival]:
        """Pack a round of `count` packs (None: all documents); returns its packs, and the documents left."""
        settings, here, order = self._settings, joined(self._arrived), self._order()
        lengths = np.diff(here.offsets)[order].astype(np.int32)
        passes = settings.passes
        waiting, losses = arrived(lengths, 0, passes.capacity, passes.method, settings.overlong)
        waiting = Waiting(
            records=waiting.records,
            starts=waiting.starts,
            stops=waiting.stops,
            ages=here.ages[order[waiting.records]],
        )
        self.counts = self.counts.plus(losses)
        if count is None:
            packs, rest = passes.all_of(waiting), waiting.take(slice(0, 0))
        else:
            packs, rest = take(waiting, count, passes, settings.max_age)
        pieces = packs.pieces
        index, starts, stops = (
            order[pieces.records],
            pieces.starts.astype(np.int64),
            pieces.stops.astype(np.int64),
        )
        tokens, mask = here.pieces(index, starts, stops)
        out = LanePacks(
            ids=here.ids[index],
            starts=here.firsts[index] + starts,
            stops=here.firsts[index] + stops,
            offsets=packs.offsets,
            bounds=np.concatenate([[0], np.cumsum(stops - starts)])[packs.offsets],
            tokens=tokens,
            mask=mask,
        )
        return out, _left(here, order[rest.records], rest)

    def _order(self) -> IntArray:
        """Return the order of the waiting documents: those carried over, then new ones, shuffled by the seed."""
        seed, num_carried = self._settings.seed, len(self._arrived[0].ids)
        if seed is None or len(self._arrived) == 1:
            return np.arange(sum(len(part.ids) for part in self._arrived))
        keys = [
            shuffle_keys(part.ids, seed, epoch) for part, epoch in zip(self._arrived[1:], self._epochs[1:])
        ]
        fresh = np.argsort(np.concatenate(keys), kind="stable")
        return np.concatenate([np.arange(num_carried), num_carried + fresh])


def _left(here: Arrival, index: IntArray, rest: Waiting) -> Arrival:
    """Return copies of the waiting pieces, so that the memory of the others can be released."""
    starts, stops = rest.starts.astype(np.int64), rest.stops.astype(np.int64)
    tokens, mask = here.pieces(index, starts, stops)
    return Arrival(
        ids=here.ids[index],
        firsts=here.firsts[index] + starts,
        ages=rest.ages,
        offsets=np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int64),
        tokens=tokens,
        mask=mask,
    )


# A lane's record in a state: its counts, and its waiting documents as a text of about 2 bytes per document.
#
# ::
#
#     stored    sorted by number: differences of numbers · first tokens · lengths · ages,    byte planes, zlib, base64
#     order     by arrival: older documents first, those of one round by the hash that shuffled them
#
# If the documents wait in this order, it isn't stored, as sorting restores it; otherwise it is one more column.

_COLUMNS, _WIDTH = 4, 8
_MOST_RATIO = 1100
"""Maximum compression ratio of zlib."""
_MOST_NUMBER = 2**31 - 1
"""Maximum of first tokens, lengths and ages."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaneRecord:
    """A lane's record in a state."""

    ids: IntArray
    starts: IntArray
    lengths: IntArray
    ages: Int32Array
    counts: Counts
    is_masked: bool
    """Whether any token has a weight other than 1; the weights themselves aren't stored."""


def to_record(carried: Arrival, counts: Counts, seed: int | None, epochs: Sequence[int]) -> dict[str, Any]:
    """Return a lane's record as JSON values; tries to encode the order of arrival by one of the epochs."""
    lengths, ages = np.diff(carried.offsets), carried.ages.astype(np.int64)
    table = np.stack([carried.ids, carried.firsts, lengths, ages])
    order = np.lexsort((ages, lengths, carried.firsts, carried.ids))
    stored = table[:, order]
    epoch = next(
        (one for one in epochs if np.array_equal(stored[:, _order_of_arrival(stored, seed, one)], table)),
        None,
    )
    deltas = np.diff(stored[:1], prepend=0)
    columns = [deltas, stored[1:]]
    if epoch is None:
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        columns.append(inverse[None])
    whole = np.ascontiguousarray(np.concatenate(columns), dtype="<i8")
    planes = whole.view(np.uint8).reshape(*whole.shape, _WIDTH)
    return {
        "documents": table.shape[1],
        "tokens": int(lengths.sum()),
        "waiting": base64.b64encode(zlib.compress(planes.transpose(0, 2, 1).tobytes())).decode(),
        "epoch": epoch,
        "masked": carried.mask is not None and not all_weigh_one(carried.mask),
        "counts": counts.to_json(),
    }


def _order_of_arrival(stored: IntArray, seed: int | None, epoch: int) -> IntArray:
    """Return the order of arrival of stored documents that were all read in one epoch."""
    ids, starts, _, ages = stored
    keys = ids if seed is None else shuffle_keys(ids, seed, epoch)
    return np.lexsort((starts, keys, -ages))


def from_record(record: Mapping[str, Any], seed: int | None) -> LaneRecord:
    """Read a record of `to_record`."""
    with reading_state("a loader", zlib.error):
        count, tokens = (as_count(record[name], name, 0, MOST) for name in ("documents", "tokens"))
        epoch = None if record["epoch"] is None else as_count(record["epoch"], "epoch", 0, MOST)
        counts = Counts.from_json(record["counts"])
        table = _unpacked(record["waiting"], count, _COLUMNS + (epoch is None))
        is_masked = record["masked"] is not False
    is_positive = bool((table >= 0).all())  # before the sums, which may overflow
    stored = table[:_COLUMNS]
    stored[0] = np.cumsum(stored[0])
    order = table[_COLUMNS] if epoch is None else _order_of_arrival(stored, seed, epoch)
    sound = (
        is_positive
        and bool((stored[0] >= 0).all())
        and int(stored[1:].max(initial=0)) <= _MOST_NUMBER
        and int(stored[2].sum()) == tokens
        and np.array_equal(np.sort(order), np.arange(count))
    )
    if not sound:
        raise StateError(
            f"the state's {count:,} waiting documents of {tokens:,} tokens aren't what they were; it was cut or "
            "changed. Load it as it was saved, or an earlier one"
        )
    ids, starts, lengths, ages = stored[:, order]
    return LaneRecord(
        ids=ids,
        starts=starts,
        lengths=lengths,
        ages=ages.astype(np.int32),
        counts=counts,
        is_masked=is_masked,
    )


def _unpacked(text: object, count: int, columns: int) -> IntArray:
    """Decode a record's text: int64 `[columns, count]`."""
    if not isinstance(text, str):
        raise SettingError(f"waiting must be text, got {type(text).__name__}")
    packed = base64.b64decode(text, validate=True)
    size = columns * count * _WIDTH
    if size > _MOST_RATIO * len(packed):
        raise SettingError(f"{count:,} documents in {len(packed):,} bytes")
    reader = zlib.decompressobj()
    content = reader.decompress(packed, size + 1)
    if len(content) != size or not reader.eof or reader.unused_data:
        raise SettingError(f"{len(content):,} bytes instead of {size:,}")
    planes = np.frombuffer(content, dtype=np.uint8).reshape(columns, _WIDTH, count).transpose(0, 2, 1)
    return np.ascontiguousarray(planes).view("<i8").reshape(columns, count).astype(np.int64)
