"""Whether documents are isolated: how each kind of attention interprets a batch's arguments.

transformers finds boundaries in two ways that disagree. Eager, sdpa and FlexAttention read positions when a mask is
built, unless there is a mask or a cache; FlashAttention uses cu_seqlens if `BOUNDARIES` and `LONGEST`
are all given, else the positions of a single row, unless a mask has zeros.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from varlen.adapters.hf import attention
from varlen.adapters.hf.mixing import check_family, check_trunk, drops_boundaries, is_bidirectional, pools
from varlen.adapters.hf.model import (
    family,
    implementation,
    model_inside,
    shifts_labels,
    text_config,
    text_decoder,
    unwrap,
    uses_registry,
    vocabulary_size,
)
from varlen.counts import many
from varlen.errors import ModelError
from varlen.parsed import parse_python
from varlen.verify.batches.finding import Detector, Finding, Kind, Level, ModelFacts, MRope, finding
from varlen.verify.batches.reading import (
    BOUNDARIES,
    LONGEST,
    BoolArray,
    GivenBatch,
    Segments,
    breaks,
    segment_mask,
    usable_ends,
)

NAMED = {
    "mask": "eager, sdpa and FlexAttention",
    "flash": "FlashAttention",
    "varlen": 'the "varlen" attention',
}
WITH_MODEL_INPUTS = "inputs = varlen.adapters.hf.model_inputs(packed_batch, model); model(**inputs)"
BY_DOCUMENT = "varlen.adapters.hf.document_outputs(model, batch), with the PackedBatch"
ONE_A_ROW = "one document a row, padded on the right, with a 0/1 attention_mask"
ALL_FOUR = 'pass "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q" and "max_length_k", all four'
RESTART = "restart position_ids at 0 with every document and every piece of one"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """A batch with one kind of attention."""

    given: GivenBatch
    segments: Segments
    facts: ModelFacts | None
    detector: Detector
    level: Level

    @property
    def name(self) -> str:
        """The attention, for messages."""
        known = self.facts is not None and self.facts.detector == self.detector
        return self.facts.attention if self.facts and known else NAMED[self.detector]

    def told_by(self, lost: BoolArray) -> str:
        """Name the arguments by which documents begin there, for messages."""
        return ", ".join(name for name, starts in self.segments.starts_by.items() if (starts & lost).any())

    def lost(self, kind: Kind, why: str, fix: str, lost: BoolArray | None = None) -> Iterator[Finding]:
        """Yield a finding if boundaries are lost, by default all of them."""
        lost = self.segments.needed if lost is None else lost
        if lost.any():
            what = f"{why}, so {many(int(lost.sum()), 'document sees', 'documents see')} tokens of others"
            yield finding(kind, self.level, what, fix, lost, "the document that begins at")


def isolation_findings(given: GivenBatch, segments: Segments, facts: ModelFacts | None) -> Iterator[Finding]:
    """Yield causes of attention across documents."""
    if facts is not None and facts.refusal and segments.is_packed:
        yield _refused(given, segments, facts)
        return
    if given.packed is not None:
        if facts is not None and facts.detector == "unknown":
            what = f'varlen doesn\'t know the attention "{facts.attention}", so model_inputs refuses it'
            fix = 'model.set_attn_implementation("sdpa")'
            yield finding("model_family", "error", what, fix, field="the model")
        return
    yielded: set[Kind] = set()
    for detector, level in _detectors(given, facts):
        case = _Case(given=given, segments=segments, facts=facts, detector=detector, level=level)
        check = {"mask": _by_mask, "flash": _by_flash, "varlen": _by_varlen}[detector]
        fresh = [found for found in check(case) if found.kind not in yielded]
        yielded |= {found.kind for found in fresh}
        yield from fresh


def read_first(given: GivenBatch, segments: Segments, facts: ModelFacts | None) -> str | None:
    """Name the argument from which the attention reads boundaries; None where it reads none of those given."""
    detector, _ = _detectors(given, facts)[0]
    drops = facts is not None and facts.drops_boundaries
    by_ends = detector == "varlen" or (detector == "flash" and _has_all_four(given) and not drops)
    name = "cu_seq_lens_q" if by_ends else "position_ids"
    return name if name in segments.starts_by else None


def _detectors(given: GivenBatch, facts: ModelFacts | None) -> list[tuple[Detector, Level]]:
    """Return the kinds of attention to check, the likeliest first, with the level of their findings."""
    if facts is not None and facts.detector != "unknown":
        return [(facts.detector, "error")]
    if facts is not None:
        return [("mask", "warning"), ("flash", "warning")]
    if _has_all_four(given):
        return [("flash", "error"), ("mask", "warning")]
    return [("mask", "error"), ("flash", "warning")]


def _has_all_four(given: GivenBatch) -> bool:
    return all(name in given.arrays for name in BOUNDARIES) and all(name in given.longest for name in LONGEST)


def _refused(given: GivenBatch, segments: Segments, facts: ModelFacts) -> Finding:
    may_work = facts.reads_boundaries and "seq_idx" in given.arrays and "cu_seq_lens_q" in given.arrays
    why = f"varlen can't vouch for it, although it reads seq_idx and cu_seqlens: {facts.refusal}"
    return finding(
        "model_family",
        "warning" if may_work else "error",
        why if may_work else str(facts.refusal),
        BY_DOCUMENT if facts.pools else ONE_A_ROW,
        segments.needed,
        "the document that begins at",
    )


def _by_mask(case: _Case) -> Iterator[Finding]:
    """Check eager, sdpa and FlexAttention, which read positions unless something prevents it."""
    given, facts = case.given, case.facts
    if given.finished_mask is not None:
        yield from _open_mask(case)
        return
    if facts is not None and not facts.reads_positions:  # whatever the mask and the cache
        why = f"{facts.name} never looks at position_ids when it builds its {facts.attention} mask"
        yield from case.lost("model_family", why, WITH_MODEL_INPUTS)
        yield from _by_positions(case, is_prevented=True)
        return
    is_prevented = False
    if "attention_mask" in given.arrays:
        is_prevented = True
        yield from case.lost("attention_mask", _mask_in_words(case), 'del batch["attention_mask"]')
    if _cache_is_on(given, facts):
        is_prevented = True
        cause = "use_cache isn't given and the model's config turns it on"
        if given.use_cache:
            cause = "use_cache is on"
        if given.has_cache:
            cause = "a cache is given"
        why = f"{cause}, and with a cache no boundaries are looked for in position_ids ({case.name})"
        fix = "model.config.use_cache = False  # transformers' Trainer does it by itself"
        absent = given.use_cache is None and not given.has_cache
        yield from case.lost("use_cache", why, fix if absent else 'batch["use_cache"] = False')
    yield from _by_positions(case, is_prevented)


def _by_positions(case: _Case, is_prevented: bool) -> Iterator[Finding]:
    """Check the positions as eager, sdpa and FlexAttention read them."""
    given = case.given
    positions = given.by_token("position_ids")
    if positions is None:
        if "position_ids" not in given.arrays:
            why = f"boundaries are read from position_ids alone ({case.name}), and there are none{_unread(given)}"
            yield from case.lost("positions_missing", why, RESTART)
    elif _loses_text_positions(case):
        yield from _mrope(case)
    elif not is_prevented:
        starts = breaks(positions, 1)
        run_on = case.segments.needed & ~starts
        yield from case.lost("positions_run_on", _run_on(case, run_on), RESTART, run_on)
        if not _has_all_four(given):
            yield from _mid_document(case, "warning", "With FlashAttention they would belong to no segment")


def _by_flash(case: _Case) -> Iterator[Finding]:
    """Check FlashAttention, which reads a mask with zeros, else cu_seqlens, else the positions of a single row."""
    given, needed = case.given, case.segments.needed
    if given.finished_mask is not None:
        yield finding(
            "attention_mask",
            case.level,
            f"{case.name} takes no finished (4-D) mask, only boundaries",
            WITH_MODEL_INPUTS,
            field="attention_mask",
        )
        return
    mask = given.arrays.get("attention_mask")
    if mask is not None and not mask.all():
        yield from case.lost("attention_mask", _mask_in_words(case), 'del batch["attention_mask"]')
        return
    drops = case.facts is not None and case.facts.drops_boundaries
    if _has_all_four(given) and not drops:
        yield from _by_ends(case)
        return
    if case.facts is not None and case.facts.is_bidirectional:
        why = f"{case.name} reads all four boundaries, and of positions only what a model hands on to its layers"
        yield from case.lost("incomplete_boundaries", why, ALL_FOUR)
        return
    positions = given.by_token("position_ids")
    some = [name for name in (*BOUNDARIES, *LONGEST) if name in given.arrays or name in given.longest]
    incomplete = [] if drops else some
    if positions is None or given.rows > 1 or _loses_text_positions(case):
        if incomplete:
            why = f"{case.name} reads boundaries only if all four are given, and there is {', '.join(incomplete)}"
            yield from case.lost("incomplete_boundaries", why, ALL_FOUR)
        elif given.rows > 1:
            why = f"{case.name} looks for boundaries in position_ids of a single row, and there are {given.rows:,}"
            fix = f'{ALL_FOUR} (of the flattened rows), or collate with layout="flat"'
            if case.facts is not None and case.facts.drops_boundaries:
                why = f"{case.facts.name} hands cu_seq_lens_q on to no layer, so {why}"
                fix = 'collate with layout="flat", or model.set_attn_implementation("sdpa")'
            yield from case.lost("packed_rows", why, fix)
        elif positions is None and "position_ids" not in given.arrays:
            why = f"{case.name} gets no boundaries that it reads{_unread(given)}"
            yield from case.lost("positions_missing", why, ALL_FOUR)
        elif positions is not None:
            yield from _mrope(case)
        return
    starts, first = breaks(positions, 1), positions == positions.min()
    packed = bool(starts[:, 1:].any())
    separated = first if packed else np.zeros_like(first)
    run_on = needed & ~starts
    yield from case.lost("positions_run_on", _run_on(case, run_on), f"{RESTART}, or {ALL_FOUR}", run_on)
    why = f"{case.name} begins a segment only at the smallest position ({int(positions.min()):,}), and pieces go on"
    yield from case.lost("positions_continue", why, f"{RESTART}, or {ALL_FOUR}", needed & starts & ~separated)
    if packed:
        yield from _mid_document(
            case, case.level, f"{case.name} leaves them out of every segment: nothing is computed"
        )


def _run_on(case: _Case, run_on: BoolArray) -> str:
    """Describe positions that don't restart where other arguments begin documents."""
    return (
        f"position_ids run on where documents begin by {case.told_by(run_on)}, and boundaries are read from "
        f"position_ids ({case.name})"
    )


