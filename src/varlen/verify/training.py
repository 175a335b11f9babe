"""in_training: the same question in training mode, where models may compute otherwise than in eval mode.

Recurrent layers have kernels of their own there, norms take statistics of the batch, experts drop or jitter, losses
get terms. Dropout is left out, since it would hide everything else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from varlen.errors import ModelError
from varlen.verify.isolation import IsolationReport, Movements, Verdict, against_alone, judge
from varlen.verify.own_loss import own_loss
from varlen.verify.said import said
from varlen.verify.trial import Trial, untouched

_CHANGED = 4
"""At most so many documents are changed."""
_DROPPING = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


class _WithoutDropout(TorchFunctionMode):
    """Lets values through where they would be dropped."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch, unless it drops."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPPING:
            return args[0] if args else given["input"]
        if name == "scaled_dot_product_attention":
            given |= {"dropout_p": 0.0} if len(args) < 5 else {}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return func(*args, **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class InTraining:
    """What training mode adds to what was found in eval mode."""

    verdict: Verdict = "isolated"
    reason: str = ""
    """Why the verdict isn't "isolated"; empty if it is."""
    unjudged: str = ""
    """Why documents' movements tell nothing; empty where they do."""


def in_training(trial: Trial, in_eval: torch.Tensor, found: IsolationReport) -> InTraining:
    """Judge in training mode what is isolated in eval mode.

    Where logits are the same to the bit in both modes, so is the verdict.

    Args:
        trial: the model, isolated in eval mode, and its batch.
        in_eval: logits of the batch in eval mode.
        found: the report of eval mode.
    """
    verdict: Verdict = "isolated"
    reason, wavering = "", 0.0
    with untouched(trial.model), _training(trial.model):
        try:
            before = trial.logits(trial.batch)
            differs = not torch.equal(before, in_eval)
            wavering = _wavering(trial, before) if differs else 0.0
            if differs and wavering <= found.rounding:
                verdict, reason = judge(_movements(trial, before, found), found.tolerance, found.rounding)
            if verdict == "isolated" and (loss := own_loss(trial)) is not None and loss.coupling:
                verdict, reason = "coupled", loss.coupling
        except (ModelError, NotImplementedError) as error:
            verdict, reason = "refuses", said(error)
    unjudged = ""
    if wavering > found.rounding:
        unjudged = (
            f"the same batch gives other logits a second time, by {wavering:.3g}: random numbers are drawn beside "
            "dropout"
        )
    told = f"in training mode, {reason}" if reason else ""
    return InTraining(verdict=verdict, reason=told, unjudged=unjudged)


def _wavering(trial: Trial, before: torch.Tensor) -> float:
    return trial.moved(before, trial.logits(trial.batch), trial.owner >= 0)


def _movements(trial: Trial, before: torch.Tensor, found: IsolationReport) -> Movements:
    """Change some documents, and padding; compare with documents alone."""
    chosen = trial.choose(_CHANGED)
    against = against_alone(trial, before, chosen)
    padding, others = 0.0, []
    for document in chosen:
        after = trial.logits(trial.changed(document))
        others.append(trial.moved(before, after, trial.others(document)))
    if (trial.owner < 0).any():
        padding = trial.moved(before, trial.logits(trial.changed(-1)), trial.owner >= 0)
    stays = max(*others, padding) == 0 and against["alone_difference"] <= found.tolerance
    return replace(
        found.movements,
        changed_documents=len(chosen),
        largest_difference=max(others),
        padding_difference=padding,
        row_coupling=None if stays else trial.row_coupling(found.tolerance),
        attention_across=None,
        **against,
    )


@contextmanager
def _training(model: Any) -> Iterator[None]:
    """Put a model into training mode without dropout, and its buffers back afterwards: norms would count on."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    try:
        with _WithoutDropout(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # checkpointing warns where there is no gradient
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
