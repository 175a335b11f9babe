"""A VerifyReport as one HTML page: verdicts, attention token by token, other ways of calling, and why they leak."""

from __future__ import annotations

from html import escape
from typing import Any

from varlen.counts import many
from varlen.report.drawing import drawing, line, rect, text
from varlen.report.page import NARROW, WIDE, facts, figure, numbers, page, paragraph, section, table
from varlen.verify.models.backends import AttentionPicture
from varlen.verify.models.report import (
    VerifyReport,
    arguments,
    backend_rows,
    call_rows,
    explanations,
    extremes,
    reasons,
    shown,
    stand_ins,
    tried,
)

_STEPS = 9  # shades of attention weights
_GAP, _TOP = 28.0, 22.0


def model_page(report: VerifyReport) -> str:
    """Return a report as one self-contained HTML page."""
    parts = [_opening(report), section("With varlen's arguments", *_own(report))]
    if report.attention is not None:
        parts.append(section("Who attends to whom", _attention(report.attention)))
    if report.calls:
        parts.append(section("Called in other ways", *_others(report)))
    parts.append(section("What was run", facts(_facts(report))))
    return page(f"varlen verify {report.family}", parts)


def _opening(report: VerifyReport) -> str:
    """Return the title, and the four numbers that matter most."""
    ran = [cell for cell in report.cells if cell.isolation is not None and cell.kernels]
    moved, control, gradients = extremes(ran)
    leaking = {cell.call for cell in report.leaks}
    boxes = [
        (
            _kind(report.verdict),
            report.verdict,
            f"in {many(len(ran), 'backend and layout', 'backends and layouts')} that ran",
        ),
        ("", shown(moved), "how far other documents move when one is changed, of the largest logit"),
        ("", shown(control), "the same without boundaries: what a leak would look like"),
        (
            "",
            shown(gradients),
            "largest difference of any gradient from documents one by one",
        ),
    ]
    lead = (
        f"Called with varlen's arguments: {report.verdict}. "
        f"Of {len({cell.call for cell in report.calls})} other ways of calling it, {len(leaking)} leak with some "
        "attention or layout."
        if report.calls
        else f"Called with varlen's arguments: {report.verdict}."
    )
    return (
        f"<header>{paragraph('varlen verify', 'kicker')}<h1>{escape(report.model)}</h1>"
        f"{paragraph(lead, 'lead')}</header>{numbers(boxes)}"
    )


def _own(report: VerifyReport) -> list[str]:
    head, *rows = backend_rows(report)
    parts = [table(head, [("", row) for row in rows], _kind)]
    parts += [paragraph(sentence) for sentence in (*stand_ins(report), *reasons(report))]
    return parts


def _others(report: VerifyReport) -> list[str]:
    head, *rows = call_rows(report)
    parts = [table(head, [("", [cell.strip() for cell in row]) for row in rows], _kind)]
    if any("/" in cell for row in rows for cell in row[1:]):
        parts.append(paragraph("Where layouts differ, the first word is for rows and the second for flat."))
    return parts + [
        paragraph(f"{what}. {remedy[:1].upper()}{remedy[1:]}".strip())
        for what, remedy in explanations(report)
    ]


def _kind(cell: str) -> str:
    """Return the class of a cell by its verdicts, one per layout if they differ."""
    verdicts = set(cell.split("/"))
    if verdicts & {"leaks", "coupled"}:
        return "bad"
    return "good" if verdicts == {"isolated"} else ""


def _facts(report: VerifyReport) -> list[tuple[str, str]]:
    found = [
        ("family", report.family),
        ("weights", f"{report.weights:,}, {report.dtype} on {report.device}"),
        *report.versions,
        *(("documents", sentence) for sentence in (tried(report),) if sentence),
        *(("note", note) for note in report.notes),
    ]
    return [*found, *(("arguments", sentence) for sentence in arguments(report))]


def _attention(picture: AttentionPicture) -> str:
    caption = (
        "Attention weights of one packed row, the largest of all layers and heads: each line is a token, each column "
        "one that it may look at; lines part the documents, of which the last may be padding. With boundaries "
        "nothing lies outside a document's own triangle; without, the same model looks across."
    )
    return figure(_weights(picture, WIDE), _weights(picture, NARROW), caption)


def _weights(picture: AttentionPicture, width: int) -> str:
    """Draw squares side by side, or one below the other on a narrow page."""
    drawn = [("with boundaries", picture.kept_apart)]
    if picture.without is not None:
        drawn.append(("without", picture.without))
    beside = width > NARROW
    side = (width - _GAP) / 2 if beside else float(width)
    marks: list[str] = []
    for index, (title, weights) in enumerate(drawn):
        x = index * (side + _GAP) if beside else 0.0
        y = _TOP if beside else _TOP + index * (side + _TOP + _GAP)
        marks.append(text(x, y - 8, title))
        marks += _square(picture, weights, x, y, side)
    height = _TOP + side if beside else len(drawn) * (side + _TOP + _GAP) - _GAP
    return drawing(width, height, marks, "attention weights from token to token, with boundaries and without")


def _square(picture: AttentionPicture, weights: Any, x: float, y: float, side: float) -> list[str]:
    count = len(picture.owner)
    step = side / count
    marks = [rect(x, y, side, side, "unused")]
    for row, column in zip(*weights.nonzero()):
        weight = float(weights[row, column])
        shade = 1 + min(_STEPS - 1, int(weight * _STEPS))
        box = (x + column * step, y + row * step, step, step)
        marks.append(rect(*box, f"weight{shade}", f"token {row} to token {column}: {weight:.3f}"))
    cuts = [i for i in range(1, count) if picture.owner[i] != picture.owner[i - 1]]
    for cut in cuts:
        marks.append(line(x, y + cut * step, x + side, y + cut * step, "cut"))
        marks.append(line(x + cut * step, y, x + cut * step, y + side, "cut"))
    return marks
