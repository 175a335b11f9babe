"""The plans of a run's steps: even slices at once, or those that the first rank has made ahead and hands out."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from varlen.cost.model import CostModel
from varlen.errors import PlanError, StateError, VarlenError
from varlen.feed.loader import PackedLoader
from varlen.files.token_tables import unfinished
from varlen.offline.places import free_words
from varlen.plan.one_gpu import one_gpu_plan
from varlen.plan.planner import Planner
from varlen.plan.search import Search
from varlen.plan.serialize import broadcast_plan
from varlen.regular import read_regular
from varlen.runtime.engine import SLICE_TOKENS
from varlen.simulate.api import simulate
from varlen.step_plan import Mesh, Offload, Recompute, StepPlan
from varlen.train.ranks import Ranks
from varlen.train.settings import PlanSettings
from varlen.types import Int32Array

STATE: Final = "plans.json"
"""How the last steps were answered, in the run's folder. It is written with each step, and not with checkpoints: what
is behind the newest checkpoint is run again, by the plans that it had."""
_NAME: Final = "varlen/plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The plan of a step."""

    plan: StepPlan
    waited_s: float
    """Until it was there."""


class Plans(Protocol):
    """Gives steps their plans."""

    @property
    def words(self) -> str:
        """What plans there are, for people."""

    def begin(self, step: int) -> None:
        """Begin to plan, where that is done ahead.

        Args:
            step: from 0; which is taken first.
        """

    def take(self, step: int, lengths: Int32Array) -> Taken:
        """Return the plan of a step; all ranks call it.

        Args:
            step: from 0.
            lengths: int32 `[num_documents]`: of its documents.
        """

    def beside(self, step: int) -> AbstractContextManager[Any]:
        """Return what a step computes in: what plans take is done beside it, and is done when it ends.

        Args:
            step: that was taken.
        """

    def simulated_s(self, plan: StepPlan) -> float | None:
        """Return the seconds that a plan was made for; None where nobody knows."""

    def close(self) -> None:
        """Leave no process behind."""


class EvenSlices:
    """Plans of one process, which take no seconds into account and no time to make."""

    def __init__(self, settings: PlanSettings) -> None:
        """Take the settings."""
        self._rows = SLICE_TOKENS if settings.slice_tokens is None else settings.slice_tokens
        self._recompute: Recompute = "full" if settings.recompute == "auto" else settings.recompute
        self._offload: Offload = "none" if settings.offload == "auto" else settings.offload

    @property
    def words(self) -> str:
        """What plans there are."""
        offload = f', offload "{self._offload}"' if self._offload != "none" else ""
        return f'slices of up to {self._rows:,} tokens, recompute "{self._recompute}"{offload}'

    def begin(self, step: int) -> None:
        """Do nothing."""

    def take(self, step: int, lengths: Int32Array) -> Taken:  # noqa: ARG002 - as all plans are taken
        """Return the plan of a step."""
        begun = time.perf_counter()
        plan = one_gpu_plan(lengths, self._rows, recompute=self._recompute, offload=self._offload)
        return Taken(plan=plan, waited_s=time.perf_counter() - begun)

    def beside(self, step: int) -> AbstractContextManager[Any]:  # noqa: ARG002 - as all plans are asked
        """Do nothing."""
        return nullcontext()

    def simulated_s(self, plan: StepPlan) -> None:
        """Return None: nobody knows."""

    def close(self) -> None:
        """Do nothing."""


