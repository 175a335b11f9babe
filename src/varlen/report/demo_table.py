"""The demo's figures for the terminal: one table, the proof, the ledger, and what the figures say."""

from __future__ import annotations

from statistics import fmean

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varlen.report.figures import DemoFigures, MethodFigures, spread
from varlen.report.findings import findings, headline
from varlen.report.words import count, memory, times

_STYLES = {"baseline": "", "varlen": "bold green", "control": "magenta"}


def demo_table(figures: DemoFigures) -> RenderableType:
    """Return everything that `varlen demo` prints when it is done."""
    return Group(
        "",
        Text(headline(figures), style="bold"),
        "",
        _methods(figures),
        Text(_reading(figures), style="dim"),
        *_proof(figures),
        *_ledger(figures),
        *_findings(figures),
    )


def _methods(figures: DemoFigures) -> Table:
    """One row a method; ratios say how much faster flattened is."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for title in (
        "tokens\n/s",
        "tokens\n/CPU s",
        "flat is\nfaster",
        "by CPU\ntime",
        "slots/\ntoken",
        "peak\nmemory",
        "validation\nloss",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    ours = figures.method("flattened")
    for method in figures.methods:
        losses = figures.losses(method)
        table.add_row(
            method.title,
            count(method.tokens_per_s),
            count(method.tokens_per_cpu_s),
            times(ours.tokens_per_s / method.tokens_per_s),
            times(ours.tokens_per_cpu_s / method.tokens_per_cpu_s),
            f"{method.slots_per_token:.2f}",
            memory(method.memory_bytes),
            f"{_mark(method)}{fmean(losses):.3f}±{spread(losses):.3f}",
            style=_STYLES[method.role],
        )
    return table


def _mark(method: MethodFigures) -> str:
    return "*" if None in method.validation_losses else ""


def _reading(figures: DemoFigures) -> str:
    """Say how to read the table."""
    ours = figures.method("flattened")
    lines = [
        f"{ours.num_documents:,} documents, {ours.num_tokens:,} tokens, {ours.num_targets:,} targets and "
        f"{figures.steps:,} steps in every row, counted; tokens of padding don't count; {figures.threads} "
        "threads. Methods took turns step by step, each in a process of its own; peak memory is resident "
        "memory beyond what the process held before its first step."
    ]
    if any(None in method.validation_losses for method in figures.methods):
        lines.append(
            f"* its own loss for seed {figures.seeds[0]}; for further seeds that of flattened, which trains "
            "the same batches"
        )
    return "\n".join(lines)


def _proof(figures: DemoFigures) -> list[RenderableType]:
    verdict = Text(
        figures.isolation.verdict, style="bold green" if figures.isolation.is_proved else "bold red"
    )
    return ["", Text("isolation of the packed run: ", style="bold") + verdict, _facts(figures.isolation.rows)]


def _ledger(figures: DemoFigures) -> list[RenderableType]:
    ledger = figures.ledger
    return [
        "",
        Text("ledger", style="bold"),
        Padding(
            f"{ledger.tokens_in:,} tokens in = {ledger.packed:,} packed + {ledger.truncated:,} cut at "
            f"{figures.max_length:,} + {ledger.dropped:,} dropped; {ledger.duplicated:,} twice, "
            f"{ledger.balance:,} unaccounted for",
            (0, 0, 0, 2),
        ),
    ]


def _findings(figures: DemoFigures) -> list[RenderableType]:
    lines: list[RenderableType] = [""]
    for title, sentences in findings(figures).titled():
        lines.append(Text(title, style="bold"))
        lines.append(Padding(sentences, (0, 0, 0, 2)))
    return lines


def _facts(rows: tuple[tuple[str, str], ...]) -> RenderableType:
    table = Table.grid(padding=(0, 3, 0, 0))
    for name, value in rows:
        table.add_row(name, value)
    return Padding(table, (0, 0, 0, 2))
