"""Probes: one kernel's worth of work each, forward and backward, timed side by side in rounds.

What else runs on a machine slows a probe down for a while and never speeds it up. Probes therefore take turns, round
after round, and `Timings.seconds` is the lower quartile of a probe's rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from varlen.cost.shape import ModelShape
from varlen.runtime.attention import CachedSlice, attend
from varlen.runtime.clock import Clock
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.flash import Rule
from varlen.runtime.kv_cache import DocumentCache
from varlen.types import FloatArray

QUIET = 0.25
"""The quantile of a probe's rounds that stands for it."""
ProbeKind = Literal["attention", "layer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Work of one size that a machine is measured with."""

    kind: ProbeKind
    """Attention alone, or a layer without its attention."""
    rows: int
    keys: int = 0
    """Of attention: up to as many rows as keys are the last rows of one document, more are whole documents."""
    flops: float
    """Of its matrix products, forward."""
    prepare: Callable[[], Any]
    """Makes a run's inputs, which isn't timed."""
    forward: Callable[[Any], Any]
    backward: Callable[[Any], object]


def quiet(rounds: npt.NDArray[np.float64]) -> FloatArray:
    """Return the lower quartile over the first axis, a time that was taken: what the work takes undisturbed."""
    return np.quantile(rounds, QUIET, axis=0, method="lower")


def run_round(
    probes: Sequence[Probe], run: Callable[[Probe], FloatArray], *, is_back: bool = False
) -> FloatArray:
    """Time every probe once, and return seconds of both passes, float64 `[probes, 2]`."""
    taken = np.zeros((len(probes), 2))
    for index in reversed(range(len(probes))) if is_back else range(len(probes)):
        taken[index] = run(probes[index])
    return taken


def run_once(probe: Probe, device: torch.device) -> FloatArray:
    """Run one probe, and return the seconds of both passes, float64 `[2]`."""
    given, clock = probe.prepare(), Clock(device)
    clock.mark()
    made = probe.forward(given)
    clock.mark()
    probe.backward(made)
    clock.mark()
    return clock.seconds()


def pairs_of(rows: int, keys: int) -> float:
    """Return the pairs of a query and a key that `attention_probe` computes.

    >>> pairs_of(2, 3), pairs_of(6, 3)
    (5.0, 12.0)
    """
    before = max(keys - rows, 0)
    return max(1, rows // keys) * (keys * (keys + 1) - before * (before + 1)) / 2


def attention_probe(
    model: ModelShape, rows: int, keys: int, device: torch.device, dtype: torch.dtype
) -> Probe:
    """Return attention of the last `rows` of a document of `keys` tokens, or of `rows / keys` whole documents."""
    spans = [(keys - rows, keys)] if rows <= keys else [(0, keys)] * (rows // keys)
    rows = sum(stop - start for start, stop in spans)
    scale = model.head_dim**-0.5

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, model.head_dim, device=device, dtype=dtype).transpose(1, 2)

    query, key, value = leaves = [
        random(rows, heads).requires_grad_() for heads in (model.heads, model.kv_heads, model.kv_heads)
    ]
    gradient = random(rows, model.heads)
    earlier = (random(keys, model.kv_heads), random(keys, model.kv_heads))
    wide = torch.promote_types(dtype, torch.float32)
    sent = (torch.zeros_like(earlier[0], dtype=wide), torch.zeros_like(earlier[1], dtype=wide))

    def prepare() -> list[CachedSlice]:
        for leaf in leaves:
            leaf.grad = None
        slices = []
        for start, stop in spans:
            cache = DocumentCache(stop)
            cache.pairs[0] = earlier
            if start:  # as in the middle of a document, where later slices have run backward already
                cache.gradients[0] = sent
            slices.append(CachedSlice(cache=cache, start=start, stop=stop))
        return slices

    return Probe(
        kind="attention",
        rows=rows,
        keys=keys,
        flops=4.0 * model.heads * model.head_dim * pairs_of(rows, keys),
        prepare=prepare,
        forward=lambda slices: attend(query, key, value, slices, layer=0, rule=Rule(scale)),
        backward=lambda out: out.backward(gradient),
    )


def parts_of(model: ModelShape, device: torch.device, dtype: torch.dtype) -> DecoderParts:
    """Return one layer of a model's widths with random weights, its attention taken out.

    A Llama layer stands for every family: experts by the inner width that a token passes, latent attention by heads
    of its width. Gradients are there already, so that backward passes add to them as they do in a step.
    """
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=max(8, round(model.active_ffn)),
        num_hidden_layers=1,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=8,
        tie_word_embeddings=True,
    )
    AttentionInterface.register(_ABSENT, _absent_attention)
    with torch.device(device):
        decoder = LlamaForCausalLM._from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    parts = DecoderParts.of(decoder)
    decoder.set_attn_implementation(_ABSENT)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return parts


def layer_probe(parts: DecoderParts, rows: int) -> Probe:
    """Return a layer without its attention: projections, norms, rotary positions, the feed-forward part."""
    weight = parts.embedding.weight
    hidden = torch.randn(1, rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
    gradient = torch.randn_like(hidden)
    piece = [CachedSlice(cache=DocumentCache(rows), start=0, stop=rows)]
    positions = parts.positions(piece, hidden)
    matrices = sum(p.numel() for p in parts.layers[0].parameters() if p.ndim == 2)
    return Probe(
        kind="layer",
        rows=rows,
        flops=2.0 * matrices * rows,
        prepare=lambda: hidden.detach().requires_grad_(),
        forward=lambda given: parts.run_layer(0, given, positions, piece),
        backward=lambda out: out.backward(gradient),
    )


_ABSENT = "varlen_no_attention"


class _Absent(torch.autograd.Function):
    """Queries out as they came in, and gradients for keys and values, at no cost."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.key_heads = key.shape[1]
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, gradient[:, : ctx.key_heads], gradient[:, : ctx.key_heads]


def _absent_attention(
    _module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attend to nothing; transformers' calling convention."""
    out: torch.Tensor = _Absent.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), None
