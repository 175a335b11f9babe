"""`varlen verify`: does a model keep packed documents apart, with which attention, and called how."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varlen.cli.options import Report, option_in, output_option, print_json
from varlen.cli.progress import progress, require_training
from varlen.errors import ModelError, SettingError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from varlen.adapters.megatron.config.report import ConfigFinding, ConfigReport

checking_option, megatron_option = option_in("Checking"), option_in("Megatron")
_COLOURS = {
    "isolated": "green",
    "leaks": "bold red",
    "coupled": "yellow",
    "refuses": "cyan",
    "not run": "dim",
}
NOT_ISOLATED, HAS_ERRORS = 1, 2


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A family, such as [bold]llama[/] (tiny, with random weights); or a folder with config.json.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        checking_option(
            metavar="NAME",
            help="eager, sdpa, flex_attention, varlen, flash_attention_2 or _3; repeatable.  "
            "[dim]\\[default: all of this machine][/]",
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        checking_option(metavar="NAME", help="rows or flat; repeatable.  [dim]\\[default: both][/]"),
    ] = None,
    dtype: Annotated[
        str | None,
        checking_option(
            metavar="NAME",
            help="float64, float32, bfloat16 or float16.  [dim]\\[default: the folder's own, else float32][/]",
        ),
    ] = None,
    device: Annotated[
        str | None, checking_option(metavar="NAME", help="Such as cuda.  [dim]\\[default: cpu][/]")
    ] = None,
    no_calls: Annotated[
        bool, checking_option("--no-calls", help="Don't try the ways in which others call the model.")
    ] = False,
    no_gradients: Annotated[bool, checking_option("--no-gradients", help="Don't compare gradients.")] = False,
    seed: Annotated[int, checking_option(help="Of the tokens.")] = 0,
    megatron: Annotated[
        str | None,
        megatron_option(
            metavar="CONFIG", help="Check this YAML file of Megatron-Bridge, in place of a model."
        ),
    ] = None,
    dialect: Annotated[
        str | None,
        megatron_option(
            metavar="RELEASE",
            help="0.4, 0.5, 0.6, or a release such as 0.5.1.  [dim]\\[default: inferred from its names][/]",
        ),
    ] = None,
    world_size: Annotated[
        int | None, megatron_option(help="Processes of the job.  [dim]\\[default: not known][/]")
    ] = None,
    output: Report = None,
    as_json: Annotated[bool, output_option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show whether a model keeps packed documents apart, or what would go wrong with a configuration of Megatron.

    Changes one document of a packed batch at a time, and requires that no other document's logits move by one bit,
    and that logits, loss and gradients are those of each document alone. As a control, the same change without
    boundaries must be detected; a check that misses it doesn't pass. Nothing is downloaded, and no code of a
    checkpoint is run. The exit code is 0 where documents are isolated, and 1 where they leak, are coupled, or nothing
    could be run.

    [bold]Example:[/]  varlen verify qwen3 -o report.html

    With --megatron, a configuration is read and nothing is run. Every setting that would stop packed training or make
    it wrong silently is listed, with the value that works. The exit code is 0 without errors, else 2.

    [bold]Example:[/]  varlen verify --megatron run_config.yaml --world-size 64
    """
    if megatron is not None:
        given: dict[str, object] = {
            "MODEL": model,
            "--backend": backend,
            "--layout": layout,
            "--dtype": dtype,
            "--device": device,
            "--no-calls": no_calls,
            "--no-gradients": no_gradients,
            "--output": output,
        }
        _refuse([name for name, value in given.items() if value], "with --megatron, which runs no model")
        is_right = check_megatron(megatron, dialect=dialect, world_size=world_size, as_json=as_json)
        _end(is_right, HAS_ERRORS)
        return
    refused = {"--dialect": dialect, "--world-size": world_size}
    _refuse([name for name, value in refused.items() if value is not None], "without --megatron")
    model = _named(model)
    require_training("verify")
    from varlen.report.page import check_writable, write_page
    from varlen.verify.models.api import verify as run

    if output is not None:
        check_writable(output)
    settings: dict[str, Any] = {
        "backends": backend or None,
        "calls": not no_calls,
        "gradients": not no_gradients,
    }
    if layout:
        settings["layouts"] = layout
    with progress() as show:
        report = run(model, dtype=_dtype(dtype), device=device, seed=seed, on_progress=show, **settings)
    if output is not None:
        from varlen.verify.models.page import model_page

        write_page(output, model_page(report))
    if as_json:
        print_json(report.to_json())
    else:
        _print(str(report), output)
    _end(report.ok, NOT_ISOLATED)


