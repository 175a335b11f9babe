"""Steps of several processes for tests: random plans, the batch of a plan, and what one process makes of it."""

import itertools
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.distances import EXACT, Distances, furthest, whole_of
from tests.support.random_plans import random_plan
from tests.support.sliced import SIZES, tiny, uncut
from tests.support.tiny_families import Wide, family
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import varlen as vl
from varlen.errors import SettingError, VarlenError
from varlen.plan.check import check_contents, check_plan
from varlen.runtime.main_grads import local
from varlen.runtime.mesh.process_groups import coordinate_of, open_groups
from varlen.runtime.split import Elsewhere, cut_to_stage, devices_of, divide_layers
from varlen.runtime.step import check_order, layers_of
from varlen.step_plan import StepPlan

LAYERS = 4
CHUNKED = vl.Mesh(dp=2, pp=2, virtual_stages=2, sharding="parameters")
KEPT: list[BaseException] = []


def plan_of(seed: int, mesh: vl.Mesh, *, shares: bool = False, most_documents: int = 4) -> StepPlan:
    """A plan by dice that a mesh can run, in which some document teaches something; shared ones are long enough."""
    for attempt in range(1000):
        plan = random_plan(seed * 1000 + attempt, most_documents=most_documents, mesh=mesh)
        shared = plan.lengths[plan.num_ranks > 1].max(initial=0)
        if shares:
            if shared > 5:
                return plan
        elif not plan.num_merged and not plan.splits_backward and plan.lengths.max(initial=0) > 1:
            return plan
    raise AssertionError("no plan in 1,000 attempts")


def mesh_of(seed: int, world: int, **settings: Any) -> vl.Mesh:
    """A mesh by dice of as many GPUs as there are processes."""
    random = Random(seed)
    dp = random.choice([n for n in (1, 2) if world % n == 0])
    pp = world // dp
    return vl.Mesh(dp=dp, pp=pp, virtual_stages=random.choice([1, 2]) if pp > 1 else 1, **settings)


def batch_of(plan: StepPlan, seed: int = 0) -> vl.PackedBatch:
    random = np.random.default_rng(seed)
    documents = [random.integers(0, SIZES["vocab_size"], n).astype(np.int32) for n in plan.lengths.tolist()]
    filled = [document for document in documents if len(document)]
    packing = vl.pack([len(x) for x in filled], capacity=max(map(len, filled)), method="next_fit")
    return vl.collate(filled, packing)


