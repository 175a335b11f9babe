"""`varlen plan --calibrate`: what this machine's kernels take, and how well that predicts what wasn't measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from varlen.cli.options import print_json
from varlen.cli.progress import require_training, wide_console
from varlen.errors import SettingError
from varlen.report.page import share

if TYPE_CHECKING:
    from rich.table import Table

    from varlen.cost.shape import ModelShape
    from varlen.runtime.calibrate import Calibration


def check_no_others(data: list[str] | None, others: dict[str, object]) -> None:
    """Refuse arguments that only planning uses."""
    named = [*(data or ()), *(option for option, given in others.items() if given is not None)]
    if named:
        raise SettingError(
            f"--calibrate only measures, and doesn't plan; leave out {named[0]}, and plan with --hardware afterwards"
        )


def calibrated(model: str, tp: int, seconds: float, *, save: Path | None, as_json: bool) -> None:
    """Measure, print predicted beside measured seconds, and keep the rates."""
    if not 0 < seconds < float("inf"):
        raise SettingError(f"--seconds must be above 0 and finite; got {seconds:g}")
    from varlen.cli.plan_job import model_of
    from varlen.cli.progress import progress
    from varlen.report.page import check_writable

    if save is not None:
        check_writable(save)
    shape = share_of(model_of(model), tp)
    require_training("plan --calibrate", "runs a model's kernels")
    from varlen.cost.hardware import save_hardware
    from varlen.runtime.calibrate import calibrate

    with progress() as on_progress:
        found = calibrate(
            shape,
            budget_s=seconds,
            progress=lambda part: on_progress(round(100 * part), 100, "measuring kernels"),
            on_least=lambda least_s: _print_least(model, tp, seconds, least_s),
        )
    if save is not None:
        save_hardware(found.hardware, save)
    if as_json:
        print_json(_as_json(found))
        return
    _print(found, save)


def _print_least(model: str, tp: int, seconds: float, least_s: float) -> None:
    """Print that the smallest set of shapes takes longer than was asked for."""
    from varlen.report.page import duration

    print(
        f"varlen: the smallest set of shapes to which rates of {model} can be fitted takes about "
        f"{duration(least_s)} here, more than --seconds {seconds:g}; a larger --tp than {tp} measures a smaller "
        "share of its layers",
        file=sys.stderr,
    )


def share_of(model: ModelShape, tp: int) -> ModelShape:
    """Return the share of a model that one tensor-parallel GPU computes."""
    from varlen.cost.shape import check_mesh
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
        "warning": unsteady(found),
        "held_out": found.table(),
    }


def _print(found: Calibration, save: Path | None) -> None:
    """Print predicted and measured seconds, and the errors."""
    from rich.padding import Padding

    console = wide_console()
    console.print(
        f"\nHeld-out shapes are predicted within {_joined(share(found.mape_attention))} (attention) and "
        f"{_joined(share(found.mape_gemm))} (the rest of a layer).",
        style="bold",
    )
    source = found.hardware.source
    console.print(f"{source[:1].upper()}{source[1:]}.\n", markup=False)
    console.print(Padding(_held_out(found), (0, 0, 0, 2)))
    console.print(
        "\nMean absolute errors, of shapes that the rates weren't fitted to. The machine itself varies, too: "
        f"the two halves of the rounds differ by {_joined(share(found.repeat_mape))}.",
        style="dim",
    )
    console.print(_reach(found), style="dim")
    if words := unsteady(found):
        console.print(f"\n{words}", style="yellow", markup=False)
    if save is None:
        console.print("\n--save hardware.json keeps the rates, for --hardware hardware.json.", markup=False)
    else:
        console.print(f"\n{save} holds the rates, for --hardware {save}.", markup=False)


_STEADY = 0.2
"""Difference of the two halves of the rounds up to which rates are worth planning with."""


def unsteady(found: Calibration) -> str:
    """Return a warning if the machine varied so much that its rates say little; else ""."""
    if found.repeat_mape <= _STEADY:
        return ""
    return (
        f"Don't plan with these rates: the two halves of the rounds differ by {_joined(share(found.repeat_mape))}. "
        "Measure again while nothing else runs on this machine, with more --seconds."
    )


def _joined(words: str) -> str:
    """Keep a number and its unit on one line."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def _reach(found: Calibration) -> str:
    """Return the largest rows and keys that were measured, and what holds beyond them."""
    attention, gemm = found.hardware.attention[0], found.hardware.gemm
    return (
        f"Measured up to {attention.query_rows[-1]:,.0f} rows and {attention.key_lengths[-1]:,.0f} keys of "
        f"attention, and {gemm.rows[-1]:,.0f} rows of a layer; beyond that, the last measured rates are "
        "used. More --seconds reach further."
    )


def _held_out(found: Calibration) -> Table:
    """Return a table with two rows per shape, one per pass."""
    from rich.table import Table

    from varlen.report.page import duration

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for title in ("rows", "keys"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    for title in ("predicted", "measured", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in found.held_out:
        keys = f"{row.keys:,}" if row.keys else ""
        table.add_row(
            *(("", "", "", "backward") if row.backward else (row.kind, f"{row.rows:,}", keys, "forward")),
            duration(row.predicted_s),
            duration(row.measured_s),
            f"{100 * row.error:+.1f} %",
        )
    return table
