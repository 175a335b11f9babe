"""The documentation's pictures, drawn from what varlen computes: `python docs/draw.py` writes docs/images."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from svg import ACCENT, DOCUMENTS, INK, PADDING, RULE, SOFT, WARM, Drawing

import varlen as vl

sys.path.append(str(Path(__file__).resolve().parent.parent))  # `benchmarks`, whose results some show
import draw_planning
import draw_running
import draw_strategies

IMAGES = Path(__file__).resolve().parent / "images"
METHODS = (
    "next_fit",
    "first_fit",
    "best_fit",
    "first_fit_decreasing",
    "best_fit_decreasing",
    "balanced",
    "wrapped",
)
SAMPLE = [7, 3, 12, 2, 5, 4, 9, 3, 6, 1, 8, 2]
CAPACITY = 16


def sample_lengths(log_mean: float, log_spread: float, longest: int) -> np.ndarray:
    """Return the lengths that a chart measures: 20,000 documents, log-normal."""
    rng = np.random.default_rng(0)
    return rng.lognormal(log_mean, log_spread, 20_000).clip(16, longest).astype(np.int32)


def colour(document: int) -> str:
    """Return a document's colour."""
    return DOCUMENTS[document % len(DOCUMENTS)]


def flow() -> Drawing:
    """Documents, packs, a batch, a model: the four stations and what each hands on."""
    d = Drawing(860, 250, "documents go through vl.pack and vl.collate into your model")
    stations = (
        (20, "documents", "any lengths"),
        (240, "Packing", "which piece in which pack"),
        (460, "PackedBatch", "arrays with boundaries"),
        (680, "your model", "documents kept apart"),
    )
    verbs = ((180, "vl.pack"), (400, "vl.collate"), (620, "model_inputs"))
    for x, name, what in stations:
        d.text(x + 80, 36, name, size=16, anchor="middle", bold=True)
        d.text(x + 80, 56, what, size=12, fill=SOFT, anchor="middle")
    for x, verb in verbs:
        d.text(x + 30, 120, verb, size=11, fill=ACCENT, anchor="middle", mono=True)
        d.arrow(x + 4, 130, x + 56, 130)

    documents = SAMPLE[:8]
    for row, length in enumerate(documents):
        d.box(36, 74 + 15 * row, 8 * length, 11, colour(row))
    packing = vl.pack(documents, capacity=CAPACITY)
    _packs(d, packing, documents, x=252, y=90, unit=8.5, row=24)
    for row in range(packing.num_packs):
        y = 90 + 26 * row
        _pack(d, packing, documents, row, x=472, y=y, unit=8.5, height=8)
        for token in range(CAPACITY):
            held = token < int(packing.pack_sums(packing.lengths)[row])
            d.box(472 + 8.5 * token, y + 10, 7.5, 5, SOFT if held else PADDING, radius=1)
    size = 104 / CAPACITY
    for place, document in enumerate(packing.to_lists()[0]):
        begin = sum(documents[i] for i in packing.to_lists()[0][:place])
        for step in range(documents[document]):
            d.box(
                706 + size * begin,
                80 + size * (begin + step),
                size * (step + 1),
                size,
                colour(document),
                radius=0,
            )
    d.box(706, 80, 104, 104, "none", line=RULE, radius=0)
    for x, words in (
        (100, "list, arrays, Arrow"),
        (320, "ledger: every token once"),
        (540, "ids, labels, positions, cu_seqlens"),
        (760, "checked, not assumed"),
    ):
        d.text(x, 226, words, size=11.5, fill=SOFT, anchor="middle")
    return d


def _pack(
    d: Drawing,
    packing: vl.Packing,
    lengths: list[int],
    pack: int,
    *,
    x: float,
    y: float,
    unit: float,
    height: float,
) -> None:
    """Draw one pack as a row of documents with its padding."""
    d.box(x, y, unit * packing.capacity, height, PADDING)
    place = 0
    for document in packing.to_lists()[pack]:
        d.box(x + unit * place, y, unit * lengths[document] - 1, height, colour(document))
        place += lengths[document]


def _packs(
    d: Drawing, packing: vl.Packing, lengths: list[int], *, x: float, y: float, unit: float, row: float
) -> None:
    """Draw every pack, one below the other."""
    for pack in range(packing.num_packs):
        _pack(d, packing, lengths, pack, x=x, y=y + (row + 2) * pack, unit=unit, height=row - 6)


