"""check_batch: finds errors in a batch before it is used.

No model is run: how each attention of transformers interprets a batch's arguments is written down here, and tests
compare it with real runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch.packed import IGNORE_INDEX, PackedBatch
from varlen.counts import many
from varlen.verify.batches.finding import BatchReport, Finding, Kind, Level, ModelFacts, finding
from varlen.verify.batches.isolation import (
    RESTART,
    facts_of,
    isolation_findings,
    read_first,
    recurrent_findings,
)
from varlen.verify.batches.reading import (
    BOUNDARIES,
    LONGEST,
    BoolArray,
    Clash,
    GivenBatch,
    IntArray,
    Segments,
    clash_of,
    read,
    segments_of,
    usable_ends,
)


def check_batch(
    batch: PackedBatch | Mapping[str, Any],
    model: Any = None,
    *,
    lengths: npt.ArrayLike | None = None,
) -> BatchReport:
    """Find errors in a batch before it is used: attention across documents, lost targets, broken boundaries.

    Args:
        batch: a PackedBatch, or the keyword arguments of a transformers model as any collator makes them:
            arrays, tensors on any device, or lists; `input_ids` must be `[rows, width]`.
        model: the transformers model, bare or wrapped, in its current setup: its attention, cache, vocabulary,
            positions and family decide how it interprets a batch, and with gradient checkpointing whether
            gradients are on, since from transformers 5.24 on most models keep their cache without them. Without
            a model, a batch with all of FlashAttention's arguments is checked for FlashAttention and any other
            for sdpa; errors that only another attention would have are warnings. A module of your own with
            exactly one transformers model inside is checked as if that one were called with the batch, whatever
            that module does. The report says so (`within`); `varlen.verify.models.isolation.check_isolation`
            runs the module's code.
        lengths: the tokens of each document, in order: a list for a batch of one row, or a list for each row; what
            a row holds beyond them is padding. They are the truth that all boundaries of the batch must agree with.
            Without them, a row whose positions count on counts as one document.

    Returns:
        The findings, errors first; `report.ok` if none is an error. A PackedBatch is checked as
        `varlen.adapters.hf.model_inputs` would pass it to the model, or `document_outputs` to one that pools.

    Raises:
        DocumentsError: no `input_ids`, or an argument that isn't a rectangle of numbers.
        SettingError: lengths that don't fit the batch's rows, or lengths of a PackedBatch, which holds its own.
        ModelError: not a transformers model.

    Cost: a few passes over the tokens, some milliseconds for 65,536. Tensors on a GPU are copied to the host in one
    transfer. A 4-D mask in host memory is read once; on a GPU it isn't checked.

    >>> import varlen as vl
    >>> ids, positions = [[5, 6, 7, 8, 9]], [[0, 1, 2, 0, 1]]
    >>> batch = {"input_ids": ids, "position_ids": positions, "attention_mask": [[1] * 5]}
    >>> report = vl.check_batch(batch)
    >>> report.ok, report.kinds
    (False, ('attention_mask',))
    >>> print(report.findings[0].fix)
    del batch["attention_mask"]
    """
    given = read(batch, lengths)
    facts = None if model is None else facts_of(model, is_packed=given.packed is not None)
    segments = segments_of(given)
    clash = clash_of(segments)
    if clash is not None:  # what else is found goes by one of the two
        read_by = "lengths" if lengths is not None else read_first(given, segments, facts)
        segments = segments_of(given, only=read_by if read_by in clash[:2] else clash.one)
        if lengths is None:
            segments = replace(segments, follows=segments.follows & ~clash.places)
    findings = list(_findings(given, segments, facts, clash)) if given.input_ids.size else []
    findings.sort(key=lambda finding: finding.level)  # stable: "error" before "warning"
    return BatchReport(
        findings=tuple(findings),
        rows=given.rows,
        width=given.width,
        documents=segments.documents,
        model=facts.name if facts else None,
        within=facts.within if facts else None,
        attention=facts.attention if facts else None,
        is_assumed=segments.starts_by.keys() <= {"position_ids"} and not segments.is_packed,
    )


_FEWEST_LABELS = 4
"""Of fewer, it can't be told whether they are shifted."""
_BY_BOUNDARIES: Set[Kind] = {"positions_run_on", "positions_continue", "boundaries_disagree"}


