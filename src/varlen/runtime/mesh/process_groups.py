"""A mesh's processes and their communication groups: all processes, a stage's replicas, and a pair per channel.

Groups are created here under unique names in the job's store, instead of by `dist.new_group`, which names a group by
its ranks, so that a second group of the same ranks reads the first one's addresses; and if NCCL splits communicators,
all ranks must take part in the creation of a group of two.

Each is an NCCL communicator, whose buffers `varlen.cost.memory.num_communicators` counts. So collectives of the same
ranks have one group. A channel has its own: NCCL runs the messages of a communicator in the order in which each end
begins them, and a plan may take those of two chunks in another order than they are made in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from varlen.cost.memory import CHANNEL_CTAS
from varlen.errors import SettingError
from varlen.step_plan import BACKWARD, FORWARD, Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshCoordinate:
    """The place of one process in a mesh.

    The cp ranks of a data-parallel rank share its documents as ranks of a merged group do, so they are replicas too:
    `dp * cp` of them hold a stage, or a part of it each if tp is above 1.
    """

    mesh: Mesh
    rank: int  # global: `((stage * dp + dp_rank) * cp + cp_rank) * tp + tp_rank`

    @property
    def stage(self) -> int:
        """Pipeline stage."""
        return self.rank // (self.num_replicas * self.mesh.tp)

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank, whose documents this process is given."""
        return self.replica // self.mesh.cp

    @property
    def cp_rank(self) -> int:
        """Rank among those that share all documents of the data-parallel rank."""
        return self.replica % self.mesh.cp

    @property
    def tp_rank(self) -> int:
        """Rank among those that share layers."""
        return self.rank % self.mesh.tp

    @property
    def replica(self) -> int:
        """Rank among those that hold the same parameters, `dp_rank * cp + cp_rank`; the number of the pipeline."""
        return self.rank // self.mesh.tp % self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Processes that hold the same parameters, `dp * cp`."""
        return self.mesh.dp * self.mesh.cp

    def at(self, *, stage: int | None = None, replica: int | None = None, tp_rank: int | None = None) -> int:
        """Return the rank of the process that stands elsewhere in what is given, and here in all else."""
        stage = self.stage if stage is None else stage
        replica = self.replica if replica is None else replica
        tp_rank = self.tp_rank if tp_rank is None else tp_rank
        return (stage * self.num_replicas + replica) * self.mesh.tp + tp_rank

    def name_of(self, rank: int) -> str:
        """Describe a rank for messages."""
        other = MeshCoordinate(mesh=self.mesh, rank=rank)
        more = f", cp {other.cp_rank}" if self.mesh.cp > 1 else ""
        more += f", tp {other.tp_rank}" if self.mesh.tp > 1 else ""
        return f"stage {other.stage} of pipeline {other.dp_rank}{more} (rank {rank})"


