"""The longest document that trains in so many bytes: unsliced, in slices, and with what slices keep in host memory.

By formula, for two real shapes on a card of 80 GB and its part of a host's memory, and measured on small models of
both kinds on a CPU, whose tensors are counted one by one. Unsliced stands for two peers: (a) no layer computed again,
and (b) each layer computed again from its input; both compute the loss in chunks.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal
from unittest import mock

import numpy as np
import torch

import varlen as vl
from benchmarks.gpu.models import llama, llama_sizes, one_document
from benchmarks.gpu.slices import checkpointed, chunked_loss
from varlen.attention import rectangles
from varlen.cost.memory import HEAD, LOGIT_ROWS, OWN, Kernels, Saved
from varlen.plan.one_gpu import one_gpu_plan
from varlen.runtime.clock import bytes_meter
from varlen.step_plan import Mesh, Offload, Recompute

CARD_BYTES: Final = 0.92 * 80e9
HOST_BYTES: Final = 2e12 / 8 / 2
"""Of a host of 2 TB with eight GPUs, as a DGX H100 has; half of each part, since PyTorch rounds pinned blocks up to
powers of two."""
MESH: Final = Mesh(dp=64, sharding="parameters")
"""So that states of 64 GPUs are divided: what is left of a card is for one GPU's document."""
SLICE_TOKENS: Final = 4096
MOST_TOKENS: Final = 2**24
"""No card holds a document of as many."""
SHAPES: Final = {
    "GQA": vl.ModelShape.named("llama-3-8b"),
    "MHA": vl.ModelShape(
        name="llama-2-7b", hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab=32000
    ),
}
LEAST_OVER_A, LEAST_OVER_B = 8.0, 8.0
"""Slices over (a) on the device, and over (b) with keys, values and their gradients in host memory; for GQA."""
MODELS: Final[dict[str, dict[str, int]]] = {
    "GQA": llama_sizes(128, 448, 8, 2, layers=8, vocab=512),
    "MHA": llama_sizes(128, 344, 8, 8, layers=8, vocab=512),
}
"""Heads, widths and layers in the proportions of the shapes above, a 32nd as wide."""
FIRST_TOKENS: Final = 1024
"""What (a) reaches: the budget is the bytes that it then takes."""
SMALL_SLICE_TOKENS: Final = 256
COMPARED_TOKENS: Final = 4096
"""At which peaks with and without the arithmetic of attention are compared."""
NEAR: Final = 0.99
"""A length whose peak is within this share of the budget is the longest; further ones aren't looked for."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train a document."""

    name: str
    kind: Literal["whole", "sliced"]
    recompute: Recompute
    saved: Saved = "layers"
    offload: Offload = "none"


WAYS: Final = (
    Way(name="(a) unsliced", kind="whole", recompute="none"),
    Way(name="(b) unsliced, each layer again", kind="whole", recompute="full"),
    Way(name="slices", kind="sliced", recompute="full"),
    Way(name="slices, the stage's input", kind="sliced", recompute="full", saved="stage"),
    Way(name="slices, offload", kind="sliced", recompute="full", offload="kv"),
    Way(
        name="slices, the stage's input, offload",
        kind="sliced",
        recompute="full",
        saved="stage",
        offload="kv",
    ),
)


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    formula = {name: by_formula(shape) for name, shape in SHAPES.items()}
    measured = {name: by_measure(sizes) for name, sizes in MODELS.items()}
    return {
        "card_bytes": CARD_BYTES,
        "host_bytes": HOST_BYTES,
        "mesh": {"dp": MESH.dp, "sharding": MESH.sharding},
        "slice_tokens": SLICE_TOKENS,
        "formula": formula,
        "models": MODELS,
        "small_slice_tokens": SMALL_SLICE_TOKENS,
        "measured": measured,
        "targets": {
            part: targets(cells["GQA"]) for part, cells in (("formula", formula), ("measured", measured))
        },
    }


def targets(found: dict[str, Any]) -> dict[str, Any]:
    """The best way on the device over (a), and the best in host memory over (b)."""
    cells = {cell["name"]: cell for cell in found["cells"]}
    near = max(cells[way.name]["over_a"] for way in WAYS if way.kind == "sliced" and way.offload == "none")
    far = max(cells[way.name]["over_b"] for way in WAYS if way.offload == "kv")
    return {
        "device_over_a": near,
        "device_met": near >= LEAST_OVER_A,
        "host_over_b": far,
        "host_met": far >= LEAST_OVER_B,
    }


def by_formula(shape: vl.ModelShape, kernels: Kernels = "eager") -> dict[str, Any]:
    lengths = {way.name: tokens_of(shape, way, kernels) for way in WAYS}
    far = {way.name: host_bytes_of(shape, way, lengths[way.name]) for way in WAYS}
    return {"shape": shape.name, "kernels": kernels, "cells": cells_of(lengths, host_bytes=far)}


def host_bytes_of(shape: vl.ModelShape, way: Way, tokens: int) -> int:
    """What a document has in host memory: keys, values, their gradients in float32, and what goes into the stage."""
    kept = 3 * shape.kv_bytes_per_token_layer * shape.layers + 2 * shape.hidden * (way.saved == "stage")
    return tokens * kept * (way.offload == "kv")


