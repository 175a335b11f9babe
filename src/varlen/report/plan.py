"""Plan one step by several methods, simulate the plans, and compare them: the figures of `varlen plan`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from varlen.cost.model import CostModel, Mode
from varlen.cost.shape import ModelShape, check_mesh
from varlen.counts import many
from varlen.errors import PlanError, SettingError
from varlen.plan.api import plan_step
from varlen.plan.bound import least_possible, lower_bound
from varlen.plan.micropack import narrowed
from varlen.plan.search import Search
from varlen.report.page import duration, ratio, share, times
from varlen.simulate.api import simulate
from varlen.simulate.timeline import Timeline
from varlen.step_plan import Mesh, Offload, PlanMethod, Recompute, Sharding, StepPlan, spread
from varlen.types import Int32Array

TITLES = {
    "micropack": "MicroPacks",
    "sliced": "equal slices",
    "balanced": "balanced packs",
    "packed_tuned": "tuned packs",
    "packed": "packs as they come",
    "dynamic_cp": "dynamic context parallelism",
}
"""The name of each method in tables."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MethodFigures:
    """The result of one method."""

    name: str
    """A method of `plan_step`, or "packed_tuned": "packed" with `tuned`."""
    plan: StepPlan | None = None
    """None if no plan fits."""
    timeline: Timeline | None = None
    """None without a plan."""
    planning_s: float = 0.0
    recomputed_ratio: float = 0.0
    """Share of the plan's FLOPs that are computed a second time."""
    refusal: str = ""
    """Why there is no plan."""

    @property
    def title(self) -> str:
        """The name in tables."""
        return TITLES.get(self.name, self.name)

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinity without a plan."""
        return float("inf") if self.timeline is None else float(self.timeline.makespan_s)

    @property
    def cp(self) -> int:
        """Ranks that share every document at least; 0 without a plan."""
        if self.plan is None:
            return 0
        return int(self.plan.num_ranks[self.plan.first_ranks >= 0].min()) * self.plan.mesh.cp

    @property
    def offload(self) -> str:
        """What the plan offloads to host memory, or ""."""
        return "" if self.plan is None or self.plan.offload == "none" else self.plan.offload

    @property
    def computing_ratio(self) -> float:
        """The share of all stages' time in which they compute; 0 without a plan."""
        return float(self.timeline.busy_s.mean()) / self.step_s if self.timeline is not None else 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alternative:
    """The same step with one choice of the fastest plan changed, planned again by its method."""

    title: str
    """The other choice: "recompute everything", "pp 8, dp 16"."""
    mesh: Mesh
    figures: MethodFigures


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedStep:
    """Another step of the same data, planned as the fastest plan of the first one was."""

    documents: StepDocuments
    figures: MethodFigures


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spread:
    """A figure over several steps."""

    mean: float
    least: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanComparison:
    """One step planned by several methods."""

    name: str
    """The name of the data, for headings."""
    model: str
    hardware: str
    hardware_source: str
    """The source of the hardware's rates."""
    mesh: Mesh
    documents: StepDocuments
    lower_bound_s: float
    memory_bytes: float
    """Memory of each GPU."""
    limit_bytes: float
    """Memory of each GPU that a plan may use."""
    model_flops: float
    """FLOPs of the step as MFU counts them: nothing that is recomputed."""
    peak_flops: float
    """Dense bf16 FLOPs of all GPUs a second, by their maker."""
    methods: tuple[MethodFigures, ...]
    """From the fastest to the slowest, those without a plan last."""
    alternatives: tuple[Alternative, ...] = ()
    """Other choices than those of the fastest plan; none unless they were asked for."""
    steps: tuple[PlannedStep, ...] = ()
    """The step and those after it, by the fastest method; none unless several were asked for."""
    rates: Mode = "calibrated"
    """What seconds come from: tables of rates, or FLOPs alone."""
    price: float | None = None
    """What a GPU-hour costs, in the user's currency."""
    tokens: float | None = None
    """Tokens of the whole training, of which hours and days are wanted."""
    settings: Mapping[str, str | int | float] = field(default_factory=dict)
    """Settings of `[plan]`, by name, that are those of all methods and no axis of the mesh."""
    kernel: str = ""
    """The attention kernel of published rates, or ""."""
    are_bytes: bool = False
    """Whether lengths are in bytes, since no tokenizer was given."""
    estimated: str = ""
    """A sentence on the error of measured rates, or ""."""
    stretched: str = ""
    """A sentence on documents beyond the positions of the model's checkpoint, or ""."""

    @property
    def capacity(self) -> int:
        """Tokens that documents are truncated to."""
        return self.documents.capacity

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, after truncation."""
        return self.documents.num_tokens

    @property
    def longest(self) -> int:
        """Tokens of the step's longest document, after truncation."""
        return int(self.documents.lengths.max())

    @property
    def best(self) -> MethodFigures | None:
        """The fastest method, or None if no method has a plan."""
        return self.methods[0] if self.methods and self.methods[0].timeline is not None else None

    @property
    def ours(self) -> MethodFigures | None:
        """MicroPacks, or the fastest method if they have no plan; None if no method has one."""
        row = self.method("micropack")
        return row if row is not None and row.timeline is not None else self.best

    @property
    def truncated_share(self) -> float:
        """Share of all tokens lost to truncation."""
        lost = self.documents.truncated_tokens
        return lost / max(self.num_tokens + lost, 1)

    def method(self, name: str) -> MethodFigures | None:
        """Return the figures of one method, or None if it isn't among them."""
        return next((row for row in self.methods if row.name == name), None)

    def bound_ratio(self, row: MethodFigures) -> float:
        """Return a method's step time over the lower bound; infinity without a plan."""
        return row.step_s / self.lower_bound_s

    def tokens_per_s(self, row: MethodFigures) -> float:
        """Return tokens of the whole mesh a second; 0 without a plan."""
        return self.num_tokens / row.step_s

    def mfu(self, row: MethodFigures) -> float:
        """Return the model's FLOPs over those of the GPUs' peak in a step; 0 without a plan."""
        return self.model_flops / (row.step_s * self.peak_flops)

    def fastest_ratio(self, row: MethodFigures) -> float:
        """Return a method's step time over that of the fastest; infinity without a plan."""
        return row.step_s / self.methods[0].step_s

    def gpu_hours(self, row: MethodFigures) -> float:
        """Return GPU-hours of the step, on all GPUs; infinity without a plan."""
        return row.step_s * self.mesh.num_gpus / 3600

    def gpu_hours_per_billion(self, row: MethodFigures) -> float:
        """Return GPU-hours of 10⁹ tokens of such steps; infinity without a plan."""
        return 1e9 * self.gpu_hours(row) / self.num_tokens

    def over_steps(self) -> dict[str, Spread]:
        """Return figures over several steps by their names in JSON; none unless several have a plan.

        Means of rates and costs are those of all tokens of these steps together.
        """
        done = [one for one in self.steps if one.figures.timeline is not None]
        if len(done) < 2:
            return {}
        sizes = [(one.documents.num_tokens, one.figures.step_s) for one in done]
        each = [self._figures(*size) for size in sizes]
        mean = self._figures(*np.mean(sizes, axis=0).tolist())
        return {
            name: Spread(
                mean=value, least=min(one[name] for one in each), most=max(one[name] for one in each)
            )
            for name, value in mean.items()
        }

    def _figures(self, tokens: float, step_s: float) -> dict[str, float]:
        rate = tokens / step_s / self.mesh.num_gpus
        hours = 1e9 / rate / 3600
        costs = {} if self.price is None else {"cost_per_billion_tokens": self.price * hours}
        return {
            "step_s": step_s,
            "tokens": tokens,
            "tokens_per_s_and_gpu": rate,
            "gpu_hours_per_billion_tokens": hours,
            **costs,
        }

    def training_hours(self, row: MethodFigures) -> float:
        """Return GPU-hours of all tokens of the training, at the mean of several steps where they were planned."""
        several = self.over_steps().get("gpu_hours_per_billion_tokens")
        return (self.tokens or 0.0) / 1e9 * (several.mean if several else self.gpu_hours_per_billion(row))

    def margin_bytes(self, row: MethodFigures) -> float:
        """Return the bytes that the fullest GPU leaves of what a plan may use; 0 without a plan."""
        return 0.0 if row.timeline is None else self.limit_bytes - row.timeline.peak_bytes

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        best = self.best
        return {
            "name": self.name,
            "headline": headline(self),
            "simulated": True,
            "fastest": None if best is None else best.name,
            "model": self.model,
            "hardware": self.hardware,
            "hardware_source": self.hardware_source,
            "rates": self.rates,
            "rates_error": self.estimated,
            "attention": self.kernel,
            "gpus": self.mesh.num_gpus,
            "mesh": asdict(self.mesh),
            "capacity": self.capacity,
            **self.documents.to_json(),
            "sample": sampling(self.documents),
            "are_bytes": self.are_bytes,
            "truncated_share": self.truncated_share,
            "positions": self.stretched,
            "lower_bound_s": self.lower_bound_s,
            "memory_bytes": self.memory_bytes,
            "limit_bytes": self.limit_bytes,
            "kept_free_bytes": self.memory_bytes - self.limit_bytes,
            "model_flops": self.model_flops,
            "peak_flops": self.peak_flops,
            "price_per_gpu_hour": self.price,
            "methods": [{"method": row.name, **self._row(row)} for row in self.methods],
            "alternatives": [
                {"choice": one.title, "mesh": asdict(one.mesh), **self._row(one.figures), **self._change(one)}
                for one in self.alternatives
            ],
            "steps": [
                one.documents.to_json()
                | (
                    self._figures(one.documents.num_tokens, one.figures.step_s)
                    if one.figures.timeline is not None
                    else {"refusal": one.figures.refusal}
                )
                for one in self.steps
            ],
            "over_steps": {name: asdict(one) for name, one in self.over_steps().items()},
            **({} if self.tokens is None or best is None else self._training(best)),
            "train": None if best is None else training_table(self, best),
        }

    def _training(self, best: MethodFigures) -> dict[str, Any]:
        hours = self.training_hours(best)
        money = {} if self.price is None else {"cost": self.price * hours}
        days = hours / self.mesh.num_gpus / 24
        return {"training": {"tokens": self.tokens, "gpu_hours": hours, "days": days, **money}}

    def _change(self, other: Alternative) -> dict[str, float]:
        planned = other.figures.timeline is not None
        return {"change": self.fastest_ratio(other.figures) - 1} if planned else {}

    def _row(self, row: MethodFigures) -> dict[str, Any]:
        if row.plan is None or row.timeline is None:
            return {"planning_s": row.planning_s, "refusal": row.refusal}
        tokens_per_s, hours = self.tokens_per_s(row), self.gpu_hours_per_billion(row)
        costs = {} if self.price is None else {"cost_per_billion_tokens": self.price * hours}
        return {
            "cp": row.cp,
            "step_s": row.step_s,
            "fastest_ratio": self.fastest_ratio(row),
            "lower_bound_ratio": self.bound_ratio(row),
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_and_gpu": tokens_per_s / self.mesh.num_gpus,
            "mfu": self.mfu(row),
            "gpu_hours": self.gpu_hours(row),
            "gpu_hours_per_billion_tokens": hours,
            **costs,
            "computing_ratio": row.computing_ratio,
            "bubble_ratio": float(row.timeline.bubble_ratio),
            "exposed_ratio": float(row.timeline.exposed_ratio),
            "imbalance": float(row.timeline.imbalance),
            "peak_bytes": float(row.timeline.peak_bytes),
            "margin_bytes": self.margin_bytes(row),
            "margin_ratio": self.margin_bytes(row) / self.limit_bytes,
            "planning_s": row.planning_s,
            "planning_ratio": row.planning_s / row.step_s,
            "micropacks": int(row.plan.forward.num_micropacks),
            "fewest_micropacks": int(row.plan.forward.counts.min()),
            "most_micropacks": int(row.plan.forward.counts.max()),
            "merged_documents": row.plan.num_merged,
            "splits_backward": row.plan.splits_backward,
            "recompute": row.plan.recompute,
            "recompute_share": row.plan.recompute_share,
            "recomputed_ratio": row.recomputed_ratio,
            "offload": row.plan.offload,
            "answered_by": row.plan.answered_by,
        }