def padded_and_packed() -> Drawing:
    """The same documents padded to the longest, and packed: how much of each rectangle is padding."""
    packing = vl.pack(SAMPLE, capacity=CAPACITY)
    slots = len(SAMPLE) * max(SAMPLE)
    d = Drawing(760, 270, "twelve documents padded to the longest, and the same documents packed")
    d.text(30, 34, "padded to the longest", size=15, bold=True)
    d.text(30, 54, f"{100 * (1 - sum(SAMPLE) / slots):.0f}% of {slots} positions are padding", fill=SOFT)
    for row, length in enumerate(SAMPLE):
        d.box(30, 72 + 15 * row, 24 * max(SAMPLE), 12, PADDING)
        d.box(30, 72 + 15 * row, 24 * length, 12, colour(row))
    d.text(380, 34, f"packed, capacity {CAPACITY}", size=15, bold=True)
    padding = packing.num_packs * CAPACITY - packing.num_tokens
    d.text(380, 54, f"{padding} of {packing.num_packs * CAPACITY} positions are padding", fill=SOFT)
    _packs(d, packing, SAMPLE, x=380, y=72, unit=22, row=34)
    return d


def methods() -> Drawing:
    """Each method on the same lengths: packs over the bound, heaviest work, likeness of lengths in a pack."""
    lengths = sample_lengths(7.5, 1.3, 32_768)
    scores = [vl.score(vl.pack(lengths, capacity=65_536, method=method)) for method in METHODS]
    columns = (
        (
            180,
            "packs over the bound",
            [100 * s.packs_over_bound / s.lower_bound for s in scores],
            0.0,
            "{:.1f}%",
        ),
        (380, "heaviest / mean work", [s.work_imbalance for s in scores], 1.0, "{:.2f}x"),
        (580, "likeness of lengths", [abs(s.length_correlation) for s in scores], 0.0, "{:.2f}"),
    )
    d = Drawing(
        780,
        86 + 34 * len(METHODS),
        "packs over the lower bound, heaviest work and likeness of lengths, by method",
    )
    for row, method in enumerate(METHODS):
        d.text(166, 65 + 34 * row, method, anchor="end", mono=True, size=12)
    for (x, name, values, base, form), fill in zip(columns, (ACCENT, WARM, SOFT)):
        d.text(x, 34, name, size=14, bold=True)
        for row, value in enumerate(values):
            width = max(130 * (value - base) / (max(values) - base), 1)
            d.box(x, 50 + 34 * row, width, 20, fill)
            d.text(x + width + 6, 65 + 34 * row, form.format(value), size=12)
    words = f"{lengths.size:,} log-normal lengths, mean {lengths.mean():,.0f}, longest {lengths.max():,}"
    d.text(180, 68 + 34 * len(METHODS), f"{words}; capacity 65,536", size=12, fill=SOFT)
    return d


def overlong() -> Drawing:
    """What each policy makes of one document that is longer than a pack."""
    length, capacity, unit = 14, 6, 16
    d = Drawing(760, 250, "a document of 14 tokens and packs of 6, under each overlong policy")
    d.text(30, 34, f"a document of {length} tokens, packs of {capacity}", size=15, bold=True)
    d.box(150, 50, unit * length - 2, 18, DOCUMENTS[0])
    d.text(134, 64, "given", anchor="end", size=12, fill=SOFT)
    outcomes = (
        ("error", (), "OverlongDocumentError: which one, how long, how many"),
        ("split", (6, 6, 2), "three pieces, each a document of its own"),
        ("truncate", (6,), "8 tokens counted as truncated"),
        ("drop", (), "14 tokens counted as dropped"),
    )
    for row, (policy, pieces, words) in enumerate(outcomes):
        y = 90 + 38 * row
        d.text(134, y + 14, policy, anchor="end", mono=True)
        for place, piece in enumerate(pieces):
            x = 150 + (unit * capacity + 10) * place
            d.box(x, y, unit * capacity - 2, 18, PADDING)
            d.box(x, y, unit * piece - 2, 18, DOCUMENTS[0])
        d.text(
            162 + (unit * capacity + 10) * len(pieces) - 10 * (not pieces), y + 14, words, size=12, fill=SOFT
        )
    return d


