"""check_isolation: change one packed document, and require that no other document's logits move by one bit.

A check that couldn't see a leak would pass every model, so the same change is also made in a control
without boundaries, where other documents must move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from varlen.adapters import hf
from varlen.adapters.hf.inputs import hidden_inputs
from varlen.adapters.hf.mixing import accepting_unknown_code, pools
from varlen.adapters.hf.model import model_inside
from varlen.batch.packed import PackedBatch
from varlen.errors import DocumentsError, ModelError, SettingError, described
from varlen.verify.models.backends import computed_in
from varlen.verify.models.trial import Inputs, Trial, sample_batch, untouched

Verdict = Literal["isolated", "leaks", "coupled", "refuses", "blind"]

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""How far rounding takes logits from those of a document alone, relative to the largest logit. In float64
too, because transformers' eager attention and many norms compute in float32 whatever the model's dtype."""


EXPERT_MARGIN = 1000  # with experts, others may move by the control's difference over this
COUPLING_MARGIN = 3  # a movement above this many times that of plain rows is a leak


@dataclass(frozen=True, kw_only=True, slots=True)
class Movements:
    """What moved when documents were changed.

    Differences of logits are relative to the largest logit of the batch.
    """

    changed_documents: int = 0
    """Documents changed, one at a time."""
    own_difference: float = 0.0
    """How far the changed documents' own logits moved, at least."""
    largest_difference: float = 0.0
    """How far any other document's logits moved: 0.0, to the bit, where documents are isolated."""
    padding_difference: float = 0.0
    """How far any document's logits moved when padding was changed; 0.0 without padding."""
    control_difference: float | None = None
    """How far other documents' logits move without boundaries; None where no row holds two documents."""
    row_coupling: float | None = None
    """How far a document moved when those in other rows of a plain batch, without packing, were changed or left out;
    None where nothing else moved, so that this was not tried."""
    attention_across: float | None = None
    """Largest attention weight out of a document; None where the attention shows no weights."""
    alone_difference: float = 0.0
    """How far logits are from those of each document run alone."""
    packed_loss: float = 0.0
    """Mean loss over the changed documents' targets in the packed batch, before any change."""
    alone_loss: float = 0.0
    """The same with each document run alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolationReport:
    """What was done to a model, what moved, and what follows from it."""

    verdict: Verdict
    """isolated; leaks; coupled (rows of any batch move each other, packed or not); refuses (varlen or the model won't
    run the batch); blind (a leak would be missed)."""
    reason: str
    """Why the verdict isn't "isolated"; empty if it is."""
    model: str
    """Name of the model's class."""
    attention: str
    """Attention function that ran."""
    dtype: str
    layout: str
    documents: int
    """Documents or pieces in the batch."""
    tokens: int
    """Their tokens, padding not counted."""
    longest: int = 0
    """Tokens of the longest."""
    arguments: tuple[str, ...] = ()
    """The keyword arguments that the model was given."""
    computed_in: torch.dtype = torch.float32
    """The coarsest dtype of the model's matrix products."""
    tolerance: float = 0.0
    """The largest `alone_difference` that counts as rounding."""
    rounding: float = 0.0
    """The largest movement of other documents that counts as rounding: 0.0, except with routed experts."""
    movements: Movements = Movements()

    @property
    def ok(self) -> bool:
        """Whether the verdict is "isolated"."""
        return self.verdict == "isolated"

    def __str__(self) -> str:
        head = f"{self.verdict}: {self.model}, attention {self.attention}, {self.dtype}, {self.layout}"
        if self.verdict == "refuses":
            return f"{head}\n  {self.reason}"
        moved = self.movements
        control = "none" if moved.control_difference is None else f"{moved.control_difference:.3g}"
        allowed = f" (experts round; allowed {self.rounding:.3g})" if self.rounding else ""
        lines = [
            head,
            f"  {self.documents:,} documents, {self.tokens:,} tokens; {moved.changed_documents:,} documents "
            "changed, one at a time",
            f"  other documents moved by  {moved.largest_difference:.3g}, by changed padding "
            f"{moved.padding_difference:.3g}{allowed}",
            f"  without boundaries        {control} (the control, which must not be 0)",
            f"  against documents alone   {moved.alone_difference:.3g} (tolerance {self.tolerance:.3g}), "
            f"loss {moved.packed_loss:.6f}, alone {moved.alone_loss:.6f}",
        ]
        if moved.attention_across is not None:
            lines.append(f"  attention weight across   {moved.attention_across:.3g}")
        lines.append(f"  arguments                 {', '.join(self.arguments)}")
        return "\n".join([*lines, f"  {self.reason}"] if self.reason else lines)


