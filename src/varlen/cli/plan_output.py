"""What `varlen plan` leaves behind: a table or JSON on the screen, a report, a trace, a saved plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.counts import many
from varlen.errors import PlanError, SettingError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from varlen.report.plan import PlanComparison
    from varlen.report.plan_sweep import PlanSweep

_FAR = 1.2
"""Times its lower bound from which a plan is far enough away for another mesh to be worth a look."""
_WIDEST_TP = 8
"""GPUs of a usual node."""
_OPTIONS = {"output": "-o", "trace": "--trace", "save": "--save"}


def check_outputs(outputs: dict[str, Path | None], data: list[str], *, sweep: bool) -> None:
    """Refuse files that couldn't be written, or would be written over, before anything is planned."""
    from varlen.report.page import check_writable

    taken = {Path(name).resolve(): "read" for name in data}
    for name, path in outputs.items():
        if path is not None and sweep:
            raise SettingError(
                f"--sweep prints meshes and writes no {path}; leave out {_OPTIONS[name]}, and plan the mesh that "
                "you choose with it"
            )
        if path is not None:
            whole = path.resolve()
            if whole in taken:
                raise SettingError(f"{_OPTIONS[name]} {path} is {taken[whole]} already; name another file")
            check_writable(path)
            taken[whole] = f"written by {_OPTIONS[name]}"


def show(found: PlanComparison, outputs: dict[str, Path | None], *, as_json: bool) -> None:
    """Write what was asked for, and print the figures."""
    try:
        _write(found, outputs)
    except OSError as error:
        raise SettingError(f"a file can't be written: {error}") from error
    if as_json:
        _print_json(found.to_json())
    else:
        from varlen.report.plan import plan_table

        _print(plan_table(found), _ways_on(found, outputs))
    if found.best is None:
        raise PlanError("no method has a plan for this step on this mesh; the reasons stand above")


def _write(found: PlanComparison, outputs: dict[str, Path | None]) -> None:
    """Write the files that were asked for."""
    report = outputs["output"]
    if report is not None:
        from varlen.report.page import write_page
        from varlen.report.plan_page import plan_page

        write_page(report, plan_page(found))
    best = found.best
    if best is not None and best.plan is not None and best.timeline is not None:
        if outputs["trace"] is not None:
            best.timeline.to_trace(outputs["trace"])
        if outputs["save"] is not None:
            from varlen.plan.serialize import save_plan

            save_plan(best.plan, outputs["save"])


def show_sweep(found: PlanSweep, *, as_json: bool) -> None:
    """Print the fastest meshes."""
    if as_json:
        _print_json(found.to_json())
    else:
        from varlen.report.plan_sweep import sweep_table

        _print(sweep_table(found), _next_command(found))
    if not found.best:
        raise PlanError(f"no mesh of {many(found.num_gpus, 'GPU')} holds this step; the reasons stand above")


def _print_json(content: dict[str, Any]) -> None:
    json.dump(content, sys.stdout, indent=1)
    print()


def _print(table: RenderableType, last: str) -> None:
    """Print a table, and a line on what to do next."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print(table)
    console.print(f"\n{last}", markup=False)


def _ways_on(found: PlanComparison, outputs: dict[str, Path | None]) -> str:
    """Say what was written, or what could be."""
    if found.best is None:
        report = outputs["output"]
        written = "" if report is None else f"{report} says so too; nothing else was written.\n"
        return f"{written}--sweep looks for a mesh of {many(found.mesh.num_gpus, 'GPU')} that holds the step."
    said = {
        "output": "shows the timelines",
        "trace": "holds the fastest plan's timeline, for https://ui.perfetto.dev",
        "save": "holds the fastest plan; varlen.load_plan reads it",
    }
    lines = [f"{path} {said[name]}." for name, path in outputs.items() if path is not None]
    ratio = found.bound_ratio(found.best)
    if ratio >= _FAR and found.mesh.num_gpus > 1:
        wider = ", say with more --tp" if found.mesh.tp < min(_WIDEST_TP, found.mesh.num_gpus) else ""
        lines.append(
            f"The fastest plan takes {ratio:.2f} times the lower bound of this mesh; others of "
            f"{many(found.mesh.num_gpus, 'GPU')} may come nearer{wider}."
        )
    if outputs["output"] is None:
        lines.append("-o report.html shows the timelines to zoom into; --sweep looks for a faster mesh.")
    return "\n".join(lines)


def _next_command(found: PlanSweep) -> str:
    """Name the options that plan the fastest mesh, or what could hold the step."""
    from varlen.report.plan_sweep import STATES

    if not found.best:
        if {why for why, _ in found.left_out} <= {STATES}:
            return "More GPUs may hold it, or --sharding parameters."
        return "More GPUs, a smaller --capacity or fewer --documents may hold it."
    mesh = found.best[0].mesh
    axes = ("pp", "cp", "tp", "virtual_stages")
    options = [
        f"--{axis.replace('_', '-')} {getattr(mesh, axis)}" for axis in axes if getattr(mesh, axis) > 1
    ]
    return f"To look at the fastest: --gpus {found.num_gpus} {' '.join(options)} -o report.html, without --sweep."
