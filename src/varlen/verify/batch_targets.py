"""Targets: labels that cross a boundary, stand on padding, are outside the vocabulary, or aren't there at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from varlen.batch.packed import IGNORE_INDEX
from varlen.counts import many
from varlen.verify.batch_facts import ModelFacts
from varlen.verify.batch_places import finding
from varlen.verify.batch_reading import BoolArray, GivenBatch, IntArray
from varlen.verify.batch_report import Finding, Level
from varlen.verify.batch_segments import Segments


def target_findings(given: GivenBatch, segments: Segments, facts: ModelFacts | None) -> Iterator[Finding]:
    """Yield what is wrong with labels; where there are none at all, nothing.

    Args:
        given: the batch.
        segments: where its documents begin.
        facts: of the model; None where it isn't known.
    """
    for name in ("labels", "shift_labels"):
        labels = given.by_token(name)
        if labels is None:
            continue
        yield from _crossing(given, segments, name, labels)
        yield from _on_padding(given, segments, name, labels)
        yield from _outside_vocabulary(name, labels, facts)
        if name == "shift_labels" or given.by_token("shift_labels") is None:
            yield from _absent(segments, name, labels)


def _crossing(given: GivenBatch, segments: Segments, name: str, labels: IntArray) -> Iterator[Finding]:
    targets = labels != IGNORE_INDEX
    if name == "labels":
        crossing = segments.follows & targets  # a row's first label is nobody's target, and follows nothing
        fix = 'batch["labels"][batch["position_ids"] == 0] = -100'
        what, place = "the first label of {} isn't -100", "the label at"
    else:
        crossing = np.zeros_like(targets)
        crossing[:, :-1] = segments.follows[:, 1:] & targets[:, :-1]
        if given.packed is not None and given.width:
            crossing[:, -1] = targets[:, -1]
        fix = "shift labels within each document, and end each with -100: vl.collate(..., shift_labels=True)"
        what, place = "the last shifted label of {} isn't -100", "the shifted label at"
    if crossing.any():
        documents = what.format(many(int(crossing.sum()), "document"))
        what = f"{documents}: the model would predict the first token from the end of another document"
        yield finding("crossing_targets", "error", what, fix, crossing, place)


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
        fix = f'batch["{name}"][batch["attention_mask"] == 0] = -100'
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


def _absent(segments: Segments, name: str, labels: IntArray) -> Iterator[Finding]:
    targets = (labels != IGNORE_INDEX) & ~segments.padding
    if name == "labels":
        targets = targets & ~segments.starts
    if not targets.any():
        what = "no label is a target, so the loss is 0 or NaN and nothing is learned"
        fix = "skip the batch on all ranks, or look for what masked every label (chat template, truncation)"
        yield finding("no_targets", "error", what, fix, place=name)
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
