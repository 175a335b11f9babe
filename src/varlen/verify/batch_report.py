"""BatchReport: what would go wrong with a batch, one finding each, with the place and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from varlen.counts import many

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
