"""Llamas with random weights for the GPU script: one of a billion parameters, and how batches are given to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import varlen as vl

BILLION = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2**20,
}
"""1.1 billion parameters, grouped heads."""
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2**20,
}
"""To try the script out."""


def llama(sizes: dict[str, int], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a Llama with random weights, in training mode, its gradients there already."""
    torch.manual_seed(0)
    with device:  # random numbers of a billion parameters take half a minute on a CPU
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def one_document(sizes: dict[str, int], tokens: int) -> vl.PackedBatch:
    ids = np.random.default_rng(0).integers(0, sizes["vocab_size"], tokens, dtype=np.int32)
    return vl.collate([ids], vl.pack([tokens], capacity=tokens))