def runnable(plan: StepPlan) -> StepPlan:
    """The plan without documents of no tokens."""
    kept = np.flatnonzero(plan.lengths)
    number = np.full(len(plan.lengths), -1, np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    columns = {name: getattr(plan, name)[kept] for name in ("lengths", "first_ranks", "num_ranks")}
    passes = {
        name: replace(packs, document_ids=number[packs.document_ids])
        for name, packs in (("forward", plan.forward), ("backward", plan.backward))
    }
    return replace(plan, **columns, **passes)


def alone(
    model: Any, batch: vl.PackedBatch, attention: str = "sdpa"
) -> tuple[float, dict[str, torch.Tensor]]:
    return uncut(model, tokens_of(batch), batch.document_lengths.tolist(), attention)


def tokens_of(batch: vl.PackedBatch) -> torch.Tensor:
    return torch.as_tensor(batch.input_ids.ravel()[batch.segment_ids.ravel() >= 0]).long()


def rounding_of(whole: Any, batch: vl.PackedBatch, wanted: dict[str, torch.Tensor], tries: int = 8) -> float:
    """The largest difference of the uncut model's gradients from those with weights that are off by a rounding."""
    distances = []
    for seed in range(tries):
        random, other = torch.Generator().manual_seed(seed), deepcopy(whole)
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(1 + 2e-16 * torch.randn(weight.shape, generator=random, dtype=weight.dtype))
        distances.append(furthest({n: g for n, g in alone(other, batch)[1].items() if n in wanted}, wanted))
    return max(distances)


def small(seed: int, layers: int = LAYERS) -> Any:
    """A model of enough layers for most meshes; every other one has the embedding's weight in its head."""
    sizes = {"num_hidden_layers": layers, "hidden_size": 16, "intermediate_size": 24}
    return tiny("llama" if seed % 4 < 2 else "qwen3", head_dim=4, tie_word_embeddings=bool(seed % 2), **sizes)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """AdamW that doesn't divide gradients which are rounding alone by next to nothing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def compare(
    engine: vl.SliceEngine,
    whole: Any,
    plan: StepPlan,
    seed: int,
    steps: int = 2,
    *,
    evened: bool = False,
    attention: str = "sdpa",
) -> dict[str, Any]:
    """Train as one of several processes, and the uncut model beside it, and say how far they are apart.

    Evened, each step begins from equal weights: those of some plans make gradients of roundings.
    """
    model, seen = engine.model, Distances()
    mine, its = optimizer_of(model), optimizer_of(whole)
    for step in range(steps):
        batch = batch_of(plan, seed + step)
        loss, wanted = alone(whole, batch, attention)
        for name, gradient in wanted.items():
            whole.get_parameter(name).grad = gradient.clone()
        evaluated = engine.evaluate(batch, plan, document_losses=True, log_probs=True)
        assert all(parameter.grad is None for parameter in model.parameters())
        stats = engine.step(batch, plan, document_losses=True)
        seen.saw("evaluated", abs(evaluated.loss - loss) / loss)
        assert evaluated.document_losses is not None
        seen.saw("evaluated", np.nanmax(np.abs(evaluated.document_losses - stats.document_losses)) / loss)
        if evaluated.log_probs is not None:
            assert bool(((evaluated.log_probs != 0) == (torch.as_tensor(batch.labels) != -100)).all())
            seen.saw("evaluated", abs(float(evaluated.log_probs.sum()) / -stats.num_targets - loss) / loss)
        found = whole_of({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        if "model.embed_tokens.weight" not in found and "model.embed_tokens.weight" in wanted:
            wanted.setdefault("lm_head.weight", wanted["model.embed_tokens.weight"])
        seen.saw("loss", abs(stats.loss - loss) / loss)
        known = np.maximum(plan.lengths - 1, 0)
        seen.saw("documents", abs(np.nansum(stats.document_losses * known) / known.sum() - loss) / loss)
        distance = furthest(found, wanted)
        seen.saw("gradients" if step == 0 else "later_gradients", distance)
        if distance > EXACT:
            seen.saw("rounding", rounding_of(whole, batch, wanted))
        norm = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
        # A document of the padding token and one more learns nothing: then there is no gradient in either.
        seen.saw("norm", abs(engine.clip_grad_norm_(0.1) - norm) / max(norm, 1e-300))
        for optimizer in (mine, its):
            optimizer.step()
            optimizer.zero_grad()
        known_weights = whole.state_dict()
        seen.saw("weights", furthest(whole_of(model.state_dict()), known_weights))
        if evened:
            load(model, known_weights)
    return {
        **asdict(seen),
        "names": sorted(model.state_dict()),
        "tasks": [len(place.kinds) for place in stats.places],
        "targets": stats.num_targets - int(known.sum()),
    }


def load(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Give a stage, or the part of it that a process holds, the weights of the whole model."""
    with torch.no_grad():
        for name, held in model.state_dict().items():
            its = weights[name]
            if isinstance(held, DTensor):
                how = (held.device_mesh, held.placements)
                sizes, first = compute_local_shape_and_global_offset(its.shape, *how)
                its = its[tuple(slice(begin, begin + size) for begin, size in zip(first, sizes))]
            local(held).copy_(its)


def run_random_plan(seed: int, rank: int, world: int, most_documents: int = 4) -> dict[str, Any]:
    """Train by a random plan as one of several processes, and say how far it is from one process."""
    mesh = mesh_of(seed, world)
    plan = runnable(plan_of(seed, mesh, most_documents=most_documents))
    layers = max(LAYERS, mesh.num_chunks)
    whole = small(seed, layers)
    engine = vl.SliceEngine(small(seed, layers), mesh=mesh, rank=rank, deadline_s=60)
    with closing(engine):
        return {
            "mesh": [mesh.dp, mesh.pp, mesh.virtual_stages],
            "wanted": sorted(whole.state_dict()),
            **compare(engine, whole, plan, seed, evened=True),
        }


def planned(settings: dict[str, Any], lengths: list[int], mesh: vl.Mesh) -> StepPlan:
    cost = vl.CostModel(
        model=vl.ModelShape.from_config(small(0).config),
        hardware=vl.Hardware.named("h100"),
        mode="flops",
        **settings,
    )
    search = vl.Search(merges=False, splits_backward=False, repairs=False, least_rows=4)
    return vl.plan_step(lengths, cost=cost, mesh=mesh, search=search)


def run_plan(path: str, rank: int) -> dict[str, Any]:
    plan = vl.load_plan(path)
    with closing(vl.SliceEngine(small(0), mesh=plan.mesh, rank=rank, deadline_s=60)) as engine:
        return {"counts": plan.forward.counts.tolist(), **compare(engine, small(0), plan, 0)}


def run_mesh(seed: int, mesh: vl.Mesh, rank: int) -> dict[str, Any]:
    """Train by a random plan of a given mesh, which shares documents among data-parallel ranks if it can."""
    plan = runnable(plan_of(seed, mesh, shares=mesh.dp > 1))
    # Sums over tp ranks have other roundings, and norms compute in float32.
    with Wide() if mesh.tp > 1 else nullcontext(), ended(small(seed), mesh, rank) as engine:
        return compare(engine, small(seed), plan, seed, evened=True)


def run_family(name: str, rank: int) -> dict[str, Any]:
    """Train a model of a family that two processes divide."""
    mesh, settings = vl.Mesh(tp=2), {"tie_word_embeddings": True} if name.endswith(" tied") else {}
    settings |= {"num_global_key_value_heads": 2} if name == "gemma4_text" else {}
    whole, model = (family(name.removesuffix(" tied"), **settings) for _ in range(2))
    plan = next(
        plan
        for seed in itertools.count()
        if not (plan := random_plan(seed, mesh=mesh, lengths=[30, 9, 17])).splits_backward
    )
    with Wide(), ended(model, mesh, rank) as engine:
        held = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
        share = held / sum(p.nbytes for p in whole.parameters())
        return {"family": name, "share": share, **compare(engine, whole, plan, 3, attention="by_scores")}


def ended(model: Any, mesh: vl.Mesh, rank: int) -> Any:
    """An engine that is closed at the end."""
    return closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60))


