"""Options of `varlen plan` as objects: token counts, the mesh, the model, the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varlen.cli.options import print_json
from varlen.cli.progress import wide_console
from varlen.counts import many
from varlen.errors import PlanError, SettingError, SourceError
from varlen.parsed import parse_json

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.console import RenderableType

    from varlen.cost.hardware import Hardware
    from varlen.cost.model import CostModel
    from varlen.cost.shape import ModelShape
    from varlen.report.plan import PlanComparison
    from varlen.report.plan_sweep import PlanSweep
    from varlen.step_plan import Mesh, Sharding
    from varlen.store.lengths import Lengths


def mesh_of(
    *, gpus: int | None, dp: int | None, pp: int, cp: int, tp: int, virtual_stages: int, sharding: Sharding
) -> Mesh:
    """Return the mesh: data-parallel ranks are what the other axes leave of the GPUs."""
    from varlen.step_plan import Mesh

    rest = prod(max(axis, 1) for axis in (pp, cp, tp))
    if gpus is not None and gpus < 1:
        raise SettingError(f"--gpus must be at least 1; got {gpus}")
    total = gpus if gpus is not None else rest * dp if dp is not None else max(8, rest)
    words = f"pp {pp} x cp {cp} x tp {tp} = {rest:,}"
    if dp is not None and dp * rest != total:
        raise SettingError(
            f"dp {dp} x {words.replace(f'= {rest:,}', f'= {dp * rest:,}')} GPUs, but --gpus says {total:,}; "
            "leave out --gpus or --dp"
        )
    if total % rest:
        below, above = total - total % rest, total - total % rest + rest
        near = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise SettingError(
            f"{total:,} GPUs can't be divided into pipelines of {words} GPUs; {near} GPUs can, or axes whose "
            f"product divides {total:,}"
        )
    axes = {"pp": pp, "cp": cp, "tp": tp, "virtual_stages": virtual_stages}
    return Mesh(dp=total // rest, sharding=sharding, **axes)


def model_of(words: str) -> ModelShape:
    """Return the shape of a model: by its name, or from its configuration."""
    from varlen.cost.shape import ModelShape

    path = Path(words)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if path.suffix == ".json" or "/" in words:
            raise SettingError(f"--model {words}: there is no configuration at {path}")
        return ModelShape.named(words)
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"--model {words}: {path} can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingError(f"--model {words}: {path} is no configuration, which is an object of settings")
    return ModelShape.from_config(config)


def hardware_of(words: str) -> Hardware:
    """Return hardware: by its name, or as `varlen plan --calibrate` measured it."""
    from varlen.cost.hardware import Hardware

    if Path(words).is_file():
        from varlen.cost.hardware import load_hardware

        return load_hardware(words)
    if Path(words).suffix == ".json":
        raise SettingError(
            f"--hardware {words}: there is no such file; varlen plan --calibrate --save makes one"
        )
    return Hardware.named(words)


# Lengths that were counted before: an `.npy` or `.npz` file, or a text of one whole number per line.

_FORMS = "lengths are read from an .npz with `lengths`, an .npy, or a .txt of one number a line"
_MOST_DIGITS = 18
"""Of a number that int64 holds."""
_MOST_OF_NAMES = 10_000
"""Characters of a table's first line in which a column of lengths is looked for."""


def counted(data: Sequence[str]) -> Lengths | None:
    """Return the lengths that one file holds, or None where arguments name something else."""
    if len(data) != 1:
        return None
    path = Path(data[0])
    if path.suffix in (".npz", ".npy") and not path.exists():
        raise SourceError(f"{path} does not exist; {_FORMS}")
    if not path.is_file():
        return None
    if path.suffix == ".npz":
        return _stored(path)
    if path.suffix in (".csv", ".tsv"):
        _check_no_column(path)
    return _array(path) if path.suffix == ".npy" else _lines(path) if path.suffix == ".txt" else None


def _check_no_column(path: Path) -> None:
    """Refuse a table of lengths, which would be read as documents without a text."""
    first = ""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline(_MOST_OF_NAMES)
    names = {name.strip().strip('"\ufeff') for name in first.replace("\t", ",").split(",")}
    if names & {"length", "lengths"} and not names & {"text", "messages", "input_ids"}:
        raise SourceError(f"{path} has a column of lengths, and {_FORMS}; write the column as a .txt")


def _array(path: Path) -> Lengths:
    """Read an array of numpy's."""
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} is not a readable .npy file: {error}") from error
    return _checked(path, found)


def _stored(path: Path) -> Lengths | None:
    """Read arrays of numpy's by name; None where they are documents."""
    import zipfile
    import zlib

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            if "lengths" in arrays.files:
                return _checked(path, arrays["lengths"])
            names = arrays.files
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SourceError(f"{path} is not a readable .npz file: {error}") from error
    if {"input_ids", "ids", "tokens"} & set(names):
        return None
    raise SourceError(
        f"{path} must hold lengths as `lengths`, or documents as `input_ids` and `offsets`; it holds "
        f"{', '.join(f'`{name}`' for name in names[:5]) or 'nothing'}"
    )


