"""Steps of processes among which FSDP2 has divided parameters, beside one process."""

from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.distances import furthest, whole_of
from tests.support.pipelines import alone, batch_of, compare, plan_of, replicas_of, runnable, shard, small
from tests.support.products import wide_products
from tests.support.sliced import tiny
from tests.support.step_plans import plan_of as shared_plan_of
from tests.support.tiny_families import Wide
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import varlen as vl
from varlen.errors import ModelError, SettingError
from varlen.runtime.clock import TrackedBytes
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.main_grads import local
from varlen.runtime.mesh import gradients
from varlen.runtime.mesh.fsdp import Shards
from varlen.runtime.mesh.process_groups import coordinate_of
from varlen.runtime.split import Elsewhere, cut_to_stage, devices_of, divide_layers
from varlen.step_plan import BACKWARD, FORWARD
from varlen.train.lora import add_adapter, stored_width
from varlen.train.model import embedding_names
from varlen.train.optimizers import make_optimizer
from varlen.train.settings import AdapterSettings, OptimizerSettings


def layers_whole_at_once(model: Any, mesh: vl.Mesh, stage: int, gathered: Any) -> list[int]:
    """How many of a stage's sharded layers are whole before a task, after each of its calls, and after it."""
    coordinate = coordinate_of(mesh, stage * mesh.dp * mesh.cp)
    numbers = [n for n, layer in enumerate(model.model.layers) if not isinstance(layer, Elsewhere)]
    layers = [model.model.layers[n] for n in numbers]
    replicas: Any = type("Replicas", (), {"size": coordinate.num_replicas, "device": torch.device("cpu")})()
    before = model.config._attn_implementation
    shards = Shards(model, DecoderParts.of(model), replicas, gathered)
    model.set_attn_implementation(before)
    events: list[Any] = [(event, n) for n in numbers for event in ("gather", "release")]

    def whole() -> int:
        return sum(not isinstance(next(layer.parameters()), DTensor) for layer in layers)

    with shards.step():
        counts = [whole()]
        with shards.task(events, is_last=False):
            for event, number in events:
                getattr(shards, event)(number)
                counts.append(whole())
        counts.append(whole())
    return counts


def run_sharded(
    seed: int,
    rank: int,
    world: int,
    gathered: Any,
    wraps: str,
    *,
    shares: bool = False,
    cp: int = 1,
    tp: int = 1,
) -> dict[str, Any]:
    """Train by a random plan where FSDP2 has divided parameters among replicas, which may share documents.

    With tp, what it divides are the parts of tp ranks.
    """
    sharding: Any = "parameters" if gathered == "unit" else "none"
    mesh = vl.Mesh(dp=2 // cp, cp=cp, tp=tp, pp=world // 2 // tp, sharding=sharding)
    plan = runnable(plan_of(seed, mesh, shares=shares, most_documents=8 if shares else 4))
    wide = Wide if tp > 1 else nullcontext  # as in `run_mesh`
    with wide():
        model = small(seed)
    stage = coordinate_of(mesh, rank).stage
    cut_to_stage(model, mesh, stage)
    every = devices_of(mesh, torch.device("cpu"))
    divide_layers(model, every["tp"] if tp > 1 else None)
    devices = every["replicas"]
    decoder = model.model
    for layer in decoder.layers if wraps != "root" else ():
        if not isinstance(layer, Elsewhere):
            fully_shard(layer, mesh=devices)
    if wraps == "parts":
        for part in (decoder.embed_tokens, decoder.norm, model.lm_head):
            if not isinstance(part, Elsewhere):
                fully_shard(part, mesh=devices)
    if wraps != "layers alone":
        fully_shard(model, mesh=devices)
    with pytest.raises(
        SettingError, match="fully_shard has divided the model among processes, and the engine has no mesh"
    ):
        vl.SliceEngine(model)
    held = sum(local(p).numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
    engine = vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60, gathered=gathered)
    with wide(), closing(engine):
        counts = [plan.forward.counts.tolist(), plan.backward.counts.tolist()]
        found: dict[str, Any] = {"shared": plan.num_merged, "splits": plan.splits_backward, "held": held}
        looks = wraps != "root" and tp == 1
        found["whole"] = layers_whole_at_once(model, mesh, stage, gathered) if looks else None
        return {"counts": counts, **found, **compare(engine, small(seed), plan, seed, evened=tp > 1)}


def run_half(rank: int, world: int) -> dict[str, Any]:
    """Gradients of weights that are computed with in bfloat16, sharded and sent in it."""
    mesh = vl.Mesh(dp=2, pp=world // 2, sharding="parameters")
    plan = runnable(plan_of(3, mesh))
    whole, model = (tiny("llama", torch.float32, num_hidden_layers=4) for _ in range(2))
    cut_to_stage(model, mesh, rank // 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mesh, mp_policy=policy)
    batch = batch_of(plan, 3)
    _, wanted = alone(whole, batch)
    with closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60)) as engine:
        engine.step(batch, plan)
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"half": furthest(found, wanted), "dtypes": sorted({str(x.dtype) for x in found.values()})}


