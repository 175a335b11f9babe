"""LayerRules: how one attention layer weighs what it attends to, as every kernel needs to know it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRules:
    """How one layer weighs what it attends to."""

    scale: float | None = None
    """Factor on scores; None for `head_dim ** -0.5`."""
    window: int | None = None
    """Attend to the last this many tokens, the token itself included; None for all."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`; None for no cap."""
    sinks: torch.Tensor | None = None
    """`[query_heads]`: a score per head that takes up weight and gives no value."""
    dropout: float = 0.0
    """Share of attention weights set to 0."""
