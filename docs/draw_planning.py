"""The pictures of docs/planning.md, drawn from plans that varlen makes and simulates, at one rate for all work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from svg import ACCENT, DOCUMENTS, INK, PADDING, RULE, SOFT, WARM, Drawing

import varlen as vl
from varlen.step_plan import BACKWARD, FORWARD, KINDS, WEIGHT, MicroPacks

COST = vl.CostModel(model=vl.ModelShape.named("llama-2-7b"), hardware=vl.Hardware.named("h100"), mode="flops")
ROOMY = COST.replace(hardware=vl.Hardware.named("b200"))
"""Where memory shall not matter."""
TP = 8
"""Each row of a timeline is a node of eight GPUs."""
CAPACITY = 131_072
COLOURS = {FORWARD: DOCUMENTS[0], BACKWARD: DOCUMENTS[4], WEIGHT: DOCUMENTS[3]}
FAINT = {FORWARD: "#b9cbde", BACKWARD: "#eac5ca", WEIGHT: "#f1ead0"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradients"}


def packed_plan(lengths: Sequence[int], mesh: vl.Mesh, cost: vl.CostModel = COST) -> vl.StepPlan:
    """Plan a step as most users run it: best-fit packs, dealt round robin, each stage a backward after a forward."""
    search = vl.Search(repairs=False)
    return vl.plan_step(lengths, cost=cost, mesh=mesh, method="packed", capacity=CAPACITY, search=search)


def planned(lengths: Sequence[int], mesh: vl.Mesh, **search: Any) -> vl.StepPlan:
    """Plan a step by MicroPacks."""
    return vl.plan_step(lengths, cost=COST, mesh=mesh, search=vl.Search(repairs=False, **search))


# --- timelines ---


def _lanes(
    d: Drawing,
    timeline: vl.Timeline,
    x: float,
    y: float,
    per_s: float,
    *,
    row: float = 16,
    stood_out: int = -1,
) -> float:
    """Draw rows of tasks, one a stage of each rank; returns where they end downwards.

    Args:
        d: to draw on.
        timeline: what is drawn.
        x: where time 0 is.
        y: top of the first row.
        per_s: width of a second.
        row: height of a row.
        stood_out: a document whose tasks are darker than the others; -1 for none.
    """
    mesh, plan = timeline.plan.mesh, timeline.plan
    tops = [
        y + rank * (mesh.pp * row + 8) + stage * row for rank in range(mesh.dp) for stage in range(mesh.pp)
    ]
    for place, top in enumerate(tops):
        d.box(x, top, timeline.makespan_s * per_s, row - 2, PADDING, radius=0)
        if place % mesh.pp == 0:
            middle = top + mesh.pp * row / 2 + 3
            d.text(x - 10, middle, f"rank {place // mesh.pp}", size=12, fill=SOFT, anchor="end")
    holds = [_packs_with(packs, stood_out) for packs in (plan.forward, plan.backward)]
    for task in np.flatnonzero(timeline.kinds < KINDS).tolist():
        kind = int(timeline.kinds[task])
        top = tops[int(timeline.ranks[task]) * mesh.pp + int(timeline.stages[task])]
        is_dark = stood_out < 0 or int(timeline.micropacks[task]) in holds[kind != FORWARD]
        start, stop = float(timeline.starts_s[task]) * per_s, float(timeline.stops_s[task]) * per_s
        d.box(
            x + start,
            top,
            max(stop - start - 0.6, 0.4),
            row - 2,
            (COLOURS if is_dark else FAINT)[kind],
            radius=0,
        )
    return tops[-1] + row


def _packs_with(packs: MicroPacks, document: int) -> set[int]:
    """The MicroPacks that hold slices of a document."""
    return set(packs.micropack_of_slice[packs.document_ids == document].tolist())


def _key(d: Drawing, x: float, y: float, kinds: Sequence[int], *others: tuple[str, str]) -> None:
    """Write which colour is what."""
    named = [(COLOURS[kind], NAMES[kind]) for kind in kinds]
    for colour, words in (*named, *others):
        d.box(x, y - 10, 14, 11, colour, radius=1)
        d.text(x + 20, y, words, size=12, fill=SOFT)
        x += 34 + 6.6 * len(words)


# --- the amplifier ---


def amplified() -> list[tuple[vl.Mesh, vl.Timeline, vl.Timeline]]:
    """The same documents on eight GPUs, by rising pipeline stages: as they are, and of equal length."""
    lengths = np.random.default_rng(0).lognormal(8.6, 1.9, 330).clip(256, CAPACITY).astype(np.int32)
    equal = np.full(4 * round(float(lengths.sum()) / CAPACITY / 8) * 8, CAPACITY // 4, np.int32)
    found = []
    for dp, pp in ((8, 1), (4, 2), (2, 4), (1, 8)):
        mesh = vl.Mesh(dp=dp, pp=pp, tp=TP)
        found.append(
            (mesh, *(vl.simulate(packed_plan(some, mesh, ROOMY), ROOMY) for some in (lengths, equal)))
        )
    return found


def amplifier() -> Drawing:
    """Packs of equal tokens and unequal work, under dp alone and under dp x pp: where GPUs wait, and how much."""
    rows = amplified()
    most = max(timeline.makespan_s for _, timeline, _ in rows)
    per_s = 560 / most
    d = Drawing(860, 0, "the same packs on eight nodes: the more pipeline stages, the more GPUs wait")
    d.text(30, 34, "the same packs on eight nodes, full of equally many tokens", size=15, bold=True)
    y = 66.0
    for mesh, timeline, _ in (rows[0], rows[2]):
        words = (
            "dp 8: ranks wait once, at the end"
            if mesh.pp == 1
            else "dp 2 x pp 4: whoever waits makes others wait"
        )
        d.text(100, y, words, size=13)
        y = _lanes(d, timeline, 100, y + 10, per_s) + 34
    _key(d, 100, y - 8, (FORWARD, BACKWARD), (PADDING, "GPUs wait"))
    _amplifier_table(d, rows, y + 30)
    d.height = round(y + 150)
    return d


def _amplifier_table(d: Drawing, rows: Sequence[tuple[vl.Mesh, vl.Timeline, vl.Timeline]], y: float) -> None:
    """Write how much GPUs wait, beside packs of equal work."""
    places = (100, 330, 450, 640, 820)
    table = [
        (
            "mesh",
            "work, busiest rank / mean",
            "GPUs wait",
            "with packs of equal work",
            "step / that of equal work",
        )
    ]
    table += [
        (
            f"dp {mesh.dp} x pp {mesh.pp}",
            f"{timeline.imbalance:.2f}",
            _waiting(timeline),
            _waiting(even),
            f"{timeline.makespan_s / _even_s(timeline, even):.2f}",
        )
        for mesh, timeline, even in rows
    ]
    d.line(100, y + 8, 820, y + 8, stroke=RULE)
    for place, cells in enumerate(table):
        for x, words in zip(places, cells):
            size, fill = (13.0, INK) if place else (12.0, SOFT)
            anchor = "start" if x == places[0] else "end"
            d.text(x, y + 20 * place + (8 if place else 0), words, size=size, fill=fill, anchor=anchor)


def _waiting(timeline: vl.Timeline) -> str:
    return f"{100 * timeline.bubble_ratio:.0f} %"


def _even_s(timeline: vl.Timeline, even: vl.Timeline) -> float:
    """Seconds that the step would take if its work were as even as that of the other."""
    return even.makespan_s * float(timeline.busy_s.sum() / even.busy_s.sum())


# --- MicroPacks ---

FEW = (56_000, 18_000, 9_000, 6_000, 5_200, 4_400, 3_600, 3_000, 2_600, 2_200, 1_800, 1_500, 1_200, 900, 700)
"""Documents of the small examples: one long, one middling, many short."""


def micropacks() -> Drawing:
    """Documents become MicroPacks of equal work: slices of the long ones, short ones beside what is left."""
    switches = dict.fromkeys(("merges", "grades", "splits_backward"), False)
    plan = planned(FEW, vl.Mesh(pp=4, tp=TP), micropacks_per_stage=(3,), **switches)
    packs = plan.forward
    d = Drawing(
        860, 132 + 30 * packs.num_micropacks, "documents cut into slices, and the MicroPacks they become"
    )
    unit = 790 / sum(FEW)
    d.text(30, 32, "documents, and where they are cut", size=15, bold=True)
    begins = np.concatenate([[0], np.cumsum(FEW)])
    for document, length in enumerate(FEW):
        d.box(30 + unit * float(begins[document]), 46, unit * length - 1.2, 20, _hue(document), radius=1)
    for document, start in zip(packs.document_ids.tolist(), packs.starts.tolist()):
        if start:
            x = 30 + unit * float(begins[document] + start)
            d.line(x, 42, x, 70, stroke=INK, width=1.5)
    d.text(30, 104, "MicroPacks", size=15, bold=True)
    d.text(500, 104, "work of the forward pass", size=12, fill=SOFT)
    seconds = _seconds_of(plan)
    widest = float(np.bincount(packs.micropack_of_slice, packs.stops - packs.starts).max())
    for pack in range(packs.num_micropacks):
        _micropack(d, packs, pack, 30, 118 + 30 * pack, 400 / widest)
        d.box(500, 122 + 30 * pack, 310 * seconds[pack] / max(seconds), 12, SOFT, radius=1)
    return d


def _micropack(d: Drawing, packs: MicroPacks, pack: int, x: float, y: float, unit: float) -> None:
    """Draw the slices of one MicroPack end to end, and what kind it is."""
    mine = range(int(packs.slice_offsets[pack]), int(packs.slice_offsets[pack + 1]))
    cut = [_is_cut(packs, j) for j in mine]
    kind = "Pack" if not any(cut) else "Slim" if all(cut) else "Mix"
    d.text(x, y + 14, kind, size=12, fill=ACCENT if kind == "Slim" else WARM if kind == "Mix" else SOFT)
    x += 40
    for j in mine:
        width = unit * float(packs.stops[j] - packs.starts[j])
        d.box(x, y, max(width - 1, 0.8), 20, _hue(int(packs.document_ids[j])), radius=1)
        x += width


def _is_cut(packs: MicroPacks, j: int) -> bool:
    """Whether a slice isn't all of its document."""
    document = int(packs.document_ids[j])
    return int(packs.stops[j] - packs.starts[j]) < FEW[document]


