"""The pictures of docs/strategies.md, drawn from the newest result of `python -m benchmarks strategies`."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

from benchmarks.strategies.figures import (
    BASE,
    TITLES,
    Estimate,
    above_base,
    by_setting,
    estimate,
    figures,
    newest,
    runs_of,
    speed,
)
from svg import ACCENT, DOCUMENTS, INK, RULE, SOFT, WARM, Drawing

Point = tuple[float, float]
_ROW = 300
"""Height of a pair of curves."""
STROKES = {
    "online": INK,
    "ours": ACCENT,
    "sampled": DOCUMENTS[2],
    "grouped": WARM,
    "offline": DOCUMENTS[5],
    "offline_large": DOCUMENTS[6],
    "wrapped": DOCUMENTS[3],
}
"""Strategies with a curve, and its colour."""


def curves() -> Drawing:
    """Validation loss of every strategy against tokens, and against steps: Llama on both sets."""
    result = newest()
    sets = [name for name in result["sets"] if runs_of(result, name, "llama", BASE)]
    bottom = 54 + _ROW * len(sets)
    d = Drawing(860, bottom + 66, "validation loss against tokens and against steps, by strategy")
    for row, set_name in enumerate(sets):
        _pair(d, result, set_name, 34 + _ROW * row)
    for place, label in enumerate(STROKES):
        x, y = 70 + 265 * (place % 3), bottom + 24 * (place // 3)
        d.line(x, y - 4, x + 26, y - 4, stroke=STROKES[label], width=3)
        title = TITLES[label].replace("`", "")
        d.text(x + 34, y, f"padding; {title}" if label == BASE else title, size=13)
    seeds = len(runs_of(result, "short", "llama", BASE))
    d.text(840, bottom + 52, f"Llama, mean of {seeds} seeds", size=12, fill=SOFT, anchor="end")
    return d


def _pair(d: Drawing, result: dict[str, Any], set_name: str, top: float) -> None:
    """Draw the losses on one set, by tokens on the left and by steps on the right."""
    by_label = {label: _mean_curve(result, set_name, label) for label in STROKES}
    lowest = min(loss for curve in by_label.values() for _, _, loss in curve)
    highest = max(loss for curve in by_label.values() for _, _, loss in curve)
    panels = (
        (70, f"{set_name} set: loss by thousands of tokens", 1, 1e-3),
        (470, "loss by steps", 0, 1.0),
    )
    for left, title, column, scale in panels:
        most = max(curve[-1][column] for curve in by_label.values()) * scale
        axes = _Axes(left, top + 26, 340, _ROW - 84, 0.0, most, lowest - 0.01, highest + 0.01)
        d.text(left, top, title, size=15, bold=True)
        axes.draw(d)
        for label, curve in by_label.items():
            points = [axes.at(row[column] * scale, row[2]) for row in curve]
            _line(d, points, STROKES[label])


def _mean_curve(result: dict[str, Any], set_name: str, label: str) -> list[tuple[float, float, float]]:
    """Return (steps, tokens, loss), the means over seeds of each validation at equal distances in tokens."""
    runs = runs_of(result, set_name, "llama", label).values()
    curves = []
    for run in runs:
        total = run["tokens"]
        places = [6 * tokens // total for _, tokens, _ in run["validation"]]
        # Where two lie between the same sixths, the first one is the regular one, and the last is the end.
        kept = dict(reversed(list(zip(places, run["validation"]))))
        kept[6] = run["validation"][-1]
        curves.append({place: row for place, row in kept.items() if place})
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [
        tuple(estimate(curve[place][column] for curve in curves).mean for column in range(3))  # type: ignore[misc]
        for place in common
    ]


class _Axes:
    """A panel, and where its values lie."""

    def __init__(
        self, left: float, top: float, width: float, height: float,
        x_low: float, x_high: float, y_low: float, y_high: float,
    ) -> None:  # fmt: skip
        self.left, self.top, self.width, self.height = left, top, width, height
        self._x, self._y = (x_low, x_high), (y_low, y_high)

    def at(self, x: float, y: float) -> Point:
        """Return where a value is drawn."""
        across = (x - self._x[0]) / (self._x[1] - self._x[0])
        up = (y - self._y[0]) / (self._y[1] - self._y[0])
        return self.left + self.width * across, self.top + self.height * (1 - up)

    def draw(self, d: Drawing) -> None:
        """Draw lines at round values, and their numbers."""
        for value in _round_values(*self._y):
            _, y = self.at(self._x[0], value)
            d.line(self.left, y, self.left + self.width, y)
            d.text(self.left - 8, y + 4, f"{value:g}", size=12, fill=SOFT, anchor="end")
        for value in _round_values(*self._x):
            x, _ = self.at(value, self._y[0])
            d.text(x, self.top + self.height + 20, f"{value:g}", size=12, fill=SOFT, anchor="middle")


def _round_values(low: float, high: float) -> list[float]:
    """Return some round values within an interval, eight at most."""
    rough = (high - low) / 8
    unit = 10 ** int(log10(rough) // 1)
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = int(-(-low // step))
    return [round(step * k, 10) for k in range(first, int(high // step) + 1)]


def _line(d: Drawing, points: Sequence[Point], stroke: str) -> None:
    """Draw a line through points without dots, which would hide each other."""
    for (x1, y1), (x2, y2) in zip(points, points[1:]):
        d.line(x1, y1, x2, y2, stroke=stroke, width=2)


def density() -> Drawing:
    """The sweep: each setting's validation loss against random minibatches, with its interval."""
    found = by_setting(newest())
    rows = [
        (records[0], estimate(one["fill"] for one in records).mean, above_base(found, label))
        for label, records in found.items()
        if label != BASE
    ]
    ends = [end for _, _, one in rows for end in _ends(one)]
    d = Drawing(860, 112 + 24 * len(rows), "validation loss above that of random minibatches, by composition")
    axes = _Axes(330, 66, 490, 24 * len(rows), min(0.0, *ends), max(0.0, *ends), 0.0, 1.0)
    d.text(
        30, 34, "validation loss above random minibatches, in nats, with 95 % intervals", size=15, bold=True
    )
    for x, words in ((30, "composition"), (130, "capacity"), (210, "window"), (270, "full")):
        d.text(x, 60, words, size=12, fill=SOFT)
    for value in _round_values(min(0.0, *ends), max(0.0, *ends)):
        x, _ = axes.at(value, 0.0)
        d.line(x, 66, x, 66 + 24 * len(rows), stroke=SOFT if value == 0 else RULE)
        d.text(x, 84 + 24 * len(rows), f"{value:+g}" if value else "0", size=12, fill=SOFT, anchor="middle")
    for place, (record, fill, one) in enumerate(rows):
        y = 82 + 24 * place
        is_next_fit = record["label"] == "next_fit"
        words = "next fit" if is_next_fit else ("sorted" if record["is_sorted"] else "random")
        window = "all" if record["window"] is None else f"{record['window']:,}"
        for x, cell in (
            (30, words),
            (130, f"{record['capacity']:,}"),
            (210, window),
            (270, f"{100 * fill:.1f} %"),
        ):
            d.text(x, y, cell, size=12)
        stroke = WARM if record["is_sorted"] else ACCENT
        low, high = (axes.at(end, 0.0)[0] for end in _ends(one))
        d.line(low, y - 4, high, y - 4, stroke=stroke, width=2)
        d.curve([(axes.at(one.mean, 0.0)[0], y - 4)], stroke=stroke)
    seeds = len(found[BASE])
    d.text(820, 104 + 24 * len(rows), f"Llama, short set, {seeds} seeds", size=12, fill=SOFT, anchor="end")
    return d


