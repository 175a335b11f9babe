"""Self-contained HTML pages: escaped text, one style sheet, no external resources; and formatting of numbers."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from varlen import __version__
from varlen.errors import SettingError
from varlen.files.ours import atomic_file, disk_faults, is_there, refuse_link

GENERATOR = '<meta name="generator" content="varlen'
_HEAD_BYTES = 1024
_WRITTEN = (GENERATOR.encode(), b'"format": "varlen hardware', b'"writer":"varlen', b"\x89varlen plan\n")
"""Marks at the beginning of files that varlen wrote: a page, rates of a machine, a trace, a plan."""
WIDE, NARROW = 944, 354
"""Widths of pictures: the page's column on a laptop, and on a phone of 390 pixels."""


def page(title: str, parts: Iterable[str]) -> str:
    """Join parts to a page."""
    style = files("varlen.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'{GENERATOR} {__version__}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Put parts under a heading."""
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraph(content: str, kind: str = "") -> str:
    """Write a paragraph of plain text."""
    return f'<p class="{escape(kind)}">{escape(content)}</p>' if kind else f"<p>{escape(content)}</p>"


def figure(wide: str, narrow: str, caption: str) -> str:
    """Show one drawing on wide windows and another on narrow ones, with a caption in plain text."""
    return f"<figure>{twice(wide, narrow)}{caption_of(caption)}</figure>"


def twice(wide: str, narrow: str) -> str:
    """Show one drawing on wide windows and another on narrow ones."""
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def caption_of(content: str) -> str:
    """Write a caption in plain text."""
    return f"<figcaption>{escape(content)}</figcaption>"


def numbers(rows: Sequence[tuple[str, str, str]]) -> str:
    """Show a few large numbers side by side."""
    boxes = "".join(
        f'<div class="number {escape(kind)}"><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for kind, value, note in rows
    )
    return f'<div class="numbers">{boxes}</div>'


def table(
    head: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    kind_of: Callable[[str], str] = lambda _: "",
) -> str:
    """Write a table of plain text; it scrolls sideways where it doesn't fit."""

    def written(cell: str) -> str:
        kind = kind_of(cell)
        return (f'<td class="{escape(kind)}">' if kind else "<td>") + f"{escape(cell)}</td>"

    titles = "".join(f'<th scope="col">{escape(title)}</th>' if title else "<td></td>" for title in head)
    lines = "\n".join(
        f'<tr class="{escape(kind)}"><th scope="row">{escape(cells[0])}</th>'
        + "".join(map(written, cells[1:]))
        + "</tr>"
        for kind, cells in rows
    )
    # Focusable, so that keys scroll what is wider than the window.
    return (
        '<div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{titles}</tr></thead><tbody>\n{lines}\n</tbody></table></div>"
    )


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Write names and values, one per line."""
    lines = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows
    )
    return f'<table class="facts"><tbody>\n{lines}\n</tbody></table>'


def write_page(path: Path, content: str) -> None:
    """Write a page atomically."""
    check_writable(path)
    with disk_faults(path), atomic_file(path, is_synced=False) as part:
        part.write_text(content, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Refuse a path where no page could be written, before hours of work are done for it."""
    refuse_link(path, "name the file that it leads to, or another")
    if path.is_dir():
        raise SettingError(f"{path} is a folder; name a file in it, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise SettingError(
            f"the folder {path.parent} doesn't exist; create it, or name another for {path.name}"
        )
    if not os.access(path.parent, os.W_OK):
        raise SettingError(f"the folder {path.parent} can't be written; name another for {path.name}")
    if is_there(path) and not _is_written(path):
        raise SettingError(
            f"{path} has no mark of a file that varlen wrote (0.1.0 wrote none), and would be lost; move it away, or "
            "name another file"
        )


def _is_written(path: Path) -> bool:
    """Return whether varlen wrote a file, or it is empty."""
    if not path.is_file():
        return False
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return False
    return not head or any(mark in head for mark in _WRITTEN)


# Formatting of numbers.


def count(value: float) -> str:
    """Write a rounded number with thousands separators.

    >>> count(8912.4)
    '8,912'
    """
    return f"{value:,.0f}"


def times(value: float) -> str:
    """Write a ratio with two or three digits.

    >>> times(5.931), times(11.24), times(0.98)
    ('5.9×', '11.2×', '0.98×')
    """
    return f"{value:.2f}×" if value < 2 else f"{value:.1f}×"


def duration(value_s: float) -> str:
    """Write seconds with three digits.

    >>> duration(12.3456), duration(0.04567), duration(0.0000123), duration(123.4)
    ('12.3 s', '45.7 ms', '12.3 µs', '123 s')
    """
    if not math.isfinite(value_s):
        return "–"
    scale, unit = (1.0, "s") if value_s >= 0.9995 else (1e-3, "ms") if value_s >= 0.9995e-3 else (1e-6, "µs")
    value = value_s / scale
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def ratio(value: float) -> str:
    """Write a ratio with two digits after the point, or a dash for none.

    >>> ratio(1.0849), ratio(float("inf"))
    ('1.08', '–')
    """
    return f"{value:.2f}" if math.isfinite(value) else "–"


def significant(value: float) -> str:
    """Write a number with three digits, or with all digits before the point.

    >>> significant(0.04321), significant(9.996), significant(43.21), significant(4321.4)
    ('0.0432', '10.0', '43.2', '4,321')
    """
    if not math.isfinite(value):
        return "–"
    digits = 2 - math.floor(math.log10(float(f"{value:.2e}"))) if value > 0 else 0
    return f"{value:,.{max(digits, 0)}f}"


def size(value_bytes: float) -> str:
    """Write bytes in GB of 10⁹.

    >>> size(61_234_000_000)
    '61.2 GB'
    """
    return f"{value_bytes / 1e9:.1f} GB"


def difference(value: float) -> str:
    """Write a signed difference of losses.

    >>> difference(0.1234), difference(-0.02), difference(0.0)
    ('+0.123', '−0.020', '0.000')
    """
    if round(value, 3) == 0:
        return "0.000"
    return f"{'+' if value > 0 else '−'}{abs(value):.3f}"


def tiny(value: float) -> str:
    """Write a rounding difference as a power of ten, and zero as zero.

    >>> tiny(9.5e-7), tiny(0.0)
    ('9.5·10⁻⁷', '0')
    """
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(value))
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value / 10**exponent:.1f}·10{raised}"


def percent(value: float) -> str:
    """Write a share.

    >>> percent(0.284)
    '28 %'
    """
    return f"{100 * value:.0f} %"


def share(value: float) -> str:
    """Write a share with enough digits that a small one isn't shown as 0.

    >>> share(0.2274), share(0.0027), share(0.00004), share(0.0)
    ('22.7 %', '0.27 %', '<0.01 %', '0 %')
    """
    if 0 < value < 0.0001:
        return "<0.01 %"
    return "0 %" if value == 0 else f"{100 * value:.1f} %" if value >= 0.01 else f"{100 * value:.2f} %"


def change(value: float) -> str:
    """Write a relative change with its sign.

    >>> change(0.1234), change(-0.0004), change(0.0)
    ('+12.3 %', '−0.04 %', '0 %')
    """
    return ("+" if value > 0 else "−" if value < 0 else "") + share(abs(value))


def fill(value: float) -> str:
    """Write the fill of packs, rounded down, so that only full packs show 100 %.

    >>> fill(0.99996), fill(0.9423), fill(1.0), fill(0.28)
    ('99.99 %', '94.23 %', '100 %', '28.00 %')
    """
    return "100 %" if value >= 1 else f"{math.floor(10_000 * value + 1e-9) / 100:.2f} %"
