"""`varlen plan --calibrate`: what this machine's kernels take, and how well that predicts what wasn't measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from varlen.cli.extras import require_training
from varlen.errors import SettingError

if TYPE_CHECKING:
    from rich.table import Table

    from varlen.cost.shape import ModelShape
    from varlen.runtime.calibrate import Calibration


def calibrated(
    data: list[str] | None, model: str, tp: int, seconds: float, *, save: Path | None, as_json: bool
) -> None:
    """Measure, print predicted beside measured seconds, and keep the rates.

    Args:
        data: as given; there must be none.
        model: as given.
        tp: GPUs that share every layer: the share of one is measured.
        seconds: to measure for.
        save: file for the rates.
        as_json: print JSON.

    Raises:
        SettingError: data was named, or settings out of range.
        MissingExtraError: torch isn't installed.
    """
    if data:
        raise SettingError(
            f"--calibrate measures and plans nothing; leave out {data[0]}, and plan it with --hardware afterwards"
        )
    if not 0 < seconds < float("inf"):
        raise SettingError(f"--seconds must be above 0; got {seconds:g}")
    from varlen.cli.job import model_of
    from varlen.cli.progress import progress
    from varlen.report.page import check_writable

    if save is not None:
        check_writable(save)
    shape = share_of(model_of(model), tp)
    require_training("plan --calibrate", "runs a model's kernels")
    from varlen.cost.saved import save_hardware
    from varlen.runtime.calibrate import calibrate

    with progress() as on_progress:
        found = calibrate(
            shape,
            budget_s=seconds,
            progress=lambda part: on_progress(round(100 * part), 100, "measuring kernels"),
        )
    if save is not None:
        save_hardware(found.hardware, save)
    if as_json:
        json.dump(_as_json(found), sys.stdout, indent=1)
        print()
        return
    _print(found, save)


def share_of(model: ModelShape, tp: int) -> ModelShape:
    """Return the share of a model that one tensor-parallel GPU computes.

    Args:
        model: all of it.
        tp: GPUs that share every layer.

    Raises:
        SettingError: they don't divide its heads.
    """
    from varlen.cost.check import check_mesh
    from varlen.step_plan import Mesh

    if tp == 1:
        return model
    check_mesh(model, Mesh(tp=tp))
    widths = {name: getattr(model, name) // tp for name in ("ffn", "expert_ffn", "shared_ffn")}
    return replace(model, heads=model.heads // tp, kv_heads=max(model.kv_heads // tp, 1), **widths)


def _as_json(found: Calibration) -> dict[str, object]:
    return {
        "hardware": found.hardware.name,
        "source": found.hardware.source,
        "rounds": found.rounds,
        "attention_mape": found.mape_attention,
        "layer_mape": found.mape_gemm,
        "repeat_mape": found.repeat_mape,
        "held_out": found.table(),
    }


def _print(found: Calibration, save: Path | None) -> None:
    """Print predicted beside measured seconds, and what the errors are."""
    from rich.console import Console
    from rich.padding import Padding

    from varlen.report.words import share

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print(
        f"\nHeld-out shapes are predicted within {share(found.mape_attention)} (attention) and "
        f"{share(found.mape_gemm)} (the rest of a layer).",
        style="bold",
    )
    console.print(f"{found.hardware.source}\n", markup=False)
    console.print(Padding(_held_out(found), (0, 0, 0, 2)))
    console.print(
        "\nMean absolute errors of shapes that the rates were not fitted to. One half of the rounds differs from the "
        f"other by {share(found.repeat_mape)}: less than that nothing can be predicted on this machine now.",
        style="dim",
    )
    if save is None:
        console.print("\n--save hardware.json keeps the rates, for --hardware hardware.json.", markup=False)
    else:
        console.print(f"\n{save} holds the rates, for --hardware {save}.", markup=False)


def _held_out(found: Calibration) -> Table:
    """One row a shape and pass."""
    from rich.table import Table

    from varlen.report.plan_words import duration

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for title in ("rows", "keys", "predicted", "measured", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in found.held_out:
        table.add_row(
            f"{row.kind} {'backward' if row.backward else 'forward'}",
            f"{row.rows:,}",
            f"{row.keys:,}" if row.keys else "",
            duration(row.predicted_s),
            duration(row.measured_s),
            f"{100 * row.error:+.1f} %",
        )
    return table
