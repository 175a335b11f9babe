"""`python -m benchmarks.gpu FILE`: what needs a CUDA device, checked and measured in one short run.

Isolation of small models under every attention that the device has, the fused kernels against float32, real
training steps padded and packed, and how fast batches reach the device. One JSON file holds all of it; without
a CUDA device the program says so and writes nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import varlen as vl
from benchmarks.machine import machine, versions
from varlen.adapters import hf
from varlen.errors import VarlenError

FAMILIES = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "bamba",
    "lfm2",
    "nemotron_h",
    "qwen3_next",
)
"""Plain ones, sliding windows, soft caps, sinks, experts, and recurrent layers of every kind."""
STEP = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
}
CAPACITY = 8192
ROUNDS = 5


def isolation(
    device: str = "cuda",
    families: Sequence[str] = FAMILIES,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> list[dict[str, Any]]:
    """Verify tiny models of some families, with every attention and layout, in the dtypes that the kernels take."""
    found = []
    for family in families:
        for dtype in dtypes:
            row = {"family": family, "dtype": str(dtype).removeprefix("torch.")}
            try:
                report = vl.verify(family, device=device, dtype=dtype, calls=False)
            except (VarlenError, RuntimeError) as error:
                reason = str(error).splitlines()[0][:200]
                found.append({**row, "attention": "all", "verdict": "not run", "reason": reason})
                continue
            found += [{**row, **_cell(cell)} for cell in report.cells]
    return found


def _cell(cell: Any) -> dict[str, Any]:
    gradients = None if cell.gradients is None else cell.gradients.difference
    return {
        "attention": cell.backend,
        "layout": cell.layout,
        "verdict": cell.verdict,
        "reason": cell.reason,
        "stand_in": list(cell.stand_in),
        "kernels": dict(cell.kernels),
        "gradients": gradients,
    }


def seconds(call: Callable[[], Any]) -> float:
    """Median time of a call on the device, after two calls that warm up."""
    for _ in range(2):
        call()
    taken = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken)


def documents() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """512 documents of skewed lengths up to the capacity: lengths, tokens, offsets."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.0, 1.2, 512).clip(16, CAPACITY).astype(np.int32)
    tokens = rng.integers(0, STEP["vocab_size"], int(lengths.sum())).astype(np.int32)
    return lengths, tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def training_steps() -> dict[str, Any]:
    """Time forward and backward of one Llama in bfloat16 on the same documents, padded and packed."""
    lengths, tokens, offsets = documents()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**STEP)).to("cuda", torch.bfloat16)
    packing = vl.pack(lengths, capacity=CAPACITY)
    order = np.random.default_rng(1).permutation(lengths.size)

    def step(batches: list[dict[str, Any]]) -> None:
        for inputs in batches:
            model(**inputs).loss.backward()
        model.zero_grad(set_to_none=True)

    def padded() -> list[dict[str, Any]]:
        batches = []
        for group in order.reshape(-1, 16):
            width = int(lengths[group].max())
            ids = np.zeros((16, width), np.int64)
            kept = np.zeros((16, width), np.int64)
            for row, document in enumerate(group):
                ids[row, : lengths[document]] = tokens[offsets[document] : offsets[document + 1]]
                kept[row, : lengths[document]] = 1
            labels = np.where(kept == 1, ids, -100)
            tensors = {"input_ids": ids, "attention_mask": kept, "labels": labels}
            batches.append({k: torch.from_numpy(v).cuda() for k, v in tensors.items()} | {"use_cache": False})
        return batches

    hf.register()
    result: dict[str, Any] = {"documents": int(lengths.size), "tokens": int(lengths.sum())}
    model.set_attn_implementation("sdpa")
    inputs = padded()
    result["padded_tokens"] = int(sum(batch["input_ids"].numel() for batch in inputs))
    result["padded_sdpa_s"] = seconds(lambda: step(inputs))
    result["padded_peak_bytes"] = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hf.use_varlen_attention(model)
    fours = np.array_split(np.arange(packing.num_packs), max(1, packing.num_packs // 4))
    pieces = [vl.collate((tokens, offsets), packing, pack_ids=part, layout="flat") for part in fours]
    packed = [hf.model_inputs(piece, model) for piece in pieces]
    result["packed_varlen_s"] = seconds(lambda: step(packed))
    result["packed_peak_bytes"] = torch.cuda.max_memory_allocated()
    result["ratio"] = result["padded_sdpa_s"] / result["packed_varlen_s"]
    return result


def transfer() -> dict[str, Any]:
    """Time a batch from flat tokens to tensors on the device, beside a plain copy of as many bytes."""
    lengths, tokens, offsets = documents()
    packing = vl.pack(lengths, capacity=CAPACITY)
    out = vl.collate((tokens, offsets), packing)
    bytes_moved = 16 * out.input_ids.size
    pinned = torch.empty(bytes_moved, dtype=torch.uint8).pin_memory()
    target = torch.empty(bytes_moved, dtype=torch.uint8, device="cuda")
    return {
        "tokens": int(out.num_tokens),
        "bytes": int(bytes_moved),
        "collate_s": seconds(lambda: vl.collate((tokens, offsets), packing, out=out)),
        "to_device_s": seconds(lambda: out.to_torch("cuda")),
        "pinned_copy_s": seconds(lambda: target.copy_(pinned, non_blocking=True)),
    }


def main() -> int:
    """Run everything and write the file named on the command line."""
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was run and nothing was written", file=sys.stderr)
        return 2
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "gpu.json")
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "versions": {**versions(), "cuda": torch.version.cuda},
        "isolation": isolation(),
        "steps": training_steps(),
        "transfer": transfer(),
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("steps", "transfer")}, indent=1))
    for row in result["isolation"]:
        print(
            f"{row['family']:<12} {row['attention']:<18} {row.get('layout', ''):<5} {row['dtype']:<9} "
            f"{row['verdict']:<9} {', '.join(row.get('kernels', ()))} {row['reason'][:80]}"
        )
    return int(any(row["verdict"] == "leaks" for row in result["isolation"]))


if __name__ == "__main__":
    sys.exit(main())
