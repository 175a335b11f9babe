"""The pictures of docs/running.md."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from svg import DOCUMENTS, INK, PADDING, SOFT, WARM, Drawing

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "run"

_FORWARD = (0, 96, 144, 192)
"""Where the forward pass cuts the document that is drawn."""
_BACKWARD = (0, 64, 112, 152, 192)
"""And where the backward pass does, which is another place with recomputation."""
_SIDE = 192
_HUES = (DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[2], DOCUMENTS[5])


def passes() -> Drawing:
    """A document's attention in slices: which rows attend to which keys in which order, in both passes."""
    d = Drawing(860, 330, "a document of 192 tokens runs forward in three slices and backward in four others")
    d.text(30, 34, "forward: first to last", size=15, bold=True)
    _triangle(d, 70, 56, _FORWARD, is_backward=False)
    d.text(460, 34, "backward: last to first, cut elsewhere", size=15, bold=True)
    _triangle(d, 500, 56, _BACKWARD, is_backward=True)
    d.text(70, 56 + _SIDE + 36, "keys and values, kept until they are done", size=12, fill=SOFT)
    d.text(500, 56 + _SIDE + 36, "their gradients, added up from the right", size=12, fill=SOFT)
    words = "dark: its own rows, causal; light: all earlier tokens, from the cache; joined by log-sum-exp"
    d.text(30, 316, words, size=12, fill=SOFT)
    return d


def _triangle(d: Drawing, left: float, top: float, cuts: tuple[int, ...], *, is_backward: bool) -> None:
    """Draw rows over keys, a band for each slice, with its number in the order of the pass."""
    d.box(left, top, _SIDE, _SIDE, PADDING, radius=0)
    slices = list(pairwise(cuts))
    for place, (start, stop) in enumerate(slices):
        hue = _HUES[place]
        d.parts.append(f'<g opacity="0.35"><rect x="{left}" y="{top + start}" width="{start}" '
                       f'height="{stop - start}" fill="{hue}"/></g>')  # fmt: skip
        corners = f"{left + start},{top + start} {left + start},{top + stop} {left + stop},{top + stop}"
        d.parts.append(f'<polygon points="{corners}" fill="{hue}"/>')
        d.line(left, top + stop, left + stop, top + stop, stroke="#ffffff", width=1.5)
        number = len(slices) - place if is_backward else place + 1
        d.text(left + _SIDE + 14, top + (start + stop) / 2 + 5, f"{number}", bold=True)
        d.text(left + _SIDE + 30, top + (start + stop) / 2 + 5, f"rows {start} to {stop}", size=12, fill=SOFT)
        # The cache below: in the forward pass it grows to the right, in the backward pass it is given back.
        d.box(left + start, top + _SIDE + 8, stop - start - 1, 10, hue, radius=1)
    d.line(left, top, left, top + _SIDE, stroke=INK)
    d.line(left, top + _SIDE, left + _SIDE, top + _SIDE, stroke=INK)
    d.text(left - 8, top + 12, "rows", size=11, anchor="end", fill=SOFT)
    d.text(left + _SIDE + 6, top + _SIDE + 17, "keys", size=11, fill=SOFT)
    arrow = (top + _SIDE, top) if is_backward else (top, top + _SIDE)
    d.arrow(left + _SIDE + 134, arrow[0], left + _SIDE + 134, arrow[1])