OnProgress = Callable[[int, int, str], None]
METHODS = tuple(TITLES)
_TUNED, _AS_THEY_COME = "packed_tuned", "packed"


def compare(
    documents: StepDocuments,
    *,
    cost: CostModel,
    mesh: Mesh,
    methods: Sequence[str] = METHODS,
    repairs: bool = True,
    name: str = "",
    alternatives: bool = False,
    more: Sequence[StepDocuments] = (),
    price: float | None = None,
    tokens: float | None = None,
    on_progress: OnProgress = lambda *_: None,
    **told: Any,
) -> PlanComparison:
    """Plan one step by several methods, each at its best context parallelism, and simulate each plan.

    With `alternatives`, the step is planned again with each single choice of the fastest plan changed; `more` steps
    are planned by the fastest method. Other arguments are fields of `PlanComparison`.
    """
    check_methods(methods)
    check_price(price, tokens)
    rows, total = [], len(methods) * (2 if alternatives else 1) + len(more)
    on_progress(0, total, "loading kernels")
    load_kernels(documents, methods, cost=cost, mesh=mesh)
    for done, method in enumerate(methods):
        on_progress(done, total, f"planning {TITLES[method]}")
        row = tuned(documents, method, cost=cost, mesh=mesh, repairs=repairs)
        rows.append(_at_work(row) if len(methods) > 1 else row)
    rows.sort(key=lambda row: row.step_s)
    best, others, steps = rows[0], [], [PlannedStep(documents=documents, figures=rows[0])] if more else []
    choices = list(other_choices(best, cost, mesh)) if alternatives else []
    for done, (title, changed, other) in enumerate(choices):
        on_progress(len(methods) * (len(choices) + done) // len(choices), total, f"planning {title}")
        may_repair = repairs and changed is cost
        row = tuned(documents, best.name, cost=changed, mesh=other, repairs=may_repair)
        others.append(Alternative(title=title, mesh=other, figures=row))
    for done, step in enumerate(more if best.plan is not None else ()):
        on_progress(total - len(more) + done, total, f"planning step {step.step:,}")
        row = tuned(step, best.name, cost=cost, mesh=mesh, repairs=repairs)
        steps.append(PlannedStep(documents=step, figures=row))
    on_progress(total, total, "planned")
    return PlanComparison(
        name=name,
        model=cost.model.name or "a model",
        hardware=cost.hardware.name,
        hardware_source=cost.hardware.source,
        mesh=mesh,
        documents=documents,
        lower_bound_s=lower_bound(documents.lengths, cost, mesh).seconds,
        memory_bytes=float(cost.hardware.memory_bytes),
        limit_bytes=float(cost.memory(mesh).limit_bytes),
        model_flops=cost.flops(documents.lengths).model,
        peak_flops=1e12 * cost.hardware.peak_tflops * mesh.num_gpus,
        methods=tuple(rows),
        alternatives=tuple(others),
        steps=tuple(steps),
        rates=cost.mode,
        price=price,
        tokens=tokens,
        kernel=cost.hardware.published_kernel,
        estimated=cost.hardware.held_out,
        stretched=stretched(cost.model, int(documents.lengths.max())),
        **told,
    )


def load_kernels(documents: StepDocuments, methods: Sequence[str], *, cost: CostModel, mesh: Mesh) -> None:
    """Plan a few short documents, so that the times of planning don't include compilation."""
    import numba  # noqa: F401  # once it is loaded, kernels are compiled for small inputs too

    few = replace(documents, lengths=documents.lengths[:4].clip(max=2048))
    for method in methods:
        planned(few, method, cost=cost, mesh=mesh)


def planned(
    documents: StepDocuments, method: str, *, cost: CostModel, mesh: Mesh, repairs: bool = True
) -> MethodFigures:
    """Plan a step by one method, and simulate the plan."""
    began = time.perf_counter()
    try:
        plan = plan_step(
            documents.lengths,
            cost=cost,
            mesh=mesh,
            method=cast("PlanMethod", "packed" if method == _TUNED else method),
            capacity=documents.capacity,
            tuned=method == _TUNED,
            search=Search(repairs=repairs),
        )
    except PlanError as error:
        return MethodFigures(name=method, planning_s=time.perf_counter() - began, refusal=str(error))
    planning_s = time.perf_counter() - began
    done, once = (
        one.flops(documents.lengths).hardware
        for one in (cost.as_planned(plan), cost.replace(recompute="none", recompute_share=1.0))
    )
    return MethodFigures(
        name=method,
        plan=plan,
        timeline=simulate(plan, cost),
        planning_s=planning_s,
        recomputed_ratio=1 - once / done,
    )


def tuned(
    documents: StepDocuments, method: str, *, cost: CostModel, mesh: Mesh, repairs: bool = True
) -> MethodFigures:
    """Plan a step by one method at its best context parallelism on the same GPUs, and simulate the plan.

    "micropack" tries other context parallelism by itself, and packs as they come have that of the mesh. All others
    are planned on the meshes that "micropack" tries; plans are of the mesh given, whose ranks then share documents.
    """
    if method in ("micropack", _AS_THEY_COME):
        return planned(documents, method, cost=cost, mesh=mesh, repairs=repairs)
    best, planning_s = None, 0.0
    by = cast("PlanMethod", "packed" if method == _TUNED else method)
    for narrow in narrowed(mesh, Search()):
        limit_s = best.step_s if best else math.inf
        if (
            best
            and least_possible(documents.lengths, cost, narrow, by, least_rows=Search().least_rows) >= limit_s
        ):
            continue
        row = planned(documents, method, cost=cost, mesh=narrow, repairs=repairs)
        planning_s += row.planning_s
        if best is None or row.step_s < limit_s:
            best = row
    assert best is not None  # the mesh itself is the first
    if best.plan is None:
        return replace(best, planning_s=planning_s)
    plan = spread(best.plan, mesh.dp // best.plan.mesh.dp)
    return replace(best, plan=plan, timeline=simulate(plan, cost), planning_s=planning_s)


def other_choices(best: MethodFigures, cost: CostModel, mesh: Mesh) -> Iterator[tuple[str, CostModel, Mesh]]:
    """Yield a title, a cost model and a mesh for each choice of a plan that could be another one.

    Recomputation and offloading are changed one at a time, pipeline stages and tensor parallelism are halved and
    doubled at the cost of data-parallel ranks, and other states are sharded. Without a plan there is none.
    """
    plan = best.plan
    if plan is None:
        return
    for level in get_args(Recompute):
        if (level, 1.0) != (plan.recompute, plan.recompute_share):
            much = _MUCH[level]
            yield (
                f"recompute {much}",
                cost.replace(recompute=level, recompute_share=1.0, offload=plan.offload),
                mesh,
            )
    kept = {"recompute": plan.recompute, "recompute_share": plan.recompute_share}
    for offload in get_args(Offload):
        if offload != plan.offload:
            much = "nothing" if offload == "none" else "keys and values"
            yield f"offload {much}", cost.replace(offload=offload, **kept), mesh
    for axis in ("pp", "tp"):
        wide = getattr(mesh, axis)
        for other in (wide // 2, 2 * wide):
            if other and mesh.dp * wide % other == 0:
                chunks = mesh.virtual_stages if (axis, other) != ("pp", 1) else 1
                divided: dict[str, Any] = {
                    axis: other,
                    "dp": mesh.dp * wide // other,
                    "virtual_stages": chunks,
                }
                changed = replace(mesh, **divided)
                if _divides(cost, changed, mesh):
                    yield f"{axis} {other}, dp {changed.dp}", cost, changed
    if mesh.dp * mesh.cp > 1:
        sharding: Sharding = "optimizer" if mesh.sharding == "parameters" else "parameters"
        yield f"sharding {sharding}", cost, replace(mesh, sharding=sharding)


_MUCH: dict[Recompute, str] = {"none": "nothing", "selective": "selectively", "full": "everything"}


def _divides(cost: CostModel, mesh: Mesh, before: Mesh) -> bool:
    """Return whether a mesh divides the model, and shares tensors within a node where they were shared so before."""
    if mesh.tp > max(cost.hardware.gpus_per_node, before.tp):
        return False
    try:
        check_mesh(cost.model, mesh)
    except SettingError:
        return False
    return True


def _at_work(row: MethodFigures) -> MethodFigures:
    """Return packs as they come, without their plan if some ranks have no pack."""
    if row.name != _AS_THEY_COME or row.plan is None or row.plan.forward.counts.all():
        return row
    idle = int((row.plan.forward.counts == 0).sum())
    return MethodFigures(
        name=row.name,
        planning_s=row.planning_s,
        refusal=f"{idle:,} of {row.plan.mesh.dp:,} data-parallel ranks would have no pack; more --documents or a "
        "smaller --capacity make more packs",
    )


def check_price(price: float | None, tokens: float | None = None) -> None:
    """Refuse a price or a number of tokens that is none."""
    for value, words in (
        (price, "--price is what a GPU-hour costs"),
        (tokens, "--tokens is how many are trained in all"),
    ):
        if value is not None and not 0 < value < math.inf:
            raise SettingError(f"{words}, a number above 0; got {value:g}")


def check_methods(methods: Sequence[str]) -> None:
    """Refuse unknown methods."""
    for method in methods:
        if method not in METHODS:
            near = get_close_matches(method, METHODS, n=1)
            meant = f"did you mean {near[0]}? There" if near else "there"
            raise SettingError(f"no method is called {method!r}; {meant} are {', '.join(METHODS)}")


def baseline(comparison: PlanComparison) -> MethodFigures | None:
    """Return the fastest method but ours, with which ours is compared; None if there is no other plan.

    Packs as they come, which aren't tuned, count only where nothing else has a plan.
    """
    planned = [row for row in comparison.methods if row.timeline is not None and row is not comparison.ours]
    tuned = [row for row in planned if row.name != _AS_THEY_COME]
    return min(tuned or planned, key=lambda row: row.step_s, default=None)


def headline(comparison: PlanComparison) -> str:
    """Summarize the comparison in one sentence: the best other method first, then tuned packs."""
    ours, best = comparison.ours, comparison.best
    if ours is None or best is None:
        return "No method holds this step on this mesh."
    other, packs = baseline(comparison), comparison.method(_TUNED)
    if other is None:
        step = f"{duration(ours.step_s)} a step with {ours.title}"
        return f"{step}, {ratio(comparison.bound_ratio(ours))} times the lower bound."
    if ours.step_s >= _CLEARLY * best.step_s:
        slower = f"{times(comparison.fastest_ratio(ours))} as long"
        return f"{duration(best.step_s)} a step with {at_cp(best)}; {ours.title} take {slower}."
    step = f"{duration(ours.step_s)} a step with {ours.title}"
    words = f"{step}: on this mesh {_beside(ours, other)}, the best other method"
    if packs is None or packs.timeline is None or packs in (ours, other):
        return f"{words}."
    return f"{words}, and {_beside(ours, packs)}."


_CLEARLY = 1.01
"""Methods whose step times differ by less are called equally fast."""


def at_cp(row: MethodFigures) -> str:
    """Return a method's title, with its context parallelism if it has some."""
    return row.title + (f" at cp {row.cp}" if row.cp > 1 else "")


def _beside(ours: MethodFigures, other: MethodFigures) -> str:
    """Return how many times as fast as another method ours is."""
    faster = other.step_s / ours.step_s
    title = at_cp(other)
    return f"{times(faster)} as fast as {title}" if faster >= _CLEARLY else f"no faster than {title}"


def stretched(model: ModelShape, longest: int) -> str:
    """Return a caveat if documents exceed the positions of the model's published checkpoint; else "".

    Named shapes don't limit positions, since long-context training first extends those of a checkpoint; users should
    know that this step needs it. A model with a limit has refused longer documents.

    >>> stretched(ModelShape.named("llama-3-8b"), 262_144).partition("; ")[2]
    'documents of up to 262,144 tokens are planned as if its positions were stretched.'
    """
    positions = model.published_positions
    if positions is None or model.max_positions is not None or longest <= positions:
        return ""
    return (
        f"{model.name} was published with {positions:,} positions; documents of up to {longest:,} tokens are planned "
        "as if its positions were stretched."
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepDocuments:
    """The documents of one optimizer step."""

    lengths: Int32Array
    """int32 `[num_documents]`: after truncation, none of them 0."""
    capacity: int
    step: int
    """Number of the step in the data, from 0."""
    truncated_documents: int
    truncated_tokens: int
    """Tokens lost because their documents are longer than the capacity."""
    num_steps: int
    """Steps that the data has."""
    mean_tokens: float
    """Tokens of the average step of the data, after truncation."""
    longest_of_all: int
    """Tokens of the longest document of the data, after truncation."""
    empty: int
    """Documents of 0 tokens in the data, which no step holds."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, after truncation."""
        return int(self.lengths.sum(dtype=np.int64))

    def to_json(self) -> dict[str, Any]:
        """Return its figures as plain values."""
        return {
            "step": self.step,
            "documents": len(self.lengths),
            "tokens": self.num_tokens,
            "longest": int(self.lengths.max()),
            "truncated_documents": self.truncated_documents,
            "truncated_tokens": self.truncated_tokens,
            "data": {
                "steps": self.num_steps,
                "mean_tokens": self.mean_tokens,
                "longest": self.longest_of_all,
                "empty_documents": self.empty,
            },
        }


def sampling(step: StepDocuments) -> str:
    """Return how a step differs from the average of its data, and what plans another; "" if it is all of it."""
    if step.num_steps == 1:
        return ""
    off = step.num_tokens / step.mean_tokens - 1
    beside = f"{share(abs(off))} {'fewer' if off < 0 else 'more'} tokens than" if off else "as many tokens as"
    longest = int(step.lengths.max())
    return (
        f"Step {step.step:,} is a sample, one of {many(step.num_steps, 'step')} of this data: it has {beside} their "
        f"mean, {step.mean_tokens:,.0f}; its longest document has {longest:,}, that of the data "
        f"{step.longest_of_all:,}. --step {(step.step + 1) % step.num_steps} plans another."
    )


def training_table(found: PlanComparison, row: MethodFigures) -> str:
    """Return the tables of a configuration of `varlen train` that run such a plan."""
    mesh = found.mesh
    method = {_TUNED: _AS_THEY_COME}.get(row.name, row.name)
    # Of MicroPacks the planner finds the context parallelism of each step.
    cp = mesh.cp if row.name == "micropack" else max(row.cp, 1)
    axes = {"pp": mesh.pp, "cp": cp, "tp": mesh.tp, "virtual_stages": mesh.virtual_stages}
    plan: dict[str, Any] = {} if method == "micropack" else {"method": method}
    plan |= {name: size for name, size in axes.items() if size > 1} | dict(found.settings)
    parallel = {"parallel": "fsdp" if mesh.sharding == "parameters" else "ddp"} if mesh.num_gpus > 1 else {}
    tables = {"plan": plan, "run": {**parallel, "precision": "bf16"}}
    return "\n".join(
        line
        for name, table in tables.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()))
    )


def step_documents(
    lengths: npt.NDArray[np.integer], *, documents: int, step: int, capacity: int, seed: int | None
) -> StepDocuments:
    """Take the documents of one step from all lengths, without empty ones, in the order of `seed`."""
    if documents < 1:
        raise SettingError(f"--documents must be at least 1, the documents of a step; got {documents}")
    if seed is not None and seed < 0:
        raise SettingError(f"--seed must be at least 0; got {seed}")
    given = np.asarray(lengths)
    if not given.size:
        raise SettingError("there is no document, and nothing to plan; is it the right file?")
    if not given.any():
        raise SettingError(
            f"every document is empty; there is nothing to plan ({many(given.size, 'length')}, all 0)"
        )
    empty, given = int((given == 0).sum()), given[given > 0]
    num_steps = -(-given.size // documents)
    if not 0 <= step < num_steps:
        raise SettingError(
            f"--step {step} isn't there: {many(given.size, 'document')}, {documents:,} a step, make "
            f"{many(num_steps, 'step')}, 0 to {num_steps - 1:,}"
        )
    order = np.arange(given.size) if seed is None else np.random.default_rng(seed).permutation(given.size)
    mine = given[order[step * documents : (step + 1) * documents]].astype(np.int64)
    truncated = np.minimum(mine, capacity)
    return StepDocuments(
        lengths=truncated.astype(np.int32),
        capacity=capacity,
        step=step,
        truncated_documents=int((mine > capacity).sum()),
        truncated_tokens=int((mine - truncated).sum()),
        num_steps=num_steps,
        mean_tokens=float(np.minimum(given, capacity).mean()) * min(documents, given.size),
        longest_of_all=min(int(given.max()), capacity),
        empty=empty,
    )
