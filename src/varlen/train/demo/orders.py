"""Which documents share a step: random batches, length buckets, packed windows; each as a Packing.

A batch of whole documents is a packing too, one pack a step, so every way of feeding the model has the same
type, and its ledger is counted in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from varlen.errors import SourceError
from varlen.pack.api import pack
from varlen.train.demo.settings import LayoutName, OrderName
from varlen.types import IntArray, Ledger, Packing


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Order:
    """Documents of a run dealt to steps: step s trains the packs `step_offsets[s]:step_offsets[s + 1]`."""

    packing: Packing
    step_offsets: IntArray
    """int64 `[steps + 1]`."""

    def pack_ids(self, step: int) -> IntArray:
        """Return the numbers of the packs that a step trains."""
        return np.arange(self.step_offsets[step], self.step_offsets[step + 1])


def make_order(name: OrderName, lengths: IntArray, *, steps: int, max_length: int, seed: int) -> Order:
    """Deal documents, given in random order, to steps.

    - "random": neighbours share a step, with equally many documents in each.
    - "bucketed": the same after sorting by length, the batches then shuffled.
    - "packed": best fit into packs of `max_length` (less where documents are few and short) over the window
      of all documents in the order given (not sorted, so that packs stay random samples), the packs dealt
      evenly to steps.

    Args:
        lengths: int64 `[num_documents]` in tokens, before cutting; a multiple of `steps` documents.
    """
    if name == "packed":
        packing = pack(lengths, _capacity(lengths, steps, max_length), method="best_fit", overlong="truncate")
        if packing.num_packs < steps:
            raise SourceError(
                f"the documents fill {packing.num_packs:,} packs, too few for {steps:,} steps: one is far "
                "longer than the others; pass more documents, or fewer --steps"
            )
        return Order(packing=packing, step_offsets=_even_offsets(packing.num_packs, steps))
    batches = np.arange(len(lengths)).reshape(steps, -1)
    if name == "bucketed":
        by_length = np.argsort(np.minimum(lengths, max_length), kind="stable").reshape(steps, -1)
        batches = np.random.default_rng([seed, 2]).permutation(by_length, axis=0)
    return Order(packing=batches_as_packing(lengths, batches, max_length), step_offsets=np.arange(steps + 1))


def batches_as_packing(lengths: IntArray, batches: IntArray, max_length: int) -> Packing:
    """Describe batches of whole documents as a packing, one pack a batch.

    Args:
        lengths: int64 `[num_documents]`, before cutting.
        batches: int64 `[num_batches, batch_documents]`: every document once.
    """
    ids = batches.reshape(-1)
    stops = np.minimum(lengths[ids], max_length)
    ledger = Ledger(
        tokens_in=int(lengths.sum()),
        packed=int(stops.sum()),
        truncated=int(np.maximum(lengths - max_length, 0).sum()),
        duplicated=int(stops.sum() - np.minimum(lengths[np.unique(ids)], max_length).sum()),
        documents_in=len(lengths),
        truncated_documents=int((lengths > max_length).sum()),
    )
    return Packing(
        document_ids=ids.astype(np.int64),
        starts=np.zeros(len(ids), dtype=np.int32),
        stops=stops.astype(np.int32),
        offsets=np.arange(0, len(ids) + 1, batches.shape[1], dtype=np.int64),
        capacity=int(stops.reshape(batches.shape).sum(axis=1).max()),
        ledger=ledger.check(),
        overlong="truncate",
    )


def step_slots(order: Order, layout: LayoutName) -> int:
    """Count the positions that all steps of an order compute in a layout."""
    packing = order.packing
    if layout == "flat":
        return packing.num_tokens
    if layout in ("rows", "rows_without_boundaries"):
        return packing.num_packs * packing.capacity
    longest = np.maximum.reduceat(packing.lengths, packing.offsets[:-1])
    return int((longest.astype(np.int64) * np.diff(packing.offsets)).sum())


def most_crowded_pack(packing: Packing) -> int:
    """Return the number of the pack that holds the most pieces, the first of them."""
    return int(np.argmax(np.diff(packing.offsets)))


def _capacity(lengths: IntArray, steps: int, max_length: int) -> int:
    """Return `max_length`, or less where so few tokens wouldn't give every step a pack."""
    cut = np.minimum(lengths, max_length)
    return min(max_length, max(int(cut.max()), -(-int(cut.sum()) // steps)))


def _even_offsets(num_packs: int, steps: int) -> IntArray:
    """Deal packs to steps in order, each step getting as many as any other, or one more."""
    return np.linspace(0, num_packs, steps + 1).astype(np.int64)