def _findings(
    given: GivenBatch, segments: Segments, facts: ModelFacts | None, clash: Clash | None
) -> Iterator[Finding]:
    isolation = [*isolation_findings(given, segments, facts), *recurrent_findings(given, segments, facts)]
    known = {finding.kind for finding in isolation}
    if clash is not None:
        yield _disagreement(given, clash, facts, read_first(given, segments, facts))
        known |= {"boundaries_disagree"}
        if clash.other != "lengths":  # which of the two is wrong isn't known, so neither is blamed
            isolation = [finding for finding in isolation if finding.kind not in _BY_BOUNDARIES]
            known |= _BY_BOUNDARIES
    yield from isolation
    yield from number_findings(given, facts)
    yield from agreement_findings(given, segments, facts, known)
    yield from target_findings(given, segments, facts)


_ENDS = "torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)"
_MADE_OF_LENGTHS = {
    "position_ids": "position_ids = torch.cat([torch.arange(n) for n in lengths])[None]",
    "cu_seq_lens_q": f"cu_seq_lens_q = cu_seq_lens_k = {_ENDS}",
}


def _disagreement(given: GivenBatch, clash: Clash, facts: ModelFacts | None, read_by: str | None) -> Finding:
    """Return the error that two arguments tell different documents, with the first place of each."""

    def begins(name: str) -> str:
        starts = clash.of(name)
        row, column = divmod(int(np.argmax(starts)), given.width)
        return (
            f"{many(int(starts.sum()), 'document')} by {name} alone, first at row {row:,}, column {column:,}"
        )

    one, other = clash[:2]
    what = f"{one} and {other} tell different documents: {begins(one)}; {begins(other)}"
    if facts is not None and read_by in (one, other):
        what += f"; attention {facts.attention} reads {read_by}"
    made = [_MADE_OF_LENGTHS.get(name, name) for name in (one, other) if name != "lengths"]
    fix = f"from the same lengths of documents make {', and '.join(made)}"
    if "lengths" not in clash[:2]:
        fix += "; check_batch(..., lengths=lengths) says which is wrong"
    return finding("boundaries_disagree", "error", what, fix, clash.places, "the document that begins at")


def number_findings(given: GivenBatch, facts: ModelFacts | None) -> Iterator[Finding]:
    """Yield errors in shapes, dtypes, ids, positions and each array of boundaries."""
    yield from _shapes(given)
    yield from _finished_masks(given)
    yield from _float_ids(given)
    for name in BOUNDARIES[: 1 if _boundaries_are_equal(given) else 2]:
        yield from _boundaries(given, name)
    yield from _longest(given)
    yield from _tokens(given, facts)
    yield from _positions(given, facts)


def agreement_findings(
    given: GivenBatch, segments: Segments, facts: ModelFacts | None, known: Set[Kind]
) -> Iterator[Finding]:
    """Yield disagreements between the arguments that define boundaries."""
    ends, other = (given.arrays.get(name) for name in BOUNDARIES)
    if ends is not None and other is not None and not np.array_equal(ends, other):
        what = "cu_seq_lens_q and cu_seq_lens_k differ, and a token attends to its own row alone"
        fix = 'batch["cu_seq_lens_k"] = batch["cu_seq_lens_q"]'
        yield finding("boundaries_disagree", "error", what, fix, field="cu_seq_lens_k")
    yield from _run_on(given, segments, facts, known)
    if "boundaries_disagree" in known:
        return
    for name, starts in segments.starts_by.items():
        missing = segments.needed & ~starts
        if name == "position_ids" or not missing.any():
            continue
        others = ", ".join(other for other in segments.starts_by if other != name)
        what = f"{name} begins no document at {many(int(missing.sum()), 'place')} where {others} do"
        is_read = name in ("cu_seq_lens_q", "lengths") or facts is None or given.packed is not None
        level: Level = "error" if is_read else "warning"
        fix = "make all of them from the same lengths of documents"
        yield finding("boundaries_disagree", level, what, fix, missing, "the document that begins at")
        return


def _run_on(
    given: GivenBatch, segments: Segments, facts: ModelFacts | None, known: Set[Kind]
) -> Iterator[Finding]:
    """Yield documents whose positions don't restart: harmless with rotary positions, wrong with learned ones."""
    if given.finished_mask is not None or {"positions_run_on", "positions_missing"} & known:
        return
    level: Level = "error" if given.packed is not None or (facts and facts.learned_positions) else "warning"
    starts = segments.starts_by.get("position_ids")
    missing = segments.needed if starts is None else segments.needed & ~starts
    if not missing.any() or (starts is None and "position_ids" in given.arrays):
        return
    kind: Kind = "positions_run_on" if "position_ids" in given.arrays else "positions_missing"
    cause = "position_ids run on" if kind == "positions_run_on" else "without position_ids, positions run on"
    then = "harmless with rotary positions, of which only distances count; wrong with learned ones"
    if facts is not None and facts.learned_positions:
        then = "the model has an embedding for each position, so documents compute something else than alone"
    elif level == "error":
        then = "in a PackedBatch they restart with every document"
    what = f"{cause} across the beginning of {many(int(missing.sum()), 'document')}; {then}"
    yield finding(kind, level, what, RESTART, missing, "the document that begins at")


