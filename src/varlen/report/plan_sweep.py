"""Find the fastest mesh: plans a step on every division of some GPUs into dp x pp x cp x tp."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from varlen.cost.model import CostModel
from varlen.cost.shape import divides
from varlen.counts import many
from varlen.errors import SettingError
from varlen.plan.bound import lower_bound
from varlen.report.page import duration, share, significant, size
from varlen.report.plan import (
    TITLES,
    MethodFigures,
    StepDocuments,
    check_price,
    planned,
    sampling,
    stretched,
)
from varlen.report.plan_table import BYTES, empty_documents, mesh_words, recomputation
from varlen.step_plan import Mesh, Sharding

OnProgress = Callable[[int, int, str], None]
MORE_CHUNKS = (2, 3)
"""Chunks of layers per stage, besides one, to try on the fastest meshes (interleaved stages)."""
TIE = 0.05
"""Meshes whose rates differ by less count as equally fast: simulated steps may be off by as much
(docs/planning-results.md, prediction errors)."""
WIDEST_CP = 16
"""Wider context parallelism gains almost nothing over DP-Merge, and exchanges more."""
STATES, NO_PLAN, BOUND, SLOWER, SAME, INDIVISIBLE = (
    "parameters and optimizer states alone are over the memory of a GPU",
    "no plan keeps within the memory of a GPU",
    "even the lower bound is slower than those kept",
    "slower than those kept",
    "the same plan as one of these, which has less cp and more dp",
    "the model can't be divided so",
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SweptMesh:
    """A mesh at a capacity, and its plan."""

    mesh: Mesh
    documents: StepDocuments
    figures: MethodFigures
    bound_s: float
    model_flops: float
    """FLOPs of the step as MFU counts them."""
    peak_flops: float
    """Dense bf16 FLOPs of all GPUs a second, by their maker."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole mesh."""
        return self.documents.num_tokens / self.figures.step_s

    @property
    def mfu(self) -> float:
        """The model's FLOPs over those of the GPUs' peak in a step."""
        return self.model_flops / (self.figures.step_s * self.peak_flops)

    @property
    def gpu_hours_per_billion(self) -> float:
        """GPU-hours of 10⁹ tokens of such steps."""
        return 1e9 * self.mesh.num_gpus / self.tokens_per_s / 3600


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanSweep:
    """The result of a sweep."""

    name: str
    model: str
    hardware: str
    num_gpus: int
    method: str
    num_meshes: int
    """Number of combinations of a mesh and a capacity."""
    best: tuple[SweptMesh, ...]
    """At most ten, by descending tokens per second."""
    left_out: tuple[tuple[str, int], ...]
    """Reasons why others aren't among the best, with their numbers."""
    price: float | None = None
    """What a GPU-hour costs, in the user's currency."""
    are_bytes: bool = False
    stretched: str = ""
    """A sentence on documents beyond the positions of the model's checkpoint, or ""."""
    sample: str = ""
    """A sentence on how the step differs from the average of its data, or ""."""
    empty: str = ""
    """A sentence on documents of 0 tokens, or ""."""
    kernel: str = ""
    """The attention kernel of published rates, or ""."""

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            "name": self.name,
            "headline": sweep_headline(self),
            "simulated": True,
            "model": self.model,
            "hardware": self.hardware,
            "attention": self.kernel,
            "sample": self.sample,
            "gpus": self.num_gpus,
            "method": self.method,
            "meshes": self.num_meshes,
            "price_per_gpu_hour": self.price,
            "best": [_row(swept, self.price) for swept in self.best],
            "tie_share": TIE,
            "ties": _ties(self),
            "left_out": dict(self.left_out),
        }


