"""The plans of a run's steps, the engine that runs them, and the hardware that prices them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from varlen.batch.packed import PackedBatch
from varlen.cost.hardware import Hardware, load_hardware, save_hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape, check_mesh
from varlen.counts import many
from varlen.errors import ModelError, SettingError, StateError
from varlen.feed.loader import PackedLoader
from varlen.feed.plans import GivenPlans, PlansOfAnotherRank, choice_of
from varlen.feed.state import PLANS
from varlen.files.ours import atomic_file, disk_faults
from varlen.plan.one_gpu import one_gpu_plan
from varlen.plan.planner import MOST_CHOICES, Planner
from varlen.plan.search import Search
from varlen.regular import read_regular
from varlen.runtime.calibrate import calibrate
from varlen.runtime.engine import SLICE_TOKENS, SliceEngine
from varlen.runtime.mesh.process_groups import coordinate_of
from varlen.runtime.split import check_ranks, cut_to_stage, devices_of, divide_layers
from varlen.simulate.api import simulate
from varlen.step_plan import Mesh, Offload, PlanMethod, Recompute, Sharding, StepPlan
from varlen.train.affordable import affordable
from varlen.train.model import as_saved, bare_model
from varlen.train.parallel import Ranks, sharded
from varlen.train.settings import PlanSettings, RunSettings, TrainSettings
from varlen.train.states import RunStates, has_masters, meta_model, states_of
from varlen.train.step import DocumentLosses, Gradients, Part
from varlen.types import Int32Array

STATE: Final = "plans.json"
"""File in the run's folder that says how the last steps were planned. It is written after every step, so that steps
after the newest checkpoint, which are run again, get the same plans."""
_MOST_UNKNOWN: Final = 0.05
"""Share of a model's parameters that its shape may lack, or count in excess, without a note."""


class RunPlans:
    """The source of a run's plans, and a record of how the last steps were planned."""

    def __init__(
        self,
        given: GivenPlans,
        words: str,
        *,
        cost: CostModel | None = None,
        path: Path | None = None,
        of_evaluation: GivenPlans | None = None,
    ) -> None:
        """Take what gives plans to the loader, and its description; on the first rank also costs and the record.

        Args:
            given: to the loader of the run.
            words: a description.
            cost: what prices plans.
            path: of the record.
            of_evaluation: given to loaders of evaluations, which read nothing ahead on any rank; None for `given`.
        """
        self.of_evaluation = given if of_evaluation is None else of_evaluation
        self.given, self.words, self._cost, self._path = given, words, cost, path
        self._belongs_to = ""
        self._choices: dict[str, list[str]] = {}

    def restore_choices(self, loader: PackedLoader) -> None:
        """Give steps that are run again the plans that they had, as far as the record says."""
        if self._path is None:
            return
        state = loader.state_dict()
        belongs_to = [state["belongs_to"], state[PLANS]["belongs_to"]]
        self._belongs_to = hashlib.sha256(
            json.dumps(belongs_to, sort_keys=True, default=str).encode()
        ).hexdigest()
        # Without a record, steps are planned anew.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(read_regular(self._path))
            if record["belongs_to"] == self._belongs_to:
                choices = {**record["planner"]["choices"], **state[PLANS]["choices"]}
                with suppress(StateError):
                    loader.load_state_dict({**state, PLANS: {**state[PLANS], "choices": choices}})

    def record_choice(self, step: int, plan: StepPlan) -> None:
        """Record how a step was planned. The file is replaced atomically, but not synced to the disk."""
        if self._path is None:
            return
        self._choices[str(step)] = choice_of(plan)
        while len(self._choices) > MOST_CHOICES:
            del self._choices[min(self._choices, key=int)]
        planner = {"choices": self._choices}
        with disk_faults(self._path), atomic_file(self._path, is_synced=False) as part:
            part.write_text(json.dumps({"belongs_to": self._belongs_to, "planner": planner}))

    def simulated_s(self, plan: StepPlan) -> float | None:
        """Return the seconds that the cost model predicts, on the first rank; None without a cost model."""
        if self._cost is None:
            return None
        return float(simulate(plan, self._cost.as_planned(plan)).makespan_s)


# What a run with `[plan]` needs: its mesh, its cost model, and the engine that runs its plans.