def _checked(path: Path, found: npt.NDArray[Any]) -> Lengths:
    """Take an array as lengths."""
    import numpy as np

    from varlen.store.lengths import Lengths

    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise SourceError(
            f"{path} must hold lengths, a row of whole numbers from 0; it holds {found.dtype} of shape {found.shape}"
        )
    below = np.flatnonzero(found < 0)
    if below.size:
        raise SourceError(
            f"{path} must hold lengths from 0; number {below[0]:,} is {found[below[0]]:,} ({below.size:,} of "
            f"{found.size:,} are below 0)"
        )
    return Lengths(lengths=found.astype(np.int64), targets=None, excerpts={}, skipped=(), are_counted=True)


def _lines(path: Path) -> Lengths | None:
    """Read a text of numbers; None where most lines are something else, and the text a document."""
    import numpy as np

    from varlen.store.lengths import Lengths

    try:
        with path.open(encoding="ascii") as file:
            lines = [(number, line.strip()) for number, line in enumerate(file, 1) if line.strip()]
    except UnicodeDecodeError:
        return None
    wrong = [(number, words) for number, words in lines if not words.isdigit() or len(words) > _MOST_DIGITS]
    if not lines or 2 * len(wrong) > len(lines):
        return None
    if wrong:
        number, words = wrong[0]
        raise SourceError(
            f"{path} holds a length a line, but line {number:,} is {words[:40]!r}, no whole number from 0 "
            f"({len(wrong):,} of {len(lines):,} lines are none); mend or remove them, or give a document as .jsonl"
        )
    found = np.array([int(words) for _, words in lines], np.int64)
    return Lengths(lengths=found, targets=None, excerpts={}, skipped=(), are_counted=True)


# What `varlen plan` leaves behind: a table or JSON on the screen, a report, a trace, a saved plan.

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


def show(found: PlanComparison, outputs: dict[str, Path | None], cost: CostModel, *, as_json: bool) -> None:
    """Write what was asked for, and print the figures."""
    try:
        _write(found, outputs)
    except OSError as error:
        raise SettingError(f"a file can't be written: {error}") from error
    if as_json:
        print_json(found.to_json())
    else:
        from varlen.report.plan_table import plan_table

        _print(plan_table(found), _ways_on(found, outputs, cost))
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
        print_json(found.to_json())
    else:
        from varlen.report.plan_sweep import sweep_table

        _print(sweep_table(found), _next_command(found))
    if not found.best:
        raise PlanError(f"no mesh of {many(found.num_gpus, 'GPU')} holds this step; the reasons stand above")


def _print(table: RenderableType, last: str) -> None:
    """Print a table, and a line on what to do next."""
    console = wide_console()
    console.print(table)
    console.print(f"\n{last}", markup=False)


def _ways_on(found: PlanComparison, outputs: dict[str, Path | None], cost: CostModel) -> str:
    """Return the sentences below the table: which files were written, or which options to try next."""
    if found.best is None:
        report = outputs["output"]
        written = "" if report is None else f"{report} says so too; nothing else was written.\n"
        return written + _what_may_hold(found.mesh, cost)
    contents = {
        "output": "shows the timelines",
        "trace": "holds the fastest plan's timeline, for https://ui.perfetto.dev",
        "save": "holds the fastest plan; varlen.load_plan reads it",
    }
    lines = [f"{path} {contents[name]}." for name, path in outputs.items() if path is not None]
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


def _what_may_hold(mesh: Mesh, cost: CostModel) -> str:
    """Name what may hold a step that has no plan on a mesh: another one, if any has room for the model's states."""
    from varlen.report.plan_sweep import may_hold

    if mesh.num_gpus > 1 and may_hold(cost, mesh.num_gpus, mesh.sharding):
        return f"--sweep looks for a mesh of {many(mesh.num_gpus, 'GPU')} that holds the step."
    if mesh.num_gpus > 1 and mesh.sharding != "parameters":
        return f"No mesh of {mesh.num_gpus:,} GPUs holds the model's states: {_MORE_GPUS_OR_SHARDING}"
    return _MORE_GPUS


_MORE_GPUS = "More GPUs, a smaller --capacity or fewer --documents may hold it."
_MORE_GPUS_OR_SHARDING = "more GPUs may hold it, or --sharding parameters."


def _next_command(found: PlanSweep) -> str:
    """Name the options that plan the fastest mesh, or what could hold the step."""
    from varlen.report.plan_sweep import STATES

    if not found.best:
        if {why for why, _ in found.left_out} <= {STATES}:
            return _MORE_GPUS_OR_SHARDING.capitalize()
        return _MORE_GPUS
    mesh = found.best[0].mesh
    axes = ("pp", "cp", "tp", "virtual_stages")
    options = [
        f"--{axis.replace('_', '-')} {getattr(mesh, axis)}" for axis in axes if getattr(mesh, axis) > 1
    ]
    if len({swept.documents.capacity for swept in found.best}) > 1:
        options.append(f"--capacity {found.best[0].documents.capacity}")
    return f"To look at the fastest: this command with {' '.join([*options, '-o report.html'])} in place of --sweep."
