"""Tiny models, arguments, loaders and preference pairs for tests of trainers, and losses one by one."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tests.support import hf_models
from tests.support.stores import random_store
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, TrainerCallback, TrainingArguments
from trl import DPOConfig

import varlen as vl
from varlen.adapters.hf.trainer import PackedTrainer, loader_for

VOCABULARY = 260
CAPACITY = 32


def tiny_llama(attention: str = "varlen", dtype: torch.dtype = torch.float32) -> Any:
    return hf_models.make(LlamaConfig(**{**hf_models.GROUPED, "vocab_size": VOCABULARY}), attention, dtype)


def word_tokenizer() -> Any:
    """A tokenizer that knows the words <0> to <255>, and three tokens of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {f"<{n}>": n for n in range(256)} | {"<eos>": 256, "<pad>": 257, "<other>": 258}
    made = Tokenizer(models.WordLevel(names, unk_token="<other>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def arguments(folder: Any, kind: Any = TrainingArguments, **changes: Any) -> Any:
    """Quiet arguments for a short run on a CPU: 4 batches of 6 packs a step, without warm-up or clipping."""
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return kind(**{**usual, **changes})


def store_in(folder: Path, documents: int = 40) -> Path:
    """A token store of three shards; overlong documents are among its own, and such without targets."""
    return random_store(folder / "store", shards=3, documents=documents)


def packed_loader(args: Any, store: Any, **changes: Any) -> vl.PackedLoader:
    """A loader as the arguments ask for it, with small packs."""
    usual = {"capacity": CAPACITY, "window": 50, "worker": "thread"}
    return loader_for(args, store, **{**usual, **changes})


class Recorder(TrainerCallback):
    """Writes down the gradients of every update before it is made."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any
    ) -> None:
        self.gradients.append(
            {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}
        )


class StopAt(TrainerCallback):
    """Ends a run after so many updates, as if it had been killed, but for what it writes at its end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


class Taking:
    """Writes down the pieces of documents that are trained on; stands before a PackedTraining."""

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **rest: Any) -> torch.Tensor:
        taken = self.__dict__.setdefault("taken", [])
        taken.append((self.state.global_step, pieces(inputs["packed"])))  # type: ignore[attr-defined]
        loss: torch.Tensor = super().training_step(model, inputs, *args, **rest)  # type: ignore[misc]
        return loss


class CountingTrainer(Taking, PackedTrainer):
    """A PackedTrainer that writes down what it takes."""


def pieces(batch: Any) -> list[tuple[int, int, int]]:
    columns = (batch.document_ids, batch.document_starts, batch.document_lengths)
    return list(zip(*(column.tolist() for column in columns)))


def pieces_of(store: Any, args: Any, **changes: Any) -> Counter[tuple[int, int, int]]:
    """How often each piece comes in all epochs, told by a loader of one rank."""
    settings = {"dp_rank": 0, "dp_world_size": 1, **changes}
    with packed_loader(args, store, **settings) as loader:
        return Counter(piece for batch in loader for piece in pieces(batch))


def losses_one_by_one(model: Any, batches: Any) -> list[torch.Tensor]:
    """The loss of every target of every document, each alone in the model, float32 or wider."""
    found = []
    for batch in batches:
        ids, labels = (getattr(batch, name).reshape(-1) for name in ("input_ids", "labels"))
        ends = batch.cu_seqlens.tolist()
        owned = batch.segment_ids.reshape(-1)
        for first, last in zip(ends[:-1], ends[1:]):
            if owned[first] < 0:
                continue
            document = torch.tensor(ids[first:last].tolist())[None]
            targets = torch.tensor(labels[first:last].tolist())
            boundaries = torch.tensor([0, last - first], dtype=torch.int32)
            told: dict[str, Any] = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
            told |= {"max_length_q": last - first, "max_length_k": last - first}
            if model.config._attn_implementation != "varlen":
                told = {}
            logits = model(input_ids=document, use_cache=False, **told).logits[0, :-1]
            losses = cross_entropy(logits.float(), targets[1:], reduction="none", ignore_index=-100)
            found.append(losses[targets[1:] != -100])
    return found


def gradients_of(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference between gradients, as a share of the largest gradient of its parameter."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-12))
        for name in theirs
    )


def logged(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


PAIRS = 24


def pairs(number: int = PAIRS, seed: int = 0) -> Dataset:
    """Pairs of texts, which the tiny tokenizer takes word by word: prompts, and answers of many lengths."""
    random = np.random.default_rng(seed)

    def text(most: int) -> str:
        return " ".join(f"<{n}>" for n in random.integers(0, 256, random.integers(1, most)))

    rows = [{"prompt": text(8), "chosen": " " + text(30), "rejected": " " + text(12)} for _ in range(number)]
    return Dataset.from_list(rows)


def trained(kind: Any, folder: Any, *, rows: Any = None, attention: str = "sdpa", **changes: Any) -> Any:
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
