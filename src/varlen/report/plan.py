"""Plan one step by several methods, simulate the plans, and compare them: the figures and table of `varlen plan`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.counts import many
from varlen.errors import PlanError, SettingError
from varlen.plan.api import plan_step
from varlen.plan.bound import least_possible, lower_bound
from varlen.plan.micropack import narrowed
from varlen.plan.search import Search
from varlen.report.page import share, times
from varlen.simulate.api import simulate
from varlen.simulate.timeline import Timeline
from varlen.step_plan import Mesh, PlanMethod, StepPlan, spread
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
    def recompute(self) -> str:
        """What the plan recomputes, or ""."""
        if self.plan is None or self.plan.recompute_share == 1:
            return "" if self.plan is None else self.plan.recompute
        return f"{self.plan.recompute}, {self.plan.recompute_share:.0%} of layers"

    @property
    def offload(self) -> str:
        """What the plan offloads to host memory, or ""."""
        return "" if self.plan is None or self.plan.offload == "none" else self.plan.offload


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
    capacity: int
    step: int
    """Number of the step in the data, from 0."""
    num_documents: int
    num_tokens: int
    """After truncation."""
    longest: int
    truncated_documents: int
    truncated_tokens: int
    """Tokens lost because their documents are longer than the capacity."""
    lower_bound_s: float
    limit_bytes: float
    """Memory of each GPU that a plan may use."""
    model_flops: float
    """FLOPs of the step as MFU counts them: nothing that is recomputed."""
    peak_flops: float
    """Dense bf16 FLOPs of all GPUs a second, by their maker."""
    methods: tuple[MethodFigures, ...]
    """From the fastest to the slowest, those without a plan last."""
    are_bytes: bool = False
    """Whether lengths are in bytes, since no tokenizer was given."""
    estimated: str = ""
    """A sentence on the error of measured rates, or ""."""
    stretched: str = ""
    """A sentence on documents beyond the positions of the model's checkpoint, or ""."""

    @property
    def best(self) -> MethodFigures | None:
        """The fastest method, or None if no method has a plan."""
        return self.methods[0] if self.methods and self.methods[0].timeline is not None else None

    @property
    def truncated_share(self) -> float:
        """Share of all tokens lost to truncation."""
        return self.truncated_tokens / max(self.num_tokens + self.truncated_tokens, 1)

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

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            "name": self.name,
            "model": self.model,
            "hardware": self.hardware,
            "hardware_source": self.hardware_source,
            "gpus": self.mesh.num_gpus,
            "mesh": asdict(self.mesh),
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
            "cp": row.cp,
            "step_s": row.step_s,
            "lower_bound_ratio": self.bound_ratio(row),
            "tokens_per_s": self.tokens_per_s(row),
            "mfu": self.mfu(row),
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
    are_bytes: bool = False,
    on_progress: OnProgress = lambda *_: None,
) -> PlanComparison:
    """Plan one step by several methods, each at its best context parallelism, and simulate each plan."""
    check_methods(methods)
    rows = []
    on_progress(0, len(methods), "loading kernels")
    load_kernels(documents, methods, cost=cost, mesh=mesh)
    for done, method in enumerate(methods):
        on_progress(done, len(methods), f"planning {TITLES[method]}")
        row = tuned(documents, method, cost=cost, mesh=mesh, repairs=repairs)
        rows.append(_at_work(row) if len(methods) > 1 else row)
    on_progress(len(methods), len(methods), "planned")
    rows.sort(key=lambda row: row.step_s)
    longest = int(documents.lengths.max())
    return PlanComparison(
        name=name,
        model=cost.model.name or "a model",
        hardware=cost.hardware.name,
        hardware_source=cost.hardware.source,
        mesh=mesh,
        capacity=documents.capacity,
        step=documents.step,
        num_documents=len(documents.lengths),
        num_tokens=documents.num_tokens,
        longest=longest,
        truncated_documents=documents.truncated_documents,
        truncated_tokens=documents.truncated_tokens,
        lower_bound_s=lower_bound(documents.lengths, cost, mesh).seconds,
        limit_bytes=float(cost.memory(mesh).limit_bytes),
        model_flops=cost.flops(documents.lengths).model,
        peak_flops=1e12 * cost.hardware.peak_tflops * mesh.num_gpus,
        methods=tuple(rows),
        are_bytes=are_bytes,
        estimated=cost.hardware.held_out,
        stretched=stretched(cost.model, longest),
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
    return MethodFigures(name=method, plan=plan, timeline=simulate(plan, cost), planning_s=planning_s)


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


def _at_work(row: MethodFigures) -> MethodFigures:
    """Return packs as they come, without their plan if some ranks have no pack."""
    if row.name != _AS_THEY_COME or row.plan is None or row.plan.forward.counts.all():
        return row
    idle = int((row.plan.forward.counts == 0).sum())
    return MethodFigures(
        name=row.name,
        planning_s=row.planning_s,
        refusal=f"{idle:,} of {row.plan.mesh.dp:,} data-parallel ranks would have no pack",
    )


def check_methods(methods: Sequence[str]) -> None:
    """Refuse unknown methods."""
    for method in methods:
        if method not in METHODS:
            near = get_close_matches(method, METHODS, n=1)
            meant = f"did you mean {near[0]}? There" if near else "there"
            raise SettingError(f"no method is called {method!r}; {meant} are {', '.join(METHODS)}")


# The words of a comparison.

BYTES = (
    "Bytes are counted here, by the built-in tokenizer: several times as many as your model's tokens. "
    "Pass --tokenizer before you believe these times."
)
"""A caveat for lengths in bytes."""


def duration(value_s: float) -> str:
    """Write seconds with three digits.

    >>> duration(12.3456), duration(0.04567), duration(0.0000123), duration(123.4)
    ('12.3 s', '45.7 ms', '12.3 µs', '123 s')
    """
    if not math.isfinite(value_s):
        return "–"
    scale, unit = (1.0, "s") if value_s >= 0.9995 else (1e-3, "ms") if value_s >= 0.9995e-3 else (1e-6, "µs")
    value = value_s / scale
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def ratio(value: float) -> str:
    """Write a ratio with two digits after the point, or a dash for none.

    >>> ratio(1.0849), ratio(float("inf"))
    ('1.08', '–')
    """
    return f"{value:.2f}" if math.isfinite(value) else "–"


def size(value_bytes: float) -> str:
    """Write bytes in GB of 10⁹.

    >>> size(61_234_000_000)
    '61.2 GB'
    """
    return f"{value_bytes / 1e9:.1f} GB"


def mesh_words(mesh: Mesh) -> str:
    """Name the axes of a mesh that are wider than 1.

    >>> mesh_words(Mesh(dp=32, pp=4))
    'dp 32 × pp 4'
    >>> mesh_words(Mesh())
    'one GPU'
    """
    named = [f"{axis} {getattr(mesh, axis)}" for axis in ("dp", "pp", "cp", "tp") if getattr(mesh, axis) > 1]
    if not named:
        return "one GPU"
    words = " × ".join(named)
    return f"{words}, {mesh.virtual_stages} chunks a stage" if mesh.virtual_stages > 1 else words


def baseline(comparison: PlanComparison) -> MethodFigures | None:
    """Return the fastest other method, with which the fastest is compared; None if only one has a plan.

    Packs as they come, which aren't tuned, count only where nothing else has a plan.
    """
    planned = [row for row in comparison.methods if row.timeline is not None and row is not comparison.best]
    tuned = [row for row in planned if row.name != _AS_THEY_COME]
    return min(tuned or planned, key=lambda row: row.step_s, default=None)


def headline(comparison: PlanComparison) -> str:
    """Summarize the comparison in one sentence: the best other method first, then tuned packs."""
    best = comparison.best
    if best is None:
        return "No method holds this step on this mesh."
    step = f"{duration(best.step_s)} a step with {best.title}"
    other, packs = baseline(comparison), comparison.method(_TUNED)
    if other is None:
        return f"{step}, {ratio(comparison.bound_ratio(best))} times the lower bound."
    words = f"{step}: {_beside(best, other)}, the best other method"
    if packs is None or packs.timeline is None or packs in (best, other):
        return f"{words}."
    return f"{words}, and {_beside(best, packs)}."


def _beside(best: MethodFigures, other: MethodFigures) -> str:
    """Return how many times as fast as another method the best one is, and the other's context parallelism."""
    faster = other.step_s / best.step_s
    title = other.title + (f" at cp {other.cp}" if other.cp > 1 else "")
    return f"{times(faster)} as fast as {title}" if faster >= 1.01 else f"no faster than {title}"


def setting(comparison: PlanComparison) -> str:
    """Return a line on the planned job: model, GPUs, mesh, step, documents and tokens."""
    gpus = many(comparison.mesh.num_gpus, "GPU")
    return (
        f"{comparison.model} on {gpus} of {comparison.hardware} ({mesh_words(comparison.mesh)}): "
        f"step {comparison.step:,}, {many(comparison.num_documents, 'document')}, "
        f"{many(comparison.num_tokens, 'token')}, the longest {comparison.longest:,}"
    )


def truncation(comparison: PlanComparison) -> str:
    """Return how many documents were truncated and the share of tokens lost; "" if none were."""
    if not comparison.truncated_documents:
        return ""
    verb = "was" if comparison.truncated_documents == 1 else "were"
    return (
        f"{many(comparison.truncated_documents, 'document')} longer than {comparison.capacity:,} {verb} truncated: "
        f"{share(comparison.truncated_share)} of the tokens are lost."
    )


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


def refusals(comparison: PlanComparison) -> list[tuple[str, str]]:
    """Return the reasons why methods have no plan, each once with its methods."""
    titles: dict[str, list[str]] = {}
    for row in comparison.methods:
        if row.timeline is None:
            titles.setdefault(row.refusal, []).append(row.title)
    if len(titles) == 1 and len(comparison.methods) > 1 and comparison.best is None:
        return [("every method", why) for why in titles]
    return [("; ".join(names), why) for why, names in titles.items()]


def reading(comparison: PlanComparison) -> str:
    """Explain the columns."""
    return (
        "Cp: ranks that share every document; each method but packs as they come is at its best. "
        f"Step: simulated seconds of one optimizer step. Bound: {duration(comparison.lower_bound_s)}, which no plan "
        "of this step can beat: all work over all GPUs, the longest chain of a document, the pipeline's filling. "
        "Bubble: the share of GPU time spent waiting for other stages and ranks. Exposed: the share spent on "
        "gradient sync and gathered parameters while nothing is computed. Imbalance: work of the busiest "
        f"data-parallel rank over the mean. Peak: of the fullest GPU, of {size(comparison.limit_bytes)} that a plan "
        "may use. "
        "Planned in: seconds on this machine."
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepDocuments:
    """The documents of one optimizer step."""

    lengths: Int32Array
    """int32 `[num_documents]`: after truncation, none of them 0."""
    capacity: int
    step: int
    truncated_documents: int
    truncated_tokens: int
    """Tokens that truncation lost."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, after truncation."""
        return int(self.lengths.sum(dtype=np.int64))


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
    given = given[given > 0]
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
    )


def plan_table(comparison: PlanComparison) -> RenderableType:
    """Return everything that `varlen plan` prints about one step."""
    notes = [
        comparison.estimated,
        truncation(comparison),
        BYTES if comparison.are_bytes else "",
        comparison.stretched,
    ]
    notes = list(filter(None, notes))
    parts: list[RenderableType] = ["", Text(headline(comparison), style="bold"), Text(setting(comparison))]
    if comparison.best is not None:
        parts += ["", Padding(_methods(comparison), (0, 0, 0, 2))]
    parts += _refusals(comparison)
    if notes:
        parts += ["", *(Text(note, style="yellow") for note in notes)]
    if comparison.best is not None:
        parts += ["", Text(reading(comparison), style="dim")]
    return Group(*parts)


def _methods(comparison: PlanComparison) -> Table:
    """Return a row for each method that has a plan."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", overflow="fold")
    for title in (
        "cp",
        "step",
        "over\nbound",
        "bubble",
        "exposed",
        "imbalance",
        "peak",
        "recompute",
        "planned\nin",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for row in comparison.methods:
        if row.timeline is not None:
            style = "bold green" if row is comparison.best else ""
            table.add_row(row.title, *cells(comparison, row), style=style)
    return table


def cells(comparison: PlanComparison, row: MethodFigures) -> tuple[str, ...]:
    """Return the figures of a method that has a plan, as the columns of a table."""
    assert row.timeline is not None
    recompute = f"{row.recompute} + offload" if row.offload else row.recompute
    return (
        f"{row.cp}",
        duration(row.step_s),
        ratio(comparison.bound_ratio(row)),
        share(float(row.timeline.bubble_ratio)),
        share(float(row.timeline.exposed_ratio)),
        ratio(float(row.timeline.imbalance)),
        size(float(row.timeline.peak_bytes)),
        recompute,
        duration(row.planning_s),
    )


def _refusals(comparison: PlanComparison) -> list[RenderableType]:
    """Return the reasons why methods have no plan."""
    lines: list[RenderableType] = [
        Padding(Text.assemble((titles, "bold"), f": {why}"), (0, 0, 0, 2))
        for titles, why in refusals(comparison)
    ]
    return ["", *lines] if lines else []
