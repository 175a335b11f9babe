"""One rank's batches: what a step holds, its deal to ranks, and the arrays; for all modes."""

from __future__ import annotations

import heapq
import logging
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from varlen.batch.collate import Out, collate
from varlen.batch.packed import Layout, PackedBatch
from varlen.documents.source import OnError
from varlen.errors import InputError, ModelError, OverlongDocumentError, SourceError
from varlen.files.losses import Losses, nothing_left
from varlen.pack.api import DEFAULT_WORK
from varlen.pack.pieces import POLICIES, ways_out
from varlen.store.tokens import ReadableTokens, TokenDocuments
from varlen.text.loss_masks import Mask, as_wide
from varlen.types import FloatArray, Int32Array, IntArray, Ledger, Packing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """How batches are built from a step."""

    capacity: int
    global_batch_size: int
    """Packs per step, over all ranks."""
    micro_batch_size: int
    """Packs per batch."""
    dp_world_size: int
    """Ranks that a step's packs are dealt to; 1 with a plan, which assigns documents instead."""
    layout: Layout = "rows"
    pad_id: int = 0
    pad_to_multiple_of: int = 1
    document_multiple_of: int = 1
    work: tuple[float, float] = DEFAULT_WORK
    """Cost of a pack: a coefficient per token, and one per squared token of each piece."""
    vocab_size: int | None = None
    """The model's ids are below this number; None: unknown, and not checked."""
    in_order: bool = False
    """Whether batches take a step's packs in order, instead of grouping packs of about equal work."""

    @property
    def micro_batches(self) -> int:
        """Batches per step and rank."""
        return self.global_batch_size // (self.dp_world_size * self.micro_batch_size)


_OF_PIECES = ("shards", "documents", "starts", "stops")
"""Arrays of `StorePacks` with a value per piece."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StorePacks:
    """Packs end to end: pack p holds the pieces `offsets[p]:offsets[p + 1]`."""

    shards: IntArray
    """int64 `[pieces]`: the shard of each piece's document."""
    documents: IntArray
    """int64 `[pieces]`: the document's number within its shard."""
    starts: IntArray
    stops: IntArray
    """int64 `[pieces]`: the piece is its document's tokens [start, stop)."""
    offsets: IntArray
    """int64 `[packs + 1]`."""

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """int64 `[pieces]`: tokens of each."""
        return self.stops - self.starts

    @property
    def checksum(self) -> int:
        """A checksum of the pieces and their packs."""
        checksum = 0
        for name in (*_OF_PIECES, "offsets"):
            checksum = zlib.crc32(getattr(self, name).astype("<i8").tobytes(), checksum)
        return checksum

    def slice(self, start: int, stop: int) -> StorePacks:
        """Return the packs [start, stop)."""
        pieces = slice(int(self.offsets[start]), int(self.offsets[stop]))
        offsets = self.offsets[start : stop + 1] - self.offsets[start]
        return StorePacks(**{name: getattr(self, name)[pieces] for name in _OF_PIECES}, offsets=offsets)


