"""A comparison of plans for the terminal: what came out first, then a row a method, then how to read it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varlen.report.plan_figures import MethodFigures, PlanComparison
from varlen.report.plan_words import (
    BYTES,
    UNFAIR,
    duration,
    headline,
    ratio,
    reading,
    refusals,
    setting,
    size,
    truncation,
)
from varlen.report.words import share


def plan_table(found: PlanComparison) -> RenderableType:
    """Return everything that `varlen plan` prints about one step."""
    said = (found.estimated, truncation(found), BYTES if found.are_bytes else "", found.stretched)
    notes = [note for note in said if note]
    parts: list[RenderableType] = ["", Text(headline(found), style="bold"), Text(setting(found))]
    if found.best is not None:
        parts += ["", *_unfair(found), Padding(_methods(found), (0, 0, 0, 2))]
    parts += _refusals(found)
    if notes:
        parts += ["", *(Text(note, style="yellow") for note in notes)]
    if found.best is not None:
        parts += ["", Text(reading(found), style="dim")]
    return Group(*parts)


def _unfair(found: PlanComparison) -> list[RenderableType]:
    """What is to be known before methods are compared."""
    return [Text(UNFAIR, style="yellow"), ""] if len(found.methods) > 1 else []


def _methods(found: PlanComparison) -> Table:
    """One row a method that has a plan."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", overflow="fold")
    for title in ("step", "over bound", "bubble", "exposed", "imbalance", "peak", "recompute", "planned in"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in found.methods:
        if row.timeline is not None:
            style = "bold green" if row is found.best else ""
            table.add_row(row.title, *cells(found, row), style=style)
    return table


def cells(found: PlanComparison, row: MethodFigures) -> tuple[str, ...]:
    """Return the figures of a method that has a plan, as the columns of a table."""
    assert row.timeline is not None
    kept = f"{row.recompute} + offload" if row.offload else row.recompute
    return (
        duration(row.step_s),
        ratio(found.bound_ratio(row)),
        share(float(row.timeline.bubble_ratio)),
        share(float(row.timeline.exposed_ratio)),
        ratio(float(row.timeline.imbalance)),
        size(float(row.timeline.peak_bytes)),
        kept,
        duration(row.planning_s),
    )


def _refusals(found: PlanComparison) -> list[RenderableType]:
    """Why methods have no plan: each reason once, behind the methods that have it."""
    lines: list[RenderableType] = [
        Padding(Text.assemble((titles, "bold"), f": {why}"), (0, 0, 0, 2)) for titles, why in refusals(found)
    ]
    return ["", *lines] if lines else []
