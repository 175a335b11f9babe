"""`varlen train`: train a causal model on packed documents, and go on exactly where it stopped."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, Task, TaskID

from varlen.cli.options import print_json
from varlen.cli.progress import FittedLine, Part, clock, require_training
from varlen.counts import as_size, many
from varlen.errors import SettingError
from varlen.signals import Stopped
from varlen.train.callbacks import Callback, RunOverview, Totals, TrainSummary

if TYPE_CHECKING:
    from varlen.train.evaluate import Evaluation, LengthLoss
    from varlen.train.metrics import StepMetrics
    from varlen.train.settings import TrainSettings

_NOTHING = "nothing was written"
_NO_BREAK = "\u00a0"
_ENDS = {"data": "the data ended", "patience": "the loss of evaluations fell no more, and training ended"}


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
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings with their values, and stop.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Read data and model, plan steps, print them and memory, and stop: nothing is trained.",
        ),
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", help="Of --dry-run: how many processes would train.", min=1)
    ] = 1,
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            metavar="GB",
            help="Of --dry-run: the memory of each device, if it isn't that of this machine.",
            show_default=False,
        ),
    ] = None,
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
    from varlen.train.configuration import as_toml, read_config, write_example

    check_asked(config, init, changes or [])
    if init is not None:
        write_example(init)
        print(f"{init} is written. Set its data.source, then:  varlen train {init}")
        return
    assert config is not None, "it was checked"
    settings = read_config(config, changes or [])
    if processes > 1 and not dry_run:
        raise SettingError(f"--processes {processes} is of --dry-run; torchrun starts the processes of a run")
    if memory is not None and not (dry_run and memory > 0):
        raise SettingError(f"--memory {memory:g} is of --dry-run, and above 0 GB")
    if print_config:
        print(as_toml(settings), end="")
        return
    require_training("train")
    if dry_run:
        from varlen.train.dry_run import forecast

        with _writing_nothing():
            found = forecast(
                settings,
                processes,
                lambda sentence: print(sentence, file=sys.stderr),
                memory_bytes=None if memory is None else 1e9 * memory,
            )
        print_json(found.to_json()) if as_json else print(found.words())
        return
    from varlen.train.trainer import train as run

    with run_display(settings.log.every) as display:
        summary = run(settings, display, allow_changed=allow_changed)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print_json(summary.to_json())
    else:
        _print_summary(summary, settings)


@contextmanager
def _writing_nothing() -> Iterator[None]:
    """Let an interrupt say that nothing was written."""
    try:
        yield
    except Stopped as error:
        raise Stopped(error.number, _NOTHING) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_NOTHING) from None


def check_asked(config: Path | None, init: Path | None, changes: list[str]) -> None:
    """Require a configuration to train, or a file to write, and not both; arguments as given."""
    if init is not None and (config is not None or changes):
        raise SettingError("--init writes an example and trains nothing; leave everything else out")
    if init is None and config is None:
        raise SettingError("name a configuration; varlen train --init config.toml writes an example")


def _print_summary(summary: TrainSummary, settings: TrainSettings) -> None:
    """Print steps, tokens, speed and waiting time of a finished run, and where its results are."""
    totals, overview = summary.totals, summary.overview
    to_go_on = _to_go_on(summary, settings)
    if totals.steps == 0:
        print(f"{summary.checkpoint} was finished already, {summary.steps:,} steps; {to_go_on}")
    else:
        since = f", {totals.steps:,} of them now" if overview.resumed_from else ""
        print(
            f"{summary.steps:,} steps{since}; {summary.total_tokens:,} tokens; the last loss: {totals.loss:.4f}"
        )
        share = 100 * totals.data_wait_s / totals.seconds if totals.seconds else 0.0
        print(
            f"  {totals.tokens_per_s:,.0f} effective tokens/s; {share:.2f} % of the time waiting for data, after the "
            f"first batch ({totals.first_batch_s:.1f} s)"
        )
        if overview.plans is not None:
            print(f"  {_plan_words(totals)}")
        if overview.steps is not None and summary.steps < overview.steps:
            ended = f"{_ENDS[summary.ended_by]} at step {summary.steps:,} of {overview.steps:,}"
            print(f"  {ended}; {to_go_on}")
    if summary.best is not None:
        print(
            f"  the lowest loss of an evaluation: {summary.best.loss:.4f}, after step {summary.best.step:,}"
        )
    exposed = summary.exposed
    if exposed is not None:
        stall = f"{100 * exposed.stall:.2f} %" if exposed.stall > 0 else "none that stands out from the noise"
        print(
            f"  exposed data time: {stall} ({exposed.steps:,} steps took {exposed.real_s:.3f} s, and "
            f"{exposed.cached_s:.3f} s again from memory)"
        )
    print(f"  model: {summary.model_folder}   steps: {summary.metrics}   checkpoint: {summary.checkpoint}")


def _plan_words(totals: Totals) -> str:
    """Return the share of time spent waiting for plans, and the number of quick plans."""
    share = 100 * totals.plan_wait_s / totals.seconds if totals.seconds else 0.0
    quick = f"; {totals.quick_plans:,} of {totals.steps:,} weren't ready, and quick plans were used instead"
    return (
        f"{share:.2f} % of the time waiting for plans, after the first one ({totals.first_plan_s:.1f} s)"
        f"{quick if totals.quick_plans else ''}"
    )


def _to_go_on(summary: TrainSummary, settings: TrainSettings) -> str:
    """Return which setting to raise so that the run continues: the one that ended it."""
    if summary.ended_by == "patience":
        return "raise eval.patience to go on"
    steps = settings.run.steps
    return f"raise run.{'epochs' if steps is None or summary.steps < steps else 'steps'} to go on"


# What a run shows on standard error: a live line on a terminal, a line every few steps in a log.


@contextmanager
def run_display(every: int) -> Iterator[Callback]:
    """Yield what displays a run: a live bar on a terminal, or a line every few steps elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield Lines(console, every)
        return
    line = FittedLine(console, live_parts, step_parts)
    with Progress(line, console=console, transient=True) as bar:
        yield Live(console, bar)


