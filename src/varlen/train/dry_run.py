"""What a run would do: its data, model, steps and memory, without training anything."""

from __future__ import annotations

import os
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
from varlen.plan.one_gpu import one_gpu_plan
from varlen.simulate.api import simulate
from varlen.step_plan import Mesh
from varlen.train.evaluate import Evaluator
from varlen.train.loaders import open_loader, steps_of
from varlen.train.lora import add_adapter, check_adapter
from varlen.train.model import bare_model, model_config
from varlen.train.parallel import Ranks, device_of
from varlen.train.plans import mesh_of, with_wide_rows
from varlen.train.settings import TrainSettings
from varlen.train.tokens import run_tokenizer
from varlen.train.trackers import check_trackers

_MARGIN = 0.92  # of memory; the rest is the allocator's and the driver's
_STATES = {"adamw": 12.0, "adamw_8bit": 6.0, "muon": 8.0, "adafactor": 4.0}
"""Bytes of the gradient and the optimizer's state of a parameter that is trained."""


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
        """Return it as lines of text."""
        trained = f", {self.trained:,} trained" if self.trained < self.parameters else ""
        steps = "to the end of the data" if self.steps is None else many(self.steps, "step")
        lines = [
            f"steps        {steps} on {many(self.processes, 'process', 'processes')}",
            f"first step   {many(self.documents, 'document')}, {self.tokens:,} tokens, {self.targets:,} targets, "
            f"{100 * self.fill:.1f} % full",
            f"model        {self.parameters:,} parameters{trained}",
        ]
        if self.sets:
            lines.append(f"evaluation   {many(self.sets, 'set')}")
        if self.needed_bytes is None:
            lines.append("memory       not known: the model's shape isn't one that varlen knows")
        else:
            lines.append(
                f"memory       {self.needed_bytes / 1e9:.1f} GB of {self.memory_bytes / 1e9:.1f} GB ({self.device}): "
                f"{(self.state_bytes or 0) / 1e9:.1f} GB for states,"
            )
            lines.append(
                f"             {(self.activation_bytes or 0) / 1e9:.1f} GB beside them in the first step"
            )
        return "\n".join([*lines, "nothing was trained"])


def forecast(settings: TrainSettings, processes: int = 1) -> Forecast:
    """Open the data, read the first step, and count what a run of so many processes would take.

    Raises:
        SettingError: a device has too little memory; says how much is needed, and what would need less.
        VarlenError: whatever would stop the run before its first step.
    """
    if settings.track is not None:
        check_trackers(settings.track)
    mesh = _mesh(settings, processes)
    ranks = Ranks(world_size=mesh.dp, device=device_of(settings.run))
    tokenizer = run_tokenizer(settings.data, settings.model)
    config = model_config(settings.model, tokenizer.vocab_size)
    model = bare_model(config)
    if settings.adapter is not None:
        add_adapter(model, settings.adapter)
    of_threads = replace(settings.data, worker="thread")  # type: ignore[call-arg] # an option of the loader
    packs = replace(settings, plan=None, data=of_threads)
    on_host = replace(ranks, device=torch.device("cpu"))
    with open_loader(packs, config, tokenizer, on_host) as loader:
        steps = steps_of(loader, settings)
        first = [next(loader, None) for _ in range(loader.micro_batches)]
    batches = [batch for batch in first if batch is not None]
    if not batches:
        raise SettingError("no document to train on; name other data as data.source")
    if settings.eval is not None:
        _check_sets(packs, config, tokenizer, on_host)
    check_adapter(settings, config)
    counted = (
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
    state_bytes, activation_bytes = _memory(settings, config, counted, batches, mesh)
    lengths = np.concatenate([np.asarray(batch.document_lengths) for batch in batches])
    slots = sum(len(batch.pack_ids) for batch in batches) * settings.data.capacity
    memory_bytes, device = _device(ranks.device)
    found = Forecast(
        steps=steps,
        processes=processes,
        documents=len(lengths) * mesh.dp,
        tokens=int(lengths.sum()) * mesh.dp,
        targets=batches[0].step_num_targets,
        fill=float(lengths.sum() / slots),
        parameters=counted[0],
        trained=counted[1],
        sets=0 if settings.eval is None else len(settings.eval.sets),
        state_bytes=state_bytes,
        activation_bytes=activation_bytes,
        memory_bytes=memory_bytes,
        device=device,
    )
    _check_fits(found, settings)
    return found


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
    settings: TrainSettings, config: Any, counted: tuple[int, int], batches: list[PackedBatch], mesh: Mesh
) -> tuple[float | None, float | None]:
    """Return the bytes of states and the most beside them, of a device."""
    parameters, trained = counted
    shards = mesh.pp * mesh.tp * (mesh.dp * mesh.cp if mesh.sharding == "parameters" else 1)
    state_bytes = (4.0 * parameters + _STATES[settings.optimizer.name] * trained) / shards
    try:
        shape = ModelShape.from_config(config)
    except VarlenError:
        return None, None
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
    # Of one process; stages, tp and cp ranks hold a part each.
    return state_bytes, max(beside, 0.0) * (2 if is_wide else 1) / (mesh.pp * mesh.tp * mesh.cp)


def _device(device: torch.device) -> tuple[float, str]:
    """Return the memory of a device, and its name."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory), torch.cuda.get_device_name(
            device
        )
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "this machine's memory"


def _check_fits(found: Forecast, settings: TrainSettings) -> None:
    needed = found.needed_bytes
    if needed is None or needed <= _MARGIN * found.memory_bytes:
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
