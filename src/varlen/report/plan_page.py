"""The HTML report of a comparison of plans: a table of methods, and their timelines to zoom into."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.report.drawing import Bar, bars
from varlen.report.page import (
    NARROW,
    WIDE,
    caption_of,
    duration,
    facts,
    numbers,
    page,
    paragraph,
    ratio,
    section,
    share,
    significant,
    size,
    table,
    twice,
)
from varlen.report.plan import MethodFigures, PlanComparison, baseline, headline, training_table
from varlen.report.plan_table import (
    CHOICES,
    GIVES,
    OVER,
    TAKES,
    choices,
    costs,
    gives,
    mesh_words,
    notes,
    over_steps,
    over_words,
    reading,
    refusals,
    setting,
    simulation,
    takes,
)
from varlen.simulate.timeline import Timeline
from varlen.step_plan import KINDS, MicroPacks
from varlen.types import Int32Array, IntArray

MOST_TASKS = 150_000
"""Most tasks that a page draws smoothly; of larger plans, only the slowest ranks are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnRanks:
    """The drawn part of a timeline: all stages of some ranks."""

    timeline: Timeline
    ranks: Int32Array
    """int32 `[num_shown]`: data-parallel ranks, rising."""
    tasks: IntArray
    """int64 `[num_tasks]`: tasks of these ranks, by row (rank, then stage) and then by start."""
    row_offsets: Int32Array
    """int32 `[num_shown * pp + 1]`: tasks of each row."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank is shown."""
        return len(self.ranks) == self.timeline.plan.mesh.dp

    @property
    def note(self) -> str:
        """A sentence on the ranks that are shown, "" if all are."""
        if self.is_whole:
            return ""
        dp = self.timeline.plan.mesh.dp
        which = "the one that finishes last" if len(self.ranks) == 1 else "those that finish last"
        return f"Shown: {len(self.ranks):,} of {dp:,} ranks, {which}; the figures are of all."

    def to_json(self) -> dict[str, Any]:
        """Return the arrays as the page's script reads them: base64, little-endian."""
        timeline, plan = self.timeline, self.timeline.plan
        pp = plan.mesh.pp
        rows = (self.ranks[:, None] * pp + np.arange(pp)).ravel()
        passes = [_Shown.of(plan.forward, self.ranks), _Shown.of(plan.backward, self.ranks)]
        packs, of_backward = timeline.micropacks[self.tasks], timeline.backward_of[self.tasks]
        numbers = [shown.numbers(packs) for shown in passes]
        memory = timeline.memory_offsets
        points, memory_offsets = _ranges(memory[rows], memory[rows + 1])
        return {
            "pp": pp,
            "numChunks": plan.mesh.num_chunks,
            "ranks": self.ranks.tolist(),
            "makespan": float(timeline.makespan_s),
            "busy": (timeline.busy_s / timeline.makespan_s)[self.ranks].ravel().round(4).tolist(),
            "peaks": timeline.peaks_bytes[self.ranks].ravel().astype(float).tolist(),
            "rowOffsets": _base64(self.row_offsets, "<i4"),
            "kinds": _base64(timeline.kinds[self.tasks], "<u1"),
            "chunks": _base64(timeline.chunks[self.tasks].clip(0, 255), "<u1"),
            "micropacks": _base64(np.where(of_backward, numbers[1], numbers[0]), "<i4"),
            "ofBackward": _base64(of_backward, "<u1"),
            "starts": _base64(timeline.starts_s[self.tasks], "<f4"),
            "stops": _base64(timeline.stops_s[self.tasks], "<f4"),
            "works": _base64(timeline.work_s[self.tasks], "<f4"),
            "limit": float(timeline.memory_limit_bytes),
            "memoryOffsets": _base64(memory_offsets, "<i4"),
            "memoryTimes": _base64(timeline.memory_times_s[points], "<f4"),
            "memoryBytes": _base64(timeline.memory_bytes[points], "<f4"),
            "lengths": _base64(plan.lengths, "<i4"),
            "sharers": _base64(plan.num_ranks, "<i4"),
            "passes": [shown.to_json() for shown in passes],
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shown:
    """The MicroPacks of one pass on shown ranks, renumbered."""

    packs: MicroPacks
    rank_offsets: Int32Array
    pack_ids: IntArray
    local: IntArray
    """int64 `[num_micropacks]`: the new number of each, -1 if it isn't shown."""

    @classmethod
    def of(cls, packs: MicroPacks, ranks: Int32Array) -> _Shown:
        """Return the MicroPacks of some ranks."""
        ids, offsets = _ranges(packs.rank_offsets[ranks], packs.rank_offsets[ranks + 1])
        local = np.full(max(packs.num_micropacks, 1), -1, np.int64)
        local[ids] = np.arange(len(ids))
        return cls(packs=packs, rank_offsets=offsets, pack_ids=ids, local=local)

    def numbers(self, packs: Int32Array) -> IntArray:
        """Return the new numbers of MicroPacks, -1 for those of the other pass or not shown."""
        known = (packs >= 0) & (packs < len(self.local))
        return np.where(known, self.local[np.where(known, packs, 0)], -1)

    def to_json(self) -> dict[str, str]:
        """Return the arrays as the page's script reads them."""
        packs = self.packs
        slices, offsets = _ranges(packs.slice_offsets[self.pack_ids], packs.slice_offsets[self.pack_ids + 1])
        return {
            "rankOffsets": _base64(self.rank_offsets, "<i4"),
            "offsets": _base64(offsets, "<i4"),
            "documents": _base64(packs.document_ids[slices], "<i4"),
            "starts": _base64(packs.starts[slices], "<i4"),
            "stops": _base64(packs.stops[slices], "<i4"),
        }


def drawn_ranks(timeline: Timeline, most_tasks: int = MOST_TASKS) -> DrawnRanks:
    """Choose the ranks of a timeline to draw: all, or as many of the slowest as have at most `most_tasks` tasks."""
    dp, pp = timeline.plan.mesh.dp, timeline.plan.mesh.pp
    tasks_of = np.bincount(timeline.ranks, minlength=dp)
    ranks = np.arange(dp, dtype=np.int32)
    if tasks_of.sum() > most_tasks:
        ends, computes = np.zeros(dp), timeline.kinds < KINDS
        np.maximum.at(ends, timeline.ranks[computes], timeline.stops_s[computes])
        slowest = np.argsort(-ends, kind="stable")
        fitting = int(np.searchsorted(np.cumsum(tasks_of[slowest]), most_tasks, side="right"))
        ranks = np.sort(slowest[: max(fitting, 1)]).astype(np.int32)
    index_of = np.full(dp, -1, np.int64)
    index_of[ranks] = np.arange(len(ranks))
    row_of = index_of[timeline.ranks] * pp + timeline.stages
    shown = np.flatnonzero(index_of[timeline.ranks] >= 0)
    tasks = shown[np.lexsort((timeline.starts_s[shown], row_of[shown]))]
    counts = np.bincount(row_of[shown], minlength=len(ranks) * pp)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return DrawnRanks(timeline=timeline, ranks=ranks, tasks=tasks.astype(np.int64), row_offsets=offsets)


def _ranges(starts: npt.NDArray[Any], stops: npt.NDArray[Any]) -> tuple[IntArray, Int32Array]:
    """Return the numbers of several ranges, one after another, and the offsets of the ranges."""
    counts = (stops - starts).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    numbers = (
        np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts) + np.repeat(starts.astype(np.int64), counts)
    )
    return numbers, offsets.astype(np.int32)


