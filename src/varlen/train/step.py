"""One optimizer step: batches in, gradients added up over micro-batches and ranks, weights changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from varlen.adapters import hf
from varlen.batch.packed import IGNORE_INDEX, PackedBatch
from varlen.runtime.engine import SliceEngine
from varlen.step_plan import StepPlan
from varlen.train.data import smallest_batch
from varlen.train.parallel import Ranks, accumulating, computing, settle
from varlen.train.settings import OptimizerSettings, TrainSettings

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
        """Take all that a step needs."""
        self.model, self.optimizer = model, optimizer
        self._shared, self._settings, self._ranks = shared, settings, ranks
        self._micro_batches, self._has_weights = micro_batches, has_weights
        settle(shared, lambda: self._loss_sum(smallest_batch(settings.data.pad_id or 0))[0])

    def step(self, number: int, learning_rate: float, take: Take) -> StepDone | None:
        """Train one step; None where the data is at its end, and nothing has changed."""
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
        """Run the model forward on a batch, whose documents don't see each other."""
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
    """Change weights by their gradients, which are gone then."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


def unweighted(batch: PackedBatch) -> PackedBatch:
    """Return a batch without what its targets weigh."""
    return batch if batch.target_weights is None else batch.replace(columns={})


# One optimizer step by a plan: this rank's share of a step in, gradients added up slice by slice, weights changed.


class PlannedStepper:
    """Changes a model step by step, as `Stepper` does; each step is one batch, which has its plan."""

    def __init__(
        self,
        *,
        engine: SliceEngine,
        optimizer: torch.optim.Optimizer,
        settings: TrainSettings,
        ranks: Ranks,
    ) -> None:
        """Take all that a step needs."""
        self.model, self.optimizer = engine.model, optimizer
        self._engine, self._settings, self._ranks = engine, settings, ranks

    def step(self, number: int, learning_rate: float, take: Take) -> StepDone | None:
        """Train one step; None where the data is at its end, and nothing has changed."""
        watch = Stopwatch(self._ranks.device)
        begun = time.perf_counter()
        batch = take()
        waited_s = time.perf_counter() - begun
        if batch is None:
            return None
        with computing(self.model, self._settings.run, self._ranks):
            stats = self._engine.step(batch)
        grad_norm = self._engine.clip_grad_norm_(self._settings.optimizer.max_grad_norm or math.inf)
        update(self.optimizer, learning_rate)
        watch.stop()
        own = int(self._ranks.is_first)  # every rank knows of the whole step, and they are added up
        return StepDone(
            number=number,
            learning_rate=learning_rate,
            loss_sum=torch.tensor(own * stats.loss * batch.step_num_targets, dtype=torch.float64),
            grad_norm=torch.tensor(grad_norm, dtype=torch.float64),
            step_targets=batch.step_num_targets,
            step_weight=float(batch.step_num_targets),
            tokens=own * stats.plan.num_tokens,
            packs=own * self._settings.data.global_batch_size,
            waited_s=waited_s,
            watch=watch,
            plan=stats.plan,
        )


# The sum of the target losses of a batch, in blocks, so that no second copy of all logits stands in memory.

BLOCK = 4096
"""Positions whose logits are widened to float32 at once: 512 MB at a vocabulary of 32,000."""


def target_loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of the losses of all targets, in nats, as float32; 0 where there is no target.

    Args:
        logits: `[rows, width, vocabulary]`.
        labels: int64 `[rows, width]`, not shifted: position t - 1 is to say the label of position t.
        weights: `[rows, width]`, by which each loss is multiplied, at the places of the labels; None for 1.
    """
    # Labels move instead of logits, which are the large ones: a row's last position has nothing to say.
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)
    moved = None if weights is None else torch.nn.functional.pad(weights[:, 1:], (0, 1)).reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1])
    if len(flat) <= BLOCK:
        return _block_sum(flat, targets, moved)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for begin in range(0, len(flat), BLOCK):
        block = slice(begin, begin + BLOCK)
        here = None if moved is None else moved[block]
        total = total + checkpoint(_block_sum, flat[block], targets[block], here, use_reentrant=False)
    return total


def _block_sum(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if weights is None:
        return cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return (
        cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none") * weights
    ).sum()


# AdamW, and its learning rate as a function of the step alone.


def make_optimizer(
    model: torch.nn.Module, settings: OptimizerSettings, device: torch.device
) -> torch.optim.AdamW:
    """Return AdamW over a model's parameters, of which only matrices decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=fused,
        foreach=None if fused else True,
    )


def learning_rate(step: int, steps: int | None, settings: OptimizerSettings) -> float:
    """Return the learning rate of a step.

    >>> settings = OptimizerSettings(learning_rate=1.0, schedule="linear", warmup_steps=2)
    >>> [learning_rate(step, 6, settings) for step in range(1, 7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    highest, lowest, warmup = settings.learning_rate, settings.min_learning_rate, settings.warmup_steps
    if step <= warmup:
        return highest * step / warmup
    if settings.schedule == "constant" or steps is None:
        return highest
    passed = min((step - warmup) / max(steps - warmup, 1), 1.0)
    if settings.schedule == "cosine":
        return lowest + (highest - lowest) * (1 + math.cos(math.pi * passed)) / 2
    return lowest + (highest - lowest) * (1 - passed)


# Seconds of work: of the host, or of the GPU between two marks in its queue, which the host runs ahead of.


class Stopwatch:
    """Runs from when it is made until `stop`."""

    def __init__(self, device: torch.device) -> None:
        """Begin."""
        self._is_gpu = device.type == "cuda"
        self._begin = self._mark()
        self._end: Any = None

    def stop(self) -> None:
        """End; on a GPU, where its queue gets to here."""
        self._end = self._mark()

    def seconds(self) -> float:
        """Return what passed; on a GPU, wait until its queue got there."""
        if self._is_gpu:
            self._end.synchronize()
            return float(self._begin.elapsed_time(self._end)) / 1000
        return float(self._end - self._begin)

    def _mark(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