def concatenated(parts: Sequence[StorePacks]) -> StorePacks:
    """Concatenate packs; returns zero packs for no parts."""
    none = np.zeros(0, dtype=np.int64)
    pieces = np.cumsum([0] + [int(part.offsets[-1]) for part in parts])
    offsets = [part.offsets[1:] + before for part, before in zip(parts, pieces)]
    return StorePacks(
        **{name: np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in _OF_PIECES},
        offsets=np.concatenate([[0], *offsets]).astype(np.int64),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """The packs of one optimizer update, and their assignment to ranks."""

    number: int
    packs: StorePacks
    """Packs of all ranks; fewer than `global_batch_size` at the end of the last epoch."""
    assignment: IntArray
    """int64 `[ranks, packs per rank]`: indices of packs, batch after batch; those beyond `packs` are masked."""
    num_targets: int
    """Number of labels over all ranks."""

    @property
    def lengths(self) -> Int32Array:
        """int32 `[pieces]`: tokens of each piece, pack after pack; the input of the step's plan."""
        return self.packs.lengths.astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contents:
    """The contents of a batch: pieces end to end, pack after pack."""

    tokens: npt.NDArray[np.integer[Any]]
    mask: Mask | None
    """1 for each token to train on, or its weight; None: every token has weight 1."""
    lengths: IntArray
    """int64 `[pieces]`: tokens of each."""
    offsets: IntArray
    """int64 `[packs + 1]`: index of each pack's first piece; a masked pack has no pieces."""
    document_ids: IntArray
    """int64 `[pieces]`: the document of each."""
    document_starts: IntArray
    """int64 `[pieces]`: offset of the piece's first token in its document."""
    pack_ids: IntArray
    """int64 `[packs]`: numbers that run through the whole training."""


def check_labels(epochs: int, last_epoch: int) -> None:
    """Refuse data without targets in a whole epoch; `last_epoch`: epochs done at the last step with a target."""
    if epochs > last_epoch + 1:
        raise SourceError(
            "the data holds nothing to train on: in a whole epoch no token has a label. A document of one token has "
            "none, nor has what a loss mask or `supervise` leaves out"
        )


def no_batch(ledger: Ledger, losses: Losses, capacity: int, epochs: int = 1) -> InputError:
    """Return the error for data that gives no batch; its message accounts for all documents."""
    left = nothing_left(ledger, losses, capacity, epochs)
    message = f"the data holds nothing to train on, and no batch is left of it: {left}"
    message += "; the log says what can't be read, and why" if losses.of_reading else ""
    if ledger.dropped_documents:
        cutting = [name for name, policy in POLICIES.items() if policy.cuts]
        return OverlongDocumentError(f"{message}; {ways_out(cutting)}")
    return SourceError(message)


def deal_step(store: ReadableTokens, packs: StorePacks, number: int, settings: BatchSettings) -> Step:
    """Assign the packs of a step to all ranks, and count its targets.

    Raises:
        SourceError: the store is damaged.
    """
    work = np.zeros(settings.global_batch_size)
    work[: packs.num_packs] = work_of(packs.lengths, packs.offsets, settings.work)
    return Step(
        number=number,
        packs=packs,
        assignment=deal(work, settings.dp_world_size, settings.micro_batch_size, in_order=settings.in_order),
        num_targets=int(store.count_targets(packs.shards, packs.documents, packs.starts, packs.stops).sum()),
    )


def make_batch(
    source: PieceSource,
    step: Step,
    rank: int,
    micro_batch: int,
    settings: BatchSettings,
    out: Out | None = None,
    mine: npt.NDArray[np.bool_] | None = None,
) -> PackedBatch:
    """Build one batch of a rank.

    Args:
        mine: bool `[pieces]`: the step's pieces to include; packs without any are left out. None: all pieces.
    """
    size = settings.micro_batch_size
    numbers = step.assignment[rank, micro_batch * size : (micro_batch + 1) * size]
    packs = step.packs
    real = np.minimum(numbers, packs.num_packs - 1)
    counts = np.where(numbers < packs.num_packs, np.diff(packs.offsets)[real], 0)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    pieces = np.repeat(packs.offsets[real] - offsets[:-1], counts) + np.arange(offsets[-1])
    if mine is not None:
        owners = np.repeat(np.arange(len(numbers)), counts)[mine[pieces]]
        counts = np.bincount(owners, minlength=len(numbers))
        pieces, numbers, counts = pieces[mine[pieces]], numbers[counts > 0], counts[counts > 0]
        offsets = np.concatenate([[0], np.cumsum(counts)])
    lengths = packs.stops[pieces] - packs.starts[pieces]  # of this batch, and not of the whole step
    tokens, mask = source.gather(packs.shards[pieces], packs.documents[pieces], packs.starts[pieces], lengths)
    return fill_batch(
        Contents(
            tokens=tokens,
            mask=mask,
            lengths=lengths,
            offsets=offsets,
            document_ids=numbers_of(source, packs.shards[pieces], packs.documents[pieces]),
            document_starts=packs.starts[pieces],
            pack_ids=step.number * settings.global_batch_size + numbers,
        ),
        step.num_targets,
        settings,
        out,
        partial(where_of, source),
    )


def numbers_of(source: PieceSource, shards: IntArray, documents: IntArray) -> IntArray:
    """Return documents' numbers within the whole store, from their shards and numbers within the shards."""
    before = np.concatenate([[0], np.cumsum(source.documents)])
    numbers: IntArray = before[shards] + documents
    return numbers


def work_of(lengths: IntArray, offsets: IntArray, work: tuple[float, float]) -> FloatArray:
    """Return the cost of each pack, float64 `[packs]`.

    Args:
        lengths: `[pieces]`: tokens of each.
        offsets: `[packs + 1]`: index of each pack's first piece.
        work: cost per token, and per squared token of each piece.
    """
    tokens = lengths.astype(np.float64)
    before = np.concatenate([[0.0], np.cumsum(work[0] * tokens + work[1] * tokens**2)])
    costs: FloatArray = np.diff(before[offsets])
    return costs


def fill_batch(
    contents: Contents,
    num_targets: int,
    settings: BatchSettings,
    out: Out | None = None,
    where: Callable[[int], str] = "document {:,}".format,
) -> PackedBatch:
    """Build a batch from its pieces."""
    if settings.vocab_size is not None:
        ids = contents.document_ids
        check_ids(
            contents.tokens, contents.lengths, settings.vocab_size, lambda piece: where(int(ids[piece]))
        )
    if settings.layout == "flat" and len(contents.lengths) == 0:
        return _of_padding(contents, num_targets, settings, out)
    ends = np.concatenate([[0], np.cumsum(contents.lengths)])
    mask = contents.mask
    has_weights = mask is not None and mask.dtype == np.float32
    batch = collate(
        (contents.tokens, ends),
        _as_packing(contents.lengths, contents.offsets, settings),
        loss_mask=None if mask is None or has_weights else (mask, ends),
        target_weights=(mask, ends) if mask is not None and has_weights else None,
        pad_id=settings.pad_id,
        pad_to_multiple_of=settings.pad_to_multiple_of,
        layout=settings.layout,
        step_num_targets=num_targets,
        dp_world_size=settings.dp_world_size,
        out=out,
        report=False,  # the loader does the accounting
    )
    pieces = batch.document_ids  # `collate` numbers the pieces, as it knows no documents
    replaced = {
        "document_ids": contents.document_ids[pieces],
        "document_starts": contents.document_starts[pieces].astype(np.int32),
        "pack_ids": contents.pack_ids,
    }
    return PackedBatch.of({**vars(batch), **replaced})


def _of_padding(
    contents: Contents, num_targets: int, settings: BatchSettings, out: Out | None
) -> PackedBatch:
    """Build a flat batch that has only masked packs: a few positions of padding, as models need at least one."""
    width = math.lcm(settings.pad_to_multiple_of, settings.document_multiple_of)
    packing = _as_packing(contents.lengths, np.zeros(2, dtype=np.int64), replace(settings, capacity=width))
    batch = collate(
        (np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64)),
        packing,
        pad_id=settings.pad_id,
        step_num_targets=num_targets,
        dp_world_size=settings.dp_world_size,
        out=out,
        report=False,
    )
    return replace(batch, layout="flat", pack_ids=contents.pack_ids, pack_offsets=contents.offsets)