def _hue(document: int) -> str:
    return DOCUMENTS[document % len(DOCUMENTS)]


def _seconds_of(plan: vl.StepPlan) -> list[float]:
    """Seconds of the forward pass of each MicroPack through a stage without the head."""
    timeline = vl.simulate(plan, COST)
    found = (timeline.kinds == FORWARD) & (timeline.chunks == 1)
    seconds = np.zeros(plan.forward.num_micropacks)
    seconds[timeline.micropacks[found]] = timeline.work_s[found]
    return seconds.tolist()


# --- schedules, merging, memory ---


def _stacked(lengths: Sequence[int], plans: Sequence[tuple[str, vl.StepPlan]], title: str) -> Drawing:
    """Draw timelines one above the other on one time axis, the longest document darker than the others."""
    timelines = [vl.simulate(plan, COST) for _, plan in plans]
    per_s = 730 / max(timeline.makespan_s for timeline in timelines)
    longest = int(np.argmax(lengths))
    d = Drawing(860, 0, title)
    y = 34.0
    for (words, _), timeline in zip(plans, timelines):
        d.text(30, y, words, size=14, bold=True)
        over = timelines[0].makespan_s / timeline.makespan_s
        said = f"GPUs wait {_waiting(timeline)} of the step"
        d.text(
            830,
            y,
            f"{said}; {over:.2f} times as fast" if over != 1 else said,
            size=12,
            fill=SOFT,
            anchor="end",
        )
        y = _lanes(d, timeline, 100, y + 12, per_s, stood_out=longest) + 34
    _key(d, 100, y - 8, (FORWARD, BACKWARD, WEIGHT), (PADDING, "GPUs wait"))
    d.text(830, y - 8, "dark: the longest document", size=12, fill=SOFT, anchor="end")
    d.height = round(y + 14)
    return d


