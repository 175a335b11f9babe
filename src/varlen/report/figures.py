"""The figures of the demo as plain, frozen data: what its table, its page and its JSON all show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

Role = Literal["baseline", "varlen", "control"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodFigures:
    """One way of feeding the model, and what it took."""

    name: str
    """A word for programs, such as "padded_with_mask"."""
    title: str
    """A few words for readers."""
    role: Role
    """Whether it is a baseline, varlen's, or a control that must be worse."""
    steps: int
    num_documents: int
    num_tokens: int
    """Tokens of documents; padding not counted."""
    num_targets: int
    """Tokens learned from."""
    num_slots: int
    """Positions computed, padding included."""
    wall_s: float
    user_s: float
    """CPU seconds in the program's own code, all threads together."""
    system_s: float
    """CPU seconds in the kernel, above all handing out fresh memory."""
    memory_bytes: int
    """Most memory held during a step, beyond what the process held before the first."""
    step_losses: tuple[float, ...]
    """Mean target loss of each step of the first seed, in nats."""
    validation_losses: tuple[float | None, ...]
    """One for each seed; None where the run wasn't done because `same_loss_as` says what it would be."""
    same_loss_as: str | None = None
    """The method that trains the same batches in another layout."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds, user and system."""
        return self.user_s + self.system_s

    @property
    def tokens_per_s(self) -> float:
        """Effective tokens a second: padding doesn't count."""
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
    """What became of every token of a run's documents."""

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
    """The proof that documents don't see each other, as measured on the trained model."""

    verdict: str
    """In one word or sentence; "isolated" only if the control failed."""
    is_proved: bool
    """Whether documents are isolated and the control leaks, as it must."""
    rows: tuple[tuple[str, str], ...]
    """What was measured and what came out, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceFigures:
    """A document in a picture: its tokens, and how its text begins."""

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
    """What the documents are."""

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
    """Slots per token when random batches of all documents are padded to their longest."""
    bucketed_ratio: float
    """The same when pools of `bucket_pool` documents are sorted by length first."""
    bucket_pool: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoFigures:
    """All that the demo measured."""

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
        """Return a loss for each seed, where needed that of the same batches in another layout."""
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
