"""Gradients between processes: sums over replicas, and over the two ends of a tied weight, and the norm."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from varlen.runtime.chunk import Event, Units
from varlen.runtime.decoder import EMBEDDING, DecoderParts
from varlen.runtime.main_grads import gradient, gradient_of, local, set_gradient, take_gradient, wide
from varlen.runtime.mesh.process_groups import Group
from varlen.runtime.mesh.shared_documents import ProcessPeers

BUCKET_BYTES = 25 << 20  # bytes of gradients in one message: enough for the full rate of a link
# A gradient that ranks divide, of at least so many bytes, is a message by itself, which needs no copy.
ALONE_BYTES = 1 << 18
UNDER_WAY = 2  # sums of rows that go on while the next gradients are computed


def known_to_any(parameters: Mapping[str, torch.Tensor], has: Mapping[str, bool], group: Group) -> list[str]:
    """Return the parameters of which any member has a gradient, in the order given."""
    names = list(parameters)
    flags = torch.tensor([has.get(name, False) for name in names], dtype=torch.uint8, device=group.device)
    if names:
        group.most(flags)
    return [name for name, flag in zip(names, group.on_host(flags).tolist()) if flag]


class Reduction(Units):
    """Sums a stage's gradients over its replicas, from the head to the embedding, while the backward pass goes on.

        last task of a chunk ──► gradients of a unit are whole ──► all of a bucket are ──► its sum begins
        end of the step ──► the rest begins ──► all end

    Each replica gets the whole sums, or of parameters that replicas divide its rows' alone. All replicas begin the
    buckets in one order. A replica without a gradient adds zeros.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        group: Group,
        parts: DecoderParts,
        divided: Set[str] = frozenset(),
    ) -> None:
        self._parameters, self._group, self.divided = parameters, group, divided
        self._peers = ProcessPeers(group)
        self._buckets = deque(self._in_order())
        self._open = {id(parameter) for parameter in parameters.values()}  # with gradients that aren't whole
        self._has: set[int] = set()  # parameters with a gradient on this rank
        self._works: list[Any] = []
        self._sums: deque[tuple[list[str], RowSums]] = deque()
        self.rows: dict[str, torch.Tensor] = {}
        """Once all is summed, this rank's rows of what replicas divide, as `begin_row_sums` gives them."""
        self._is_last = self._is_final = False
        numbers = range(EMBEDDING, parts.head_unit + 1)
        units = [{id(p) for module in parts.unit(n) for p in module.parameters()} for n in numbers]
        uses = Counter(itertools.chain(*units))
        self._own = {n: {p for p in unit if uses[p] == 1} for n, unit in zip(numbers, units)}

    def _in_order(self) -> list[list[str]]:
        """Return buckets of whole sums and of rows by names, in the order in which their last gradients come."""
        names = list(self._parameters)[::-1]
        name_of = {id(parameter): name for name, parameter in self._parameters.items()}
        place = {name: n for n, name in enumerate(names)}
        alone = {name for name in self.divided if _message_bytes(self._parameters[name]) >= ALONE_BYTES}
        found = [[name] for name in names if name in alone]
        for kind in (self._parameters.keys() - self.divided, self.divided - alone):
            alike = [self._parameters[name] for name in names if name in kind]
            found += [[name_of[id(p)] for p in bucket] for bucket in buckets(alike)]
        return sorted(found, key=lambda bucket: place[bucket[-1]])

    @contextmanager
    def task(self, events: Sequence[Event], *, is_last: bool, is_final: bool) -> Iterator[None]:
        """As `Units.task`; the last one begins to sum gradients of the units that it has passed."""
        self._is_last, self._is_final = is_last, is_final
        yield
        for event, unit in events:
            if event == "reduce":
                self.reduce(unit)

    def reduce(self, unit: int) -> None:
        """As `Units.reduce`."""
        if self._is_last:
            self._open -= self._own[unit]
            while self._buckets and self._open.isdisjoint(id(self._parameters[n]) for n in self._buckets[0]):
                self._begin_next()
                # Replicas that wait earlier, with tasks left that other stages wait for, could wait in a circle.
                self._end_rows(UNDER_WAY if self._is_final else len(self._sums))

    def finish(self) -> None:
        """Sum what is left, and wait for all sums; what no replica has a gradient of has none afterwards."""
        if self._group.size == 1:
            return
        while self._buckets:
            self._begin_next()
            self._end_rows(UNDER_WAY)
        self._end_rows(0)
        for work in self._works:
            work.wait()
        has = {name: id(parameter) in self._has for name, parameter in self._parameters.items()}
        known = set(known_to_any(self._parameters, has, self._group))
        for name, parameter in self._parameters.items():
            if name not in known:
                self.rows.pop(name, None)
                set_gradient(parameter, None)

    def rows_of(self, name: str) -> torch.Tensor:
        """Return this rank's rows of a gradient that replicas divide, zeros at first."""
        if name not in self.rows:
            like = self._parameters[name]
            length = row_length(like.shape, self._group.size)
            self.rows[name] = torch.zeros(length, dtype=wide(like.dtype), device=like.device)
        return self.rows[name]

    def _begin_next(self) -> None:
        if self._group.size == 1:
            self._buckets.clear()
            return
        names = self._buckets.popleft()
        bucket = [self._parameters[name] for name in names]
        self._has |= {id(parameter) for parameter in bucket if gradient_of(parameter) is not None}
        if names[0] in self.divided:
            self._sums.append((names, begin_row_sums(bucket, self._peers)))
            return
        held = []
        for parameter in bucket:
            if not local(gradient(parameter)).is_contiguous():
                set_gradient(parameter, gradient(parameter).contiguous())
            held.append(local(gradient(parameter)))
        self._works.append(self._group.begin_sum(held))

    def _end_rows(self, left: int) -> None:
        """Wait for all sums of rows but the newest ones, whose gradients hold memory until then."""
        while len(self._sums) > left:
            names, sums = self._sums.popleft()
            self.rows.update(zip(names, sums()))


