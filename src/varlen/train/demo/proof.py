"""The isolation report in the words of the demo's table."""

from __future__ import annotations

from varlen.report.figures import IsolationFigures
from varlen.verify.isolation import IsolationReport


def isolation_figures(report: IsolationReport) -> IsolationFigures:
    """Put what was measured into rows of words and numbers."""
    moved = report.movements
    control = "not measured" if moved.control_difference is None else f"{moved.control_difference:.3g}"
    rows = [
        ("documents in the row that was tried", f"{report.documents:,} ({report.tokens:,} tokens)"),
        ("documents changed, one at a time", f"{moved.changed_documents:,}"),
        ("their own logits moved by, at least", f"{moved.own_difference:.3g}"),
        ("any other document's logits moved by", _exactly(moved.largest_difference)),
        ("any document's logits moved when padding changed", _exactly(moved.padding_difference)),
        ("control without boundaries: others moved by", control),
        ("logits packed against each document alone", _exactly(moved.alone_difference)),
        ("loss packed, and one by one", f"{moved.packed_loss:.6f}, {moved.alone_loss:.6f}"),
    ]
    if moved.attention_across is not None:
        rows.append(("largest attention weight across documents", _exactly(moved.attention_across)))
    verdict = report.verdict if not report.reason else f"{report.verdict}: {report.reason}"
    return IsolationFigures(verdict=verdict, is_proved=report.ok, rows=tuple(rows))


def _exactly(value: float) -> str:
    return "0 (to the bit)" if value == 0 else f"{value:.3g}"
