"""Llamas with random weights and batches for the GPU script, and how long calls take and how many bytes they need.

On a GPU or, to try the script out, on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import varlen as vl
from varlen.runtime.clock import TrackedBytes, bytes_meter
from varlen.runtime.main_grads import gradient


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
        gradient(parameter)
    return model


def one_document(sizes: dict[str, int], tokens: int) -> vl.PackedBatch:
    ids = np.random.default_rng(0).integers(0, sizes["vocab_size"], tokens, dtype=np.int32)
    return vl.collate([ids], vl.pack([tokens], capacity=tokens))


ROUNDS = 5


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device, *, rounds: int = ROUNDS) -> float:
    """Return the median time of a call, after two calls that warm up."""
    return side_by_side([call], device, rounds=rounds)[0]


def side_by_side(
    calls: Sequence[Callable[[], Any]], device: torch.device, *, rounds: int = ROUNDS, warm: int = 2
) -> list[float]:
    """Return the median time of each call; calls take turns, so that all meet the same moods of the machine."""
    for call in [each for each in calls for _ in range(warm)]:
        call()
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, taken):
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            times.append(time.perf_counter() - start)
    return [median(times) for times in taken]


def fresh_step(
    model: Any, engine: vl.SliceEngine, batch: vl.PackedBatch, plan: vl.StepPlan | None = None
) -> Any:
    """Run a step whose gradients are there and 0, as one of many in training."""
    model.zero_grad(set_to_none=False)
    return engine.step(batch, plan)


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes of tensors that a call needs beside those that are there when it begins."""
    with bytes_meter(device) as meter:
        before = meter.live
        meter.begin_peak()
        call()
        return int(meter.peak) - (0 if isinstance(meter, TrackedBytes) else before)
