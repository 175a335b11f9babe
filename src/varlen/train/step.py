"""One optimizer step: batches in, gradients added up over micro-batches and ranks, weights changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from varlen.adapters import hf
from varlen.batch.packed import PackedBatch
from varlen.step_plan import StepPlan
from varlen.train.data import smallest_batch
from varlen.train.loss import target_loss_sum
from varlen.train.parallel import accumulating, computing, settle
from varlen.train.ranks import Ranks
from varlen.train.settings import TrainSettings
from varlen.train.stopwatch import Stopwatch

Take = Callable[[], PackedBatch | None]
"""Gives the next batch, or None at the end of the data."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepDone:
    """What a step did, as this rank knows it; on a GPU the numbers in tensors may be on their way yet."""

    number: int
    learning_rate: float
    loss_sum: torch.Tensor
    """Of this rank's targets, each multiplied by what it weighs."""
    grad_norm: torch.Tensor
    """Of all ranks."""
    step_targets: int
    """Of all ranks."""
    step_weight: float
    """What they weigh together, which the loss is divided by: their number, unless rows say otherwise."""
    tokens: Any
    """Of this rank's documents: a number, or a tensor of one."""
    packs: int
    waited_s: float
    """Of the host, for batches."""
    watch: Stopwatch
    plan: StepPlan | None = None
    """That was run, where steps are planned."""
    plan_wait_s: float = 0.0
    """Of the host, for the plan."""


class Stepper:
    """Changes a model step by step; a step depends on the weights, the state of AdamW, its number and its batches."""

    def __init__(
        self,
        *,
        model: Any,
        shared: Any,
        optimizer: torch.optim.Optimizer,
        settings: TrainSettings,
        ranks: Ranks,
        micro_batches: int,
        has_weights: bool = False,
    ) -> None:
        """Take all that a step needs.

        Args:
            model: bare.
            shared: the same as ranks share it.
            optimizer: over its parameters.
            settings: of the run.
            ranks: of the run.
            micro_batches: of a step and rank.
            has_weights: targets may weigh as their rows say, on all ranks alike.
        """
        self.model, self.optimizer = model, optimizer
        self._shared, self._settings, self._ranks = shared, settings, ranks
        self._micro_batches, self._has_weights = micro_batches, has_weights
        settle(shared, lambda: self._loss_sum(smallest_batch(settings.data.pad_id or 0))[0])

    def step(self, number: int, learning_rate: float, take: Take) -> StepDone | None:
        """Train one step; None where the data is at its end, and nothing has changed.

        Args:
            number: of the step, from 1; with the seed and the rank it decides what dropout draws.
            learning_rate: of the step.
            take: gives its batches.
        """
        watch = Stopwatch(self._ranks.device)
        torch.manual_seed(self._seed(number))
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        tokens: Any = 0
        weight: Any = 0
        packs = targets = 0
        waited_s = 0.0
        for micro_batch in range(self._micro_batches):
            begun = time.perf_counter()
            batch = take()
            waited_s += time.perf_counter() - begun
            if batch is None:
                return None
            with accumulating(self._shared, is_last=micro_batch + 1 == self._micro_batches):
                loss, own = self._loss_sum(batch)
                # Multiplied by what targets weigh, losses are divided by their number first: see `_over_weights`.
                (loss * unweighted(batch).loss_scale("mean")).backward()  # type: ignore[no-untyped-call]
            weight = weight + own
            loss_sum += loss.detach()
            tokens = tokens + batch.document_lengths.sum()  # on a GPU, without waiting for it
            packs += len(batch.pack_ids)
            targets = batch.step_num_targets
        whole = self._over_weights(weight, targets) if self._has_weights else float(targets)
        grad_norm = self._clip()
        update(self.optimizer, learning_rate)
        watch.stop()
        return StepDone(
            number=number,
            learning_rate=learning_rate,
            loss_sum=loss_sum,
            grad_norm=grad_norm,
            step_targets=targets,
            step_weight=whole,
            tokens=tokens,
            packs=packs,
            waited_s=waited_s,
            watch=watch,
        )

    def _over_weights(self, weight: torch.Tensor, targets: int) -> float:
        """Divide gradients by what the step's targets weigh, in place of their number; returns the weight.

        Which it is nobody knows before all ranks have had all of their batches.
        """
        whole = float(self._ranks.gather([float(weight)]).sum())
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(targets / whole)
        return whole

    def _loss_sum(self, batch: PackedBatch) -> tuple[torch.Tensor, Any]:
        """Run the model forward on a batch, whose documents don't see each other.

        Returns:
            The sum of its losses, each multiplied by what its target weighs; and, where rows may say that, the sum
            of the weights.
        """
        weights = batch.to_torch(self._ranks.device).loss_weights() if self._has_weights else None
        arguments = hf.model_inputs(unweighted(batch), self.model)
        labels = arguments.pop("labels")
        with computing(self._shared, self._settings.run, self._ranks):
            logits = self._shared(**arguments).logits
        if weights is None:
            return target_loss_sum(logits, labels), 0
        return target_loss_sum(logits, labels, weights), weights.sum(dtype=torch.float64)

    def _clip(self) -> torch.Tensor:
        """Scale gradients down to the highest norm, and return the norm that they had."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        highest = self._settings.optimizer.max_grad_norm
        if highest > 0:
            clip_grads_with_norm_(parameters, highest, norm)
        return norm.detach()

    def _seed(self, number: int) -> int:
        """Return what dropout draws from: a function of the step, so that a resumed run draws the same."""
        mixed = np.random.SeedSequence([self._settings.run.seed, number, self._ranks.rank])
        return int(mixed.generate_state(1, np.uint64)[0] >> 1)


def update(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Change weights by their gradients, which are gone then.

    Args:
        optimizer: over the weights.
        learning_rate: of the step.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


def unweighted(batch: PackedBatch) -> PackedBatch:
    """Return a batch without what its targets weigh."""
    return batch if batch.target_weights is None else batch.replace(columns={})
