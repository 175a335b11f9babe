"""What a run would do: its data, model, steps, plans and memory, without training anything."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from varlen.arguments import MEMORY_FRACTION
from varlen.batch.packed import PackedBatch
from varlen.cost.hardware import Hardware
from varlen.cost.memory import LAYERS_ON_DEVICE
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.counts import as_size, many
from varlen.errors import PlanError, SettingError, VarlenError
from varlen.feed.loader import PackedLoader
from varlen.plan.one_gpu import one_gpu_plan
from varlen.simulate.api import simulate
from varlen.simulate.timeline import Timeline
from varlen.step_plan import Mesh, Offload, Recompute
from varlen.train.affordable import affordable
from varlen.train.evaluate import Evaluator
from varlen.train.loaders import num_documents, open_loader, steps_of
from varlen.train.lora import check_adapter
from varlen.train.model import model_config
from varlen.train.parallel import Ranks, device_of
from varlen.train.plans import (
    cost_of,
    even_slices,
    mesh_of,
    method_of,
    search_of,
    shape_of,
    ways_of,
    words_of,
)
from varlen.train.samples import Sampler
from varlen.train.settings import AdapterSettings, TrainSettings
from varlen.train.states import RunStates, meta_model, states_of
from varlen.train.tokens import run_tokenizer, templates_of
from varlen.train.trackers import check_trackers

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Memory that a device needs, at most in any step, and has."""

    state_bytes: float | None
    """Of weights, gradients and the optimizer; None where the model's shape isn't known."""
    activation_bytes: float | None
    """The most beside them."""
    decided_by: str
    """What takes most beside them: a document of the data, the tokens of a batch, or the planned steps."""
    memory_bytes: float
    limit_bytes: float
    """The part of the memory that a run may use; the rest is the allocator's and the driver's."""
    device: str

    @property
    def needed_bytes(self) -> float | None:
        """Memory that a device needs."""
        if self.state_bytes is None or self.activation_bytes is None:
            return None
        return self.state_bytes + self.activation_bytes

    def words(self) -> str:
        """Return it as text."""
        if self.needed_bytes is None:
            return "not known: the model's shape isn't one that varlen knows"
        states, beside = as_size(self.state_bytes or 0), as_size(self.activation_bytes or 0)
        return (
            f"{as_size(self.needed_bytes)}: {states} for weights, gradients and the optimizer, and {beside} for "
            f"{self.decided_by}; a run may use {as_size(self.limit_bytes)} of {as_size(self.memory_bytes)} "
            f"({self.device})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast(Needs):
    """What a run would do, and the memory that each device needs for it."""

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
    data: int | None
    """Documents of the data; None where that isn't known before they are read."""
    sets: Mapping[str, int | None]
    """The same of each set that is evaluated."""
    plan: PlanForecast | None = None
    """None without `[plan]`."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {**asdict(self), "needed_bytes": self.needed_bytes}

    def words(self) -> str:
        """Return it as lines of text, of 80 columns."""
        trained = f", {self.trained:,} trained" if self.trained < self.parameters else ""
        steps = "to the end of the data" if self.steps is None else many(self.steps, "step")
        lines = {
            "data": _documents_words(self.data),
            "steps": f"{steps} on {many(self.processes, 'process', 'processes')}",
            "first step": f"{many(self.documents, 'document')}, {self.tokens:,} tokens, {self.targets:,} targets, "
            f"{100 * self.fill:.1f} % full",
            "model": f"{self.parameters:,} parameters{trained}",
        }
        if self.sets:
            every_set = (f"{name}: {_documents_words(count)}" for name, count in self.sets.items())
            lines["evaluation"] = "; ".join(every_set)
        if self.plan is not None:
            lines["plan"] = self.plan.words
            if self.plan.steps:
                lines["predicted"] = self._predicted(self.plan)
        lines["memory"] = Needs.words(self)
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


def forecast(
    settings: TrainSettings,
    processes: int = 1,
    note: Callable[[str], object] = lambda _: None,
    *,
    memory_bytes: float | None = None,
) -> Forecast:
    """Open the data, read the first step, plan the first steps, and count what so many processes would take.

    With `[plan]` and hardware "auto", this machine is measured as the run would measure it, and nothing is written.

    Args:
        settings: of the run.
        processes: that would train.
        note: shows a sentence.
        memory_bytes: of a device; None for that of this machine or, of priced plans, of their hardware.

    Raises:
        SettingError: a device has too little memory; says how much is needed, and what would need less.
        PlanError: the same, of plans.
        VarlenError: whatever would stop the run before its first step.
    """
    if settings.track is not None:
        check_trackers(settings.track)
    mesh = _mesh(settings, processes)
    device = _Device(device_of(settings.run), memory_bytes)
    tokenizer = run_tokenizer(settings.data, settings.model)
    config = model_config(settings.model, tokenizer.vocab_size)
    states = states_of(settings, meta_model(settings, config))
    check_adapter(settings, config)
    of_threads = replace(settings.data, worker="thread")  # type: ignore[call-arg] # an option of the loader
    read = replace(settings, data=of_threads)
    shares = 1 if settings.plan is not None else processes  # plans deal documents, not packs
    ranks = Ranks(world_size=processes // mesh.dp * shares)
    with open_loader(read, config, tokenizer, ranks) as loader:
        steps = steps_of(loader, settings)
        plan, needs = _planned(settings, config, states, mesh, loader, device, note)
        first = [next(loader, None) for _ in range(loader.micro_batches)]
        batches = [batch for batch in first if batch is not None]
        if not batches:
            raise SettingError("no document to train on; name other data as data.source")
        loads = _loads(settings, loader, batches) if needs is None else []
        documents = num_documents(loader)
    sets = {} if settings.eval is None else _count_sets(read, config, tokenizer, ranks)
    if settings.sample is not None:
        Sampler(settings, tokenizer, templates_of(settings.data, tokenizer))
    if needs is None:
        needs = _needs(settings, config, states, loads, mesh, device)
    lengths = np.concatenate([np.asarray(batch.document_lengths) for batch in batches])
    slots = sum(len(batch.pack_ids) for batch in batches) * settings.data.capacity
    found = Forecast(
        steps=steps,
        processes=processes,
        documents=len(lengths) * shares,
        tokens=int(lengths.sum()) * shares,
        targets=batches[0].step_num_targets,
        fill=float(lengths.sum() / slots),
        parameters=states.parameters,
        trained=states.trained,
        data=documents,
        sets=sets,
        plan=plan,
        **asdict(needs),
    )

    def count(other: TrainSettings) -> Needs:
        mesh = _mesh(other, processes)
        return _needs(other, config, states_of(other, meta_model(other, config)), loads, mesh, device)

    _check_fits(found, settings, config, count)
    return found


class _Device(NamedTuple):
    """What a run trains on."""

    device: torch.device
    given_bytes: float | None
    """Memory to count with in place of its own."""

    def memory(self) -> tuple[float, str]:
        """Return the memory, and a name."""
        if self.given_bytes is not None:
            return self.given_bytes, "as given"
        if self.device.type == "cuda":
            found = torch.cuda.get_device_properties(self.device)
            return float(found.total_memory), found.name
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "this machine's memory"


def _planned(
    settings: TrainSettings,
    config: Any,
    states: RunStates,
    mesh: Mesh,
    loader: PackedLoader,
    device: _Device,
    note: Callable[[str], object],
) -> tuple[PlanForecast | None, Needs | None]:
    """Plan the first steps as the run would; returns what is predicted, and the memory of a device, if priced."""
    plan = settings.plan
    if plan is None:
        return None, None
    if plan.is_even and mesh.num_gpus == 1:
        return PlanForecast(words=even_slices(plan).words, steps=0), None
    shape = shape_of(config, mesh, note)
    cost = cost_of(
        settings, shape, states, device.device, note, keeps_rates=False, memory_bytes=device.given_bytes
    )
    ways: dict[str, Any] = {"cost": cost, "mesh": mesh, "recompute": plan.recompute, "offload": plan.offload}
    ways |= {"method": method_of(plan), "search": search_of(plan)}
    lengths = [each for step in range(_PLANNED_STEPS) if (each := loader.lengths(step)) is not None]
    plans = [affordable(each, **ways) for each in lengths]
    if not plans:
        raise SettingError("no document to train on; name other data as data.source")
    timelines = [simulate(each, cost.as_planned(each)) for each in plans]
    seconds = sum(each.makespan_s for each in timelines)
    alone = _longest_alone(loader, max(int(each.max()) for each in lengths), ways)
    most = max(timelines if alone is None else [*timelines, alone], key=lambda each: each.peak_bytes)
    state_bytes = float(cost.memory(mesh).state_bytes.max())
    name = cost.hardware.name or "a file"
    found = PlanForecast(
        words=f"{words_of(plan, mesh)}, rates of {name}",
        steps=len(plans),
        step_s=seconds / len(plans),
        tokens_per_s=float(sum(each.sum() for each in lengths)) / seconds,
        chosen=f'recompute "{most.plan.recompute}", offload "{most.plan.offload}"',
    )
    return found, Needs(
        state_bytes=state_bytes,
        activation_bytes=max(most.peak_bytes - state_bytes, 0.0),
        decided_by=f"the longest document, of {int(most.plan.lengths.max()):,} tokens"
        if most is alone
        else "these steps",
        memory_bytes=cost.hardware.memory_bytes,
        limit_bytes=cost.limit_bytes,
        device=name,
    )


def _longest_alone(loader: PackedLoader, planned: int, ways: Mapping[str, Any]) -> Timeline | None:
    """Simulate a step of the longest document alone; None if a planned step has one of so many tokens."""
    tokens, number = _longest_by_slices(loader, loader.settings.capacity)[1]
    if tokens <= planned:
        return None
    try:
        plan = affordable(np.array([tokens], np.int32), **ways)
    except PlanError as error:
        raise PlanError(f"the longest document, {loader.where(number)}, alone in a step: {error}") from None
    return simulate(plan, ways["cost"].as_planned(plan))


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


def _count_sets(
    settings: TrainSettings, config: Any, tokenizer: Any, ranks: Ranks
) -> Mapping[str, int | None]:
    """Open the sets as an evaluation does, and count their documents."""
    with ExitStack() as stack:
        return Evaluator(settings, config, tokenizer, ranks, None, stack).documents()


def _documents_words(count: int | None) -> str:
    return "counted as it is read" if count is None else many(count, "document")


def _longest_by_slices(loader: PackedLoader, slice_tokens: int) -> dict[int, tuple[int, int]]:
    """Return the tokens and the number of the longest document of each number of slices.

    Documents are what a pack holds of them.
    """
    capacity, drops = loader.settings.capacity, loader.settings.overlong == "drop"
    found: dict[int, tuple[int, int]] = {}
    before = 0
    for lengths in loader.all_lengths():
        tokens = np.where(drops & (lengths > capacity), 0, np.minimum(lengths, capacity))
        order = np.argsort(tokens, kind="stable")
        slices = -(-tokens[order] // slice_tokens)
        for last in np.flatnonzero(np.diff(slices, append=-1)).tolist():
            one = (int(tokens[order[last]]), before + int(order[last]))
            count = int(slices[last])
            found[count] = max(found.get(count, one), one)
        before += len(lengths)
    return found


def _loads(
    settings: TrainSettings, loader: PackedLoader, batches: list[PackedBatch]
) -> list[tuple[int, str]]:
    """Return the tokens of documents one of which takes most memory, and words for each.

    More tokens in as many slices take more memory, but slices are shorter where there is one more of them.
    """
    if settings.plan is None:
        tokens = max(len(batch.pack_ids) for batch in batches) * settings.data.capacity
        return [(tokens, f"a batch of {tokens:,} tokens")]
    slice_tokens = ways_of(settings.plan)[0]
    by_slices = _longest_by_slices(loader, slice_tokens)
    most = max(by_slices)
    found = [
        (
            tokens,
            f"{'the longest' if count == most else 'a'} document, of {tokens:,} tokens ({loader.where(number)})",
        )
        for count, (tokens, number) in by_slices.items()
        if count > 1
    ]
    if 1 in by_slices:
        packed = min(slice_tokens, settings.data.capacity)
        found.append((packed, f"short documents of {packed:,} tokens at once"))
    return found


def _needs(
    settings: TrainSettings,
    config: Any,
    states: RunStates,
    loads: list[tuple[int, str]],
    mesh: Mesh,
    device: _Device,
) -> Needs:
    """Return the memory that whole packs, or slices of one process, need on a device.

    Args:
        settings: of the run.
        config: of the model.
        states: of the parameters.
        loads: of `_loads`.
        mesh: of the processes.
        device: of the run.
    """
    plan = settings.plan
    memory_bytes, name = device.memory()
    share = MEMORY_FRACTION if plan is None else plan.memory_fraction
    found = Needs(
        state_bytes=None,
        activation_bytes=None,
        decided_by="",
        memory_bytes=memory_bytes,
        limit_bytes=share * memory_bytes,
        device=name,
    )
    try:
        shape = ModelShape.from_config(config)
    except VarlenError:
        return found
    recompute: Recompute = "full" if settings.run.checkpoint_activations else "none"
    offload: Offload = "none"
    slice_tokens = max(tokens for tokens, _ in loads)
    if plan is not None:
        slice_tokens, recompute, offload = ways_of(plan)
    cost = CostModel(
        model=shape,
        hardware=Hardware.named("h200"),
        kernels="eager",
        precision=settings.run.precision,
        **states.priced(shape),
    )
    beside = {}
    for tokens, words in loads:
        lengths = np.array([tokens], np.int32)
        step = one_gpu_plan(lengths, slice_tokens, recompute=recompute, offload=offload)
        beside[words] = float(simulate(step, cost.as_planned(step)).peak_bytes)
    decided_by = max(beside, key=lambda words: beside[words])
    more = max(beside[decided_by] - float(cost.memory(Mesh()).state_bytes.max()), 0.0)
    return replace(
        found,
        state_bytes=states.bytes_on(mesh),
        activation_bytes=more,
        decided_by=decided_by,
    )


class _Way(NamedTuple):
    """A change of settings that needs less memory."""

    words: str
    changed: Mapping[str, Mapping[str, Any]] | None = None
    """By table, the settings that it changes; None where its need isn't counted."""


def _check_fits(
    found: Forecast, settings: TrainSettings, config: Any, count: Callable[[TrainSettings], Needs]
) -> None:
    """Refuse a run that takes more memory than there is; `count` says what other settings would need."""
    needed = found.needed_bytes
    is_planned = found.plan is not None and found.plan.steps  # by plans that fit
    if needed is None or is_planned or needed <= found.limit_bytes:
        return
    every = _ways_out(found, settings, ModelShape.from_config(config))
    sized = [(way, _needed(way, settings, count)) for way in every]
    less = [(way, size) for way, size in sized if size is None or size < needed]
    listed = [f"{way.words} ({as_size(size)})" if size else way.words for way, size in less]
    way_out = f"{', or '.join(listed)} would need less" if listed else "a device with more memory would do"
    counted = [way for way, size in less if size]
    least = _needed(_together(counted), settings, count) if len(counted) > 1 else None
    if least is not None and math.isfinite(least):
        way_out += f"; those with a size together, {as_size(least)}"
        way_out += ", still too much" * (least > found.limit_bytes)
    raise SettingError(f"a process would need about {Needs.words(found)}, and {way_out}")


def _needed(way: _Way, settings: TrainSettings, count: Callable[[TrainSettings], Needs]) -> float | None:
    """Return the memory that settings need with a change; None if it isn't counted, infinity if it is refused."""
    if way.changed is None:
        return None
    try:
        tables: dict[str, Any] = {
            name: replace(getattr(settings, name) or AdapterSettings(), **values)
            for name, values in way.changed.items()
        }
        return count(replace(settings, **tables)).needed_bytes
    except VarlenError:  # settings that exclude each other
        return math.inf


def _together(ways: list[_Way]) -> _Way:
    """Return all changes as one."""
    tables: dict[str, dict[str, Any]] = {}
    for name, values in (each for way in ways for each in (way.changed or {}).items()):
        tables.setdefault(name, {}).update(values)
    return _Way("", tables)


def _ways_out(found: Forecast, settings: TrainSettings, shape: ModelShape) -> list[_Way]:
    """Return changes that may need less memory."""
    run, plan, out = settings.run, settings.plan, list[_Way]()

    def add(table: str, name: str, value: Any) -> None:
        shown = str(value).lower() if isinstance(value, bool) else f'"{value}"'
        out.append(_Way(f"{table}.{name} = {shown}", {table: {name: value}}))

    is_beside = (found.activation_bytes or 0) > (found.state_bytes or 0)
    if plan is None and not run.checkpoint_activations:
        add("run", "checkpoint_activations", True)
    if run.precision == "fp32":
        add("run", "precision", "bf16")
    if plan is None:
        out += [_Way("a smaller data.micro_batch_size or data.capacity")] * is_beside
        out.append(_Way("[plan], which runs slices"))
    else:
        slice_tokens, recompute, offload = ways_of(plan)
        if recompute != "full":
            add("plan", "recompute", "full")
        if slice_tokens > plan.least_rows and is_beside:
            out.append(_Way("a smaller plan.slice_tokens"))
        if offload == "none" and shape.layers > LAYERS_ON_DEVICE:
            add("plan", "offload", "kv")
    if settings.adapter is None:
        out.append(_Way("[adapter], which trains few parameters", {"adapter": {}}))
        if settings.optimizer.name == "adamw":
            add("optimizer", "name", "adafactor")
    if found.processes > 1 and run.parallel != "fsdp":
        add("run", "parallel", "fsdp")
    return out
