"""The HTML report of an inspection, from its figures."""

from __future__ import annotations

from html import escape

from varlen.counts import many
from varlen.report import drawing
from varlen.report.drawing import Line, lines, pack_figure
from varlen.report.inspection import (
    BYTES,
    SHORT_TITLES,
    SOURCE,
    about_sources,
    by_capacity,
    by_source,
    full,
    packs_of,
    reading,
    signed_share,
)
from varlen.report.inspection_figures import GROUP, GROUP_DOCUMENTS, CapacityFigures, Inspection, PackFigures
from varlen.report.page import (
    NARROW,
    WIDE,
    count,
    facts,
    figure,
    numbers,
    page,
    paragraph,
    section,
    share,
    table,
    times,
)

_DRAWN = {
    "next_fit_drop": "next fit, dropped",
    **{name: SHORT_TITLES[name] for name in ("llama_factory_knapsack", "trl_bfd", "axolotl_multipack")},
    "pack_best_fit": "varlen pack",
    "best_fit_decreasing": "vl.pack, sorted by length",
}
"""The packings of the line chart besides the advised one, with short names; the others would cover these lines."""

_LEAST_SHARE = 0.1
"""Least value at full width of a bar chart, so that half a percent of padding looks small."""


def inspect_page(inspection: Inspection) -> str:
    """Return the report as one self-contained HTML page."""
    at = inspection.at(inspection.advice.capacity)
    return page(
        f"varlen inspect: {inspection.name}" if inspection.name else "varlen inspect",
        [
            _opening(inspection),
            section(
                "The documents", _histogram(inspection), facts(_lengths(inspection)), *_files(inspection)
            ),
            section("What padding computes", _padding(inspection), _padding_table(inspection)),
            section("Fill against capacity", _fill(inspection), _fill_table(inspection)),
            section("What a capacity costs", _losses(inspection), _capacity_table(inspection)),
            section("Even work", _work(inspection, at)),
            section(
                "One pack and its mask",
                paragraph(
                    "Documents stand one after another in a row. Each attends to itself alone, and its positions "
                    "begin at 0."
                ),
                pack_figure(
                    inspection.picture.pieces,
                    inspection.picture.capacity,
                    "A pack of the advised packing, one of those with the handiest number of documents",
                    most_named=12,
                ),
            ),
            section("All figures", *(_details(inspection, figures) for figures in inspection.capacities)),
            section("How it was measured", paragraph(reading(inspection)), facts(_settings(inspection))),
        ],
    )


def _opening(inspection: Inspection) -> str:
    advice, packed = inspection.advice, inspection.advised
    random = next(way for way in inspection.padding if way.name == "random")
    at, saved = inspection.at(advice.capacity), random.saved_by(packed)
    word = "fewer" if saved >= 0 else "more"
    rows = (
        (
            "varlen",
            share(abs(saved)),
            f"{word} slots than random batches of {inspection.batch_documents:,}, padded",
        ),
        (
            "",
            share(packed.padding_share),
            f"of the slots are padding, packed at {advice.capacity:,}; in random batches "
            f"{share(random.padding_share)}",
        ),
        (
            "",
            share(at.truncation_share),
            f"of the tokens are beyond {advice.capacity:,}: split there, they don't see what is before; "
            f"{share(at.overlong_share)} of the documents are longer",
        ),
        ("", times(packed.work_imbalance), "work of the heaviest pack over the mean"),
    )
    command = f'<p class="call"><code>{escape(advice.command)}</code></p>' if advice.command else ""
    notes = (BYTES if inspection.are_bytes else "", *inspection.notes)
    warning = "".join(paragraph(note, "warning") for note in notes if note)
    name = f" · {escape(inspection.name)}" if inspection.name else ""
    return (
        f'<header><p class="kicker"><b>varlen</b> inspect{name}</p>'
        f'<h1>{escape(advice.headline)}</h1><p class="call"><code>{escape(advice.call)}</code></p>'
        f"{command}{warning}{paragraph(advice.why, 'lead')}</header>" + numbers(rows)
    )


def _histogram(inspection: Inspection) -> str:
    found = inspection.distribution
    first = drawing.half_octave(found.histogram[0].low)
    documents = [0.0] * (drawing.half_octave(found.histogram[-1].low) - first + 1)
    tokens = list(documents)
    for figures in found.histogram:
        index = drawing.half_octave(figures.low) - first
        documents[index], tokens[index] = figures.documents, figures.tokens
    capacity = inspection.advice.capacity
    label = "lengths of documents on a log axis, by share of documents and of tokens"
    wide, narrow = (
        drawing.half_octaves(first, documents, tokens, capacity, f"capacity {capacity:,}", width, label)
        for width in (WIDE, NARROW)
    )
    return figure(
        wide,
        narrow,
        f"Length in tokens, half an octave a bar. The longest 1 % of the documents hold "
        f"{share(found.longest_share)} of the tokens.",
    )