def run_hybrid(rank: int, world: int) -> dict[str, Any]:
    """Train where groups of two hold all parameters each, as hybrid sharding does, by a plan of four replicas."""
    mesh = vl.Mesh(dp=world, sharding="parameters")
    plan = runnable(plan_of(6, mesh))
    model = small(1)
    devices = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "parts"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=devices)
    fully_shard(model, mesh=devices)
    with closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60)) as engine:
        found = compare(engine, small(1), plan, 6)
    parameters = list(model.parameters())
    return {
        "held": sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters),
        **found,
    }


def run_frozen(rank: int, world: int) -> dict[str, Any]:
    """Train where FSDP2 has divided frozen parameters too: the embedding, a layer and a part of every other one."""
    mesh = vl.Mesh(dp=2, pp=world // 2, sharding="parameters")
    plan = runnable(plan_of(4, mesh))
    whole, model = small(0), small(0)
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    for each in (whole, model):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(not any(part in name for part in ("embed", "layers.1.", "q_proj")))
    cut_to_stage(model, mesh, rank // 2)
    shard(model, mesh)
    backends = [x._get_backend(torch.device("cpu")) for x in replicas_of(mesh).get_all_groups()]
    timeouts = [each.options._timeout for each in backends]
    with closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=30)) as engine:
        found = compare(engine, whole, plan, 4, steps=3)
    assert [each.options._timeout for each in backends] == timeouts  # the user's groups are as they were
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    kept = all(torch.equal(whole_of({name: p})[name], before[name]) for name, p in frozen)
    return {"frozen": len(frozen), "kept": kept and all(p.grad is None for _, p in frozen), **found}


def tied_apart(rank: int, world: int) -> str:
    """What is said where the embedding is divided apart from the head that has its weight."""
    mesh = vl.Mesh(dp=world, sharding="parameters")
    plan, model = runnable(plan_of(4, mesh)), small(1)
    devices = replicas_of(mesh)
    fully_shard(model.model.embed_tokens, mesh=devices)
    fully_shard(model, mesh=devices)
    with (
        closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60)) as engine,
        pytest.raises(ModelError) as refused,
    ):
        engine.step(batch_of(plan), plan)
    return str(refused.value)


SIZES_OF_MEMORY = {
    **{"hidden_size": 128, "head_dim": 16, "intermediate_size": 448, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 2},
}


def shared_by_all(length: int, slices: int, mesh: vl.Mesh, recompute: Any) -> vl.StepPlan:
    """A plan of one document, in slices, that all data-parallel ranks share, after a short one on each rank.

    The short ones leave gradients, which are states of the slices that come next.
    """
    edges = np.linspace(0, length, slices + 1).astype(int).tolist()
    cuts = [[(mesh.dp, *ends)] for ends in pairwise(edges)]
    passes = ([[[(rank, 0, 8)], *packs] for rank in range(mesh.dp)] for packs in (cuts, cuts[::-1]))
    tasks = [[FORWARD, BACKWARD] + [FORWARD] * slices + [BACKWARD] * slices] * mesh.dp * mesh.pp
    return replace(shared_plan_of(*passes, tasks, mesh), recompute=recompute)


