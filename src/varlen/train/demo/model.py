"""A small Llama, and a loss whose logits never stand in memory all at once; the same for every method."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from varlen.adapters import hf
from varlen.batch.packed import IGNORE_INDEX
from varlen.train.demo.settings import DemoSettings

HEAD_BLOCK = 1024
"""Positions whose logits are formed at once: 16 MB at a vocabulary of 4,096. All positions of a padded batch
at once would be 512 MB and more page faults than work, which would flatter packing."""


def small_llama(settings: DemoSettings, vocab_size: int, seed: int, attention: str) -> LlamaForCausalLM:
    """Build the model with weights drawn from a seed.

    Args:
        settings: its shape and the longest document.
        vocab_size: token ids to embed.
        seed: of the weights; equal seeds give equal weights whatever the attention.
        attention: transformers' name of the attention function, or "varlen".
    """
    hf.register()
    shape = settings.model
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=settings.max_length,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    model.set_attn_implementation(attention)
    return model


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return the optimizer that every method uses."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def add_gradients(model: Any, arguments: dict[str, Any], labels: torch.Tensor, num_targets: int) -> float:
    """Add the gradient of the mean target loss to every parameter, and return that loss.

    The head and its loss run block by block, forward and backward at once, over every position, padding
    included, as transformers' own loss does.

    Args:
        model: of `small_llama`.
        arguments: keyword arguments of the model.
        labels: int64 `[rows, width]`, not shifted; position t is learned from position t - 1.
        num_targets: what the sum of losses is divided by.
    """
    hidden = _positions_before_labels(model.model(**arguments).last_hidden_state)
    targets = _blocks(labels[:, 1:].reshape(-1))
    total = 0.0
    gradients = []
    for block, target in zip(_blocks(hidden.detach()), targets, strict=True):
        block.requires_grad_()
        loss = _sum_of_losses(model, block, target) / num_targets
        torch.autograd.backward(loss)
        gradients.append(_gradient(block))
        total += loss.item()
    torch.autograd.backward(hidden, torch.cat(gradients))
    return total


@torch.no_grad()
def mean_loss(model: Any, arguments: dict[str, Any], labels: torch.Tensor, num_targets: int) -> float:
    """Return the mean target loss without gradients; arguments as `add_gradients`."""
    hidden = _positions_before_labels(model.model(**arguments).last_hidden_state)
    targets = _blocks(labels[:, 1:].reshape(-1))
    blocks = zip(_blocks(hidden), targets, strict=True)
    return sum(_sum_of_losses(model, block, target).item() for block, target in blocks) / num_targets


def _positions_before_labels(hidden: torch.Tensor) -> torch.Tensor:
    """Return `[rows * (width - 1), hidden_size]`: all but each row's last, which predicts nothing."""
    return hidden[:, :-1].reshape(-1, hidden.shape[-1])


def _blocks(positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut positions into blocks of `HEAD_BLOCK`, the last one shorter."""
    return positions.tensor_split(list(range(HEAD_BLOCK, len(positions), HEAD_BLOCK)))


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None, "backward has just run"
    return leaf.grad


def _sum_of_losses(model: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model.lm_head(hidden), targets, ignore_index=IGNORE_INDEX, reduction="sum")
