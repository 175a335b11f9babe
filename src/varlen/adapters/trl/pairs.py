"""Preference pairs in packs by their tokens, and TRL's padded batches of pairs as one flat row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset

from varlen.adapters.hf.inputs import model_inputs
from varlen.batch.collate import collate
from varlen.batch.packed import IGNORE_INDEX, PackedBatch
from varlen.errors import DocumentsError
from varlen.pack.api import pack
from varlen.pack.pieces import shuffled
from varlen.pack.steps import steps_of
from varlen.types import IntArray

PACKED = "packed"
_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
_REPLACED = frozenset(("input_ids", "attention_mask", "labels", "use_cache"))


class PairPacks(Dataset[list[dict[str, Any]]]):
    """A data set whose rows are packs: lists of pairs, both answers of which stay together.

    Packs are random samples of the pairs, and stay the same in all epochs; there are as many on every rank.

    Args:
        rows: tokenized pairs, with `prompt_ids`, `chosen_ids` and `rejected_ids`.
        capacity: most tokens of a pack, prompts counted twice as they are trained on twice.
        longest: answers are cut with their prompts to so many tokens by the collator; None where they aren't.
        at_once: packs that all ranks take at a time; the number of packs is a multiple of it.
        seed: of the sample; None keeps neighbours together.

    Raises:
        OverlongDocumentError: a pair doesn't fit.
        DocumentsError: rows without those columns.
    """

    def __init__(
        self, rows: Any, capacity: int, *, longest: int | None = None, at_once: int = 1, seed: int | None = 0
    ) -> None:
        self._rows = rows
        lengths = pair_lengths(rows, longest)
        order = np.arange(lengths.size) if seed is None else shuffled(seed, lengths.size)
        steps = steps_of(lengths[order], capacity, ranks=at_once, fill="empty", in_order=True)
        self._pairs, self._offsets = order[steps.documents], steps.offsets

    def __len__(self) -> int:
        """Count packs."""
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> list[dict[str, Any]]:
        """Return the pairs of a pack."""
        begin, end = self._offsets[number : number + 2].tolist()
        return [self._rows[pair] for pair in self._pairs[begin:end].tolist()]


def pair_lengths(rows: Any, longest: int | None = None) -> IntArray:
    """Return the tokens of each pair, int64 `[num_pairs]`: its prompt twice, and both answers.

    Args:
        rows: a Dataset of tokenized pairs.
        longest: most tokens of a prompt with an answer; None for no limit.

    Raises:
        DocumentsError: rows without the columns.
    """
    missing = [name for name in _IDS if name not in (getattr(rows, "column_names", None) or ())]
    if missing:
        raise DocumentsError(
            f"packs of pairs are made of stored sets with {', '.join(_IDS)}, as DPOTrainer tokenizes them; this "
            f"{type(rows).__name__} has no {', '.join(missing)}; leave capacity out where pairs are streamed"
        )
    table = rows.select_columns(list(_IDS)).with_format("arrow")[:]
    prompt, *answers = (pc.list_value_length(table[name]).to_numpy().astype(np.int64) for name in _IDS)
    sizes = [
        prompt + answer if longest is None else np.minimum(prompt + answer, longest) for answer in answers
    ]
    total: IntArray = sizes[0] + sizes[1]
    return total


@dataclass(frozen=True)
class PairCollator:
    """TRL's collator of pairs, whose padded batch gets the same documents as one flat row beside it."""

    padded: Callable[[list[Any]], dict[str, Any]]
    """Makes of B pairs a batch of 2B padded rows, all chosen answers first."""

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return TRL's batch, and a PackedBatch as `packed`.

        Args:
            examples: pairs, or packs of pairs.
        """
        pairs = [pair for row in examples for pair in (row if isinstance(row, list) else [row])]
        batch = self.padded(pairs)
        return {**batch, PACKED: flat_row(batch)}


def flat_row(batch: dict[str, Any]) -> PackedBatch:
    """Return the rows of a padded batch as the documents of one row; answers are what is learned.

    Args:
        batch: `input_ids`, `attention_mask` and `completion_mask`, int64 `[rows, width]`.
    """
    real = batch["attention_mask"].bool()
    ids = batch["input_ids"][real]
    labels = torch.where(batch["completion_mask"][real].bool(), ids, IGNORE_INDEX)
    lengths = real.sum(1).numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    packing = pack(lengths, max(int(offsets[-1]), 1))
    return collate(
        (ids.numpy(), offsets), packing, labels=(labels.numpy(), offsets), layout="flat", report=False
    ).to_torch()


@dataclass(frozen=True, kw_only=True)
class FlatCall:
    """A model that is called with padded rows, and computes them as one flat row.

    What it returns per token stands where it would in padded rows, so the caller notices nothing.
    """

    model: Any
    """What is called, perhaps wrapped."""
    batch: PackedBatch
    """The rows' documents."""
    width: int
    """Of the padded rows."""

    def __call__(self, **inputs: Any) -> Any:
        """Call the model.

        Args:
            inputs: keyword arguments for padded rows. Without labels, when logits are wanted, the model is called so.
        """
        if "labels" not in inputs:
            return self.model(**inputs)
        others = {name: value for name, value in inputs.items() if name not in _REPLACED}
        outputs = self.model(**model_inputs(self.batch, self.model), **others)
        tokens = self.batch.input_ids.shape[1]
        for name, value in outputs.items():
            if torch.is_tensor(value) and value.shape == (1, tokens - 1):
                outputs[name] = padded_rows(value[0], self.batch.document_lengths, self.width - 1)
        return outputs


def padded_rows(values: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return values of shifted tokens, document after document, as rows.

    Args:
        values: `[tokens - 1]`: one for each token that predicts another. A document's last predicts the first of the
            next document, which is never a target; it is left out.
        lengths: `[documents]` in tokens.
        width: of the rows.

    Returns:
        `[documents, width]`, 0 behind a document's end.
    """
    if not values.numel():  # one document of one token
        return values.new_zeros(len(lengths), width)
    lengths = lengths.to(values.device, torch.int64)
    columns = torch.arange(width, device=values.device)
    places = (lengths.cumsum(0) - lengths)[:, None] + columns
    row = values[places.clamp(max=len(values) - 1)]
    return torch.where(columns < (lengths - 1)[:, None], row, torch.zeros_like(row))