def sweep(
    steps: Sequence[StepDocuments],
    *,
    cost: CostModel,
    num_gpus: int,
    method: str = "micropack",
    sharding: Sharding = "optimizer",
    repairs: bool = True,
    most: int = 10,
    name: str = "",
    are_bytes: bool = False,
    price: float | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> PlanSweep:
    """Plan one step on every division of some GPUs, and return the fastest.

    Meshes are planned by rising lower bound, until all remaining bounds are above the slowest of the best. The best
    are then also planned with 2 and 3 chunks of layers a stage.
    """
    if num_gpus < 1:
        raise SettingError(f"--gpus must be at least 1; got {num_gpus}")
    check_price(price)
    left_out: Counter[str] = Counter()
    waiting: list[tuple[float, int, Mesh, StepDocuments, float]] = []
    divisions = list(meshes(cost, num_gpus, sharding))
    for mesh in divisions:
        if why := _why_not(cost, mesh):
            left_out[why] += len(steps)
            continue
        for documents in steps:
            bound = lower_bound(documents.lengths, cost, mesh).seconds
            waiting.append((bound / documents.num_tokens, len(waiting), mesh, documents, bound))
    waiting.sort(key=lambda entry: entry[:2])
    best: list[SweptMesh] = []
    for done, (bound_per_token, _, mesh, documents, bound) in enumerate(waiting):
        on_progress(done, len(waiting), f"planning dp {mesh.dp} × pp {mesh.pp} × cp {mesh.cp} × tp {mesh.tp}")
        if len(best) == most and bound_per_token * best[-1].tokens_per_s >= 1:
            left_out[BOUND] += len(waiting) - done
            break
        row = planned(documents, method, cost=cost, mesh=mesh, repairs=repairs)
        if row.plan is None:
            left_out[NO_PLAN] += 1
            continue
        best.append(_swept(row, documents, cost=cost, mesh=mesh, bound_s=bound))
        best = _distinct(best, left_out)
        left_out[SLOWER] += len(best) > most
        del best[most:]
    on_progress(len(waiting), len(waiting), "planning with more chunks a stage")
    best = [_with_best_chunks(swept, method, cost, repairs) for swept in best]
    best = _distinct(best, left_out)
    on_progress(len(waiting), len(waiting), "planned")
    return PlanSweep(
        name=name,
        model=cost.model.name or "a model",
        hardware=cost.hardware.name,
        num_gpus=num_gpus,
        method=method,
        num_meshes=len(divisions) * len(steps),
        best=tuple(best),
        price=price,
        left_out=tuple((why, count) for why, count in left_out.most_common() if count),
        are_bytes=are_bytes,
        stretched=stretched(cost.model, max(int(step.lengths.max()) for step in steps)),
        sample=sampling(max(steps, key=lambda step: step.capacity)),
        empty=empty_documents(steps[0]),
        kernel=cost.hardware.published_kernel,
    )


def may_hold(cost: CostModel, num_gpus: int, sharding: Sharding) -> bool:
    """Return whether the parameters and optimizer states fit on some mesh of so many GPUs."""
    return any(not _why_not(cost, mesh) for mesh in meshes(cost, num_gpus, sharding))


def _why_not(cost: CostModel, mesh: Mesh) -> str:
    """Return why no step has a plan on a mesh; "" if one may."""
    try:
        states = float(cost.memory(mesh).state_bytes.max())
    except SettingError:
        return INDIVISIBLE
    return STATES if states > cost.limit_bytes else ""


def _distinct(best: list[SweptMesh], left_out: Counter[str]) -> list[SweptMesh]:
    """Return meshes from the fastest on, of those with the same plan the one with the least cp; count the others."""
    kept: list[SweptMesh] = []
    for swept in sorted(best, key=lambda swept: swept.mesh.cp):
        if any(_is_same(one, swept) for one in kept):
            left_out[SAME] += 1
        else:
            kept.append(swept)
    return sorted(kept, key=lambda swept: -swept.tokens_per_s)


def _is_same(one: SweptMesh, other: SweptMesh) -> bool:
    """Return whether two meshes have the same plan: ranks that share every document, as dp or as cp."""
    assert one.figures.timeline is not None
    assert other.figures.timeline is not None
    return (
        one.documents is other.documents
        and replace(one.mesh, dp=1, cp=1) == replace(other.mesh, dp=1, cp=1)
        and math.isclose(one.figures.step_s, other.figures.step_s, rel_tol=1e-9)
        and math.isclose(one.figures.timeline.peak_bytes, other.figures.timeline.peak_bytes, rel_tol=1e-9)
    )


def _with_best_chunks(swept: SweptMesh, method: str, cost: CostModel, repairs: bool) -> SweptMesh:
    """Return the mesh with 1, 2 or 3 chunks of layers a stage, whichever is fastest."""
    best = swept
    for chunks in MORE_CHUNKS if swept.mesh.pp > 1 else ():
        mesh = replace(swept.mesh, virtual_stages=chunks)
        if mesh.num_chunks > cost.model.layers:
            break
        row = planned(swept.documents, method, cost=cost, mesh=mesh, repairs=repairs)
        if row.plan is not None and row.step_s < best.figures.step_s:
            bound = lower_bound(swept.documents.lengths, cost, mesh).seconds
            best = _swept(row, swept.documents, cost=cost, mesh=mesh, bound_s=bound)
    return best


def _swept(
    row: MethodFigures, documents: StepDocuments, *, cost: CostModel, mesh: Mesh, bound_s: float
) -> SweptMesh:
    return SweptMesh(
        mesh=mesh,
        documents=documents,
        figures=row,
        bound_s=bound_s,
        model_flops=cost.flops(documents.lengths).model,
        peak_flops=1e12 * cost.hardware.peak_tflops * mesh.num_gpus,
    )


def meshes(cost: CostModel, num_gpus: int, sharding: Sharding) -> Iterator[Mesh]:
    """Yield every mesh of some GPUs that divides the model.

    Tensor parallelism stays within a node, pipelines have no more stages than layers, context parallelism is a
    power of two up to 16.
    """
    for tp in _divisors(num_gpus):
        if tp > cost.hardware.gpus_per_node or not divides(cost.model, tp):
            continue
        for pp in _divisors(num_gpus // tp):
            if pp > cost.model.layers:
                continue
            for cp in _divisors(num_gpus // tp // pp):
                if cp <= WIDEST_CP and cp & (cp - 1) == 0:
                    yield Mesh(dp=num_gpus // (tp * pp * cp), pp=pp, cp=cp, tp=tp, sharding=sharding)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _row(swept: SweptMesh, price: float | None) -> dict[str, Any]:
    row, mesh, hours = swept.figures, swept.mesh, swept.gpu_hours_per_billion
    assert row.plan is not None
    assert row.timeline is not None
    return {
        **{axis: getattr(mesh, axis) for axis in ("dp", "pp", "cp", "tp", "virtual_stages")},
        "capacity": swept.documents.capacity,
        "tokens": swept.documents.num_tokens,
        "step_s": row.step_s,
        "tokens_per_s": swept.tokens_per_s,
        "tokens_per_s_and_gpu": swept.tokens_per_s / mesh.num_gpus,
        "mfu": swept.mfu,
        "gpu_hours_per_billion_tokens": hours,
        **({} if price is None else {"cost_per_billion_tokens": price * hours}),
        "lower_bound_s": swept.bound_s,
        "lower_bound_ratio": row.step_s / swept.bound_s,
        "computing_ratio": row.computing_ratio,
        "bubble_ratio": float(row.timeline.bubble_ratio),
        "exposed_ratio": float(row.timeline.exposed_ratio),
        "imbalance": float(row.timeline.imbalance),
        "peak_bytes": float(row.timeline.peak_bytes),
        "recompute": row.plan.recompute,
        "recompute_share": row.plan.recompute_share,
        "offload": row.plan.offload,
        "planning_s": row.planning_s,
    }


def sweep_table(result: PlanSweep) -> RenderableType:
    """Return everything that `varlen plan --sweep` prints."""
    gpus = f"{many(result.num_gpus, 'GPU')} of {result.hardware}"
    kernel = f" (attention: {result.kernel})" if result.kernel else ""
    job = f"{result.model} on {gpus}, {TITLES[result.method]}; all figures are simulated{kernel}"
    parts: list[RenderableType] = ["", Text(sweep_headline(result), style="bold"), Text(job)]
    if result.best:
        parts += ["", _meshes(result)]
    if any(swept.mesh.virtual_stages > 1 for swept in result.best):
        parts.append(Text("pp 4×2: 4 stages of 2 chunks of layers, --virtual-stages 2", style="dim"))
    count = many(result.num_meshes, "mesh", "meshes")
    parts += ["", Text(f"Of {count}, not among these:" if result.best else f"Of {count}:", style="dim")]
    parts += [Text(f"  {count:,}: {why}", style="dim") for why, count in result.left_out]
    if (ties := _ties(result)) > 1:
        parts.append(
            Text(
                f"The first {ties} are within {share(TIE)} of each other, less than what one step and a simulation "
                "tell apart: compare them over several steps (--steps, without --sweep).",
                style="yellow",
            )
        )
    notes = (result.sample, result.empty, BYTES if result.are_bytes else "", result.stretched)
    parts += [Text(note, style="yellow") for note in notes if note]
    return Group(*parts)


def sweep_headline(result: PlanSweep) -> str:
    """Summarize the sweep in one sentence."""
    if not result.best:
        return "No mesh of these GPUs holds this step."
    first = result.best[0]
    rate, hours = first.tokens_per_s / result.num_gpus, first.gpu_hours_per_billion
    price = result.price
    money = "" if price is None else f", which cost {significant(price * hours)} at {price:g} a GPU-hour"
    return (
        f"{mesh_words(first.mesh)} is the fastest: {rate:,.0f} tokens per second and GPU, {share(first.mfu)} MFU, "
        f"{significant(hours)} GPU-hours per 10⁹ tokens{money}."
    )


def _ties(result: PlanSweep) -> int:
    """Return how many of the best are as fast as the first, to within `TIE`."""
    return sum(swept.tokens_per_s >= (1 - TIE) * result.best[0].tokens_per_s for swept in result.best)


def _meshes(result: PlanSweep) -> Table:
    """Return a row for each mesh."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    sizes = ("capacity",) if len({swept.documents.capacity for swept in result.best}) > 1 else ()
    titles = ("dp", "pp", "cp", "tp", *sizes, "step", "tokens/s\nand GPU", "MFU", "bubble", "exposed", "peak")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("recompute", justify="right")
    for index, swept in enumerate(result.best):
        mesh, row = swept.mesh, swept.figures
        assert row.timeline is not None
        table.add_row(
            str(mesh.dp),
            f"{mesh.pp}×{mesh.virtual_stages}" if mesh.virtual_stages > 1 else str(mesh.pp),
            str(mesh.cp),
            str(mesh.tp),
            *(f"{swept.documents.capacity:,}" for _ in sizes),
            duration(row.step_s),
            f"{swept.tokens_per_s / result.num_gpus:,.0f}",
            share(swept.mfu),
            share(float(row.timeline.bubble_ratio)),
            share(float(row.timeline.exposed_ratio)),
            size(float(row.timeline.peak_bytes)),
            recomputation(row),
            style="bold green" if index == 0 else "",
        )
    return table
