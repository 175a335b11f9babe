"""One pack drawn for a page: its documents in a row, what each begins with, and its mask beside padding's."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from varlen.report import pictures
from varlen.report.figures import PieceFigures
from varlen.report.page import NARROW, WIDE, caption_of, twice

MASK_WIDTH = 320


def pack_figure(row: Sequence[PieceFigures], capacity: int, which: str, most_named: int = 24) -> str:
    """Draw a packed row, a list of its documents, its mask, and the masks of the same documents padded.

    Args:
        row: pieces as they stand in the row, at least one.
        capacity: slots of the row.
        which: names the row at the beginning of the caption.
        most_named: documents that the list under the row names; of a longer row, the first ones.
    """
    rest = WIDE - MASK_WIDTH - 40
    longest = max(piece.num_tokens for piece in row)
    free = capacity - sum(piece.num_tokens for piece in row)
    shown = pictures.squares_shown(row, capacity, NARROW, NARROW)
    part = f"; where there is no room, not all {len(row)} are drawn" if shown < len(row) else ""
    packed_cells = sum(piece.num_tokens**2 for piece in row)
    return (
        twice(pictures.packed_row(row, capacity, WIDE), pictures.packed_row(row, capacity, NARROW))
        + legend(row, most_named)
        + '<div class="pair masks" style="margin-top:24px"><div><h3>Its mask</h3>'
        + twice(pictures.packed_mask(row, capacity, MASK_WIDTH), pictures.packed_mask(row, capacity, NARROW))
        + "</div><div><h3>The same documents padded: a mask for each</h3>"
        + twice(
            pictures.padded_masks(row, capacity, MASK_WIDTH, rest),
            pictures.padded_masks(row, capacity, NARROW, NARROW),
        )
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
    """List the documents of a picture in their colours, each with its tokens and how its text begins.

    Args:
        pieces: of the picture, in order.
        most: how many of them are listed.
    """
    lines = "".join(
        f'<li><i class="{pictures.colour(index)}"></i><span>{piece.num_tokens:,} tokens</span>'
        f"<code>{escape(piece.excerpt or f'document {piece.document_id:,}')}</code></li>"
        for index, piece in enumerate(pieces[:most])
    )
    more = len(pieces) - most
    tail = f"<li><i></i><span></span><small>and {more:,} more</small></li>" if more > 0 else ""
    return f'<ul class="legend">{lines}{tail}</ul>'
