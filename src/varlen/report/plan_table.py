"""The words and the table of a comparison of plans: what `varlen plan` prints, and its page says too."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varlen.counts import many
from varlen.report.page import change, duration, ratio, share, significant, size, tiny
from varlen.report.plan import (
    MethodFigures,
    PlanComparison,
    StepDocuments,
    at_cp,
    baseline,
    headline,
    sampling,
    training_table,
)
from varlen.step_plan import Mesh

BYTES = (
    "Bytes are counted here, by the built-in tokenizer: several times as many as your model's tokens. "
    "Pass --tokenizer before you believe these times."
)
"""A caveat for lengths in bytes."""


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


def setting(comparison: PlanComparison) -> str:
    """Return a line on the planned job: model, GPUs, mesh, step, documents and tokens."""
    gpus = many(comparison.mesh.num_gpus, "GPU")
    return (
        f"{comparison.model} on {gpus} of {comparison.hardware} ({mesh_words(comparison.mesh)}): "
        f"step {comparison.documents.step:,}, {many(len(comparison.documents.lengths), 'document')}, "
        f"{many(comparison.num_tokens, 'token')}, the longest {comparison.longest:,}"
    )


def truncation(comparison: PlanComparison) -> str:
    """Return how many documents were truncated and the share of tokens lost; "" if none were."""
    count = comparison.documents.truncated_documents
    if not count:
        return ""
    verb = "was" if count == 1 else "were"
    return (
        f"{many(count, 'document')} longer than {comparison.capacity:,} {verb} truncated: "
        f"{share(comparison.truncated_share)} of the tokens are lost."
    )


def notes(comparison: PlanComparison) -> list[str]:
    """Return caveats on the step and its documents."""
    step = comparison.documents
    several = " --steps N plans several." if step.num_steps > 1 and not comparison.steps else ""
    found = (
        sampling(step) + several,
        truncation(comparison),
        empty_documents(step),
        BYTES if comparison.are_bytes else "",
        comparison.stretched,
    )
    return [note for note in found if note]


def empty_documents(step: StepDocuments) -> str:
    """Return how many documents have no token; "" if all have some."""
    if not step.empty:
        return ""
    return f"{many(step.empty, 'document')} of 0 tokens {'is' if step.empty == 1 else 'are'} left out of all steps."


def refusals(comparison: PlanComparison) -> list[tuple[str, str]]:
    """Return the reasons why methods have no plan, each once with its methods."""
    titles: dict[str, list[str]] = {}
    for row in comparison.methods:
        if row.timeline is None:
            titles.setdefault(row.refusal, []).append(row.title)
    if len(titles) == 1 and len(comparison.methods) > 1 and comparison.best is None:
        return [("every method", why) for why in titles]
    return [("; ".join(names), why) for why, names in titles.items()]


def simulation(comparison: PlanComparison) -> str:
    """Say that figures are simulated, and with which rates."""
    if comparison.rates == "flops":
        rates = f"at one rate of {comparison.hardware} for all FLOPs, as papers count."
    elif comparison.estimated:
        rates = f"with rates that --calibrate measured. {comparison.estimated}"
    else:
        kernel = f" (attention: {comparison.kernel})" if comparison.kernel else ""
        rates = (
            f"with tables of rates of {comparison.hardware}{kernel}; --calibrate measures those of your GPUs."
        )
    return f"All times and memory are simulated, {rates}"


def reading(comparison: PlanComparison) -> str:
    """Explain the columns."""
    return (
        "MicroPacks: slices of long documents beside short ones, of equal cost. Packs as they come: best-fit packs "
        "of the capacity, dealt round robin, 1F1B. Tuned packs: the same at the capacity, balance and order that are "
        "fastest. Cp: ranks that share every document; each method but packs as they come is at its best setting on "
        "this mesh, and may be faster on another: --sweep with its --method looks for it. Step: simulated "
        "seconds of one optimizer step. Times the fastest: these over those of the fastest method. MFU: the model's "
        f"FLOPs of this step ({tiny(comparison.model_flops)}: forward and twice that backward, causal attention "
        "within its mask, nothing recomputed) over the dense bf16 peak of all GPUs, as its maker states it "
        f"({tiny(comparison.peak_flops)} a second). Bound: {duration(comparison.lower_bound_s)}, which no plan of "
        "this step can beat: all work over all GPUs, the longest chain of a document, the pipeline's filling. "
        "Computing, exposed and bubble add up to the GPUs' time: exposed is gradient sync and gathered parameters "
        "while nothing is computed, bubble is waiting for other stages and ranks. Imbalance: work of the busiest "
        f"data-parallel rank over the mean. Peak: of the fullest GPU, of {size(comparison.limit_bytes)} that a plan "
        "may use. Recompute: with a share, of that share of the layers; + kv: keys and values are offloaded. Planned "
        "in: time on this machine."
    )


Columns = Sequence[str]
OVER: Columns = ("", "mean", "least", "most")
"""Titles of figures over several steps."""
GIVES: Columns = (
    "", "cp", "step", "times the|fastest", "over|bound", "tokens/s|and GPU", "MFU", "GPU-hours|per 10⁹",
)  # fmt: skip
"""Titles of what each method gives; "|" is where a terminal breaks them."""
TAKES: Columns = (
    "", "com-|puting", "exposed", "bubble", "im-|balance", "peak", "recompute", "planned|in",
)  # fmt: skip
"""Titles of where a method's time and memory go."""
CHOICES: Columns = ("", "step", "change", "MFU", "peak", "recompute")
"""Titles of other choices."""
_WRAPPED = ("", "recompute")


