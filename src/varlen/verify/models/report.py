"""VerifyReport: what was found about a model, one cell for each backend, layout and way of calling it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal

from varlen.batch.packed import Layout
from varlen.counts import many
from varlen.verify.models.backends import AttentionPicture
from varlen.verify.models.isolation import IsolationReport
from varlen.verify.models.parity import GradientParity

ModelVerdict = Literal["isolated", "coupled", "leaks", "refuses", "not run"]
"""As `isolation.Verdict`, whose "blind" is "not run": a check that can't see a leak proves nothing."""
_ORDER: tuple[ModelVerdict, ...] = ("leaks", "coupled", "isolated", "refuses", "not run")
"""Of several verdicts, the first of these counts: nothing that was refused was trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A backend and a layout, called with the arguments of `varlen.adapters.hf.model_inputs`."""

    backend: str
    layout: Layout
    verdict: ModelVerdict
    reason: str = ""
    """Why the verdict isn't "isolated"; empty if it is."""
    stand_in: tuple[str, ...] = ()
    """Kernels that this machine doesn't have, and that plain PyTorch stood in for."""
    kernels: tuple[tuple[str, int], ...] = ()
    """Attention kernels that ran in one forward pass, and how often."""
    isolation: IsolationReport | None = None
    """What moved; None where nothing ran."""
    gradients: GradientParity | None = None
    """None where they weren't asked for, or nothing ran."""
    own_loss: float | None = None
    """The loss that the model itself returned."""
    training: str = ""
    """Why training mode wasn't judged; empty where it was judged, or wasn't reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCell:
    """A backend and a layout, called in another way."""

    call: str
    backend: str
    layout: Layout
    verdict: ModelVerdict
    difference: float | None = None
    """How far other documents' logits moved, or those of a document alone differed; None where nothing ran."""
    reason: str = ""
    """What was seen; empty where documents are isolated."""
    kind: str = ""
    """The finding of `vl.check_batch` that explains it; empty where there is none."""
    why: str = ""
    """What in the call makes them leak; empty where that isn't known."""
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """All that was found about one model."""

    model: str
    """Name of the model's class."""
    family: str
    """`config.model_type` of the text decoder."""
    weights: int
    dtype: str
    device: str
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()
    """With varlen's own arguments."""
    calls: tuple[CallCell, ...] = ()
    """Results of other calling conventions; empty if none was tried."""
    attention: AttentionPicture | None = None
    """Attention weights with boundaries and without; None where eager attention wasn't tried or shows none."""

    @property
    def verdict(self) -> ModelVerdict:
        """The gravest verdict of all cells with varlen's own arguments."""
        found = {cell.verdict for cell in self.cells}
        return next((verdict for verdict in _ORDER if verdict in found), "not run")

    @property
    def ok(self) -> bool:
        """Whether documents are isolated wherever varlen gives arguments; somewhere at least."""
        return self.verdict == "isolated"

    @property
    def leaks(self) -> tuple[CallCell, ...]:
        """Ways of calling the model in which its documents see each other."""
        return tuple(cell for cell in self.calls if cell.verdict == "leaks")

    def cell(self, backend: str, layout: Layout = "rows") -> Cell:
        """Return one cell.

        Args:
            backend: that was tried.
            layout: that was tried.

        Raises:
            KeyError: it wasn't.
        """
        for cell in self.cells:
            if (cell.backend, cell.layout) == (backend, layout):
                return cell
        tried = ", ".join(f"{cell.backend} {cell.layout}" for cell in self.cells)
        raise KeyError(f"{backend} {layout} wasn't tried; these were: {tried}")

    def to_json(self) -> dict[str, Any]:
        """Return everything but the picture as numbers, strings, lists and mappings."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "attention"
        }
        cells = [dataclasses.asdict(cell) for cell in self.cells]
        for cell in cells:
            if cell["isolation"] is not None:
                cell["isolation"]["computed_in"] = str(cell["isolation"]["computed_in"]).removeprefix(
                    "torch."
                )
        calls = [dataclasses.asdict(cell) for cell in self.calls]
        return (
            {"verdict": self.verdict}
            | fields
            | {"versions": dict(self.versions), "notes": list(self.notes), "cells": cells, "calls": calls}
        )

    def __str__(self) -> str:
        return report_text(self)


# A VerifyReport in text: verdict, backends, other ways of calling the model, reasons, attention.


WIDTH = 118
_SHORT = {"flex_attention": "flex", "flash_attention_2": "flash 2", "flash_attention_3": "flash 3"}
_COMMON = "position_ids, "
_TOKENS = ("input_ids=", "labels=", "shift_labels=")


def report_text(report: VerifyReport) -> str:
    """Write a report for a terminal."""
    parts = [
        _head(report),
        "\n".join(["Called with varlen.adapters.hf.model_inputs(batch, model)", *_backends(report)]),
    ]
    if listed := [_wrapped(line) for line in arguments(report)]:
        parts.append(
            "\n".join(["Keyword arguments that keep documents apart, beside input_ids and labels", *listed])
        )
    if report.calls:
        parts.append("\n".join(["Called in other ways", *_calls(report)]))
        parts += ["\n".join(["Why they leak", *explained])] if (explained := _whys(report)) else []
    if report.attention is not None:
        title = "Attention between the documents of a row (eager, the largest weight of any layer and head)"
        parts.append("\n".join([title, *("  " + line for line in str(report.attention).splitlines())]))
    return "\n\n".join(parts)


def _head(report: VerifyReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions)
    lines = [
        f"{report.verdict}: {report.model} ({report.family}), {many(report.weights, 'weight')}, {report.dtype} on "
        f"{report.device}",
        f"  {versions}",
        *(_wrapped(note) for note in (tried(report), *report.notes) if note),
    ]
    leaking = {cell.call for cell in report.leaks}
    if report.ok and leaking:
        summary = f"isolated with varlen's arguments; {len(leaking)} of the other ways of calling it leak"
        lines.append(_wrapped(summary))
    return "\n".join(lines)


def tried(report: VerifyReport) -> str:
    """Return which documents were tried; empty where nothing ran."""
    ran = {
        each.layout: each for cell in report.cells if (each := cell.isolation) and each.verdict != "refuses"
    }
    if not ran:
        return ""
    first = next(iter(ran.values()))
    longest = f", the longest of {many(first.longest, 'token')}" if first.longest else ""
    return f"tried on {many(first.documents, 'document')} of {many(first.tokens, 'token')}{longest}: {', '.join(ran)}"


def _backends(report: VerifyReport) -> list[str]:
    sentences = (*stand_ins(report), *reasons(report))
    return [*_aligned(backend_rows(report)), *map(_wrapped, sentences)]


def backend_rows(report: VerifyReport) -> list[list[str]]:
    """Return the cells of a table: a head, and a row for every backend."""
    layouts = list(dict.fromkeys(cell.layout for cell in report.cells))
    rows = [["backend", *layouts, "moved by", "control", "gradients", "kernel"]]
    for backend in dict.fromkeys(cell.backend for cell in report.cells):
        cells = [cell for cell in report.cells if cell.backend == backend]
        name = backend + (" *" if any(cell.stand_in for cell in cells) else "")
        verdicts = {cell.layout: cell.verdict for cell in cells}
        rows.append([name, *(verdicts.get(layout, "") for layout in layouts), *_measured(cells)])
    return rows


def stand_ins(report: VerifyReport) -> list[str]:
    """Return a sentence about what stood in for kernels that weren't there, if anything did."""
    missing = sorted({name for cell in report.cells for name in cell.stand_in})
    if not missing:
        return []
    return [
        f"* plain PyTorch stood in for {', '.join(missing)}, which this machine lacks: boundaries are followed as "
        "far as the kernel, and no further"
    ]


