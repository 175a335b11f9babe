"""Documents as coloured strips, padded and packed, and the masks that say who attends to whom."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from varlen.report.demo import PieceFigures
from varlen.report.drawing import drawing, polygon, rect
from varlen.report.page import NARROW, WIDE, caption_of, twice

MASK_WIDTH = 320
NUM_COLOURS = 10
"""Colours of documents in the page's style sheet, used in turn."""


def padded_batch(pieces: Sequence[PieceFigures], width: int) -> str:
    """Draw one document a row, and what padding to the longest adds."""
    longest = max(piece.num_tokens for piece in pieces)
    pitch = 13
    marks = []
    for index, piece in enumerate(pieces):
        y, length = index * pitch, width * piece.num_tokens / longest
        marks.append(rect(length, y, width - length, pitch - 2, "padding"))
        marks.append(rect(0, y, length, pitch - 2, colour(index), tip(piece)))
    return drawing(width, pitch * len(pieces), marks, "a padded batch: one document a row, the rest padding")


def flattened_batch(pieces: Sequence[PieceFigures], width: int) -> str:
    """Draw the same documents end to end, broken into lines as long as the padded batch is wide."""
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
    """Draw a row of documents one after another, its free slots at the end."""
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
    """Draw the masks of the same documents padded, to the scale of `packed_mask`: a whole square for each."""
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
    """Return how many squares `padded_masks` draws: rows beyond twice the height of the packed mask are left out."""
    side = max(piece.num_tokens for piece in pieces) * scale_width / capacity
    columns, rows = max(1, int((width + 6) // (side + 6))), max(1, int((2 * scale_width + 6) // (side + 6)))
    return min(len(pieces), columns * rows)


def colour(index: int) -> str:
    """Return the class that colours a picture's n-th document."""
    return f"doc doc{index % NUM_COLOURS}"


def tip(piece: PieceFigures) -> str:
    """Say which document this is."""
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
    """List the documents of a picture in their colours, each with its tokens and how its text begins."""
    lines = "".join(
        f'<li><i class="{colour(index)}"></i><span>{piece.num_tokens:,} tokens</span>'
        f"<code>{escape(piece.excerpt or f'document {piece.document_id:,}')}</code></li>"
        for index, piece in enumerate(pieces[:most])
    )
    more = len(pieces) - most
    tail = f"<li><i></i><span></span><small>and {more:,} more</small></li>" if more > 0 else ""
    return f'<ul class="legend">{lines}{tail}</ul>'