def _base64(values: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values).astype(dtype).tobytes()).decode("ascii")


_KEYS = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("weight", "weight gradients, if separate"),
    ("send", "sends"),
    ("gather", "parameters gathered, gradients scattered"),
    ("sync", "gradient sync"),
    ("idle", "bubble"),
)


def plan_page(comparison: PlanComparison, most_tasks: int = MOST_TASKS) -> str:
    """Return the report as one self-contained HTML page with a script."""
    planned = [row for row in comparison.methods if row.timeline is not None]
    title = f"varlen plan: {comparison.name}" if comparison.name else "varlen plan"
    parts = [
        _style(),
        _opening(comparison),
        section("Methods", _methods(comparison)),
    ]
    if planned:
        rows = [takes(row) for row in planned]
        parts.append(
            section(
                "Where time and memory go",
                _shares(planned),
                _table(TAKES, rows),
                paragraph(reading(comparison)),
            )
        )
        parts.append(section("What the fastest plan costs", facts(costs(comparison))))
    if comparison.over_steps():
        several = _table(OVER, over_steps(comparison), marks_first=False)
        parts.append(section("Over several steps", several, paragraph(over_words(comparison))))
    if comparison.alternatives:
        parts.append(
            section(
                "What other choices would give",
                paragraph("The same step, planned again by the same method with one choice changed."),
                _table(CHOICES, choices(comparison)),
            )
        )
    if planned:
        drawn = [
            drawn_ranks(row.timeline, most_tasks // len(planned))
            for row in planned
            if row.timeline is not None
        ]
        parts.append(section("Timelines", _timelines(planned, drawn)))
        tables = escape(training_table(comparison, planned[0]))
        parts.append(section("To train so, with varlen train", f"<pre>{tables}</pre>"))
    parts.append(section("What was planned", facts(_facts(comparison))))
    if planned:
        parts.append(_script(comparison, planned, drawn))
    return page(title, parts)


def _style() -> str:
    return f"<style>\n{files('varlen.report').joinpath('plan_page.css').read_text(encoding='utf-8')}</style>"


def _opening(comparison: PlanComparison) -> str:
    best = comparison.best
    warnings = "".join(paragraph(words, "warning") for words in notes(comparison))
    name = f" · {escape(comparison.name)}" if comparison.name else ""
    simulated = paragraph(simulation(comparison)) if best is not None else ""
    opening = (
        f'<header><p class="kicker"><b>varlen</b> plan{name}</p><h1>{escape(headline(comparison))}</h1>'
        f"{paragraph(setting(comparison), 'lead')}{simulated}{warnings}</header>"
    )
    return opening if best is None else opening + numbers(_numbers(comparison, best))


def _numbers(comparison: PlanComparison, best: MethodFigures) -> list[tuple[str, str, str]]:
    """Return the fastest plan's figures that matter most."""
    assert best.timeline is not None
    tokens_per_s, hours = comparison.tokens_per_s(best), comparison.gpu_hours_per_billion(best)
    price = comparison.price
    money = "" if price is None else f", which cost {significant(price * hours)} at {price:g} a GPU-hour"
    return [
        ("varlen", duration(best.step_s), f"a step, simulated, with {best.title}"),
        (
            "",
            f"{tokens_per_s / comparison.mesh.num_gpus:,.0f}",
            f"tokens a second and GPU; {tokens_per_s:,.0f} a second in all",
        ),
        ("", share(comparison.mfu(best)), "MFU: the model's FLOPs over the GPUs' peak"),
        ("", significant(hours), f"GPU-hours per 10⁹ tokens{money}"),
        (
            "",
            share(best.computing_ratio),
            f"of the GPUs' time is computing, {share(float(best.timeline.exposed_ratio))} exposed communication, "
            f"{share(float(best.timeline.bubble_ratio))} bubble; the step takes "
            f"{ratio(comparison.bound_ratio(best))} times its lower bound, {duration(comparison.lower_bound_s)}",
        ),
        (
            "",
            size(best.timeline.peak_bytes),
            f"on the fullest GPU, of {size(comparison.limit_bytes)} that a plan may use; "
            f"{size(comparison.memory_bytes - comparison.limit_bytes)} more are kept free",
        ),
    ]


def _methods(comparison: PlanComparison) -> str:
    """Return a table with a row for each method, then the methods without a plan, and why."""
    rows = [gives(comparison, row) for row in comparison.methods if row.timeline is not None]
    refused = refusals(comparison)
    return (_table(GIVES, rows) if rows else "") + (
        paragraph("Without a plan:") + facts(refused) if refused else ""
    )


def _shares(planned: Sequence[MethodFigures]) -> str:
    """Draw the step of each method, divided into computing, exposed communication and bubble."""
    rows: list[Bar] = []
    for row in planned:
        assert row.timeline is not None
        parts = (
            (row.computing_ratio, "forward"),
            (float(row.timeline.exposed_ratio), "sync"),
            (float(row.timeline.bubble_ratio), "idle"),
        )
        kind = "" if rows else "varlen"
        note = duration(row.step_s)
        rows.append(Bar(label=row.title, value=row.step_s, note=note, kind=kind, parts=parts))
    label = "seconds of a step of each method: computing, exposed communication, bubble"
    keys = (("forward", "computing"), ("sync", "exposed communication"), ("idle", "bubble"))
    key = "".join(f'<span><i class="{kind}"></i>{words}</span>' for kind, words in keys)
    return (
        f'<figure><div class="keys">{key}</div>{twice(bars(rows, WIDE, label), bars(rows, NARROW, label))}'
        + caption_of("Simulated seconds of a step, by what the GPUs do in them on average.")
        + "</figure>"
    )


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]], *, marks_first: bool = True) -> str:
    """Return a table; its first row is the fastest plan unless `marks_first` is False."""
    titles = [title.replace("-|", "").replace("|", " ") for title in columns]
    lines = [("varlen" if marks_first and not number else "", cells) for number, cells in enumerate(rows)]
    return f'<div class="wordy">{table(titles, lines)}</div>'


