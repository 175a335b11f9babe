"""Whether recurrent and convolving layers are told where documents begin: no mask and no position reaches them."""

from __future__ import annotations

from collections.abc import Iterator

from varlen.counts import many
from varlen.verify.batch_facts import ModelFacts
from varlen.verify.batch_places import finding
from varlen.verify.batch_reading import GivenBatch
from varlen.verify.batch_report import Finding
from varlen.verify.batch_segments import Segments

_FIX = "inputs = varlen.adapters.hf.model_inputs(packed_batch, model); model(**inputs)"


def recurrent_findings(given: GivenBatch, segments: Segments, facts: ModelFacts | None) -> Iterator[Finding]:
    """Yield what lets a state run on from one document into the next.

    Args:
        given: the batch.
        segments: where its documents begin.
        facts: of the model; None where it isn't known.
    """
    if facts is None or not facts.recurrent_read or not segments.is_packed:
        return
    if facts.recurrent_in_one_row and given.rows > 1:
        what = (
            f"the recurrent layers of {facts.name} take the segments of one row, and there are {given.rows:,}"
        )
        yield finding("packed_rows", "error", what, 'collate with layout="flat"', place="the batch")
    if given.packed is not None:
        return  # model_inputs tells them
    for name in facts.recurrent_read:
        told = segments.starts_by.get(name)
        lost = segments.needed if told is None else segments.needed & ~told
        if lost.any():
            seen = "there is none" if told is None else "it begins no segment there"
            what = (
                f"the recurrent layers of {facts.name} read boundaries from {name} and {seen}, so their state runs "
                f"on into {many(int(lost.sum()), 'document')}"
            )
            yield finding("model_family", "error", what, _FIX, lost, "the document that begins at")
            return