def overview_words(run: RunOverview) -> str:
    """Return a line on the run: model, precision, processes, attention or plans, and steps."""
    processes = "1 process" if run.world_size == 1 else f"{run.world_size:,} processes ({run.parallel})"
    steps = "to the end of the data" if run.steps is None else f"{run.steps:,} steps"
    trained = f" ({run.num_trained:,} trained)" if run.num_trained < run.num_parameters else ""
    since = f", going on after step {run.resumed_from:,}" if run.resumed_from else ""
    fused = run.cross_entropy not in (None, "torch")
    how = f'attention "{run.attention}"' if run.plans is None else f"in slices by plans: {run.plans}"
    how += f', cross-entropy "{run.cross_entropy}"' if fused else ""
    return (
        f"{run.model}, {run.num_parameters:,} parameters{trained}, {run.precision} on {processes} of {run.device}, "
        f"{how}; {steps}{since}"
    )


def step_words(metrics: StepMetrics) -> str:
    """Return a step's loss, tokens per second, fill, and share of time spent waiting for data."""
    waiting = 100 * metrics.data_wait_s / metrics.step_s if metrics.step_s else 0.0
    mfu = "" if metrics.mfu is None else f"  MFU {100 * metrics.mfu:.1f} %"
    memory = "" if metrics.peak_bytes is None else f"  {as_size(metrics.peak_bytes)}"
    return (
        f"loss {metrics.loss:.4f}  lr {metrics.learning_rate:.2g}  {metrics.tokens_per_s:,.0f} tokens/s{mfu}{memory}"
        f"  {100 * metrics.fill:.1f} % full  {waiting:.1f} % waiting"
    )


def evaluation_words(evaluation: Evaluation) -> str:
    """Return the losses of an evaluation: of each set, and by length of documents where that differs."""
    best = " (the lowest so far)" if evaluation.is_best else ""
    step = f"after step {evaluation.step:,}" if evaluation.step else "before the first step"
    lines = [f"evaluation {step}: loss {evaluation.loss:.4f}{best}, {evaluation.seconds:.1f} s"]
    for name, found in evaluation.sets.items():
        lines.append(f"  {name}: {found.loss:.4f} over {many(found.documents, 'document')}")
        parts = [part for part in found.by_length if part.loss is not None]
        if len(parts) > 1:
            by_length = (f"{length_words(part)} {part.loss:.4f}".replace(" ", _NO_BREAK) for part in parts)
            lines.append(f"    by tokens: {', '.join(by_length)}")
    return "\n".join(lines)


