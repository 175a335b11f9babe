"""The options of `varlen plan`: the job, its steps, what is planned and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from varlen.cli.options import OUTPUT

JOB, STEPS, PLANNING = "The job", "Steps", "Planning"

Lengths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LENGTHS_OR_DATA...",
        help="Lengths: .npz with [bold]lengths[/], .npy, or a .txt of one number a line. Or documents, as other "
        "verbs take them: files, folders, quoted globs, URLs, one token store.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="A name such as llama-3-8b, or a config.json of transformers or its folder.", rich_help_panel=JOB
    ),
]
HardwareName = Annotated[
    str,
    typer.Option(
        "--hardware", help="h100, h200, a100, b200, or a file that --calibrate wrote.", rich_help_panel=JOB
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        help="GPUs in all; dp is what the other axes leave.  [dim]\\[default: 8][/]", rich_help_panel=JOB
    ),
]
Dp = Annotated[
    int | None,
    typer.Option(help="Data-parallel ranks.  [dim]\\[default: what is left][/]", rich_help_panel=JOB),
]
Pp = Annotated[int, typer.Option(help="Pipeline stages.", rich_help_panel=JOB)]
Cp = Annotated[int, typer.Option(help="GPUs that share every document's rows.", rich_help_panel=JOB)]
Tp = Annotated[
    int, typer.Option(help="GPUs that share every layer's heads and columns.", rich_help_panel=JOB)
]
VirtualStages = Annotated[int, typer.Option(help="Chunks of layers on each stage.", rich_help_panel=JOB)]
ShardingName = Annotated[
    str,
    typer.Option(
        "--sharding",
        help="What data-parallel ranks divide: none, [bold]optimizer[/] states or parameters.",
        rich_help_panel=JOB,
    ),
]
RecomputeName = Annotated[
    str,
    typer.Option(
        "--recompute",
        help="Activations computed again: [bold]auto[/] takes the least with which a plan fits, none, selective "
        "or full.",
        rich_help_panel=JOB,
    ),
]
Capacity = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N",
        help="Tokens that documents are truncated to: 65536, 256k, 1m. Repeatable with --sweep.  "
        "[dim]\\[default: 128k][/]",
        rich_help_panel=STEPS,
    ),
]
StepSize = Annotated[
    int, typer.Option("--documents", metavar="N", help="Documents of a step.", rich_help_panel=STEPS)
]
Stretch = Annotated[
    bool,
    typer.Option(
        "--stretch",
        help="Plan documents longer than the model has positions, as if these were extended.",
        rich_help_panel=STEPS,
    ),
]
Step = Annotated[int, typer.Option(metavar="N", help="Which step is planned, from 0.", rich_help_panel=STEPS)]
Seed = Annotated[int, typer.Option(help="Of the order of documents.", rich_help_panel=STEPS)]
InOrder = Annotated[
    bool, typer.Option("--in-order", help="Take documents as they come.", rich_help_panel=STEPS)
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="Repeatable: packed, packed_tuned, balanced, dynamic_cp, sliced, micropack.  [dim]\\[default: all][/]",
        rich_help_panel=PLANNING,
    ),
]
RatesName = Annotated[
    str,
    typer.Option(
        "--rates",
        help="[bold]calibrated[/]: rates by rows and keys. flops: one rate for all, as papers count.",
        rich_help_panel=PLANNING,
    ),
]
Sweep = Annotated[
    bool,
    typer.Option(
        "--sweep",
        help="Search dp x pp x cp x tp on these GPUs; prints the ten fastest.",
        rich_help_panel=PLANNING,
    ),
]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Measure this machine's kernels at the model's widths instead, and how well they are predicted; "
        "--save keeps them for --hardware.",
        rich_help_panel=PLANNING,
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="How long --calibrate measures.  [dim]\\[default: 20][/]",
        rich_help_panel=PLANNING,
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write timelines to zoom into, as HTML.",
        rich_help_panel=OUTPUT,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the fastest plan's timeline for Perfetto, as JSON.",
        rich_help_panel=OUTPUT,
    ),
]
Save = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the fastest plan itself, to load again; or what --calibrate measured.",
        rich_help_panel=OUTPUT,
    ),
]
PrintJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print all figures as one JSON object instead of the table.", rich_help_panel=OUTPUT
    ),
]
