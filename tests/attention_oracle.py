"""Attention within segments by its formula, and what to give it."""

from __future__ import annotations

from typing import Any

import torch

from varlen.adapters.hf.attention import LayerRules

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int], rules: LayerRules
) -> Any:
    """Attention within segments, a query and a head at a time, as the formula says."""
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    scale = dim**-0.5 if rules.scale is None else rules.scale
    rows = []
    for start, stop in zip(ends[:-1], ends[1:]):
        for i in range(start, stop):
            first = start if rules.window is None else max(start, i - rules.window + 1)
            for h in range(heads):
                scores = k[first : i + 1, h // group] @ q[i, h] * scale
                if rules.softcap:
                    scores = rules.softcap * torch.tanh(scores / rules.softcap)
                weights = torch.exp(scores)
                total = weights.sum()
                if rules.sinks is not None:
                    total = total + torch.exp(rules.sinks[h])
                rows.append((weights / total) @ v[first : i + 1, h // group])
    return torch.stack(rows).view(tokens, heads, -1)


def tensors(tokens: int, heads: int, groups: int, value_dim: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, 4), (tokens, groups, 4), (tokens, groups, value_dim))
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    )


def ends_of(lengths: list[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]