def _as_packing(lengths: IntArray, offsets: IntArray, settings: BatchSettings) -> Packing:
    """Return a packing of pieces that lie end to end, each treated as a whole document."""
    total = int(lengths.sum())
    return Packing(
        document_ids=np.arange(len(lengths)),
        starts=np.zeros(len(lengths), dtype=np.int32),
        stops=lengths.astype(np.int32),
        offsets=offsets,
        capacity=settings.capacity,
        ledger=Ledger(tokens_in=total, packed=total, documents_in=len(lengths)),
        document_multiple_of=settings.document_multiple_of,
    )


# Assignment of a step's packs to ranks: equal counts, and work balanced greedily.


def deal(
    work: npt.NDArray[np.float64], ranks: int, micro_batch_size: int, *, in_order: bool = False
) -> IntArray:
    """Assign the packs of a step to ranks.

    Packs of about equal work go into the same micro-batch of all ranks, because ranks wait for each other after it.
    Within a micro-batch, packs are distributed to `ranks` shares by longest processing time first (Graham, 1969, with
    equal counts); the share with the most work goes to the rank with the least work in earlier micro-batches.

    Args:
        work: `[packs]`, a multiple of `ranks * micro_batch_size`; packs of equal work keep their order.
        in_order: whether micro-batches take packs in their order.

    Returns:
        int64 `[ranks, packs / ranks]`: the packs of each rank, micro-batch after micro-batch, each ascending.

    >>> deal(np.array([1.0, 9.0, 8.0, 2.0]), ranks=2, micro_batch_size=2).tolist()
    [[0, 1], [2, 3]]
    """
    order = np.arange(len(work)) if in_order else np.argsort(-work, kind="stable")
    if ranks == 1:
        return np.sort(order.reshape(-1, micro_batch_size), axis=1).reshape(1, -1)
    packs_at_once = ranks * micro_batch_size
    micro_batches, totals = [np.zeros((ranks, 0), dtype=np.int64)], np.zeros(ranks)
    for start in range(0, len(order), packs_at_once):
        packs = order[start : start + packs_at_once]
        packs = packs[np.argsort(-work[packs], kind="stable")]
        shares = np.array(_longest_first(packs.tolist(), work, ranks), dtype=np.int64)
        sums = work[shares].sum(axis=1)
        owners = np.argsort(totals, kind="stable")
        shares[owners] = shares[np.argsort(-sums, kind="stable")]
        totals += work[shares].sum(axis=1)
        micro_batches.append(np.sort(shares, axis=1))
    return np.concatenate(micro_batches, axis=1)