def windows() -> Drawing:
    """How many more packs windows cost than packing everything at once, with and without carrying over."""
    lengths = sample_lengths(6.0, 1.2, 8192)
    whole = vl.pack(lengths, capacity=8192).num_packs
    sizes = (64, 128, 256, 512, 1024, 2048, 4096)
    alone = [
        sum(vl.pack(lengths[at : at + size], capacity=8192).num_packs for at in range(0, lengths.size, size))
        for size in sizes
    ]
    carried = []
    for size in sizes:
        packer = vl.WindowPacker(capacity=8192, window=size)
        carried.append(packer.add(lengths).num_packs + packer.flush().num_packs)
    d = Drawing(760, 320, "more packs than packing everything at once, by window")
    d.text(30, 34, "more packs than packing everything at once", size=15, bold=True)
    left, bottom, wide, high, top = 90, 250, 620, 190, 100 * (max(alone) / whole - 1) * 1.1
    for percent in range(0, int(top) + 1, 2):
        y = bottom - high * percent / top
        d.line(left, y, left + wide, y)
        d.text(left - 10, y + 4, f"{percent}%", anchor="end", size=12, fill=SOFT)
    xs = [left + 40 + (wide - 80) * place / (len(sizes) - 1) for place in range(len(sizes))]
    for x, size in zip(xs, sizes):
        d.text(x, bottom + 20, f"{size:,}", anchor="middle", size=12, fill=SOFT)
    for counts, stroke in ((alone, WARM), (carried, ACCENT)):
        points = [(x, bottom - high * 100 * (count / whole - 1) / top) for x, count in zip(xs, counts)]
        d.curve(points, stroke=stroke)
        for (x, y), count in zip(points, counts):
            if count in (max(counts), alone[1], alone[2], alone[3]):
                d.text(x + 9, y - 8, f"{100 * (count / whole - 1):.1f}%", size=12)
    d.text(330, 96, "each window packed by itself", size=13, fill=WARM, bold=True)
    d.text(330, 118, "WindowPacker, which carries over", size=13, fill=ACCENT, bold=True)
    d.text(left + wide / 2, 302, "documents in a window", anchor="middle", size=12, fill=SOFT)
    return d


def _example() -> vl.PackedBatch:
    """Return the batch of the pictures: three documents in one row of twelve positions."""
    documents = [[11, 12, 13, 14], [21, 22, 23], [31, 32]]
    return vl.collate(documents, vl.pack([4, 3, 2], capacity=12))


def batch() -> Drawing:
    """The arrays of one row, position by position."""
    held = _example()
    rows = ("input_ids", "labels", "position_ids", "segment_ids")
    d = Drawing(760, 270, "input_ids, labels, position_ids, segment_ids and cu_seqlens of one row")
    left, unit = 140, 48
    segments = held.segment_ids[0].tolist()
    for row, name in enumerate(rows):
        y = 40 + 38 * row
        d.text(left - 14, y + 19, name, anchor="end", mono=True, size=12)
        for place, value in enumerate(getattr(held, name)[0].tolist()):
            segment = segments[place]
            d.box(left + unit * place, y, unit - 3, 28, PADDING if segment < 0 else colour(segment))
            fill = "#ffffff" if segment == 0 else INK
            d.text(
                left + unit * place + unit / 2 - 1.5, y + 19, str(value), anchor="middle", size=13, fill=fill
            )
    y = 40 + 38 * len(rows) + 14
    d.text(left - 14, y + 14, "cu_seqlens", anchor="end", mono=True, size=12)
    d.line(left, y, left + unit * 12, y, stroke=SOFT, width=1.5)
    for bound in held.cu_seqlens.tolist():
        d.line(left + unit * bound - 1.5, y - 5, left + unit * bound - 1.5, y + 5, stroke=SOFT, width=1.5)
        d.text(left + unit * bound - 1.5, y + 24, str(bound), anchor="middle", size=13)
    words = "-100 is no target: the first token of each document, and padding"
    d.text(left, 256, words, size=12, fill=SOFT)
    return d


def mask() -> Drawing:
    """Who may attend to whom in the same row, causal and with a sliding window."""
    held = _example()
    d = Drawing(760, 330, "the attention mask of one row, causal and with a sliding window of two")
    segments = held.segment_ids[0].tolist()
    for x, words, allowed in (
        (60, "dense_mask()", held.dense_mask()[0]),
        (420, "dense_mask(sliding_window=2)", held.dense_mask(sliding_window=2)[0]),
    ):
        d.text(x, 34, words, mono=True, bold=True)
        for query, line in enumerate(allowed.tolist()):
            for key, may in enumerate(line):
                fill = PADDING if not may else colour(segments[query]) if segments[query] >= 0 else SOFT
                d.box(x + 21 * key, 50 + 21 * query, 19, 19, fill, radius=2)
        d.text(x, 322, "rows attend to columns; padding sees only itself", size=12, fill=SOFT)
    return d