def gives(comparison: PlanComparison, row: MethodFigures) -> tuple[str, ...]:
    """Return the cells of `GIVES`, for a method that has a plan."""
    return (
        row.title,
        f"{row.cp}",
        duration(row.step_s),
        ratio(comparison.fastest_ratio(row)),
        ratio(comparison.bound_ratio(row)),
        f"{comparison.tokens_per_s(row) / comparison.mesh.num_gpus:,.0f}",
        share(comparison.mfu(row)),
        significant(comparison.gpu_hours_per_billion(row)),
    )


def takes(row: MethodFigures) -> tuple[str, ...]:
    """Return the cells of `TAKES`, for a method that has a plan."""
    assert row.timeline is not None
    return (
        row.title,
        share(row.computing_ratio),
        share(float(row.timeline.exposed_ratio)),
        share(float(row.timeline.bubble_ratio)),
        ratio(float(row.timeline.imbalance)),
        size(float(row.timeline.peak_bytes)),
        recomputation(row),
        duration(row.planning_s),
    )


def choices(comparison: PlanComparison) -> list[tuple[str, ...]]:
    """Return the cells of `CHOICES`: the fastest plan, then each other choice, those without a plan last."""
    rows = [(one.title, one.figures) for one in comparison.alternatives]
    best = [("as planned", row) for row in comparison.methods[:1]]
    return [
        (
            title,
            duration(row.step_s),
            change(comparison.fastest_ratio(row) - 1) if row.timeline else "no plan",
            share(comparison.mfu(row)) if row.timeline else "–",
            size(float(row.timeline.peak_bytes)) if row.timeline else "–",
            recomputation(row) if row.timeline else "–",
        )
        for title, row in best + sorted(rows, key=lambda one: one[1].step_s)
    ]


def recomputation(row: MethodFigures) -> str:
    """Say briefly what a plan recomputes and offloads."""
    part = f" {row.plan.recompute_share:.0%}" if row.plan and row.plan.recompute_share < 1 else ""
    return (row.plan.recompute if row.plan else "") + part + (f" + {row.offload}" if row.offload else "")


def _hours(comparison: PlanComparison, best: MethodFigures) -> list[tuple[str, str]]:
    """Return GPU-hours, and money if a GPU-hour has a price, beside those of the best other method."""
    other = baseline(comparison) if best is comparison.ours else comparison.ours
    hours = [comparison.gpu_hours_per_billion(row) for row in (best, other) if row is not None]
    beside = "" if other is None else f" (%s with {at_cp(other)})"

    def words(values: list[float], what: str) -> str:
        first, *rest = (significant(value) for value in values)
        return f"{first} {what}" + (beside % rest[0] if rest else "")

    a_step = f"{significant(comparison.gpu_hours(best))} this step"
    rows = [("GPU-hours", f"{a_step}, {words(hours, 'per 10⁹ tokens')}")]
    if comparison.price is not None:
        what = f"per 10⁹ tokens, at {comparison.price:g} a GPU-hour"
        rows.append(("price", words([comparison.price * value for value in hours], what)))
    return rows


def over_steps(comparison: PlanComparison) -> list[tuple[str, ...]]:
    """Return the cells of `OVER`; none unless several steps have a plan."""
    titles = {
        "step_s": ("step", duration),
        "tokens": ("tokens", "{:,.0f}".format),
        "tokens_per_s_and_gpu": ("tokens/s and GPU", "{:,.0f}".format),
        "gpu_hours_per_billion_tokens": ("GPU-hours per 10⁹", significant),
        "cost_per_billion_tokens": ("price per 10⁹", significant),
    }
    found = comparison.over_steps().items()
    return [
        (title, write(one.mean), write(one.least), write(one.most))
        for (title, write), one in ((titles[name], one) for name, one in found)
    ]


def over_words(comparison: PlanComparison) -> str:
    """Name the steps of `over_steps`, their method, and those without a plan."""
    first, last = comparison.steps[0], comparison.steps[-1]
    without = [one for one in comparison.steps if one.figures.timeline is None]
    words = f"Steps {first.documents.step:,} to {last.documents.step:,}, by {first.figures.title}"
    if without:
        one = without[0]
        words += f"; {len(without):,} without a plan (step {one.documents.step:,}: {one.figures.refusal})"
    return words + ". Means of rates and costs are of all their tokens together."


