"""Engines of several GPUs, one process each over NCCL: gradients beside one GPU's, seconds, and what a death does.

On a CPU, to try the script out, processes talk over gloo.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import varlen as vl
from benchmarks.gpu.models import BILLION, fresh_step, llama, llama_sizes, side_by_side
from benchmarks.running.processes import free_port
from varlen.errors import VarlenError
from varlen.runtime.calibrate import calibrate
from varlen.runtime.split import Elsewhere, cut_to_stage

EXACT = llama_sizes(256, 688, 8, 4, layers=4, vocab=512)
"""A small model, of which gradients in float32 are compared."""
LENGTHS = (3000, 700, 64, 411, 1500, 90, 90, 17)
SHARE = (8192, 2048, 2048, 1024, 1024, 512, 512, 512, 256, 256)
"""Documents of a timed step, for each GPU."""
PATIENCE_S = 100.0
DEADLINE_S = 10.0


def meshes(world: int) -> list[vl.Mesh]:
    """Return meshes of all processes: each axis alone, and, of four, pairs of them."""
    alone = [vl.Mesh(**{axis: world}) for axis in ("pp", "dp", "cp", "tp")]
    pairs = (("pp", "dp"), ("pp", "cp"), ("dp", "tp"))
    return alone + [vl.Mesh(**dict.fromkeys(pair, 2)) for pair in pairs if world == 4]


def several(
    device: torch.device, *, sizes: dict[str, int] = BILLION, world: int | None = None
) -> Iterator[Any]:
    """Yield a row for each mesh and job; nothing but a note where there is one GPU."""
    world = world or min(4, torch.cuda.device_count())
    if world < 2:
        yield {"not_run": f"{world} GPU here; these parts need 2 or 4"}
        return
    for mesh in meshes(world):
        yield {"part": "gradients", **_first(_job(exact, world, device.type, mesh))}
    for gathered in ("unit", "step"):
        yield {"part": "FSDP2", **_first(_job(sharded, world, device.type, gathered))}
    yield {"part": "killed", **_first(_job(killed, world, device.type, dies=1))}
    shape = vl.ModelShape.from_config(llama(sizes, torch.device("meta")).config)
    hardware = calibrate(shape, device=device, budget_s=10.0).hardware
    for mesh in meshes(world):
        yield {"part": "seconds", **_first(_job(timed, world, device.type, mesh, sizes, hardware))}


def exact(rank: int, device: torch.device, mesh: vl.Mesh) -> dict[str, Any]:
    """Compare a step of a mesh with the same step on one GPU."""
    whole = llama(EXACT, device, torch.float32)
    model, batch = copy.deepcopy(whole), _batch(LENGTHS)
    cost = vl.CostModel(model=vl.ModelShape.from_config(whole.config), hardware=vl.Hardware.named("h100"))
    plan = vl.plan_step(batch.document_lengths, cost=cost, mesh=mesh)
    alone = fresh_step(whole, vl.SliceEngine(whole, slice_tokens=512), batch)
    model.zero_grad()
    with closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60)) as engine:
        stats = engine.step(batch, plan)
        norm = engine.clip_grad_norm_(1e9)
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    known = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole_ones = {name: grad for name, grad in found.items() if not hasattr(grad, "full_tensor")}
    off = [float((grad - wanted[name]).norm() / wanted[name].norm()) for name, grad in whole_ones.items()]
    return {
        "mesh": _axes(mesh),
        "shared_documents": int((plan.num_ranks * mesh.cp > 1).sum()),
        "loss_off": abs(stats.loss - alone.loss) / alone.loss,
        "norm_off": abs(norm - known) / known,
        "gradients_off": max(off, default=0.0),
        "kernels": stats.kernels,
    }


def sharded(rank: int, device: torch.device, gathered: str) -> dict[str, Any]:
    """Compare a step whose parameters FSDP2 divides with the same step on one GPU."""
    world = dist.get_world_size()
    mesh = vl.Mesh(dp=world, sharding="parameters" if gathered == "unit" else "none")
    whole = llama(EXACT, device, torch.float32)
    model, batch = copy.deepcopy(whole), _batch(LENGTHS)
    model.zero_grad()
    cost = vl.CostModel(model=vl.ModelShape.from_config(whole.config), hardware=vl.Hardware.named("h100"))
    plan = vl.plan_step(batch.document_lengths, cost=cost, mesh=mesh)
    fresh_step(whole, vl.SliceEngine(whole, slice_tokens=512), batch)
    cut_to_stage(model, mesh, 0)
    devices = init_device_mesh(device.type, (world,))
    for layer in [each for each in model.model.layers if not isinstance(each, Elsewhere)]:
        fully_shard(layer, mesh=devices)
    fully_shard(model, mesh=devices)
    with closing(
        vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60, gathered=gathered)  # type: ignore[arg-type]
    ) as engine:
        stats = engine.step(batch, plan)
    off = []
    for name, parameter in model.named_parameters():
        wanted = whole.get_parameter(name).grad
        off.append(float((parameter.grad.full_tensor() - wanted).norm() / wanted.norm()))
    return {"gathered": gathered, "ranks": world, "gradients_off": max(off), "kernels": stats.kernels}


def killed(rank: int, device: torch.device) -> dict[str, Any]:
    """Run a pipeline whose second process ends within a step, and say what the first raises, and when."""
    mesh = vl.Mesh(pp=dist.get_world_size())
    model, batch = llama(EXACT, device, torch.float32), _batch(LENGTHS)
    model.zero_grad()
    cost = vl.CostModel(model=vl.ModelShape.from_config(model.config), hardware=vl.Hardware.named("h100"))
    plan = vl.plan_step(batch.document_lengths, cost=cost, mesh=mesh)
    layers = list(model.model.layers)
    engine = vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=DEADLINE_S)
    if rank == 1:
        for layer in layers:
            layer.mlp.register_forward_hook(lambda *_: os._exit(0))
    begun = time.perf_counter()
    try:
        engine.step(batch, plan)
    except VarlenError as error:
        return {"raised": f"{type(error).__name__}: {error}"[:300], "seconds": time.perf_counter() - begun}
    return {"failed": "the step ended as if nothing had happened"}


def timed(
    rank: int, device: torch.device, mesh: vl.Mesh, sizes: dict[str, int], hardware: vl.Hardware
) -> dict[str, Any]:
    """Time steps of a mesh beside the simulator."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = llama(sizes, device, dtype)
    batch = _batch(SHARE * mesh.num_gpus, sizes["vocab_size"])
    shape = vl.ModelShape.from_config(model.config)
    cost = vl.CostModel(model=shape, hardware=hardware, kernels="eager", recompute="full")
    plan = vl.plan_step(batch.document_lengths, cost=cost, mesh=mesh)
    simulated = vl.simulate(plan, cost.as_planned(plan))
    with closing(vl.SliceEngine(model, mesh=mesh, rank=rank, deadline_s=60)) as engine:
        taken = side_by_side([lambda: fresh_step(model, engine, batch, plan)], device, rounds=3)[0]
    return {
        "mesh": _axes(mesh),
        "tokens": batch.num_tokens,
        "seconds": taken,
        "simulated_s": float(simulated.stops_s.max()),
        "tokens_per_s_and_gpu": batch.num_tokens / taken / mesh.num_gpus,
    }