def _timelines(planned: Sequence[MethodFigures], drawn: Sequence[DrawnRanks]) -> str:
    """Return the buttons, the key, and the element in which the script draws."""
    choices = "".join(
        f'<label><input type="checkbox" data-plan="{escape(row.name)}"/>{escape(row.title)}</label>'
        for row in planned
    )
    looks = (
        ("left", "←", "earlier"),
        ("out", "−", "zoom out"),
        ("in", "+", "zoom in"),
        ("right", "→", "later"),
        ("whole", "whole step", "whole step"),
    )
    buttons = "".join(
        f'<button type="button" data-look="{name}" aria-label="{words}">{sign}</button>'
        for name, sign, words in looks
    )
    has = _kinds(drawn)
    keys = "".join(f'<span><i class="{kind}"></i>{words}</span>' for kind, words in _KEYS if kind in has)
    return (
        '<div class="bleed">'
        f'<div class="looks"><span class="buttons">{buttons}</span>'
        f'<label><input type="checkbox" id="by-document"/>colour by document</label>{choices}</div>'
        f'<div class="keys">{keys}</div><div id="timelines"></div></div><div id="timeline-tip" hidden></div>'
        "<noscript><p>The timelines need JavaScript; open this page in a browser that runs it.</p></noscript>"
        + caption_of(
            "A row is one stage of one data-parallel rank; all timelines have one time axis. Drag to move, "
            "hold Ctrl and turn the wheel or pinch to zoom, double-click to zoom in; arrows, + and − do the same. "
            "Shades within a task are its documents, as wide as their share of the tokens; pointing at one "
            "outlines all its slices. Below the rows: memory of every stage over time, the fullest one, or the "
            "one that is pointed at, in colour."
        )
    )


