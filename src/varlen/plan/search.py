"""`Search`: what the planner may try; each switch is one idea, so that an ablation can take it away."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from varlen.errors import SettingError
from varlen.step_plan import MicroPacks
from varlen.types import Int32Array

SIZES = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, *(2**step * part for step in range(4, 31) for part in (1, 1.5)))
"""MicroPacks of a rank that are tried, as multiples of the stages; those that would hold fewer than `least_rows` are
not. So a step of any number of tokens has MicroPacks as small as its memory needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What the planner of `method="micropack"` may try, and how far it goes.

    All switches but `exact` are on. What each brings, and where a step would be faster without it, is measured in
    docs/planning-results.md.
    """

    slices: bool = True
    """Cut long documents into slices; off: whole documents, as Karmarkar-Karp and LPT balance them."""
    grades: bool = True
    """Make the first and last MicroPacks of a rank smaller, so that pipelines fill and drain faster."""
    orders: bool = True
    """Run long documents before short ones, and try forwards first; off: documents as they stand in the step."""
    splits_backward: bool = True
    """Run weight gradients as tasks of their own, which fill bubbles (zero-bubble schedules)."""
    merges: bool = True
    """Let neighbouring ranks share the longest documents (DP-Merge)."""
    asymmetric: bool = True
    """Compose backward MicroPacks apart from forward ones where the simulator gains 1 % or more, and all layers
    recompute fully: kept activations belong to the slices that made them."""
    exact: bool = False
    """Improve the assignment of documents to ranks with HiGHS; deterministic, and rarely worth its time."""
    repairs: bool = True
    """Where memory is short, recompute more and offload keys and values, before a step is refused."""
    closely: bool = True
    """Look closely at the best ways to share documents, and at more recomputation where memory is nearly full; off:
    one quick look, the first that fits, as `Planner` answers steps that aren't planned yet."""
    least_rows: int = 2048
    """Query rows that a slice has at least; fewer leave attention kernels slow."""
    most_merged_ranks: int = 8
    """Ranks that share one document at most for its work; where memory is short, as many as hold it share it."""
    micropacks_per_stage: tuple[float, ...] | None = None
    """MicroPacks of a rank, as multiples of the stages, rising: all that may be tried. None: `SIZES`, as far as the
    rows of a rank go; the search starts at 6, or at as many as memory needs, and climbs."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise SettingError(f"search {field.name}={value!r}; it is True or False")
        if not isinstance(self.least_rows, int | np.integer) or self.least_rows < 1:
            raise SettingError(
                f"search least_rows={self.least_rows!r}; it must be a whole number of at least 1"
            )
        ranks = self.most_merged_ranks
        if not isinstance(ranks, int | np.integer) or ranks < 1 or ranks & (ranks - 1):
            raise SettingError(f"search most_merged_ranks={ranks!r}; it must be a power of two")
        sizes = self.sizes
        if not isinstance(sizes, tuple) or not all(isinstance(size, int | float) for size in sizes):
            raise SettingError(f"search micropacks_per_stage={sizes!r}; it must be a tuple of numbers")
        rises = all(one < next_one for one, next_one in itertools.pairwise(sizes))
        if not sizes or not rises or not 0 < sizes[0] <= sizes[-1] < math.inf:
            raise SettingError(
                f"search micropacks_per_stage={sizes!r}; it must hold numbers above 0, each above the one before"
            )

    @property
    def sizes(self) -> tuple[float, ...]:
        """MicroPacks of a rank that may be tried, as multiples of the stages."""
        return SIZES if self.micropacks_per_stage is None else self.micropacks_per_stage


# One way to run a step that a simulator can score: the MicroPacks of both passes, and how tasks are ordered.

Schedule = Literal["one_f_one_b", "interleaved", "zero_bubble", "dispatch"]
"""How the tasks of a stage are ordered: a fixed schedule, or as the dispatcher finds them ready."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """A StepPlan that has no order of tasks yet; read-only."""

    forward: MicroPacks
    backward: MicroPacks
    first_ranks: Int32Array
    """int32 `[num_documents]`: as in `StepPlan`."""
    num_ranks: Int32Array
    """int32 `[num_documents]`: as in `StepPlan`."""
    splits_backward: bool = False
    schedule: Schedule = "dispatch"
    label: str = ""
    """Which settings made it, for people: `"capacity 65,536, equal counts, long first"`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
