"""ModelFacts: what of a model decides whether a batch keeps its documents apart in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