def _refuse(names: list[str], why: str) -> None:
    """Refuse arguments that would do nothing."""
    if names:
        raise SettingError(f"leave out {' and '.join(names)} {why}")


def _named(model: str | None) -> str:
    """Return the model's name; raise if none was given, or a folder that isn't there, before libraries are loaded."""
    if model is None:
        raise SettingError("name a MODEL, such as llama, or a configuration with --megatron CONFIG")
    if "/" in model and not Path(model).exists():
        raise ModelError(
            f"there is no folder {model!r}; models are not downloaded: name a folder with config.json, or a family "
            "such as llama"
        )
    return model


def _end(is_right: bool, code: int) -> None:
    """End with an exit code that a script can act on."""
    if not is_right:
        raise typer.Exit(code)


def _dtype(name: str | None) -> Any:
    """Return torch's dtype of a name."""
    import torch

    known = ("float64", "float32", "bfloat16", "float16")
    if name is not None and name not in known:
        raise SettingError(f"--dtype must be one of {', '.join(known)}; got {name!r}")
    return None if name is None else getattr(torch, name)


def _print(text: str, output: Path | None) -> None:
    """Print a report, verdicts in colour."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    shown = Text(text)
    for word, colour in _COLOURS.items():
        shown.highlight_words([word], colour)
    console.print(shown)
    note = "-o report.html shows this in pictures." if output is None else f"{output} shows this in pictures."
    console.print(f"\n{note}", markup=False)


# `varlen verify --megatron`: what would go wrong with a configuration of Megatron, and the values that work.

_COLOURS_VERIFY_MEGATRON = {"error": "bold red", "warning": "yellow"}
WIDEST = 118
"""Columns beyond which lines become hard to read."""


def check_megatron(config: str, *, dialect: str | None, world_size: int | None, as_json: bool) -> bool:
    """Check a configuration and print the report; returns whether there is no error."""
    from varlen.adapters.megatron.config.check import check_config

    report = check_config(Path(config), dialect=dialect, world_size=world_size)
    if as_json:
        print_json(report.to_json())
        return report.ok
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        print_report(report, console)
    else:
        print(report)
    return report.ok


def print_report(report: ConfigReport, console: Console) -> None:
    """Print a report in colour, broken to the terminal's width."""
    from rich.text import Text

    width = min(console.width, WIDEST)
    colour = "green" if report.ok else "red"
    console.print(Text(report.head, style=f"bold {colour}"), width=width)
    for finding in report:
        console.print()
        console.print(_title(finding), width=width)
        console.print(_body(finding), width=width)
    if report.changes:
        console.print()
        console.print(Text("All errors that settings can mend are gone with"), width=width)
        for override in report.overrides:
            console.print(Text(f"  {override}", style="green"), soft_wrap=True)


def _title(finding: ConfigFinding) -> RenderableType:
    """Return the first line of a finding: how bad, which setting, and which kind."""
    from rich.text import Text

    how = "" if finding.outcome == "advice" else f", {finding.outcome}"
    return Text.assemble(
        (f"{finding.level}{how}", _COLOURS_VERIFY_MEGATRON[finding.level]),
        "  ",
        (finding.setting, "bold"),
        "  ",
        (finding.kind, "dim"),
    )


def _body(finding: ConfigFinding) -> RenderableType:
    """Return the lines below: what happens, what was seen, what must hold, and the way out."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=4, style="dim")
    grid.add_column()
    for label, words, style in (
        ("seen", finding.seen, ""),
        ("must", finding.limit, ""),
        ("fix", finding.fix, "green"),
    ):
        grid.add_row(label, Text(words, style=style))
    return Padding(Group(Text(finding.what), grid), (0, 0, 0, 2), expand=False)
