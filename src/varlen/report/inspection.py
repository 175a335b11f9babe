"""`inspect_lengths`: takes lengths, returns all figures of `varlen inspect`; and its table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varlen.arguments import as_count, as_seed
from varlen.counts import many
from varlen.errors import DocumentsError, LengthsError, SettingError
from varlen.feed.streaming.foreseen import BYTES_A_TOKEN
from varlen.pack.lengths import as_lengths
from varlen.report.advice import advise
from varlen.report.demo import PieceFigures
from varlen.report.inspection_figures import (
    MOST_STREAMED,
    MOST_STREAMED_PACKS,
    STEP_PACKS,
    WINDOW,
    WITH_PACK,
    AdviceFigures,
    BinFigures,
    CapacityFigures,
    DistributionFigures,
    Inspection,
    Packed,
    PackFigures,
    PackPicture,
    PaddingFigures,
    Sample,
    SourceFigures,
    by_lengths,
    by_pack,
    draw_sample,
    measure_capacity,
)
from varlen.report.page import count, fill, share, times
from varlen.types import Int32Array, IntArray

USUAL_CAPACITIES = (2_048, 4_096, 8_192, 32_768)
"""Usual row lengths of training, measured if the documents fill some packs of them."""
MOST_CAPACITIES = 6
LARGEST_CAPACITY = 131_072
"""Larger capacities are only measured on request."""
FEWEST_PACKS = 8
"""A capacity is measured if the documents would fill this many packs of it."""
LONGEST_NOTE = 1_000
LONGEST_EXCERPT = 160
"""Most characters of a text that the picture shows."""
MOST_SOURCES = 20
"""Files that are counted one by one."""
DRAWN_DOCUMENTS = 8
"""Number of documents of the pack that is drawn, as nearly as fill and excerpts allow."""

Excerpts = Mapping[int, str] | Iterable[tuple[int, str]]
OnProgress = Callable[[int, int, str], None]


def inspect_lengths(
    lengths: npt.ArrayLike,
    *,
    capacities: Sequence[int] | None = None,
    targets: npt.ArrayLike | None = None,
    excerpts: Excerpts | None = None,
    batch_documents: int = 8,
    seed: int = 0,
    name: str = "",
    arguments: Sequence[str] = (),
    parts: IntArray | None = None,
    are_bytes: bool = False,
    sources: Sequence[tuple[str, int]] = (),
    notes: Sequence[str] = (),
    on_progress: OnProgress | None = None,
) -> Inspection:
    """Measure how documents of these lengths are padded and packed, and say what to choose.

    Distribution, padding and losses are counted over all documents. Packs are measured on at most 200,000
    documents and 200 windows, drawn at random and evenly; the figures say how many.

    Args:
        lengths: `[num_documents]` tokens of each document; those of length 0 are counted and left out.
        targets: `[num_documents]` supervised tokens of each document, or None where that isn't known.
        parts: documents of each part of the data that is tokenized by itself, int64; None: it is one.
        sources: each file's name and number of documents, in the order of `lengths`; none where it isn't known.
    """
    checked = as_lengths(lengths)
    if not checked.any():
        raise LengthsError(
            f"none of {many(checked.size, 'document')} holds a token, and nothing can be packed; "
            "check the path, and the columns that are read"
        )
    supervised = None if targets is None else _as_targets(targets, checked)
    batch_documents, seed = as_count(batch_documents, "batch_documents"), as_seed(seed)
    chosen = suitable_capacities(checked) if capacities is None else _as_capacities(capacities)
    show = on_progress or _silent
    show(0, len(chosen), "lengths")
    sample = draw_sample(checked, supervised, chosen[0], seed, parts, 1 if are_bytes else BYTES_A_TOKEN)
    measured = []
    for done, capacity in enumerate(chosen):
        show(done, len(chosen), f"packing at {capacity:,}")
        measured.append(measure_capacity(sample, capacity))
    distribution = _distribution(sample, checked.size)
    padding = measure_padding(sample.lengths, batch_documents, None, seed)
    advice = advise(tuple(measured), padding, distribution, batch_documents, arguments)
    show(len(chosen), len(chosen), "done")
    return Inspection(
        name=_printable(name),
        distribution=distribution,
        padding=measure_padding(sample.lengths, batch_documents, advice.capacity, seed),
        capacities=tuple(measured),
        advice=advice,
        picture=_picture(sample, advice, dict(excerpts or {})),
        batch_documents=batch_documents,
        packed_documents=sample.sampled.size,
        window_documents=sum(window.size for window in sample.windows),
        window=WINDOW,
        seed=seed,
        are_bytes=are_bytes,
        sources=_sources(sources, checked, supervised, advice.capacity) if len(sources) > 1 else (),
        notes=tuple(_printable(note, LONGEST_NOTE) for note in notes),
    )


def _sources(
    sources: Sequence[tuple[str, int]], lengths: Int32Array, targets: IntArray | None, capacity: int
) -> tuple[SourceFigures, ...]:
    """Count the documents of each file; those with the fewest tokens count together."""
    source_of = np.repeat(np.arange(len(sources)), [documents for _, documents in sources])
    order = np.argsort(-np.bincount(source_of, lengths, len(sources)), kind="stable")
    places = np.empty(len(sources), np.int64)
    places[order] = np.minimum(np.arange(len(sources)), MOST_SOURCES)
    place_of, whole = places[source_of], int(lengths.sum(dtype=np.int64))
    names = [_printable(sources[source][0]) for source in order[:MOST_SOURCES].tolist()]
    if len(sources) > MOST_SOURCES:
        names.append(many(len(sources) - MOST_SOURCES, "smaller file"))
    found = []
    for place, name in enumerate(names):
        mine = np.flatnonzero(place_of == place)
        full = lengths[mine][lengths[mine] > 0]
        tokens, beyond = int(full.sum(dtype=np.int64)), np.maximum(full - np.int64(capacity), 0)
        found.append(
            SourceFigures(
                name=name,
                documents=mine.size,
                tokens=tokens,
                tokens_share=tokens / whole,
                median=float(np.median(full)) if full.size else 0.0,
                longest=int(full.max(initial=0)),
                overlong_documents=int(np.count_nonzero(beyond)),
                truncation_share=int(beyond.sum()) / max(tokens, 1),
                targets=None if targets is None else int(targets[mine].sum()),
            )
        )
    return tuple(found)


def suitable_capacities(lengths: Int32Array) -> tuple[int, ...]:
    """Return about five powers of two to look at: usual ones, and those that hold most and all documents.

    `lengths`: int32 `[num_documents]`, at least one of them above 0.
    """
    full = lengths[lengths > 0]
    tokens, longest = int(full.sum(dtype=np.int64)), int(full.max())
    holds_all = _power_above(longest)
    holds_most = _power_above(int(np.quantile(full, 0.99)))
    wanted = {*USUAL_CAPACITIES, holds_most, holds_all, 2 * holds_all, 4 * holds_all}
    usual = [c for c in sorted(wanted) if 64 <= c <= LARGEST_CAPACITY and tokens >= FEWEST_PACKS * c]
    # A pack of one document is no packing; small sets are measured at capacities that hold all of them.
    small = [c for c in usual if c >= int(np.median(full))] or usual or [min(holds_all, LARGEST_CAPACITY)]
    must = [c for c in small if c in USUAL_CAPACITIES or c == holds_most]
    rest = [c for c in small if c not in must]
    return tuple(sorted((must + rest)[:MOST_CAPACITIES]))


def _power_above(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _as_capacities(capacities: Sequence[int]) -> tuple[int, ...]:
    """Return validated capacities, sorted and distinct."""
    checked = sorted({as_count(capacity, "capacity") for capacity in capacities})
    if not checked:
        raise SettingError("capacities is empty; name at least one, or None for those that suit the lengths")
    return tuple(checked)


def _as_targets(targets: npt.ArrayLike, lengths: Int32Array) -> IntArray:
    """Return validated supervised tokens as int64, one number per document, none above its length."""
    array = np.asarray(targets)
    if array.shape != lengths.shape or array.dtype.kind not in "iu":
        raise DocumentsError(
            f"targets must be one whole number per document, [{lengths.size:,}]; got shape {array.shape} and "
            f"dtype {array.dtype}"
        )
    wrong = (array < 0) | (array > lengths)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DocumentsError(
            f"document {first:,} has {lengths[first]:,} tokens and {array[first]:,} of them supervised "
            f"(so it is with {int(wrong.sum()):,} of {many(lengths.size, 'document')}); count those that "
            "carry a label"
        )
    return array.astype(np.int64)


def _silent(_done: int, _total: int, _text: str) -> None:
    """Ignore progress."""


def _distribution(sample: Sample, documents: int) -> DistributionFigures:
    """Measure the distribution of lengths."""
    lengths = sample.lengths
    tokens = int(lengths.sum(dtype=np.int64))
    median, p90, p99 = np.quantile(lengths, (0.5, 0.9, 0.99)).tolist()
    hundredth = max(1, lengths.size // 100)
    longest = np.partition(lengths, lengths.size - hundredth)[-hundredth:]
    targets = None if sample.targets is None else int(sample.targets.sum())
    return DistributionFigures(
        documents=documents,
        empty=documents - lengths.size,
        tokens=tokens,
        mean=tokens / lengths.size,
        median=median,
        p90=p90,
        p99=p99,
        longest=int(lengths.max()),
        longest_share=int(longest.sum(dtype=np.int64)) / tokens,
        targets=targets,
        targets_share=None if targets is None else targets / tokens,
        histogram=_half_octaves(lengths),
    )


def _half_octaves(lengths: Int32Array) -> tuple[BinFigures, ...]:
    """Count documents and tokens by half octaves, without those that contain no whole number."""
    indices = np.floor(2 * np.log2(lengths.astype(np.float64))).astype(np.int64)
    documents, tokens = np.bincount(indices), np.bincount(indices, lengths.astype(np.float64))
    bins = []
    for index in range(int(indices.min()), documents.size):
        low, above = int(np.ceil(2 ** (index / 2))), int(np.ceil(2 ** ((index + 1) / 2)))
        if low < above:
            count, inside = int(documents[index]), int(tokens[index])
            bins.append(BinFigures(low=low, high=above - 1, documents=count, tokens=inside))
    return tuple(bins)


def _printable(text: str, most: int = LONGEST_EXCERPT) -> str:
    """Return the beginning of a text on one line, without unprintable characters."""
    line = " ".join(text[: 4 * most].split())[:most]
    return "".join(letter if letter.isprintable() else "�" for letter in line)


def _picture(sample: Sample, advice: AdviceFigures, excerpts: dict[int, str]) -> PackPicture:
    """Choose the best pack to draw: about `DRAWN_DOCUMENTS` documents, full, and with excerpts of most."""
    measure = by_pack if advice.packing.startswith(WITH_PACK) else by_lengths
    packing = measure(sample.given, advice.capacity, advice.method)
    numbers = packing.document_ids
    assert numbers is not None
    documents_in = np.diff(packing.offsets)
    longest = np.maximum.reduceat(packing.lengths, packing.offsets[:-1]) / advice.capacity
    # Padded, each document is drawn as a square of the longest one's width: `documents · longest²` times the
    # pack's square. A pack is penalized for what exceeds 1.
    off = np.abs(np.log2(documents_in / DRAWN_DOCUMENTS)) + np.log2(np.maximum(documents_in * longest**2, 1))
    off += np.where(documents_in == 1, 10.0, 8.0 * (1 - _sums(packing.lengths, packing) / advice.capacity))
    if excerpts:
        known = np.isin(numbers, np.fromiter(excerpts, np.int64, len(excerpts)))
        off = off + _sums(~known, packing) / documents_in
    best = int(np.argmin(off))
    inside = slice(int(packing.offsets[best]), int(packing.offsets[best + 1]))
    pieces = zip(numbers[inside].tolist(), packing.lengths[inside].tolist(), strict=True)
    return PackPicture(
        capacity=advice.capacity,
        pieces=tuple(
            PieceFigures(
                document_id=document, num_tokens=tokens, excerpt=_printable(excerpts.get(document, ""))
            )
            for document, tokens in pieces
        ),
    )


def _sums(values: npt.NDArray[Any], packing: Packed) -> IntArray:
    """Sum up values of pieces for each pack; packs aren't empty."""
    sums: IntArray = np.add.reduceat(values.astype(np.int64), packing.offsets[:-1])
    return sums