def _by_ends(case: _Case) -> Iterator[Finding]:
    """Check FlashAttention with all four arguments, which uses cu_seqlens over the flattened rows."""
    ends = usable_ends(case.given)
    if ends is None:
        return  # reported by `number_findings`
    separated = case.segments.starts_by["cu_seq_lens_q"]
    needed = case.segments.needed.copy()
    needed[1:, 0] = True  # flattened rows follow each other
    why = "cu_seq_lens_q begin no segment there"
    fix = "let cu_seq_lens_q hold every start of a document, over the flattened rows"
    yield from case.lost("boundaries_disagree", why, fix, needed & ~separated)


def _by_varlen(case: _Case) -> Iterator[Finding]:
    """Check varlen's attention, which reads only cu_seqlens and refuses masks."""
    mask = case.given.arrays.get("attention_mask")
    if case.given.finished_mask is not None or (mask is not None and not mask.all()):
        why = f"{case.name} takes boundaries and no mask, and raises an error when given one"
        yield finding("attention_mask", case.level, why, WITH_MODEL_INPUTS, field="attention_mask")
    if "cu_seq_lens_q" not in case.given.arrays:
        why = f"{case.name} reads boundaries from cu_seq_lens_q alone, and raises an error without them"
        yield finding("boundaries_missing", case.level, why, WITH_MODEL_INPUTS, field="the batch")
    else:
        yield from _by_ends(case)


