"""check_batch: what would go wrong with a batch, before it does.

Nothing is run: what each attention of transformers makes of a batch's arguments is known, and tests hold it
against real runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from varlen.batch.packed import PackedBatch
from varlen.verify.batches.finding import BatchReport, Finding, ModelFacts
from varlen.verify.batches.isolation import isolation_findings, recurrent_findings
from varlen.verify.batches.numbers import agreement_findings, number_findings, target_findings
from varlen.verify.batches.reading import GivenBatch, Segments, read, segments_of


def check_batch(batch: PackedBatch | Mapping[str, Any], model: Any = None) -> BatchReport:
    """Find what would go wrong with a batch, before it does: leaks, lost targets, broken boundaries.

    Args:
        batch: a PackedBatch, or the keyword arguments of a transformers model as any collator makes them:
            arrays, tensors on any device, or lists, `input_ids` `[rows, width]` among them.
        model: the transformers model, bare or wrapped, as it is set up now: its attention, cache, vocabulary,
            positions and family decide what a batch does. Without one, a batch with all of FlashAttention's
            arguments is judged for FlashAttention and any other for sdpa; what would be wrong only with
            another attention is a warning.

    Returns:
        The findings, errors first; `report.ok` if none is an error. A PackedBatch is judged as
        `varlen.adapters.hf.model_inputs` would pass it on.

    Raises:
        DocumentsError: no `input_ids`, or something that isn't a rectangle of numbers.
        ModelError: not a transformers model.

    Cost: a few passes over the tokens, some milliseconds for 65,536. Tensors on a GPU cross to the host in one
    transfer. A finished (4-D) mask in host memory is gone through once; on a GPU it is believed.

    >>> import varlen as vl
    >>> ids, positions = [[5, 6, 7, 8, 9]], [[0, 1, 2, 0, 1]]
    >>> batch = {"input_ids": ids, "position_ids": positions, "attention_mask": [[1] * 5]}
    >>> report = vl.check_batch(batch)
    >>> report.ok, report.kinds
    (False, ('attention_mask',))
    >>> print(report.findings[0].fix)
    del batch["attention_mask"]
    """
    given = read(batch)
    facts = None
    if model is not None:
        from varlen.verify.batches.isolation import facts_of  # a batch by itself is checked without torch

        facts = facts_of(model)
    segments = segments_of(given)
    found = list(_found(given, segments, facts)) if given.input_ids.size else []
    found.sort(key=lambda finding: finding.level)  # "error" before "warning", else as they were found
    return BatchReport(
        findings=tuple(found),
        rows=given.rows,
        width=given.width,
        documents=segments.documents,
        model=facts.name if facts else None,
        attention=facts.attention if facts else None,
    )


def _found(given: GivenBatch, segments: Segments, facts: ModelFacts | None) -> Iterator[Finding]:
    isolation = [*isolation_findings(given, segments, facts), *recurrent_findings(given, segments, facts)]
    yield from isolation
    yield from number_findings(given, facts)
    yield from agreement_findings(given, segments, facts, {finding.kind for finding in isolation})
    yield from target_findings(given, segments, facts)
