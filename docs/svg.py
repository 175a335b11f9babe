"""A small SVG canvas: shapes and words on a light card, which reads well on light and on dark pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

INK = "#1f2933"
SOFT = "#52606d"
RULE = "#cbd2d9"
CARD = "#fbfaf8"
PADDING = "#e6e4df"
ACCENT = "#2f6690"
WARM = "#c8553d"
# Neighbours differ in lightness too, so that they can be told apart without colour (after Tol's "bright").
DOCUMENTS = ("#4477aa", "#88ccee", "#2f8f5b", "#ddcc77", "#cc6677", "#b7a5d6", "#7f6a57", "#9fd8b4")

SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def number(value: float) -> str:
    """Return a coordinate with at most one decimal, the same on every machine."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass
class Drawing:
    """A picture in the making; what is drawn later lies above."""

    width: int
    height: int
    title: str
    """What a reader who can't see the picture is told."""
    parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        line: str = "none",
        radius: float = 3,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
            f'rx="{number(radius)}" fill="{fill}" stroke="{line}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Write one line; y is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        family = f' font-family="{MONO}"' if mono else ""
        self.parts.append(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" fill="{fill}" '
            f'text-anchor="{anchor}"{weight}{family}>{escape(words, quote=False)}</text>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        stroke: str = RULE,
        width: float = 1,
        dash: str = "",
    ) -> None:
        """Draw a straight line."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" '
            f'stroke="{stroke}" stroke-width="{number(width)}"{dashed}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a horizontal or vertical arrow."""
        self.line(x1, y1, x2, y2, stroke=SOFT, width=1.5)
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        left = (x2 - 7 * dx - 4 * dy, y2 - 7 * dy - 4 * dx)
        right = (x2 - 7 * dx + 4 * dy, y2 - 7 * dy + 4 * dx)
        points = " ".join(f"{number(x)},{number(y)}" for x, y in ((x2, y2), left, right))
        self.parts.append(f'<polygon points="{points}" fill="{SOFT}"/>')

    def curve(self, points: list[tuple[float, float]], *, stroke: str = ACCENT) -> None:
        """Draw a line through points, and a dot on each."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2"/>')
        for x, y in points:
            self.parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="4" fill="{stroke}"/>')

    def svg(self) -> str:
        """Return the picture as a file's text."""
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{SANS}" role="img">\n'
            f"<title>{escape(self.title, quote=False)}</title>\n"
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8" fill="{CARD}" '
            f'stroke="{RULE}"/>\n{body}\n</svg>\n'
        )