def measure_padding(
    lengths: Int32Array, batch_documents: int, cut_at: int | None, seed: int
) -> tuple[PaddingFigures, ...]:
    """Count the slots of three ways of padding, for whole documents, and for documents cut where some are longer.

    `lengths`: int32 `[num_documents]`, none of them 0.
    """
    order = np.random.default_rng(seed).permutation(lengths.size)
    rising = np.sort(lengths)
    found = list(_paddings(lengths[order], rising, batch_documents, None))
    if cut_at is not None and rising[-1] > cut_at:
        most = np.int32(cut_at)
        found += _paddings(
            np.minimum(lengths[order], most), np.minimum(rising, most), batch_documents, cut_at
        )
    return tuple(found)


def _paddings(
    mixed: Int32Array, rising: Int32Array, batch_documents: int, cut_at: int | None
) -> tuple[PaddingFigures, ...]:
    """Pad random batches, batches sorted by length, and every document to the longest."""
    tokens, longest = int(rising.sum(dtype=np.int64)), int(rising[-1])
    end, tail = ("", "") if cut_at is None else ("_cut", f", cut at {cut_at:,}")
    ways = (
        ("random", "random batches, padded to the longest", _padded(mixed, batch_documents)),
        ("buckets", "sorted into length buckets", _padded(rising, batch_documents)),
        ("maximum", f"every document padded to {longest:,}", longest * rising.size),
    )
    return tuple(
        PaddingFigures(name=name + end, title=title + tail, cut_at=cut_at, tokens=tokens, slots=slots)
        for name, title, slots in ways
    )


