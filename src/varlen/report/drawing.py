"""SVG charts of a given width: bars, dots, histograms, lines; packs as strips, and attention masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from varlen.report.demo import PieceFigures
from varlen.report.page import NARROW, WIDE, caption_of, twice

NARROW_COLUMN = 480
"""In narrower columns, labels are above marks instead of beside them."""
LABEL_WIDTH = 176


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar, with a label and a note."""

    label: str
    value: float
    note: str
    kind: str
    """Class of its colour: "varlen", "baseline" or "control"."""
    parts: tuple[tuple[float, str], ...] = ()
    """Shares of the bar, and classes of their colours; by default it has one colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dots:
    """One row of dots, with their mean."""

    label: str
    values: tuple[float, ...]
    note: str
    kind: str


def bars(rows: Sequence[Bar], width: int, label: str, least: float = 0.0) -> str:
    """Draw horizontal bars from zero, their notes at their ends."""
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
        begin = left
        for part, kind in row.parts or ((1.0, row.kind),):
            marks.append(rect(begin, y + top, part * length, thickness, f"bar {kind}"))
            begin += part * length
        marks.append(text(left + length + 7, y + top + thickness / 2 + 4.5, row.note, f"note {row.kind}"))
    return drawing(width, pitch * len(rows), marks, label)


def dots(rows: Sequence[Dots], width: int, label: str, axis: Callable[[float], str]) -> str:
    """Draw values as dots on a common axis, and the mean of each row as a stroke."""
    note_width = 7.4 * max(len(row.note) for row in rows) + 12
    left, pitch, thickness, top = _row_shape(width)
    values = [value for row in rows for value in row.values]
    round_values = ticks(min(values), max(values), 5 if width >= NARROW_COLUMN else 3)
    low, high = min(round_values[0], min(values)), max(round_values[-1], max(values))
    reach = width - left - note_width - 12

    def across(value: float) -> float:
        return left + 6 + reach * (value - low) / ((high - low) or 1.0)

    bottom = pitch * len(rows)
    marks = [line(across(tick), 0, across(tick), bottom, "grid") for tick in round_values]
    marks += [text(across(tick), bottom + 16, axis(tick), "tick", "middle") for tick in round_values]
    for index, row in enumerate(rows):
        y = index * pitch
        middle = y + top + thickness / 2
        marks.append(_row_label(row.label, left, y, thickness, row.kind))
        marks.append(
            line(across(min(row.values)), middle, across(max(row.values)), middle, f"range {row.kind}")
        )
        marks += [circle(across(v), middle, 4, f"dot {row.kind}", axis(v)) for v in row.values]
        mean = across(sum(row.values) / len(row.values))
        marks.append(line(mean, middle - 9, mean, middle + 9, f"mean {row.kind}"))
        marks.append(text(width, middle + 4.5, row.note, f"note {row.kind}", "end"))
    return drawing(width, bottom + 22, marks, label)


def histogram(lengths: Sequence[int], cut: int, width: int, label: str) -> str:
    """Draw, on a log axis of lengths, the share of documents and the share of tokens in every half octave."""
    first = math.floor(2 * math.log2(min(lengths)))
    documents, tokens = ([0.0] * (half_octave(max(lengths)) - first + 1) for _ in range(2))
    for length in lengths:
        documents[half_octave(length) - first] += 1
        tokens[half_octave(length) - first] += length
    return half_octaves(first, documents, tokens, cut, f"cut at {cut:,}", width, label)


def half_octave(length: int) -> int:
    """Return the number of a length's half octave: 0 for 1, 2 for 2, 4 for 4 and 5."""
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
    """Draw a histogram from counts: documents above, tokens below."""
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
        if width >= NARROW_COLUMN
        else max(4, 2 * math.ceil(needed / (2 * pitch)))
    )
    marks = []
    for index in range(first + first % 2, last + 1, step):
        x = (index - first) * pitch
        anchor = "start" if x < 12 else "end" if x > width - 12 else "middle"
        marks.append(text(x, bottom + 17, f"{2 ** (index // 2):,}", "tick", anchor))
    return marks