def run_memory(
    rank: int,
    world: int,
    sharding: Any,
    gathered: Any,
    pp: int,
    recompute: Any,
    vocab: int,
    slices: int = 0,
    precision: Any = "bf16",
    adapter_rank: int = 0,
    optimizer: Any = "adamw",
) -> dict[str, Any]:
    """The most bytes alive on each rank, parameters and an optimizer's states among them, and what is predicted.

    With slices, ranks share one document, of so many; without, each has whole ones. With an adapter's rank, all
    weights of the model are frozen.
    """
    mesh, is_sharded = vl.Mesh(dp=world // pp, pp=pp, sharding=sharding), sharding == "parameters"
    is_half = precision == "bf16"
    with pytest.MonkeyPatch.context() as patched, wide_products(), TrackedBytes() as meter:
        # Messages as small as the model: its matrices go by themselves, as those of larger models do, and what gloo
        # copies of the others, in a thread of its own and so at any time, is little.
        patched.setattr(gradients, "ALONE_BYTES", 1 << 16)
        patched.setattr(gradients, "BUCKET_BYTES", 1 << 18)
        dtype = torch.bfloat16 if is_half and not is_sharded else torch.float32
        model = tiny("llama", dtype, vocab_size=vocab, **SIZES_OF_MEMORY)
        states: dict[str, Any] = {"states": "masters" if dtype == torch.bfloat16 else "float32"}
        if adapter_rank:
            add_adapter(model, AdapterSettings(rank=adapter_rank))
            model.to(dtype)
        shape = vl.ModelShape.from_config(model.config)
        if adapter_rank:
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            states["adapter_share"] = trained / (shape.layers * shape.parameters_per_layer)
            states["adapter_width"] = stored_width(model) / shape.layers
        if optimizer == "muon":
            states |= {"optimizer_bytes": 4.0} | ({} if adapter_rank else {"end_optimizer_bytes": 8.0})
        cost = vl.CostModel(
            model=shape,
            hardware=vl.Hardware.named("h100"),
            kernels="eager",
            recompute=recompute,
            precision=precision,
            gathered=gathered,
            **states,
        )
        length = 450
        plan = (
            shared_by_all(length * mesh.dp, slices, mesh, recompute)
            if slices
            else vl.plan_step(
                [length // 2] * 6 * mesh.dp, cost=cost, mesh=mesh, method="packed", capacity=length
            )
        )
        cut_to_stage(model, mesh, rank // mesh.dp)
        if is_sharded:
            shard(
                model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_half else None)
            )
        with closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60, gathered=gathered)) as engine:
            updated = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if not is_sharded:
                updated = dict(zip(updated, engine.master_parameters()))
            settings = OptimizerSettings(name=optimizer)
            updater = make_optimizer(updated, settings, torch.device("cpu"), embedding_names(model))
            for step in range(2):
                stats = engine.step(batch_of(plan, step), plan, meter=meter)
                updater.step(1e-3)
                engine.publish() if not is_sharded else None
                updater.zero_grad()
    said = vl.simulate(plan, cost).peaks_bytes.T.ravel()
    return {"said": said.tolist(), "found": stats.peaks_bytes.tolist()}


MASTERS = {
    2: [("optimizer", torch.float64, 1), ("none", torch.float64, 1), ("optimizer", torch.bfloat16, 1)],
    4: [("optimizer", torch.float64, 2)],
}
"""By the number of processes: sharding, dtype, cp."""


def run_masters(rank: int, world: int, sharding: Any, dtype: torch.dtype, cp: int) -> dict[str, Any]:
    """Train the masters of a stage, divided among its replicas or not, and those of one process beside them."""
    mesh = vl.Mesh(dp=2 // cp, cp=cp, pp=world // 2, sharding=sharding)
    model, whole = (tiny("llama", dtype, num_hidden_layers=4, tie_word_embeddings=True) for _ in range(2))
    with closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60)) as engine:
        engines = (engine, vl.SliceEngine(whole, 8))
        optimizers = [torch.optim.AdamW(one.master_parameters(), lr=1e-2, eps=1e-6) for one in engines]
        norms = 0.0
        for step in range(3):
            plan = runnable(plan_of(step, mesh))
            batch = batch_of(plan, step)
            engine.step(batch, plan)
            engines[1].step(batch)
            norm, wanted = (one.clip_grad_norm_(0.1) for one in engines)
            norms = max(norms, abs(norm - wanted) / wanted)
            for each, optimizer in zip(engines, optimizers):
                optimizer.step()
                each.publish()
                optimizer.zero_grad()
        found, weights = dict(model.named_parameters()), dict(whole.named_parameters())
        weights["lm_head.weight"] = whole.lm_head.weight
        held = sum(local(master).numel() for master in engine.master_parameters())
        share = held / sum(p.numel() for p in found.values())
        far = furthest(found, {name: weights[name] for name in found})
    names = {"sharding": sharding, "dtype": str(dtype).removeprefix("torch.")}
    return {**names, "norms": norms, "weights": far, "share": share}
