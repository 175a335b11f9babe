"""Figures of pages and terminals, read back from their text without the code that wrote them."""

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from io import StringIO

from rich.console import Console

UNITS = {
    "": 1.0, "×": 1.0, "%": 0.01, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "GB": 1e9, "million": 1e6,
}  # fmt: skip
FIGURE = re.compile(
    r"(?<![\w.,·−+-])([<≈+−-]?)(\d+(?:,\d{3})*(?:\.\d+)?)(?:·10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?"
    r"(?:(×)| ?(%|µs\b|ms\b|s\b|GB\b|million\b))?"
)
RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
KEYS = {
    "%": ("share", "ratio", "mfu", "fill", "change"),
    "s": ("_s",),
    "GB": ("_bytes",),
    "×": ("ratio", "imbalance", "slots_per_token"),
}
"""How the names of the JSON's keys end, by the unit in which their figures are shown."""


@dataclass(frozen=True)
class Shown:
    """A figure as it is shown."""

    value: float
    digit: float
    """What its last digit counts."""
    unit: str
    sign: str

    def is_of(self, value, key=""):
        """Whether a value is shown so: rounded, and fill rounded down."""
        if self.sign == "<":
            return 0 < value < self.value
        off = value - self.value
        if key == "fill":
            return -1e-9 <= off < self.digit
        return abs(off) <= 0.5001 * self.digit


def figures(text):
    """All figures in a text."""
    found = []
    for sign, number, power, times, other in FIGURE.findall(text):
        unit = times or other
        scale = UNITS[unit] * 10.0 ** int(power.translate(RAISED) or 0)
        digits = len(number.partition(".")[2])
        value = float(number.replace(",", "")) * scale * (-1 if sign in "−-" and sign else 1)
        unit = "s" if unit.endswith("s") and unit else unit
        found.append(Shown(value, 10.0**-digits * scale, unit, sign))
    return found


def values(tree, key=""):
    """Every number of a JSON object, with the name of its key."""
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from values(part, name)
    elif isinstance(tree, list):
        for part in tree:
            yield from values(part, key)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield key, tree


def strings(tree):
    """Every text of a JSON object that holds a digit, the longest first."""
    if isinstance(tree, dict | list):
        parts = tree.values() if isinstance(tree, dict) else tree
        return sorted({text for part in parts for text in strings(part)}, key=len, reverse=True)
    return [tree] if isinstance(tree, str) and re.search(r"\d", tree) else []


def unknown(text, tree, constants=()):
    """The figures of a text that the JSON doesn't have, neither as a number nor in one of its texts."""
    text = " ".join(text.split())
    for known in strings(tree):
        text = text.replace(" ".join(known.split()), " ")
    for known in constants:
        text = re.sub(known, " ", text)
    numbers = list(values(tree))
    return [
        shown
        for shown in figures(text)
        if not any(
            shown.is_of(value, key) or (key == "saved_share" and shown.is_of(-value))
            for key, value in numbers
            if key.endswith(KEYS.get(shown.unit, ("",)))
        )
    ]


def plain(tree):
    """What a reader of `--json` sees."""
    return json.loads(json.dumps(tree, allow_nan=False))


def printed(table, width):
    """What a terminal of some width shows."""
    stream = StringIO()
    Console(file=stream, width=width, highlight=False).print(table)
    return stream.getvalue()


def cells_of(text, title):
    """The figures of each line of a terminal that begins with a title."""
    begin = f"  {title} "
    return [figures(line.removeprefix(begin)) for line in text.splitlines() if line.startswith(begin)]


class Page(HTMLParser):
    """The tables of a page, and its other texts; of pictures only the notes beside their marks."""

    def __init__(self, page):
        super().__init__()
        self.tables, self.texts = [], []
        self._open = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self._open.append((tag, dict(attributes).get("class") or ""))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        """A mark of a picture, or a box to tick: it holds no text."""

    def handle_endtag(self, tag):
        while self._open and self._open[-1][0] != tag:
            self._open.pop()
        self._open.pop()

    def handle_data(self, text):
        tags = [tag for tag, _ in self._open]
        if {"script", "style", "head"} & set(tags):
            return
        if "svg" in tags:
            if tags[-1] == "text" and self._open[-1][1].startswith("note"):
                self.texts.append(text)
        elif {"td", "th"} & set(tags):
            self.tables[-1][-1][-1] += text
        else:
            self.texts.append(text)

    def table(self, *heads):
        """The rows of the tables under some heads, by their first cells."""
        return [
            {cells[0]: cells[1:] for cells in rows[1:]}
            for rows in self.tables
            if rows and rows[0] == list(heads)
        ]


def differ(cells, wanted, key=""):
    """The cells of a row that aren't the figures that are wanted; None is a cell without a figure."""
    return [
        (cell, value)
        for cell, value in zip(cells, wanted, strict=True)
        for one in [figures(cell)]
        if not (one == [] if value is None else len(one) == 1 and one[0].is_of(value, key))
    ]