def _shapes(given: GivenBatch) -> Iterator[Finding]:
    ids = given.input_ids.shape
    for name in ("labels", "shift_labels", "position_ids", "attention_mask", "seq_idx"):
        array = given.arrays.get(name)
        if array is None or given.by_token(name) is not None:
            continue
        what = f"{name} has the shape {list(array.shape)} and input_ids {list(ids)}"
        if array.ndim == 2 and array.shape[0] == ids[0]:
            more = array.shape[1] - ids[1]
            what += f", {many(abs(more), 'token')} {'more' if more > 0 else 'fewer'}"
        fix = "look for a document whose columns differ in length, or that is empty"
        yield finding("shapes", "error", what, fix, field=name)


def _finished_masks(given: GivenBatch) -> Iterator[Finding]:
    masks = given.finished_mask
    named = masks if isinstance(masks, Mapping) else {"": masks}
    wanted = [given.rows, given.width, given.width]
    for kind, mask in named.items():
        shape = list(getattr(mask, "shape", ()))
        is_array = isinstance(mask, np.ndarray) or hasattr(mask, "detach")
        if not is_array or (len(shape) == 4 and shape[0] in (1, given.rows) and shape[2:] == wanted[1:]):
            continue
        name = f'attention_mask["{kind}"]' if kind else "attention_mask"
        what = f"{name} has the shape {shape}, and must be {[wanted[0], 'heads or 1', *wanted[1:]]}"
        yield finding("shapes", "error", what, "make the mask of this batch's own rows", field=name)


def _float_ids(given: GivenBatch) -> Iterator[Finding]:
    for name in ("input_ids", "labels", "shift_labels"):
        dtype = given.dtypes.get(name, "int64")
        if "float" in dtype:
            what = f"{name} is {dtype}, as it becomes when an empty list is among the documents"
            fix = f'batch["{name}"] = batch["{name}"].long(), and drop empty documents'
            yield finding("float_ids", "error", what, fix, field=name)


def _boundaries(given: GivenBatch, name: str) -> Iterator[Finding]:
    ends = given.arrays.get(name)
    if ends is None:
        return
    named = name if given.packed is None else "cu_seqlens"
    tokens, dtype = given.rows * given.width, given.dtypes[name]
    fix = _ENDS
    if ends.ndim != 1 or len(ends) < 2:
        what = f"{named} has the shape {list(ends.shape)}, and must be [segments + 1]"
        yield finding("cu_seqlens", "error", what, fix, field=named)
        return
    if dtype != "int32":
        what = f"{named} is {dtype}, and variable-length kernels take int32"
        yield finding("cu_seqlens", "error", what, f'batch["{named}"] = batch["{named}"].int()', field=named)
    if ends[0] != 0:
        what = f"{named} starts at {ends[0]:,}, so no segment holds the tokens before"
        yield finding("cu_seqlens", "error", what, fix, field=f"{named} index 0")
    if ends[-1] != tokens:
        what = f"{named} ends at {ends[-1]:,}, and the batch has {many(tokens, 'token')}, padding counted"
        yield finding("cu_seqlens", "error", what, fix, field=f"{named} index {len(ends) - 1:,}")
    falls = np.append(False, np.diff(ends) < 0)
    if falls.any():
        yield finding("cu_seqlens", "error", f"{named} falls", fix, falls, named)
    empty = np.append(False, np.diff(ends) == 0)
    if empty.any():
        what = f"{many(int(empty.sum()), 'empty document')}: {named} holds an entry twice"
        fix = "drop documents without tokens before collating"
        yield finding("empty_documents", "warning", what, fix, empty, named)


def _boundaries_are_equal(given: GivenBatch) -> bool:
    """Whether queries and keys have the same boundaries, as they should."""
    ends, other = (given.arrays.get(name) for name in BOUNDARIES)
    dtypes = [given.dtypes.get(name) for name in BOUNDARIES]
    return ends is not None and other is not None and dtypes[0] == dtypes[1] and np.array_equal(ends, other)


