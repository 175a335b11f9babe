"""`Masters`: float32 copies of a model's parameters, which an optimizer updates.

    step ──► main_grad, whole ──► sum over replicas ──► master.grad ──► optimizer ──► master ──► publish ──► parameter
                                  (its rows alone)      float32                       float32    (gathered)  half

With sharding="optimizer", each data-parallel rank holds a part of every parameter's rows, and so of the optimizer's
states (ZeRO-1; Rajbhandari et al. 2019, arXiv 1910.02054). Such masters are DTensors, as FSDP2's parameters are, so
PyTorch clips and saves them. A parameter that is in float32 and not divided is its own master.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from varlen.counts import many
from varlen.errors import SettingError
from varlen.runtime.main_grads import gradient_of, is_narrow, local, set_gradient, wide
from varlen.runtime.mesh.gradients import buckets, row_length
from varlen.runtime.mesh.process_groups import Group
from varlen.runtime.mesh.shared_documents import ProcessPeers


@dataclass(frozen=True, slots=True)
class _Pair:
    """A parameter and its master."""

    name: str
    parameter: Any
    master: Any
    length: int = 0
    """Entries of a rank's rows, with those that the last ranks lack; 0 where ranks don't divide the parameter."""


class Masters:
    """The masters of a model's parameters, or of a stage's."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        replicas: Group | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Copy weights, by default the model's; with several replicas and their mesh, only this rank's rows."""
        self._replicas, self._mesh = replicas, mesh
        self._pairs = [self._pair(name, p, weights.get(name, p).detach()) for name, p in parameters.items()]
        self._published = self._versions()

    def _pair(self, name: str, parameter: Any, weight: torch.Tensor) -> _Pair:
        if weight.shape != parameter.shape:
            raise SettingError(
                f"the weight for the master of {name} has the shape {tuple(weight.shape)}, and the parameter "
                f"{tuple(parameter.shape)}; give whole weights by the model's names"
            )
        mesh, dtype = self._mesh, wide(parameter.dtype)
        if mesh is None or isinstance(parameter, DTensor) or parameter.ndim == 0:
            if not is_narrow(parameter):
                return _Pair(name, parameter, parameter)
            if isinstance(parameter, DTensor) and not isinstance(weight, DTensor):
                mesh, how = parameter.device_mesh, parameter.placements
                weight = distribute_tensor(weight.to(parameter.device), mesh, how, src_data_rank=None)
            return _Pair(name, parameter, nn.Parameter(weight.to(parameter.device, dtype, copy=True)))
        rows = -(-len(weight) // mesh.size())  # as `Shard` divides them
        first = mesh.get_local_rank() * rows
        own = weight[first : first + rows].to(parameter.device, dtype, copy=True)
        return _Pair(
            name, parameter, nn.Parameter(_of_rows(own, weight, mesh)), row_length(weight.shape, mesh.size())
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The masters, in the order of the model's parameters; a rank may have no rows of a small one."""
        return [pair.master for pair in self._pairs]

    @property
    def by_name(self) -> dict[str, nn.Parameter]:
        """The masters by the names of their parameters."""
        return {pair.name: pair.master for pair in self._pairs}

    @property
    def divided(self) -> set[str]:
        """The names of the parameters whose masters ranks divide."""
        return {pair.name for pair in self._pairs if pair.length}

    def check(self, *, for_gradients: bool = True) -> None:
        """Refuse a step with weights that an optimizer has left behind, or with gradients that it would lose.

        Args:
            for_gradients: whether the step computes gradients.
        """
        changed = sum(one != other for one, other in zip(self._versions(), self._published))
        if changed:
            raise SettingError(
                f"{many(changed, 'master parameter has', 'master parameters have')} changed since engine.publish was "
                "called, and the model would run with older weights; call engine.publish() after optimizer.step()"
            )
        apart = [pair for pair in self._pairs if pair.master is not pair.parameter]
        lost = [pair.name for pair in apart if pair.parameter.grad is not None]
        if lost and for_gradients:
            raise SettingError(
                f"{lost[0]} has a gradient ({len(lost):,} of {len(apart):,} parameters do), and the optimizer takes "
                "those of engine.master_parameters(); call model.zero_grad()"
            )

    def collect(self, rows: Mapping[str, torch.Tensor] | None = None) -> None:
        """Move the step's gradients to the masters.

        Args:
            rows: of masters that replicas divide, this rank's rows of gradients, by name, `[row_length]`.
        """
        for pair in self._pairs:
            if pair.length:
                if (own := (rows or {}).get(pair.name)) is not None:
                    held = local(pair.master)
                    mine = own[: held.numel()].view_as(held).clone()
                    self._give(pair, _of_rows(mine, pair.parameter, self._mesh))
            elif pair.master is not pair.parameter:
                self._give(pair, gradient_of(pair.parameter))

    def publish(self) -> None:
        """Write the masters into the model; with replicas, all ranks call it at once."""
        with torch.no_grad():
            for pair in self._pairs:
                if pair.master is not pair.parameter and not pair.length:
                    local(pair.parameter).copy_(local(pair.master))
            for bucket in _buckets([pair for pair in self._pairs if pair.length]):
                assert self._replicas is not None
                mine = [local(pair.master).to(pair.parameter.dtype) for pair in bucket]
                flat = torch.cat([_padded(one, pair.length) for one, pair in zip(mine, bucket)])
                every = ProcessPeers(self._replicas).all_gather(flat)
                for pair, parts in zip(bucket, torch.split(every, [pair.length for pair in bucket], 1)):
                    whole = parts.reshape(-1, *pair.parameter.shape[1:])
                    pair.parameter.copy_(whole[: len(pair.parameter)])
        self._published = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        """Return how often masters were changed: of a DTensor, by its operations and by those on its local tensor."""
        masters = [pair.master for pair in self._pairs if pair.master is not pair.parameter]
        return [(master._version, local(master.detach())._version) for master in masters]

    def _give(self, pair: _Pair, found: torch.Tensor | None) -> None:
        if found is None:
            return
        set_gradient(pair.parameter, None)
        pair.master.grad = found if pair.master.grad is None else pair.master.grad.add_(found)


def _buckets(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Yield pairs in order, as many of one dtype as go into a message."""
    by_parameter = {id(pair.parameter): pair for pair in pairs}
    for bucket in buckets([pair.parameter for pair in pairs]):
        yield [by_parameter[id(parameter)] for parameter in bucket]


def _of_rows(rows: torch.Tensor, whole: torch.Tensor, mesh: Any) -> Any:
    """Return this rank's rows of a tensor as a DTensor."""
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return a tensor in one dimension, with zeros up to a length."""
    return nn.functional.pad(tensor.detach().reshape(-1), (0, length - tensor.numel()))
