"""`Search`: what the planner may try, with a switch for each idea, for ablations; and `Candidate`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from varlen.errors import SettingError
from varlen.step_plan import MicroPacks
from varlen.types import Int32Array

SIZES = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, *(2**step * part for step in range(4, 31) for part in (1, 1.5)))
"""Numbers of MicroPacks of a rank that are tried, as multiples of the stages, as far as they hold `least_rows`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What the planner of `method="micropack"` may try, and how far it goes.

    All switches but `exact` are on by default; docs/planning-results.md has measurements of each.
    """

    slices: bool = True
    """Cut long documents into slices; off: whole documents, as Karmarkar-Karp and LPT balance them."""
    grades: bool = True
    """Make the first and last MicroPacks of a rank smaller, so that pipelines fill and drain faster."""
    orders: bool = True
    """Run long documents before short ones, and try forwards first; off: documents in the order of the step."""
    splits_backward: bool = True
    """Run weight gradients as separate tasks, which fill bubbles (zero-bubble schedules)."""
    merges: bool = True
    """Let neighbouring ranks share the longest documents (DP-Merge)."""
    asymmetric: bool = True
    """Compose backward MicroPacks independently of forward ones if the simulator gains 1 % or more. Needs full
    recomputation of all layers, since stored activations belong to the slices that computed them."""
    exact: bool = False
    """Improve the assignment of documents to ranks with HiGHS; deterministic, and rarely worth its time."""
    repairs: bool = True
    """If memory is short, recompute more and offload keys and values before a step is refused."""
    closely: bool = True
    """Search the best groupings of documents closely, and try more recomputation if memory is nearly full; off: one
    quick search that returns the first plan that fits, which `Planner` uses for steps that aren't planned yet."""
    least_rows: int = 2048
    """Least query rows of a slice; attention kernels are slow with fewer."""
    most_merged_ranks: int = 64
    """Most ranks that share one document because of its work; if memory is short, as many share it as needed."""
    micropacks_per_stage: tuple[float, ...] | None = None
    """Numbers of MicroPacks of a rank to try, as multiples of the stages, rising. None: `SIZES`, as far as the rank's
    rows allow; the search starts at 6, or at as many as memory needs."""

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
        rises = all(before < after for before, after in itertools.pairwise(sizes))
        if not sizes or not rises or not 0 < sizes[0] <= sizes[-1] < math.inf:
            raise SettingError(
                f"search micropacks_per_stage={sizes!r}; it must hold numbers above 0, each above the one before"
            )

    @property
    def contains(self) -> bool:
        """Whether other methods' plans are allowed, which have MicroPacks of their own sizes and orders."""
        return self.grades and self.orders and self.micropacks_per_stage is None

    @property
    def sizes(self) -> tuple[float, ...]:
        """`micropacks_per_stage`, or its default."""
        return SIZES if self.micropacks_per_stage is None else self.micropacks_per_stage


Families = Iterable[Iterable["Candidate"]]
"""Candidates, of which those that differ only in the order of their MicroPacks stand together."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """MicroPacks of both passes, which `plan.score` turns into a StepPlan; read-only."""

    forward: MicroPacks
    backward: MicroPacks
    first_ranks: Int32Array
    """int32 `[num_documents]`: as in `StepPlan`."""
    num_ranks: Int32Array
    """int32 `[num_documents]`: as in `StepPlan`."""
    label: str = ""
    """The settings that made it, for display: `"capacity 65,536, equal counts, long first"`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
