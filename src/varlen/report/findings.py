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
LARGER_POOL_PADS_LESS = 0.97
"""A larger pool of documents to sort counts as better if it pads to less than this part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What the figures say about one comparison each."""

    padding: str
    loss: str
    buckets: str
    packed: str
    control: str
    inflation: str

    def titled(self) -> tuple[tuple[str, str], ...]:
        """Return each with a title, in order of weight."""
        return (
            ("Against padding", self.padding),
            ("The loss", self.loss),
            ("Against length buckets", self.buckets),
            ("Packed windows", self.packed),
            ("Why boundaries need a proof", self.control),
            ("What a CPU inflates", self.inflation),
        )


def headline(figures: DemoFigures) -> str:
    """Say in one sentence what flattening brought over the strongest padded run on random batches."""
    ours, padded = figures.method("flattened"), figures.method("padded")
    speedup = ours.tokens_per_s / padded.tokens_per_s
    same = "the same loss" if figures.loss_difference(ours, padded) < ROUNDING else "another loss"
    amount = f"{times(speedup)} the tokens per second" if speedup >= 1.05 else "no more tokens per second"
    return f"The same documents, the same steps, {same}: {amount}."


def findings(figures: DemoFigures) -> Findings:
    """Say what the figures show."""
    return Findings(
        padding=_padding(figures),
        loss=_loss(figures),
        buckets=_buckets(figures),
        packed=_packed(figures),
        control=_control(figures),
        inflation=_inflation(figures),
    )


def loss_gap(figures: DemoFigures, method: MethodFigures, other: MethodFigures) -> tuple[float, float]:
    """Return how much higher a method's validation loss is than another's: mean over seeds, and spread."""
    gaps = [a - b for a, b in zip(figures.losses(method), figures.losses(other), strict=True)]
    return fmean(gaps), spread(gaps)


def _padding(figures: DemoFigures) -> str:
    ours, masked, padded = (figures.method(name) for name in ("flattened", "padded_with_mask", "padded"))
    return (
        f"Flattened, the random batches train {times(ours.tokens_per_s / masked.tokens_per_s)} the tokens a "
        f"second that they do padded with a mask, and {times(ours.tokens_per_s / padded.tokens_per_s)} those "
        "padded without one, which gives the same loss and is the stronger baseline. By CPU time it is "
        f"{times(ours.tokens_per_cpu_s / masked.tokens_per_cpu_s)} and "
        f"{times(ours.tokens_per_cpu_s / padded.tokens_per_cpu_s)}. Padding alone accounts for "
        f"{times(padded.slots_per_token)} here, {times(figures.corpus.padded_ratio)} over all documents: that "
        "many positions are computed for each token."
    )


def _loss(figures: DemoFigures) -> str:
    ours = figures.method("flattened")
    gap = max(figures.loss_difference(ours, figures.method(name)) for name in ("padded_with_mask", "padded"))
    if gap == 0:
        return (
            f"Flattened and padded runs train the same batches, and their losses are the same to the bit on all "
            f"of {figures.steps:,} steps. Only the layout changed."
        )
    if gap < ROUNDING:
        return (
            "Flattened and padded runs train the same batches, and their losses differ by at most "
            f"{tiny(gap)} on any of {figures.steps:,} steps: rounding in float32. Only the layout changed."
        )
    return (
        f"Flattened and padded runs train the same batches, yet their losses differ by {gap:.4f} on some "
        "step: more than rounding in float32 explains."
    )


def _buckets(figures: DemoFigures) -> str:
    ours, buckets, corpus = figures.method("flattened"), figures.method("bucketed"), figures.corpus
    gap, gap_spread = loss_gap(figures, buckets, ours)
    speed = (
        f"Sorted by length before batching, the documents pad to {times(buckets.slots_per_token)}, and "
        f"flattened is {times(ours.tokens_per_s / buckets.tokens_per_s)} as fast. "
    )
    if corpus.bucketed_ratio < LARGER_POOL_PADS_LESS * buckets.slots_per_token:
        speed += (
            f"That flatters flattening, since only {ours.num_documents:,} documents are sorted here: sorting "
            f"{corpus.bucket_pool:,} at a time pads to {times(corpus.bucketed_ratio)}, so against large "
            "buckets little speed is to be gained. "
        )
    price = "shows" if abs(gap) > gap_spread else "doesn't clearly show"
    return speed + (
        f"Buckets cost in other ways. Their batches are no random samples, which the validation loss {price} "
        f"({difference(gap)} ± {gap_spread:.3f} nats against flattened), and the step with the longest "
        f"documents needs {memory(buckets.memory_bytes)} (flattened {memory(ours.memory_bytes)})."
    )


def _packed(figures: DemoFigures) -> str:
    ours, packed = figures.method("flattened"), figures.method("packed")
    gap, gap_spread = loss_gap(figures, packed, ours)
    return (
        f"Rows of {figures.picture.capacity:,} slots, filled by best fit in random order, compute "
        f"{packed.slots_per_token:.2f} positions a token and run at "
        f"{times(packed.tokens_per_s / ours.tokens_per_s)} the speed of flattened batches, every row of the "
        "same shape. Other documents share a step than in the random batches, so the validation loss may "
        f"differ: {difference(gap)} ± {gap_spread:.3f} nats."
    )


def _control(figures: DemoFigures) -> str:
    packed, control = figures.method("packed"), figures.method("without_boundaries")
    gap, gap_spread = loss_gap(figures, control, packed)
    if figures.loss_difference(packed, control) == 0:
        return (
            "Without boundaries the losses are the same to the bit: every pack holds a single document here, so "
            "the control has nothing to leak."
        )
    remark = (
        "Here the loss shows it; often it doesn't, so isolation is proved by changing documents."
        if gap > max(gap_spread, 0.02)
        else "The loss doesn't give it away: a run that leaks looks normal. So isolation is proved by "
        "changing documents."
    )
    return (
        "The same packs without boundaries let documents attend to one another: validation loss "
        f"{difference(gap)} ± {gap_spread:.3f} nats after {figures.steps:,} steps. {remark}"
    )


def _inflation(figures: DemoFigures) -> str:
    ours, masked, padded = (figures.method(name) for name in ("flattened", "padded_with_mask", "padded"))
    return (
        "These ratios are a CPU's; on a GPU, expect the padding ratio "
        f"({times(padded.slots_per_token)}) and what attention adds there. Three things differ here. "
        "PyTorch's masked attention: with the mask, the same padded batches take "
        f"{times(masked.cpu_s / padded.cpu_s)} the CPU time. Page faults: "
        f"{percent(padded.system_s / padded.cpu_s)} of the padded run's CPU time is the kernel handing out "
        f"memory ({percent(ours.system_s / ours.cpu_s)} when flattened); by user time alone, flattened is "
        f"{times(padded.user_s / ours.user_s)} as fast as padded without a mask. And in so small a model "
        "attention, which grows with the square of a row, is more of the work than in a large one."
    )
