"""One long document in slices: what slices cost in time, and what they save in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import varlen as vl
from benchmarks.gpu.models import BILLION, fresh_step, llama, one_document, peak_bytes, side_by_side

TOKENS = 16_384
SLICES = (1024, 2048, 4096, 8192, 16_384)
LONGEST = 2**21
"""Tokens beyond which the longest document isn't looked for."""
HEAD_ROWS = 1024


def overhead(
    device: torch.device,
    *,
    sizes: dict[str, int] = BILLION,
    tokens: int = TOKENS,
    slice_tokens: tuple[int, ...] = SLICES,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 2,
) -> dict[str, Any]:
    """Time steps of one document cut into slices, beside the unsliced step with the same recomputation.

    Unsliced is both: the model's own forward under per-layer checkpointing with a loss in chunks, and one slice of
    the engine as long as the document.
    """
    model, batch = llama(sizes, device, dtype), one_document(sizes, tokens)
    calls = [lambda: checkpointed(model, batch, device)]
    for rows in (tokens, *slice_tokens):
        engine = vl.SliceEngine(model, slice_tokens=rows)
        calls.append(lambda engine=engine: fresh_step(model, engine, batch))
    times = side_by_side(calls, device, rounds=rounds, warm=1)
    peaks = [peak_bytes(call, device) for call in calls]
    return {
        "tokens": tokens,
        "unsliced_s": times[0],
        "unsliced_peak_bytes": peaks[0],
        "one_slice_s": times[1],
        "one_slice_peak_bytes": peaks[1],
        "slices": [
            {
                "slice_tokens": rows,
                "seconds": taken,
                "over_unsliced": taken / times[0],
                "over_one_slice": taken / times[1],
                "peak_bytes": peak,
            }
            for rows, taken, peak in zip(slice_tokens, times[2:], peaks[2:])
        ],
    }


def checkpointed(model: Any, batch: vl.PackedBatch, device: torch.device) -> None:
    """Run the unsliced model forward and backward: each layer computed again, and few logits there at once."""
    model.set_attn_implementation("sdpa")
    _set_checkpointing(model, is_on=True)
    held = batch.to_torch(device)
    ids = held.input_ids.long()
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    chunked_loss(model, hidden, held.labels, batch.num_targets)
    _set_checkpointing(model, is_on=False)


def _set_checkpointing(model: Any, *, is_on: bool) -> None:
    """Have each layer computed again, or not, by the name that this release of transformers has for it."""
    name = f"checkpointing_{'enable' if is_on else 'disable'}"
    new, old = (getattr(model, f"{of}_{name}", None) for of in ("activation", "gradient"))
    kinds = {"use_reentrant": False}
    if new is not None:
        new(**({"activation_checkpointing_kwargs": kinds} if is_on else {}))
    else:
        old(**({"gradient_checkpointing_kwargs": kinds} if is_on else {}))


def chunked_loss(model: Any, hidden: torch.Tensor, labels: torch.Tensor, targets: int) -> None:
    """Run the head and the loss backward a thousand rows at a time, then the layers."""
    leaf = hidden.detach().requires_grad_()
    shifted = labels.reshape(-1).roll(-1).long()
    shifted[-1] = -100
    for first in range(0, leaf.shape[1], HEAD_ROWS):
        rows = slice(first, first + HEAD_ROWS)
        logits = model.lm_head(leaf[0, rows])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = torch.nn.functional.cross_entropy(logits, shifted[rows], reduction="sum")
        (loss / targets).backward()
    hidden.backward(leaf.grad)


def longest(
    device: torch.device,
    *,
    sizes: dict[str, int] = BILLION,
    slice_tokens: int = 8192,
    most: int = LONGEST,
    first: int = 8192,
    limit_s: float = 24.0,
) -> list[dict[str, Any]]:
    """Return the longest document that each way runs before the device is out of memory, doubling from `first`.

    A length that takes longer than `limit_s` is the last one tried, and is marked so.
    """
    model = llama(sizes, device)

    def unsliced(batch: vl.PackedBatch) -> None:
        model.set_attn_implementation("sdpa")
        held = batch.to_torch(device)
        hidden = model.model(input_ids=held.input_ids.long(), use_cache=False).last_hidden_state
        chunked_loss(model, hidden, held.labels, batch.num_targets)

    ways: dict[str, Callable[[vl.PackedBatch], Any]] = {
        "unsliced": unsliced,
        "unsliced, each layer again": lambda batch: checkpointed(model, batch, device),
        "slices": lambda batch: vl.SliceEngine(model, slice_tokens=slice_tokens).step(batch),
    }
    return [{"way": name, **_doubled(way, sizes, device, first, most, limit_s)} for name, way in ways.items()]


def _doubled(
    way: Callable[[vl.PackedBatch], Any],
    sizes: dict[str, int],
    device: torch.device,
    first: int,
    most: int,
    limit_s: float,
) -> dict[str, Any]:
    """The longest document that ran, its seconds and bytes, and what ended the search."""
    found: dict[str, Any] = {"tokens": 0, "ended_by": "memory"}
    tokens = first
    while tokens <= most:
        batch = one_document(sizes, tokens)
        try:
            peak = peak_bytes(lambda batch=batch: way(batch), device)
            taken = side_by_side([lambda batch=batch: way(batch)], device, rounds=1, warm=0)[0]
        except (torch.OutOfMemoryError, MemoryError):
            break
        finally:
            gc.collect()
        found = {"tokens": tokens, "seconds": taken, "peak_bytes": peak, "ended_by": "memory"}
        if 4 * taken > limit_s:
            return {**found, "ended_by": f"a next step of more than {limit_s:.0f} s"}
        tokens *= 2
    return found if tokens <= most else {**found, "ended_by": "the most tried"}
