"""GradientParity: the loss and every gradient of a packed batch against those of its documents one by one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from varlen.adapters import hf
from varlen.batch.packed import IGNORE_INDEX
from varlen.errors import ModelError, described
from varlen.verify.models.isolation import IsolationReport, Movements, Verdict, against_solo, judge
from varlen.verify.models.trial import Inputs, Trial, untouched

GRADIENT_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 5e-2}
"""How far rounding takes gradients from those of documents alone, as `GradientParity.difference` counts."""
_FLOOR = 1e-3  # gradients near 0 are compared relative to this share of the largest


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientParity:
    """How far packed gradients are from the sum of those of each document alone."""

    reason: str = ""
    """Why nothing was compared; empty where it was."""
    across: float | None = None
    """Largest gradient of a document's loss at the embedded tokens of another, or of padding, relative to the largest
    at its own: exactly 0 where documents are isolated, in any dtype. None where it wasn't asked."""
    difference: float | None = None
    """Largest difference of any gradient, relative to that parameter's largest; None where none was compared."""
    control: float | None = None
    """The same without boundaries, which must be larger than the tolerance; None where a row holds one document."""
    tolerance: float = 0.0
    """The largest difference that counts as rounding."""
    worst: str = ""
    """The parameter that differs most."""
    parameters: int = 0
    """How many parameters were compared."""
    loss: float | None = None
    """Mean loss over all targets, packed."""
    alone_loss: float | None = None
    """The same with each document run alone."""

    @property
    def fault(self) -> str:
        """What is wrong, in a sentence; empty where nothing is, or nothing was compared."""
        if self.across:
            share = f"{self.across:.3g} of that at its own"
            return f"the loss of one document has a gradient at the tokens of another, {share}"
        if self.difference is None or self.difference <= self.tolerance:
            return ""
        return (
            f"gradients differ by {self.difference:.3g} (in {self.worst}) from those of the documents one by one, "
            f"and rounding accounts for {self.tolerance:.3g}"
        )


Gradients = dict[str, torch.Tensor]


def gradient_parity(trial: Trial, dtype: torch.dtype) -> GradientParity:
    """Compare gradients of the summed loss of all targets, packed against one document at a time.

    Besides, each document's loss is followed back to the embedded tokens: none but its own may have a gradient. Two
    backward passes over the batch, one over it for each document, and one over each document. `.grad` is neither read
    nor written, but hooks on parameters are called.
    """
    weights = {name: p for name, p in trial.model.named_parameters() if p.requires_grad}
    if not weights:
        return GradientParity(reason="no parameter asks for a gradient")
    if hasattr(trial.model, "_fsdp_wrapped_module"):
        return GradientParity(
            reason="FSDP's first version has a backward of its own; verify the model before it"
        )
    with torch.enable_grad(), warnings.catch_warnings():
        # Where a kernel has no backward PyTorch only warns, and goes on with less than the gradient.
        warnings.filterwarnings("error", ".*an autograd kernel was not registered")
        try:
            packed, loss = _gradients(weights, _packed_loss(trial))
            across = _across(trial)
        except NotImplementedError as error:
            return GradientParity(reason=described(error, whole=True, most=200))
        except (RuntimeError, UserWarning) as error:
            return GradientParity(reason=f"no backward: {described(error, whole=True, most=200)}")
        solo, solo_loss = _one_by_one(trial, weights)
        control = None
        if trial.followed() is not None:
            open_loss = _packed_loss(trial, hf.inputs_without_boundaries)
            control = _furthest(_gradients(weights, open_loss)[0], solo)[0]
    if not solo:
        return GradientParity(reason="no gradient reaches any parameter")
    difference, worst = _furthest(packed, solo)
    targets = max(1, trial.batch.num_targets)
    tolerance = GRADIENT_TOLERANCES.get(dtype, 1e-3)
    if control is not None and control <= tolerance:
        return GradientParity(
            reason=f"blind: without boundaries gradients differ by {control:.3g}, and rounding alone may take them "
            f"{tolerance:.3g}",
            across=across,
        )
    return GradientParity(
        across=across,
        difference=difference,
        control=control,
        tolerance=tolerance,
        worst=worst,
        parameters=len(solo),
        loss=loss / targets,
        alone_loss=solo_loss / targets,
    )