def reasons(report: VerifyReport) -> list[str]:
    """Return why backends aren't isolated, or what of them wasn't compared, each reason once."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in report.cells:
        uncompared = cell.gradients.reason if cell.gradients else ""
        for reason in (
            cell.reason,
            f"gradients weren't compared: {uncompared}" if uncompared else "",
            f"training mode wasn't judged: {cell.training}" if cell.training else "",
        ):
            if reason:
                found.setdefault(reason, {}).setdefault(cell.backend, []).append(cell.layout)
    layouts = {cell.layout for cell in report.cells}

    def named(backend: str, where: list[str]) -> str:
        return backend if len(where) == len(layouts) else f"{backend} {' '.join(where)}"

    return [
        f"{', '.join(named(backend, where) for backend, where in backends.items())}: {reason}"
        for reason, backends in found.items()
    ]


def arguments(report: VerifyReport) -> list[str]:
    """Return what model_inputs gives for each backend that runs, in the first layout that does, each once."""
    found: dict[str, str] = {}
    for cell in report.cells:
        if cell.isolation is not None and cell.verdict in ("isolated", "coupled"):
            names = [each for each in cell.isolation.arguments if not each.startswith(_TOKENS)]
            found.setdefault(cell.backend, ", ".join(names))
    return [
        f"{', '.join(backend for backend, other in found.items() if other == listed)}: {listed}"
        for listed in dict.fromkeys(found.values())
    ]


def _measured(cells: Sequence[Cell]) -> list[str]:
    """Return a backend's measurements, the worst of its layouts."""
    ran = [
        cell for cell in cells if cell.isolation is not None and cell.verdict not in ("refuses", "not run")
    ]
    if not ran:
        return ["", "", "", ""]
    moved, control, gradients = extremes(ran)
    kernels = ", ".join(dict.fromkeys(name for cell in ran for name, _ in cell.kernels))
    return [shown(moved), shown(control, "none"), shown(gradients), kernels]


