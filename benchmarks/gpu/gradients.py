"""Gradients of slices in half precision on the device, beside float64 on the CPU; and that documents are kept apart.

Both of small models of several families, with every attention that the device has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, get_args

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import varlen as vl
from varlen.attention.kernels import Kernels
from varlen.errors import VarlenError

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 50},
    "gemma2": {"sliding_window": 50, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64},
    "gpt_oss": {"sliding_window": 50, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
}
"""Plain attention, windows, soft caps, sinks, normed heads, experts."""
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 3,
}
LENGTHS = (300, 5, 77, 130, 64, 11)
SLICE_TOKENS = 96

Gradients = dict[str, torch.Tensor]


def gradients(
    device: torch.device,
    *,
    families: Sequence[str] = tuple(FAMILIES),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32, torch.float16),
    kernels: Sequence[Kernels] = get_args(Kernels),
) -> Iterator[dict[str, Any]]:
    """Yield how far gradients are from float64's, of slices by each kernel and of whole documents by transformers.

    Errors are norms over all parameters, as a share of the float64 gradient's norm; weights are the same numbers in
    each dtype.
    """
    for dtype, family in product(dtypes, families):
        model, batch = _model(family, dtype), _batch()
        exact = _unsliced(copy.deepcopy(model).double(), batch, "eager")
        model = model.to(device)
        row = {"family": family, "dtype": str(dtype).removeprefix("torch.")}
        whole = _error(_unsliced(model, batch, "eager"), exact)
        for name in kernels if dtype != torch.float32 else ("auto",):
            row |= {"kernels": name, "unsliced_error": whole["error"]}
            try:
                stats = vl.SliceEngine(model, SLICE_TOKENS, kernels=name).step(batch)
                row |= {"used": stats.kernels, "refused": stats.refused_kernels}
                yield {**row, **_error(_taken(model), exact), "loss": stats.loss}
            except (VarlenError, RuntimeError) as error:
                model.zero_grad(set_to_none=True)
                yield {**row, "not_run": str(error)[:300]}


def _model(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    return model


def _batch() -> vl.PackedBatch:
    random = np.random.default_rng(0)
    documents = [random.integers(4, SIZES["vocab_size"], length).astype(np.int32) for length in LENGTHS]
    return vl.collate(documents, vl.pack(LENGTHS, capacity=max(LENGTHS)))


def _unsliced(model: Any, batch: vl.PackedBatch, implementation: str) -> Gradients:
    """Gradients of the model on its documents one by one."""
    model.set_attn_implementation(implementation)
    device = next(model.parameters()).device
    for row, places in enumerate(batch.segment_ids):
        for segment in range(places.max() + 1):
            ids = torch.as_tensor(batch.input_ids[row, places == segment]).long()[None].to(device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            (loss / batch.num_targets).backward()
    return _taken(model)


def _taken(model: Any) -> Gradients:
    found = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _error(found: Gradients, exact: Gradients) -> dict[str, Any]:
    """The error over all parameters, and the parameter with the largest of its own."""
    off = {name: float((found[name] - right).norm()) for name, right in exact.items()}
    sizes = {name: float(right.norm()) for name, right in exact.items()}
    shares = {name: off[name] / sizes[name] if sizes[name] else off[name] for name in off}
    worst = max(shares, key=lambda name: shares[name])
    total = float(np.linalg.norm(list(off.values())) / np.linalg.norm(list(sizes.values())))
    return {"error": total, "worst": worst, "worst_error": shares[worst]}


ISOLATED = (
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


def isolation(
    device: str = "cuda",
    families: Sequence[str] = ISOLATED,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Iterator[dict[str, Any]]:
    """Verify tiny models of some families, with every attention and layout, in the dtypes that the kernels take."""
    for family in families:
        for dtype in dtypes:
            row = {"family": family, "dtype": str(dtype).removeprefix("torch.")}
            try:
                report = vl.verify(family, device=device, dtype=dtype, calls=False)
            except (VarlenError, RuntimeError) as error:
                reason = str(error).splitlines()[0][:200]
                yield {**row, "attention": "all", "verdict": "not run", "reason": reason}
                continue
            yield from ({**row, **_cell(cell)} for cell in report.cells)


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
