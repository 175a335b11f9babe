"""PackedRewardTrainer: TRL's loss, gradients and metrics on the same pairs."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from tests.support.hf_models import GROUPED
from tests.support.trainers import VOCABULARY, Recorder, arguments, furthest, logged, word_tokenizer
from transformers import AutoModelForSequenceClassification, LlamaConfig
from trl import RewardConfig, RewardTrainer

from varlen.adapters import hf
from varlen.adapters.trl.reward import PackedRewardTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]
PAIRS = 12


def pairs(seed: int = 0, margins: bool = False) -> Dataset:
    random = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        return [*random.integers(0, 250, random.integers(1, most)).tolist(), 256]

    rows = [{"chosen_ids": ids(30), "rejected_ids": ids(12)} for _ in range(PAIRS)]
    if margins:
        rows = [{**row, "margin": float(random.uniform(0, 1))} for row in rows]
    return Dataset.from_list(rows)


def trained(kind: Any, folder: Any, attention: str, *, margins: bool = False, **changes: Any) -> Any:
    hf.register()
    torch.manual_seed(0)
    config = LlamaConfig(**{**GROUPED, "vocab_size": VOCABULARY}, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    recorder = Recorder()
    usual = {
        "bf16": False,
        "per_device_train_batch_size": PAIRS // 2,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
    }
    trainer = kind(
        model=model,
        args=arguments(folder, RewardConfig, **{**usual, **changes}),
        train_dataset=pairs(margins=margins),
        eval_dataset=pairs(seed=1, margins=margins),
        processing_class=word_tokenizer(),
        callbacks=[recorder],
    )
    trainer.train()
    trainer.gradients = recorder.gradients
    return trainer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"margins": True},
        {"center_rewards_coefficient": 0.3},
        {"margins": True, "gradient_accumulation_steps": 2},
    ],
    ids=["plain", "margins", "centred", "accumulated"],
)
def test_loss_gradients_and_metrics_are_trl_s_on_the_same_pairs(settings, tmp_path):
    theirs = trained(RewardTrainer, tmp_path / "theirs", "sdpa", **settings)
    ours = trained(PackedRewardTrainer, tmp_path / "ours", "varlen", **settings)

    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-5)
    assert furthest(ours.gradients[0], theirs.gradients[0]) < 1e-4
    for name, value in theirs.state.log_history[0].items():
        assert ours.state.log_history[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-4)


def test_scores_are_those_of_answers_alone_and_padding_is_not_computed(tmp_path):
    trainer = trained(PackedRewardTrainer, tmp_path, "varlen", max_steps=1)
    (batch, *_) = trainer.get_train_dataloader()
    flat, rows = batch["packed"], batch["input_ids"]
    with torch.no_grad():
        _, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
        for row, score in zip(rows, outputs.logits):
            document = row[row != 257][None]
            alone = trainer.model(**hf.plain_inputs(document, trainer.model)).logits[0]
            assert float(score) == pytest.approx(float(alone), rel=1e-4, abs=1e-5)

    assert flat.input_ids.numel() == int(batch["attention_mask"].sum()) < rows.numel()
    assert isinstance(trainer.model, transformers.LlamaForSequenceClassification)
