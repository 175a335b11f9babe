"""`varlen plan`: how long a training step takes with each way of planning it, on which mesh, and where time goes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from varlen.arguments import MEMORY_FRACTION, as_tokens
from varlen.cli.options import FiguresAsJson, option_in, output_option, title_of
from varlen.counts import many
from varlen.errors import SettingError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from varlen.cli.progress import OnProgress
    from varlen.cost.model import CostModel
    from varlen.report.plan import StepDocuments

_DEFAULT_CAPACITY = "128k"


def plan(
    data: Lengths = None,
    *,
    model: Model = "llama-3-8b",
    gpus: Gpus = None,
    dp: Dp = None,
    pp: Pp = 1,
    cp: Cp = 1,
    tp: Tp = 1,
    virtual_stages: VirtualStages = 1,
    sharding: ShardingName = "optimizer",
    hardware: HardwareName = "h100",
    recompute: RecomputeName = "auto",
    memory_fraction: MemoryFraction = MEMORY_FRACTION,
    capacity: Capacity = None,
    stretch: Stretch = False,
    documents: StepSize = 512,
    step: Step = 0,
    steps: StepCount = 1,
    seed: Seed = 0,
    in_order: InOrder = False,
    method: Methods = None,
    rates: RatesName = "calibrated",
    price: Price = None,
    tokens: Tokens = None,
    sweep: Sweep = False,
    calibrate: Calibrate = False,
    seconds: Seconds = None,
    reading: dict[str, Any],
    output: Timelines = None,
    trace: Trace = None,
    save: Save = None,
    as_json: FiguresAsJson = False,
) -> None:
    """Plan a training step in several ways, and show how long each takes and why.

    Takes the lengths of one step's documents, balances and slices them for a mesh of GPUs, and simulates every
    stage: packs as users run them, tuned packs, the peers' methods, and MicroPacks. Nothing is trained, and no
    GPU is needed. [bold]-o[/] writes timelines to zoom into; --sweep looks for the fastest mesh.

    [bold]Example:[/]  varlen plan lengths.npz --model llama-3-8b --gpus 128 --pp 4 --capacity 256k -o report.html
    """
    from varlen.cli.plan_job import check_outputs, show, show_sweep
    from varlen.cli.progress import progress

    if calibrate:
        from varlen.cli.calibrate import calibrated, check_no_others

        others = {"-o": output, "--trace": trace, "--sweep": sweep or None, "--method": method}
        check_no_others(data, others | {"--price": price, "--tokens": tokens})
        calibrated(model, tp, 20.0 if seconds is None else seconds, save=save, as_json=as_json)
        return
    named = _named(data, seconds)
    outputs = {"output": output, "trace": trace, "save": save}
    check_outputs(outputs, named, sweep=sweep)
    cost = _cost_of(model, hardware, rates, recompute, memory_fraction)
    axes: dict[str, Any] = {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "virtual_stages": virtual_stages}
    division = _division(gpus, axes, sharding, sweep=sweep)
    _check_several(steps, tokens, sweep=sweep)
    drawn = {"documents": documents, "seed": None if in_order else seed}
    capacities = _capacities(capacity, sweep=sweep)
    settings = division | _settings(method, sharding, price, tokens, repairs=recompute == "auto", sweep=sweep)
    with progress() as on_progress:
        lengths, are_bytes = _lengths(named, reading, on_progress)
        found = _steps(lengths, capacities, range(step, step + steps), drawn)
        settings |= {"name": title_of(named), "are_bytes": are_bytes, "on_progress": on_progress}
        settings["cost"] = cost = _with_positions(cost, found, stretch=stretch)
        if sweep:
            from varlen.report.plan_sweep import sweep as find

            swept = find(found, **settings)
        else:
            from varlen.report.plan import compare

            settings |= {"tokens": tokens, "settings": _of_a_run(hardware, recompute, memory_fraction)}
            compared = compare(found[0], more=found[1:], **settings)
    if sweep:
        show_sweep(swept, as_json=as_json)
    else:
        show(compared, outputs, cost, as_json=as_json)


def _of_a_run(hardware: str, recompute: str, memory_fraction: float) -> dict[str, str | float]:
    """Return the settings of `[plan]` that arguments name, without those at their defaults."""
    found: dict[str, str | float] = {"hardware": hardware}
    if recompute != "auto":
        found["recompute"] = recompute
    if memory_fraction != MEMORY_FRACTION:
        found["memory_fraction"] = memory_fraction
    return found


def _named(data: list[str] | None, seconds: float | None) -> list[str]:
    """Return the files to plan from."""
    if seconds is not None:
        raise SettingError(
            f"--seconds says how long --calibrate measures, and {seconds:g} was given without it; leave it out, or "
            "add --calibrate"
        )
    if not data:
        raise SettingError("name a file of lengths, or documents; or measure this machine with --calibrate")
    return data


def _check_several(steps: int, tokens: float | None, *, sweep: bool) -> None:
    """Refuse what a sweep doesn't take, and fewer steps than one."""
    if steps < 1:
        raise SettingError(f"--steps must be at least 1; got {steps}")
    given = f"--steps {steps}" if steps > 1 else f"--tokens {tokens:g}" if tokens is not None else ""
    if sweep and given:
        option = given.partition(" ")[0]
        raise SettingError(
            f"--sweep plans one step on many meshes, and was given {given}; leave out {option}, and plan the mesh "
            "that you choose with it"
        )


