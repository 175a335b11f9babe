"""transformers' flattening collator, with every setting that changes its speed as an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

NAME = "transformers DataCollatorWithFlattening"
INPUTS = ("lists", "numpy", "torch")
"""Forms in which the collator takes documents."""


def collator(
    documents: list, *, return_tensors: Literal["np", "pt"], complete: bool = True, labels: list | None = None
) -> Callable[[], Mapping[str, Any]]:
    """Return a call that flattens documents into one row.

    `return_tensors="np"` is about twice as fast, and `torch.from_numpy` makes tensors of it for nothing; "pt" is
    what a `Trainer` asks for. `complete` asks for all that varlen's batch holds (positions, segments and
    boundaries); otherwise for ids and labels alone, the least it can be asked for.
    """
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(
        return_tensors=return_tensors,
        return_position_ids=complete,
        return_flash_attn_kwargs=complete,
        return_seq_idx=complete,
    )
    features = [{"input_ids": document} for document in documents]
    if labels is not None:
        features = [{**feature, "labels": values} for feature, values in zip(features, labels)]

    def flatten() -> Mapping[str, Any]:
        return collate(features)

    return flatten