def extremes(cells: Sequence[Cell]) -> tuple[float | None, float | None, float | None]:
    """Return the largest movement, the smallest control and the largest difference of gradients; None without any."""
    moves = [cell.isolation.movements for cell in cells if cell.isolation is not None]
    controls = [moved.control_difference for moved in moves]
    differences = [cell.gradients.difference for cell in cells if cell.gradients]
    return (
        max((max(moved.largest_difference, moved.padding_difference) for moved in moves), default=None),
        min((each for each in controls if each is not None), default=None),
        max((each for each in differences if each is not None), default=None),
    )


def _calls(report: VerifyReport) -> list[str]:
    rows = call_rows(report)
    lines = _aligned(rows)
    if any("/" in cell for row in rows[1:] for cell in row[1:]):
        layouts = list(dict.fromkeys(cell.layout for cell in report.calls))
        lines.append(f"  a/b: a in {layouts[0]}, b in {layouts[-1]}")
    return lines


def call_rows(report: VerifyReport) -> list[list[str]]:
    """Return the cells of a table: a head, and a row for every way of calling."""
    backends = list(dict.fromkeys(cell.backend for cell in report.calls))
    rows = [["arguments", *(_SHORT.get(backend, backend) for backend in backends)]]
    for call in dict.fromkeys(cell.call for cell in report.calls):
        cells = [cell for cell in report.calls if cell.call == call]
        found = [_verdicts([cell for cell in cells if cell.backend == backend]) for backend in backends]
        rows.append([_shortened(call, rows), *found])
    return rows


def _whys(report: VerifyReport) -> list[str]:
    lines = []
    for what, remedy in explanations(report):
        lines.append(_wrapped(what))
        if remedy:
            lines.append(_wrapped(f"  {remedy}"))
    return lines


def explanations(report: VerifyReport) -> list[tuple[str, str]]:
    """Return each reason for a leak once, as the first backend saw it, with the fix, or an empty string."""
    found: dict[str, list[CallCell]] = {}
    for cell in report.leaks:
        # The same reason names another attention and other counts in each cell.
        alike = re.sub(r"\d[\d,]*", "", cell.why.replace(cell.backend, ""))
        found.setdefault(f"{cell.kind}: {alike}", []).append(cell)
    explained = []
    for cells in found.values():
        first = cells[0]
        backends = dict.fromkeys(_SHORT.get(cell.backend, cell.backend) for cell in cells)
        calls = "; ".join(dict.fromkeys(cell.call.removeprefix(_COMMON) for cell in cells))
        what = f"{calls} ({', '.join(backends)}): {first.why or first.reason}"
        explained.append((what, f"fix: {first.fix}" if first.fix else ""))
    return explained


def _verdicts(cells: Sequence[CallCell]) -> str:
    """Return one verdict, or one per layout if they differ."""
    verdicts = [cell.verdict for cell in cells]
    return verdicts[0] if len(set(verdicts)) == 1 else "/".join(verdicts)


def _shortened(call: str, rows: Sequence[Sequence[str]]) -> str:
    """Leave out the part that every line above has too."""
    return call if len(rows) == 1 or not call.startswith(_COMMON) else "  … " + call.removeprefix(_COMMON)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _wrapped(text: str) -> str:
    inset = "  " + " " * (len(text) - len(text.lstrip()))
    return fill(
        text.strip(), WIDTH, initial_indent=inset, subsequent_indent=inset + "  ", break_long_words=False
    )


def shown(value: float | None, without: str = "not run") -> str:
    """Write a measured number, or what stands where there is none."""
    return without if value is None else f"{value:.2g}"