def _cache_is_on(given: GivenBatch, facts: ModelFacts | None) -> bool:
    if given.has_cache:
        return True
    wanted = given.use_cache if given.use_cache is not None else bool(facts and facts.uses_cache)
    return wanted and not (facts and facts.drops_cache)


def _unread(given: GivenBatch) -> str:
    """Name the boundaries that models ignore, for messages."""
    return f" (models don't look at {', '.join(given.unread)})" if given.unread else ""


def _loses_text_positions(case: _Case) -> bool:
    """Whether the positions have a shape in which a model with M-RoPE finds no text positions."""
    positions = case.given.arrays["position_ids"]
    if positions.ndim == 3:
        return len(positions) != 4
    return case.facts is not None and case.facts.mrope == "text_row"


def _mrope(case: _Case) -> Iterator[Finding]:
    shape = list(case.given.arrays["position_ids"].shape)
    why = (
        f"position_ids have the shape {shape}, in which models with M-RoPE find no text positions and so no "
        "boundaries"
    )
    fix = "put text positions in front: torch.cat([text_position_ids[None], position_ids]), [4, rows, width]"
    yield from case.lost("mrope_positions", why, fix)


def _mask_in_words(case: _Case) -> str:
    """Describe the mask and its effect on boundaries."""
    given = case.given
    mask = given.arrays["attention_mask"]
    masked = int((mask == 0).sum())
    if segment_mask(given) is not None:
        kind = f"attention_mask numbers segments (1 to {int(mask.max()):,}), which models take for true and false"
    elif masked == 0:
        kind = "attention_mask is all ones"
    else:
        kind = f"attention_mask is 0 at {many(masked, 'position')}"
    return f"{kind}; under such a mask no boundaries are looked for ({case.name})"


