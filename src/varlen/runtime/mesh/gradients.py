"""Gradients between processes: one sum over replicas a step, one over the two ends of a tied weight, and the norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from varlen.runtime.main_grads import gradient, gradient_of, local
from varlen.runtime.mesh.process_groups import Group

BUCKET_BYTES = 25 << 20  # bytes of gradients in one message: enough for the full rate of a link


def known_to_any(parameters: Mapping[str, torch.Tensor], has: Mapping[str, bool], group: Group) -> list[str]:
    """Return the parameters of which any member has a gradient, in the order given."""
    names = list(parameters)
    flags = torch.tensor([has.get(name, False) for name in names], dtype=torch.uint8, device=group.device)
    if names:
        group.most(flags)
    return [name for name, flag in zip(names, group.on_host(flags).tolist()) if flag]


def sum_replicas(parameters: Mapping[str, torch.Tensor], group: Group) -> None:
    """Put the sum over replicas in place of every gradient; a replica without one counts as zeros."""
    if group.size == 1:
        return
    has = {name: gradient_of(p) is not None for name, p in parameters.items()}
    gradients = [gradient(parameters[name]) for name in known_to_any(parameters, has, group)]
    for bucket in buckets(gradients):
        flat = torch.cat([one.reshape(-1) for one in bucket])
        group.sum(flat)
        for one, part in zip(bucket, torch.split(flat, [one.numel() for one in bucket])):
            one.copy_(part.view_as(one))


def buckets(gradients: list[torch.Tensor], most_bytes: int = BUCKET_BYTES) -> Iterator[list[torch.Tensor]]:
    """Yield gradients in order, as many of one dtype at a time as go into a message."""
    held: list[torch.Tensor] = []
    size = 0
    for one in gradients:
        if held and (one.dtype != held[0].dtype or size + one.nbytes > most_bytes):
            yield held
            held, size = [], 0
        held.append(one)
        size += one.nbytes
    if held:
        yield held


def sum_tied(weight: torch.Tensor, group: Group) -> None:
    """Put the sum of both ends' gradients of a tied weight in place of each."""
    if not weight.requires_grad:
        return
    held = local(gradient(weight))
    total = held.contiguous()
    group.sum(total)
    if total is not held:
        held.copy_(total)


def scattered(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the sum over shards' processes of their whole gradients, sharded as a parameter is."""
    mesh = like.device_mesh
    partial = DTensor.from_local(whole, mesh, [Partial()] * mesh.ndim, run_check=False)
    return partial.redistribute(placements=like.placements)


def squares(
    parameters: Mapping[str, torch.Tensor], device: torch.device, *, counts_whole: bool
) -> torch.Tensor:
    """Return this process's part of the sum of all gradients' squares, float64 `[1]`; the host doesn't wait.

    Args:
        counts_whole: whether this process counts unsharded gradients, which all replicas hold alike.
    """
    groups: dict[tuple[torch.dtype, float], list[torch.Tensor]] = {}
    for parameter in parameters.values():
        given, copies = parameter.grad, 1 if counts_whole else 0
        if isinstance(given, DTensor):
            whole = (
                given.device_mesh.size(n) for n, how in enumerate(given.placements) if how.is_replicate()
            )
            copies = math.prod(whole)
        if given is not None and copies:
            wide = torch.promote_types(given.dtype, torch.float32)
            groups.setdefault((wide, 1 / copies), []).append(local(given))
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for (wide, share), held in groups.items():
        norms = torch.stack(torch._foreach_norm(held, 2, dtype=wide))
        total += share * norms.double().square().sum()
    return total


def clip(parameters: Mapping[str, torch.Tensor], norm: float, most: float) -> None:
    """Scale gradients so that their norm over all processes is at most a number; as `torch.nn.utils` does."""
    factor = most / (norm + 1e-6)
    held = [local(p.grad) for p in parameters.values() if p.grad is not None]
    # A norm that is NaN goes on: gradients become NaN too, which is noticed.
    if held and not factor >= 1:
        torch._foreach_mul_(held, factor)
