"""Steps of a model of a billion parameters, padded and packed, and how fast batches reach the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import varlen as vl
from benchmarks.gpu.models import BILLION, llama, peak_bytes, seconds, side_by_side
from varlen.adapters import hf

CAPACITY = 4096
DOCUMENTS = 64
ROWS = 4
"""Of a padded micro-batch; packed ones hold as many packs as make up as many slots."""


def documents(
    vocabulary: int, count: int = DOCUMENTS, capacity: int = CAPACITY
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents of skewed lengths up to the capacity: lengths, tokens, offsets."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.0, 1.2, count).clip(16, capacity).astype(np.int32)
    tokens = rng.integers(0, vocabulary, int(lengths.sum())).astype(np.int32)
    return lengths, tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def steps(
    device: torch.device,
    *,
    sizes: dict[str, int] = BILLION,
    count: int = DOCUMENTS,
    capacity: int = CAPACITY,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    lengths, tokens, offsets = documents(sizes["vocab_size"], count, capacity)
    model = llama(sizes, device, dtype)
    packing = vl.pack(lengths, capacity=capacity)
    inputs = _padded(lengths, tokens, offsets, device)

    def padded() -> None:
        model.set_attn_implementation("sdpa")
        for batch in inputs:
            model(**batch).loss.backward()

    hf.register()
    hf.use_varlen_attention(model)
    fours = np.array_split(np.arange(packing.num_packs), max(1, packing.num_packs // 4))
    pieces = [vl.collate((tokens, offsets), packing, pack_ids=part, layout="flat") for part in fours]
    flat = [hf.model_inputs(piece.to_torch(device), model) for piece in pieces]

    def packed() -> None:
        hf.use_varlen_attention(model)
        for batch in flat:
            model(**batch).loss.backward()

    padded_s, packed_s = side_by_side([padded, packed], device, rounds=3)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "documents": int(lengths.size),
        "tokens": int(lengths.sum()),
        "padded_tokens": int(sum(batch["input_ids"].numel() for batch in inputs)),
        "padded_sdpa_s": padded_s,
        "padded_peak_bytes": peak_bytes(padded, device),
        "packed_varlen_s": packed_s,
        "packed_peak_bytes": peak_bytes(packed, device),
        "padded_tokens_per_s": int(lengths.sum()) / padded_s,
        "packed_tokens_per_s": int(lengths.sum()) / packed_s,
        "ratio": padded_s / packed_s,
    }


def _padded(
    lengths: np.ndarray, tokens: np.ndarray, offsets: np.ndarray, device: torch.device
) -> list[dict[str, Any]]:
    """Micro-batches of rows in a random order, each as wide as its longest document."""
    order, batches = np.random.default_rng(1).permutation(lengths.size), []
    for group in np.array_split(order, max(1, order.size // ROWS)):
        width = int(lengths[group].max())
        ids = np.zeros((group.size, width), np.int64)
        kept = np.zeros((group.size, width), np.int64)
        for row, document in enumerate(group):
            ids[row, : lengths[document]] = tokens[offsets[document] : offsets[document + 1]]
            kept[row, : lengths[document]] = 1
        labels = np.where(kept == 1, ids, -100)
        tensors = {"input_ids": ids, "attention_mask": kept, "labels": labels}
        batches.append(
            {name: torch.from_numpy(array).to(device) for name, array in tensors.items()}
            | {"use_cache": False}
        )
    return batches


def transfer() -> dict[str, Any]:
    """Time a batch from flat tokens to tensors on the GPU, beside a plain copy of as many bytes."""
    device = torch.device("cuda")
    lengths, tokens, offsets = documents(BILLION["vocab_size"])
    packing = vl.pack(lengths, capacity=CAPACITY)
    out = vl.collate((tokens, offsets), packing)
    bytes_moved = 16 * out.input_ids.size
    pinned = torch.empty(bytes_moved, dtype=torch.uint8).pin_memory()
    target = torch.empty(bytes_moved, dtype=torch.uint8, device=device)
    return {
        "tokens": int(out.num_tokens),
        "bytes": int(bytes_moved),
        "collate_s": seconds(lambda: vl.collate((tokens, offsets), packing, out=out), device),
        "to_device_s": seconds(lambda: out.to_torch("cuda"), device),
        "pinned_copy_s": seconds(lambda: target.copy_(pinned, non_blocking=True), device),
    }