def refusals_of_tp(rank: int, world: int) -> dict[str, str]:
    """What is said of models that tensor parallelism divides in another way, or can't."""
    said = {}

    def tried(name: str, model: Any, **settings: Any) -> None:
        with pytest.raises(VarlenError) as refused:
            vl.SliceEngine(model, **settings)
        said[name] = f"{type(refused.value).__name__}: {refused.value}"

    mesh = vl.Mesh(tp=world)
    here = {"mesh": mesh, "rank": rank, "deadline_s": 60}
    devices = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    theirs = small(0)
    apply_tensor_parallelism(theirs, devices, theirs._expand_parallel_plan(dict(theirs.tp_plan)))
    tried("theirs", theirs, **here)
    tried("theirs, other mesh", theirs, **{**here, "mesh": vl.Mesh(dp=world)})
    tried("alone", theirs)
    ours, plan = small(0), runnable(plan_of(0, mesh))
    with ended(ours, mesh, rank) as engine:
        with pytest.raises(VarlenError) as refused:
            engine.step(batch_of(plan), replace(plan, mesh=vl.Mesh(cp=world)))
        said["plan"] = str(refused.value)
    tried("ours, other mesh", ours, **{**here, "mesh": vl.Mesh(dp=world)})
    with ended(ours, mesh, rank):  # once more, of the same model
        pass
    tried("heads", tiny("llama", num_key_value_heads=1), **here)
    tried("heads of some layers", family("gemma4_text"), **here)
    tried("chunks", family("llama4_text"), **{**here, "mesh": vl.Mesh(cp=world)})
    sharded = small(0)
    fully_shard(sharded, mesh=devices)
    tried("fully_shard", sharded, **here)
    odd, every = small(0), devices_of(mesh, torch.device("cpu"))
    divide_layers(odd, every["tp"])
    fully_shard(odd, mesh=every["replicas"], shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with ended(odd, mesh, rank) as engine:
        with pytest.raises(VarlenError) as refused:
            engine.step(batch_of(plan), plan)
        said["columns"] = f"{type(refused.value).__name__}: {refused.value}"
    tried("both, other mesh", odd, **{**here, "mesh": vl.Mesh(dp=world)})
    adapted = small(0)
    adapted.model.layers[1].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    tried("adapter", adapted, **here)
    return said


def run_replicas(rank: int, world: int) -> dict[str, Any]:
    """Train replicas that DDP holds; its own sums would add gradients twice."""
    mesh = vl.Mesh(dp=world)
    plan = runnable(plan_of(5, mesh))
    held = DistributedDataParallel(small(1))
    with pytest.raises(
        SettingError, match=f"holds the model in {world} processes, and the engine has no mesh"
    ):
        vl.SliceEngine(held)
    with closing(vl.SliceEngine(held, mesh=mesh, rank=rank, deadline_s=60)) as engine:
        return compare(engine, small(1), plan, 5)


def run_in_parts(rank: int, world: int) -> dict[str, Any]:
    """A step in two batches, whose gradients add up, on a model that is on "meta" but for its own stage."""
    mesh = vl.Mesh(dp=2, pp=world // 2)
    plans = [runnable(plan_of(seed, mesh)) for seed in (1, 2)]
    batches = [batch_of(plan, seed) for seed, plan in enumerate(plans)]
    targets = sum(batch.num_targets for batch in batches)
    tokens = torch.cat([tokens_of(batch) for batch in batches])
    lengths = [n for plan in plans for n in plan.lengths.tolist()]
    _, wanted = uncut(small(1), tokens, lengths)
    wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    model = small(1)
    elsewhere = [
        layers for stage, layers in enumerate(layers_of(model, mesh)) if stage % mesh.pp != rank // 2
    ]
    for layer in itertools.chain(*elsewhere):
        model.model.layers[layer].to("meta")
    with closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60)) as engine:
        for batch, plan in zip(batches, plans):
            engine.step(replace(batch, step_num_targets=targets), plan)
    found = {name: p.grad for name, p in model.named_parameters()}
    return {"gradients": furthest(found, wanted)}


