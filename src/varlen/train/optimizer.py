"""AdamW, and its learning rate as a function of the step alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from varlen.train.settings import OptimizerSettings


def make_optimizer(
    model: torch.nn.Module, settings: OptimizerSettings, device: torch.device
) -> torch.optim.AdamW:
    """Return AdamW over a model's parameters, of which only matrices decay.

    Args:
        model: sharded or not.
        settings: of the optimizer.
        device: where the parameters are; decides whether the fused kernel is there.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=fused,
        foreach=None if fused else True,
    )


def learning_rate(step: int, steps: int | None, settings: OptimizerSettings) -> float:
    """Return the learning rate of a step.

    Args:
        step: from 1.
        steps: of the whole training; "constant" needs none.
        settings: of the optimizer.

    >>> settings = OptimizerSettings(learning_rate=1.0, schedule="linear", warmup_steps=2)
    >>> [learning_rate(step, 6, settings) for step in range(1, 7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    highest, lowest, warmup = settings.learning_rate, settings.min_learning_rate, settings.warmup_steps
    if step <= warmup:
        return highest * step / warmup
    if settings.schedule == "constant" or steps is None:
        return highest
    passed = min((step - warmup) / max(steps - warmup, 1), 1.0)
    if settings.schedule == "cosine":
        return lowest + (highest - lowest) * (1 + math.cos(math.pi * passed)) / 2
    return lowest + (highest - lowest) * (1 - passed)