class PlansAhead:
    """Plans by a cost model, of a process that is ahead of the training; the first rank has it, and tells others."""

    def __init__(
        self,
        loader: PackedLoader,
        settings: PlanSettings,
        *,
        mesh: Mesh,
        cost: CostModel | None,
        ranks: Ranks,
        folder: Path,
    ) -> None:
        """Take what plans are made of; nothing is planned yet.

        Args:
            loader: of the run; knows the lengths of coming steps.
            settings: of the plans.
            mesh: of the run.
            cost: of the first rank.
            ranks: of the run.
            folder: of the run.
        """
        self._loader, self._settings, self._mesh, self._cost = loader, settings, mesh, cost
        self._ranks, self._path = ranks, folder / STATE
        self._method = settings.method or "micropack"
        self._belongs_to = hashlib.sha256(
            json.dumps(loader.state_dict()["belongs_to"], sort_keys=True, default=str).encode()
        ).hexdigest()
        self._planner: Planner | None = None
        self._known: dict[int, Int32Array | None] = {}
        """Lengths that were looked up while a step computed."""
        self._aside: ThreadPoolExecutor | None = None

    @property
    def words(self) -> str:
        """What plans there are."""
        mesh = f"dp {self._mesh.dp} x pp {self._mesh.pp}"
        if self._mesh.virtual_stages > 1:
            mesh += f" x {self._mesh.virtual_stages} chunks"
        rates = f", rates of {self._cost.hardware.name or 'a file'}" if self._cost is not None else ""
        given = self._settings
        kept = f', recompute "{given.recompute}", offload "{given.offload}"'
        kept += ", no shared documents" if self._mesh.dp > 1 and not given.merges else ""
        return f'"{self._method}" on {mesh}{kept}{rates}'

    def begin(self, step: int) -> None:
        """Begin to plan on the first rank, and have steps that are run again planned as they were.

        Args:
            step: from 0; which is taken first.
        """
        if self._cost is None or self._planner is not None:
            return
        given = self._settings
        search = Search(merges=given.merges, least_rows=given.least_rows)
        # One look is enough for it, but where the same method is to make the same plan.
        quick = search if given.quick == self._method else replace(search, closely=False)
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="varlen plans")
        self._planner = Planner(
            self._lengths,
            function="varlen.train.affordable:affordable",
            quick={"method": given.quick, "search": quick},
            ahead=given.ahead,
            deadline_s=given.deadline_s,
            first_step=step,
            cost=self._cost,
            mesh=self._mesh,
            method=self._method,
            search=search,
            recompute=given.recompute,
            offload=given.offload,
        )
        faults = (OSError, ValueError, KeyError, TypeError, RecursionError, StateError)
        with suppress(*faults):  # steps are planned anew then
            kept = json.loads(read_regular(self._path))
            if kept["belongs_to"] == self._belongs_to:
                self._planner.load_state_dict(kept["planner"])

    def take(self, step: int, lengths: Int32Array) -> Taken:
        """Return the plan of a step; see `Plans.take`.

        Raises:
            PlanError: no plan holds the step, or its documents are others than the loader said before.
            VarlenError: the first rank has no plan.
        """
        begun = time.perf_counter()
        self.begin(step)
        if self._planner is None:
            plan = self._told(step)
        else:
            try:
                plan = self._planner.take(step)
                _check_documents(plan, lengths, step)
            except VarlenError:
                if self._ranks.store is not None:
                    self._ranks.store.set(f"{_NAME}/{step}", b"")  # so that nobody waits for a plan
                raise
            if self._ranks.world_size > 1:
                broadcast_plan(plan, self._ranks.store, step, name=_NAME)
        return Taken(plan=plan, waited_s=time.perf_counter() - begun)

    @contextmanager
    def beside(self, step: int) -> Iterator[None]:
        """Note how the step was answered, and look up the lengths that the next one asks for; see `Plans.beside`.

        Raises:
            VarlenError: the folder can't be written, so that nobody would know by which plan the step was run.
        """
        if self._planner is None or self._aside is None:
            yield
            return
        work = self._aside.submit(self._prepare, self._planner, step + self._settings.ahead + 1)
        try:
            yield
        finally:
            wait([work])
        work.result()

    def _prepare(self, planner: Planner, step: int) -> None:
        self._keep(planner.state_dict())
        with suppress(VarlenError):  # which is raised again where they are asked for
            self._known = {step: self._loader.lengths(step)}

    def _lengths(self, step: int) -> Int32Array | None:
        return self._known[step] if step in self._known else self._loader.lengths(step)

    def _told(self, step: int) -> StepPlan:
        """The first rank's plan.

        Raises:
            VarlenError: it has none.
        """
        try:
            return broadcast_plan(None, self._ranks.store, step, name=_NAME)
        except PlanError:
            if self._ranks.store.get(f"{_NAME}/{step}"):
                raise
            raise VarlenError(f"rank 0 of {self._ranks.world_size} failed; it says why") from None

    def _keep(self, state: Mapping[str, Any]) -> None:
        """Write how steps were answered, whole or not at all; a power cut may take the last of it."""
        partial = unfinished(self._path)
        try:
            partial.write_text(json.dumps({"belongs_to": self._belongs_to, "planner": state}))
            partial.replace(self._path)
        except OSError as error:
            free = free_words(error, self._path)
            raise VarlenError(f"{self._path} can't be written: {error.strerror or error}{free}") from None
        finally:
            partial.unlink(missing_ok=True)

    def simulated_s(self, plan: StepPlan) -> float | None:
        """Return the seconds that a plan was made for, on the first rank."""
        if self._cost is None:
            return None
        return float(simulate(plan, self._cost.as_planned(plan)).makespan_s)

    def close(self) -> None:
        """End the process that plans."""
        if self._aside is not None:
            self._aside.shutdown()
        if self._planner is not None:
            self._planner.close()


def _check_documents(plan: StepPlan, lengths: Int32Array, step: int) -> None:
    """Require that a step holds the documents that it was planned for, in their order.

    Raises:
        PlanError: it doesn't.
    """
    if len(plan.lengths) == len(lengths) and (plan.lengths == lengths).all():
        return
    differ = (
        ""
        if len(plan.lengths) != len(lengths)
        else f", {int((plan.lengths != lengths).sum()):,} of other lengths"
    )
    raise PlanError(
        f"step {step:,} was planned for {len(plan.lengths):,} documents and holds {len(lengths):,}{differ}; the "
        "store has grown since it was asked, so wait until varlen index has finished and run the same command again"
    )