def tokens_of(shape: vl.ModelShape, way: Way, kernels: Kernels = "eager") -> int:
    """The longest document of a shape on the card and in host memory, by the cost model; slices are simulated.

    The unsliced model holds no gradients of keys and values between tasks; and where each layer is computed again,
    it holds their inputs, and keys and values of the layer that runs.
    """
    cost = vl.CostModel(
        model=shape,
        hardware=vl.Hardware.named("h100"),
        kernels=kernels,
        recompute=way.recompute,
        saved=way.saved,
        offload=way.offload,
    )
    found = cost.memory(MESH)
    left, elsewhere = CARD_BYTES - float(found.state_bytes[0]), float(cost.memory(vl.Mesh()).state_bytes[0])
    held, keys = float(found.held_bytes[0]), shape.kv_bytes_per_token_layer
    if way.kind == "whole" and way.recompute == "full":
        held += keys * ((kernels == "eager") - shape.layers)
    peaks = found.backward_peaks[0]

    def peak(tokens: int) -> float:
        if way.kind == "whole":
            passing = peaks[:, OWN] * tokens + peaks[:, HEAD] * min(tokens, LOGIT_ROWS)
            return held * tokens + float(passing.max())
        lengths = np.array([tokens], np.int32)
        plan = one_gpu_plan(lengths, SLICE_TOKENS, recompute=way.recompute, offload=way.offload)
        return vl.simulate(plan, cost).peak_bytes - elsewhere

    most = int(HOST_BYTES / host_bytes_of(shape, way, 1)) if way.offload == "kv" else MOST_TOKENS - 1
    return bisect_right(range(1, most + 1), left, key=peak)


def cells_of(lengths: dict[str, int], **more: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": way.name,
            "tokens": lengths[way.name],
            "over_a": lengths[way.name] / lengths[WAYS[0].name],
            "over_b": lengths[way.name] / lengths[WAYS[1].name],
            **{name: values[way.name] for name, values in more.items()},
        }
        for way in WAYS
    ]


def by_measure(sizes: dict[str, int]) -> dict[str, Any]:
    model = llama(sizes, torch.device("cpu"))
    budget = peak_of(model, sizes, WAYS[0], FIRST_TOKENS)
    lengths, peaks, guess = {WAYS[0].name: FIRST_TOKENS}, {WAYS[0].name: budget}, 4 * FIRST_TOKENS
    shape = vl.ModelShape.from_config(model.config)
    for way in WAYS[1:]:
        peak = lambda tokens, way=way: peak_of(model, sizes, way, tokens)  # noqa: E731
        lengths[way.name], peaks[way.name] = longest(peak, budget, guess)
        print(f"  {way.name}: {lengths[way.name]:,} tokens", flush=True)
    last = WAYS[-1]
    return {
        "budget_bytes": budget,
        "cells": cells_of(
            lengths,
            peak_bytes=peaks,
            host_bytes={way.name: host_bytes_of(shape, way, lengths[way.name]) for way in WAYS},
        ),
        "compared_tokens": COMPARED_TOKENS,
        "compared_bytes": [
            peak_of(model, sizes, last, COMPARED_TOKENS),
            peak_of(model, sizes, last, COMPARED_TOKENS, computes=True),
        ],
    }


def longest(peak: Callable[[int], int], budget: int, guess: int) -> tuple[int, int]:
    """The most tokens whose peak is within the budget, to `NEAR` of its bytes, and that peak.

    Peaks grow about in proportion; the search begins with `guess` tokens.
    """
    low, low_bytes, high, tokens = 0, 0, 0, guess
    while not low_bytes > NEAR * budget:
        found = peak(tokens)
        if found <= budget:
            low, low_bytes = tokens, found
        else:
            high = tokens
        # Where peaks grow in proportion, the next length is just within the budget.
        wanted = int(tokens * 0.997 * budget / found) if found <= budget or not low else (low + high) // 2
        if low and not high:
            wanted = min(max(wanted, low + 1), 16 * low)
        elif low:
            wanted = min(max(wanted, low + 1), high - 1)
        if high and high - low <= 1:
            break
        tokens = wanted
    return low, low_bytes


def peak_of(model: Any, sizes: dict[str, int], way: Way, tokens: int, *, computes: bool = False) -> int:
    """The most bytes of tensors alive at once in a step of one document, apart from parameters and their gradients.

    Unless it `computes`, attention of slices makes tensors of the same sizes and no more. The bytes are those of
    the computed ones, and a long document doesn't take hours.
    """
    batch = one_document(sizes, tokens)
    with bytes_meter(torch.device("cpu")) as meter:
        if way.kind == "sliced":
            engine = vl.SliceEngine(model, SMALL_SLICE_TOKENS, saved=way.saved, offload=way.offload)
            with contextlib.nullcontext() if computes else attention_left_out():
                engine.step(batch)
        elif way.recompute == "full":
            checkpointed(model, batch, torch.device("cpu"))
        else:
            model.set_attn_implementation("sdpa")
            hidden = model.model(input_ids=batch.to_torch().input_ids.long(), use_cache=False)
            chunked_loss(model, hidden.last_hidden_state, batch.to_torch().labels, batch.num_targets)
            del hidden
    return int(meter.peak)


@contextlib.contextmanager
def attention_left_out() -> Iterator[None]:
    """Let rectangles of attention be tensors of the right sizes."""

    def forward(query: torch.Tensor, *_: Any, **__: Any) -> Any:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros_like(query.transpose(1, 2)).transpose(1, 2)
        return out, query.new_zeros(query.shape[:3], dtype=wide)

    def backward(_: torch.Tensor, *qkv: Any, **__: Any) -> Any:
        return tuple(torch.zeros_like(x.transpose(1, 2)).transpose(1, 2) for x in qkv[:3])

    with (
        mock.patch.object(rectangles, "forward", forward),
        mock.patch.object(rectangles, "backward", backward),
    ):
        yield
