"""How a step's documents become the arrays of a model call: padded with or without a mask, flat, or in rows.

All layouts hold the same documents and the same targets (every token but each document's first), so on the
same batch they differ in speed and memory, and in the loss only by rounding. The one exception is the
control, `rows_without_boundaries`, which packs documents as if they were one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from varlen.adapters import hf
from varlen.batch.collate import collate
from varlen.batch.packed import IGNORE_INDEX, PackedBatch
from varlen.train.demo.corpus import Documents
from varlen.train.demo.methods import LayoutName
from varlen.train.demo.orders import Order

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
        layout: see the module's first lines.
        model: a transformers model whose attention is `ATTENTION[layout]`.
        documents: of the run.
        order: of the same documents.
        step: counted from 0.
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
