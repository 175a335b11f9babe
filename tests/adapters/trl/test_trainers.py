"""TRL's SFTTrainer on packs: a packed set, our collators, a loader; always with the loss of documents alone."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tests.support import hf_models
from tests.support.trainers import (
    VOCABULARY,
    Recorder,
    Taking,
    arguments,
    furthest,
    gradients_of,
    logged,
    losses_one_by_one,
    packed_loader,
    pieces_of,
    store_in,
    tiny_llama,
    word_tokenizer,
)
from transformers import FalconConfig, MistralConfig
from trl import SFTConfig, SFTTrainer

import varlen as vl
from varlen.adapters.hf import DataCollatorWithFlattening
from varlen.adapters.trl import DataCollatorForLanguageModeling, pack_dataset
from varlen.adapters.trl.trainer import PackedSFTTrainer

pytestmark = [
    # TRL asks transformers for what transformers has renamed.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
]

SETTINGS = {"bf16": False, "activation_checkpointing": False, "dataloader_pin_memory": False}


class CountingTrainer(Taking, PackedSFTTrainer):
    """A PackedSFTTrainer that writes down what it takes."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_in(tmp_path_factory.mktemp("documents"))


def token_lists() -> list[list[int]]:
    random = np.random.default_rng(4)
    return [random.integers(0, 256, size).tolist() for size in random.integers(2, 60, 24)]


def alone(documents: list[list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over the targets of all documents, each alone in the model, and its gradients."""
    model = tiny_llama().train()
    packing = vl.pack([len(document) for document in documents], 64)
    loss = torch.cat(losses_one_by_one(model, [vl.collate(documents, packing)])).mean()
    return float(loss.detach()), gradients_of(model, loss)


def one_step(
    folder: Any, rows: Any, batches: int, kind: Any = SFTTrainer, **rest: Any
) -> tuple[Any, Recorder]:
    """Train one step over all rows, in so many batches."""
    recorder = Recorder()
    ours = {"padding_free": True, "max_length": None, **rest.pop("config", {})}
    sizes = {"per_device_train_batch_size": -(-len(rows) // batches), "gradient_accumulation_steps": batches}
    args = arguments(
        folder,
        SFTConfig,
        **SETTINGS,
        **sizes,
        max_steps=1,
        dataset_kwargs={"skip_prepare_dataset": True},
        **ours,
    )
    trainer = kind(
        model=rest.pop("model", None) or tiny_llama(),
        args=args,
        train_dataset=rows,
        processing_class=word_tokenizer(),
        callbacks=[recorder],
        **rest,
    )
    trainer.train()
    return trainer, recorder


@pytest.mark.parametrize("batches", [1, 3])
def test_a_packed_set_has_the_loss_and_gradients_of_its_documents(batches, tmp_path):
    documents = token_lists()
    rows = pack_dataset(Dataset.from_dict({"input_ids": documents, "labels": documents}), 96)

    trainer, recorder = one_step(tmp_path, rows, batches)

    loss, gradients = alone(documents)
    assert len(rows) > 4
    assert logged(trainer) == pytest.approx([loss], rel=1e-5)
    assert furthest(recorder.gradients[0], gradients) < 5e-5


@pytest.mark.parametrize(
    "collator",
    [
        DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        DataCollatorForLanguageModeling(pad_token_id=257, padding_free=True),
    ],
    ids=lambda collator: type(collator).__name__,
)
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_our_collators_have_the_loss_and_gradients_of_their_documents(collator, attention, tmp_path):
    documents = token_lists()
    rows = Dataset.from_dict({"input_ids": documents, "labels": documents})

    trainer, recorder = one_step(
        tmp_path, rows, 3, model=tiny_llama(attention), data_collator=collator, config={"padding_free": False}
    )

    loss, gradients = alone(documents)
    assert logged(trainer) == pytest.approx([loss], rel=1e-5)
    assert furthest(recorder.gradients[0], gradients) < 5e-5


def windowed(attention: str) -> Any:
    """A model whose layers slide a window, and so get a mapping of masks."""
    config = MistralConfig(**{**hf_models.GROUPED, "vocab_size": VOCABULARY}, sliding_window=6)
    return hf_models.make(config, attention, torch.float32)


def without_positions(attention: str) -> Any:
    """A model that never looks at positions to build its mask, and so leaks without ours."""
    config = FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    return hf_models.make(config, attention, torch.float32)


@pytest.mark.parametrize(
    ("make", "attention"),
    [(make, name) for make in (tiny_llama, windowed) for name in ("varlen", "sdpa", "eager")]
    + [(without_positions, "sdpa")],
)
def test_a_loader_has_the_loss_and_gradients_of_its_documents(make, attention, store, tmp_path):
    recorder = Recorder()
    args = arguments(tmp_path, SFTConfig, **SETTINGS, max_steps=1)
    trainer = PackedSFTTrainer(
        model=make(attention),
        args=args,
        train_loader=packed_loader(args, store),
        processing_class=word_tokenizer(),
        callbacks=[recorder],
    )
    trainer.train()

    model = make("sdpa").train()
    with packed_loader(args, store) as loader:
        batches = [next(loader) for _ in range(loader.micro_batches)]
    loss = torch.cat(losses_one_by_one(model, batches)).mean()
    assert logged(trainer) == pytest.approx([float(loss.detach())], rel=1e-5)
    assert furthest(recorder.gradients[0], gradients_of(model, loss)) < 5e-5
    assert trainer.state.log_history[0]["num_tokens"] == sum(batch.num_tokens for batch in batches)


def test_a_loader_goes_on_from_a_checkpoint_and_no_document_comes_twice(store, tmp_path):
    def made(folder: str, **changes: Any) -> Any:
        args = arguments(tmp_path / folder, SFTConfig, **SETTINGS, **changes)
        loader = packed_loader(args, store)
        return CountingTrainer(
            model=tiny_llama(), args=args, train_loader=loader, processing_class=word_tokenizer()
        )

    whole = made("whole", save_strategy="steps", save_steps=2)
    whole.train()
    resumed = made("on")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))

    took = Counter(piece for _, held in whole.taken for piece in held)
    assert took == pieces_of(store, whole.args)
    assert resumed.taken == [entry for entry in whole.taken if entry[0] >= 2]
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters()):
        assert torch.equal(ours, theirs)


def test_documents_can_count_the_same_in_sft_too(store, tmp_path):
    args = arguments(tmp_path, SFTConfig, **SETTINGS, max_steps=1)
    trainer = PackedSFTTrainer(
        model=tiny_llama(),
        args=args,
        train_loader=packed_loader(args, store),
        processing_class=word_tokenizer(),
        loss_weighting="document",
    )
    trainer.train()

    with packed_loader(args, store) as loader:
        batches = [next(loader) for _ in range(loader.micro_batches)]
    means = [losses.mean() for losses in losses_one_by_one(tiny_llama(), batches) if len(losses)]
    assert logged(trainer) == pytest.approx([float(torch.stack(means).mean().detach())], rel=1e-5)
