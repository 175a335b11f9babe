"""BatchReport: the errors and warnings of a batch, each with its location and a fix; and ModelFacts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from varlen.counts import many
from varlen.verify.batches.reading import BoolArray

Kind = Literal[
    "attention_mask",
    "use_cache",
    "packed_rows",
    "positions_missing",
    "positions_run_on",
    "positions_continue",
    "row_starts_mid_document",
    "incomplete_boundaries",
    "boundaries_missing",
    "mrope_positions",
    "open_mask",
    "model_family",
    "shapes",
    "float_ids",
    "cu_seqlens",
    "empty_documents",
    "max_length",
    "boundaries_disagree",
    "crossing_targets",
    "shifted_labels",
    "padding_targets",
    "no_targets",
    "documents_without_targets",
    "token_ids",
    "label_ids",
    "positions_range",
]
"""The kind of a finding; stable, for use in programs."""

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One error or warning."""

    kind: Kind
    level: Level
    """error: training would be wrong, or fail. warning: perhaps unintended, or wrong with another attention."""
    what: str
    """What happens, with numbers."""
    where: str
    """The first location, in words; for whole batches, the argument."""
    fix: str
    """How to fix it; a line to copy where possible."""
    count: int = 1
    """Number of locations."""
    row: int | None = None
    """Row of the first location; None if the finding has no single location."""
    column: int | None = None
    """Column of the first location, or its index in an array of boundaries."""

    def __str__(self) -> str:
        """Return the finding in three lines."""
        return f"{self.level} {self.kind}: {self.what}\n  where: {self.where}\n  fix:   {self.fix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """All findings of one batch, errors first; iterates over them."""

    findings: tuple[Finding, ...]
    rows: int
    width: int
    documents: int
    """Number of documents by the batch's own boundaries, padding not counted; without any, its rows."""
    model: str | None = None
    """Name of the model's class; None without a model."""
    attention: str | None = None
    """The model's attention function."""
    within: str | None = None
    """Name of the class of a module of one's own that holds the model, and whose code isn't looked at."""
    is_assumed: bool = False
    """Whether each row was taken as one document, and others would be missed: the batch has no boundaries, or only
    positions that count on."""

    @property
    def ok(self) -> bool:
        """Whether there are no errors; there may be warnings."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of level "error"."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of all findings, in order."""
        return tuple(finding.kind for finding in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        """Return the number of findings, then each in three lines."""
        errors = len(self.errors)
        counted = (
            f"{many(errors, 'error')}, {many(len(self) - errors, 'warning')}" if len(self) else "nothing"
        )
        inside = f" (without the code of {self.within}, which check_isolation runs)" if self.within else ""
        with_model = f"; {self.model}{inside}, attention {self.attention}" if self.model else ""
        assumed = " (each row taken for one; pass lengths= if rows hold several)" if self.is_assumed else ""
        head = (
            f"{counted} found in {many(self.rows, 'row')} of {many(self.width, 'token')}, "
            f"{many(self.documents, 'document')}{assumed}{with_model}"
        )
        return "\n".join([head, *map(str, self.findings)])


MRope = Literal["none", "text_row", "text_row_or_plain"]
Detector = Literal["mask", "flash", "varlen", "unknown"]
"""How an attention finds boundaries: from positions while it builds a mask (eager, sdpa, FlexAttention);
from cu_seqlens, else from positions (FlashAttention); only from cu_seqlens ("varlen")."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The properties of a model that decide how it interprets a batch's arguments."""

    name: str
    within: str | None
    """Name of the class of one's own that holds the model, if another one does."""
    attention: str
    detector: Detector
    uses_cache: bool
    """Whether a cache is used if the batch has no `use_cache`."""
    drops_cache: bool
    """Whether gradient checkpointing keeps a cache from being used, with gradients on or off as they are here."""
    is_bidirectional: bool
    """Whether tokens see later ones."""
    reads_positions: bool
    """Whether masks depend on positions."""
    mrope: MRope
    """Whether positions have several rows (M-RoPE), of which only a fourth, in front, separates documents."""
    reads_boundaries: bool
    """Whether the family's code mentions `seq_idx` or cu_seqlens, as hybrids do for their recurrent layers."""
    drops_boundaries: bool
    """Whether the model doesn't pass cu_seqlens and the like to its layers."""
    recurrent_read: tuple[str, ...]
    """Arguments from which recurrent and convolutional layers read boundaries; empty without such layers."""
    recurrent_in_one_row: bool
    """Whether those layers only support the boundaries of a single row."""
    learned_positions: bool
    """Whether positions are looked up in a table, so that a shift changes the result."""
    vocabulary: int
    positions: int | None
    """The largest number of positions; None if the model has no limit."""
    refusal: str | None
    """Why `model_inputs` refuses the model; None if it doesn't."""
    pools: bool
    """Whether a head makes one answer a row, which `document_outputs` gives for each document."""
    shifts_labels: bool
    """Whether labels are next tokens; else each is of its own token."""


def finding(
    kind: Kind, level: Level, what: str, fix: str, wrong: BoolArray | None = None, field: str = ""
) -> Finding:
    """Make one finding of all locations where `wrong` (`[rows, width]` or `[entries]`) is true; None for none."""
    if wrong is None:
        return Finding(kind=kind, level=level, what=what, where=field, fix=fix)
    first = int(np.argmax(wrong))
    row, column = divmod(first, wrong.shape[-1]) if wrong.ndim == 2 else (None, first)
    spot = f"row {row:,}, column {column:,}" if row is not None else f"index {column:,}"
    count = int(wrong.sum())
    where = f"{field} {spot}" + (f", and {count - 1:,} more" if count > 1 else "")
    return Finding(
        kind=kind, level=level, what=what, where=where, fix=fix, count=count, row=row, column=column
    )