def _cost_of(model: str, hardware: str, rates: str, recompute: str, memory_fraction: float) -> CostModel:
    """Return the cost model that arguments name."""
    from varlen.cli.plan_job import hardware_of, model_of
    from varlen.cost.model import CostModel, Mode
    from varlen.step_plan import Recompute

    if rates not in get_args(Mode):
        raise SettingError(f"--rates must be one of {', '.join(get_args(Mode))}; got {rates!r}")
    if recompute not in ("auto", *get_args(Recompute)):
        raise SettingError(
            f"--recompute must be one of auto, {', '.join(get_args(Recompute))}; got {recompute!r}"
        )
    return CostModel(
        model=model_of(model),
        hardware=hardware_of(hardware),
        mode=cast("Mode", rates),
        recompute=cast("Recompute", "none" if recompute == "auto" else recompute),
        memory_fraction=memory_fraction,
    )


def _with_positions(cost: CostModel, steps: list[StepDocuments], *, stretch: bool) -> CostModel:
    """Return the cost model; with `stretch`, its model's positions are stretched to the longest document."""
    import numpy as np

    positions = cost.model.max_positions
    capacity = max(step.capacity for step in steps)
    lengths = np.concatenate([step.lengths for step in steps if step.capacity == capacity])
    longest = int(lengths.max())
    if positions is None or longest <= positions:
        return cost
    if not stretch:
        over = int((lengths > positions).sum())
        raise SettingError(
            f"{over:,} of {many(lengths.size, 'document')} {'is' if over == 1 else 'are'} longer than the "
            f"{positions:,} positions of {cost.model.name or 'the model'}, the longest {longest:,} tokens; plan as "
            f"if its positions were stretched with --stretch, or truncate documents with --capacity {positions}"
        )
    return cost.replace(model=replace(cost.model, max_positions=longest))


def _division(gpus: int | None, axes: dict[str, Any], sharding: str, *, sweep: bool) -> dict[str, Any]:
    """Return the mesh that arguments name; for a sweep, the number of GPUs."""
    from varlen.cli.plan_job import mesh_of
    from varlen.step_plan import Sharding

    if not sweep:
        return {"mesh": mesh_of(gpus=gpus, sharding=cast("Sharding", sharding), **axes)}
    given = [name for name, size in axes.items() if size not in (None, 1)]
    if given:
        option = given[0].replace("_", "-")
        raise SettingError(
            f"--sweep looks for the mesh and was given --{option} {axes[given[0]]}; leave out --sweep or --{option}"
        )
    return {"num_gpus": 8 if gpus is None else gpus}


def _settings(
    method: list[str] | None,
    sharding: str,
    price: float | None,
    tokens: float | None,
    *,
    repairs: bool,
    sweep: bool,
) -> dict[str, Any]:
    """Return the methods and settings of planning."""
    from varlen.report.plan import METHODS, check_methods, check_price

    check_methods(method or ())
    check_price(price, tokens)
    settings: dict[str, Any] = {"repairs": repairs, "price": price}
    if not sweep:
        # Whoever names methods wants these alone, and sooner.
        return settings | {"methods": method or METHODS, "alternatives": not method}
    if method is not None and len(method) > 1:
        raise SettingError(f"--sweep plans by one --method; got {', '.join(method)}")
    return settings | {"method": method[0] if method else "micropack", "sharding": sharding}


def _capacities(given: list[str] | None, *, sweep: bool) -> list[int]:
    """Read the capacities."""
    found = [as_tokens(words, "--capacity") for words in given or [_DEFAULT_CAPACITY]]
    if len(found) > 1 and not sweep:
        raise SettingError("--capacity stands several times, which only --sweep compares; name one of them")
    return found


def _lengths(
    data: list[str], reading: dict[str, Any], on_progress: OnProgress
) -> tuple[npt.NDArray[np.int64], bool]:
    """Return the lengths that arguments name, and whether bytes were counted."""
    from varlen.cli.options import lengths_of
    from varlen.cli.plan_job import counted

    found = counted(data) or lengths_of(data, on_progress, 0, **reading)
    if found.unread is not None:
        print(f"varlen: {found.unread}", file=sys.stderr)
    for sentence in found.losses.sentences():
        print(f"varlen: {sentence}", file=sys.stderr)
    return found.lengths, found.are_bytes


