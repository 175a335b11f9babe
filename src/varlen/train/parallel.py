"""How processes share a model: a replica each (DDP), or a shard of every parameter each (FSDP2)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from varlen.train.ranks import Ranks
from varlen.train.settings import RunSettings


def shared(model: Any, settings: RunSettings, ranks: Ranks) -> Any:
    """Return the model as this rank trains it, on its device.

    Args:
        model: equal on every rank, on the CPU.
        settings: of the run.
        ranks: of the run.
    """
    if settings.parallel == "fsdp" and dist.is_initialized():
        return sharded(
            model, settings, ranks.device, init_device_mesh(ranks.device.type, (ranks.world_size,))
        )
    model.to(ranks.device)
    if ranks.world_size == 1:
        return model
    # Buffers are equal on every rank and change on none; how to say so changed its name in PyTorch 2.13.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    still: Any = {("forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"): False}
    return DistributedDataParallel(
        model,
        device_ids=None if ranks.device.type == "cpu" else [ranks.device],
        gradient_as_bucket_view=True,
        **still,
    )


def sharded(model: Any, settings: RunSettings, device: torch.device, mesh: DeviceMesh) -> Any:
    """Shard every layer by itself, and the rest together; weights stay float32 whatever is computed in.

    Args:
        model: equal on all processes of the mesh, on the CPU.
        settings: of the run.
        device: of this process.
        mesh: the processes that hold a shard each.
    """
    half = torch.bfloat16 if settings.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, output_dtype=None)
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to(device)


def computing(model: Any, settings: RunSettings, ranks: Ranks) -> AbstractContextManager[Any]:
    """Return what a forward pass runs in: half precision, but where shards bring their own."""
    if settings.precision == "bf16" and not isinstance(model, FSDPModule):
        return torch.autocast(ranks.device.type, dtype=torch.bfloat16)
    return nullcontext()


def accumulating(model: Any, *, is_last: bool) -> AbstractContextManager[Any]:
    """Return what a micro-batch's passes run in: replicas add up their gradients in its last alone.

    Shards add up theirs in every one: whole gradients of all parameters would take the memory that sharding saves.
    """
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def settle(model: Any, passes: Callable[[], torch.Tensor]) -> None:
    """Bring a fresh model to the state that every later step finds, so that a resumed run adds as an undisturbed one.

    DDP lays its gradients out anew after the first backward pass, and with three ranks or more another layout adds
    them in another order, which another last bit shows. So that pass is done before the first step.

    Args:
        model: of `shared`.
        passes: does a forward pass and returns the loss, alike on every rank.
    """
    if isinstance(model, DistributedDataParallel):
        for _ in range(2):  # the layout changes at the beginning of the second
            passes().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