def _open_mask(case: _Case) -> Iterator[Finding]:
    masks = case.given.finished_mask
    absent = [kind for kind, mask in masks.items() if mask is None] if isinstance(masks, Mapping) else []
    # Recurrent layers, called linear attention, have no mask.
    if absent := [kind for kind in map(str, absent) if "attention" in kind and "linear" not in kind]:
        why = f"attention_mask holds no mask for layers of kind {', '.join(absent)}, which then attend to all before"
        yield from case.lost("open_mask", why, WITH_MODEL_INPUTS)
        return
    across = opened_across(case.given, case.segments)
    if across is not None and across.any():
        many_tokens = many(int(across.sum()), "token")
        yield finding(
            "open_mask",
            case.level,
            f"the finished attention_mask lets {many_tokens} see other documents than their own",
            WITH_MODEL_INPUTS,
            across,
            "the token at",
        )


def _mid_document(case: _Case, level: Level, then: str) -> Iterator[Finding]:
    """Yield rows whose first position isn't the smallest: they begin in the middle of a document."""
    positions = case.given.by_token("position_ids")
    if positions is None or not case.segments.is_packed:
        return
    before = np.logical_and.accumulate(positions != positions.min(), axis=1) & ~case.segments.padding
    if not before.any() or before.all(axis=1).all():
        return
    rows = many(int(before[:, 0].sum()), "row begins", "rows begin")
    what = f"{rows} mid-document, {many(int(before.sum()), 'token')} before the first restart. {then}"
    yield finding("row_starts_mid_document", level, what, RESTART, before, "the token at")


CLOSED_BELOW = -1e3
"""Mask values below this, added to scores, mask a position out: its weight is 0 even in half precision."""
BLOCK = 1024
"""Queries that are read at once, to limit memory."""