@accepting_unknown_code()
def check_isolation(
    model: Any,
    batch: PackedBatch | None = None,
    *,
    inputs: Inputs | None = None,
    tolerance: float | None = None,
    max_changed: int = 8,
    seed: int = 0,
    known: IsolationReport | None = None,
    solo: dict[int, torch.Tensor] | None = None,
) -> IsolationReport:
    """Find out whether a model keeps the documents of a packed batch apart, as it is set up now and called.

    Args:
        model: a transformers model, bare or wrapped, or a module of your own with exactly one inside. It is called
            as it is; attention and family are read from the transformers model.
        batch: real documents; None for ten short ones of random tokens.
        inputs: makes the model's keyword arguments of (batch, model): `model_inputs`, or your own collator. It is
            called for each changed batch, and must pass all `[rows, width]` tokens of it, padding included. If left
            out, a model that pools is called below its head, as `document_outputs` does.
        tolerance: the largest difference from each document alone, relative to the largest logit; None for that of
            the dtype.
        max_changed: documents that are changed, one at a time, at most.
        seed: of the tokens that replace them.
        known: an earlier report of this model and batch, whose control and dtype are taken over.
        solo: logits of documents alone, by number, that are taken over and added to.

    Returns:
        A report with the verdict and all that was measured; `report.ok` if isolated, `print(report)` for the whole.
        Losses are those of the batch's own labels within each document: labels in the arguments aren't looked at,
        which is `check_batch`'s part.

    Raises:
        DocumentsError: `batch` isn't a PackedBatch.
        SettingError: a batch without documents, or `max_changed` below 1.
        ModelError: not a transformers model, and not a module with exactly one inside.

    Cost: in eval mode and without gradients two forward passes for each document changed, and at most nine more.
    Modes, gradients and random states are afterwards as before.
    """
    if max_changed < 1:
        raise SettingError(f"max_changed must be at least 1, got {max_changed}")
    if batch is not None and not isinstance(batch, PackedBatch):
        raise DocumentsError(
            f"check_isolation takes a PackedBatch, as vl.collate returns it, and was given "
            f"{type(batch).__name__}"
        )
    called, model = model, model_inside(model)
    if batch is None:
        batch = sample_batch(min(hf.vocabulary_size(model), hf.logits_size(model)), seed)
    if batch.num_segments == 0:
        raise SettingError("the batch holds no document, so there is nothing to keep apart")
    whole = model
    if inputs is None:
        inputs, model = inputs_of(whole), without_pooling(whole)
        called = called if model is whole else model
    trial, base = Trial(called, batch, inputs, seed), hf.unwrap(model)
    facts: dict[str, Any] = {
        "model": _name_of(called, model, whole),
        "attention": hf.implementation(model),
        "dtype": str(base.dtype).removeprefix("torch."),
        "layout": f"{batch.layout} {list(batch.input_ids.shape)}",
        "documents": batch.num_segments,
        "tokens": batch.num_tokens,
        "longest": batch.max_seqlen,
    }
    with untouched(called):
        try:
            facts["arguments"] = _described(inputs(batch, model))
            if known is None:
                before, dtype = computed_in(lambda: trial.logits(batch))
                wavering = trial.waver(before)
            else:
                before, dtype, wavering = trial.logits(batch), known.computed_in, 0.0
            dtype = dtype or base.dtype
            limit = TOLERANCES.get(dtype, 1e-4) if tolerance is None else tolerance
            moved = _movements(trial, before, max_changed, limit, known, solo)
        except (ModelError, NotImplementedError, ValueError) as error:
            reason = str(error) if isinstance(error, ModelError) else described(error, whole=True)
            return IsolationReport(verdict="refuses", reason=reason, **facts)
    # Which tokens share an expert decides how its matrix product is cut into blocks, so logits move in
    # their last bits where nothing leaks; a leak would move them about as far as the control does. In float64
    # experts run one by one, and nothing moves at all.
    blurred = hf.has_experts(model) and dtype is not torch.float64
    rounding = min((moved.control_difference or 0.0) / EXPERT_MARGIN, limit) if blurred else 0.0
    verdict, reason = judge(moved, limit, rounding)
    if wavering > rounding:
        verdict, reason = "blind", f"the same batch gives other logits a second time, by {wavering:.3g}"
    return IsolationReport(
        verdict=verdict,
        reason=reason,
        computed_in=dtype,
        tolerance=limit,
        rounding=rounding,
        movements=moved,
        **facts,
    )


def _name_of(called: Any, model: Any, whole: Any) -> str:
    """Return the name of what is called, with that of the transformers model within or above it."""
    name = type(hf.unwrap(model)).__name__
    if model is not whole:
        return f"{name} below the head of {type(hf.unwrap(whole)).__name__}"
    return name if called is model else f"{name} inside {type(hf.unwrap(called)).__name__}"


def inputs_of(model: Any) -> Inputs:
    """Return what makes a model's arguments: for a model with a pooler those for its hidden states alone."""
    return hidden_inputs if pools(model) else hf.model_inputs


def without_pooling(model: Any) -> Any:
    """Return the model below a head that pools, which `document_outputs` runs by itself; else the model."""
    base = hf.unwrap(model)
    return base.base_model if pools(base) and base.base_model is not base else model