def _padded(lengths: Int32Array, batch_documents: int) -> int:
    """Return the slots of consecutive batches, each padded to its longest document."""
    starts = np.arange(0, lengths.size, batch_documents)
    longest = np.maximum.reduceat(lengths, starts).astype(np.int64)
    sizes = np.diff(np.append(starts, lengths.size))
    return int((longest * sizes).sum())


SHORT_TITLES = {
    "trl_bfd": "windows, truncated (TRL)",
    "axolotl_multipack": "first fit, dropped (axolotl)",
    "llama_factory_knapsack": "windows, dropped (LLaMA-Factory)",
    "next_fit_drop": "next fit, dropped (fast-axolotl)",
}
"""Names of peers' policies in narrow tables."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_INDENT = (0, 0, 0, 2)
BYTES = (
    "Bytes are counted here, by the built-in tokenizer: several times as many as your model's tokens. "
    "Pass --tokenizer before you choose a capacity."
)
"""A caveat for lengths in bytes."""


def inspect_table(inspection: Inspection) -> RenderableType:
    """Return everything that `varlen inspect` prints."""
    at = inspection.at(inspection.advice.capacity)
    return Group(
        "",
        Text(inspection.advice.headline, style="bold"),
        *_choice(inspection),
        Text(inspection.advice.why),
        *_titled(f"Lengths of {inspection.name}" if inspection.name else "Lengths", _lengths(inspection)),
        *(_titled("By file", _by_source(inspection)) if inspection.sources else ()),
        *_titled("What padding computes", _padding(inspection)),
        *_titled("What a capacity costs", _by_capacity(inspection)),
        *_titled("Fill, by capacity", _fill(inspection)),
        *_titled(f"At {at.capacity:,}", _details(at, inspection.advice.packing)),
        "",
        Text(reading(inspection), style="dim"),
    )


def _choice(inspection: Inspection) -> list[RenderableType]:
    """Return the advice as Python and as a command, on unwrapped lines to copy."""
    advice = inspection.advice
    lines = [
        Text(line, style="green", no_wrap=True, overflow="ignore")
        for line in (advice.call, advice.command)
        if line
    ]
    return [*lines, *([Text(BYTES, style="yellow")] if inspection.are_bytes else [])]


def reading(inspection: Inspection) -> str:
    """Explain how the figures were measured."""
    measured = (
        f"Packs were measured on {inspection.packed_documents:,} of the documents, drawn at random, windows on "
        f"{inspection.window_documents:,}; lengths, padding and losses are counted over all. "
        if inspection.is_sampled
        else ""
    )
    return (
        f"{measured}varlen pack and the loader are measured in their own random order and windows. The loader's "
        f"steps have {STEP_PACKS} packs; streaming is measured on at most {MOST_STREAMED:,} documents or about "
        f"{MOST_STREAMED_PACKS:,} packs (≈ marks the estimate for all documents at that fill), with files cut as if "
        "all tokens had the same size; masked packs at the end aren't counted. vl.pack takes documents in the order "
        "of the data. Rows of varlen split documents that are longer than a pack. Work is that of the heaviest pack "
        "over the mean: how much longer the others wait for it. Attention is the same for attention alone, which "
        "grows with the square of a document's length. Likeness is the correlation of lengths within packs: 0 where "
        "packs are random, 1 where each holds documents of one length, as after sorting. Rows of peers are computed "
        "with varlen's packer, set to do what the row says; their own code was not run."
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
    """Return the quantiles, and the distribution of documents and tokens over half octaves."""
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
    """Draw values as a row of blocks, two columns each; all but zeros are visible."""
    top = max(values)
    return "".join(2 * _BLOCKS[-(-8 * value // top)] for value in values)


def _padding(inspection: Inspection) -> Table:
    """Return a row for each way of padding, and one for packing."""
    table = _plain("padding", "slots /\ntoken", "packing\nsaves")
    packed = inspection.advised
    for way in inspection.padding:
        title = way.title.replace("batches,", f"batches of {inspection.batch_documents},")
        table.add_row(
            title, share(way.padding_share), times(way.slots_per_token), signed_share(way.saved_by(packed))
        )
    table.add_row(
        f"packed at {inspection.advice.capacity:,}, {packed.title}",
        share(packed.padding_share),
        times(packed.slots_per_token),
        "",
        style="bold green",
    )
    return table


def _fill(inspection: Inspection) -> Table:
    """Return a row for each method or policy, with a column for each capacity."""
    table = _plain(*(f"{at.capacity:,}" for at in inspection.capacities), gap=1)
    for row in inspection.capacities[0].packings:
        title, style = SHORT_TITLES.get(row.name, row.title), _style_of(row, inspection.advice.packing)
        table.add_row(title, *(full(at.packing(row.name)) for at in inspection.capacities), style=style)
    return table


def full(packing: PackFigures) -> str:
    """Write the fill of packs, or a dash if every document was dropped."""
    return fill(packing.fill) if packing.packs else "–"


def packs_of(row: PackFigures, at: CapacityFigures) -> str:
    """Write the number of packs; of a loader measured on fewer documents, the estimate for all, with ≈."""
    estimated = at.estimated_packs(row)
    return f"{row.packs:,}" if estimated is None else f"≈{estimated:,}"


def signed_share(value: float) -> str:
    """Write a share that may be below 0."""
    return share(value) if value >= 0 else f"−{share(-value)}"


def _style_of(row: PackFigures, advised: str) -> str:
    """Return a style: the advised packing is highlighted, and peers have their own colour."""
    return "bold green" if row.name == advised else "magenta" if row.kind == "policy" else ""


def by_capacity(inspection: Inspection) -> list[tuple[str, ...]]:
    """Return what each capacity costs, a cell for each capacity: what it cuts and loses, and its packs as advised."""
    found = inspection.capacities
    advised = [(at, at.packing(inspection.advice.packing)) for at in found]
    rows = [
        ("documents longer", [f"{at.overlong_documents:,}" for at in found]),
        ("of all documents", [share(at.overlong_share) for at in found]),
        ("tokens beyond it, lost by truncating", [share(at.truncation_share) for at in found]),
        ("tokens lost by dropping", [share(at.dropping_share) for at in found]),
    ]
    if inspection.distribution.targets:
        lost = [inspection.lost_targets_share(at.packing("axolotl_multipack")) for at in found]
        rows.append(("supervised tokens lost by dropping", [share(value or 0) for value in lost]))
    rows += [
        ("documents cut by wrapping", [share(at.packing("wrapped").cut_share) for at in found]),
        ("packs, as advised", [packs_of(row, at) for at, row in advised]),
        ("padding in them", [share(row.padding_share) for _, row in advised]),
        ("work of the heaviest over the mean", [times(row.work_imbalance) for _, row in advised]),
    ]
    return [(title, *cells) for title, cells in rows]


def _by_capacity(inspection: Inspection) -> Table:
    """Return a table of `by_capacity`."""
    table = _plain(*(f"{at.capacity:,}" for at in inspection.capacities))
    for row in by_capacity(inspection):
        table.add_row(*row)
    return table


SOURCE = ("", "documents", "tokens", "of all", "median", "longest", "longer", "beyond")
"""Columns of `by_source`."""


def by_source(inspection: Inspection) -> list[tuple[str, ...]]:
    """Return the figures of each file, under `SOURCE`."""
    return [
        (
            one.name,
            f"{one.documents:,}",
            f"{one.tokens:,}",
            share(one.tokens_share),
            count(one.median),
            f"{one.longest:,}",
            f"{one.overlong_documents:,}",
            share(one.truncation_share),
        )
        for one in inspection.sources
    ]


def _by_source(inspection: Inspection) -> RenderableType:
    """Return a table of `by_source`."""
    table = _plain(*SOURCE[1:], gap=1)
    for row in by_source(inspection):
        table.add_row(*row)
    return Group(table, Text(about_sources(inspection), style="dim"))


def about_sources(inspection: Inspection) -> str:
    """Explain the last columns of `by_source`."""
    capacity = inspection.advice.capacity
    return (
        f"Longer: documents of more than {capacity:,} tokens. Beyond: share of the file's tokens beyond that."
    )


def _details(at: CapacityFigures, advised: str) -> RenderableType:
    """Return all figures of the packings of one capacity."""
    table = _plain("packs", "fill", "lost", "work", "attention", "likeness", gap=1)
    for row in at.packings:
        table.add_row(
            SHORT_TITLES.get(row.name, row.title),
            packs_of(row, at),
            full(row),
            share(row.lost_share),
            times(row.work_imbalance),
            times(row.attention_imbalance),
            f"{row.length_correlation:+.2f}",
            style=_style_of(row, advised),
        )
    return table