def opened_across(given: GivenBatch, segments: Segments) -> BoolArray | None:
    """Return the tokens that attend to another document by a finished mask, or None if it can't be read.

    Masks on a GPU and FlexAttention's block masks aren't read.
    """
    if not segments.starts_by:
        return None
    numbers = segments.numbers().reshape(given.rows, given.width)
    across = None
    for mask in _readable(given):
        if mask.ndim != 4 or mask.shape[2:] != (given.width, given.width):
            continue
        if mask.shape[0] not in (1, given.rows):
            continue
        across = np.zeros((given.rows, given.width), dtype=bool) if across is None else across
        for row in range(given.rows):
            own = mask[min(row, len(mask) - 1)]
            for start in range(0, given.width, BLOCK):
                block = slice(start, start + BLOCK)
                is_open = own[:, block] if own.dtype == bool else own[:, block] > CLOSED_BELOW
                other = numbers[row, block, None] != numbers[row]
                across[row, block] |= (is_open.any(axis=0) & other).any(axis=1)
    return None if across is None else across & ~segments.padding


def _readable(given: GivenBatch) -> Iterator[Any]:
    """Yield the masks that are arrays in host memory; integer masks are added to scores, like floats."""
    masks = (
        given.finished_mask.values() if isinstance(given.finished_mask, Mapping) else [given.finished_mask]
    )
    for mask in masks:
        if isinstance(mask, np.ndarray):
            yield mask
        elif hasattr(mask, "detach") and mask.device.type == "cpu":
            yield mask.detach().float().numpy() if mask.is_floating_point() else mask.detach().numpy()


def recurrent_findings(given: GivenBatch, segments: Segments, facts: ModelFacts | None) -> Iterator[Finding]:
    """Yield missing boundaries of recurrent and convolutional layers, which masks and positions don't reach."""
    if facts is None or not facts.recurrent_read or not segments.is_packed:
        return
    if facts.recurrent_in_one_row and given.rows > 1:
        what = (
            f"the recurrent layers of {facts.name} take the segments of one row, and there are {given.rows:,}"
        )
        yield finding("packed_rows", "error", what, 'collate with layout="flat"', field="the batch")
    if given.packed is not None:
        return  # model_inputs passes them
    for name in facts.recurrent_read:
        starts = segments.starts_by.get(name)
        lost = segments.needed if starts is None else segments.needed & ~starts
        if lost.any():
            problem = "there is none" if starts is None else "it begins no segment there"
            what = (
                f"the recurrent layers of {facts.name} read boundaries from {name} and {problem}, so their state "
                f"runs on into {many(int(lost.sum()), 'document')}"
            )
            yield finding(
                "model_family", "error", what, WITH_MODEL_INPUTS, lost, "the document that begins at"
            )
            return


INFERRED_FROM_POSITIONS = ("eager", "sdpa", "flex_attention")


def facts_of(model: Any, *, is_packed: bool = False) -> ModelFacts:
    """Read the properties of a model that decide how it interprets a batch.

    Of a PackedBatch (`is_packed`) a model that pools is given documents by `document_outputs`.

    Whether a family's masks depend on positions is read from its installed source code rather than from a list of
    names, which would become outdated.
    """
    given, model = model, model_inside(model)
    config, decoder, name = text_config(model), text_decoder(model), implementation(model)
    limit = getattr(config, "max_position_embeddings", None)
    kind: Any = type(decoder)
    code = _code(kind)
    return ModelFacts(
        name=type(unwrap(model)).__name__,
        within=None if given is model else type(unwrap(given)).__name__,
        attention=name,
        detector=_detector(model, name),
        uses_cache=bool(getattr(config, "use_cache", False)),
        drops_cache=bool(getattr(decoder, "gradient_checkpointing", False))
        and decoder.training
        and (torch.is_grad_enabled() or code.drops_any_cache),
        is_bidirectional=is_bidirectional(model),
        reads_positions=code.reads_positions and not is_bidirectional(model),
        mrope=code.mrope,
        reads_boundaries=code.reads_boundaries,
        drops_boundaries=drops_boundaries(model) is not None,
        recurrent_read=_RECURRENT_READ[family(model).boundaries],
        recurrent_in_one_row=family(model).boundaries == "ends",
        learned_positions=_has_table_of_positions(decoder, limit),
        vocabulary=vocabulary_size(model),
        positions=limit if isinstance(limit, int) and limit > 0 else None,
        refusal=_refusal(model, is_packed=is_packed),
        pools=pools(model),
        shifts_labels=shifts_labels(model),
    )


