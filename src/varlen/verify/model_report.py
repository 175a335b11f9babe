"""VerifyReport: what was found about a model, one cell for each backend, layout and way of calling it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from varlen.batch.packed import Layout
from varlen.verify.attention import AttentionPicture
from varlen.verify.gradients import GradientParity
from varlen.verify.isolation import IsolationReport

ModelVerdict = Literal["isolated", "coupled", "leaks", "refuses", "not run"]
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
    """Why nothing can be said of training mode; empty where it was judged, or wasn't reached."""


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
    """Called in other ways; empty where nobody asked."""
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
        raise KeyError(f"{backend} {layout} wasn't tried; there are {tried}")

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
            | {
                "versions": dict(self.versions),
                "notes": list(self.notes),
                "cells": cells,
                "calls": calls,
            }
        )

    def __str__(self) -> str:
        """Say the verdict, what it rests on, and what else leaks, in a page of text."""
        from varlen.verify.model_text import report_text

        return report_text(self)
