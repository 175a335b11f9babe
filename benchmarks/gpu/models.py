"""Llamas with random weights for the GPU script: one of a billion parameters, and how batches are given to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import varlen as vl


def llama_sizes(
    hidden: int, ffn: int, heads: int, kv_heads: int, layers: int, vocab: int, positions: int = 2**20
) -> dict[str, int]:
    """Return the sizes of a Llama by transformers' names."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


BILLION = llama_sizes(2048, 5632, 32, 4, layers=22, vocab=32_000)
"""1.1 billion parameters, grouped heads."""
TINY = llama_sizes(64, 176, 4, 2, layers=2, vocab=256)
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
