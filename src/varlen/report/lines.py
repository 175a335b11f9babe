"""Lines over capacities on a log axis, named where they end, or below where there is no room."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varlen.report.charts import NARROW, ticks
from varlen.report.svg import circle, drawing, line, polyline, text

_HEIGHT, _PITCH = 280.0, 17.0
_NAMES_WIDTH = 256
"""Room for names at the right of a wide picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line: a value at each place, and what it is called."""

    label: str
    values: tuple[float | None, ...]
    """One a place; None where there is none, which breaks the line."""
    kind: str
    """Class of its colour: "varlen", "baseline", "control" or "series0" to "series5"."""


def lines(
    rows: Sequence[Line], places: Sequence[int], width: int, label: str, axis: Callable[[float], str]
) -> str:
    """Draw values against places, whose logarithms are evenly far apart.

    Args:
        rows: at least one, each with a value for each place; later ones are drawn above.
        places: rising.
        width: of the picture.
        label: what it shows, in words.
        axis: writes a value beside the axis, and in the tips of dots.
    """
    is_wide = width >= NARROW
    left, top = 58.0, 12.0
    right = width - (_NAMES_WIDTH if is_wide else 14)
    known = [value for row in rows for value in row.values if value is not None]
    rounds = ticks(min(known, default=0.0), max(known, default=1.0), 5)
    low, high = rounds[0], rounds[-1]
    first, last = math.log2(places[0]), math.log2(places[-1])

    def across(place: int) -> float:
        spread = (math.log2(place) - first) / (last - first) if last > first else 0.5
        return left + 12 + (right - left - 24) * spread

    def up(value: float) -> float:
        return top + _HEIGHT * (high - value) / ((high - low) or 1.0)

    marks = [line(left, up(tick), right, up(tick), "grid") for tick in rounds]
    marks += [text(left - 8, up(tick) + 4, axis(tick), "tick", "end") for tick in rounds]
    marks += _places_named(places, across, top + _HEIGHT + 20)
    for row in rows:
        marks += _drawn(row, places, across, up, axis)
    bottom = top + _HEIGHT + 26
    if is_wide:
        marks += _names_at_ends(rows, right, up)
        return drawing(width, bottom, marks, label)
    marks += _names_below(rows, bottom)
    return drawing(width, bottom + 8 + _PITCH * len(rows), marks, label)


def _places_named(places: Sequence[int], across: Callable[[int], float], y: float) -> list[str]:
    """Write places under the axis, those that would touch the one before left out."""
    marks, free = [], -math.inf
    for place in places:
        half = 3.6 * len(f"{place:,}")
        if across(place) - half >= free:
            marks.append(text(across(place), y, f"{place:,}", "tick", "middle"))
            free = across(place) + half + 6
    return marks


def _drawn(
    row: Line,
    places: Sequence[int],
    across: Callable[[int], float],
    up: Callable[[float], float],
    axis: Callable[[float], str],
) -> list[str]:
    """Draw one line in as many parts as it has gaps, and a dot for each value."""
    marks: list[str] = []
    part: list[tuple[float, float]] = []
    for place, value in zip(places, row.values, strict=True):
        if value is None:
            marks.append(polyline(part, f"line {row.kind}"))
            part = []
        else:
            part.append((across(place), up(value)))
    marks.append(polyline(part, f"line {row.kind}"))
    marks += [
        circle(across(place), up(value), 3.5, f"dot {row.kind}", f"{row.label} at {place:,}: {axis(value)}")
        for place, value in zip(places, row.values, strict=True)
        if value is not None
    ]
    return marks


def _names_at_ends(rows: Sequence[Line], right: float, up: Callable[[float], float]) -> list[str]:
    """Write each name level with its line's last value, or as near as its neighbours leave room."""
    ends = [
        (up(known[-1]), row)
        for row in rows
        if (known := [value for value in row.values if value is not None])
    ]
    ends.sort(key=lambda end: end[0])
    heights = spread_out([height for height, _ in ends], _PITCH, _HEIGHT + 12)
    marks = []
    for (own, row), height in zip(ends, heights, strict=True):
        marks.append(line(right - 4, own, right + 14, height, f"leader {row.kind}"))
        marks.append(text(right + 18, height + 4.5, row.label, f"note {row.kind}"))
    return marks


def _names_below(rows: Sequence[Line], bottom: float) -> list[str]:
    marks = []
    for index, row in enumerate(rows):
        y = bottom + 12 + index * _PITCH
        marks.append(circle(6, y - 4, 4, f"dot {row.kind}"))
        marks.append(text(18, y, row.label, f"note {row.kind}"))
    return marks


def spread_out(heights: Sequence[float], pitch: float, most: float) -> list[float]:
    """Move rising heights apart, at least a pitch each, none of them beyond the most if they fit.

    >>> spread_out([10.0, 11.0, 90.0], 10.0, 100.0)
    [10.0, 20.0, 90.0]
    >>> spread_out([95.0, 96.0], 10.0, 100.0)
    [90.0, 100.0]
    """
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + pitch) if moved else height)
    limit = most
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - pitch
    return moved
