"""The few marks that our pictures are drawn with, as SVG text; their colours are the page's to choose.

Every text is escaped here and nowhere else: no mark can carry a document's text into the page as markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


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
    place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"'
    return f'<text class="{escape(kind)}" {place}>{escape(content)}</text>'


def drawing(width: float, height: float, marks: Iterable[str], label: str) -> str:
    """Join marks to a picture that takes the width of its column.

    Args:
        width: of the coordinates; text is legible where the column is about as many pixels wide.
        height: of the coordinates.
        marks: drawn in order.
        label: what the picture shows, for readers who can't see it.
    """
    return (
        f'<svg viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label="{escape(label)}">'
        f"{''.join(marks)}</svg>"
    )


def _mark(name: str, kind: str, tip: str = "", **places: float) -> str:
    attributes = " ".join(f'{key}="{number(value)}"' for key, value in places.items())
    return f'<{name} class="{escape(kind)}" {attributes}>{_tip(tip)}</{name}>'


def _tip(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""
