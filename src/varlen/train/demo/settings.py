"""`DemoSettings`: what the demo's experiment trains, on how much, and for how long; validated when made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from varlen.errors import SettingError
from varlen.report.demo import Role
from varlen.types import IntArray
from varlen.workers.processors import processors

RUN_TOKENS = 45_000
"""Tokens after which a run takes no further step, but for its second, unless steps are given: this keeps the demo
under three minutes."""

MAX_SEED = 2**32 - 1
"""Every generator takes seeds up to here, and the few that follow."""
MAX_THREADS = 1024
"""More would be a slip of the keyboard, and a system may refuse to start them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """A Llama small enough to train on two CPU cores: about a million parameters."""

    vocab_size: int = 4096
    """Tokens the tokenizer may learn; the model embeds as many as it did."""
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 2
    intermediate_size: int = 384


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """The experiment. Every method trains the same documents in the same number of steps."""

    steps: int = 5
    """Optimizer steps of every run; fewer where documents are few or long, unless `exact_steps`."""
    exact_steps: bool = False
    """Take exactly `steps`, however long that lasts."""
    batch_documents: int = 16
    """Documents of a random or bucketed batch, which is one step."""
    max_length: int = 2048
    """Documents are cut to this many tokens; packs hold as many."""
    num_seeds: int = 3
    """Draws of documents, batches and initial weights, over which validation losses spread."""
    seed: int = 0
    """First seed; the others follow it."""
    validation_documents: int = 40
    """Documents kept aside, the same for every run; a quarter of all where there are few."""
    learning_rate: float = 4e-3
    threads: int = field(default_factory=lambda: min(2, processors()))
    """Threads of every run."""
    model: ModelSettings = field(default_factory=ModelSettings)

    def __post_init__(self) -> None:
        lowest = {
            "steps": 1,
            "batch_documents": 2,
            "max_length": 16,
            "num_seeds": 1,
            "seed": 0,
            "validation_documents": 1,
            "threads": 1,
        }
        for name, limit in lowest.items():
            if getattr(self, name) < limit:
                raise SettingError(f"{name} must be at least {limit:,}, got {getattr(self, name):,}")
        for name, limit in {"seed": MAX_SEED, "threads": MAX_THREADS}.items():
            if getattr(self, name) > limit:
                raise SettingError(f"{name} must be at most {limit:,}, got {getattr(self, name):,}")

    def fitted(self, lengths: IntArray) -> DemoSettings:
        """Return what these documents allow: fewer steps where they are few or long.

        Long documents leave little padding and cost the more in every run, so that as many steps as for
        short ones would take far longer and show less.

        Args:
            lengths: int64 `[num_documents]` in tokens, at least one.
        """
        validation = max(min(self.validation_documents, len(lengths) // 4), 1)
        if self.exact_steps:
            return replace(self, validation_documents=validation)
        step_tokens = float(np.minimum(lengths, self.max_length).mean()) * self.batch_documents
        affordable = max(int(RUN_TOKENS / step_tokens), 2)
        most = min((len(lengths) - validation) // self.batch_documents, affordable)
        return replace(self, validation_documents=validation, steps=max(min(self.steps, most), 1))

    @property
    def run_documents(self) -> int:
        """Documents that one run trains on."""
        return self.steps * self.batch_documents

    @property
    def num_documents_needed(self) -> int:
        """Documents without which the experiment can't be run: one run's and the validation set's."""
        return self.run_documents + self.validation_documents


# The ways of feeding the model that the demo compares: an order of documents, and a layout of arrays.

OrderName = Literal["random", "bucketed", "packed"]
"""Which documents share a step; see `orders`."""

ORDERS: tuple[OrderName, ...] = ("random", "bucketed", "packed")

LayoutName = Literal["padded_with_mask", "padded", "flat", "rows", "rows_without_boundaries"]
"""How a step becomes arrays; see `layouts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way of feeding the model."""

    name: str
    title: str
    role: Role
    order: OrderName
    layout: LayoutName
    same_loss_as: str | None = None
    """The method that trains the same batches in a faster layout, whose loss is this one's too."""


METHODS = (
    Method(
        name="padded_with_mask",
        title="padded, with mask",
        role="baseline",
        order="random",
        layout="padded_with_mask",
        same_loss_as="flattened",
    ),
    Method(
        name="padded",
        title="padded, no mask",
        role="baseline",
        order="random",
        layout="padded",
        same_loss_as="flattened",
    ),
    Method(name="bucketed", title="length buckets", role="baseline", order="bucketed", layout="padded"),
    Method(name="flattened", title="flattened", role="varlen", order="random", layout="flat"),
    Method(name="packed", title="packed windows", role="varlen", order="packed", layout="rows"),
    Method(
        name="without_boundaries",
        title="packed, no boundaries",
        role="control",
        order="packed",
        layout="rows_without_boundaries",
    ),
)
"""Random batches padded, twice; buckets, the baseline that pads least; varlen's two ways; and the control."""

FASTEST_LAYOUT: dict[LayoutName, LayoutName] = {"padded_with_mask": "flat", "padded": "flat"}
"""Layouts with the same loss, for runs in which only the loss counts."""
