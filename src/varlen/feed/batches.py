"""From the packs of a step to a rank's batches: tokens out of the store, targets counted over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from varlen.batch.collate import Out, collate
from varlen.batch.packed import Layout, PackedBatch
from varlen.feed.deal import deal
from varlen.feed.packs import StorePacks
from varlen.pack.api import DEFAULT_WORK
from varlen.source.token_documents import TokenDocuments
from varlen.types import IntArray, Ledger, Packing


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


def plan_step(store: TokenDocuments, packs: StorePacks, number: int, settings: BatchSettings) -> Step:
    """Deal the packs of a step to all ranks, and count what they train.

    Args:
        store: the documents.
        packs: of the step.
        number: of the step.
        settings: how.

    Raises:
        SourceError: the store is damaged.
    """
    lengths = (packs.stops - packs.starts).astype(np.float64)
    each, squared = settings.work
    before = np.concatenate([[0.0], np.cumsum(each * lengths + squared * lengths**2)])
    work = np.zeros(settings.global_batch_size)
    work[: packs.num_packs] = np.diff(before[packs.offsets])
    return Step(
        number=number,
        packs=packs,
        hands=deal(work, settings.dp_world_size, settings.micro_batch_size, in_order=settings.in_order),
        num_targets=int(store.count_targets(packs.shards, packs.documents, packs.starts, packs.stops).sum()),
    )


def make_batch(
    store: TokenDocuments,
    step: Step,
    rank: int,
    micro_batch: int,
    settings: BatchSettings,
    out: Out | None = None,
) -> PackedBatch:
    """Build one batch of a rank.

    Args:
        store: the documents.
        step: of `plan_step`.
        rank: among the data-parallel ranks.
        micro_batch: number of the batch within the step.
        settings: those of the step.
        out: arrays to fill, as `vl.collate` takes them.

    Returns:
        A batch whose `document_ids` count through the store, and whose `pack_ids` count through the training:
        step times the packs of a step, plus the pack's number within it.

    Raises:
        SourceError: the store is damaged.
    """
    size = settings.micro_batch_size
    numbers = step.hands[rank, micro_batch * size : (micro_batch + 1) * size]
    packs = step.packs
    real = np.minimum(numbers, packs.num_packs - 1)
    counts = np.where(numbers < packs.num_packs, np.diff(packs.offsets)[real], 0)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    pieces = np.repeat(packs.offsets[real] - offsets[:-1], counts) + np.arange(offsets[-1])
    lengths = packs.stops[pieces] - packs.starts[pieces]
    tokens, mask = store.gather(packs.shards[pieces], packs.documents[pieces], packs.starts[pieces], lengths)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    batch = collate(
        (tokens, ends),
        _as_packing(lengths, offsets, settings),
        loss_mask=None if mask is None else (mask, ends),
        pad_id=settings.pad_id,
        pad_to_multiple_of=settings.pad_to_multiple_of,
        layout=settings.layout,
        step_num_targets=step.num_targets,
        dp_world_size=settings.dp_world_size,
        out=out,
        report=False,  # the loader counts them
    )
    shown = pieces[batch.document_ids]
    before = np.concatenate([[0], np.cumsum(store.documents)])
    return replace(
        batch,
        document_ids=before[packs.shards[shown]] + packs.documents[shown],
        document_starts=packs.starts[shown].astype(np.int32),
        pack_ids=step.number * settings.global_batch_size + numbers,
    )


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