def judge(moved: Movements, tolerance: float, rounding: float = 0.0) -> tuple[Verdict, str]:
    """Read the verdict off what moved, with the reason where it isn't "isolated"."""
    moves = max(moved.largest_difference, moved.padding_difference)
    coupling = moved.row_coupling or 0.0
    couples = coupling > rounding and not moved.attention_across
    if moves > rounding and couples and moves <= coupling * COUPLING_MARGIN:
        return "coupled", (
            f"documents move each other by {moves:.3g}, and rows of a batch without packing by {coupling:.3g}: the "
            "model computes something over its whole batch (expert capacity, scales of quantised activations)"
        )
    if moved.largest_difference > rounding:
        return "leaks", f"changing one document moved another's logits by {moved.largest_difference:.3g}"
    if moved.padding_difference > rounding:
        return "leaks", f"changing padding moved a document's logits by {moved.padding_difference:.3g}"
    if moved.attention_across is not None and moved.attention_across > 0:
        return "leaks", f"a document gives attention weight {moved.attention_across:.3g} to tokens outside it"
    if moved.control_difference is None:
        return (
            "blind",
            "no row holds two documents, so there was nothing to leak; try a batch with more of them",
        )
    if moved.control_difference == 0:
        return "blind", "documents don't move each other without boundaries either, so a leak can't be seen"
    if moved.own_difference == 0:
        return "blind", "a changed document didn't move its own logits, so a leak can't be seen"
    if moved.alone_difference > tolerance:
        if couples and moved.alone_difference <= coupling * COUPLING_MARGIN:
            return "coupled", (
                f"logits differ by {moved.alone_difference:.3g} from those of the document alone, and so do rows of "
                f"a batch without packing, by {coupling:.3g}: the model computes something over its whole batch "
                "(expert capacity, scales of quantised activations)"
            )
        return "leaks", (
            f"logits differ by {moved.alone_difference:.3g} from those of the document alone: where it "
            "stands in its row (positions that run on, a pattern counted from the row's start) leaks into it"
        )
    return "isolated", ""


def _described(arguments: dict[str, Any]) -> tuple[str, ...]:
    """Describe every argument: its shape, a mapping of shapes, or its value."""

    def describe(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return f"{type(value).__name__} {list(value.shape)}" if hasattr(value, "shape") else repr(value)

    return tuple(f"{name}={describe(value)}" for name, value in arguments.items())


def _row_coupling(trial: Trial, limit: float, known: IsolationReport | None) -> float:
    """Measure how far plain rows move each other, unless that is known; packing doesn't matter for it."""
    before = None if known is None else known.movements.row_coupling
    return trial.row_coupling(limit) if before is None else before


def _movements(
    trial: Trial,
    before: torch.Tensor,
    max_changed: int,
    limit: float,
    known: IsolationReport | None,
    solo: dict[int, torch.Tensor] | None,
) -> Movements:
    """Change documents one at a time, padding, and one in the control; compare with documents alone."""
    control = _control(trial) if known is None else known.movements.control_difference
    chosen = trial.choose(max_changed)
    own, others = [], []
    for document in chosen:
        after = trial.logits(trial.changed(document))
        own.append(trial.moved(before, after, trial.owner == document))
        others.append(trial.moved(before, after, trial.others(document)))
        if known is not None and others[-1] > (control or 0.0) / EXPERT_MARGIN:
            return Movements(
                changed_documents=len(own),
                own_difference=min(own),
                largest_difference=others[-1],
                row_coupling=_row_coupling(trial, limit, known),
                control_difference=control,
            )
    padding = trial.moved_by_padding(before)
    against = against_solo(trial, before, chosen, solo)
    stays = max(*others, padding) == 0 and against["alone_difference"] <= limit
    return Movements(
        changed_documents=len(chosen),
        own_difference=min(own),
        largest_difference=max(others),
        padding_difference=padding,
        row_coupling=None if stays else _row_coupling(trial, limit, known),
        control_difference=control,
        attention_across=trial.attention_across() if hf.implementation(trial.model) == "eager" else None,
        **against,
    )


def _control(trial: Trial) -> float | None:
    """Change one document without boundaries, and return how far others moved."""
    document = trial.followed()
    if document is None:
        return None
    before = trial.logits(trial.batch, hf.inputs_without_boundaries)
    after = trial.logits(trial.changed(document), hf.inputs_without_boundaries)
    return trial.moved(before, after, trial.others(document))


def against_solo(
    trial: Trial, before: torch.Tensor, chosen: list[int], known: dict[int, torch.Tensor] | None = None
) -> dict[str, float]:
    """Compare the chosen documents, packed and unchanged, with each of them run alone."""
    largest = before[trial.where(trial.owner >= 0)].abs().max().double()
    logits = {} if known is None else known
    difference, packed, solo, targets = 0.0, 0.0, 0.0, 0
    for document in chosen:
        if document not in logits:
            logits[document] = trial.solo(document)
        together, apart = before[trial.where(trial.owner == document)], logits[document]
        difference = max(difference, float((together.double() - apart.double()).abs().max() / largest))
        packed += trial.loss(together, document)[0]
        total, count = trial.loss(apart, document)
        solo, targets = solo + total, targets + count
    count = max(1, targets)
    return {"alone_difference": difference, "packed_loss": packed / count, "alone_loss": solo / count}
