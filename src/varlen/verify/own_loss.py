"""OwnLoss: the loss that a model returns, against the cross-entropy of its own logits.

A term over the whole batch, such as a router's, depends on what was packed together: no leak, but no sum over
documents either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from varlen.adapters import hf
from varlen.batch.packed import IGNORE_INDEX
from varlen.verify.trial import Trial

_ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 1e-3}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoss:
    """What a model returns as its loss."""

    loss: float
    cross_entropy: float
    """Mean over the targets, from the logits that came with it."""
    auxiliary: float | None
    """The auxiliary loss that came with it; None where none did."""
    is_sum: bool
    """Whether the loss is a sum over targets, or its mean, but for rounding."""

    @property
    def coupling(self) -> str:
        """How the loss couples documents, in a sentence; empty where it doesn't."""
        if self.is_sum:
            return ""
        what = (
            ""
            if self.auxiliary is None
            else f", its auxiliary loss over the whole batch {self.auxiliary:.4g}"
        )
        return (
            f"the model's own loss is {self.loss:.6g}, the mean cross-entropy of its targets "
            f"{self.cross_entropy:.6g}{what}: the difference depends on which documents share a batch"
        )


def own_loss(trial: Trial) -> OwnLoss | None:
    """Ask a model for its loss, and compute it from its logits; None where it returns none.

    Args:
        trial: the model and the batch, in eval mode.
    """
    arguments = trial.inputs(trial.batch, trial.model)
    labels = arguments.get("labels")
    if labels is None or not bool((labels[:, 1:] != IGNORE_INDEX).any()):
        return None
    try:
        outputs = trial.model(**arguments)
    except (
        Exception
    ):  # some compute a loss of their own that needs more than labels; nobody is misled by none
        return None
    loss, logits = getattr(outputs, "loss", None), getattr(outputs, "logits", None)
    if loss is None or logits is None or loss.ndim or logits.shape[:2] != labels.shape:
        return None
    expected = cross_entropy(
        logits[:, :-1].flatten(0, 1).float(),
        labels[:, 1:].flatten().to(logits.device),
        ignore_index=IGNORE_INDEX,
    )
    auxiliary: Any = getattr(outputs, "aux_loss", None)
    has_auxiliary = torch.is_tensor(auxiliary) and auxiliary.numel() == 1
    rounding = _ROUNDING.get(hf.unwrap(trial.model).dtype, 1e-4)
    targets = int((labels[:, 1:] != IGNORE_INDEX).sum())
    close = [
        abs(float(loss) - each) <= rounding * max(1.0, abs(each))
        for each in (float(expected), float(expected) * targets)
    ]
    return OwnLoss(
        loss=float(loss),
        cross_entropy=float(expected),
        auxiliary=float(auxiliary) if has_auxiliary else None,
        is_sum=not (has_auxiliary and float(auxiliary) and _adds_auxiliary(trial.model)) and any(close),
    )


def _adds_auxiliary(model: object) -> bool:
    """Return whether the configuration adds an auxiliary loss: rounding may hide a small one."""
    config = hf.text_config(model)
    weights = (
        getattr(config, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha")
    )
    return bool(getattr(config, "output_router_logits", False)) and any(weights)