def _axes(mesh: vl.Mesh) -> str:
    return ", ".join(
        f"{axis}={getattr(mesh, axis)}" for axis in ("pp", "dp", "cp", "tp") if getattr(mesh, axis) > 1
    )


def _batch(lengths: tuple[int, ...], vocabulary: int = EXACT["vocab_size"]) -> vl.PackedBatch:
    random = np.random.default_rng(0)
    documents = [random.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
    return vl.collate(documents, vl.pack(lengths, capacity=max(lengths)))


def _first(rows: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what the first process says, with the largest of each distance on any."""
    if not rows:
        return {"failed": f"no process ended within {PATIENCE_S:.0f} s"}
    failed = next((row for row in rows.values() if "failed" in row), None)
    row = failed or rows[min(rows)]
    return row | {
        name: max(each.get(name, 0.0) for each in rows.values()) for name in row if name.endswith("_off")
    }


def _job(
    run: Callable[..., dict[str, Any]], world: int, kind: str, *words: Any, dies: int | None = None
) -> dict[int, dict[str, Any]]:
    """Return what `run(rank, device, *words)` returns on each process; those that don't return are left out."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        given = pickle.dumps((run, words))
        processes = [
            context.Process(target=_rank, args=(given, rank, world, kind, port, folder))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + PATIENCE_S
        for process in (each for rank, each in enumerate(processes) if rank != dies):
            process.join(max(0.0, end - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
        files = {rank: Path(folder, str(rank)) for rank in range(world)}
        return {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}


def _rank(given: bytes, rank: int, world: int, kind: str, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_S))
    run, words = pickle.loads(given)
    try:
        found = run(rank, device, *words)
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"[:500]}
    part = Path(folder, f"{rank}.part")
    part.write_bytes(pickle.dumps(found))
    part.rename(Path(folder, str(rank)))
    time.sleep(1.0 if rank == 0 else 0.0)  # the first process holds the store
    os._exit(0)
