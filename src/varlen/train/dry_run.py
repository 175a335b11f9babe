"""What a run would do: its data, model, steps, plans and memory, without training anything."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from varlen.batch.packed import PackedBatch
from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.counts import many
from varlen.errors import SettingError, VarlenError
from varlen.feed.loader import PackedLoader
from varlen.plan.one_gpu import one_gpu_plan
from varlen.simulate.api import simulate
from varlen.step_plan import Mesh
from varlen.train.affordable import affordable
from varlen.train.evaluate import Evaluator
from varlen.train.loaders import open_loader, steps_of
from varlen.train.lora import add_adapter, check_adapter
from varlen.train.model import bare_model, model_config
from varlen.train.parallel import Ranks, device_of
from varlen.train.plans import (
    WIDE,
    bytes_in_float32,
    cost_of,
    even_slices,
    mesh_of,
    method_of,
    search_of,
    shape_of,
    with_wide_rows,
    words_of,
)
from varlen.train.samples import Sampler
from varlen.train.settings import TrainSettings
from varlen.train.tokens import run_tokenizer, templates_of
from varlen.train.trackers import check_trackers

_MARGIN = 0.92  # of memory; the rest is the allocator's and the driver's
_STATES = {"adamw": 12.0, "adamw_8bit": 6.0, "muon": 8.0, "adafactor": 4.0}
"""Bytes of the gradient and the optimizer's state of a parameter that is trained."""
_PLANNED_STEPS, _WIDTH, _INDENT = 4, 80, 13


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanForecast:
    """How the first steps would be planned; times and memory are simulated."""

    words: str
    """Mesh, method, recomputation and rates; or the slices of one process, which no cost model prices."""
    steps: int
    """That were planned: the first of the run; 0 without a cost model."""
    step_s: float | None = None
    """Mean time of a step, without the optimizer; None without a cost model."""
    tokens_per_s: float | None = None
    """Of all devices; None without a cost model."""
    chosen: str = ""
    """Recomputation and offloading of the plan that takes most memory."""
    limit_bytes: float | None = None
    """Memory of a device that plans may use; None without a cost model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a run would do."""

    steps: int | None
    """None where the data has to be read to its end to know."""
    processes: int
    documents: int
    """Of the first step, or their pieces."""
    tokens: int
    """Of the first step."""
    targets: int
    """Of the first step."""
    fill: float
    """Tokens of the first step over the slots of its packs."""
    parameters: int
    trained: int
    """Parameters that are trained."""
    sets: int
    """Sets of documents to evaluate."""
    state_bytes: float | None
    """Of weights, gradients and the optimizer, on each device; None where the model's shape isn't known."""
    activation_bytes: float | None
    """The most beside them in the first step."""
    memory_bytes: float
    """That a device has."""
    device: str
    plan: PlanForecast | None = None
    """None without `[plan]`."""

    @property
    def needed_bytes(self) -> float | None:
        """Memory that a device needs."""
        if self.state_bytes is None or self.activation_bytes is None:
            return None
        return self.state_bytes + self.activation_bytes

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {**asdict(self), "needed_bytes": self.needed_bytes}

    def words(self) -> str:
        """Return it as lines of text, of 80 columns."""
        trained = f", {self.trained:,} trained" if self.trained < self.parameters else ""
        steps = "to the end of the data" if self.steps is None else many(self.steps, "step")
        lines = {
            "steps": f"{steps} on {many(self.processes, 'process', 'processes')}",
            "first step": f"{many(self.documents, 'document')}, {self.tokens:,} tokens, {self.targets:,} targets, "
            f"{100 * self.fill:.1f} % full",
            "model": f"{self.parameters:,} parameters{trained}",
        }
        if self.sets:
            lines["evaluation"] = many(self.sets, "set")
        if self.plan is not None:
            lines["plan"] = self.plan.words
            if self.plan.steps:
                lines["predicted"] = self._predicted(self.plan)
        lines["memory"] = self._memory()
        every = [
            textwrap.wrap(words, _WIDTH, initial_indent=f"{name:{_INDENT}}", subsequent_indent=" " * _INDENT)
            for name, words in lines.items()
        ]
        return "\n".join([*(line for each in every for line in each), "nothing was trained"])

    def _predicted(self, plan: PlanForecast) -> str:
        each = (plan.tokens_per_s or 0.0) / self.processes
        return (
            f"{plan.step_s:,.3g} s a step, {plan.tokens_per_s:,.0f} tokens/s, {each:,.0f} of each process, over the "
            f"first {many(plan.steps, 'step')}, {plan.chosen}"
        )

    def _memory(self) -> str:
        if self.needed_bytes is None:
            return "not known: the model's shape isn't one that varlen knows"
        limit = None if self.plan is None else self.plan.limit_bytes
        may = "" if limit is None else f", of which plans may use {limit / 1e9:.1f} GB"
        steps = "the first step" if self.plan is None or not self.plan.steps else "these steps"
        return (
            f"{self.needed_bytes / 1e9:.1f} GB of {self.memory_bytes / 1e9:.1f} GB ({self.device}){may}: "
            f"{(self.state_bytes or 0) / 1e9:.1f} GB for states, {(self.activation_bytes or 0) / 1e9:.1f} GB beside "
            f"them in {steps}"
        )


