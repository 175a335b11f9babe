"""An inspection for the terminal: what to choose first, then the lengths, padding, packing and what is lost."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varlen.counts import many
from varlen.report.inspection_figures import CapacityFigures, Inspection, PackFigures
from varlen.report.packings import MOST_STREAMED, MOST_STREAMED_PACKS, STEP_PACKS
from varlen.report.words import count, fill, share, times

_BLOCKS = " ▁▂▃▄▅▆▇█"
_INDENT = (0, 0, 0, 2)
BYTES = (
    "Bytes are counted here, by the built-in tokenizer: several times as many as your model's tokens. "
    "Pass --tokenizer before you choose a capacity."
)
"""What is said where bytes were counted."""


def inspect_table(inspection: Inspection) -> RenderableType:
    """Return everything that `varlen inspect` prints."""
    at = inspection.at(inspection.advice.capacity)
    return Group(
        "",
        Text(inspection.advice.headline, style="bold"),
        *_choice(inspection),
        Text(inspection.advice.why),
        *_titled(f"Lengths of {inspection.name}" if inspection.name else "Lengths", _lengths(inspection)),
        *_titled("What padding computes", _padding(inspection)),
        *_titled("Fill, by capacity", _fill(inspection)),
        *_titled("What a capacity cuts", _losses(inspection)),
        *_titled(f"At {at.capacity:,}", _details(at, inspection.advice.packing)),
        Text(reading(inspection), style="dim"),
    )


def _choice(inspection: Inspection) -> list[RenderableType]:
    """The choice to copy: as Python, as a command, each on a line that is broken by the terminal alone."""
    advice = inspection.advice
    lines = [
        Text(line, style="green", no_wrap=True, overflow="ignore")
        for line in (advice.call, advice.command)
        if line
    ]
    return [*lines, *([Text(BYTES, style="yellow")] if inspection.are_bytes else [])]


def reading(inspection: Inspection) -> str:
    """Say how the figures came about, in plain sentences."""
    measured = (
        f"Packs were measured on {inspection.packed_documents:,} of the documents, drawn at random, windows on "
        f"{inspection.window_documents:,}; lengths, padding and losses are counted over all. "
        if inspection.is_sampled
        else ""
    )
    return (
        f"{measured}varlen pack and the loader are measured in their own random order, by their own windows; the "
        f"loader with steps of {STEP_PACKS} packs, streaming on at most {MOST_STREAMED:,} documents or about "
        f"{MOST_STREAMED_PACKS:,} packs (≈: what all documents would take at that fill), files cut as if tokens had "
        "equal sizes, and masked packs at the end not counted; vl.pack in the order of the data. Ours split what is "
        "longer than a pack. Work: that of the heaviest pack over the mean, so how long the others wait for it; "
        "attention: the same for attention alone, which grows with the square of a document's length. Likeness: of "
        "the lengths within a pack, 0 where packs are random samples, 1 where each holds documents of one length, as "
        "sorting makes them. Rows of peers are computed with varlen's packer, which does what the row says; their "
        "own code was not run."
    )


def _titled(title: str, content: RenderableType) -> list[RenderableType]:
    return ["", Text(title, style="bold"), Padding(content, _INDENT)]


def _plain(*titles: str, gap: int = 2) -> Table:
    """Return a table without lines, words to the left and numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    table.add_column("", overflow="fold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _lengths(inspection: Inspection) -> RenderableType:
    """The quantiles in a line, and how documents and tokens spread over half octaves."""
    found = inspection.distribution
    empty = f" ({found.empty:,} empty)" if found.empty else ""
    supervised = "" if found.targets_share is None else f", {share(found.targets_share)} of them supervised"
    lines = [
        f"{many(found.documents, 'document')}{empty}, {many(found.tokens, 'token')}{supervised}",
        f"mean {count(found.mean)}, median {count(found.median)}, 90 % up to {count(found.p90)}, 99 % up to "
        f"{count(found.p99)}, longest {found.longest:,}",
        f"the longest 1 % of the documents hold {share(found.longest_share)} of the tokens",
    ]
    bins = found.histogram
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row("documents", Text(_spark([b.documents for b in bins])), style="dim")
    table.add_row("tokens", Text(_spark([b.tokens for b in bins]), style="green"))
    axis = f"{bins[0].low:,} to {found.longest:,} tokens, half an octave a bar"
    return Group(*lines, "", table, Text(" " * 10 + axis, style="dim"))


def _spark(values: list[int]) -> str:
    """Draw values as a row of blocks, two columns each; what isn't zero is seen."""
    top = max(values)
    return "".join(2 * _BLOCKS[-(-8 * value // top)] for value in values)


def _padding(inspection: Inspection) -> Table:
    """One row a way of padding, and packed for comparison."""
    table = _plain("padding", "slots / token")
    for way in inspection.padding:
        title = way.title.replace("batches,", f"batches of {inspection.batch_documents},")
        table.add_row(title, share(way.padding_share), times(way.slots_per_token))
    packed = inspection.advised
    table.add_row(
        f"packed at {inspection.advice.capacity:,}, {packed.title}",
        share(1 - packed.fill),
        times(1 / packed.fill),
        style="bold green",
    )
    return table


def _fill(inspection: Inspection) -> Table:
    """One row a method or policy, one column a capacity."""
    table = _plain(*(f"{at.capacity:,}" for at in inspection.capacities))
    for row in inspection.capacities[0].packings:
        found = [at.packing(row.name) for at in inspection.capacities]
        table.add_row(row.title, *(full(packing) for packing in found), style=_style(row, inspection))
    return table


def full(packing: PackFigures) -> str:
    """Write how full packs are, or a dash where every document was dropped."""
    return fill(packing.fill) if packing.packs else "–"


def packs_of(row: PackFigures, at: CapacityFigures) -> str:
    """Write how many packs there are: of a loader that was measured on fewer documents, as many as all would take.

    Peers' windows are a sample of their own, and stay as they were counted.
    """
    usual = at.packings[0]
    if row.kind != "loader" or row.documents >= usual.documents or not row.fill:
        return f"{row.packs:,}"
    return f"≈{round(usual.tokens / (row.fill * at.capacity)):,}"


def _style(row: PackFigures, inspection: Inspection) -> str:
    return _style_of(row, inspection.advice.packing)


def _style_of(row: PackFigures, advised: str) -> str:
    """The advised packing stands out, peers have a colour of their own."""
    return "bold green" if row.name == advised else "magenta" if row.kind == "policy" else ""


def _losses(inspection: Inspection) -> Table:
    """What is longer than each capacity, and what truncating and dropping lose."""
    table = _plain(*(f"{at.capacity:,}" for at in inspection.capacities))
    rows = (
        ("documents longer", [f"{at.overlong_documents:,}" for at in inspection.capacities]),
        ("of all documents", [share(at.overlong_share) for at in inspection.capacities]),
        ("tokens lost by truncating", [share(at.truncation_share) for at in inspection.capacities]),
        ("tokens lost by dropping", [share(at.dropping_share) for at in inspection.capacities]),
        (
            "documents cut by wrapping",
            [share(at.packing("wrapped").cut_share) for at in inspection.capacities],
        ),
    )
    for title, cells in rows:
        table.add_row(title, *cells)
    return table


def _details(at: CapacityFigures, advised: str) -> RenderableType:
    """Everything about the packings of one capacity."""
    table = _plain("packs", "fill", "lost", "work", "attention", "likeness", gap=1)
    for row in at.packings:
        table.add_row(
            row.title,
            packs_of(row, at),
            full(row),
            share(row.lost_share),
            times(row.work_imbalance),
            times(row.attention_imbalance),
            f"{row.length_correlation:+.2f}",
            style=_style_of(row, advised),
        )
    return table
