"""What the figures of the demo say, in sentences that follow from them: what is beaten, what isn't, and why.

Nothing here is a fixed verdict: other documents, another machine or a fault give other sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from varlen.report.figures import DemoFigures, MethodFigures, spread
from varlen.report.words import difference, memory, percent, times, tiny

ROUNDING = 1e-4
"""Losses of two layouts of the same batch that differ by less are equal but for rounding in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that the figures say."""

    title: str
    text: str


def headline(figures: DemoFigures) -> str:
    """Say in one sentence what flattening brought over the strongest padded run on random batches."""
    ours, padded = figures.method("flattened"), figures.method("padded")
    speedup = ours.tokens_per_s / padded.tokens_per_s
    same = "the same loss" if figures.loss_difference(ours, padded) < ROUNDING else "another loss"
    amount = f"{times(speedup)} the tokens per second" if speedup >= 1.05 else "no more tokens per second"
    return f"The same documents, the same steps, {same}: {amount}."


def findings(figures: DemoFigures) -> tuple[Finding, ...]:
    """Say what the figures show, in order of weight."""
    return (
        Finding(title="Against padding", text=_against_padding(figures)),
        Finding(title="The loss", text=_loss(figures)),
        Finding(title="Against length buckets", text=_against_buckets(figures)),
        Finding(title="Packed windows", text=_packed(figures)),
        Finding(title="Why boundaries need a proof", text=_control(figures)),
        Finding(title="What a CPU inflates", text=_inflation(figures)),
    )


def loss_gap(figures: DemoFigures, method: MethodFigures, other: MethodFigures) -> tuple[float, float]:
    """Return how much higher a method's validation loss is than another's: mean over seeds, and spread."""
    gaps = [a - b for a, b in zip(figures.losses(method), figures.losses(other), strict=True)]
    return fmean(gaps), spread(gaps)


def _against_padding(figures: DemoFigures) -> str:
    ours, masked, padded = (figures.method(name) for name in ("flattened", "padded_with_mask", "padded"))
    return (
        f"Flattened, the random batches train {times(ours.tokens_per_s / masked.tokens_per_s)} as many tokens of "
        f"documents a second as padded with a mask, and {times(ours.tokens_per_s / padded.tokens_per_s)} as many "
        f"as padded without one, which gives the same loss and is the stronger baseline. In CPU time it is "
        f"{times(ours.tokens_per_cpu_s / masked.tokens_per_cpu_s)} and "
        f"{times(ours.tokens_per_cpu_s / padded.tokens_per_cpu_s)}. "
        f"Padding alone explains {times(padded.slots_per_token)}: so many positions are computed for each token."
    )


def _loss(figures: DemoFigures) -> str:
    ours = figures.method("flattened")
    gap = max(figures.loss_difference(ours, figures.method(name)) for name in ("padded_with_mask", "padded"))
    if gap < ROUNDING:
        return (
            f"Flattened and padded runs train the same batches, and their losses differ by {tiny(gap)} at most "
            f"on any of {figures.steps:,} steps: rounding in float32. Only the layout changed."
        )
    return (
        f"Flattened and padded runs train the same batches, yet their losses differ by {gap:.4f} on some step: "
        "more than rounding in float32 explains."
    )


def _against_buckets(figures: DemoFigures) -> str:
    ours, buckets, corpus = figures.method("flattened"), figures.method("bucketed"), figures.corpus
    gap, gap_spread = loss_gap(figures, buckets, ours)
    return (
        f"Sorted by length before batching, padding shrinks to {times(buckets.slots_per_token)}, and flattened is "
        f"{times(ours.tokens_per_s / buckets.tokens_per_s)} as fast. That flatters flattening: only "
        f"{ours.num_documents:,} documents are sorted here. Sorting {corpus.bucket_pool:,} at a time leaves "
        f"{times(corpus.bucketed_ratio)}, so against large buckets little speed is to be gained. Their price is "
        f"elsewhere: batches are no random samples (validation loss {difference(gap)} ± {gap_spread:.3f} nats "
        f"against flattened), and the step with the longest documents needs {memory(buckets.memory_bytes)} "
        f"(flattened {memory(ours.memory_bytes)})."
    )


def _packed(figures: DemoFigures) -> str:
    ours, packed = figures.method("flattened"), figures.method("packed")
    gap, gap_spread = loss_gap(figures, packed, ours)
    return (
        f"Rows of {figures.max_length:,} slots, filled by best fit in random order, compute "
        f"{packed.slots_per_token:.2f} positions a token and run at "
        f"{times(packed.tokens_per_s / ours.tokens_per_s)} the speed of flattened batches, with every row of the "
        f"same shape. Other documents share a step than in the random batches, so the validation loss may "
        f"differ: {difference(gap)} ± {gap_spread:.3f} nats."
    )


def _control(figures: DemoFigures) -> str:
    packed, control = figures.method("packed"), figures.method("without_boundaries")
    gap, gap_spread = loss_gap(figures, control, packed)
    seen = abs(gap) > gap_spread and abs(gap) > 0.02
    remark = (
        "Here the loss shows it."
        if seen
        else "The loss hardly shows it: a run that leaks looks normal, so isolation is proved by changing documents."
    )
    return (
        f"The same packs without boundaries let documents attend to one another: validation loss "
        f"{difference(gap)} ± {gap_spread:.3f} nats after {figures.steps:,} steps. {remark}"
    )


def _inflation(figures: DemoFigures) -> str:
    ours, masked, padded = (figures.method(name) for name in ("flattened", "padded_with_mask", "padded"))
    return (
        f"Don't carry these ratios to a GPU; expect the padding ratio ({times(padded.slots_per_token)}) and what "
        f"attention adds. Three things make padding dearer on a CPU. PyTorch's masked attention: with the mask, "
        f"the same padded batches take {times(masked.cpu_s / padded.cpu_s)} the CPU time. Page faults: "
        f"{percent(padded.system_s / padded.cpu_s)} of the padded run's CPU time is the kernel handing out "
        f"memory ({percent(ours.system_s / ours.cpu_s)} when flattened); counting user time alone, flattened is "
        f"{times(padded.user_s / ours.user_s)} as fast as padded without a mask. And in so small a model, "
        f"attention, which grows with the square of the row, is a larger share of the work than in a large one."
    )