def buckets(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield parameters in order, as many of one dtype at a time as have gradients that go into a message."""
    held: list[Any] = []
    size = 0
    for one in parameters:
        num_bytes = _message_bytes(one)
        if held and (one.dtype != held[0].dtype or size + num_bytes > BUCKET_BYTES):
            yield held
            held, size = [], 0
        held.append(one)
        size += num_bytes
    if held:
        yield held


def _message_bytes(parameter: Any) -> int:
    return int(local(parameter).numel() * wide(parameter.dtype).itemsize)


def row_length(shape: torch.Size, ranks: int) -> int:
    """Return the entries of a rank's rows, as `Shard(0)` divides a parameter, with those that the last ranks lack."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


RowSums = Callable[[], Sequence[torch.Tensor]]
"""Waits for sums of which each rank gets its rows, and returns this rank's of each parameter: float32 or wider,
`[row_length]`, with zeros where the last ranks lack some."""


def begin_row_sums(parameters: Sequence[Any], peers: ProcessPeers) -> RowSums:
    """Begin to sum gradients of one dtype over ranks, and remove them; all ranks call it in one order.

    A parameter without a gradient counts as zeros. Of one that tp ranks divide, rows are those of this rank's part.
    """
    lengths = [row_length(local(parameter).shape, peers.size) for parameter in parameters]
    parts = _as_message(parameters[0], peers.size, lengths[0]) if len(parameters) == 1 else None
    if parts is None:
        like = parameters[0]
        parts = torch.zeros(peers.size, sum(lengths), dtype=wide(like.dtype), device=like.device)
        for parameter, into in zip(parameters, torch.split(parts, lengths, 1)):
            if (found := take_gradient(parameter)) is not None:
                for own, rows in zip(into, torch.split(local(found).reshape(-1), into.shape[1])):
                    own[: len(rows)] = rows
            del found  # not alive beside the next one
    end = peers.begin_reduce_scatter(parts)
    return lambda: torch.split(end(), lengths)


def _as_message(parameter: Any, ranks: int, length: int) -> torch.Tensor | None:
    """Remove a gradient that can be sent as it is, and return it, `[ranks, length]`; None if it can't."""
    found = gradient_of(parameter)
    if found is None or found.dtype != wide(found.dtype) or local(found).numel() != ranks * length:
        return None
    set_gradient(parameter, None)
    return local(found).reshape(ranks, length)


def sum_tied(weight: torch.Tensor, rows: torch.Tensor | None, group: Group) -> None:
    """Put the sum of both ends' gradients of a tied weight in place of each.

    Args:
        rows: this rank's rows of the gradient, of which the other end's rank has the same; None where it is whole.
    """
    held = rows if rows is not None else local(gradient(weight))
    total = held.contiguous()
    group.sum(total)
    if total is not held:
        held.copy_(total)


def sum_partial(parameters: Mapping[str, Any], rows: Mapping[str, torch.Tensor], group: Group) -> None:
    """Sum gradients of which each tp rank has a part; all ranks have run the same tasks, so all have one or none.

    Args:
        rows: of gradients that replicas divide, this rank's rows, which are those of the other tp ranks, as FSDP2's
            shards are.
    """
    for name, parameter in parameters.items():
        if name in rows:
            group.sum(rows[name])
        elif (found := gradient_of(parameter)) is not None:
            total = local(found).contiguous()
            group.sum(total)
            local(found).copy_(total)


def scattered(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the sum over shards' processes of their whole gradients, sharded as a parameter is."""
    mesh = like.device_mesh
    partial = DTensor.from_local(whole, mesh, [Partial()] * mesh.ndim, run_check=False)
    return partial.redistribute(placements=like.placements)


def squares(parameters: Mapping[str, torch.Tensor], device: torch.device, holders: int) -> torch.Tensor:
    """Return this process's part of the sum of all gradients' squares, float64 `[1]`; the host doesn't wait.

    Args:
        holders: processes that hold the stage, each of which counts its share of what several hold alike.
    """
    groups: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
    for parameter in parameters.values():
        given, parts = parameter.grad, 1
        if isinstance(given, DTensor):  # of FSDP2, of masters, of tp or of two of them
            sizes = (
                given.device_mesh.size(n) for n, how in enumerate(given.placements) if not how.is_replicate()
            )
            parts = math.prod(sizes)
        if given is not None:
            wide = torch.promote_types(given.dtype, torch.float32)
            groups.setdefault((wide, parts), []).append(local(given))
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for (wide, parts), held in groups.items():
        norms = torch.stack(torch._foreach_norm(held, 2, dtype=wide))
        total += parts / holders * norms.double().square().sum()
    return total


def clip(parameters: Mapping[str, torch.Tensor], norm: float, most: float) -> None:
    """Scale gradients so that their norm over all processes is at most a number; as `torch.nn.utils` does."""
    factor = most / (norm + 1e-6)
    held = [local(p.grad) for p in parameters.values() if p.grad is not None]
    # A norm that is NaN goes on: gradients become NaN too, which is noticed.
    if held and not factor >= 1:
        torch._foreach_mul_(held, factor)