def mesh_of(plan: PlanSettings, run: RunSettings, world_size: int) -> Mesh:
    """Return how the processes of a run are arranged."""
    each = plan.pp * plan.cp * plan.tp
    if world_size % each:
        raise SettingError(_of_other_processes(plan, world_size, each))
    if plan.slice_tokens is not None and world_size > 1:
        raise SettingError(
            f"plan.slice_tokens is for one process, and there are {world_size:,}; leave it out: several run slices "
            "of equal seconds"
        )
    dp = world_size // each
    sharding: Sharding = "none"
    if _is_sharded(run, dp * plan.cp):
        sharding = "parameters"
    elif dp * plan.cp > 1 and has_masters(run):
        sharding = "optimizer"
    return Mesh(
        dp=dp, pp=plan.pp, cp=plan.cp, tp=plan.tp, virtual_stages=plan.virtual_stages, sharding=sharding
    )


def _is_sharded(run: RunSettings, replicas: int) -> bool:
    """Return whether FSDP2 holds a stage's parameters: in half precision of one replica too, which it casts."""
    return run.parallel == "fsdp" and (replicas > 1 or run.precision == "bf16")


def _of_other_processes(plan: PlanSettings, world_size: int, each: int) -> str:
    """Return the sentence that refuses a number of processes that isn't a multiple of a pipeline's."""
    below, above = world_size - world_size % each, world_size + each - world_size % each
    near = f"{below:,} or {above:,}" if below else f"{above:,}"
    inner = [name for name in ("cp", "tp") if getattr(plan, name) > 1]
    held = " x ".join(f"plan.{name} = {getattr(plan, name)}" for name in inner)
    *first, last = [f"plan.{name}" for name in ("pp", *inner)]
    named = f"{', '.join(first)} and {last} whose product" if first else f"{last} that"
    return (
        f"plan.pp = {plan.pp} stages{f' of {held} processes each' if inner else ''}, and there "
        f"{'is' if world_size == 1 else 'are'} {many(world_size, 'process', 'processes')}; start {near}, or set a "
        f"{named} divides {world_size:,}"
    )


def plans_of(
    settings: TrainSettings, config: Any, ranks: Ranks, note: Callable[[str], object]
) -> RunPlans | None:
    """Return the plans of a run with `[plan]`, else None; measures hardware that isn't known."""
    plan = settings.plan
    if plan is None:
        return None
    mesh = mesh_of(plan, settings.run, ranks.world_size)
    if settings.data.mode == "streaming":
        raise SettingError(
            "[plan] needs the lengths of coming steps, which streaming reads first; index the documents (varlen "
            'index) and name the store as data.source, or set data.mode = "indexed"'
        )
    if plan.is_even and ranks.world_size == 1:
        return even_slices(plan)
    shape = shape_of(config, mesh, note)
    words = words_of(plan, mesh)
    if not ranks.is_first:
        return RunPlans(PlansOfAnotherRank(plan.ahead), words, of_evaluation=PlansOfAnotherRank(0))
    states = states_of(settings, meta_model(settings, config))
    cost = cost_of(settings, shape, states, ranks.device, note)
    search, method = search_of(plan), method_of(plan)
    # The quick plan needs no close search, unless it must equal the plan of the same method.
    quick = search if plan.quick == method else replace(search, closely=False)
    ways: dict[str, Any] = {"cost": cost, "mesh": mesh, "recompute": plan.recompute, "offload": plan.offload}
    planner = Planner(
        function="varlen.train.affordable:affordable",
        quick={"method": plan.quick, "search": quick},
        ahead=plan.ahead,
        deadline_s=plan.deadline_s,
        method=method,
        search=search,
        **ways,
    )
    words += f", rates of {cost.hardware.name or 'a file'}"

    def of_evaluation(_: int, lengths: Int32Array) -> StepPlan:
        return affordable(lengths, method=plan.quick, search=quick, **ways)

    path = settings.run.folder / STATE
    return RunPlans(planner, words, cost=cost, path=path, of_evaluation=of_evaluation)


def shape_of(config: Any, mesh: Mesh, note: Callable[[str], object]) -> ModelShape:
    """Return the shape by which a model's steps are priced; refuses a mesh that can't divide the model."""
    model = bare_model(config)
    if mesh.cp > 1 or mesh.tp > 1:  # what the engine would say after planning
        check_ranks(model, mesh)
    shape = ModelShape.from_config(config)
    check_mesh(shape, mesh)
    num_parameters = sum(each.numel() for each in model.parameters())
    if abs(shape.num_parameters - num_parameters) > _MOST_UNKNOWN * num_parameters:
        note(
            f"plans count {shape.num_parameters:,} parameters, and this {shape.name} model has {num_parameters:,}: "
            "predicted times and memory are as far off"
        )
    return shape


def method_of(plan: PlanSettings) -> PlanMethod:
    """Return the method of a run's plans."""
    return plan.method or "micropack"


