"""A sweep over meshes for the terminal: the ten fastest, and why the others aren't among them."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varlen.counts import many
from varlen.report.plan_figures import TITLES
from varlen.report.plan_sweep import PlanSweep
from varlen.report.plan_words import BYTES, duration, mesh_words, ratio, size
from varlen.report.words import share


def sweep_table(found: PlanSweep) -> RenderableType:
    """Return everything that `varlen plan --sweep` prints."""
    job = f"{found.model} on {many(found.num_gpus, 'GPU')} of {found.hardware}, {TITLES[found.method]}"
    parts: list[RenderableType] = ["", Text(sweep_headline(found), style="bold"), Text(job)]
    if found.best:
        parts += ["", Padding(_meshes(found), (0, 0, 0, 2))]
    count = many(found.num_meshes, "mesh", "meshes")
    parts += ["", Text(f"Of {count}, not among these:" if found.best else f"Of {count}:", style="dim")]
    parts += [Text(f"  {count:,}: {why}", style="dim") for why, count in found.left_out]
    notes = (BYTES if found.are_bytes else "", found.stretched)
    parts += [Text(note, style="yellow") for note in notes if note]
    return Group(*parts)


def sweep_headline(found: PlanSweep) -> str:
    """Say in one sentence what came out."""
    if not found.best:
        return "No mesh of these GPUs holds this step."
    first = found.best[0]
    rate = first.tokens_per_s / found.num_gpus
    return f"{mesh_words(first.mesh)} is the fastest: {rate:,.0f} tokens a second and GPU."


def _meshes(found: PlanSweep) -> Table:
    """One row a mesh."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    titles = (
        "dp",
        "pp",
        "cp",
        "tp",
        "chunks",
        "capacity",
        "step",
        "tokens/s/GPU",
        "over bound",
        "bubble",
        "exposed",
        "peak",
        "recompute",
    )
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for place, swept in enumerate(found.best):
        mesh, row = swept.mesh, swept.figures
        assert row.timeline is not None
        table.add_row(
            *(str(axis) for axis in (mesh.dp, mesh.pp, mesh.cp, mesh.tp, mesh.virtual_stages)),
            f"{swept.documents.capacity:,}",
            duration(row.step_s),
            f"{swept.tokens_per_s / found.num_gpus:,.0f}",
            ratio(row.step_s / swept.bound_s),
            share(float(row.timeline.bubble_ratio)),
            share(float(row.timeline.exposed_ratio)),
            size(float(row.timeline.peak_bytes)),
            f"{row.recompute} + offload" if row.offload else row.recompute,
            style="bold green" if place == 0 else "",
        )
    return table
