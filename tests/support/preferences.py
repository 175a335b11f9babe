"""Preference pairs made on the spot, and DPO on them."""

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tests.support.trainers import Recorder, arguments, tiny_llama, word_tokenizer
from trl import DPOConfig

PAIRS = 24


def pairs(number: int = PAIRS, seed: int = 0) -> Dataset:
    """Pairs of texts, which the tiny tokenizer takes word by word: prompts, and answers of many lengths."""
    random = np.random.default_rng(seed)

    def text(most: int) -> str:
        return " ".join(f"<{n}>" for n in random.integers(0, 256, random.integers(1, most)))

    rows = [{"prompt": text(8), "chosen": " " + text(30), "rejected": " " + text(12)} for _ in range(number)]
    return Dataset.from_list(rows)


def trained(kind: Any, folder: Any, *, rows: Any = None, attention: str = "sdpa", **changes: Any) -> Any:
    """Train; the trainer has the gradients of its steps."""
    ours = {name: changes.pop(name) for name in ("capacity", "eval_dataset") if name in changes}
    checkpoint = changes.pop("checkpoint", None)
    usual = {
        "bf16": False,
        "activation_checkpointing": False,
        "num_train_epochs": 1,
        "per_device_train_batch_size": PAIRS,
        "gradient_accumulation_steps": 1,
        "beta": 0.5,
        "dataloader_pin_memory": False,
    }
    policy, reference = tiny_llama(attention), tiny_llama(attention)
    with torch.no_grad():  # else all ratios would be 1, and a wrong reference would not be seen
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    recorder = Recorder()
    trainer = kind(
        model=policy,
        ref_model=reference,
        args=arguments(folder, DPOConfig, **{**usual, **changes}),
        train_dataset=pairs() if rows is None else rows,
        processing_class=word_tokenizer(),
        callbacks=[recorder],
        **ours,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.gradients = recorder.gradients
    return trainer
