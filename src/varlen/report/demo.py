"""The figures of the demo, which its table, its page and its JSON show; and its table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from varlen.counts import as_size
from varlen.report.page import count, difference, percent, times, tiny

Role = Literal["baseline", "varlen", "control"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodFigures:
    """One way of feeding the model, with its measurements."""

    name: str
    """An identifier such as "padded_with_mask"."""
    title: str
    """The name for display."""
    role: Role
    """A baseline, varlen's method, or a control that must be worse."""
    steps: int
    num_documents: int
    num_tokens: int
    """Tokens of documents; padding not counted."""
    num_targets: int
    """Tokens that are targets."""
    num_slots: int
    """Positions computed, padding included."""
    wall_s: float
    user_s: float
    """CPU seconds in user mode, all threads together."""
    system_s: float
    """CPU seconds in the kernel, mainly for page faults."""
    memory_bytes: int
    """Peak memory of a step, beyond that before the first step."""
    step_losses: tuple[float, ...]
    """Mean target loss of each step of the first seed, in nats."""
    validation_losses: tuple[float | None, ...]
    """One for each seed; None if the run was skipped because `same_loss_as` gives the same loss."""
    same_loss_as: str | None = None
    """The method that trains the same batches in another layout."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds, user and system."""
        return self.user_s + self.system_s

    @property
    def tokens_per_s(self) -> float:
        """Effective tokens per second: padding doesn't count."""
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Effective tokens a CPU second."""
        return self.num_tokens / self.cpu_s

    @property
    def slots_per_token(self) -> float:
        """Positions computed for each token of a document; 1 without padding."""
        return self.num_slots / self.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerFigures:
    """The ledger of a run's tokens."""

    tokens_in: int
    packed: int
    truncated: int
    dropped: int
    duplicated: int
    documents_in: int
    truncated_documents: int
    balance: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolationFigures:
    """The test of isolation on the trained model."""

    verdict: str
    """A word or a sentence; "isolated" only if the control leaks."""
    is_proved: bool
    """Whether documents are isolated and the control leaks."""
    rows: tuple[tuple[str, str], ...]
    """Measurements and their results, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceFigures:
    """A document in a picture: its tokens, and the beginning of its text."""

    document_id: int
    num_tokens: int
    excerpt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureFigures:
    """One step's documents, for the picture of padding, and one packed row."""

    batch: tuple[PieceFigures, ...]
    """The documents of one random batch."""
    row: tuple[PieceFigures, ...]
    """The documents of one packed row."""
    capacity: int
    """Slots of the packed row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFigures:
    """The documents."""

    description: str
    documents_found: int
    num_documents: int
    """Drawn and tokenized."""
    too_short: int
    is_cut: bool
    vocab_size: int
    lengths: tuple[int, ...]
    """Tokens of each document, before cutting."""
    padded_ratio: float
    """Slots per token if random batches of all documents are padded to their longest."""
    bucketed_ratio: float
    """The same if pools of `bucket_pool` documents are sorted by length first."""
    bucket_pool: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoFigures:
    """All figures of the demo."""

    methods: tuple[MethodFigures, ...]
    corpus: CorpusFigures
    ledger: LedgerFigures
    """Of the packed run; every method's ledger balances and counts the same tokens."""
    isolation: IsolationFigures
    picture: PictureFigures
    seeds: tuple[int, ...]
    steps: int
    batch_documents: int
    max_length: int
    num_parameters: int
    threads: int
    machine: tuple[tuple[str, str], ...]
    """Processor, system and versions, in words."""
    total_s: float
    """Seconds from start to end."""

    def method(self, name: str) -> MethodFigures:
        """Return a method by its name."""
        return next(method for method in self.methods if method.name == name)

    def losses(self, method: MethodFigures) -> tuple[float, ...]:
        """Return a loss for each seed, for skipped runs that of the same batches in another layout."""
        twin = method if method.same_loss_as is None else self.method(method.same_loss_as)
        pairs = zip(method.validation_losses, twin.validation_losses, strict=True)
        return tuple(own if own is not None else _known(other) for own, other in pairs)

    def loss_difference(self, first: MethodFigures, second: MethodFigures) -> float:
        """Return the largest difference of two methods' losses over the steps of the first seed."""
        return max(abs(a - b) for a, b in zip(first.step_losses, second.step_losses, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values, rates and ratios included."""
        ours = self.method("flattened")
        tree = asdict(self)
        for values, method in zip(tree["methods"], self.methods, strict=True):
            values["cpu_s"] = method.cpu_s
            values["tokens_per_s"] = method.tokens_per_s
            values["tokens_per_cpu_s"] = method.tokens_per_cpu_s
            values["slots_per_token"] = method.slots_per_token
            values["validation_loss_mean"] = fmean(self.losses(method))
            values["flattened_speedup_wall"] = ours.tokens_per_s / method.tokens_per_s
            values["flattened_speedup_cpu"] = ours.tokens_per_cpu_s / method.tokens_per_cpu_s
            values["flattened_speedup_user"] = method.user_s / ours.user_s
            values["flattened_step_loss_difference"] = self.loss_difference(method, ours)
        return tree


def spread(values: Sequence[float]) -> float:
    """Return half the distance from the lowest to the highest value."""
    return (max(values) - min(values)) / 2


def _known(value: float | None) -> float:
    assert value is not None, "a method whose loss others share was run with every seed"
    return value


# Sentences that follow from the figures: other documents, another machine or a fault give other sentences.

ROUNDING = 1e-4
"""Smaller differences between losses of two layouts of the same batch are rounding in float32."""
LARGER_POOL_PADS_LESS = 0.97
"""Larger pools for sorting count as better if they reduce slots to less than this share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """A sentence on each comparison."""

    padding: str
    loss: str
    buckets: str
    packed: str
    control: str
    inflation: str

    def titled(self) -> tuple[tuple[str, str], ...]:
        """Return each with a title, the most important first."""
        return (
            ("Against padding", self.padding),
            ("The loss", self.loss),
            ("Against length buckets", self.buckets),
            ("Packed windows", self.packed),
            ("Why boundaries need a proof", self.control),
            ("What a CPU inflates", self.inflation),
        )


def headline(figures: DemoFigures) -> str:
    """Summarize in one sentence what flattening gains over the fastest padded run on random batches."""
    ours, padded = figures.method("flattened"), figures.method("padded")
    speedup = ours.tokens_per_s / padded.tokens_per_s
    same = "the same loss" if figures.loss_difference(ours, padded) < ROUNDING else "another loss"
    amount = f"{times(speedup)} the tokens per second" if speedup >= 1.05 else "no more tokens per second"
    return f"The same documents, the same steps, {same}: {amount}."


def findings(figures: DemoFigures) -> Findings:
    """Return the sentences that follow from the figures."""
    return Findings(
        padding=_padding(figures),
        loss=_loss(figures),
        buckets=_buckets(figures),
        packed=_packed(figures),
        control=_control(figures),
        inflation=_inflation(figures),
    )


def loss_gap(figures: DemoFigures, method: MethodFigures, other: MethodFigures) -> tuple[float, float]:
    """Return a method's validation loss minus another's: mean over seeds, and spread."""
    gaps = [a - b for a, b in zip(figures.losses(method), figures.losses(other), strict=True)]
    return fmean(gaps), spread(gaps)


def _padding(figures: DemoFigures) -> str:
    ours, masked, padded = (figures.method(name) for name in ("flattened", "padded_with_mask", "padded"))
    return (
        f"Flattened, the random batches train at {times(ours.tokens_per_s / masked.tokens_per_s)} the tokens per "
        f"second of the same batches padded with a mask, and at {times(ours.tokens_per_s / padded.tokens_per_s)} "
        "that of batches padded without one, the stronger baseline, which gives the same loss. By CPU time it is "
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
        f"documents needs {as_size(buckets.memory_bytes)} (flattened {as_size(ours.memory_bytes)})."
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
        f"{percent(padded.system_s / padded.cpu_s)} of the padded run's CPU time is the kernel's "
        f"allocation of memory ({percent(ours.system_s / ours.cpu_s)} when flattened); by user time alone, flattened "
        f"is {times(padded.user_s / ours.user_s)} as fast as padded without a mask. And in so small a model "
        "attention, which grows with the square of a row, is more of the work than in a large one."
    )


_STYLES = {"baseline": "", "varlen": "bold green", "control": "magenta"}


def demo_table(figures: DemoFigures) -> RenderableType:
    """Return everything that `varlen demo` prints when it is done."""
    return Group(
        "",
        Text(headline(figures), style="bold"),
        "",
        _methods(figures),
        Text(_reading(figures), style="dim"),
        *_proof(figures),
        *_ledger(figures),
        *_findings(figures),
    )


def _methods(figures: DemoFigures) -> Table:
    """Return a row for each method; ratios are the speedup of flattening."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for title in (
        "tokens\n/s",
        "tokens\n/CPU s",
        "flat is\nfaster",
        "by CPU\ntime",
        "slots/\ntoken",
        "peak\nmemory",
        "validation\nloss",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    ours = figures.method("flattened")
    for method in figures.methods:
        losses = figures.losses(method)
        table.add_row(
            method.title,
            count(method.tokens_per_s),
            count(method.tokens_per_cpu_s),
            times(ours.tokens_per_s / method.tokens_per_s),
            times(ours.tokens_per_cpu_s / method.tokens_per_cpu_s),
            f"{method.slots_per_token:.2f}",
            as_size(method.memory_bytes),
            f"{_mark(method)}{fmean(losses):.3f}±{spread(losses):.3f}",
            style=_STYLES[method.role],
        )
    return table


def _mark(method: MethodFigures) -> str:
    return "*" if None in method.validation_losses else ""


def _reading(figures: DemoFigures) -> str:
    """Explain the table."""
    ours = figures.method("flattened")
    lines = [
        f"{ours.num_documents:,} documents, {ours.num_tokens:,} tokens, {ours.num_targets:,} targets and "
        f"{figures.steps:,} steps in every row, counted; tokens of padding don't count; {figures.threads} "
        "threads. Methods took turns step by step, each in a process of its own; peak memory is resident "
        "memory beyond what the process held before its first step."
    ]
    if any(None in method.validation_losses for method in figures.methods):
        lines.append(
            f"* its own loss for seed {figures.seeds[0]}; for further seeds that of flattened, which trains "
            "the same batches"
        )
    return "\n".join(lines)


def _proof(figures: DemoFigures) -> list[RenderableType]:
    verdict = Text(
        figures.isolation.verdict, style="bold green" if figures.isolation.is_proved else "bold red"
    )
    return ["", Text("isolation of the packed run: ", style="bold") + verdict, _facts(figures.isolation.rows)]


def _ledger(figures: DemoFigures) -> list[RenderableType]:
    ledger = figures.ledger
    return [
        "",
        Text("ledger", style="bold"),
        Padding(
            f"{ledger.tokens_in:,} tokens in = {ledger.packed:,} packed + {ledger.truncated:,} cut at "
            f"{figures.max_length:,} + {ledger.dropped:,} dropped; {ledger.duplicated:,} twice, "
            f"{ledger.balance:,} unaccounted for",
            (0, 0, 0, 2),
        ),
    ]


def _findings(figures: DemoFigures) -> list[RenderableType]:
    lines: list[RenderableType] = [""]
    for title, sentences in findings(figures).titled():
        lines.append(Text(title, style="bold"))
        lines.append(Padding(sentences, (0, 0, 0, 2)))
    return lines


def _facts(rows: tuple[tuple[str, str], ...]) -> RenderableType:
    table = Table.grid(padding=(0, 3, 0, 0))
    for name, value in rows:
        table.add_row(name, value)
    return Padding(table, (0, 0, 0, 2))
