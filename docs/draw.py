"""Every picture of the documentation, drawn from what varlen computes: `python docs/draw.py` writes docs/images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from svg import ACCENT, DOCUMENTS, INK, PADDING, RULE, SOFT, WARM, Drawing

import varlen as vl

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
SAMPLE = [7, 3, 12, 2, 5, 4, 9, 3, 6, 1, 8, 4]
CAPACITY = 16


def sample_lengths() -> np.ndarray:
    """Return the lengths that the charts measure: 20,000 documents, log-normal, at most 8,192 tokens."""
    rng = np.random.default_rng(0)
    return rng.lognormal(6.0, 1.2, 20_000).clip(16, 8192).astype(np.int32)


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
        d.text(x + 30, 120, verb, size=11.5, fill=ACCENT, anchor="middle", mono=True)
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
            d.box(706 + size * begin, 80 + size * (begin + step), size * (step + 1), size, colour(document), radius=0)
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
    """Each method on the same lengths: packs over the lower bound, and the most work a pack over the mean."""
    lengths = sample_lengths()
    bound = vl.lower_bound(lengths, 8192)
    d = Drawing(760, 330, "packs over the lower bound and work of the heaviest pack, by method")
    d.text(190, 34, "packs over the lower bound", size=15, bold=True)
    d.text(480, 34, "heaviest pack / mean work", size=15, bold=True)
    rows = [(method, vl.pack(lengths, capacity=8192, method=method)) for method in METHODS]
    over = [100 * (packing.num_packs / bound - 1) for _, packing in rows]
    heavy = [vl.score(packing).work_imbalance for _, packing in rows]
    for row, (method, _) in enumerate(rows):
        y = 56 + 34 * row
        d.text(170, y + 15, method, anchor="end", mono=True, size=12)
        for x, values, base, form in ((190, over, 0.0, "{:.2f}%"), (480, heavy, 1.0, "{:.2f}x")):
            width = 190 * (values[row] - base) / (max(values) - base)
            d.box(x, y, max(width, 1), 20, ACCENT if x == 190 else WARM)
            d.text(x + max(width, 1) + 6, y + 15, form.format(values[row]), size=12)
    d.text(190, 312, "20,000 log-normal lengths, mean 817, capacity 8,192", size=12, fill=SOFT)
    return d