def _lengths(inspection: Inspection) -> list[tuple[str, str]]:
    found = inspection.distribution
    rows = [
        ("documents", f"{found.documents:,}" + (f", {found.empty:,} of them empty" if found.empty else "")),
        ("tokens", f"{found.tokens:,}"),
        ("mean, median", f"{count(found.mean)}, {count(found.median)}"),
        ("90 %, 99 % are up to", f"{count(found.p90)}, {count(found.p99)}"),
        ("longest", f"{found.longest:,}"),
    ]
    if found.targets is not None and found.targets_share is not None:
        rows.append(("supervised", f"{found.targets:,} ({share(found.targets_share)})"))
    return rows


def _files(inspection: Inspection) -> list[str]:
    """Return a table with a row for each file; nothing if there is only one."""
    if not inspection.sources:
        return []
    rows = [("", row) for row in by_source(inspection)]
    return [_wordy(table(SOURCE, rows)), paragraph(about_sources(inspection), "note")]


def _padding(inspection: Inspection) -> str:
    packed, capacity = inspection.advised, inspection.advice.capacity
    rows = [
        drawing.Bar(
            label=_short(way.name, way.cut_at),
            value=way.padding_share,
            note=f"{share(way.padding_share)} · {times(way.slots_per_token)}",
            kind="baseline",
        )
        for way in inspection.padding
    ]
    rows.append(
        drawing.Bar(
            label=f"packed at {capacity:,}",
            value=packed.padding_share,
            note=f"{share(packed.padding_share)} · {times(packed.slots_per_token)}",
            kind="varlen",
        )
    )
    label = "share of slots that hold padding, for each way of padding and for packs"
    return figure(
        drawing.bars(rows, WIDE, label, _LEAST_SHARE),
        drawing.bars(rows, NARROW, label, _LEAST_SHARE),
        f"Share of slots that hold padding, and slots computed for each token. Batches of "
        f"{inspection.batch_documents} documents: in random order, padded to their longest; sorted by length, "
        "padded to their longest; and every document padded to the longest of all. Sorting fills batches, and "
        "makes every batch one of equal lengths: no random sample any more.",
    )


def _short(name: str, cut_at: int | None) -> str:
    if cut_at is None:
        return {"random": "random batches", "buckets": "length buckets", "maximum": "to the maximum"}[name]
    word = {"random": "random", "buckets": "buckets", "maximum": "maximum"}[name.removesuffix("_cut")]
    return f"{word}, cut at {_thousands(cut_at)}"


def _thousands(value: int) -> str:
    """Abbreviate a capacity: 4,096 as 4k, 500 as 500."""
    return f"{value // 1024}k" if value % 1024 == 0 else f"{value:,}"


def _padding_table(inspection: Inspection) -> str:
    rows = [
        (
            "baseline",
            (
                way.title,
                f"{way.tokens:,}",
                f"{way.slots:,}",
                share(way.padding_share),
                times(way.slots_per_token),
                signed_share(way.saved_by(inspection.advised)),
            ),
        )
        for way in inspection.padding
    ]
    return _wordy(table(("", "tokens", "slots", "padding", "slots per token", "packing saves"), rows))


def _fill(inspection: Inspection) -> str:
    capacities = [figures.capacity for figures in inspection.capacities]
    advised = inspection.advised
    kinds = {name: f"series{number}" for number, name in enumerate(_DRAWN) if name != advised.name}
    rows = [
        Line(
            label=_DRAWN.get(name, advised.title),
            values=tuple(_known(figures.packing(name)) for figures in inspection.capacities),
            kind=kind,
        )
        for name, kind in (kinds | {advised.name: "varlen"}).items()
    ]
    label = "fill of packs against capacity, a line for each way of packing"
    return figure(
        lines(rows, capacities, WIDE, label, _axis),
        lines(rows, capacities, NARROW, label, _axis),
        f"Tokens over slots. Windows are of {inspection.window:,} rows: the larger a pack, the fewer of them a "
        "window makes, and its last ones stay half empty. What truncates or drops may be fuller for it: the "
        "next section shows what it loses. Methods that aren't drawn are in the table.",
    )