def _longest_first(packs: list[int], work: npt.NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Split one micro-batch's packs, sorted by descending work, into shares of equal count."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    size = len(packs) // ranks
    open_shares = [(0.0, index) for index in range(ranks)]
    for pack in packs:
        total, index = heapq.heappop(open_shares)
        shares[index].append(pack)
        if len(shares[index]) < size:
            heapq.heappush(open_shares, (total + float(work[pack]), index))
    return shares


# Documents that can't be read when a batch is built: the error names them, or they are masked in place and counted.
#
# Packs, and their deal to ranks, depend only on lengths, which are the same on every rank. So a document whose tokens
# one rank can't read keeps its slot there: other documents, steps, their number and their denominators don't change,
# and other ranks aren't affected.

_MOST_NAMED = 1000
"""Skipped documents that the log names; further ones are only counted, as a missing file may have held millions."""


class PieceSource(Protocol):
    """The part of `ReadableTokens` from which a batch is read."""

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each shard."""

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents end to end."""

    def where(self, shard: int) -> str:
        """Describe a shard for messages."""


class Unreadable:
    """How to handle documents that can't be read, and which of them the log has named."""

    def __init__(self, on_error: OnError, pad_id: int) -> None:
        self.on_error, self.pad_id = on_error, pad_id
        self._named: set[str] = set()

    def name(self, where: str, why: SourceError) -> None:
        """Log once which document was skipped, and why."""
        if where in self._named or len(self._named) > _MOST_NAMED:
            return
        self._named.add(where)
        if len(self._named) > _MOST_NAMED:
            _log.warning(
                "skipped: more than %s documents; further ones are counted, and not named", f"{_MOST_NAMED:,}"
            )
        else:
            _log.warning("skipped: %s is masked: %s", where, why)


class ReadPieces:
    """A store's pieces; masks and counts those that can't be read."""

    def __init__(self, store: ReadableTokens, unreadable: Unreadable) -> None:
        self._store, self._unreadable = store, unreadable
        self.skipped = 0
        """Number of pieces masked so far."""

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each shard."""
        return self._store.documents

    def where(self, shard: int) -> str:
        """Describe a shard for messages."""
        return self._store.where(shard)

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents end to end; the arguments are those of `ReadableTokens.gather`."""
        try:
            return self._store.gather(shards, documents, starts, lengths)
        except SourceError:
            return self._one_by_one(shards, documents, np.asarray(starts), lengths)

    def _one_by_one(
        self, shards: IntArray, documents: IntArray, starts: IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask]:
        """Read each piece separately, to find those that can't be read."""
        begins = (np.cumsum(lengths) - lengths).tolist()
        tokens = np.full(int(lengths.sum()), self._unreadable.pad_id, dtype=np.int32)
        mask: Mask = np.ones(len(tokens), dtype=np.uint8)
        for number, (begin, length) in enumerate(zip(begins, lengths.tolist())):
            piece, span = slice(number, number + 1), slice(begin, begin + length)
            try:
                ids, piece_mask = self._store.gather(
                    shards[piece], documents[piece], starts[piece], lengths[piece]
                )
            except SourceError as error:
                where = _describe(self._store, int(shards[number]), int(documents[number]))
                if self._unreadable.on_error == "raise":
                    raise SourceError(f'{where} can\'t be read: {error}; on_error="skip" masks it') from error
                self._unreadable.name(where, error)
                self.skipped += 1
                mask[span] = 0
                continue
            tokens[span] = ids
            if piece_mask is not None:
                mask = as_wide(mask, piece_mask)
                mask[span] = piece_mask
        return tokens, mask


def _describe(source: PieceSource, shard: int, document: int) -> str:
    """Describe a document for messages, by its shard and its number within the shard."""
    return f"document {document:,} of {source.where(shard)}"


def where_of(source: PieceSource, document_id: int) -> str:
    """Describe a document for messages, by its number within the whole store."""
    before = np.concatenate([[0], np.cumsum(source.documents)])
    shard = int(np.searchsorted(before, document_id, side="right")) - 1
    return _describe(source, shard, document_id - int(before[shard]))


# Ids that a model doesn't know are found when they are read, as token files don't record the vocabulary's size.

_DOCUMENTS, _TOKENS = 1 << 12, 10_000_000
"""Documents and tokens that are checked before training, at most."""


def check_ids(
    tokens: npt.NDArray[np.integer[Any]], lengths: IntArray, vocab_size: int, where: Callable[[int], str]
) -> None:
    """Refuse ids that a model doesn't know.

    Args:
        lengths: int64 `[pieces]`: tokens of each.

    Cost: 0.1 ms a million tokens.
    """
    if len(tokens) == 0 or int(tokens.max()) < vocab_size:
        return
    at = int(np.argmax(tokens >= vocab_size))
    piece = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
    raise ModelError(
        f"{where(piece)} holds the id {int(tokens[at]):,}, but the model knows {vocab_size:,} ids, from 0 to "
        f"{vocab_size - 1:,}; take the model that the tokens were made for, or resize its embeddings"
    )


def check_first_ids(tokens: TokenDocuments, vocab_size: int) -> None:
    """Refuse data whose first documents have ids that a model doesn't know.

    Cost: reading 4,096 documents of the first shard, or 10 million tokens if these have more.
    """
    shards_with_documents = np.flatnonzero(tokens.documents)
    if len(shards_with_documents) == 0:
        return
    shard = int(shards_with_documents[0])
    numbers = np.arange(min(int(tokens.documents[shard]), _DOCUMENTS))
    shards = np.full(len(numbers), shard)
    lengths = tokens.lengths(shards, numbers)
    # A document that exceeds the limit is cut to its beginning.
    before = np.cumsum(lengths) - lengths
    lengths = np.clip(_TOKENS - before, 0, lengths)
    ids, _ = tokens.gather(shards, numbers, np.zeros(len(numbers), dtype=np.int64), lengths)
    check_ids(ids, lengths, vocab_size, lambda piece: _describe(tokens, shard, piece))