def search_of(plan: PlanSettings) -> Search:
    """Return how plans are searched."""
    return Search(merges=plan.merges, least_rows=plan.least_rows)


def words_of(plan: PlanSettings, mesh: Mesh) -> str:
    """Return a description of a run's plans."""
    words = f'"{method_of(plan)}" on dp {mesh.dp} x pp {mesh.pp}'
    words += f" x cp {mesh.cp}" if mesh.cp > 1 else ""
    words += f" x tp {mesh.tp}" if mesh.tp > 1 else ""
    words += f" x {mesh.virtual_stages} chunks" if mesh.virtual_stages > 1 else ""
    words += f', recompute "{plan.recompute}", offload "{plan.offload}"'
    return words + (", no shared documents" if mesh.dp > 1 and not plan.merges else "")


def even_slices(plan: PlanSettings) -> RunPlans:
    """Return plans of one process, which need no cost model."""
    rows, recompute, offload = ways_of(plan)
    words = f'slices of up to {rows:,} tokens, recompute "{recompute}"'
    words += f', offload "{offload}"' if offload != "none" else ""
    return RunPlans(
        lambda _, lengths: one_gpu_plan(lengths, rows, recompute=recompute, offload=offload), words
    )


def ways_of(plan: PlanSettings) -> tuple[int, Recompute, Offload]:
    """Return the most tokens of a slice of one process, what is recomputed, and what is offloaded."""
    return (
        SLICE_TOKENS if plan.slice_tokens is None else plan.slice_tokens,
        "full" if plan.recompute == "auto" else plan.recompute,
        "none" if plan.offload == "auto" else plan.offload,
    )


def cost_of(
    settings: TrainSettings,
    shape: ModelShape,
    states: RunStates,
    device: torch.device,
    note: Callable[[str], object],
    *,
    keeps_rates: bool = True,
    memory_bytes: float | None = None,
) -> CostModel:
    """Return the cost model that prices plans; rates that are measured are kept in the run's folder, or nowhere.

    Args:
        settings: of the run.
        shape: of the model.
        states: of its parameters.
        device: that is measured, where no hardware is named.
        note: shows a sentence.
        keeps_rates: whether measured rates are kept.
        memory_bytes: of a device; None for that of the hardware.
    """
    plan, precision = settings.plan, settings.run.precision
    assert plan is not None, "such a run is planned"
    hardware = hardware_of(
        plan,
        shape,
        device=device,
        dtype=torch.float32 if precision == "fp32" else torch.bfloat16,
        folder=settings.run.folder,
        note=note,
        is_kept=keeps_rates,
    )
    if memory_bytes is not None:
        hardware = replace(hardware, memory_bytes=memory_bytes)
    return CostModel(
        model=shape,
        hardware=hardware,
        kernels="eager",
        memory_fraction=plan.memory_fraction,
        precision=precision,
        **states.priced(shape),
    )


class SliceGradients(Gradients[PackedBatch]):
    """Runs the slices of a plan through this process's stage of a model; a step is one batch, which has its plan."""

    def __init__(self, model: Any, settings: TrainSettings, ranks: Ranks) -> None:
        weights = _narrow(model) if has_masters(settings.run) else None
        self._engine = _engine_of(model, settings, ranks)
        self.model, self._settings, self._ranks = self._engine.model, settings, ranks
        self._parameters = super().parameters
        self._has_masters = weights is not None
        if weights is not None:
            self._parameters = dict(zip(self._parameters, self._engine.master_parameters(weights)))

    def add(self, batch: PackedBatch, *, is_last: bool) -> Part:
        """See `Gradients`."""
        assert is_last, "a step with a plan is one batch"
        stats = self._engine.step(batch)
        # Every rank has the numbers of the whole step, and the ranks' numbers are added up.
        own = int(self._ranks.is_first)
        return Part(
            loss_sum=torch.tensor(own * stats.loss * batch.step_num_targets, dtype=torch.float64),
            tokens=own * stats.plan.num_tokens,
            packs=own * self._settings.data.global_batch_size,
            step_targets=batch.step_num_targets,
            plan=stats.plan,
            lengths=(stats.plan.lengths,) if own else (),
        )

    def evaluate(self, batch: PackedBatch) -> DocumentLosses:
        """See `Gradients`."""
        self.model.eval()
        try:
            found = self._engine.evaluate(batch, document_losses=True)
        finally:
            self.model.train()
        sums, weights = found.document_sums, found.document_weights
        assert sums is not None, "they were asked for"
        assert weights is not None, "they were asked for"
        lengths = np.asarray(batch.document_lengths if batch.plan is None else batch.plan.lengths, np.float64)
        own = int(self._ranks.is_first)  # every rank has the losses of the whole step
        return DocumentLosses(lengths=lengths, sums=own * sums, weights=own * weights)

    def clip(self, max_norm: float) -> torch.Tensor:
        """See `Gradients`; the norm is over all stages and shards."""
        return torch.tensor(self._engine.clip_grad_norm_(max_norm or math.inf), dtype=torch.float64)

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """See `Gradients`."""
        return self._parameters

    def publish(self) -> None:
        """See `Gradients`."""
        if self._has_masters:
            self._engine.publish()

    def close(self) -> None:
        """Leave the groups of the job's processes."""
        self._engine.close()


