"""How processes share a model: a replica each (DDP), or a shard of every parameter each (FSDP2)."""

from __future__ import annotations

import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from varlen.errors import SettingError, VarlenError, WorkerDiedError
from varlen.launch import launched
from varlen.runtime.mesh.failures import Notes, naming_the_missing
from varlen.signals import SCHEDULERS, Stopped
from varlen.train.settings import RunSettings


def distributed(model: Any, settings: RunSettings, ranks: Ranks) -> Any:
    """Move a model to this rank's device, and wrap or shard it as settings say."""
    if settings.parallel == "fsdp" and dist.is_initialized():
        return sharded(
            model, settings, ranks.device, init_device_mesh(ranks.device.type, (ranks.world_size,))
        )
    model.to(ranks.device)
    if ranks.world_size == 1:
        return model
    # Buffers are equal on all ranks and never change, so they aren't synchronized; PyTorch 2.13 renamed the argument.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    still: Any = {("forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"): False}
    return DistributedDataParallel(
        model,
        device_ids=None if ranks.device.type == "cpu" else [ranks.device],
        gradient_as_bucket_view=True,
        **still,
    )


def sharded(model: Any, settings: RunSettings, device: torch.device, mesh: DeviceMesh) -> Any:
    """Shard each layer by itself, and the rest together; weights stay float32 whatever the compute dtype."""
    half = torch.bfloat16 if settings.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, output_dtype=None)
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to(device)


def reshard(model: Any) -> None:
    """Free what a forward pass without a backward pass has gathered: FSDP2 leaves the root's parameters whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def computing(model: Any, settings: RunSettings, ranks: Ranks) -> AbstractContextManager[Any]:
    """Return the context of a forward pass: autocast for bf16, unless FSDP2 casts parameters itself."""
    if settings.precision == "bf16" and not isinstance(model, FSDPModule):
        return torch.autocast(ranks.device.type, dtype=torch.bfloat16)
    return nullcontext()


def accumulating(model: Any, *, is_last: bool) -> AbstractContextManager[Any]:
    """Return the context of a micro-batch's passes: DDP reduces gradients in the last micro-batch only.

    FSDP2 reduces them in every one: unsharded gradients would take the memory that sharding saves.
    """
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def settle(model: Any, passes: Callable[[], torch.Tensor]) -> None:
    """Bring a fresh DDP model to the state of every later step, so that a resumed run equals an uninterrupted one.

    DDP rebuilds its buckets after the first backward pass. With three ranks or more, other buckets add gradients in
    another order, and so the last bit may differ. So that pass is run before the first step.
    """
    if isinstance(model, DistributedDataParallel):
        for _ in range(2):  # buckets are rebuilt at the beginning of the second pass
            passes().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()


# The processes of a run: the rank of this one, what they exchange, and which one is missing after a failure.

_JOINED = itertools.count()
_STOPPED = f"{Stopped.__name__}: "
"""Beginning of the note of a rank that a signal has stopped."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranks:
    """The rank of this process, and how it reaches the others."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Any = None
    """Key-value store in which processes leave notes; None for a single process."""
    group: Any = None
    """Process group of the calls below; None for the default one."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and shows the run."""
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> torch.Tensor:
        """Return the numbers of every rank, float64 `[world_size, numbers]`, in the order of ranks."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return mine[None]
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts)

    def apart(self, timeout_s: float) -> Ranks:
        """Return the same ranks with a process group of their own, for calls of another thread."""
        if not dist.is_initialized():
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    def check_all(self, fault: VarlenError | None) -> None:
        """Raise an error on every rank if one has failed."""
        failed = self.gather([fault is not None])[:, 0].nonzero().flatten().tolist()
        if fault is not None:
            raise fault
        if failed:
            raise VarlenError(f"rank {failed[0]} of {self.world_size} failed; it says why")


def device_of(settings: RunSettings) -> torch.device:
    """Return the device on which this process computes."""
    there = torch.cuda.is_available()
    if settings.device == "cuda" and not there:
        raise SettingError('run.device is "cuda" and PyTorch finds no GPU here; set run.device = "cpu"')
    if settings.device == "cpu" or not there:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def _ending_together(notes: Notes) -> Iterator[None]:
    """End by the signal that ended another rank, if it came before ranks agreed on a step."""
    others = [rank for rank in range(notes.world_size) if rank != notes.rank]
    try:
        yield
    except WorkerDiedError as error:
        for rank in others:
            name = (notes.of(rank) or "").removeprefix(_STOPPED).split(";")[0]
            number = next((number for number in SCHEDULERS if number.name == name), None)
            if number is not None:
                stopped = Stopped(number, f"rank {rank} received it before the first step")
                notes.leave(f"{_STOPPED}{stopped}")
                raise stopped from error
        raise
    except Stopped:
        with suppress(Exception):  # the other ranks notice that the group is gone
            dist.destroy_process_group()
        until = time.monotonic() + notes.grace_s
        # This process may serve the store, which the other ranks have yet to read.
        while notes.rank == 0 and time.monotonic() < until:
            if all((notes.of(rank) or "").startswith(_STOPPED) for rank in others):
                break
            time.sleep(0.02)
        raise


def _world_size() -> int:
    """Return how many processes torchrun started; 1 without torchrun."""
    given = os.environ.get("WORLD_SIZE", "").strip() or "1"
    others = {name: os.environ.get(name, "").strip() for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")}
    if given.isdecimal() and int(given) <= 1:
        return 1
    wrong = [f"{name}={value!r}" for name, value in others.items() if not value]
    wrong += [
        f"{name}={value!r}"
        for name, value in {"WORLD_SIZE": given, **others}.items()
        if name != "MASTER_ADDR" and value and not value.isdecimal()
    ]
    if wrong:
        raise SettingError(
            f"this is one of several processes (WORLD_SIZE={given!r}), and the others can't be found by "
            f"{', '.join(wrong)}; start them by torchrun, or unset WORLD_SIZE where this process trains alone"
        )
    return int(given)


@contextmanager
def joined(settings: RunSettings) -> Iterator[Ranks]:
    """Join the process group of torchrun, or run as a single process."""
    world_size = _world_size()
    launch = launched() if world_size == 1 else None
    if launch is not None:
        raise SettingError(
            f"{launch.words} that torchrun didn't start, and each would train alone on all of the data and write the "
            f"same folder; let each node's task run `torchrun ... -m varlen train`, or unset {launch.source} where "
            "this process trains alone"
        )
    if world_size > 1 and settings.parallel == "none":
        raise SettingError(
            f'run.parallel is "none", and there are {world_size:,} processes; set run.parallel = "ddp" or "fsdp"'
        )
    device = device_of(settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if world_size == 1 and settings.parallel != "fsdp":
        yield Ranks(device=device)
        return
    timeout = timedelta(seconds=settings.timeout_s)
    store: Any = HashStore()
    rank = 0
    if world_size > 1:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(f"varlen {next(_JOINED)}", store)  # a process may call this more than once
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    ranks = Ranks(rank=rank, world_size=world_size, device=device, store=PrefixStore("notes", store))
    try:
        notes = Notes(store=ranks.store, rank=rank, world_size=world_size)
        with (
            _ending_together(notes),
            naming_the_missing(notes, "the same command goes on from the newest checkpoint"),
        ):
            yield ranks
    finally:
        with suppress(Exception):  # the group may be broken
            dist.destroy_process_group()