def _kinds(drawn: Sequence[DrawnRanks]) -> set[str]:
    """Return the keys that the drawn timelines need."""
    # By the timeline's kind of task, in the order of `simulate.graph.KIND_NAMES`.
    names = ("forward", "backward", "weight", "send", "send", "sync", "gather")
    present = {int(kind) for part in drawn for kind in set(part.timeline.kinds.tolist())}
    return {names[kind] for kind in present} | {"idle"}


def _script(comparison: PlanComparison, planned: Sequence[MethodFigures], drawn: Sequence[DrawnRanks]) -> str:
    """Return the data and the script that draws it."""
    other = baseline(comparison)
    plans = [
        part.to_json()
        | {
            "method": row.name,
            "title": row.title,
            "note": ". ".join(filter(None, (duration(row.step_s), part.note))),
            "shown": row in (comparison.best, comparison.ours, other),
        }
        for row, part in zip(planned, drawn)
    ]
    # Numbers, and titles of the library: none of the user's text.
    content = json.dumps({"plans": plans}, separators=(",", ":"))
    room = files("varlen.report")
    code = "".join(
        room.joinpath(name).read_text(encoding="utf-8")
        for name in ("plan_paint.js", "plan_draw.js", "plan_look.js")
    )
    return (
        f'<script type="application/json" id="timeline-data">{content}</script>\n'
        f'<script>\n"use strict";\n(() => {{\n{code}}})();\n</script>'
    )


def _facts(comparison: PlanComparison) -> list[tuple[str, str]]:
    step = comparison.documents
    rows = [
        ("model", comparison.model),
        ("GPUs", f"{comparison.mesh.num_gpus:,} of {comparison.hardware}: {mesh_words(comparison.mesh)}"),
        ("sharded over data-parallel ranks", comparison.mesh.sharding),
        (
            "step",
            f"{step.step:,} of {step.num_steps:,}: {len(step.lengths):,} documents, {step.num_tokens:,} tokens",
        ),
        ("longest document", f"{comparison.longest:,}"),
        ("capacity", f"{comparison.capacity:,}"),
        (
            "truncated",
            f"{step.truncated_documents:,} documents, {share(comparison.truncated_share)} of the tokens",
        ),
        ("rates", comparison.hardware_source),
    ]
    best = comparison.best
    if best is not None and best.plan is not None:
        plan = best.plan
        few, most = int(plan.forward.counts.min()), int(plan.forward.counts.max())
        rows.append(("MicroPacks of a rank", f"{few:,}" if few == most else f"{few:,} to {most:,}"))
        rows.append(("weight gradients apart", "yes" if plan.splits_backward else "no"))
    return rows
