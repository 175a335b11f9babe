"""`varlen demo`: train a small Llama on real text in six ways, and show what padding costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from varlen.cli.options import FiguresAsJson, output_option, print_json
from varlen.cli.progress import require_training, wide_console

_QUICK: dict[str, Any] = {
    "steps": 2,
    "batch_documents": 4,
    "max_length": 256,
    "num_seeds": 2,
    "validation_documents": 4,
}


def demo(
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Your documents: a JSONL, Parquet or text file, a folder, or a quoted glob. "
            "Rows need [bold]text[/], [bold]messages[/], or [bold]prompt[/] and [bold]completion[/]. "
            "Left out: the Python sources of this interpreter; nothing is downloaded.",
        ),
    ] = None,
    output: Annotated[
        Path, output_option("--output", "-o", metavar="FILE", help="Where the report goes.")
    ] = Path("report.html"),
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps of every run.  [dim]\\[default: 5, fewer for few or long documents][/]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="First of three seeds: documents, batches, weights.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads of every run.  [dim]\\[default: 2][/]")] = None,
    as_json: FiguresAsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds, to see that everything runs; measures nothing.")
    ] = False,
) -> None:
    """Train a small Llama on real text in six ways, and show what padding costs.

    The same documents, the same targets, the same number of steps: padded with and without a mask, sorted
    into length buckets, flattened, packed into rows, and packed without boundaries as a control. Prints a
    table and writes [bold]report.html[/]. Takes about two minutes on two cores.

    [bold]Example:[/]  varlen demo --data 'chats/*.jsonl' -o chats.html
    """
    require_training("demo")
    from varlen.files.finding import find
    from varlen.files.paths import unread
    from varlen.report.demo_page import demo_page
    from varlen.report.page import check_writable, write_page
    from varlen.train.demo.experiment import run_demo
    from varlen.train.demo.settings import DemoSettings

    chosen = {"steps": steps, "seed": seed, "threads": threads}
    given = {name: value for name, value in chosen.items() if value is not None}
    settings = DemoSettings(**(_QUICK if quick else {}) | given, exact_steps=steps is not None)
    check_writable(output)
    if data is not None:
        found = find(data)
        warning = unread(found.left_out, found.taken)
        if warning is not None:
            print(f"varlen: {warning.partition('; --split')[0]}", file=sys.stderr)
    from varlen.cli.progress import progress

    with progress() as on_progress:
        figures = run_demo(data, settings, on_progress)
    write_page(output, demo_page(figures))
    if as_json:
        print_json(figures.to_json())
        return
    _print_table(figures, output)
    if quick:
        print("A quick run shows that everything works; its figures measure nothing.")


def _print_table(figures: Any, output: Path) -> None:
    from varlen.report.demo import demo_table

    console = wide_console()
    console.print(demo_table(figures))
    console.print(f"\n{output} shows this in pictures; the demo took {figures.total_s:.0f} s.", markup=False)
