"""Makes a rank's batches of the packs of a step: reads tokens from the store, and counts targets over all ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch.collate import Out, collate
from varlen.batch.packed import Layout, PackedBatch
from varlen.errors import InputError, OverlongDocumentError, SourceError
from varlen.feed.checks import Pieces, check_ids, where_of
from varlen.feed.indexed.windows import StorePacks
from varlen.files.losses import Losses, nothing_left
from varlen.pack.api import DEFAULT_WORK
from varlen.pack.pieces import POLICIES, ways_out
from varlen.store.tokens import ReadableTokens
from varlen.text.loss_masks import Mask
from varlen.types import FloatArray, Int32Array, IntArray, Ledger, Packing


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """How a step becomes batches."""

    capacity: int
    global_batch_size: int
    """Packs of a step."""
    micro_batch_size: int
    """Packs of a batch."""
    dp_world_size: int
    layout: Layout = "rows"
    pad_id: int = 0
    pad_to_multiple_of: int = 1
    document_multiple_of: int = 1
    work: tuple[float, float] = DEFAULT_WORK
    """What a pack costs: so much a token, and so much a squared token of each piece."""
    vocab_size: int | None = None
    """Ids that the model knows are below; None where nobody said."""
    in_order: bool = False
    """Packs of a step go into its batches in their order, and not those with about equal work together."""

    @property
    def micro_batches(self) -> int:
        """Batches that a rank takes in a step."""
        return self.global_batch_size // (self.dp_world_size * self.micro_batch_size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """The packs of one optimizer update, and who takes them."""

    number: int
    packs: StorePacks
    """Of all ranks; fewer than the settings say where the last epoch ends."""
    hands: IntArray
    """int64 `[ranks, packs of a rank]`: numbers of packs, batch after batch; those beyond `packs` are masked."""
    num_targets: int
    """Labels of all ranks."""

    @property
    def lengths(self) -> Int32Array:
        """int32 `[pieces]`: tokens of each piece, pack after pack: what a plan of the step is made of."""
        return (self.packs.stops - self.packs.starts).astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contents:
    """What stands in a batch: pieces end to end, pack after pack."""

    tokens: npt.NDArray[np.integer[Any]]
    mask: Mask | None
    """1 where a token is trained on, or what it weighs; None where all are, and weigh 1."""
    lengths: IntArray
    """int64 `[pieces]`: tokens of each."""
    offsets: IntArray
    """int64 `[packs + 1]`: where each pack's pieces begin; a masked pack has none."""
    document_ids: IntArray
    """int64 `[pieces]`: the document of each."""
    document_starts: IntArray
    """int64 `[pieces]`: the first of its tokens."""
    pack_ids: IntArray
    """int64 `[packs]`: numbers that count through the training."""


def check_heard(passes: int, heard: int) -> None:
    """Refuse data without targets: steps without targets are left out, so the search would never end."""
    if passes > heard + 1:
        raise SourceError(
            "the data holds nothing to train on: in a whole epoch no token has a label. A document of one token has "
            "none, nor has what a loss mask or `supervise` leaves out"
        )


def no_batch(ledger: Ledger, losses: Losses, capacity: int, epochs: int = 1) -> InputError:
    """Return the error of data of which no batch is left, which says what became of everything."""
    left = nothing_left(ledger, losses, capacity, epochs)
    said = f"the data holds nothing to train on, and no batch is left of it: {left}"
    said += "; the log says what can't be read, and why" if losses.of_reading else ""
    if ledger.dropped_documents:
        cutting = [name for name, policy in POLICIES.items() if policy.cuts]
        return OverlongDocumentError(f"{said}; {ways_out(cutting)}")
    return SourceError(said)


def deal_step(store: ReadableTokens, packs: StorePacks, number: int, settings: BatchSettings) -> Step:
    """Deal the packs of a step to all ranks, and count what they train.

    Args:
        store: the documents.
        packs: of the step.
        number: of the step.
        settings: how.

    Raises:
        SourceError: the store is damaged.
    """
    work = np.zeros(settings.global_batch_size)
    work[: packs.num_packs] = work_of(packs.stops - packs.starts, packs.offsets, settings.work)
    return Step(
        number=number,
        packs=packs,
        hands=deal(work, settings.dp_world_size, settings.micro_batch_size, in_order=settings.in_order),
        num_targets=int(store.count_targets(packs.shards, packs.documents, packs.starts, packs.stops).sum()),
    )


