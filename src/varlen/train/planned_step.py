"""One optimizer step by a plan: the whole step's batch in, gradients added up slice by slice, weights changed."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Any

import torch

from varlen.batch.packed import on_host
from varlen.runtime.engine import SliceEngine
from varlen.step_plan import StepPlan
from varlen.train.parallel import computing
from varlen.train.plans import Plans, Taken
from varlen.train.ranks import Ranks
from varlen.train.settings import TrainSettings
from varlen.train.step import StepDone, Take, update
from varlen.train.stopwatch import Stopwatch


class PlannedStepper:
    """Changes a model step by step, as `Stepper` does; each step is one batch and has a plan."""

    def __init__(
        self,
        *,
        engine: SliceEngine,
        optimizer: torch.optim.Optimizer,
        plans: Plans,
        settings: TrainSettings,
        ranks: Ranks,
    ) -> None:
        """Take all that a step needs.

        Args:
            engine: runs plans through the model.
            optimizer: over the parameters that this process holds.
            plans: of the run.
            settings: of the run.
            ranks: of the run.
        """
        self.model, self.optimizer = engine.model, optimizer
        self._engine, self._plans, self._settings, self._ranks = engine, plans, settings, ranks
        self._kept: OrderedDict[int, StepPlan] = OrderedDict()
        self._most_kept = settings.measure.steps + 1 if settings.measure.exposed_data else 0

    def step(self, number: int, learning_rate: float, take: Take) -> StepDone | None:
        """Train one step; None where the data is at its end, and nothing has changed.

        Args:
            number: of the step, from 1.
            learning_rate: of the step.
            take: gives its batch.

        Raises:
            PlanError: no plan holds the step; nothing has changed.
            VarlenError: another rank failed.
        """
        watch = Stopwatch(self._ranks.device)
        begun = time.perf_counter()
        batch = take()
        waited_s = time.perf_counter() - begun
        if batch is None:
            return None
        # Steps without targets are left out, so the batch says which one it is.
        step = int(on_host(batch.pack_ids[:1])[0]) // self._settings.data.global_batch_size
        taken = self._take(step, batch)
        with self._plans.beside(step), computing(self.model, self._settings.run, self._ranks):
            stats = self._engine.step(batch, taken.plan)
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
            tokens=own * batch.num_tokens,
            packs=own * len(batch.pack_ids),
            waited_s=waited_s,
            watch=watch,
            plan=taken.plan,
            plan_wait_s=taken.waited_s,
        )

    def _take(self, step: int, batch: Any) -> Taken:
        """The plan of a step: the one that it had, where it is trained again to measure it."""
        if step in self._kept:
            return Taken(plan=self._kept[step], waited_s=0.0)
        taken = self._plans.take(step, on_host(batch.document_lengths))
        if self._most_kept:
            self._kept[step] = taken.plan
            if len(self._kept) > self._most_kept:
                self._kept.popitem(last=False)
        return taken
