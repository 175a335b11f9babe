"""`run_step`: the two passes of a planned step on one device, MicroPack by MicroPack, with exact gradients.

Without recomputation every MicroPack keeps its graph, so both passes are cut alike. With full recomputation a layer's
inputs and the keys and values of its documents are kept, and the backward slices, which may be cut elsewhere, run one
layer forward and backward at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from varlen.errors import DocumentsError, PlanError
from varlen.runtime.attention import CachedSlice
from varlen.runtime.cache import DocumentCache
from varlen.runtime.clock import Clock, Meter
from varlen.runtime.parts import IGNORED, Parts
from varlen.step_plan import BACKWARD, FORWARD, MicroPacks, StepPlan
from varlen.types import FloatArray

Key = tuple[tuple[int, int, int], ...]
"""A MicroPack as its slices: document, start, stop."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRun:
    """What one step on one device took; its gradients are in the model."""

    loss: float
    """Sum of target losses over targets."""
    num_targets: int
    kinds: npt.NDArray[np.uint8]
    """uint8 `[num_tasks]`: FORWARD or BACKWARD, in the order run."""
    micropacks: npt.NDArray[np.int32]
    """int32 `[num_tasks]`: index in that pass's MicroPacks."""
    seconds: FloatArray
    """float64 `[num_tasks]`. Norm, head and loss run, forward and backward, at the start of backward tasks."""
    live_bytes: npt.NDArray[np.int64]
    """int64 `[num_tasks]`: bytes of tensors alive after each task; 0 where no meter was given."""
    peak_bytes: npt.NDArray[np.int64]
    """int64 `[num_tasks]`: the most alive at once during each."""


@dataclass(slots=True)
class _Document:
    """What a document leaves between its tasks."""

    cache: DocumentCache
    inputs: list[torch.Tensor] = field(default_factory=list)
    """With recomputation: `[tokens, hidden]` into every layer."""
    forward_to: int = 0
    """Tokens that have run forward."""
    backward_from: int = -1
    """Tokens that haven't run backward; -1 before the first backward slice."""


