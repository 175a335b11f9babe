"""What a comparison of plans says in words: durations, meshes, refusals, and the sentence on top."""

from __future__ import annotations

import math

from varlen.cost.shape import ModelShape
from varlen.counts import many
from varlen.report.plan_figures import MethodFigures, PlanComparison
from varlen.report.words import share, times
from varlen.step_plan import Mesh

BYTES = (
    "Bytes are counted here, by the built-in tokenizer: several times as many as your model's tokens. "
    "Pass --tokenizer before you believe these times."
)
"""What is said where bytes were counted."""


UNFAIR = (
    "Methods other than MicroPacks were not given static context parallelism (another division of these GPUs, with "
    "long documents' rows shared by all), which may make them faster: until they are, read these ratios as of this "
    "mesh alone."
)
"""What is said above every comparison of methods, until each is tuned over context parallelism too."""


def duration(value_s: float) -> str:
    """Write seconds with three digits.

    >>> duration(12.3456), duration(0.04567), duration(0.0000123), duration(123.4)
    ('12.3 s', '45.7 ms', '12.3 µs', '123 s')
    """
    if not math.isfinite(value_s):
        return "–"
    scale, unit = next(
        (found for found in ((1.0, "s"), (1e-3, "ms")) if value_s >= 0.9995 * found[0]), (1e-6, "µs")
    )
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


def baseline(found: PlanComparison) -> MethodFigures | None:
    """Return what the fastest method is compared with: the next best; None where a single one has a plan."""
    planned = [row for row in found.methods if row.timeline is not None and row is not found.best]
    return min(planned, key=lambda row: row.step_s, default=None)


def headline(found: PlanComparison) -> str:
    """Say in one sentence what came out."""
    best = found.best
    if best is None:
        return "No method holds this step on this mesh."
    step = f"{duration(best.step_s)} a step with {best.title}"
    other = baseline(found)
    if other is None:
        return f"{step}, {ratio(found.bound_ratio(best))} times the lower bound."
    return f"{step}: {_beside(best, other)}, the next best."


def _beside(best: MethodFigures, other: MethodFigures) -> str:
    """Say how much faster one method is than another."""
    faster = other.step_s / best.step_s
    return f"{times(faster)} as fast as {other.title}" if faster >= 1.02 else f"no faster than {other.title}"


def setting(found: PlanComparison) -> str:
    """Say which job was planned."""
    gpus = many(found.mesh.num_gpus, "GPU")
    return (
        f"{found.model} on {gpus} of {found.hardware} ({mesh_words(found.mesh)}): step {found.step:,}, "
        f"{many(found.num_documents, 'document')}, {many(found.num_tokens, 'token')}, the longest {found.longest:,}"
    )


def truncation(found: PlanComparison) -> str:
    """Say what truncation lost, or ""."""
    if not found.truncated_documents:
        return ""
    verb = "was" if found.truncated_documents == 1 else "were"
    return (
        f"{many(found.truncated_documents, 'document')} longer than {found.capacity:,} {verb} truncated: "
        f"{share(found.truncated_share)} of the tokens are lost."
    )


def stretched(model: ModelShape, longest: int) -> str:
    """Say that documents are beyond the positions of the model's published checkpoint, or "".

    A known shape limits no positions, and long-context training stretches a checkpoint's first; whoever plans it
    should know that this step needs it. A model that sets a limit itself has refused what is longer, or was told to.

    Args:
        model: as it is planned.
        longest: tokens of the longest document, after truncation.

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


def refusals(found: PlanComparison) -> list[tuple[str, str]]:
    """Return why methods have no plan: each reason once, with the methods that have it."""
    titles: dict[str, list[str]] = {}
    for row in found.methods:
        if row.timeline is None:
            titles.setdefault(row.refusal, []).append(row.title)
    if len(titles) == 1 and len(found.methods) > 1 and found.best is None:
        return [("every method", why) for why in titles]
    return [("; ".join(names), why) for why, names in titles.items()]


def reading(found: PlanComparison) -> str:
    """Say what the columns mean."""
    return (
        f"Step: simulated seconds of one optimizer step. Bound: {duration(found.lower_bound_s)}, which no plan of "
        "this step can beat: all work over all GPUs, the longest chain of a document, the pipeline's filling. "
        "Bubble: the share of GPU time spent waiting for other stages and ranks. Exposed: the share spent on "
        "gradient sync and gathered parameters while nothing is computed. Imbalance: work of the busiest "
        f"data-parallel rank over the mean. Peak: of the fullest GPU, of {size(found.limit_bytes)} that a plan "
        "may use. "
        "Planned in: seconds on this machine."
    )
