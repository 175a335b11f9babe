"""Bars, dots and a histogram, each drawn for a given width, so that a phone gets a picture of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varlen.report.svg import circle, drawing, line, rect, text

NARROW = 480
"""Columns narrower than this put labels above marks instead of beside them."""
LABEL_WIDTH = 176


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar: its length, and what stands beside it."""

    label: str
    value: float
    note: str
    kind: str
    """Class of its colour: "varlen", "baseline" or "control"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dots:
    """One row of dots, with their mean."""

    label: str
    values: tuple[float, ...]
    note: str
    kind: str


def bars(rows: Sequence[Bar], width: int, label: str, least: float = 0.0) -> str:
    """Draw horizontal bars from zero, their notes at their ends.

    Args:
        rows: at least one.
        width: of the picture.
        label: what it shows, in words.
        least: what a bar over the whole width is worth at least, so that next to nothing looks like it.
    """
    note_width = 8 * max(len(row.note) for row in rows) + 10
    left, pitch, thickness, top = _row_shape(width)
    reach = width - left - note_width
    longest = max(least, *(row.value for row in rows)) or 1.0
    marks = []
    for index, row in enumerate(rows):
        y = index * pitch
        marks.append(line(left, y + top - 3, left, y + top + thickness + 3, "axis"))
        marks.append(_row_label(row.label, left, y, thickness, row.kind))
        length = reach * row.value / longest
        marks.append(rect(left, y + top, length, thickness, f"bar {row.kind}"))
        marks.append(text(left + length + 7, y + top + thickness / 2 + 4.5, row.note, f"note {row.kind}"))
    return drawing(width, pitch * len(rows), marks, label)


def dots(rows: Sequence[Dots], width: int, label: str, axis: Callable[[float], str]) -> str:
    """Draw values as dots on a common axis, and the mean of each row as a stroke.

    Args:
        rows: at least one, each with at least one value.
        width: of the picture.
        label: what it shows, in words.
        axis: writes a value under the axis.
    """
    note_width = 7.4 * max(len(row.note) for row in rows) + 12
    left, pitch, thickness, top = _row_shape(width)
    values = [value for row in rows for value in row.values]
    round_values = ticks(min(values), max(values), 5 if width >= NARROW else 3)
    low, high = min(round_values[0], min(values)), max(round_values[-1], max(values))
    reach = width - left - note_width - 12

    def place(value: float) -> float:
        return left + 6 + reach * (value - low) / ((high - low) or 1.0)

    bottom = pitch * len(rows)
    marks = [line(place(tick), 0, place(tick), bottom, "grid") for tick in round_values]
    marks += [text(place(tick), bottom + 16, axis(tick), "tick", "middle") for tick in round_values]
    for index, row in enumerate(rows):
        y = index * pitch
        middle = y + top + thickness / 2
        marks.append(_row_label(row.label, left, y, thickness, row.kind))
        marks.append(
            line(place(min(row.values)), middle, place(max(row.values)), middle, f"range {row.kind}")
        )
        marks += [circle(place(v), middle, 4, f"dot {row.kind}", axis(v)) for v in row.values]
        mean = place(sum(row.values) / len(row.values))
        marks.append(line(mean, middle - 9, mean, middle + 9, f"mean {row.kind}"))
        marks.append(text(width, middle + 4.5, row.note, f"note {row.kind}", "end"))
    return drawing(width, bottom + 22, marks, label)


def histogram(lengths: Sequence[int], cut: int, width: int, label: str) -> str:
    """Draw, on a log axis of lengths, the share of documents and the share of tokens in every half octave.

    Args:
        lengths: tokens of each document, at least 1.
        cut: where documents are cut, drawn as a line.
        width: of the picture.
        label: what it shows, in words.
    """
    first = math.floor(2 * math.log2(min(lengths)))
    documents, tokens = ([0.0] * (half_octave(max(lengths)) - first + 1) for _ in range(2))
    for length in lengths:
        documents[half_octave(length) - first] += 1
        tokens[half_octave(length) - first] += length
    return half_octaves(first, documents, tokens, cut, f"cut at {cut:,}", width, label)


def half_octave(length: int) -> int:
    """Return the number of the half octave that a length falls in: 0 for 1, 2 for 2, 4 for 4 and 5."""
    return math.floor(2 * math.log2(length))


def half_octaves(
    first: int,
    documents: Sequence[float],
    tokens: Sequence[float],
    cut: int,
    cut_note: str,
    width: int,
    label: str,
) -> str:
    """Draw a histogram that was counted before: documents above, tokens below.

    Args:
        first: number of the first half octave.
        documents: how many fall in each half octave.
        tokens: how many stand in them.
        cut: a length that is drawn as a line.
        cut_note: what stands beside that line.
        width: of the picture.
        label: what it shows, in words.
    """
    bins = max(first + len(documents), half_octave(cut) + 1, first + 2) - first
    last = first + bins
    band, gap, pitch = 92, 40, width / (last - first)
    panels = ((18.0, documents, "baseline", "documents"), (18.0 + band + gap, tokens, "varlen", "tokens"))
    marks = []
    for top, counts, kind, title in panels:
        shares = [count / sum(counts) for count in counts]
        tallest = max(shares)
        marks.append(text(0, top - 4, f"share of {title}", f"note {kind}"))
        for index, share in enumerate(shares):
            height = band * share / tallest
            low, high = 2 ** ((first + index) / 2), 2 ** ((first + index + 1) / 2)
            tip = f"{math.ceil(low):,} to {math.ceil(high) - 1:,} tokens: {100 * share:.1f} % of {title}"
            marks.append(
                rect(index * pitch + 0.75, top + band - height, pitch - 1.5, height, f"bar {kind}", tip)
            )
        marks.append(line(0, top + band, width, top + band, "axis"))
    bottom = 18 + 2 * band + gap
    marks += _length_axis(first, last, pitch, bottom, width)
    at = (2 * math.log2(cut) - first) * pitch
    marks.append(line(at, 8, at, bottom, "cut"))
    is_right = at + 5 + 7 * len(cut_note) > width
    marks.append(text(at + (-5 if is_right else 5), 14, cut_note, "tick", "end" if is_right else "start"))
    return drawing(width, bottom + 24, marks, label)


def _length_axis(first: int, last: int, pitch: float, bottom: float, width: int) -> list[str]:
    """Write powers of two under a log axis, as many as there is room for."""
    # The last label ends at the edge, so two labels take up to one and a half times their width.
    needed = 11 * len(f"{2 ** (last // 2):,}") + 6
    step = (
        2 * math.ceil(needed / (2 * pitch))
        if width >= NARROW
        else max(4, 2 * math.ceil(needed / (2 * pitch)))
    )
    marks = []
    for place in range(first + first % 2, last + 1, step):
        x = (place - first) * pitch
        anchor = "start" if x < 12 else "end" if x > width - 12 else "middle"
        marks.append(text(x, bottom + 17, f"{2 ** (place // 2):,}", "tick", anchor))
    return marks


def _row_shape(width: int) -> tuple[float, float, float, float]:
    """Return where bars begin, how far rows are apart, how thick bars are, and how far from the row's top."""
    return (LABEL_WIDTH, 34, 20, 5) if width >= NARROW else (0, 46, 18, 20)


def _row_label(label: str, left: float, y: float, thickness: float, kind: str) -> str:
    """Write a row's label beside its bar, or above it where there is no room."""
    if left > 0:
        return text(left - 10, y + 5 + thickness / 2 + 4.5, label, f"label {kind}", "end")
    return text(0, y + 14, label, f"label {kind}")


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return about as many round values as wanted that span a range."""
    rough = max((high - low) / wanted, 1e-9)
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]