def _training(comparison: PlanComparison, best: MethodFigures) -> list[tuple[str, str]]:
    """Return GPU-hours, days and money of all tokens of the training, if their number is known."""
    if comparison.tokens is None:
        return []
    hours = comparison.training_hours(best)
    takes = _lasting(hours / comparison.mesh.num_gpus)
    price = comparison.price
    money = "" if price is None else f", {significant(price * hours)} at {price:g} a GPU-hour"
    at = "at the mean of these steps" if comparison.over_steps() else "if every step is like this one"
    return [
        (
            f"{comparison.tokens / 1e9:,.4g}·10⁹ tokens",
            f"{significant(hours)} GPU-hours, {takes}{money}, {at}",
        )
    ]


def _lasting(hours: float) -> str:
    """Write how long a training takes.

    >>> _lasting(0.2), _lasting(5.25), _lasting(100)
    ('12.0 minutes', '5.25 hours', '4.17 days')
    """
    for unit, least, in_hours in (("days", 48, 24.0), ("hours", 1, 1.0)):
        if hours >= least:
            return f"{significant(hours / in_hours)} {unit}"
    return f"{significant(60 * hours)} minutes"


def costs(comparison: PlanComparison) -> list[tuple[str, str]]:
    """Return what the fastest plan costs, by name; nothing without a plan."""
    best = comparison.best
    if best is None or best.plan is None or best.timeline is None:
        return []
    kept = comparison.memory_bytes - comparison.limit_bytes
    shared = many(best.plan.num_merged, "document is", "documents are")
    again = recomputation(best)
    if best.recomputed_ratio > 0:
        again += f": {share(best.recomputed_ratio)} of all FLOPs are computed a second time"
    return [
        *_hours(comparison, best),
        *_training(comparison, best),
        (
            "memory",
            f"{size(best.timeline.peak_bytes)} on the fullest GPU, of {size(comparison.limit_bytes)} that a plan may "
            f"use. The other {size(kept)} of {size(comparison.memory_bytes)} are kept free for the allocator and "
            "NCCL; a smaller --memory-fraction keeps more",
        ),
        ("recomputed", "nothing" if best.plan.recompute == "none" else again),
        ("offloaded", "keys and values, to the host's memory" if best.offload else "nothing"),
        ("shared", f"{shared} on several data-parallel ranks, which exchange keys and values"),
        ("delay", "none: a plan moves no document to another step"),
        (
            "planning",
            f"{duration(best.planning_s)} on this machine, {ratio(best.planning_s / best.step_s)} times the step; "
            "the loader plans ahead, while steps run",
        ),
    ]


def plan_table(comparison: PlanComparison) -> RenderableType:
    """Return everything that `varlen plan` prints about one step."""
    parts: list[RenderableType] = ["", Text(headline(comparison), style="bold"), Text(setting(comparison))]
    planned = [row for row in comparison.methods if row.timeline is not None]
    if planned:
        parts.append(Text(simulation(comparison)))
    parts += [Text(note, style="yellow") for note in notes(comparison)]
    if planned:
        parts += ["", _table(GIVES, [gives(comparison, row) for row in planned])]
    parts += _refusals(comparison)
    if planned:
        parts += _titled("Where time and memory go", _table(TAKES, [takes(row) for row in planned]))
        parts += _titled("What the fastest plan costs", _facts(costs(comparison)))
    if comparison.over_steps():
        parts += _titled("Over several steps", _table(OVER, over_steps(comparison), marks_first=False))
        parts.append(Padding(Text(over_words(comparison), style="dim"), (0, 0, 0, 2)))
    if comparison.alternatives:
        parts += _titled("What other choices would give", _table(CHOICES, choices(comparison)))
    if planned:
        parts += _titled("To train so, with varlen train", _table_to_train(comparison))
        parts += ["", Text(reading(comparison), style="dim")]
    return Group(*parts)


def _titled(title: str, content: RenderableType) -> list[RenderableType]:
    return ["", Text(title, style="bold"), content]


def _table_to_train(comparison: PlanComparison) -> RenderableType:
    """Return the tables of a configuration that run the fastest plan."""
    assert comparison.best is not None
    return Padding(Text(training_table(comparison, comparison.best)), (0, 0, 0, 2))


def _table(columns: Columns, rows: Sequence[tuple[str, ...]], *, marks_first: bool = True) -> RenderableType:
    """Return a table; its first row is the fastest plan unless `marks_first` is False."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in columns:
        table.add_column(
            title.replace("|", "\n"),
            justify="right" if title else "left",
            no_wrap=title not in _WRAPPED,
            overflow="fold",
        )
    for number, cells in enumerate(rows):
        table.add_row(*cells, style="bold green" if marks_first and not number else "")
    return Padding(table, (0, 0, 0, 2))


def _facts(rows: Sequence[tuple[str, str]]) -> RenderableType:
    """Return names and values, one per line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return Padding(table, (0, 0, 0, 2))


def _refusals(comparison: PlanComparison) -> list[RenderableType]:
    """Return the reasons why methods have no plan."""
    lines: list[RenderableType] = [
        Padding(Text.assemble((titles, "bold"), f": {why}"), (0, 0, 0, 2))
        for titles, why in refusals(comparison)
    ]
    return ["", *lines] if lines else []