def run_evaluating(rank: int, world: int) -> dict[str, Any]:
    """A step of a model that would draw random numbers, in eval mode."""
    mesh = vl.Mesh(pp=world)
    plan = runnable(plan_of(6, mesh))
    whole, model = (tiny("llama", num_hidden_layers=LAYERS, attention_dropout=0.5).eval() for _ in range(2))
    with closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60)) as engine:
        found = compare(engine, whole, plan, 6, evened=True)
    return {"training": model.training, **found}


def run_neighbours(rank: int, world: int) -> dict[str, Any]:
    """Groups of neighbouring ranks of a stage, which are made when they are first wanted."""
    coordinate = coordinate_of(vl.Mesh(dp=4, pp=world // 4), rank)
    groups = open_groups(
        coordinate, PrefixStore("neighbours", _get_default_store()), torch.device("cpu"), 60, lambda _: None
    )
    found = [groups.peers(first, count).gathered(torch.tensor(rank)).tolist() for first, count in ((0, 4),)]
    first = coordinate.dp_rank // 2 * 2
    found.append(groups.peers(first, 2).gathered(torch.tensor(rank)).tolist())
    assert groups.peers(first, 2) is groups.peers(first, 2)
    groups.close()
    return {"ranks": found}


def waits_in_a_circle() -> StepPlan:
    """A plan each of whose pipelines could run by itself, and whose ranks gather parameters in different orders."""
    plan = planned({"recompute": "full"}, [60, 3, 17, 9, 30, 8, 2, 44] * 2, CHUNKED)
    random = Random(0)
    for _ in range(2000):
        tasks = plan.tasks.copy()
        for stage in range(CHUNKED.pp):  # of the second pipeline
            own = tasks[slice(*plan.task_offsets[CHUNKED.pp + stage :][:2].tolist())]
            at = random.randrange(len(own) - 1)
            own[at], own[at + 1] = own[at + 1], own[at]
        other = replace(plan, tasks=tasks)
        with suppress(VarlenError):
            check_contents(other)
            for rank in range(CHUNKED.dp):
                check_order(other, rank)
            try:
                check_plan(other)
            except VarlenError:
                return other
    raise AssertionError("no plan in 2,000 attempts")


def refusals(rank: int, world: int) -> dict[str, str]:
    """What every rank says where ranks mean different things."""
    mesh = vl.Mesh(dp=2, pp=world // 2)
    plan = runnable(plan_of(0, mesh, most_documents=8))
    batch, said = batch_of(plan), {}
    is_odd = rank == 2

    def tried(name: str, step: Callable[[vl.SliceEngine], Any], model: Any = None, **settings: Any) -> None:
        settings = {"model": model or small(0), "mesh": mesh, "rank": rank, **settings}
        try:
            with closing(vl.SliceEngine(**settings)) as engine:
                step(engine)
        except VarlenError as error:
            said[name] = f"{type(error).__name__}: {error}"

    other = replace(plan, method="sliced") if is_odd else plan
    tried("plan", lambda engine: engine.step(batch, other))
    tried("batch", lambda engine: engine.step(batch_of(plan, 9) if is_odd else batch, plan))
    own = plan.lengths[plan.documents_of(rank % mesh.dp)]
    share = replace(batch_of(replace(plan, lengths=own)), plan=plan, step_num_targets=99 + is_odd)
    tried("step_num_targets", lambda engine: engine.step(share, plan))
    tried("kind of batch", lambda engine: engine.step(batch if is_odd else share, plan))
    short = runnable(plan_of(1, mesh))
    tried("one rank", lambda engine: engine.step(batch, short if is_odd else plan))
    tried("no plan", lambda engine: engine.step(batch))
    tried("mesh", lambda engine: engine.step(batch, plan), mesh=vl.Mesh(pp=world))
    tried("no cp", lambda engine: engine.step(batch, plan), mesh=vl.Mesh(pp=2, cp=world // 2))
    tried("world", lambda engine: None, mesh=vl.Mesh(dp=world, pp=2))
    tried("circle", lambda engine: engine.step(batch_of(circle := waits_in_a_circle()), circle), mesh=CHUNKED)
    tried("closed", lambda engine: (engine.close(), engine.step(batch, plan)))
    tasks = plan.tasks.copy()
    for place in range(0, mesh.num_gpus, mesh.pp):  # the first stages, which then take before they give
        own = slice(*plan.task_offsets[place : place + 2].tolist())
        tasks[own] = plan.tasks[own][::-1]
    tried("order", lambda engine: engine.step(batch, replace(plan, tasks=tasks)))
    tried("counts", lambda engine: engine.step(batch, replace(plan, tasks=plan.tasks[::-1].copy())))
    tried("settings", lambda engine: engine.step(batch, plan, document_losses=is_odd))
    tried("no batch", lambda engine: engine.step({} if is_odd else batch, plan))  # type: ignore[arg-type]
    hooked = small(0)
    if is_odd:
        hooked.model.embed_tokens.weight.register_hook(lambda _: None)
    tried("hook", lambda engine: None, hooked)
    tried("model", lambda engine: None, tiny("llama", num_hidden_layers=6 if is_odd else LAYERS))
    return said


def replicas_of(mesh: vl.Mesh) -> DeviceMesh:
    """The processes that hold the same stage as this one."""
    shape = (mesh.pp, mesh.dp * mesh.cp)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "replicas"))["replicas"]


def shard(model: Any, mesh: vl.Mesh, **settings: Any) -> None:
    """Divide the layers of a stage, and what else it holds, among its replicas."""
    devices = replicas_of(mesh)
    for layer in model.model.layers:
        if not isinstance(layer, Elsewhere):
            fully_shard(layer, mesh=devices, **settings)
    fully_shard(model, mesh=devices, **settings)


def struck(rank: int, world: int, how: str, strikes: Callable[[], Any]) -> dict[str, Any]:
    """Run a step in which something happens to the second rank in its third task; what the others say, and when."""
    is_sharded, is_shared = "sharded" in how, "shared" in how
    mesh = vl.Mesh(pp=world)
    if is_sharded or is_shared:
        mesh = vl.Mesh(dp=2, pp=world // 2, sharding="parameters" if is_sharded else "none")
    plan = runnable(plan_of(0, mesh, shares=is_shared, most_documents=8))
    model = small(0, 8)
    cut_to_stage(model, mesh, rank // mesh.dp)
    own = [layer for layer in model.model.layers if not isinstance(layer, Elsewhere)]
    if is_sharded:
        shard(model, mesh)
    # All ranks load and compile what a step needs, which the deadline below doesn't allow for.
    first = vl.SliceEngine(model, mesh=mesh, rank=rank)
    first.step(batch_of(plan), plan)
    first.close()
    engine = vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=8 if "stuck" in how else 300)
    if rank == 1:
        calls = itertools.count()
        own[0].mlp.register_forward_pre_hook(lambda *_: strikes() if next(calls) == 2 else None)
    begun = time.monotonic()
    try:
        engine.step(batch_of(plan), plan)
    except Exception as error:
        KEPT.append(error)  # as a debugger would, and with it all that its frames know
        said = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
        return {"said": said, "seconds": time.monotonic() - begun, "how": how}
    return {"said": "nothing", "seconds": time.monotonic() - begun, "how": how}


LIBRARIES = (
    "torch,torch.distributed.fsdp,transformers.models.llama.modeling_llama,"
    "transformers.models.qwen3.modeling_qwen3,varlen.runtime.engine,varlen.simulate.api,"
    "varlen.feed.loader,varlen.plan.api,numba,pytest"
)
"""The same for all jobs of the engine, so that one process imports them for all."""


JOB = Path(__file__).parents[1] / "distributed" / "pipeline_job.py"


DISTANCES = ("loss", "documents", "evaluated", "gradients", "later_gradients", "norm", "weights")