def _step() -> list[int]:
    """Documents of a step with a long tail."""
    return np.random.default_rng(0).lognormal(8.4, 1.5, 96).clip(256, CAPACITY).astype(np.int32).tolist()


def schedules() -> Drawing:
    """The same documents as packs in 1F1B, and as MicroPacks with weight gradients apart."""
    lengths, mesh = _step(), vl.Mesh(dp=2, pp=4, tp=TP)
    plans = (
        ("packs, 1F1B", packed_plan(lengths, mesh)),
        ("MicroPacks, 1F1B", planned(lengths, mesh, splits_backward=False)),
        ("MicroPacks, weight gradients apart", planned(lengths, mesh)),
    )
    return _stacked(lengths, plans, "a pipeline with packs, with MicroPacks, and with weight gradients apart")


def merging() -> Drawing:
    """One document with more work than the share of a rank, alone on it and shared by several (DP-Merge)."""
    lengths, mesh = [CAPACITY, *[4_096] * 60], vl.Mesh(dp=4, pp=2, tp=TP)
    plans = (
        ("the longest document on one rank", planned(lengths, mesh, merges=False)),
        ("shared by neighbouring ranks (DP-Merge)", planned(lengths, mesh)),
    )
    return _stacked(lengths, plans, "a document longer than the share of a rank, on one rank and on several")