def _steps(
    lengths: npt.NDArray[np.int64], capacities: list[int], steps: range, drawn: dict[str, Any]
) -> list[StepDocuments]:
    """Take the documents of the steps at each capacity."""
    from varlen.report.plan import step_documents

    return [
        step_documents(lengths, capacity=capacity, step=step, **drawn)
        for capacity in capacities
        for step in steps
    ]


# The options of `varlen plan`: the job, its steps, the methods and the outputs.

job_option, steps_option, planning_option = map(option_in, ("The job", "Steps", "Planning"))

Lengths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LENGTHS_OR_DATA...",
        help="Lengths: .npz with [bold]lengths[/], .npy, or a .txt of one number per line. Or documents, as other "
        "verbs take them: files, folders, quoted globs, URLs, one token store.",
    ),
]
Model = Annotated[
    str, job_option(help="A name such as llama-3-8b, or a config.json of transformers or its folder.")
]
HardwareName = Annotated[
    str, job_option("--hardware", help="h100, h200, a100, b200, or a file that --calibrate wrote.")
]
Gpus = Annotated[
    int | None, job_option(help="GPUs in all; dp is what the other axes leave.  [dim]\\[default: 8][/]")
]
Dp = Annotated[int | None, job_option(help="Data-parallel ranks.  [dim]\\[default: what is left][/]")]
Pp = Annotated[int, job_option(help="Pipeline stages.")]
Cp = Annotated[int, job_option(help="GPUs that share every document's rows.")]
Tp = Annotated[int, job_option(help="GPUs that share every layer's heads and columns.")]
VirtualStages = Annotated[int, job_option(help="Chunks of layers on each stage.")]
ShardingName = Annotated[
    str,
    job_option(
        "--sharding", help="What data-parallel ranks divide: none, [bold]optimizer[/] states or parameters."
    ),
]
RecomputeName = Annotated[
    str,
    job_option(
        "--recompute",
        help="Activations computed again: [bold]auto[/] takes the least with which a plan fits, none, selective "
        "or full.",
    ),
]
MemoryFraction = Annotated[
    float,
    job_option(
        "--memory-fraction",
        metavar="F",
        help="Share of a GPU's memory that plans may use, as plan.memory_fraction of [bold]varlen train[/].",
    ),
]
Capacity = Annotated[
    list[str] | None,
    steps_option(
        metavar="N",
        help="Tokens that documents are truncated to: 65536, 256k, 1m. Repeatable with --sweep.  "
        "[dim]\\[default: 128k][/]",
    ),
]
StepSize = Annotated[int, steps_option("--documents", metavar="N", help="Documents of a step.")]
Stretch = Annotated[
    bool,
    steps_option(
        "--stretch", help="Plan documents longer than the model has positions, as if these were extended."
    ),
]
Step = Annotated[int, steps_option(metavar="N", help="Which step is planned, from 0.")]
StepCount = Annotated[
    int,
    steps_option(
        "--steps",
        metavar="N",
        help="Steps from --step on that the fastest method plans: mean, least and most of time, rate and cost.",
    ),
]
Seed = Annotated[int, steps_option(help="Of the order of documents.")]
InOrder = Annotated[bool, steps_option("--in-order", help="Take documents as they come.")]
Methods = Annotated[
    list[str] | None,
    planning_option(
        "--method",
        metavar="NAME",
        help="Repeatable: packed, packed_tuned, balanced, dynamic_cp, sliced, micropack.  [dim]\\[default: all][/]",
    ),
]
RatesName = Annotated[
    str,
    planning_option(
        "--rates",
        help="[bold]calibrated[/]: rates by rows and keys. flops: one rate for all, as papers count.",
    ),
]
Price = Annotated[
    float | None,
    planning_option(
        metavar="P", help="What a GPU-hour costs, in any currency: adds the price of 10⁹ tokens to GPU-hours."
    ),
]
Tokens = Annotated[
    float | None,
    planning_option(
        "--tokens",
        metavar="T",
        help="Tokens of the whole training, such as 20e9: adds its GPU-hours, days and, with --price, money.",
    ),
]
Sweep = Annotated[
    bool,
    planning_option(
        "--sweep", help="Search dp x pp x cp x tp on these GPUs; prints the fastest, ten at most."
    ),
]
Calibrate = Annotated[
    bool,
    planning_option(
        "--calibrate",
        help="Measure this machine's kernels at the model's widths instead, and how well they are predicted; "
        "--save keeps them for --hardware.",
    ),
]
Seconds = Annotated[
    float | None, planning_option(metavar="S", help="How long --calibrate measures.  [dim]\\[default: 20][/]")
]
Timelines = Annotated[
    Path | None,
    output_option("--output", "-o", metavar="FILE", help="Write timelines to zoom into, as HTML."),
]
Trace = Annotated[
    Path | None,
    output_option(metavar="FILE", help="Write the fastest plan's timeline for Perfetto, as JSON."),
]
Save = Annotated[
    Path | None,
    output_option(
        metavar="FILE", help="Write the fastest plan itself, to load again; or what --calibrate measured."
    ),
]