def _longest(given: GivenBatch) -> Iterator[Finding]:
    for name, number in zip(BOUNDARIES, LONGEST, strict=True):
        ends, longest = usable_ends(given, name), given.longest.get(number)
        if ends is None or longest is None:
            continue
        lengths = np.diff(ends)
        if longest < lengths.max():
            what = (
                f"{number} is {longest:,}, and the longest segment has {int(lengths.max()):,} tokens: kernels "
                "compute nothing, or nonsense, beyond it"
            )
            fix = f'batch["{number}"] = int(batch["{name}"].diff().max())'
            yield finding("max_length", "error", what, fix, lengths > longest, "the segment with")


def _tokens(given: GivenBatch, facts: ModelFacts | None) -> Iterator[Finding]:
    ids = given.input_ids
    wrong = ids < 0
    if facts is not None:
        wrong = wrong | (ids >= facts.vocabulary)
    if wrong.any():
        limit = f"; {facts.name} embeds ids 0 to {facts.vocabulary - 1:,}" if facts else ""
        first = int(ids.reshape(-1)[np.argmax(wrong)])
        what = f"{many(int(wrong.sum()), 'token id')} that can't be embedded: the first is {first:,}{limit}"
        fix = "use the model's own tokenizer, or model.resize_token_embeddings"
        yield finding("token_ids", "error", what, fix, wrong, "the token at")


def _positions(given: GivenBatch, facts: ModelFacts | None) -> Iterator[Finding]:
    limit = None if facts is None else facts.positions
    positions = given.by_token("position_ids")
    if positions is None:
        if limit is not None and given.width > limit and "position_ids" not in given.arrays:
            what = (
                f"rows have {given.width:,} tokens and no position_ids, and the model has {limit:,} positions"
            )
            yield finding("positions_range", _beyond(given, facts), what, RESTART, field="the batch")
        return
    if (negative := positions < 0).any():
        what = f"{many(int(negative.sum()), 'negative position')}"
        yield finding("positions_range", "error", what, RESTART, negative, "the position at")
    if limit is not None and (beyond := positions >= limit).any():
        what = (
            f"{many(int(beyond.sum()), 'position')} beyond the model's {limit:,} (max_position_embeddings); the "
            f"largest is {int(positions.max()):,}"
        )
        fix = f'pack with capacity at most {limit:,} and overlong="split" or "truncate"'
        yield finding("positions_range", _beyond(given, facts), what, fix, beyond, "the position at")


def _beyond(given: GivenBatch, facts: ModelFacts | None) -> Level:
    return "error" if given.packed is not None or (facts and facts.learned_positions) else "warning"


def target_findings(given: GivenBatch, segments: Segments, facts: ModelFacts | None) -> Iterator[Finding]:
    """Yield errors in labels: across a boundary, at padding, outside the vocabulary, or no targets at all."""
    are_next = facts is None or facts.shifts_labels
    for name in ("labels", "shift_labels"):
        labels = given.by_token(name)
        if labels is None:
            continue
        shifted = list(_shifted(given, segments, labels, facts)) if are_next and name == "labels" else []
        yield from shifted
        if are_next and not shifted:
            yield from _crossing(given, segments, name, labels)
        yield from _on_padding(given, segments, name, labels)
        yield from _outside_vocabulary(name, labels, facts)
        if name == "shift_labels" or given.by_token("shift_labels") is None:
            yield from _absent(segments, name, labels, first_counts=name == "shift_labels" or not are_next)


def _shifted(
    given: GivenBatch, segments: Segments, labels: IntArray, facts: ModelFacts | None
) -> Iterator[Finding]:
    """Yield the error that labels are next tokens already, which the model would shift once more."""
    if given.by_token("shift_labels") is not None or given.packed is not None:
        return
    targets, ids = (labels != IGNORE_INDEX) & ~segments.padding, given.input_ids
    is_next = np.zeros_like(targets)
    is_next[:, :-1] = targets[:, :-1] & (labels[:, :-1] == ids[:, 1:])
    count = int(targets.sum())
    if (
        count < _FEWEST_LABELS
        or is_next.sum() < 0.9 * count
        or (targets & (labels == ids)).sum() > 0.5 * count
    ):
        return
    name = facts.name if facts else "the model"
    yield finding(
        "shifted_labels",
        "error",
        f"{many(count, 'label is that', 'labels are those')} of the next token already, and {name} shifts labels: it "
        "would learn the token after the next",
        "give each token its own id as label, and -100 to the first token of every document",
        targets,
        "the label at",
    )