def _ends(found: Estimate) -> tuple[float, float]:
    width = found.half_width or 0.0
    return found.mean - width, found.mean + width


def extreme() -> Drawing:
    """Tokens a second and peak memory where one document of sixteen is far longer than all others."""
    races = figures(newest(), "extreme")
    names = [contestant["strategy"] for contestant in races[0]["contestants"]]
    strokes = dict(zip(names, (DOCUMENTS[1], WARM, INK, ACCENT)))
    bottom = 56 + 96 * len(races)
    d = Drawing(860, bottom + 92, "tokens a second and peak memory, by how much longer the longest is")
    panels = (
        (130, "tokens a second", lambda one: one.tokens_per_s),
        (510, "peak memory, MB", lambda one: one.memory_mb),
    )
    for left, title, value_of in panels:
        d.text(left, 34, title, size=15, bold=True)
        values = [[value_of(speed(race["contestants"], name)) for name in names] for race in races]
        least, most = (log10(end(end(row) for row in values)) for end in (min, max))
        tens = range(floor(least), ceil(most) + 1)
        for ten in tens:
            x = left + 250 * (ten - tens[0]) / (len(tens) - 1)
            d.line(x, 50, x, bottom - 12, stroke=RULE)
            d.text(x, bottom + 6, f"{10**ten:,}", size=12, fill=SOFT, anchor="middle")
        for group, row in enumerate(values):
            for place, value in enumerate(row):
                x, y = left + 250 * (log10(value) - tens[0]) / (len(tens) - 1), 62 + 96 * group + 19 * place
                d.line(left, y, x, y, stroke=RULE)
                d.curve([(x, y)], stroke=strokes[names[place]])
                d.text(x + 9, y + 4, f"{value:,.0f}", size=12)
    for group, race in enumerate(races):
        d.text(114, 95 + 96 * group, f"{race['factor']:,}x longer", size=13, anchor="end")
    x = 30.0
    for name in names:
        title = TITLES[name].replace("`", "")
        d.curve([(x + 7, bottom + 44)], stroke=strokes[name])
        d.text(x + 20, bottom + 48, title, size=13)
        x += 64 + 7 * len(title)
    d.text(830, bottom + 74, "logarithmic scales", size=12, fill=SOFT, anchor="end")
    return d


PICTURES = {"strategies_curves": curves, "strategies_density": density, "strategies_extreme": extreme}