def _narrow(model: Any) -> dict[str, torch.Tensor]:
    """Put a model's weights in bfloat16, except those that it keeps in float32; returns the weights as they were.

    A tied weight is returned by all of its names, since the last stage of a pipeline has another one than the first.
    """
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    narrow = as_saved(weights, model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data = narrow[name]
    return weights


def _engine_of(model: Any, settings: TrainSettings, ranks: Ranks) -> SliceEngine:
    """Cut a model to this process's stage, divide and shard it if settings say so, and return the engine of it."""
    plan, run = settings.plan, settings.run
    assert plan is not None, "such a run is planned"
    mesh = mesh_of(plan, run, ranks.world_size)
    is_sharded = _is_sharded(run, mesh.dp * mesh.cp)
    if mesh.num_gpus == 1 and not is_sharded:
        return SliceEngine(model.to(ranks.device))
    cut_to_stage(model, mesh, coordinate_of(mesh, ranks.rank).stage)
    devices = devices_of(mesh, ranks.device) if is_sharded or mesh.tp > 1 else None
    if devices is not None and mesh.tp > 1:  # before the whole model is on the device
        divide_layers(model, devices["tp"])
        _check_saved(model)
    if devices is not None and is_sharded:
        sharded(model, run, ranks.device, devices["replicas"])
    else:
        model.to(ranks.device)
    return SliceEngine(model, mesh=mesh, rank=ranks.rank, deadline_s=run.timeout_s)


def _check_saved(model: Any) -> None:
    """Refuse a model whose division checkpoints can't hold: a file has one block of each tensor."""
    odd = [
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        and any(hasattr(how, "split_factor") for how in parameter.placements)
    ]
    if odd:
        raise ModelError(
            f"tp divides {odd[0]} in interleaved rows ({many(len(odd), 'parameter is', 'parameters are')} so), which "
            'checkpoints can\'t hold; set plan.tp = 1, and divide the model by plan.pp or run.parallel = "fsdp"'
        )


# The hardware that plans are priced by: given by a name or a file, or measured once on this machine.

MEASURED: Final = "hardware.json"
"""File in a run's folder with the rates that were measured for its plans."""


def hardware_of(
    settings: PlanSettings,
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path,
    note: Callable[[str], object],
    is_kept: bool = True,
) -> Hardware:
    """Return the hardware that plans are priced by: what is named, or what was measured.

    The rates of a known card aren't taken from its table, which is of other kernels than those that run here.

    Cost: `settings.calibrate_s` seconds in a new run, where no hardware is named.
    """
    named = settings.hardware
    if named != "auto":
        return _reported(_named(named), note)
    path = folder / MEASURED
    if path.is_file():
        return _reported(load_hardware(path), note)
    note(
        f"measuring this machine's kernels for {settings.calibrate_s:g} s, for plans; plan.hardware names a file"
    )
    measured = calibrate(shape, device=device, dtype=dtype, budget_s=settings.calibrate_s).hardware
    if is_kept:
        folder.mkdir(parents=True, exist_ok=True)
        save_hardware(measured, path)
    return _reported(measured, note)


def _reported(hardware: Hardware, note: Callable[[str], object]) -> Hardware:
    """Report how well measured rates predict, and return the hardware."""
    if hardware.held_out:
        note(hardware.held_out)
    return hardware


def _named(name: str) -> Hardware:
    """Return the hardware of a name or a file."""
    if Path(name).is_file():
        return load_hardware(name)
    if Path(name).suffix == ".json" or "/" in name:
        raise SettingError(
            f"plan.hardware {name}: there is no such file; varlen plan --calibrate --save makes one"
        )
    try:
        return Hardware.named(name)
    except SettingError as error:
        raise SettingError(f"plan.hardware: {error}; or the file of a calibration") from None