def _across(trial: Trial) -> float | None:
    """Follow each document's loss back to the embedded tokens; None if the model doesn't show where it embeds."""
    found: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        found.append(output.detach().requires_grad_())
        return found[-1].clone()  # some models go on to change it in place

    try:
        hook = hf.unwrap(trial.model).get_input_embeddings().register_forward_hook(keep)
    except (NotImplementedError, AttributeError):  # it doesn't name its embedding
        return None
    try:
        logits = trial.logits(trial.batch)
    finally:
        hook.remove()
    labels = torch.as_tensor(trial.batch.labels).to(logits.device).long()
    if len(found) != 1 or found[0].shape[:2] != labels.shape:
        return None
    largest, own = 0.0, 0.0
    for document in range(int(trial.owner.max()) + 1):
        mine = trial.where(trial.owner == document)
        targets = labels.masked_fill(~mine, IGNORE_INDEX)
        if not bool((targets != IGNORE_INDEX).any()):
            continue
        loss = _summed(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        (gradient,) = torch.autograd.grad(loss, found, retain_graph=True)
        size = gradient.abs().amax(-1)
        own = max(own, float(size[mine].max()))
        largest = max(largest, float(size.masked_fill(mine, 0).max()))
    return largest / own if own else None


def _packed_loss(trial: Trial, inputs: Inputs | None = None) -> torch.Tensor:
    """Return the summed loss of the batch's targets from logits, without the model's own reduction."""
    logits = trial.logits(trial.batch, inputs)
    labels = torch.as_tensor(trial.batch.labels).to(logits.device).long()
    return _summed(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _one_by_one(trial: Trial, weights: Gradients) -> tuple[Gradients, float]:
    total: Gradients = {}
    loss = 0.0
    labels = torch.as_tensor(trial.batch.labels).cpu().long()
    for document in range(int(trial.owner.max()) + 1):
        targets = labels[torch.as_tensor(trial.owner == document)][1:]
        if not bool((targets != IGNORE_INDEX).any()):
            continue
        logits = trial.solo(document)
        found, value = _gradients(weights, _summed(logits[:-1], targets.to(logits.device)))
        loss += value
        for name, gradient in found.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total, loss


def _gradients(weights: Gradients, loss: torch.Tensor) -> tuple[Gradients, float]:
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    present = {name: gradient for name, gradient in zip(weights, found) if gradient is not None}
    if not all(bool(gradient.isfinite().all()) for gradient in present.values()):
        raise ModelError("gradients aren't finite, so nothing can be compared; check weights and dtype")
    return present, float(loss.detach())


def _summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def _furthest(ours: Gradients, theirs: Gradients) -> tuple[float, str]:
    """Return the largest difference relative to a gradient's largest value, and its parameter."""
    # An expert that no document alone reached has a gradient of zeros in one and none in the other.
    names = [*theirs, *(name for name in ours if name not in theirs)]
    largest = max((float(gradient.abs().max()) for gradient in theirs.values()), default=0.0)
    worst: tuple[float, Any] = (0.0, "")
    for name in names:
        mine, other = ours.get(name), theirs.get(name)
        first: torch.Tensor = mine if mine is not None else torch.zeros_like(other)  # type: ignore[arg-type]
        second = other if other is not None else torch.zeros_like(first)
        scale = max(float(second.abs().max()), _FLOOR * largest, 1e-300)
        worst = max(worst, (float((first.double() - second.double()).abs().max()) / scale, name))
    return worst


# OwnLoss: the loss that a model returns, against the cross-entropy of its own logits.
#
# A term over the whole batch, such as a router's, depends on what was packed together: no leak, but no sum over
# documents either.

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
    """Ask a model for its loss, and compute it from its logits; None where it returns none."""
    arguments = trial.inputs(trial.batch, trial.model)
    labels = arguments.get("labels")
    if labels is None or not bool((labels[:, 1:] != IGNORE_INDEX).any()):
        return None
    try:
        outputs = trial.model(**arguments)
    except Exception:  # a model's own loss may need more than labels; then there is none to compare
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
    """Return whether the configuration adds an auxiliary loss, which rounding may hide."""
    config = hf.text_config(model)
    weights = (
        getattr(config, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha")
    )
    return bool(getattr(config, "output_router_logits", False)) and any(weights)


# in_training: the same question in training mode, where models may compute otherwise than in eval mode.
#
# Recurrent layers have kernels of their own there, norms take statistics of the batch, experts drop or jitter, losses
# get terms. Dropout is left out, since it would hide everything else.

_CHANGED = 4  # most documents changed
_DROPPING = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


class _WithoutDropout(TorchFunctionMode):
    """Turns dropout off."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
    """Why documents' movements prove nothing; empty where they do."""


def in_training(trial: Trial, in_eval: torch.Tensor, found: IsolationReport) -> InTraining:
    """Judge in training mode what is isolated in eval mode.

    Where logits are the same to the bit in both modes, so is the verdict.
    """
    verdict: Verdict = "isolated"
    reason, wavering = "", 0.0
    with untouched(trial.model), _training(trial.model):
        try:
            before = trial.logits(trial.batch)
            differs = not torch.equal(before, in_eval)
            wavering = trial.waver(before) if differs else 0.0
            if differs and wavering <= found.rounding:
                verdict, reason = judge(_movements(trial, before, found), found.tolerance, found.rounding)
            if verdict == "isolated" and (loss := own_loss(trial)) is not None and loss.coupling:
                verdict, reason = "coupled", loss.coupling
        except (ModelError, NotImplementedError) as error:
            verdict, reason = "refuses", described(error, whole=True)
    unjudged = ""
    if wavering > found.rounding:
        unjudged = (
            f"the same batch gives other logits a second time, by {wavering:.3g}: random numbers are drawn beside "
            "dropout"
        )
    sentence = f"in training mode, {reason}" if reason else ""
    return InTraining(verdict=verdict, reason=sentence, unjudged=unjudged)


def _movements(trial: Trial, before: torch.Tensor, found: IsolationReport) -> Movements:
    chosen = trial.choose(_CHANGED)
    against = against_solo(trial, before, chosen)
    others = [
        trial.moved(before, trial.logits(trial.changed(document)), trial.others(document))
        for document in chosen
    ]
    padding = trial.moved_by_padding(before)
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
    """Put a model into training mode without dropout, and restore its buffers, such as running means, afterwards."""
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
