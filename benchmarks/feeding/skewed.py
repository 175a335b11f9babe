"""Training jobs of two processes on skewed documents: packed batches beside padded ones, and who waits for whom.

A small Llama is sharded over both processes (FSDP2 over gloo), so that each waits for the other in every layer. Both
ways train the same documents of a published set of lengths, cut at `CAPACITY`, in a random order.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs import REAL_LENGTHS, Documents, real_lengths, write_store
from benchmarks.rows import Race, Row, Samples, Step

RANKS = 2
CAPACITY = 4096
BATCH = 16
"""Documents that a rank pads to the longest of them."""
DOCUMENTS = 128
VOCABULARY = 1024
TARGET = 4.7
SETS = {
    "mix_sft": TARGET,
    "pub_flexsp_wikipedia": TARGET,
    "pub_magiattention_buckets": None,
    "code_src": None,
}
"""Published sets, the most skewed first, and how many times faster packed batches must be."""


def steps() -> list[Step]:
    if not REAL_LENGTHS.exists():
        return []
    return [Step(f"FSDP, {name}", partial(_race, name, target)) for name, target in SETS.items()]


def _race(name: str, target: float | None) -> list[Row]:
    lengths = dict(real_lengths(only=name))[name]
    chosen = np.random.default_rng(0).permutation(len(lengths))[:DOCUMENTS]
    documents = Documents.draw(np.clip(lengths[chosen], 2, CAPACITY), vocabulary=VOCABULARY)
    with tempfile.TemporaryDirectory() as folder:
        write_store(documents, Path(folder))
        packed, padded = (_job(Path(folder), way) for way in ("packed", "padded"))
    as_packed, as_padded = (Samples([job["seconds"]], []) for job in (packed, padded))
    peer = f"causal attention without a mask, {_said(padded)}"
    return [
        Race.of(
            f"FSDP2 on {RANKS} processes, {DOCUMENTS} documents of {name}, {documents.num_tokens:,} tokens",
            (f"PackedLoader, {_said(packed)}", as_packed),
            (f"padded, {BATCH} documents a rank", peer, as_padded),
            tokens=documents.num_tokens,
            target=target,
            by_wall=True,
            note=f"{padded['positions'] / documents.num_tokens:.2f} positions a token where padded",
        )
    ]


def _said(job: dict[str, Any]) -> str:
    shares = " and ".join(f"{100 * waited / job['seconds']:.0f} %" for waited in job["waited"])
    return f"{job['steps']} steps, ranks wait {shares} of the time in collectives"


def _job(folder: Path, way: str) -> dict[str, Any]:
    """Run all ranks of a job; returns seconds of the slowest, and what each waited."""
    from benchmarks.running.processes import side_by_side

    told = side_by_side(_trained, RANKS, folder, way)
    tokens = int(np.load(folder / "offsets.npy")[-1])
    if sum(rank["tokens"] for rank in told) != tokens:
        raise RuntimeError(f"{sum(rank['tokens'] for rank in told):,} tokens were trained of {tokens:,}")
    return {
        "seconds": max(rank["seconds"] for rank in told),
        "waited": [rank["waited_s"] for rank in told],
        "positions": sum(rank["positions"] for rank in told),
        "steps": told[0]["steps"],
    }


def _trained(rank: int, folder: Path, way: str) -> dict[str, Any]:
    """Train as one rank of a job, on a core of its own."""
    import torch
    from torch import distributed

    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    model = _sharded(way)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = _packed(folder, rank, model) if way == "packed" else _padded(folder, rank)
    waited = _count_waiting()
    found: dict[str, Any] = {"tokens": 0, "positions": 0, "steps": 0}
    begun = 0.0
    for number, (inputs, tokens) in enumerate(batches):
        if number == 1:  # the first step, of few tokens, warms up
            distributed.barrier()
            waited[0], begun = 0.0, time.perf_counter()
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number:
            found["steps"] += 1
            found["tokens"] += tokens
            found["positions"] += inputs["input_ids"].numel()
    return {**found, "seconds": time.perf_counter() - begun, "waited_s": waited[0]}


def _sharded(way: str) -> Any:
    """Build the model, with weights drawn from a seed, and shard it layer by layer."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.gpu.models import llama_sizes
    from varlen.adapters import hf

    torch.manual_seed(0)
    sizes = llama_sizes(64, 176, 4, 4, layers=2, vocab=VOCABULARY, positions=CAPACITY)
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    if way == "packed":
        hf.use_varlen_attention(model)
    else:
        model.set_attn_implementation("sdpa")
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _count_waiting() -> list[float]:
    """Have the time that collectives are waited for added up."""
    from torch._C._distributed_c10d import Work

    waited, wait = [0.0], Work.wait

    def timed(self: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return wait(self, *arguments)
        finally:
            waited[0] += time.perf_counter() - start

    Work.wait = timed
    return waited


def _packed(folder: Path, rank: int, model: Any) -> Iterator[tuple[dict[str, Any], int]]:
    import varlen as vl
    from varlen.adapters import hf

    with vl.PackedLoader(
        folder / "store", capacity=CAPACITY, global_batch_size=RANKS, dp_rank=rank, dp_world_size=RANKS
    ) as loader:
        yield hf.model_inputs(vl.collate([[1, 2, 3]], vl.pack([3], capacity=64)).to_torch(), model), 0
        for batch in loader:
            yield hf.model_inputs(batch.to_torch(), model), batch.num_tokens


def _padded(folder: Path, rank: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the same where documents are padded to the longest of a step."""
    import torch

    tokens, offsets = np.load(folder / "tokens.npy"), np.load(folder / "offsets.npy")
    lengths = np.diff(offsets)
    for start in range(rank * BATCH, len(lengths), RANKS * BATCH):
        chosen = np.arange(start, min(start + BATCH, len(lengths)))
        ids = np.zeros((len(chosen), lengths[chosen].max()), np.int64)
        labels = np.full_like(ids, -100)
        for row, document in enumerate(chosen):
            held = tokens[offsets[document] : offsets[document + 1]]
            ids[row, : len(held)], labels[row, : len(held)] = held, held
        inputs = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if start == rank * BATCH:
            yield {name: array[:1, :64] for name, array in inputs.items()}, 0
        yield inputs, int(lengths[chosen].sum())
