"""`varlen train`: train a causal model on packed documents, and go on exactly where it stopped."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varlen.cli.extras import require_training
from varlen.errors import SettingError

if TYPE_CHECKING:
    from varlen.train.summary import Totals, TrainSummary


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.toml", help="What to train, on what, how and for how long.", show_default=False
        ),
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(
            "--init",
            metavar="FILE",
            help="Write a commented example configuration there, and stop.",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="TABLE.KEY=VALUE",
            help="Put a value over the configuration's.  Repeatable.",
            show_default=False,
        ),
    ] = None,
    allow_changed: Annotated[
        bool,
        typer.Option(
            "--allow-changed",
            help="Go on from a checkpoint of another model, tokenizer, data, capacity, batch, seed or precision.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary as one JSON object at the end.")
    ] = False,
) -> None:
    """Train a causal language model on packed documents.

    Documents are packed, and kept apart in the model. Checkpoints hold weights, optimizer and the place in the data
    in one; the same command goes on from the newest, on as many processes as you like, and at the same number of
    processes a CPU run ends with the very same weights as if it had never been stopped. Writes checkpoints,
    [bold]metrics.jsonl[/] and the trained model into the configuration's [bold]run.output[/].

    The configuration's table of plans ([bold]--set plan.pp=1[/], or its commented lines in the example) runs steps in
    slices: documents far longer than fit otherwise, work balanced over processes, and pipelines of stages.

    [bold]Example:[/]  varlen train --init config.toml

    [bold]Then:[/]  varlen train config.toml --set run.steps=100, or
    torchrun --standalone --nproc-per-node 2 -m varlen train config.toml
    """
    from varlen.train.config import read_config
    from varlen.train.example import write_example

    check_asked(config, init, changes or [])
    if init is not None:
        write_example(init)
        print(f"{init} is written. Set its data.source, then:  varlen train {init}")
        return
    assert config is not None, "it was checked"
    settings = read_config(config, changes or [])
    require_training("train")
    from varlen.cli.training import watching
    from varlen.train.trainer import train as run

    with watching(settings.log.every) as watcher:
        summary = run(settings, watcher, allow_changed=allow_changed)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        json.dump(summary.to_json(), sys.stdout, indent=1)
        print()
    else:
        _print_summary(summary)


def check_asked(config: Path | None, init: Path | None, changes: list[str]) -> None:
    """Require a configuration to train, or a file to write, and not both; arguments as given.

    Raises:
        SettingError: neither, or both.
    """
    if init is not None and (config is not None or changes):
        raise SettingError("--init writes an example and trains nothing; leave everything else out")
    if init is None and config is None:
        raise SettingError("name a configuration; varlen train --init config.toml writes an example")


def _print_summary(summary: TrainSummary) -> None:
    """Say what was trained, how fast, and where it is."""
    totals, plan = summary.totals, summary.plan
    if totals.steps == 0:
        print(f"{summary.checkpoint} was finished already, {summary.steps:,} steps; {_to_go_on(summary)}")
    else:
        since = f", {totals.steps:,} of them now" if plan.resumed_from else ""
        print(
            f"{summary.steps:,} steps{since}; {summary.total_tokens:,} tokens; the last loss: {totals.loss:.4f}"
        )
        share = 100 * totals.data_wait_s / totals.seconds if totals.seconds else 0.0
        print(
            f"  {totals.tokens_per_s:,.0f} effective tokens/s; {share:.2f} % of the time waiting for data, after the "
            f"first batch ({totals.first_batch_s:.1f} s)"
        )
        if plan.plans is not None:
            print(f"  {_plan_words(totals)}")
        if plan.steps is not None and summary.steps < plan.steps:
            print(f"  the data ended at step {summary.steps:,} of {plan.steps:,}; {_to_go_on(summary)}")
    exposed = summary.exposed
    if exposed is not None:
        stall = f"{100 * exposed.stall:.2f} %" if exposed.stall > 0 else "none that stands out from the noise"
        print(
            f"  exposed data time: {stall} ({exposed.steps:,} steps took {exposed.real_s:.3f} s, and "
            f"{exposed.cached_s:.3f} s again from memory)"
        )
    print(f"  model: {summary.model_folder}   steps: {summary.metrics}   checkpoint: {summary.checkpoint}")


def _plan_words(totals: Totals) -> str:
    """Say what plans cost."""
    share = 100 * totals.plan_wait_s / totals.seconds if totals.seconds else 0.0
    quick = f"; {totals.quick_plans:,} of {totals.steps:,} weren't there in time, and steps had a quick one"
    return (
        f"{share:.2f} % of the time waiting for plans, after the first one ({totals.first_plan_s:.1f} s)"
        f"{quick if totals.quick_plans else ''}"
    )


def _to_go_on(summary: TrainSummary) -> str:
    """Say which setting ends the run here."""
    steps = summary.plan.steps
    is_short = steps is None or summary.steps < steps
    return f"raise run.{'epochs' if is_short else 'steps'} to go on"