def make_batch(
    store: Pieces,
    step: Step,
    rank: int,
    micro_batch: int,
    settings: BatchSettings,
    out: Out | None = None,
    mine: npt.NDArray[np.bool_] | None = None,
) -> PackedBatch:
    """Build one batch of a rank.

    Args:
        mine: bool `[pieces]`: pieces of the step that it holds; packs without are left out. None for whole packs.
    """
    size = settings.micro_batch_size
    numbers = step.hands[rank, micro_batch * size : (micro_batch + 1) * size]
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
    lengths = packs.stops[pieces] - packs.starts[pieces]
    tokens, mask = store.gather(packs.shards[pieces], packs.documents[pieces], packs.starts[pieces], lengths)
    return fill_batch(
        Contents(
            tokens=tokens,
            mask=mask,
            lengths=lengths,
            offsets=offsets,
            document_ids=numbers_of(store, packs.shards[pieces], packs.documents[pieces]),
            document_starts=packs.starts[pieces],
            pack_ids=step.number * settings.global_batch_size + numbers,
        ),
        step.num_targets,
        settings,
        out,
        partial(where_of, store),
    )


def numbers_of(store: Pieces, shards: IntArray, documents: IntArray) -> IntArray:
    """Return the numbers of documents within the whole store, from their shards and numbers there."""
    before = np.concatenate([[0], np.cumsum(store.documents)])
    numbers: IntArray = before[shards] + documents
    return numbers


def work_of(lengths: IntArray, offsets: IntArray, work: tuple[float, float]) -> FloatArray:
    """Return what each pack costs, float64 `[packs]`.

    Args:
        lengths: `[pieces]`: tokens of each.
        offsets: `[packs + 1]`: where each pack's pieces begin.
    """
    tokens = lengths.astype(np.float64)
    before = np.concatenate([[0.0], np.cumsum(work[0] * tokens + work[1] * tokens**2)])
    each: FloatArray = np.diff(before[offsets])
    return each


def fill_batch(
    contents: Contents,
    num_targets: int,
    settings: BatchSettings,
    out: Out | None = None,
    where: Callable[[int], str] = "document {:,}".format,
) -> PackedBatch:
    """Build a batch out of its pieces."""
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
        report=False,  # the loader counts them
    )
    shown = batch.document_ids
    ours = {
        "document_ids": contents.document_ids[shown],
        "document_starts": contents.document_starts[shown].astype(np.int32),
        "pack_ids": contents.pack_ids,
    }
    return PackedBatch.of({**vars(batch), **ours})


def _of_padding(
    contents: Contents, num_targets: int, settings: BatchSettings, out: Out | None
) -> PackedBatch:
    """Build a flat batch of masked packs alone: some positions of padding, as models can't run on none."""
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
    """Return a packing of pieces that stand end to end, each whole."""
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


# Which rank gets which packs of a step: equal counts, and work as equal as a greedy hand can deal it.


def deal(
    work: npt.NDArray[np.float64], ranks: int, micro_batch_size: int, *, in_order: bool = False
) -> IntArray:
    """Deal the packs of a step.

    Packs of about equal work go into the same micro-batch of all ranks, because ranks wait for each other there;
    within it the pack with the most work goes to the hand with the least so far (Graham's longest processing time
    first, 1969, with equal counts), and the hand with the most to the rank that had the least before.

    Args:
        work: `[packs]`, a multiple of `ranks * micro_batch_size`; equal work keeps the order of the packs.

    Returns:
        int64 `[ranks, packs / ranks]`: the packs of each rank, micro-batch after micro-batch, ascending in each.

    >>> deal(np.array([1.0, 9.0, 8.0, 2.0]), ranks=2, micro_batch_size=2).tolist()
    [[0, 1], [2, 3]]
    """
    order = np.arange(len(work)) if in_order else np.argsort(-work, kind="stable")
    if ranks == 1:
        return np.sort(order.reshape(-1, micro_batch_size), axis=1).reshape(1, -1)
    at_once = ranks * micro_batch_size
    rounds, totals = [np.zeros((ranks, 0), dtype=np.int64)], np.zeros(ranks)
    for start in range(0, len(order), at_once):
        packs = order[start : start + at_once]
        packs = packs[np.argsort(-work[packs], kind="stable")]
        hands = np.array(_dealt(packs.tolist(), work, ranks), dtype=np.int64)
        sums = work[hands].sum(axis=1)
        owners = np.argsort(totals, kind="stable")
        hands[owners] = hands[np.argsort(-sums, kind="stable")]
        totals += work[hands].sum(axis=1)
        rounds.append(np.sort(hands, axis=1))
    return np.concatenate(rounds, axis=1)


def _dealt(packs: list[int], work: npt.NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Deal one micro-batch; packs come with the most work first."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    room = len(packs) // ranks
    waiting = [(0.0, rank) for rank in range(ranks)]
    for pack in packs:
        total, rank = heapq.heappop(waiting)
        hands[rank].append(pack)
        if len(hands[rank]) < room:
            heapq.heappush(waiting, (total + float(work[pack]), rank))
    return hands