def memory() -> Drawing:
    """What the fullest GPU holds over the step, and the limit that a planner keeps."""
    lengths, mesh = _step(), vl.Mesh(dp=2, pp=4, tp=TP)
    plans = (
        ("packs, 1F1B", WARM, packed_plan(lengths, mesh)),
        ("MicroPacks, 1F1B", DOCUMENTS[2], planned(lengths, mesh, splits_backward=False)),
        ("weight gradients apart", ACCENT, planned(lengths, mesh)),
    )
    d = Drawing(860, 372, "memory of the fullest GPU over the step, with packs and with MicroPacks")
    d.text(30, 34, "memory of the fullest GPU over the step", size=15, bold=True)
    timelines = [vl.simulate(plan, COST) for _, _, plan in plans]
    per_s = 740 / max(timeline.makespan_s for timeline in timelines)
    limit = timelines[0].memory_limit_bytes
    per_byte = 230 / max(limit, *(timeline.peak_bytes for timeline in timelines))
    for gb in range(0, int(limit / 1e9), 20):
        y = 300 - per_byte * gb * 1e9
        d.line(90, y, 830, y)
        d.text(80, y + 4, f"{gb} GB", size=12, fill=SOFT, anchor="end")
    d.line(90, 300 - per_byte * limit, 830, 300 - per_byte * limit, stroke=INK, dash="5 4")
    d.text(830, 292 - per_byte * limit, f"limit: {limit / 1e9:.1f} GB", size=12, fill=SOFT, anchor="end")
    for place, ((words, stroke, _), timeline) in enumerate(zip(plans, timelines)):
        points = _curve(timeline, per_s, per_byte)
        for (x1, y1), (x2, y2) in zip(points, points[1:]):
            d.line(90 + x1, 300 - y1, 90 + x2, 300 - y1, stroke=stroke, width=1.6)
            d.line(90 + x2, 300 - y1, 90 + x2, 300 - y2, stroke=stroke, width=1.6)
        d.line(90 + 250 * place, 344, 116 + 250 * place, 344, stroke=stroke, width=3)
        d.text(124 + 250 * place, 348, f"{words}: {timeline.peak_bytes / 1e9:.0f} GB", size=13)
    d.text(830, 318, "time", size=12, fill=SOFT, anchor="end")
    return d


def _curve(timeline: vl.Timeline, per_s: float, per_byte: float) -> list[tuple[float, float]]:
    """Points of the curve of the GPU that holds most."""
    fullest = int(timeline.peaks_bytes.argmax())
    span = slice(int(timeline.memory_offsets[fullest]), int(timeline.memory_offsets[fullest + 1]))
    times, sizes = timeline.memory_times_s[span] * per_s, timeline.memory_bytes[span] * per_byte
    return list(zip([*times.tolist(), timeline.makespan_s * per_s], [*sizes.tolist(), float(sizes[-1])]))


PICTURES = {
    "planning_amplifier": amplifier,
    "planning_micropacks": micropacks,
    "planning_schedules": schedules,
    "planning_merging": merging,
    "planning_memory": memory,
}
