"""BatchReport: what would go wrong with a batch, one finding each, with the place and the way out."""

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
    "padding_targets",
    "no_targets",
    "documents_without_targets",
    "token_ids",
    "label_ids",
    "positions_range",
]
"""What a finding is about; stable, so that a program may tell them apart."""

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that would go wrong."""

    kind: Kind
    level: Level
    """error: training would be wrong, or fail. warning: perhaps not meant, or wrong with another attention."""
    what: str
    """What happens, with numbers."""
    where: str
    """The first place, in words; for whole batches, which argument."""
    fix: str
    """The way out; a line to copy where there is one."""
    count: int = 1
    """How many places."""
    row: int | None = None
    """Row of the first place; None where the finding is about no single place."""
    column: int | None = None
    """Column of the first place, or its index in an array of boundaries."""

    def __str__(self) -> str:
        """Say it in three lines."""
        return f"{self.level} {self.kind}: {self.what}\n  where: {self.where}\n  fix:   {self.fix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """All findings of one batch, errors first; iterates over them."""

    findings: tuple[Finding, ...]
    rows: int
    width: int
    documents: int
    """Documents that the batch's own boundaries tell apart, padding not counted."""
    model: str | None = None
    """Name of the model's class; None where no model was given."""
    attention: str | None = None
    """Attention function that the model is set to."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; there may be warnings."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings by which training would be wrong."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of all findings, in their order."""
        return tuple(finding.kind for finding in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        """Go over the findings."""
        return iter(self.findings)

    def __len__(self) -> int:
        """Count the findings."""
        return len(self.findings)

    def __str__(self) -> str:
        """Say how many findings there are, then each in three lines."""
        errors = len(self.errors)
        counted = (
            f"{many(errors, 'error')}, {many(len(self) - errors, 'warning')}" if len(self) else "nothing"
        )
        with_model = f"; {self.model}, attention {self.attention}" if self.model else ""
        head = (
            f"{counted} found in {many(self.rows, 'row')} of {many(self.width, 'token')}, "
            f"{many(self.documents, 'document')}{with_model}"
        )
        return "\n".join([head, *map(str, self.findings)])


# ModelFacts: what of a model decides whether a batch keeps its documents apart in it.

MRope = Literal["none", "text_row", "text_row_or_plain"]
Detector = Literal["mask", "flash", "varlen", "unknown"]
"""How an attention learns of boundaries: from positions while it builds a mask (eager, sdpa, FlexAttention);
from cu_seqlens, else from positions (FlashAttention); from cu_seqlens alone ("varlen")."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a model makes of a batch's arguments."""

    name: str
    attention: str
    detector: Detector
    uses_cache: bool
    """Whether a cache is on where the batch doesn't say `use_cache`."""
    drops_cache: bool
    """Whether a cache is off whatever the batch says: gradients are checkpointed."""
    reads_positions: bool
    """Whether masks are built with a look at positions."""
    mrope: MRope
    """Whether positions have several rows (M-RoPE), of which only a fourth, in front, tells documents apart."""
    reads_boundaries: bool
    """Whether the family's code names `seq_idx` or cu_seqlens, as hybrids do for their recurrent layers."""
    drops_boundaries: bool
    """Whether cu_seqlens and their like get lost on the way through the layers."""
    recurrent_read: tuple[str, ...]
    """Arguments from which recurrent and convolving layers learn of boundaries; empty without such layers."""
    recurrent_in_one_row: bool
    """Whether those layers take the boundaries of a single row only."""
    learned_positions: bool
    """Whether positions are looked up in a table, so that a shift changes what a document computes."""
    vocabulary: int
    positions: int | None
    """The largest number of positions; None where the model names none."""
    refusal: str | None
    """Why `model_inputs` refuses the model; None where it doesn't."""


# Places: the first of many positions at which something is wrong, and a finding that names it.


def finding(
    kind: Kind, level: Level, what: str, fix: str, places: BoolArray | None = None, place: str = ""
) -> Finding:
    """Make a finding of all places at which something is wrong.

    `places`: bool `[rows, width]` or `[entries]`, true where it is wrong; None where it has no place.
    """
    if places is None:
        return Finding(kind=kind, level=level, what=what, where=place, fix=fix)
    first = int(np.argmax(places))
    row, column = divmod(first, places.shape[-1]) if places.ndim == 2 else (None, first)
    spot = f"row {row:,}, column {column:,}" if row is not None else f"index {column:,}"
    count = int(places.sum())
    where = f"{place} {spot}" + (f", and {count - 1:,} more" if count > 1 else "")
    return Finding(
        kind=kind, level=level, what=what, where=where, fix=fix, count=count, row=row, column=column
    )
