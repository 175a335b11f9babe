"""The report of a comparison of plans: a table of methods, and their timelines to zoom into, on one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from varlen.report.page import caption_of, facts, numbers, page, paragraph, section, table
from varlen.report.plan_figures import MethodFigures, PlanComparison
from varlen.report.plan_lanes import MOST_TASKS, Lanes, lanes
from varlen.report.plan_table import cells
from varlen.report.plan_words import (
    BYTES,
    UNFAIR,
    baseline,
    duration,
    headline,
    mesh_words,
    ratio,
    reading,
    refusals,
    setting,
    size,
    truncation,
)
from varlen.report.words import share

_KEYS = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("weight", "weight gradients, where they are apart"),
    ("send", "sends"),
    ("gather", "parameters gathered, gradients scattered"),
    ("sync", "gradient sync"),
    ("idle", "bubble"),
)


def plan_page(found: PlanComparison, most_tasks: int = MOST_TASKS) -> str:
    """Return the whole report as one self-contained HTML page, with a script of its own and nothing fetched.

    Args:
        found: what to show.
        most_tasks: tasks that are drawn in all; plans of more are cut down to their slowest ranks, and the page
            says so.
    """
    planned = [row for row in found.methods if row.timeline is not None]
    title = f"varlen plan: {found.name}" if found.name else "varlen plan"
    parts = [
        _style(),
        _opening(found),
        section("Methods", *_unfair(found), _methods(found), paragraph(reading(found)) if planned else ""),
    ]
    if planned:
        drawn = [
            lanes(row.timeline, most_tasks // len(planned)) for row in planned if row.timeline is not None
        ]
        parts.append(section("Timelines", _timelines(planned, drawn)))
    parts.append(section("What was planned", facts(_facts(found))))
    if planned:
        parts.append(_script(found, planned, drawn))
    return page(title, parts)


def _style() -> str:
    return f"<style>\n{files('varlen.report').joinpath('plan_page.css').read_text(encoding='utf-8')}</style>"


def _opening(found: PlanComparison) -> str:
    best = found.best
    warnings = "".join(
        paragraph(words, "warning")
        for words in (found.estimated, truncation(found), BYTES if found.are_bytes else "")
        if words
    )
    name = f" · {escape(found.name)}" if found.name else ""
    opening = (
        f'<header><p class="kicker"><b>varlen</b> plan{name}</p><h1>{escape(headline(found))}</h1>'
        f"{paragraph(setting(found), 'lead')}{warnings}</header>"
    )
    if best is None or best.timeline is None:
        return opening
    return opening + numbers(
        (
            ("varlen", duration(best.step_s), f"a step, with {best.title}"),
            ("", ratio(found.bound_ratio(best)), f"times the lower bound, {duration(found.lower_bound_s)}"),
            (
                "",
                share(float(best.timeline.bubble_ratio)),
                "of the GPUs' time is bubble, and "
                f"{share(float(best.timeline.exposed_ratio))} exposed communication",
            ),
            (
                "",
                size(float(best.timeline.peak_bytes)),
                f"on the fullest GPU, of {size(found.limit_bytes)} that a plan may use",
            ),
        )
    )


def _unfair(found: PlanComparison) -> list[str]:
    """What is to be known before methods are compared."""
    return [paragraph(UNFAIR, "warning")] if len(found.methods) > 1 and found.best is not None else []


def _methods(found: PlanComparison) -> str:
    """One row a method, then those that have no plan, and why."""
    head = ("", "step", "over bound", "bubble", "exposed", "imbalance", "peak", "recompute", "planned in")
    rows = [
        ("varlen" if row is found.best else "", (row.title, *cells(found, row)))
        for row in found.methods
        if row.timeline is not None
    ]
    refused = refusals(found)
    answered = [
        (row.title, row.plan.answered_by) for row in found.methods if row.plan and row.plan.answered_by
    ]
    return (
        (table(head, rows) if rows else "")
        + (paragraph("Without a plan:") + facts(refused) if refused else "")
        + (paragraph("The best candidate of each:") + facts(answered) if answered else "")
    )


def _timelines(planned: Sequence[MethodFigures], drawn: Sequence[Lanes]) -> str:
    """The buttons, the key, and the place where the script draws."""
    choices = "".join(
        f'<label><input type="checkbox" data-plan="{escape(row.name)}"/>{escape(row.title)}</label>'
        for row in planned
    )
    looks = (("left", "←"), ("out", "−"), ("in", "+"), ("right", "→"), ("whole", "whole step"))
    buttons = "".join(f'<button type="button" data-look="{name}">{sign}</button>' for name, sign in looks)
    has = _kinds(drawn)
    keys = "".join(f'<span><i class="{kind}"></i>{words}</span>' for kind, words in _KEYS if kind in has)
    return (
        '<div class="bleed">'
        f'<div class="looks"><span class="buttons">{buttons}</span>'
        f'<label><input type="checkbox" id="by-document"/>a colour a document</label>{choices}</div>'
        f'<div class="keys">{keys}</div><div id="timelines"></div></div><div id="timeline-tip" hidden></div>'
        "<noscript><p>The timelines are drawn by a script of this page, which this window doesn't run.</p></noscript>"
        + caption_of(
            "A row is one stage of one data-parallel rank; all timelines have one time axis. Drag to move, "
            "hold Ctrl and turn the wheel or pinch to zoom, double-click to zoom in; arrows, + and − do the same. "
            "Shades within a task are its documents, as wide as their share of the tokens; pointing at one "
            "outlines all its slices. Below the rows: memory of every stage over time, the fullest one, or the "
            "one that is pointed at, in colour."
        )
    )


def _kinds(drawn: Sequence[Lanes]) -> set[str]:
    """Return which keys the drawn timelines need."""
    names = ("forward", "backward", "weight", "send", "send", "sync", "gather", "gather")
    present = {int(kind) for part in drawn for kind in set(part.timeline.kinds.tolist())}
    return {names[kind] for kind in present} | {"idle"}


def _script(found: PlanComparison, planned: Sequence[MethodFigures], drawn: Sequence[Lanes]) -> str:
    """The data and the script that draws it."""
    other = baseline(found)
    plans = [
        part.to_json()
        | {
            "method": row.name,
            "title": row.title,
            "note": ". ".join(filter(None, (duration(row.step_s), part.said))),
            "shown": row is found.best or row is other,
        }
        for row, part in zip(planned, drawn)
    ]
    content = json.dumps(
        {"plans": plans}, separators=(",", ":")
    )  # numbers and titles of ours: no user's text
    room = files("varlen.report")
    code = "".join(
        room.joinpath(name).read_text(encoding="utf-8")
        for name in ("plan_paint.js", "plan_draw.js", "plan_look.js")
    )
    return (
        f'<script type="application/json" id="timeline-data">{content}</script>\n'
        f'<script>\n"use strict";\n(() => {{\n{code}}})();\n</script>'
    )


def _facts(found: PlanComparison) -> list[tuple[str, str]]:
    rows = [
        ("model", found.model),
        ("GPUs", f"{found.mesh.num_gpus:,} of {found.hardware}: {mesh_words(found.mesh)}"),
        ("sharded over data-parallel ranks", found.mesh.sharding),
        ("step", f"{found.step:,}: {found.num_documents:,} documents, {found.num_tokens:,} tokens"),
        ("longest document", f"{found.longest:,}"),
        ("capacity", f"{found.capacity:,}"),
        (
            "truncated",
            f"{found.truncated_documents:,} documents, {share(found.truncated_share)} of the tokens",
        ),
        ("rates", found.hardware_source),
    ]
    if found.stretched:
        rows.insert(1, ("positions", found.stretched))
    best = found.best
    if best is not None and best.plan is not None:
        plan = best.plan
        few, most = int(plan.forward.counts.min()), int(plan.forward.counts.max())
        rows.append(("MicroPacks of a rank", f"{few:,}" if few == most else f"{few:,} to {most:,}"))
        rows.append(("documents shared by ranks", f"{plan.num_merged:,}"))
        rows.append(("weight gradients apart", "yes" if plan.splits_backward else "no"))
        rows.append(("tokens a second and GPU", f"{found.tokens_per_s(best) / found.mesh.num_gpus:,.0f}"))
    return rows