def _row_shape(width: int) -> tuple[float, float, float, float]:
    """Return the left edge of bars, the distance of rows, the thickness of bars, and their offset in the row."""
    return (LABEL_WIDTH, 34, 20, 5) if width >= NARROW_COLUMN else (0, 46, 18, 20)


def _row_label(label: str, left: float, y: float, thickness: float, kind: str) -> str:
    """Write a row's label beside its bar, or above it if there is no room."""
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


# SVG elements; their colours come from the page's style sheet. All text is escaped here, so that a document's text
# can't become markup.


def number(value: float) -> str:
    """Write a coordinate with at most two digits after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> str:
    """Draw a rectangle; `tip` appears when the pointer rests on it."""
    return _mark("rect", kind, tip, x=x, y=y, width=max(width, 0), height=max(height, 0))


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Draw a straight line."""
    return _mark("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)


def circle(x: float, y: float, radius: float, kind: str, tip: str = "") -> str:
    """Draw a dot."""
    return _mark("circle", kind, tip, cx=x, cy=y, r=radius)


def polygon(points: Iterable[tuple[float, float]], kind: str, tip: str = "") -> str:
    """Draw a filled polygon."""
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polygon class="{escape(kind)}" points="{path}">{_tip(tip)}</polygon>'


def polyline(points: Iterable[tuple[float, float]], kind: str) -> str:
    """Draw straight lines from point to point."""
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline class="{escape(kind)}" points="{path}"/>'


def text(x: float, y: float, content: str, kind: str = "label", anchor: str = "start") -> str:
    """Write a line of text; `y` is its baseline and `anchor` one of start, middle, end."""
    at = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"'
    return f'<text class="{escape(kind)}" {at}>{escape(content)}</text>'


def drawing(width: float, height: float, marks: Iterable[str], label: str) -> str:
    """Join marks to a picture that takes the width of its column."""
    return (
        f'<svg viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label="{escape(label)}">'
        f"{''.join(marks)}</svg>"
    )


def _mark(name: str, kind: str, tip: str = "", **values: float) -> str:
    attributes = " ".join(f'{key}="{number(value)}"' for key, value in values.items())
    return f'<{name} class="{escape(kind)}" {attributes}>{_tip(tip)}</{name}>'


def _tip(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""


# Line charts over capacities on a log axis, with labels at the ends of lines, or below if there is no room.


_HEIGHT, _PITCH = 280.0, 17.0
_NAMES_WIDTH = 256
"""Space for labels at the right of a wide picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a chart."""

    label: str
    values: tuple[float | None, ...]
    """One for each position; None breaks the line."""
    kind: str
    """Class of its colour: "varlen", "baseline", "control" or "series0" to "series5"."""


def lines(
    rows: Sequence[Line], xs: Sequence[int], width: int, label: str, axis: Callable[[float], str]
) -> str:
    """Draw values against positions on a log axis."""
    is_wide = width >= NARROW_COLUMN
    left, top = 58.0, 12.0
    right = width - (_NAMES_WIDTH if is_wide else 14)
    known = [value for row in rows for value in row.values if value is not None]
    rounds = ticks(min(known, default=0.0), max(known, default=1.0), 5)
    low, high = rounds[0], rounds[-1]
    first, last = math.log2(xs[0]), math.log2(xs[-1])

    def across(x: int) -> float:
        spread = (math.log2(x) - first) / (last - first) if last > first else 0.5
        return left + 12 + (right - left - 24) * spread

    def up(value: float) -> float:
        return top + _HEIGHT * (high - value) / ((high - low) or 1.0)

    marks = [line(left, up(tick), right, up(tick), "grid") for tick in rounds]
    marks += [text(left - 8, up(tick) + 4, axis(tick), "tick", "end") for tick in rounds]
    marks += _position_labels(xs, across, top + _HEIGHT + 20)
    for row in rows:
        marks += _drawn(row, xs, across, up, axis)
    bottom = top + _HEIGHT + 26
    if is_wide:
        marks += _names_at_ends(rows, right, up)
        return drawing(width, bottom, marks, label)
    marks += _names_below(rows, bottom)
    return drawing(width, bottom + 8 + _PITCH * len(rows), marks, label)


def _position_labels(xs: Sequence[int], across: Callable[[int], float], y: float) -> list[str]:
    """Write positions under the axis, without those that would overlap the previous one."""
    marks, free = [], -math.inf
    for x in xs:
        half = 3.6 * len(f"{x:,}")
        if across(x) - half >= free:
            marks.append(text(across(x), y, f"{x:,}", "tick", "middle"))
            free = across(x) + half + 6
    return marks


def _drawn(
    row: Line,
    xs: Sequence[int],
    across: Callable[[int], float],
    up: Callable[[float], float],
    axis: Callable[[float], str],
) -> list[str]:
    """Draw one line, broken at gaps, and a dot for each value."""
    marks: list[str] = []
    part: list[tuple[float, float]] = []
    for x, value in zip(xs, row.values, strict=True):
        if value is None:
            marks.append(polyline(part, f"line {row.kind}"))
            part = []
        else:
            part.append((across(x), up(value)))
    marks.append(polyline(part, f"line {row.kind}"))
    marks += [
        circle(across(x), up(value), 3.5, f"dot {row.kind}", f"{row.label} at {x:,}: {axis(value)}")
        for x, value in zip(xs, row.values, strict=True)
        if value is not None
    ]
    return marks


def _names_at_ends(rows: Sequence[Line], right: float, up: Callable[[float], float]) -> list[str]:
    """Write each label at the height of its line's last value, or as near as possible without overlap."""
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


# Documents as coloured strips, padded and packed, and attention masks.

MASK_WIDTH = 320
NUM_COLOURS = 10
"""Number of document colours in the page's style sheet."""


def padded_batch(pieces: Sequence[PieceFigures], width: int) -> str:
    """Draw one document per row, padded to the longest."""
    longest = max(piece.num_tokens for piece in pieces)
    pitch = 13
    marks = []
    for index, piece in enumerate(pieces):
        y, length = index * pitch, width * piece.num_tokens / longest
        marks.append(rect(length, y, width - length, pitch - 2, "padding"))
        marks.append(rect(0, y, length, pitch - 2, colour(index), tip(piece)))
    return drawing(width, pitch * len(pieces), marks, "a padded batch: one document per row, then padding")


def flattened_batch(pieces: Sequence[PieceFigures], width: int) -> str:
    """Draw the same documents end to end, in lines as wide as the padded batch."""
    longest = max(piece.num_tokens for piece in pieces)
    pitch, at = 13, 0
    marks = []
    for index, piece in enumerate(pieces):
        left = piece.num_tokens
        while left > 0:
            row, column = divmod(at, longest)
            part = min(left, longest - column)
            box = (width * column / longest, row * pitch, width * part / longest, pitch - 2)
            marks.append(rect(*box, colour(index), tip(piece)))
            at, left = at + part, left - part
    rows = -(-at // longest)
    return drawing(width, pitch * rows, marks, "the same documents end to end")


def packed_row(pieces: Sequence[PieceFigures], capacity: int, width: int) -> str:
    """Draw a packed row of documents, with free slots at the end."""
    marks, at = [rect(0, 0, width, 22, "padding")], 0
    for index, piece in enumerate(pieces):
        marks.append(
            rect(width * at / capacity, 0, width * piece.num_tokens / capacity, 22, colour(index), tip(piece))
        )
        at += piece.num_tokens
    return drawing(width, 22, marks, f"a packed row of {capacity:,} slots")


def packed_mask(pieces: Sequence[PieceFigures], capacity: int, width: int) -> str:
    """Draw which position (down) attends to which (across) in a packed row: a triangle for each document."""
    scale, at = width / capacity, 0
    marks = [rect(0, 0, width, width, "unused")]
    for index, piece in enumerate(pieces):
        marks.append(_triangle(at * scale, at * scale, piece.num_tokens * scale, index, piece))
        at += piece.num_tokens
    return drawing(width, width, marks, "the mask of the packed row: one causal triangle for each document")


def padded_masks(pieces: Sequence[PieceFigures], capacity: int, scale_width: int, width: int) -> str:
    """Draw the masks of the same documents padded, at the scale of `packed_mask`: a whole square for each."""
    side = max(piece.num_tokens for piece in pieces) * scale_width / capacity
    columns = max(1, min(len(pieces), int((width + 6) // (side + 6))))
    pieces = pieces[: squares_shown(pieces, capacity, scale_width, width)]
    marks = []
    for index, piece in enumerate(pieces):
        x, y = index % columns * (side + 6), index // columns * (side + 6)
        marks.append(rect(x, y, side, side, "padding"))
        marks.append(_triangle(x, y, piece.num_tokens * scale_width / capacity, index, piece))
    rows = -(-len(pieces) // columns)
    return drawing(
        width, rows * (side + 6) - 6, marks, "the masks of the same documents padded: one square for each"
    )


def squares_shown(pieces: Sequence[PieceFigures], capacity: int, scale_width: int, width: int) -> int:
    """Return the number of squares that `padded_masks` draws, up to twice the height of the packed mask."""
    side = max(piece.num_tokens for piece in pieces) * scale_width / capacity
    columns, rows = max(1, int((width + 6) // (side + 6))), max(1, int((2 * scale_width + 6) // (side + 6)))
    return min(len(pieces), columns * rows)


def colour(index: int) -> str:
    """Return the CSS class of a picture's n-th document."""
    return f"doc doc{index % NUM_COLOURS}"


def tip(piece: PieceFigures) -> str:
    """Return a document's tooltip."""
    return f"document {piece.document_id:,}, {piece.num_tokens:,} tokens: {piece.excerpt}"


def _triangle(x: float, y: float, side: float, index: int, piece: PieceFigures) -> str:
    return polygon([(x, y), (x, y + side), (x + side, y + side)], colour(index), tip(piece))


def pack_figure(row: Sequence[PieceFigures], capacity: int, which: str, most_named: int = 24) -> str:
    """Draw a packed row, a list of its documents, its mask, and the masks of the same documents padded."""
    rest = WIDE - MASK_WIDTH - 40
    longest = max(piece.num_tokens for piece in row)
    free = capacity - sum(piece.num_tokens for piece in row)
    shown = squares_shown(row, capacity, NARROW, NARROW)
    part = f"; where there is no room, not all {len(row)} are drawn" if shown < len(row) else ""
    packed_cells = sum(piece.num_tokens**2 for piece in row)
    return (
        twice(packed_row(row, capacity, WIDE), packed_row(row, capacity, NARROW))
        + legend(row, most_named)
        + '<div class="pair masks" style="margin-top:24px"><div><h3>Its mask</h3>'
        + twice(packed_mask(row, capacity, MASK_WIDTH), packed_mask(row, capacity, NARROW))
        + "</div><div><h3>The same documents padded: a mask for each</h3>"
        + twice(padded_masks(row, capacity, MASK_WIDTH, rest), padded_masks(row, capacity, NARROW, NARROW))
        + "</div></div>"
        + caption_of(
            f"{which}: {len(row)} in {capacity:,} slots, {free:,} of them free. A position (downwards) "
            "attends to the coloured positions (across) only, and attention per document computes nothing "
            f"outside the squares around them: {packed_cells / 1e6:,.2f} million pairs before causality. "
            f"Padded to the longest, the same documents take {len(row) * longest**2 / 1e6:,.2f} million, the "
            f"grey ones thrown away. Both to one scale{part}."
        )
    )


def legend(pieces: Sequence[PieceFigures], most: int) -> str:
    """List the documents of a picture in their colours, with their tokens and the beginning of their texts."""
    lines = "".join(
        f'<li><i class="{colour(index)}"></i><span>{piece.num_tokens:,} tokens</span>'
        f"<code>{escape(piece.excerpt or f'document {piece.document_id:,}')}</code></li>"
        for index, piece in enumerate(pieces[:most])
    )
    more = len(pieces) - most
    tail = f"<li><i></i><span></span><small>and {more:,} more</small></li>" if more > 0 else ""
    return f'<ul class="legend">{lines}{tail}</ul>'