def coordinate_of(mesh: Mesh, rank: int) -> MeshCoordinate:
    """Return the coordinate of a global rank; raise if the engine can't run this mesh or rank."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < mesh.num_gpus:
        raise SettingError(f"rank={rank!r}; a mesh of {in_axes(mesh)} has the ranks 0 to {mesh.num_gpus - 1}")
    return MeshCoordinate(mesh=mesh, rank=rank)


def in_axes(mesh: Mesh) -> str:
    """Return the axes of a mesh for messages: dp, pp, and the others where they are above 1."""
    more = [f"{name}={getattr(mesh, name)}" for name in ("cp", "tp") if getattr(mesh, name) > 1]
    return " x ".join([f"dp={mesh.dp}", f"pp={mesh.pp}", *more])


class Group:
    """A group of communicating processes; with a single process, every operation does nothing."""

    def __init__(
        self,
        store: Any,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        timeout_s: float,
        settle: Callable[[torch.device], None],
        *,
        is_channel: bool = False,
    ):
        """Join the group; waits until all members have joined."""
        self._settle = settle
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        """Index of this process within the group."""
        self.device = device
        self._backend: Any = None
        if len(self.ranks) > 1:
            self._backend = _backend(PrefixStore(f"{name}/", store), self, timeout_s, is_channel=is_channel)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def backend(self) -> Any:
        """The backend object of torch.distributed; None for a group of one."""
        return self._backend

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum over all members."""
        if self.size > 1:
            self._backend.allreduce([tensor]).wait()

    def begin_sum(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Begin to replace contiguous tensors of one dtype by their sums over all members; returns the work."""
        return self._backend.allreduce_coalesced(list(tensors))

    def most(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the elementwise maximum over all members."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            self._backend.allreduce([tensor], options).wait()

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all members, `[size, ...]`, by index."""
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        if self.size == 1:
            return tensor[None]
        self._backend.allgather([parts], [tensor.contiguous()]).wait()
        return torch.stack(parts)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the result of a collective on the host; a plain copy could wait for other ranks forever."""
        self._settle(self.device)
        return tensor.cpu()

    def send(self, tensor: torch.Tensor, index: int) -> Any:
        """Begin to send; returns the work object. The tensor must not change until the work is done."""
        return self._backend.send([tensor], index, 0)

    def receive(self, tensor: torch.Tensor, index: int) -> Any:
        """Begin to receive into a tensor; returns the work object."""
        return self._backend.recv([tensor], index, 0)

    def abort(self) -> None:
        """End what the device waits for; any thread may call it. Does nothing on the CPU."""
        backend = self._backend
        if backend is not None and self.device.type == "cuda":
            backend.abort()

    def close(self) -> None:
        """Leave the group; on gloo other members notice at once, on NCCL this aborts this process's operations."""
        self.abort()
        self._backend = None


def _backend(store: Any, group: Group, timeout_s: float, *, is_channel: bool) -> Any:
    """Create the backend of a group, without registering the group with torch.distributed."""
    timeout = timedelta(seconds=timeout_s)
    if group.device.type != "cuda":
        return dist.ProcessGroupGloo(store, group.index, group.size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # members time out before NCCL's watchdog, which ends the process
    if is_channel:
        options.config.max_ctas = CHANNEL_CTAS
    return dist.ProcessGroupNCCL(store, group.index, group.size, options)


@dataclass(kw_only=True, slots=True, eq=False)
class Groups:
    """The groups of one process of a mesh."""

    coordinate: MeshCoordinate
    store: Any
    device: torch.device
    timeout_s: float
    settle: Callable[[torch.device], None]
    world: Group  # all processes
    replicas: Group  # those that hold the same parameters
    tensor: Group  # those that divide the layers of this stage and replica
    ends: Group | None  # first and last stage of this pipeline; None elsewhere
    channels: dict[tuple[int, int], Group] = field(default_factory=dict)
    """This stage's channels, by pass and receiving chunk; each group is a pair of stages."""
    shared: dict[tuple[int, int], Group] = field(default_factory=dict)
    """Groups of this stage's ranks that share documents, by first replica and count."""

    def peers(self, first: int, count: int) -> Group:
        """Return the group of neighbouring replicas of this stage; the first call creates it.

        All members must create new groups in the same order, or they deadlock.
        """
        if (first, count) not in self.shared:
            ranks = [self.coordinate.at(replica=replica) for replica in range(first, first + count)]
            known = {group.ranks: group for group in self._all()}
            self.shared[first, count] = known.get(tuple(ranks)) or self._open(
                f"shared {ranks[0]}-{ranks[-1]}", ranks
            )
        return self.shared[first, count]

    def abort(self) -> None:
        """As `Group.abort`, of all groups."""
        for group in self._all():
            group.abort()

    def close(self) -> None:
        """Leave all groups; the waiting operations of other processes fail."""
        for group in self._all():
            group.close()

    def _all(self) -> list[Group]:
        """Return all groups; those of collectives come last."""
        ends = [] if self.ends is None else [self.ends]
        return [*self.channels.values(), self.world, self.replicas, self.tensor, *ends, *self.shared.values()]

    def _open(self, name: str, ranks: Sequence[int]) -> Group:
        return Group(self.store, name, ranks, self.coordinate.rank, self.device, self.timeout_s, self.settle)


def open_groups(
    coordinate: MeshCoordinate,
    store: Any,
    device: torch.device,
    timeout_s: float,
    settle: Callable[[torch.device], None],
) -> Groups:
    """Create the groups of one process; all processes of the mesh call it together.

    All processes create groups in one global order, and send a message through each, so that they don't deadlock:
    NCCL connects two processes at their first message, and first messages in the order of tasks could deadlock.
    """
    mesh, rank = coordinate.mesh, coordinate.rank
    given = (rank, device, timeout_s, settle)
    replicas = [coordinate.at(replica=replica) for replica in range(coordinate.num_replicas)]
    tensor = [coordinate.at(tp_rank=tp_rank) for tp_rank in range(mesh.tp)]
    pipeline = [coordinate.at(stage=stage) for stage in range(mesh.pp)]
    ends = (pipeline[0], pipeline[-1])
    has_ends = mesh.pp > 1 and rank in ends
    opened: dict[tuple[int, ...], Group] = {}

    def of(name: str, ranks: Sequence[int]) -> Group:
        """Return the group of collectives of these ranks."""
        if (key := tuple(ranks)) not in opened:
            opened[key] = Group(store, name, ranks, *given)
        return opened[key]

    groups = Groups(
        coordinate=coordinate,
        store=store,
        device=device,
        timeout_s=timeout_s,
        settle=settle,
        world=of("world", range(mesh.num_gpus)),
        replicas=of(f"replicas {replicas[0]}", replicas),
        tensor=of(f"tensor {tensor[0]}", tensor),
        ends=of(f"ends {ends[0]}", ends) if has_ends else None,
    )
    for chunk in range(1, mesh.num_chunks):
        pair = (pipeline[(chunk - 1) % mesh.pp], pipeline[chunk % mesh.pp])
        if rank in pair:
            for kind, receiver in ((FORWARD, chunk), (BACKWARD, chunk - 1)):
                name = f"channel {kind} {receiver} {pipeline[0]}"
                groups.channels[kind, receiver] = Group(store, name, sorted(pair), *given, is_channel=True)
    first = torch.zeros(1, device=device)
    for group in opened.values():
        group.sum(first)
    for (_, receiver), group in groups.channels.items():
        is_receiver = receiver % mesh.pp == coordinate.stage
        (group.receive if is_receiver else group.send)(first, 1 - group.index).wait()
    return groups
