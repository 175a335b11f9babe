"""verify: try a model on packed documents, with every backend, layout and way of calling it; report what leaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple, get_args

import torch
import transformers

from varlen import __version__
from varlen.adapters import hf
from varlen.adapters.hf.inputs import boundaries
from varlen.adapters.hf.mixing import (
    accepting_unknown_code,
    check_family,
    check_trunk,
    pools,
    record_isolation,
    segment_numbers,
)
from varlen.adapters.hf.model import family
from varlen.attention.rules import rotary_limits
from varlen.batch.packed import Layout, PackedBatch
from varlen.errors import DocumentsError, ModelError, SettingError, described
from varlen.verify.batches.check import check_batch
from varlen.verify.batches.isolation import ONE_A_ROW, WITH_MODEL_INPUTS
from varlen.verify.models.backends import (
    CPU_BACKENDS,
    FLASH,
    AttentionPicture,
    attending,
    attention_picture,
    backends_for,
    first_sentence,
    kernels_of,
    recurrence,
)
from varlen.verify.models.isolation import (
    IsolationReport,
    Verdict,
    check_isolation,
    inputs_of,
    without_pooling,
)
from varlen.verify.models.loading import LoadedModel, copies_of, load_model
from varlen.verify.models.parity import gradient_parity, in_training, own_loss
from varlen.verify.models.report import CallCell, Cell, ModelVerdict, VerifyReport
from varlen.verify.models.trial import CAPACITY, Inputs, Trial, sample_batch, untouched

_WINDOWS = (
    *("sliding_window", "attention_chunk_size"),
    *("window_size", "sliding_window_size", "attention_window_size"),
)
"""How configurations call the width of their windows and chunks."""
_WIDEST_WINDOW = 256  # tokens; rows are made long enough for windows up to this one to matter
_CHANGED, _BY_CALL = 16, 2  # most documents changed, one at a time, in a cell; by a way of calling


def verify(
    model: Any,
    *,
    backends: Sequence[str] | None = None,
    layouts: Sequence[Layout] = ("rows", "flat"),
    batch: PackedBatch | None = None,
    calls: bool = True,
    gradients: bool = True,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> VerifyReport:
    """Find out whether a model keeps packed documents apart, with which attention, and called how.

    For each attention backend and layout, with the arguments of `varlen.adapters.hf.model_inputs`: one document's
    tokens are changed, and every other document's logits must stay the same to the bit; logits, loss and gradients
    must be those of each document alone; the same change without boundaries must be seen, so that a blind check
    can't pass; eager attention's weights across documents must be exactly 0; the kernels that ran are named. Then
    the model is called in the ways that other collators call it.

    Args:
        model: a family's name, such as "llama" (a tiny model with random weights); a checkpoint folder; a
            transformers configuration; or a model, bare or wrapped, on any device, which is left as it was.
        backends: of "eager", "sdpa", "flex_attention", "varlen", "flash_attention_2" and "flash_attention_3"; None
            for all of this device. Where a kernel needs a GPU, plain PyTorch stands in for it behind transformers'
            own dispatch, and the cell says so.
        layouts: of "rows" and "flat".
        batch: documents to try, instead of ten short ones of random tokens; it then decides the layout.
        calls: whether to try other ways of calling the model too.
        gradients: whether to compare gradients; it takes memory for them twice.
        tokenizer: refused if it has ids that the model doesn't embed; None for a folder's own.
        dtype: of weights that are made or loaded.
        device: for the model, where verify makes or loads it; a live one stays where it is.
        seed: of the tokens.
        on_progress: called before each part with the parts done, all parts, and what comes now.

    Returns:
        A report with a cell for every backend and layout, none of them silent: isolated, leaks, coupled (something
        is computed over the whole batch, such as a router's loss), refuses, or not run, and why.
        `print(report)` shows it all; `report.ok` if something ran, and nothing leaks or is coupled. The verdict is
        recorded for this model: `model_inputs` takes one whose code it doesn't know only if `ok`.

    Raises:
        ModelError: no such family or folder, a model that needs code of its own, a tokenizer that doesn't fit, or
            something that isn't a transformers model.
        SettingError: backends or layouts that there are not.
        DocumentsError: `batch` isn't a PackedBatch.

    Cost: some 60 forward passes of a hundred tokens for each backend and layout, and about as many for the other ways
    of calling; seconds for a tiny model and one backend.

    >>> import varlen as vl
    >>> report = vl.verify("llama", backends=["eager"], layouts=["rows"], calls=False)
    >>> report.verdict, report.cell("eager").kernels
    ('isolated', (('softmax', 2),))
    """
    layouts = _checked_layouts(layouts, batch)
    if not isinstance(seed, Integral) or seed < 0:
        wanted = "at least 0" if isinstance(seed, Integral) else "a whole number"
        raise SettingError(f"seed must be {wanted}, got {seed!r}")
    loaded = load_model(model, tokenizer=tokenizer, dtype=dtype, device=device)
    loaded = _without_pooling(loaded)
    model, names = loaded.model, backends_for(loaded.model, backends)
    if batch is not None:  # whose weights don't bear on what sees what
        batch = batch.replace(columns={})
    batches = {layout: _batch(model, layout, seed) if batch is None else batch for layout in layouts}
    models = {name: _with_attention(loaded, name) for name in names}
    parts, tell = [(name, layout) for name in names for layout in layouts], on_progress or _in_silence
    total, cells = len(parts) * (1 + calls), []
    for done, (name, layout) in enumerate(parts):
        tell(done, total, f"{name}, {layout}")
        cells.append(_cell(models[name], name, batches[layout], gradients, seed))
    base = hf.unwrap(model)
    report = VerifyReport(
        model=type(base).__name__,
        family=hf.model_type(model),
        weights=sum(weight.numel() for weight in base.parameters()),
        dtype=str(base.dtype).removeprefix("torch."),
        device=str(base.device),
        versions=(
            ("varlen", __version__),
            *((each.__name__, str(each.__version__)) for each in (transformers, torch)),
        ),
        notes=(*loaded.notes, *_notes(model, batches)),
        cells=tuple(cells),
        calls=tuple(_call_cells(models, cells, batches, seed, tell)) if calls else (),
        attention=_picture(models["eager"], cells, batches, seed) if "eager" in names else None,
    )
    record_isolation(model, report.ok)
    return report


def _in_silence(done: int, total: int, text: str) -> None:
    """Report no progress."""


def _without_pooling(loaded: LoadedModel) -> LoadedModel:
    """Return the model below a head that pools, which `document_outputs` runs by itself."""
    model = without_pooling(loaded.model)
    if model is loaded.model:
        return loaded
    note = (
        f"the head of {type(hf.unwrap(loaded.model)).__name__} pools, and its hidden states were checked: call the "
        "model by varlen.adapters.hf.document_outputs(model, batch), which gives the head each document as a row"
    )
    return LoadedModel(model=model, notes=(*loaded.notes, note), remade=copies_of(model))


def _checked_layouts(layouts: Sequence[Layout], batch: PackedBatch | None) -> tuple[Layout, ...]:
    if batch is not None:
        if not isinstance(batch, PackedBatch):
            raise DocumentsError(
                f"batch must be a PackedBatch, as vl.collate returns it; got {type(batch).__name__}"
            )
        return (batch.layout,)
    chosen: tuple[Any, ...] = (
        (layouts,) if isinstance(layouts, str) or not isinstance(layouts, Sequence) else (*layouts,)
    )
    if (
        not chosen
        or len(set(chosen)) != len(chosen)
        or any(layout not in get_args(Layout) for layout in chosen)
    ):
        known = ", ".join(get_args(Layout))
        raise SettingError(f"layouts must be one or more of {known}, each once; got {layouts!r}")
    return chosen


def _batch(model: Any, layout: Layout, seed: int) -> PackedBatch:
    """Return documents longer than the model's windows, and no longer than its positions."""
    capacity = max([CAPACITY, *(width + 16 for width in _windows(model) if width <= _WIDEST_WINDOW)])
    positions = getattr(hf.text_config(model), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        capacity = min(capacity, max(1, positions - hf.first_position(model)))
    size = min(hf.vocabulary_size(model), hf.logits_size(model))
    return sample_batch(size, seed, layout=layout, capacity=capacity)


def _windows(model: Any) -> list[int]:
    config = hf.text_config(model)
    widths = (getattr(config, name, None) for name in _WINDOWS)
    return [width for width in widths if isinstance(width, int) and width > 0]


def _notes(model: Any, batches: dict[Layout, PackedBatch]) -> list[str]:
    """Return what the check couldn't see."""
    longest = max(batch.max_seqlen for batch in batches.values())
    found = [
        f"windows of {width:,} tokens are wider than the longest document of this check ({longest:,} tokens), so "
        "nothing was seen of where they end; pass batch= with longer documents"
        for width in _windows(model)
        if width >= longest
    ]
    found += [
        f"documents of more than {limit:,} tokens change the rope of all others in their batch (longrope, dynamic), "
        "packed or not; this check covers that only if its own documents are longer"
        for limit in sorted({limit for _, limit in rotary_limits(hf.text_config(model))})
    ]
    return found


def _with_attention(loaded: LoadedModel, backend: str) -> Any:
    """Return the model, made anew if its attention can't be set afterwards; or the error if that fails."""
    try:
        with attending(loaded.model, backend):
            return loaded.model
    except ModelError as error:
        if loaded.remade is None:
            return error
        try:
            return loaded.remade(backend)
        except Exception as failure:  # whatever stands in the way of another attention
            cause = failure.__cause__ or failure
            is_clear = isinstance(cause, (ValueError, ImportError))
            name = type(hf.unwrap(loaded.model)).__name__
            return ModelError(first_sentence(cause) if is_clear else f'{name} has no attention "{backend}"')


@accepting_unknown_code()
def _cell(model: Any, backend: str, batch: PackedBatch, gradients: bool, seed: int) -> Cell:
    """Try one backend and layout with varlen's own arguments."""
    try:
        if isinstance(model, ModelError):
            raise model
        with attending(model, backend) as missing:
            found = check_isolation(model, batch, inputs=inputs_of(model), max_changed=_CHANGED, seed=seed)
            if found.verdict == "refuses" and family(model).boundaries:
                with recurrence(model) as recurrent:
                    again = check_isolation(
                        model, batch, inputs=inputs_of(model), max_changed=_CHANGED, seed=seed
                    )
                    if again.verdict != "refuses":
                        return _judged(model, backend, batch, again, (*missing, *recurrent), gradients, seed)
            return _judged(model, backend, batch, found, missing, gradients, seed)
    except ModelError as error:
        return Cell(backend=backend, layout=batch.layout, verdict="refuses", reason=str(error))


def _judged(
    model: Any,
    backend: str,
    batch: PackedBatch,
    found: IsolationReport,
    missing: tuple[str, ...],
    gradients: bool,
    seed: int,
) -> Cell:
    """Look at kernels, gradients and the model's own loss, and decide on the cell."""
    cell = Cell(
        backend=backend,
        layout=batch.layout,
        verdict=_verdict_of(found.verdict),
        reason=found.reason,
        stand_in=missing,
        isolation=found,
    )
    if found.verdict in ("refuses", "blind"):
        return replace(cell, stand_in=())
    trial = Trial(model, batch, inputs_of(model), seed)
    with untouched(model):
        logits, kernels = kernels_of(lambda: trial.logits(batch))
        loss = own_loss(trial)
        parity = gradient_parity(trial, found.computed_in) if gradients else None
    cell = replace(cell, kernels=kernels, gradients=parity, own_loss=None if loss is None else loss.loss)
    if cell.verdict == "isolated" and parity is not None and parity.fault:
        return replace(cell, verdict="leaks", reason=parity.fault)
    if cell.verdict == "isolated" and loss is not None and loss.coupling:
        return replace(cell, verdict="coupled", reason=loss.coupling)
    if cell.verdict == "isolated":
        judged = in_training(trial, logits, found)
        verdict = _verdict_of(judged.verdict)
        return replace(cell, verdict=verdict, reason=judged.reason, training=judged.unjudged)
    return cell


def _verdict_of(verdict: Verdict) -> ModelVerdict:
    return "not run" if verdict == "blind" else verdict


def _call_cells(
    models: dict[str, Any],
    cells: Sequence[Cell],
    batches: dict[Layout, PackedBatch],
    seed: int,
    tell: Callable[[int, int, str], None],
) -> list[CallCell]:
    found = []
    for done, cell in enumerate(cells, len(cells)):
        tell(done, 2 * len(cells), f"{cell.backend}, {cell.layout}: other ways of calling")
        batch, model = batches[cell.layout], models[cell.backend]
        try:
            if isinstance(model, ModelError):
                raise model
            with attending(model, cell.backend), _recurrence(model, cells):
                tried = _called_in_turn(model, cell, batch, seed)
            found += _explained(tried, _refusal(model))
        except ModelError as error:
            found += [
                CallCell(
                    call=call.name,
                    backend=cell.backend,
                    layout=cell.layout,
                    verdict="refuses",
                    reason=str(error),
                )
                for call in CALLS
            ]
    return found


def _recurrence(model: Any, cells: Sequence[Cell]) -> AbstractContextManager[Any]:
    """Let PyTorch stand in for recurrent kernels if it did so in any cell."""
    missing = {name for cell in cells for name in cell.stand_in}
    return recurrence(model) if missing - {FLASH} else nullcontext()


def _refusal(model: Any) -> str:
    """Return why no argument keeps the model's documents apart; empty if some do."""
    try:
        if pools(model):
            check_trunk(model, hf.unwrap(model))
        else:
            check_family(model)
    except ModelError as error:
        return str(error)
    return ""


def _explained(cells: list[CallCell], refusal: str) -> list[CallCell]:
    """Replace the reason and fix of calls that leak whatever their arguments are.

    No argument helps a model that is refused. If positions alone leak, they are the reason for every call: without a
    cache or a mask it would leak as well.
    """
    plain = cells[0]
    if refusal:
        return [
            replace(cell, kind="model_family", why=refusal, fix=ONE_A_ROW)
            if cell.verdict == "leaks"
            else cell
            for cell in cells
        ]
    if plain.verdict != "leaks":
        return cells
    why = plain.why or "boundaries aren't read from position_ids"
    fix = plain.fix or WITH_MODEL_INPUTS
    passed_over = ("use_cache", "attention_mask", "")
    return [
        replace(cell, kind=plain.kind, why=why, fix=fix)
        if cell.verdict == "leaks" and cell.kind in passed_over and cell.call != CALLS[-1].name
        else cell
        for cell in cells
    ]


def _called_in_turn(model: Any, cell: Cell, batch: PackedBatch, seed: int) -> list[CallCell]:
    """Call the model in every way; the coupling of plain rows is measured once."""
    known, found = cell.isolation if cell.kernels else None, []
    solo: dict[int, torch.Tensor] = {}
    for call in CALLS:
        report = check_isolation(
            model, batch, inputs=call.inputs, max_changed=_BY_CALL, seed=seed, known=known, solo=solo
        )
        found.append(_called(model, call, cell.backend, batch, report))
        coupling = report.movements.row_coupling
        if known is not None and coupling is not None:
            known = replace(known, movements=replace(known.movements, row_coupling=coupling))
    return found


def _called(model: Any, call: Call, backend: str, batch: PackedBatch, report: IsolationReport) -> CallCell:
    """Return the result of one way of calling; `check_batch` explains a leak."""
    cell = CallCell(
        call=call.name,
        backend=backend,
        layout=batch.layout,
        verdict=_verdict_of(report.verdict),
        reason=report.reason,
    )
    if report.verdict == "refuses":
        return cell
    moved = report.movements
    cell = replace(
        cell, difference=max(moved.largest_difference, moved.padding_difference, moved.alone_difference)
    )
    if report.verdict != "leaks":
        return cell
    errors = check_batch(call.inputs(batch, model), model).errors
    if not errors:
        return replace(cell, why=call.why)
    return replace(cell, kind=errors[0].kind, why=errors[0].what, fix=errors[0].fix)


@accepting_unknown_code()
def _picture(
    model: Any, cells: Sequence[Cell], batches: dict[Layout, PackedBatch], seed: int
) -> AttentionPicture | None:
    ran = [cell.layout for cell in cells if cell.backend == "eager" and cell.kernels]
    if not ran:
        return None
    trial = Trial(model, batches[ran[0]], inputs_of(model), seed)
    try:
        with attending(model, "eager"), _recurrence(model, cells), untouched(model):
            return attention_picture(trial)
    except (ModelError, NotImplementedError, ValueError):  # the cell of eager has the reason
        return None


# The compatibility matrix: every causal family of the installed transformers, verified, as one mapping for JSON.
#
# Each verdict comes from a run of a tiny model with random weights; nothing is known beforehand about any family.

FAULT = "the check itself failed"


def matrix_row(family: str) -> dict[str, Any]:
    """Verify one family, and return all verdicts.

    Cost: some seconds.
    """
    torch.set_num_threads(1)  # models this small lose more by waking a second thread than it computes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # families warn of their own settings
        try:
            return _row(verify(family))
        except ModelError as error:
            return _not_run(str(error))
        except Exception as error:  # one family must not cost the others; a test looks for these words
            return _not_run(f"{FAULT}: {described(error, kind=True)}")


def _not_run(reason: str) -> dict[str, Any]:
    cell = {"verdict": "not run", "reason": reason}
    cells = {backend: {"rows": cell, "flat": cell} for backend in CPU_BACKENDS}
    return {"verdict": "not run", "reason": reason, "cells": cells, "calls": {}}


def _row(report: VerifyReport) -> dict[str, Any]:
    cells: dict[str, dict[str, Any]] = {}
    for cell in report.cells:
        found: dict[str, Any] = {"verdict": cell.verdict}
        if cell.reason:
            found["reason"] = cell.reason
        if cell.stand_in:
            found["stand_in"] = list(cell.stand_in)
        if cell.isolation is not None and cell.kernels:
            moved = cell.isolation.movements
            found["moved"] = _rounded(max(moved.largest_difference, moved.padding_difference))
            found["control"] = _rounded(moved.control_difference)
            found["kernels"] = [name for name, _ in cell.kernels]
        if cell.gradients is not None:
            found["gradients"] = _rounded(cell.gradients.difference)
        cells.setdefault(cell.backend, {})[cell.layout] = found
    row: dict[str, Any] = {"verdict": report.verdict, "model": report.model, "weights": report.weights}
    return row | {"cells": cells, "calls": _calls(report.calls)}


def _calls(calls: Sequence[CallCell]) -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    for cell in calls:
        found.setdefault(cell.call, {}).setdefault(cell.backend, {})[cell.layout] = cell.verdict
    return found


def _rounded(value: float | None) -> float | None:
    """Keep two digits: more would differ between machines."""
    return None if value is None else float(f"{value:.1e}")


# The ways in which packed batches are handed to transformers models today, each to be tried by itself.


class Call(NamedTuple):
    """A way of calling a model on a packed batch."""

    name: str  # the keyword arguments, in a few words
    inputs: Inputs
    why: str = ""  # why documents see each other, if nothing in the arguments shows it


def _positions(batch: PackedBatch, model: Any, **more: Any) -> dict[str, Any]:
    """Return positions that restart with every document, and no other boundaries."""
    tensors = batch.to_torch(hf.unwrap(model).device)
    positions = tensors.position_ids + hf.first_position(model)
    arguments = {"input_ids": tensors.input_ids, "position_ids": positions, "use_cache": False} | more
    return {name: value for name, value in arguments.items() if hf.accepts(model, name)}


def _with_mask(batch: PackedBatch, model: Any, mask: Any) -> dict[str, Any]:
    arguments = _positions(batch, model)
    return arguments | {"attention_mask": torch.as_tensor(mask).to(arguments["input_ids"])}


def _mask_of_ones(batch: PackedBatch, model: Any) -> dict[str, Any]:
    return _with_mask(batch, model, batch.segment_ids >= -1)


def _mask_of_padding(batch: PackedBatch, model: Any) -> dict[str, Any]:
    return _with_mask(batch, model, batch.segment_ids >= 0)


def _mask_of_numbers(batch: PackedBatch, model: Any) -> dict[str, Any]:
    return _with_mask(batch, model, batch.segment_ids + 1)


def _boundaries(batch: PackedBatch, model: Any) -> dict[str, Any]:
    return _positions(batch, model, **boundaries(batch, hf.unwrap(model).device))


def _boundaries_and_numbers(batch: PackedBatch, model: Any) -> dict[str, Any]:
    arguments = _boundaries(batch, model)
    if not hf.accepts(model, "seq_idx"):
        return arguments
    ends = boundaries(batch, hf.unwrap(model).device)["cu_seq_lens_q"]
    return arguments | {"seq_idx": segment_numbers(ends, *arguments["input_ids"].shape)}


def _only_tokens(batch: PackedBatch, model: Any) -> dict[str, Any]:
    arguments = {"input_ids": batch.to_torch(hf.unwrap(model).device).input_ids, "use_cache": False}
    return {name: value for name, value in arguments.items() if hf.accepts(model, name)}


# Every call but varlen's own, `hf.model_inputs`, with what makes it; arguments that a model's forward has no name for
# are left out.
CALLS = (
    # transformers' DataCollatorWithFlattening under Trainer
    Call("position_ids, use_cache=False", _positions),
    # the same in a training loop that leaves config.use_cache as it is
    Call("position_ids, use_cache=True", lambda batch, model: _positions(batch, model, use_cache=True)),
    # collators that add a mask for every token
    Call("position_ids, attention_mask of ones", _mask_of_ones),
    # collators that pad packed rows
    Call("position_ids, attention_mask 0 at padding", _mask_of_padding),
    # collators that number segments in the mask: 1, 1, 2, 2, 0
    Call("position_ids, attention_mask of numbers", _mask_of_numbers),
    # DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    Call("position_ids, cu_seq_lens, max_length", _boundaries),
    # TRL's padding-free collator; return_seq_idx=True
    Call("position_ids, cu_seq_lens, max_length, seq_idx", _boundaries_and_numbers),
    # concatenated text
    Call("input_ids alone", _only_tokens, "nothing says where documents begin"),
)