@dataclass(slots=True)
class _Step:
    """One step while it runs."""

    parts: Parts
    input_ids: torch.Tensor
    labels: torch.Tensor
    offsets: npt.NDArray[np.int64]
    num_targets: int
    recomputes: bool
    documents: dict[int, _Document] = field(default_factory=dict)
    graphs: dict[Key, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Without recomputation, by MicroPack: what went into the first layer and what came out of the last."""
    losses: list[torch.Tensor] = field(default_factory=list)


def run_step(
    model: Any,
    input_ids: torch.Tensor,
    plan: StepPlan,
    *,
    labels: torch.Tensor | None = None,
    meter: Meter | None = None,
) -> StepRun:
    """Run a step's forward and backward tasks in the plan's order, and add to every parameter's gradient.

    The gradients are those of the mean loss over the step's targets, as the uncut documents would give them.

    Args:
        model: a transformers decoder of `Parts`; its attention is set to that of slices.
        input_ids: int64 `[num_tokens]`, documents one behind the other in the order of `plan.lengths`.
        plan: of one GPU.
        labels: int64 `[num_tokens]`: the token after each, -100 where there is none to learn; None: the next token
            of the document.
        meter: counts bytes task by task; already entered.

    Raises:
        DocumentsError: tokens or labels don't match the plan, or nothing is to learn.
        PlanError: a plan for several GPUs or of split backward passes, one whose recomputation isn't "none" or
            "full", passes cut apart without recomputation, or slices out of turn.
        ModelError: a family that isn't run in slices.
    """
    _check_plan(plan)
    offsets = np.concatenate([[0], np.cumsum(plan.lengths, dtype=np.int64)])
    if input_ids.shape != (plan.num_tokens,) or (labels is not None and labels.shape != input_ids.shape):
        seen = [tuple(x.shape) for x in (input_ids, labels) if x is not None]
        raise DocumentsError(
            f"tokens and labels of shapes {seen}; the plan has {plan.num_tokens:,} tokens in a row"
        )
    labels = next_tokens(input_ids, offsets) if labels is None else labels
    num_targets = int((labels != IGNORED).sum())
    if num_targets == 0:
        raise DocumentsError(f"none of {plan.num_tokens:,} tokens has a label to learn; leave this step out")
    step = _Step(Parts.of(model), input_ids, labels, offsets, num_targets, plan.recompute == "full")
    return _run(step, plan, Clock(input_ids.device), meter)


def next_tokens(input_ids: torch.Tensor, offsets: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return each token's next one within its document, -100 at the last; int64 `[num_tokens]`."""
    labels = torch.roll(input_ids, -1)
    ends = offsets[1:][np.diff(offsets) > 0] - 1
    labels[torch.from_numpy(ends).to(labels.device)] = IGNORED
    return labels


def _check_plan(plan: StepPlan) -> None:
    mesh = plan.mesh
    if mesh.num_gpus > 1 or plan.splits_backward:
        raise PlanError(
            f"a plan for {mesh.num_gpus} GPUs{', its backward passes split' if plan.splits_backward else ''}; "
            "run_step runs whole backward passes on one"
        )
    if plan.recompute == "selective" or plan.recompute_share < 1 or plan.offload != "none":
        raise PlanError(
            f'recompute="{plan.recompute}", recompute_share={plan.recompute_share:g} and offload="{plan.offload}"; '
            'run_step knows "none" and "full" of all layers, and keeps everything on the device'
        )
    if plan.recompute == "none":
        apart = set(_keys(plan.backward)) ^ set(_keys(plan.forward))
        if apart:
            raise PlanError(
                f"{len(apart)} MicroPacks stand in one pass alone, such as {min(apart)}; passes may be cut apart "
                'only with recompute="full"'
            )


def _keys(packs: MicroPacks) -> list[Key]:
    """Return MicroPacks as tuples of their slices."""
    rows = list(zip(packs.document_ids.tolist(), packs.starts.tolist(), packs.stops.tolist()))
    bounds = packs.slice_offsets.tolist()
    return [tuple(rows[first:last]) for first, last in zip(bounds, bounds[1:])]


def _run(step: _Step, plan: StepPlan, clock: Clock, meter: Meter | None) -> StepRun:
    packs = {kind: _keys(pass_) for kind, pass_ in enumerate((plan.forward, plan.backward))}
    done = [0, 0]
    micropacks, live, peak = [], [], []
    clock.mark()
    for kind in plan.tasks.tolist():
        if meter is not None:
            meter.begin_peak()
        key = packs[kind][done[kind]]
        if key:
            (_forward if kind == FORWARD else _backward)(step, key)
        clock.mark()
        micropacks.append(done[kind])
        done[kind] += 1
        live.append(meter.live if meter is not None else 0)
        peak.append(meter.peak if meter is not None else 0)
    return StepRun(
        loss=float(torch.stack(step.losses).sum()),
        num_targets=step.num_targets,
        kinds=plan.tasks.copy(),
        micropacks=np.array(micropacks, np.int32),
        seconds=clock.seconds(),
        live_bytes=np.array(live, np.int64),
        peak_bytes=np.array(peak, np.int64),
    )


def _slices(step: _Step, key: Key, kind: int) -> list[CachedSlice]:
    """Return a MicroPack's slices with the caches of their documents, which the first slice makes.

    Raises:
        PlanError: a slice that isn't its document's next one in this pass.
    """
    slices = []
    for number, start, stop in key if kind == FORWARD else reversed(key):
        length = int(step.offsets[number + 1] - step.offsets[number])
        document = step.documents.setdefault(number, _Document(DocumentCache(length)))
        if kind == FORWARD:
            expected, document.forward_to = document.forward_to == start, stop
        else:
            left = length if document.backward_from < 0 else document.backward_from
            expected, document.backward_from = document.forward_to == length and left == stop, start
        if not expected:
            raise PlanError(
                f"{'forward' if kind == FORWARD else 'backward'} slice {start:,}-{stop:,} of document {number}, of "
                f"{length:,} tokens, is out of turn; slices run forward first to last, then backward last to first"
            )
        slices.append(CachedSlice(cache=document.cache, start=start, stop=stop))
    return slices if kind == FORWARD else slices[::-1]


def _rows(step: _Step, key: Key, of: torch.Tensor) -> torch.Tensor:
    """Return the entries of a flat `[num_tokens]` that belong to a MicroPack's rows."""
    parts = [of[int(step.offsets[d]) + start : int(step.offsets[d]) + stop] for d, start, stop in key]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _forward(step: _Step, key: Key) -> None:
    slices, parts = _slices(step, key, FORWARD), step.parts
    positions = parts.positions(slices)
    hidden = first = parts.embed(_rows(step, key, step.input_ids))
    if not step.recomputes:
        first.requires_grad_()
        for layer in range(len(parts.layers)):
            hidden = parts.run_layer(layer, hidden, positions, slices)
        step.graphs[key] = (first, hidden)
        return
    with torch.no_grad():
        for layer in range(len(parts.layers)):
            _keep(step, key, layer, hidden)
            # The last layer's output is made again with its graph; its keys and values are needed now.
            hidden = parts.run_layer(layer, hidden, positions, slices)


def _keep(step: _Step, key: Key, layer: int, hidden: torch.Tensor) -> None:
    """Keep what goes into a layer, in one buffer a document."""
    row = 0
    for document, start, stop in key:
        kept = step.documents[document]
        if len(kept.inputs) == layer:
            kept.inputs.append(hidden.new_empty(kept.cache.length, hidden.shape[-1]))
        kept.inputs[layer][start:stop] = hidden[0, row : row + stop - start]
        row += stop - start


def _backward(step: _Step, key: Key) -> None:
    slices = _slices(step, key, BACKWARD)
    ids, labels = _rows(step, key, step.input_ids), _rows(step, key, step.labels)
    if step.recomputes:
        gradient = _recomputed(step, key, slices, labels)
    else:
        first, hidden = step.graphs.pop(key)
        loss, gradient = step.parts.head_backward(hidden, labels, step.num_targets)
        step.losses.append(loss)
        torch.autograd.backward(hidden, gradient)
        assert first.grad is not None
        gradient = first.grad
    step.parts.embed_backward(ids, gradient)
    for document, start, _ in key:
        if start == 0:
            del step.documents[document]


def _recomputed(step: _Step, key: Key, slices: Sequence[CachedSlice], labels: torch.Tensor) -> torch.Tensor:
    """Run a MicroPack's layers forward again and backward, last to first; return the gradient of their input."""
    parts = step.parts
    positions, gradient = parts.positions(slices), None
    for layer in reversed(range(len(parts.layers))):
        pieces = [step.documents[document].inputs[layer][start:stop] for document, start, stop in key]
        hidden = _joined(pieces).requires_grad_()
        out = parts.run_layer(layer, hidden, positions, slices)
        if gradient is None:
            loss, gradient = parts.head_backward(out, labels, step.num_targets)
            step.losses.append(loss)
        torch.autograd.backward(out, gradient)
        assert hidden.grad is not None
        gradient = hidden.grad
        for document, start, _ in key:
            kept = step.documents[document].inputs
            kept[layer] = kept[layer][:start].clone()
    assert gradient is not None
    return gradient


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `[1, rows, hidden]`; one piece alone is not copied."""
    return (pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)))[None].detach()
