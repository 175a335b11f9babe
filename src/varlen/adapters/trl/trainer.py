"""PackedSFTTrainer: TRL's SFTTrainer with a PackedLoader under it."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from trl.trainer.sft_trainer import SFTTrainer

from varlen.adapters.hf.trainer import PackedTraining
from varlen.adapters.hf.trainer_checks import BEFORE_DATASET, check_train_dataset


class PackedSFTTrainer(PackedTraining, SFTTrainer):
    """TRL's SFTTrainer, fed by a loader; `train_loader` stands in the place of `train_dataset`.

    ::

        loader = loader_for(args, "store", capacity=4096)
        trainer = PackedSFTTrainer(model=model, args=args, train_loader=loader, processing_class=tokenizer)

    Packing, truncation and tokenization are the loader's, so `packing`, `padding_free` and `max_length` of SFTConfig
    are for the `eval_dataset` alone.
    """

    def __init__(self, *args: Any, **rest: Any) -> None:
        check_train_dataset(args, rest)
        if len(args) <= BEFORE_DATASET:
            # SFTTrainer looks at a first row, and would refuse to have none.
            rest["train_dataset"] = Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
        self._real_tokens: torch.Tensor | None = None
        super().__init__(*args, **rest)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **rest: Any) -> torch.Tensor:
        """Compute one batch's loss and gradients, as PackedTraining does."""
        self._real_tokens = inputs["attention_mask"]
        try:
            return super().training_step(model, inputs, *args, **rest)
        finally:
            self._real_tokens = None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **rest: Any) -> Any:
        """Return SFTTrainer's loss, with tokens counted by a mask `[rows, width]`; the model gets its own mask."""
        if self._real_tokens is None:
            return super().compute_loss(model, inputs, *args, **rest)
        wanted = inputs.get("attention_mask")
        counted = {**inputs, "attention_mask": self._real_tokens.to(inputs["input_ids"].device)}

        def called(**given: Any) -> Any:
            return model(**{**given, "attention_mask": wanted})

        return super().compute_loss(called, counted, *args, **rest)