def _crossing(given: GivenBatch, segments: Segments, name: str, labels: IntArray) -> Iterator[Finding]:
    targets = labels != IGNORE_INDEX
    if name == "labels":
        crossing = segments.follows & targets  # a row's first label is never used as a target
        fix = _first_labels(given, crossing)
        what, field = "the first label of {} isn't -100", "the label at"
    else:
        crossing = np.zeros_like(targets)
        crossing[:, :-1] = segments.follows[:, 1:] & targets[:, :-1]
        if given.packed is not None and given.width:
            crossing[:, -1] = targets[:, -1]
        fix = "shift labels within each document, and end each with -100: vl.collate(..., shift_labels=True)"
        what, field = "the last shifted label of {} isn't -100", "the shifted label at"
    if crossing.any():
        documents = what.format(many(int(crossing.sum()), "document"))
        what = f"{documents}: the model would predict the first token from the end of another document"
        yield finding("crossing_targets", "error", what, fix, crossing, field)


def _first_labels(given: GivenBatch, crossing: BoolArray) -> str:
    """Return the line that ends crossing targets, by an argument that begins all of these documents."""
    positions, ends = given.arrays.get("position_ids"), usable_ends(given)
    plain = given.by_token("position_ids") if positions is not None and positions.ndim < 3 else None
    if plain is not None and (plain[crossing] == 0).all():
        return 'batch["labels"][batch["position_ids"] == 0] = -100'
    if ends is not None and np.isin(np.flatnonzero(crossing), ends).all():
        return 'batch["labels"].view(-1)[batch["cu_seq_lens_q"][:-1].long()] = -100'
    return "set the first label of every document to -100 where labels are made"


def _on_padding(given: GivenBatch, segments: Segments, name: str, labels: IntArray) -> Iterator[Finding]:
    mask = given.by_token("attention_mask")
    padded = segments.padding if given.segment_ids is not None else None if mask is None else mask == 0
    if padded is None:
        return
    wrong = padded & (labels != IGNORE_INDEX)
    if wrong.any():
        level: Level = "error" if given.packed is not None else "warning"
        what = (
            f"{many(int(wrong.sum()), 'padding position')} with a label: the model learns to predict padding"
        )
        by_mask = f'batch["{name}"][batch["attention_mask"] == 0] = -100'
        fix = by_mask if mask is not None else f"set {name} to -100 at padding, where they are made"
        yield finding("padding_targets", level, what, fix, wrong, "the label at")


def _outside_vocabulary(name: str, labels: IntArray, facts: ModelFacts | None) -> Iterator[Finding]:
    wrong = (labels < 0) & (labels != IGNORE_INDEX)
    if facts is not None:
        wrong |= labels >= facts.vocabulary
    if wrong.any():
        limit = f", and {facts.name} has tokens 0 to {facts.vocabulary - 1:,}" if facts else ""
        first = int(labels.reshape(-1)[np.argmax(wrong)])
        what = f"{many(int(wrong.sum()), 'label')} that no token has: the first is {first:,}{limit}"
        fix = f"use the model's own tokenizer, and -100 in {name} where nothing is to be learned"
        yield finding("label_ids", "error", what, fix, wrong, "the label at")


def _absent(segments: Segments, name: str, labels: IntArray, *, first_counts: bool) -> Iterator[Finding]:
    targets = (labels != IGNORE_INDEX) & ~segments.padding
    if not first_counts:
        targets = targets & ~segments.starts
    if not targets.any():
        what = "no label is a target, so the loss is 0 or NaN and nothing is learned"
        fix = "skip the batch on all ranks, or look for what masked every label (chat template, truncation)"
        yield finding("no_targets", "error", what, fix, field=name)
        return
    empty = _without_targets(segments, targets)
    if empty.any():
        what = f"{many(int(empty.sum()), 'document has', 'documents have')} no target: computed, and nothing learned"
        fix = "drop such documents before packing, if they aren't meant"
        yield finding("documents_without_targets", "warning", what, fix, empty, "the document that begins at")


def _without_targets(segments: Segments, targets: BoolArray) -> BoolArray:
    """Return the starts of documents of two tokens or more without a target."""
    starts = np.flatnonzero(segments.starts)
    tokens = np.add.reduceat(~segments.padding.reshape(-1), starts, dtype=np.int64)
    counts = np.add.reduceat(targets.reshape(-1), starts, dtype=np.int64)
    empty = np.zeros(targets.size, dtype=bool)
    empty[starts[(counts == 0) & (tokens > 1)]] = True
    return empty.reshape(targets.shape)