def zigzag() -> Drawing:
    """Which rank of two holds which positions of a row, when each document is cut in zigzag."""
    from varlen.batch.context_parallel import zigzag_indices

    bounds = [0, 8, 12, 16]
    d = Drawing(760, 170, "zigzag partition of three documents over two context-parallel ranks")
    left, unit = 140, 36
    d.text(30, 34, "zigzag within every document, 2 ranks", size=15, bold=True)
    for rank in range(2):
        y = 54 + 40 * rank
        d.text(left - 14, y + 19, f"cp_rank {rank}", anchor="end", mono=True, size=12)
        mine = set(zigzag_indices(bounds, cp_rank=rank, cp_world_size=2).tolist())
        for position in range(bounds[-1]):
            document = sum(position >= bound for bound in bounds[1:])
            fill = colour(document) if position in mine else PADDING
            d.box(left + unit * position, y, unit - 3, 28, fill)
    for bound in bounds:
        d.text(left + unit * bound - 1.5, 154, str(bound), anchor="middle", size=12, fill=SOFT)
    return d


def feeding() -> Drawing:
    """How both modes make packs: windows of a store's documents, and lanes over the blocks of files."""
    d = Drawing(
        860, 340, "indexed mode packs windows of a token store, streaming packs lanes over blocks of files"
    )
    rng = np.random.default_rng(4)
    d.text(24, 30, "indexed", size=16, bold=True)
    d.text(106, 30, "all lengths are known: any window can be packed at any time", size=12, fill=SOFT)
    lengths = rng.integers(6, 40, 18)
    order = rng.permutation(18)
    for row, (words, places) in enumerate((("store", np.arange(18)), ("shuffled", order))):
        x = 110.0
        d.text(94, 62 + 30 * row, words, size=12, anchor="end", fill=SOFT)
        for place, document in enumerate(places.tolist()):
            d.box(x, 50 + 30 * row, float(lengths[document]), 16, colour(document))
            x += float(lengths[document]) + 2
            if row and place % 6 == 5 and place < 17:
                d.box(x + 1, 76, 2, 24, INK, radius=0)
                x += 6
    d.text(94, 124, "packs", size=12, anchor="end", fill=SOFT)
    for window in range(3):
        held = order[6 * window : 6 * window + 6].tolist()
        packing = vl.pack(lengths[held], capacity=80, method="best_fit")
        d.text(110 + 240 * window, 170, f"window {window}", size=11, fill=SOFT)
        for row, pack in enumerate(packing.to_lists()):
            d.box(110 + 240 * window, 112 + 14 * row, 80 * 2.7, 11, PADDING)
            x = 110.0 + 240 * window
            for index in pack:
                d.box(x, 112 + 14 * row, 2.7 * float(lengths[held[index]]) - 1, 11, colour(held[index]))
                x += 2.7 * float(lengths[held[index]])
    d.text(24, 206, "streaming", size=16, bold=True)
    d.text(126, 206, "nothing is written: each block goes to the lane that holds least", size=12, fill=SOFT)
    d.text(94, 238, "blocks", size=12, anchor="end", fill=SOFT)
    owners = (0, 1, 2, 2, 0, 1, 0, 2, 1, 0, 1, 2)
    for number, lane in enumerate(owners):
        d.box(110 + 50 * number, 226, 46, 16, DOCUMENTS[(0, 4, 2)[lane]])
        d.text(133 + 50 * number, 238, str(number), size=10, anchor="middle", fill="#ffffff")
    for lane in range(3):
        y = 262 + 24 * lane
        d.text(94, y + 12, f"lane {lane}", size=12, anchor="end", fill=SOFT)
        mine = [number for number, owner in enumerate(owners) if owner == lane]
        for place, number in enumerate(mine):
            d.box(110 + 50 * place, y, 46, 16, DOCUMENTS[(0, 4, 2)[lane]])
            d.text(133 + 50 * place, y + 12, str(number), size=10, anchor="middle", fill="#ffffff")
        d.arrow(318, y + 8, 344, y + 8)
        for pack in range(5):
            d.box(356 + 72 * pack, y, 66, 16, DOCUMENTS[(0, 4, 2)[lane]], line=INK if pack == 0 else "none")
    d.text(389, 256, "step 0", size=11, anchor="middle", fill=SOFT)
    d.text(726, 274, "one pack of each", size=12, fill=SOFT)
    d.text(726, 290, "lane is a step", size=12, fill=SOFT)
    return d


PICTURES = {
    "flow": flow,
    "padded_and_packed": padded_and_packed,
    "methods": methods,
    "overlong": overlong,
    "windows": windows,
    "batch": batch,
    "mask": mask,
    "zigzag": zigzag,
    "feeding": feeding,
    **draw_strategies.PICTURES,
    **draw_planning.PICTURES,
    **draw_running.PICTURES,
}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(picture().svg(), encoding="utf-8")
