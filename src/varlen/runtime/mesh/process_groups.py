"""The processes of a mesh and the groups in which they talk: all, replicas of a stage, and a pair for every channel.

Groups aren't made by `dist.new_group` but here, under names of their own in the job's store. `dist.new_group` names a
group by its ranks, so a second one of the same ranks finds the first one's addresses; and if NCCL splits
communicators, all ranks must take part in making a group of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from varlen.errors import SettingError
from varlen.step_plan import BACKWARD, FORWARD, Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where one process sits in a mesh of stages and data-parallel ranks."""

    mesh: Mesh
    rank: int  # among all: `stage * dp + dp_rank`

    @property
    def stage(self) -> int:
        """Of the pipeline."""
        return self.rank // self.mesh.dp

    @property
    def dp_rank(self) -> int:
        """Data-parallel: which pipeline."""
        return self.rank % self.mesh.dp

    def at(self, stage: int) -> int:
        """Return the rank of another stage of this pipeline."""
        return stage * self.mesh.dp + self.dp_rank

    def name_of(self, rank: int) -> str:
        """Return what people call a rank."""
        stage, dp_rank = divmod(rank, self.mesh.dp)
        return f"stage {stage} of pipeline {dp_rank} (rank {rank})"


def seat_of(mesh: Mesh, rank: int) -> Seat:
    """Return where a rank sits."""
    if mesh.tp > 1 or mesh.cp > 1:
        raise SettingError(
            f"mesh with tp={mesh.tp} and cp={mesh.cp}; the engine runs whole layers on whole documents, so both must "
            "be 1"
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < mesh.num_gpus:
        raise SettingError(
            f"rank={rank!r}; a mesh of dp={mesh.dp} and pp={mesh.pp} has the ranks 0 to {mesh.num_gpus - 1}"
        )
    return Seat(mesh=mesh, rank=rank)


class Group:
    """Some processes that talk to each other; a group of one has nobody to talk to, and nothing to do."""

    def __init__(
        self,
        store: Any,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        timeout_s: float,
        settle: Callable[[torch.device], None],
    ):
        """Meet the others; waits until all have come."""
        self._settle = settle
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        """Of this process within the group."""
        self.device = device
        self._backend: Any = None
        if len(self.ranks) > 1:
            self._backend = _backend(PrefixStore(f"{name}/", store), self, timeout_s)

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ranks)

    @property
    def backend(self) -> Any:
        """Its connection, as torch.distributed has them; None of a group of one."""
        return self._backend

    def sum(self, tensor: torch.Tensor) -> None:
        """Put the sum of all members' tensors in place of this one."""
        if self.size > 1:
            self._backend.allreduce([tensor]).wait()

    def most(self, tensor: torch.Tensor) -> None:
        """Put the largest of all members' entries in place of this tensor's."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            self._backend.allreduce([tensor], options).wait()

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all members, `[size, ...]`, in their order."""
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        if self.size == 1:
            return tensor[None]
        self._backend.allgather([parts], [tensor.contiguous()]).wait()
        return torch.stack(parts)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return on the host what others had a part in: a plain copy would wait for them without end."""
        self._settle(self.device)
        return tensor.cpu()

    def send(self, tensor: torch.Tensor, index: int) -> Any:
        """Begin to send; returns what says whether it is done, until when the tensor must stay."""
        return self._backend.send([tensor], index, 0)

    def receive(self, tensor: torch.Tensor, index: int) -> Any:
        """Begin to receive into a tensor; returns what says whether it is there."""
        return self._backend.recv([tensor], index, 0)

    def close(self) -> None:
        """Leave the group; on gloo others notice at once, on NCCL what runs here is ended."""
        backend, self._backend = self._backend, None
        if backend is not None and self.device.type == "cuda":
            backend.abort()


def _backend(store: Any, group: Group, timeout_s: float) -> Any:
    """Return the connection of a group: the backend alone, which only this engine knows."""
    timeout = timedelta(seconds=timeout_s)
    if group.device.type != "cuda":
        return dist.ProcessGroupGloo(store, group.index, group.size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # a member gives up before NCCL's own guard, which ends the process
    return dist.ProcessGroupNCCL(store, group.index, group.size, options)


@dataclass(kw_only=True, slots=True, eq=False)
class Groups:
    """The groups of one process of a mesh."""

    seat: Seat
    store: Any
    device: torch.device
    timeout_s: float
    settle: Callable[[torch.device], None]
    world: Group  # all processes
    replicas: Group  # this stage's, one per pipeline
    ends: Group | None  # first and last stage of this pipeline; None elsewhere
    channels: dict[tuple[int, int], Group] = field(default_factory=dict)
    """By pass and the chunk that takes: its two stages, where this is one of them."""
    shared: dict[tuple[int, int], Group] = field(default_factory=dict)
    """By first data-parallel rank and count: neighbours of this stage that share documents."""

    def peers(self, first: int, count: int) -> Group:
        """Return the group of neighbouring data-parallel ranks of this stage; the first call makes it.

        Members ask for new groups in one order, or they wait for each other in a circle.
        """
        if (first, count) not in self.shared:
            base = self.seat.stage * self.seat.mesh.dp
            ranks = range(base + first, base + first + count)
            self.shared[first, count] = self._open(f"shared {ranks[0]}-{ranks[-1]}", ranks)
        return self.shared[first, count]

    def close(self) -> None:
        """Leave all groups; a process that waits here for this one is told."""
        groups = [self.world, self.replicas, *self.channels.values(), *self.shared.values()]
        for group in [*groups, *([self.ends] if self.ends is not None else [])]:
            group.close()

    def _open(self, name: str, ranks: Sequence[int]) -> Group:
        return Group(self.store, name, ranks, self.seat.rank, self.device, self.timeout_s, self.settle)


def open_groups(
    seat: Seat, store: Any, device: torch.device, timeout_s: float, settle: Callable[[torch.device], None]
) -> Groups:
    """Make the groups of one process; all processes of the mesh do so at once.

    Every process makes its groups in one order of all, so that none waits in a circle, and sends through each right
    away: NCCL connects two processes at their first message, and first messages in the order of tasks would.
    """
    mesh, rank = seat.mesh, seat.rank
    given = (rank, device, timeout_s, settle)
    stage = range(seat.stage * mesh.dp, (seat.stage + 1) * mesh.dp)
    ends = (seat.at(0), seat.at(mesh.pp - 1))
    has_ends = mesh.pp > 1 and rank in ends
    groups = Groups(
        seat=seat,
        store=store,
        device=device,
        timeout_s=timeout_s,
        settle=settle,
        world=Group(store, "world", range(mesh.num_gpus), *given),
        replicas=Group(store, f"replicas {seat.stage}", stage, *given),
        ends=Group(store, f"ends {seat.dp_rank}", ends, *given) if has_ends else None,
    )
    for chunk in range(1, mesh.num_chunks):
        pair = (seat.at((chunk - 1) % mesh.pp), seat.at(chunk % mesh.pp))
        if rank in pair:
            for kind, takes in ((FORWARD, chunk), (BACKWARD, chunk - 1)):
                name = f"channel {kind} {takes} {seat.dp_rank}"
                groups.channels[kind, takes] = Group(store, name, sorted(pair), *given)
    first = torch.zeros(1, device=device)
    for group in (groups.replicas, groups.ends, groups.world):
        if group is not None:
            group.sum(first)
    for (_, takes), group in groups.channels.items():
        is_receiver = takes % mesh.pp == seat.stage
        (group.receive if is_receiver else group.send)(first, 1 - group.index).wait()
    return groups