def _axis(value: float) -> str:
    return f"{100 * value:.4g} %"


def _known(packing: PackFigures) -> float | None:
    return packing.fill if packing.packs else None


def _fill_table(inspection: Inspection) -> str:
    rows = [
        (
            _kind(row, inspection.advice.packing),
            (row.title, *(full(figures.packing(row.name)) for figures in inspection.capacities)),
        )
        for row in inspection.capacities[0].packings
    ]
    return _wordy(table(("", *(f"{figures.capacity:,}" for figures in inspection.capacities)), rows))


def _losses(inspection: Inspection) -> str:
    if not any(at.overlong_documents for at in inspection.capacities):
        return paragraph(
            "No document is longer than any of these capacities, so truncating and dropping would lose nothing. "
            "Wrapping cuts documents even so."
        )
    rows = []
    for at in inspection.capacities:
        for word, value, kind in (
            ("truncated", at.truncation_share, "baseline"),
            ("dropped", at.dropping_share, "control"),
        ):
            rows.append(
                drawing.Bar(label=f"{at.capacity:,}, {word}", value=value, note=share(value), kind=kind)
            )
    label = "share of tokens that truncating and dropping lose, at each capacity"
    return figure(
        drawing.bars(rows, WIDE, label, _LEAST_SHARE),
        drawing.bars(rows, NARROW, label, _LEAST_SHARE),
        "Share of all tokens that are never trained where documents longer than a pack are truncated, as TRL "
        "does by default, or dropped, as axolotl and LLaMA-Factory do. Splitting them loses none.",
    )


def _capacity_table(inspection: Inspection) -> str:
    head = ("", *(f"{at.capacity:,}" for at in inspection.capacities))
    return _wordy(table(head, [("", row) for row in by_capacity(inspection)]))


def _work(inspection: Inspection, at: CapacityFigures) -> str:
    rows = [
        drawing.Bar(
            label=row.title,
            value=row.work_imbalance,
            note=f"{times(row.work_imbalance)} · attention {times(row.attention_imbalance)}",
            kind=_kind(row, inspection.advice.packing),
        )
        for row in at.packings
        if row.kind != "policy"
    ]
    label = "work of the heaviest pack over the mean, for each method"
    return figure(
        drawing.bars(rows, WIDE, label),
        drawing.bars(rows, NARROW, label),
        f"Work of the heaviest pack over the mean at {at.capacity:,}: how long others wait where packs run side "
        "by side, one per rank. The bars count all work of a layer at width 4,096, the second number attention "
        "alone, which grows with the square of a document's length. A document as long as a pack is as heavy "
        "as packs get, and no method can even it out.",
    )


def _details(inspection: Inspection, at: CapacityFigures) -> str:
    """Return all figures of one capacity, collapsed unless it is the advised one."""
    rows = [
        (
            _kind(row, inspection.advice.packing),
            (
                row.title,
                f"{row.documents:,}",
                packs_of(row, at),
                full(row),
                share(row.lost_share),
                share(row.cut_share),
                share(row.dropped_share),
                times(row.work_imbalance),
                times(row.attention_imbalance),
                f"{row.length_correlation:+.2f}",
            ),
        )
        for row in at.packings
    ]
    head = (
        "",
        "documents",
        "packs",
        "fill",
        "tokens lost",
        "documents cut",
        "dropped",
        "work, max / mean",
        "attention, max / mean",
        "likeness of lengths",
    )
    is_open = " open" if at.capacity == inspection.advice.capacity else ""
    title = (
        f"{at.capacity:,} tokens: {at.lower_bound:,} packs at least, for {inspection.packed_documents:,} "
        "documents, split"
    )
    return f"<details{is_open}><summary>{escape(title)}</summary>{_wordy(table(head, rows))}</details>"


def _kind(row: PackFigures, advised: str) -> str:
    return "varlen" if row.name == advised else "control" if row.kind == "policy" else "baseline"


def _wordy(content: str) -> str:
    """Let the first column of a table wrap."""
    return f'<div class="wordy">{content}</div>'


def _settings(inspection: Inspection) -> list[tuple[str, str]]:
    return [
        ("documents packed", f"{inspection.packed_documents:,}"),
        ("windows", f"{many(inspection.window_documents, 'document')} in windows of {inspection.window:,}"),
        (
            "axolotl's row",
            f"in shuffled groups of {GROUP:,} documents, at most {GROUP_DOCUMENTS:,} of them a pack",
        ),
        ("padded batches", many(inspection.batch_documents, "document")),
        ("seed", str(inspection.seed)),
    ]