def sharing() -> Drawing:
    """A document that four ranks share: whose rows are whose, and that each has as much attention to compute."""
    ranks, cuts = 4, (0, 128, 192)
    d = Drawing(
        860,
        330,
        "two slices of a document, each dealt to four ranks in zigzag: first and last chunk together",
    )
    d.text(30, 34, "rows of two slices, dealt in zigzag", size=15, bold=True)
    left, top = 70, 56
    pairs = dict.fromkeys(range(ranks), 0)
    for start, stop in pairwise(cuts):
        chunks = [start + chunk * (stop - start) // (2 * ranks) for chunk in range(2 * ranks + 1)]
        for chunk, (first, last) in enumerate(pairwise(chunks)):
            rank = min(chunk, 2 * ranks - 1 - chunk)
            pairs[rank] += sum(row + 1 for row in range(first, last))
            ends = ((left, first), (left + first, first), (left + last, last), (left, last))
            corners = " ".join(f"{x},{top + row}" for x, row in ends)
            d.parts.append(f'<polygon points="{corners}" fill="{_HUES[rank]}"/>')
        d.line(left, top + stop, left + stop, top + stop, stroke="#ffffff", width=2.5)
        d.text(left + _SIDE + 14, top + (start + stop) / 2 + 5, f"slice {cuts.index(start) + 1}", bold=True)
    d.line(left, top, left, top + _SIDE, stroke=INK)
    d.line(left, top + _SIDE, left + _SIDE, top + _SIDE, stroke=INK)
    d.text(left - 8, top + 12, "rows", size=11, anchor="end", fill=SOFT)
    d.text(left + _SIDE + 6, top + _SIDE + 17, "keys", size=11, fill=SOFT)
    d.text(460, 34, "each rank: a quarter of the rows", size=15, bold=True)
    total = sum(pairs.values())
    for rank in range(ranks):
        y = 66 + 48 * rank
        d.box(460, y, 22, 22, _HUES[rank])
        d.text(494, y + 16, f"rank {rank}: {100 * pairs[rank] / total:.1f} % of the attention", size=13)
    d.text(460, 276, "keys and values of all ranks are gathered for one layer at a time;", size=12, fill=SOFT)
    d.text(460, 294, "their gradients go back to whoever has the rows", size=12, fill=SOFT)
    return d


def ahead() -> Drawing:
    """The planner's process beside the steps: what is planned while which step runs, and how long steps waited."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    found = [result["ahead"] for result in results if "ahead" in result][-1]  # files are named by date
    step_s, first_s, later_s = (float(found[key]) for key in ("step_s", "first_wait_s", "wait_s"))
    d = Drawing(
        860,
        230,
        "steps run while another process plans the next ones; only the first step waits for its plan",
    )
    left, steps, part = 110, 4, 0.16
    per_s = 690 / (first_s + steps * step_s)
    for y, words in ((82, "GPUs"), (152, "planner")):
        d.text(left - 16, y + 20, words, bold=True, anchor="end")
        d.box(left, y, 690, 30, PADDING)
    d.box(left, 82, per_s * first_s, 30, WARM)
    d.text(left, 66, f"the first plan: {first_s:.2g} s, once", size=12, fill=SOFT)
    for step in range(steps):
        x, width = left + per_s * (first_s + step * step_s), per_s * step_s
        d.box(x, 82, width - 1.5, 30, _HUES[step])
        d.text(x + width / 2, 102, f"step {step}", anchor="middle", fill="#ffffff", bold=True)
        if step:
            d.text(x, 66, f"{1e6 * later_s:.0f} µs", size=12, fill=SOFT, anchor="middle")
            d.line(x - 0.8, 70, x - 0.8, 82, stroke=SOFT)
        # The two steps behind the one that is taken are asked for; the second of them is new.
        planned = range(1, 3) if step == 0 else range(step + 2, step + 3)
        for place, number in enumerate(planned):
            begin = x + place * (part * width + 4)
            d.box(begin, 152, part * width, 30, _HUES[number % len(_HUES)])
            d.text(begin + part * width / 2, 172, f"{number}", anchor="middle", fill="#ffffff", bold=True)
    d.box(left, 152, per_s * first_s, 30, _HUES[0])
    d.text(left + per_s * first_s / 2, 172, "0", anchor="middle", fill="#ffffff", bold=True)
    d.text(30, 34, "plans are there before the step that takes them", size=15, bold=True)
    words = (
        f"waits as measured, {found['steps']} steps of {step_s:.2g} s; how long planning takes isn't to scale"
    )
    d.text(30, 214, words, size=12, fill=SOFT)
    return d


PICTURES = {"running_passes": passes, "running_sharing": sharing, "running_ahead": ahead}