def forecast(
    settings: TrainSettings, processes: int = 1, note: Callable[[str], object] = lambda _: None
) -> Forecast:
    """Open the data, read the first step, plan the first steps, and count what so many processes would take.

    With `[plan]` and hardware "auto", this machine is measured as the run would measure it, and nothing is written.

    Args:
        settings: of the run.
        processes: that would train.
        note: shows a sentence.

    Raises:
        SettingError: a device has too little memory; says how much is needed, and what would need less.
        PlanError: the same, of plans.
        VarlenError: whatever would stop the run before its first step.
    """
    if settings.track is not None:
        check_trackers(settings.track)
    mesh = _mesh(settings, processes)
    device = device_of(settings.run)
    tokenizer = run_tokenizer(settings.data, settings.model)
    config = model_config(settings.model, tokenizer.vocab_size)
    model = bare_model(config)
    if settings.adapter is not None:
        add_adapter(model, settings.adapter)
    check_adapter(settings, config)
    of_threads = replace(settings.data, worker="thread")  # type: ignore[call-arg] # an option of the loader
    read = replace(settings, data=of_threads)
    shares = 1 if settings.plan is not None else processes  # plans deal documents, not packs
    ranks = Ranks(world_size=processes // mesh.dp * shares)
    with open_loader(read, config, tokenizer, ranks) as loader:
        steps = steps_of(loader, settings)
        plan = None if settings.plan is None else _planned(settings, config, mesh, loader, device, note)
        first = [next(loader, None) for _ in range(loader.micro_batches)]
    batches = [batch for batch in first if batch is not None]
    if not batches:
        raise SettingError("no document to train on; name other data as data.source")
    if settings.eval is not None:
        _check_sets(read, config, tokenizer, ranks)
    if settings.sample is not None:
        Sampler(settings, tokenizer, templates_of(settings.data, tokenizer))
    counted = (
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
    memory = None if plan is None else plan[1]
    if memory is None:
        memory = _memory(settings, config, counted, batches, mesh, device)
    lengths = np.concatenate([np.asarray(batch.document_lengths) for batch in batches])
    slots = sum(len(batch.pack_ids) for batch in batches) * settings.data.capacity
    found = Forecast(
        steps=steps,
        processes=processes,
        documents=len(lengths) * shares,
        tokens=int(lengths.sum()) * shares,
        targets=batches[0].step_num_targets,
        fill=float(lengths.sum() / slots),
        parameters=counted[0],
        trained=counted[1],
        sets=0 if settings.eval is None else len(settings.eval.sets),
        plan=None if plan is None else plan[0],
        **memory,
    )
    _check_fits(found, settings)
    return found


def _planned(
    settings: TrainSettings,
    config: Any,
    mesh: Mesh,
    loader: PackedLoader,
    device: torch.device,
    note: Callable[[str], object],
) -> tuple[PlanForecast, dict[str, Any] | None]:
    """Plan the first steps as the run would; returns what is predicted, and the memory of a device."""
    plan = settings.plan
    assert plan is not None, "such a run is planned"
    if plan.is_even and mesh.num_gpus == 1:
        return PlanForecast(words=even_slices(plan).words, steps=0), None
    cost = cost_of(settings, shape_of(config, mesh, note), mesh, device, note, keeps_rates=False)
    ways: dict[str, Any] = {"cost": cost, "mesh": mesh, "recompute": plan.recompute, "offload": plan.offload}
    lengths = [each for step in range(_PLANNED_STEPS) if (each := loader.lengths(step)) is not None]
    plans = [affordable(each, method=method_of(plan), search=search_of(plan), **ways) for each in lengths]
    if not plans:
        raise SettingError("no document to train on; name other data as data.source")
    timelines = [simulate(each, cost.as_planned(each)) for each in plans]
    seconds = sum(each.makespan_s for each in timelines)
    most = max(timelines, key=lambda each: each.peak_bytes)
    is_wide = settings.run.precision == "fp32"
    needed, limit = (
        bytes_in_float32(each, cost, mesh) if is_wide else each
        for each in (most.peak_bytes, cost.limit_bytes)
    )
    state_bytes = float(cost.memory(mesh).state_bytes.max())
    name = cost.hardware.name or "a file"
    found = PlanForecast(
        words=f"{words_of(plan, mesh)}, rates of {name}",
        steps=len(plans),
        step_s=seconds / len(plans),
        tokens_per_s=float(sum(each.sum() for each in lengths)) / seconds,
        chosen=f'recompute "{most.plan.recompute}", offload "{most.plan.offload}"',
        limit_bytes=limit,
    )
    memory = {"state_bytes": state_bytes, "activation_bytes": max(needed - state_bytes, 0.0)}
    return found, {**memory, "memory_bytes": limit / cost.memory_fraction, "device": name}


def _mesh(settings: TrainSettings, processes: int) -> Mesh:
    """Return how so many processes would be arranged."""
    if settings.plan is not None:
        if settings.data.mode == "streaming":
            raise SettingError(
                '[plan] needs the lengths of coming steps, which streaming reads first; set data.mode = "indexed"'
            )
        return mesh_of(settings.plan, settings.run, processes)
    return Mesh(
        dp=processes, sharding="parameters" if settings.run.parallel == "fsdp" and processes > 1 else "none"
    )


def _check_sets(settings: TrainSettings, config: Any, tokenizer: Any, ranks: Ranks) -> None:
    with ExitStack() as stack:
        Evaluator(settings, config, tokenizer, ranks, None, stack)


def _memory(
    settings: TrainSettings,
    config: Any,
    counted: tuple[int, int],
    batches: list[PackedBatch],
    mesh: Mesh,
    device: torch.device,
) -> dict[str, Any]:
    """Return the bytes of states and the most beside them, and what a device has, as `Forecast` holds them.

    Of whole packs, or of slices of one process.
    """
    parameters, trained = counted
    memory_bytes, name = _device(device)
    found = {"state_bytes": None, "activation_bytes": None, "memory_bytes": memory_bytes, "device": name}
    shards = mesh.dp if mesh.sharding == "parameters" else 1
    state_bytes = (4.0 * parameters + _STATES[settings.optimizer.name] * trained) / shards
    try:
        shape = ModelShape.from_config(config)
    except VarlenError:
        return found
    is_wide = settings.run.precision == "fp32"
    recompute: Any = "full" if settings.run.checkpoint_activations else "none"
    rows = max(len(batch.pack_ids) for batch in batches) * settings.data.capacity
    if settings.plan is not None:
        rows = settings.plan.slice_tokens or 8192
        recompute = "full" if settings.plan.recompute == "auto" else settings.plan.recompute
    lengths = np.concatenate([np.asarray(batch.document_lengths) for batch in batches]).astype(np.int32)
    cost = CostModel(
        model=shape, hardware=Hardware.named("h200"), kernels="eager", states="float32", recompute=recompute
    )
    cost = with_wide_rows(cost, Mesh()) if is_wide else cost
    plan = one_gpu_plan(lengths, rows, recompute=recompute)
    beside = float(simulate(plan, cost).peak_bytes - cost.memory(Mesh()).state_bytes.max())
    return {
        **found,
        "state_bytes": state_bytes,
        "activation_bytes": max(beside, 0.0) * (WIDE if is_wide else 1),
    }


def _device(device: torch.device) -> tuple[float, str]:
    """Return the memory of a device, and its name."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory), torch.cuda.get_device_name(
            device
        )
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "this machine's memory"


def _check_fits(found: Forecast, settings: TrainSettings) -> None:
    needed = found.needed_bytes
    is_planned = found.plan is not None and found.plan.steps  # by plans that fit
    if needed is None or is_planned or needed <= _MARGIN * found.memory_bytes:
        return
    out = []
    if settings.plan is None and not settings.run.checkpoint_activations:
        out.append("run.checkpoint_activations = true")
    if (found.activation_bytes or 0) > (found.state_bytes or 0):
        out.append("a smaller data.micro_batch_size or data.capacity")
    if settings.plan is None:
        out.append("[plan], which runs slices")
    if settings.adapter is None:
        out.append("[adapter], which trains few parameters")
    if found.processes > 1 and settings.run.parallel != "fsdp":
        out.append('run.parallel = "fsdp"')
    way_out = f"{', or '.join(out)} would need less" if out else "use a device with more memory"
    raise SettingError(
        f"a process would need about {needed / 1e9:.1f} GB and has {found.memory_bytes / 1e9:.1f} GB "
        f"({found.device}): {(found.state_bytes or 0) / 1e9:.1f} GB for weights, gradients and the optimizer, and "
        f"{(found.activation_bytes or 0) / 1e9:.1f} GB beside them in the first step; {way_out}"
    )
