"""Steps of `SliceEngine` on the device: seconds and bytes beside the simulator's, waits on the host, and kernels.

And rates of slice attention, both passes apart, over query rows, key length and heads of a GPU.
"""

from __future__ import annotations

import collections
import gc
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import varlen as vl
from benchmarks.gpu.models import BILLION, fresh_step, llama, peak_bytes, seconds, side_by_side
from benchmarks.gpu.training import documents
from varlen.cost.shape import BACKWARD_RATIO, ModelShape
from varlen.plan.one_gpu import one_gpu_plan
from varlen.runtime.calibrate import attention_probe, calibrate, quiet, run_once
from varlen.runtime.stage_run import StageRunner

WAYS: tuple[dict[str, str], ...] = (
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "none"},
    {"recompute": "full", "saved": "stage"},
    {"recompute": "full", "offload": "kv"},
    {"recompute": "full", "saved": "stage", "offload": "kv"},
)
"""How a step keeps activations."""


EQUAL = 512


def batches(sizes: dict[str, int], tokens: int) -> dict[str, vl.PackedBatch]:
    """Return one long document, short ones of skewed lengths, and 512 equal ones, of about as many tokens."""
    random = np.random.default_rng(0)
    lengths = documents(sizes["vocab_size"], 4096, max(64, tokens // 8))[0]
    lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), tokens)))]
    each = max(8, tokens // EQUAL)
    sets = {"one long": [tokens], "short": lengths.tolist(), "equal": [each] * (tokens // each)}
    return {
        name: vl.collate(
            [random.integers(0, sizes["vocab_size"], n).astype(np.int32) for n in held],
            vl.pack(held, capacity=tokens),
        )
        for name, held in sets.items()
    }


def ways(
    device: torch.device,
    *,
    sizes: dict[str, int] = BILLION,
    tokens: int = 16_384,
    slice_tokens: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    budget_s: float = 15.0,
    rounds: int = 2,
) -> Iterator[dict[str, Any]]:
    """Yield seconds and peaks of a step in each way, and what `vl.simulate` says with rates calibrated here."""
    model = llama(sizes, device, dtype)
    shape = vl.ModelShape.from_config(model.config)
    measured = calibrate(shape, device=device, dtype=dtype, budget_s=budget_s)
    yield {
        "source": measured.hardware.source,
        "mape_attention": measured.mape_attention,
        "mape_gemm": measured.mape_gemm,
        "repeat_mape": measured.repeat_mape,
        "tokens": tokens,
        "slice_tokens": slice_tokens,
    }
    sets = batches(sizes, tokens)
    for name, batch in [(name, sets[name]) for name in ("one long", "short")]:
        for way in WAYS:
            row = {"documents": name, "count": int(batch.document_lengths.size), **way}
            settings = {key: value for key, value in way.items() if key != "saved"}
            plan = one_gpu_plan(batch.document_lengths, slice_tokens, **settings)  # type: ignore[arg-type]
            cost = vl.CostModel(
                model=shape, hardware=measured.hardware, kernels="eager", saved=way.get("saved", "layers")
            )
            timeline = vl.simulate(plan, cost)
            states = float(np.max(cost.as_planned(plan).memory(plan.mesh).state_bytes))
            row["simulated_s"] = float(timeline.stops_s.max())
            row["simulated_peak_bytes"] = float(timeline.peaks_bytes.max()) - states
            try:
                row |= _step(model, batch, way, slice_tokens, device, rounds)
            except torch.OutOfMemoryError:
                row["not_run"] = "out of memory"
            gc.collect()
            yield row


def _step(
    model: Any,
    batch: vl.PackedBatch,
    way: dict[str, str],
    slice_tokens: int,
    device: torch.device,
    rounds: int,
) -> dict[str, Any]:
    """Return seconds of a step, and the most bytes that it takes beside parameters and gradients."""
    engine = vl.SliceEngine(model, slice_tokens, **way)  # type: ignore[arg-type]
    stats = fresh_step(model, engine, batch)
    taken = side_by_side([lambda: fresh_step(model, engine, batch)], device, rounds=rounds, warm=0)[0]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    row = {
        "seconds": taken,
        "tokens_per_s": batch.num_tokens / taken,
        "kernels": stats.kernels,
        "refused_kernels": stats.refused_kernels,
        "peak_bytes": peak_bytes(lambda: fresh_step(model, engine, batch), device),
    }
    if device.type == "cuda":
        row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved() - torch.cuda.memory_allocated()
    return row


def waits(
    device: torch.device,
    *,
    sizes: dict[str, int] = BILLION,
    tokens: int = 8192,
    slice_tokens: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[dict[str, Any]]:
    """Yield where tasks of a warm step make the host wait for the device, as PyTorch sees it: nowhere."""
    model = llama(sizes, device, dtype)
    for (name, batch), way in product(batches(sizes, tokens).items(), WAYS):
        engine = vl.SliceEngine(model, slice_tokens, **way)  # type: ignore[arg-type]
        engine.step(batch)
        model.zero_grad()
        with warnings.catch_warnings(record=True) as seen, patch.object(StageRunner, "run_next", _watched):
            warnings.simplefilter("always")
            engine.step(batch)
        found = [each for each in seen if "called a synchronizing" in str(each.message)]
        places = collections.Counter(
            f"{each.filename.rsplit('site-packages/')[-1].rsplit('src/')[-1]}:{each.lineno}" for each in found
        )
        row = {"documents": name, **way, "waits": dict(places.most_common())}
        yield row | ({"failed": "tasks wait for the device"} if places else {})


_run_next = StageRunner.run_next


def _watched(runner: StageRunner) -> None:
    """Run a task while PyTorch warns of each wait for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        _run_next(runner)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels(
    device: torch.device,
    *,
    sizes: dict[str, int] = BILLION,
    tokens: int = 16_384,
    slice_tokens: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:
    """Return which kernels a warm step spends its time in, how many are launched, and how long the device is idle."""
    model = llama(sizes, device, dtype)
    engine = vl.SliceEngine(model, slice_tokens)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    found = []
    for name, batch in batches(sizes, tokens).items():
        taken = seconds(lambda batch=batch: fresh_step(model, engine, batch), device, rounds=3)
        with profile(activities=activities) as seen:
            fresh_step(model, engine, batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
        rows = [each for each in seen.key_averages() if each.self_device_time_total > 0]
        rows = [each for each in rows if not each.key.startswith("aten::")]
        rows.sort(key=lambda each: -each.self_device_time_total)
        busy = sum(each.self_device_time_total for each in rows) / 1e6
        found.append(
            {
                "documents": name,
                "count": int(batch.document_lengths.size),
                "seconds": taken,
                "busy_s": busy,
                "launches": sum(each.count for each in rows),
                "top": [
                    {
                        "kernel": each.key[:120],
                        "count": each.count,
                        "seconds": each.self_device_time_total / 1e6,
                    }
                    for each in rows[:25]
                ],
            }
        )
    return found


ROWS = (256, 512, 1024, 2048, 4096, 8192)
KEYS = (8192, 32_768, 131_072)
HEADS = ((8, 1), (32, 8))
"""Query and key heads: what tensor parallelism of 4 leaves of an 8B model, and all of it."""
HEAD_DIM = 128
ROUNDS = 4


def rates(
    device: torch.device,
    *,
    rows: tuple[int, ...] = ROWS,
    keys: tuple[int, ...] = KEYS,
    heads: tuple[tuple[int, int], ...] = HEADS,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:
    """Time the attention of the last rows of documents, and say what rate that is.

    A backward pass is counted at 2.5 times the FLOPs of the forward pass, as papers do.
    """
    found = []
    for query_heads, key_heads in heads:
        shape = replace(
            ModelShape.named("llama-3-8b"),
            heads=query_heads,
            kv_heads=key_heads,
            head_dim=HEAD_DIM,
            value_head_dim=HEAD_DIM,
        )
        points = [(few, many) for few, many in product(rows, keys) if few <= many]
        for few, many in points:
            probe = attention_probe(shape, few, many, device, dtype)
            run_once(probe, device)
            rounds = np.stack([run_once(probe, device) for _ in range(ROUNDS)])
            forward_s, backward_s = quiet(rounds).tolist()
            found.append(
                {
                    "query_heads": query_heads,
                    "key_heads": key_heads,
                    "rows": probe.rows,
                    "keys": many,
                    "forward_s": forward_s,
                    "backward_s": backward_s,
                    "forward_tflops": probe.flops / forward_s / 1e12,
                    "backward_tflops": BACKWARD_RATIO * probe.flops / backward_s / 1e12,
                }
            )
    return found
