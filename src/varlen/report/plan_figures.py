"""What a report of planning shows: one step planned by several methods, each with its timeline or why it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from varlen.simulate.timeline import Timeline
from varlen.step_plan import Mesh, StepPlan

TITLES = {
    "micropack": "MicroPacks",
    "sliced": "equal slices",
    "balanced": "balanced packs",
    "packed_tuned": "packs, tuned",
    "packed": "packs as they come",
    "dynamic_cp": "dynamic context parallelism",
}
"""What each way of planning is called in tables."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MethodFigures:
    """One way of planning: what came of it."""

    name: str
    """A method of `plan_step`, or "packed_tuned": packs at their best capacity, balance and order."""
    plan: StepPlan | None = None
    """None where no plan holds the step."""
    timeline: Timeline | None = None
    """Of the plan; None where there is none."""
    planning_s: float = 0.0
    refusal: str = ""
    """Why there is no plan."""

    @property
    def title(self) -> str:
        """What it is called in tables."""
        return TITLES.get(self.name, self.name)

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinity where no plan holds it."""
        return float("inf") if self.timeline is None else float(self.timeline.makespan_s)

    @property
    def recompute(self) -> str:
        """What the plan recomputes, or ""."""
        if self.plan is None or self.plan.recompute_share == 1:
            return "" if self.plan is None else self.plan.recompute
        return f"{self.plan.recompute}, {self.plan.recompute_share:.0%} of layers"

    @property
    def offload(self) -> str:
        """What the plan keeps in host memory, or ""."""
        return "" if self.plan is None or self.plan.offload == "none" else self.plan.offload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanComparison:
    """One step planned in several ways, and what they are measured against."""

    name: str
    """Of the data, for headings."""
    model: str
    hardware: str
    hardware_source: str
    """Where the figures of the hardware come from."""
    mesh: Mesh
    capacity: int
    step: int
    """Which step of the data this is, from 0."""
    num_documents: int
    num_tokens: int
    """After truncation."""
    longest: int
    truncated_documents: int
    truncated_tokens: int
    """Tokens lost because their documents are longer than the capacity."""
    lower_bound_s: float
    limit_bytes: float
    """Memory that a plan may use of each GPU."""
    methods: tuple[MethodFigures, ...]
    """From the fastest to the slowest, those without a plan last."""
    are_bytes: bool = False
    """Whether lengths are of bytes, since no tokenizer was given."""
    estimated: str = ""
    """A sentence about how well measured rates predict, or ""."""
    stretched: str = ""
    """A sentence about documents beyond the positions that the model was published with, or ""."""

    @property
    def best(self) -> MethodFigures | None:
        """The fastest method, or None where no method has a plan."""
        return self.methods[0] if self.methods and self.methods[0].timeline is not None else None

    @property
    def truncated_share(self) -> float:
        """Tokens lost to truncation, of all tokens given."""
        return self.truncated_tokens / max(self.num_tokens + self.truncated_tokens, 1)

    def method(self, name: str) -> MethodFigures | None:
        """Return the figures of one method, or None where it wasn't asked for."""
        return next((row for row in self.methods if row.name == name), None)

    def bound_ratio(self, row: MethodFigures) -> float:
        """Return a method's step time over the lower bound; infinity where it has no plan."""
        return row.step_s / self.lower_bound_s

    def tokens_per_s(self, row: MethodFigures) -> float:
        """Return tokens of the whole mesh a second; 0 where it has no plan."""
        return self.num_tokens / row.step_s

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        mesh = {
            name: getattr(self.mesh, name) for name in ("dp", "pp", "cp", "tp", "virtual_stages", "sharding")
        }
        return {
            "name": self.name,
            "model": self.model,
            "hardware": self.hardware,
            "hardware_source": self.hardware_source,
            "gpus": self.mesh.num_gpus,
            "mesh": mesh,
            "capacity": self.capacity,
            "step": self.step,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "longest": self.longest,
            "truncated_documents": self.truncated_documents,
            "truncated_tokens": self.truncated_tokens,
            "lower_bound_s": self.lower_bound_s,
            "limit_bytes": self.limit_bytes,
            "methods": [self._row(row) for row in self.methods],
        }

    def _row(self, row: MethodFigures) -> dict[str, Any]:
        if row.plan is None or row.timeline is None:
            return {"method": row.name, "planning_s": row.planning_s, "refusal": row.refusal}
        return {
            "method": row.name,
            "step_s": row.step_s,
            "lower_bound_ratio": self.bound_ratio(row),
            "tokens_per_s": self.tokens_per_s(row),
            "bubble_ratio": float(row.timeline.bubble_ratio),
            "exposed_ratio": float(row.timeline.exposed_ratio),
            "imbalance": float(row.timeline.imbalance),
            "peak_bytes": float(row.timeline.peak_bytes),
            "planning_s": row.planning_s,
            "micropacks": int(row.plan.forward.num_micropacks),
            "merged_documents": row.plan.num_merged,
            "splits_backward": row.plan.splits_backward,
            "recompute": row.plan.recompute,
            "recompute_share": row.plan.recompute_share,
            "offload": row.plan.offload,
            "answered_by": row.plan.answered_by,
        }