_RECURRENT_READ = {"": (), "numbers": ("seq_idx",), "ends": ("seq_idx", "cu_seq_lens_q")}


def _detector(model: Any, name: str) -> Detector:
    # A model with its own attention accepts any registered name, but still builds a mask.
    if name in INFERRED_FROM_POSITIONS or not uses_registry(model):
        return "mask"
    if name == attention.NAME:
        return "varlen"
    return "flash" if "flash" in name and not name.startswith("paged|") else "unknown"


def _refusal(model: Any, *, is_packed: bool) -> str | None:
    try:
        if is_packed and pools(model):
            check_trunk(model, unwrap(model))
        else:
            check_family(model)
    except ModelError as error:
        return str(error)
    return None


def _has_table_of_positions(decoder: Any, limit: Any) -> bool:
    """Whether an embedding other than the tokens' has a row for every position (and a few more)."""
    if not isinstance(limit, int):
        return False
    tokens = decoder.get_input_embeddings() if hasattr(decoder, "get_input_embeddings") else None
    return any(
        isinstance(module, torch.nn.Embedding)
        and module is not tokens
        and limit <= module.num_embeddings <= limit + 8
        for module in decoder.modules()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    """Properties read from a decoder's source."""

    reads_positions: bool = True
    mrope: MRope = "none"
    reads_boundaries: bool = False
    drops_any_cache: bool = True
    """Whether gradient checkpointing turns a cache off even without gradients; most don't since transformers 5.24."""


@lru_cache(maxsize=256)
def _code(decoder: Any) -> _Code:
    """Read a decoder's source; without source, assume that its masks depend on positions."""
    try:
        forward = inspect.getsource(inspect.unwrap(decoder.forward))
        module = inspect.getsource(inspect.getmodule(decoder) or decoder)
    except (OSError, TypeError, AttributeError):
        return _Code()
    mrope: MRope = "none"
    if "text_position_ids" in forward:
        mrope = "text_row_or_plain" if "expand(4, position_ids" in forward else "text_row"
    return _Code(
        reads_positions=_hands_positions_on(parse_python(textwrap.dedent(forward))),
        mrope=mrope,
        reads_boundaries="seq_idx" in module or "cu_seq_lens_q" in module,
        drops_any_cache="is_grad_enabled" not in _names_around(decoder.forward),
    )


def _names_around(function: Any) -> set[str]:
    """Return the names in the code of a function and of all that it wraps."""
    names: set[str] = set()
    while function is not None:
        names.update(getattr(getattr(function, "__code__", None), "co_names", ()))
        function = getattr(function, "__wrapped__", None)
    return names


def _hands_positions_on(forward: ast.AST) -> bool:
    """Whether every causal mask is built with `position_ids`; True if none is built."""
    tables = {
        target.id
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
        and any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in node.value.keys)
    }
    calls = [
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.startswith("create_")
        and node.func.id.endswith("causal_mask")
    ]

    def hands_on(call: ast.Call) -> bool:
        named = any(word.arg == "position_ids" for word in call.keywords)
        unfolded = [
            word.value.id for word in call.keywords if word.arg is None and isinstance(word.value, ast.Name)
        ]
        return named or any(name in tables for name in unfolded)

    return all(map(hands_on, calls))
