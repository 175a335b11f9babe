"""Which documents share a step: random batches, length buckets, packed windows; each as a Packing.

A batch of whole documents is a packing too, one pack a step, so every way of feeding the model is described
by the same noun and its ledger is counted in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from varlen.adapters import hf
from varlen.batch.collate import collate
from varlen.batch.packed import IGNORE_INDEX, PackedBatch
from varlen.errors import SourceError
from varlen.pack.api import pack
from varlen.train.demo.corpus import Documents
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

    - "random": neighbours share a step, as many documents in each.
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


# How a step's documents become the arrays of a model call: padded with or without a mask, flat, or in rows.
#
# All layouts hold the same documents and the same targets (every token but each document's first), so on the
# same batch they differ in speed and memory, and in the loss only by rounding. The one exception is the
# control, `rows_without_boundaries`, which packs documents as if they were one.

ATTENTION: dict[LayoutName, str] = {
    "padded_with_mask": "sdpa",
    "padded": "sdpa",
    "flat": "varlen",
    "rows": "varlen",
    "rows_without_boundaries": "sdpa",
}
"""The attention that each layout runs through, by transformers' names."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepInputs:
    """One step's arrays."""

    arguments: dict[str, Any]
    """Keyword arguments of the model, labels not among them."""
    labels: torch.Tensor
    """int64 `[rows, width]`, not shifted; -100 where nothing is to be learned."""
    num_tokens: int
    """Tokens of documents."""
    num_targets: int
    """Labels other than -100."""

    @property
    def num_slots(self) -> int:
        """Positions that the model computes, padding included."""
        return self.labels.numel()


def step_inputs(layout: LayoutName, model: Any, documents: Documents, order: Order, step: int) -> StepInputs:
    """Lay out the documents of one step.

    Args:
        model: a transformers model whose attention is `ATTENTION[layout]`.
    """
    if layout in ("padded_with_mask", "padded"):
        return padded_inputs(documents, order, step, with_mask=layout == "padded_with_mask")
    batch = collate(
        (documents.tokens, documents.offsets),
        order.packing,
        pack_ids=order.pack_ids(step),
        layout="flat" if layout == "flat" else "rows",
    ).to_torch()
    if layout == "rows_without_boundaries":
        # Neither positions nor a mask: every row is one causal sequence, whatever stands in it.
        return _packed(batch, {"input_ids": batch.input_ids, "use_cache": False})
    arguments = hf.model_inputs(batch, model)
    arguments.pop("labels")
    return _packed(batch, arguments)


def padded_inputs(documents: Documents, order: Order, step: int, *, with_mask: bool) -> StepInputs:
    """Lay out one document a row, padded to the longest of the step.

    Padding stands after the document, so a causal model never sees it from a real token: without the mask
    the loss is the same, and PyTorch's fast causal kernel can run.
    """
    packing = order.packing
    first, last = packing.offsets[order.step_offsets[[step, step + 1]]].tolist()
    lengths = packing.lengths[first:last]
    input_ids = np.zeros((last - first, int(lengths.max())), dtype=np.int64)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    for row, piece in enumerate(range(first, last)):
        begin = documents.offsets[packing.document_ids[piece]]
        tokens = documents.tokens[begin + packing.starts[piece] : begin + packing.stops[piece]]
        input_ids[row, : len(tokens)] = tokens
        labels[row, 1 : len(tokens)] = tokens[1:]
    arguments: dict[str, Any] = {"input_ids": torch.from_numpy(input_ids), "use_cache": False}
    if with_mask:
        mask = np.arange(input_ids.shape[1]) < lengths[:, None]
        arguments["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
    return StepInputs(
        arguments=arguments,
        labels=torch.from_numpy(labels),
        num_tokens=int(lengths.sum()),
        num_targets=int((labels != IGNORE_INDEX).sum()),
    )


def _packed(batch: PackedBatch, arguments: dict[str, Any]) -> StepInputs:
    return StepInputs(
        arguments=arguments, labels=batch.labels, num_tokens=batch.num_tokens, num_targets=batch.num_targets
    )
