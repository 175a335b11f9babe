"""PackedSFTTrainer: TRL's SFTTrainer with a PackedLoader under it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from datasets import Dataset
from trl.trainer.sft_trainer import SFTTrainer

from varlen.adapters.hf.trainer import PackedTraining

_BEFORE_DATASET = 3
"""Arguments of SFTTrainer that stand before `train_dataset`."""


class PackedSFTTrainer(PackedTraining, SFTTrainer):
    """TRL's SFTTrainer, fed by a loader; `train_loader` stands in the place of `train_dataset`.

    ::

        loader = loader_for(args, "store", capacity=4096)
        trainer = PackedSFTTrainer(model=model, args=args, train_loader=loader, processing_class=tokenizer)

    Packing, truncation and tokenization are the loader's, so `packing`, `padding_free` and `max_length` of SFTConfig
    are for the `eval_dataset` alone.

    Args:
        args: as SFTTrainer takes them.
        rest: as SFTTrainer and PackedTraining take it.
    """

    def __init__(self, *args: Any, **rest: Any) -> None:
        if len(args) <= _BEFORE_DATASET and rest.get("train_dataset") is None:
            # SFTTrainer looks at a first row, and would refuse to have none.
            rest["train_dataset"] = Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
        super().__init__(*args, **rest)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **rest: Any) -> Any:
        """Return the loss as SFTTrainer does, which counts tokens by the `attention_mask` and so must not see ours.

        Args:
            model: as the Trainer has wrapped it.
            inputs: keyword arguments of the model.
            args: as the Trainer passes them.
            rest: as the Trainer passes it.
        """
        mask = inputs.get("attention_mask")
        if mask is not None and not (torch.is_tensor(mask) and mask.ndim == 2):
            inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
            model = functools.partial(model, attention_mask=mask)
        return super().compute_loss(model, inputs, *args, **rest)
