"""`varlen verify --megatron`: what would go wrong with a configuration of Megatron, and the values that work."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from varlen.adapters.megatron.config.report import ConfigFinding, ConfigReport

_COLOURS = {"error": "bold red", "warning": "yellow"}
WIDEST = 118
"""Columns beyond which lines become hard to read."""


def check_megatron(config: str, *, dialect: str | None, world_size: int | None, as_json: bool) -> bool:
    """Check a configuration and print the report; returns whether there is no error.

    Args:
        config: path of a YAML file.
        dialect: of the release, or the release; None: told by the names in the file.
        world_size: processes of the job; None: not known.
        as_json: print one JSON object.
    """
    from pathlib import Path

    from varlen.adapters.megatron.config.check import check_config

    report = check_config(Path(config), dialect=dialect, world_size=world_size)
    if as_json:
        json.dump(report.to_json(), sys.stdout, indent=1)
        print()
        return report.ok
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        print_report(report, console)
    else:
        print(report)
    return report.ok


def print_report(report: ConfigReport, console: Console) -> None:
    """Print a report in colour, broken to the terminal's width.

    Args:
        report: of a configuration.
        console: of the terminal.
    """
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
        (f"{finding.level}{how}", _COLOURS[finding.level]),
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