def length_words(part: LengthLoss) -> str:
    """Return the lengths of a part of a set's documents."""
    if part.up_to is None:
        return f"over {part.above:,}:"
    return f"up to {part.up_to:,}:" if not part.above else f"{part.above + 1:,} to {part.up_to:,}:"


def wrapped(text: str, width: int) -> str:
    """Return text in lines of a width, broken at spaces, the rest of a line indented."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines).replace(_NO_BREAK, " ")


class Lines(Callback):
    """Writes a line every few steps."""

    may_stop = False

    def __init__(self, console: Console, every: int) -> None:
        """Take where to write, and the steps between two lines."""
        self._console, self._every, self._steps = console, every, 0

    def on_begin(self, overview: RunOverview) -> None:
        """Print the overview of the run."""
        self.on_note(overview_words(overview))
        self._steps, self._last = overview.resumed_from, overview.steps

    def on_step(self, metrics: StepMetrics) -> None:
        """Print the metrics of the first and last step, and of every n-th."""
        is_first, self._steps = metrics.step == self._steps + 1, -2
        if is_first or metrics.step % self._every == 0 or metrics.step == self._last:
            self.on_note(f"step {metrics.step:,}  {step_words(metrics)}")

    def on_evaluate(self, evaluation: Evaluation) -> None:
        """Print the losses of an evaluation."""
        self.on_note(evaluation_words(evaluation).replace(_NO_BREAK, " "))

    def on_note(self, sentence: str) -> None:
        """Print a sentence."""
        self._console.print(sentence, markup=False, soft_wrap=True)


def live_parts(task: Task) -> list[Part]:
    """Return what the first line says of a run: step and time left whatever the width."""
    total = "" if task.total is None else f"/{task.total:,.0f}"
    if task.total is None and not task.completed:
        return [Part(words=task.description, rank=0)]
    has_begun = "metrics" in task.fields
    return [
        Part(words=f"step {task.completed:,.0f}{total}", rank=0),
        Part(words="" if task.total is None else f"left {clock(task.time_remaining)}", rank=0),
        Part(words=f"{clock(task.elapsed)} so far" if has_begun else task.description, rank=1),
    ]


def step_parts(task: Task) -> list[Part]:
    """Return what the second line says of the last step, as far as it fits."""
    metrics: StepMetrics | None = task.fields.get("metrics")
    if metrics is None:
        return []
    waiting = 100 * metrics.data_wait_s / metrics.step_s if metrics.step_s else 0.0
    return [
        Part(words=f"loss {metrics.loss:.4f}", rank=0),
        Part(words=f"{metrics.tokens_per_s:,.0f} tokens/s", rank=1),
        Part(words="" if metrics.mfu is None else f"MFU {100 * metrics.mfu:.1f} %", rank=2),
        Part(words=f"lr {metrics.learning_rate:.2g}", rank=3),
        Part(words="" if metrics.peak_bytes is None else as_size(metrics.peak_bytes), rank=4),
        Part(words=f"{waiting:.1f} % waiting", rank=5),
        Part(words=f"{100 * metrics.fill:.1f} % full", rank=6),
    ]


class Live(Callback):
    """Draws a bar with how the last step went."""

    may_stop = False

    def __init__(self, console: Console, bar: Progress) -> None:
        """Take where to draw."""
        self._console, self._bar = console, bar
        self._task: TaskID = bar.add_task("building the model", total=None)

    def on_begin(self, overview: RunOverview) -> None:
        """Print the overview of the run, and set the bar to its first step."""
        self.on_note(overview_words(overview))
        self._bar.update(
            self._task, total=overview.steps, completed=overview.resumed_from, description="first batch"
        )

    def on_step(self, metrics: StepMetrics) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=metrics.step, metrics=metrics)

    def on_evaluate(self, evaluation: Evaluation) -> None:
        """Print the losses of an evaluation above the bar."""
        self.on_note(evaluation_words(evaluation))

    def on_note(self, sentence: str) -> None:
        """Print a sentence above the bar, where nothing is cut."""
        self._console.print(wrapped(sentence, self._console.width), markup=False, soft_wrap=True)
