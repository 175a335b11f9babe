"""Autocast: if the caller has it on, forward passes compute in half precision, and nothing else in a step does.

The same holds for an uncut model, whose forward pass runs under `torch.autocast` and whose backward pass runs after
it. With slices both alternate while autocast is on, and PyTorch advises against it for backward passes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def is_on(like: torch.Tensor) -> bool:
    """Return whether autocast is on."""
    return bool(torch.is_autocast_enabled(like.device.type))


def lowered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype of autocast's matrix products; unchanged if it is float64 or autocast is off."""
    if tensor.dtype == torch.float64 or not is_on(tensor):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def uncast(like: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context with autocast off, for backward passes and kernels with dtypes of their own."""
    return torch.autocast(like.device.type, enabled=False) if is_on(like) else nullcontext()


@contextmanager
def ungraphed(like: torch.Tensor) -> Iterator[None]:
    """Run without a graph, and without harm to later passes that have one.

    Autocast casts a weight once and caches the result. Before PyTorch 2.11 a result that was first cast here had no
    graph, and the weight then got no gradient (pytorch/pytorch#65766).
    """
    is_lost = is_on(like) and not _casts_keep_graphs()
    cached: Any = torch.autocast(like.device.type, cache_enabled=False) if is_lost else nullcontext()
    with torch.no_grad(), cached:
        yield


@functools.cache
def _casts_keep_graphs() -> bool:
    """Return whether a weight that was first cast without a graph has one afterwards."""
    weight, row = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            torch.mm(row, weight)
        with torch.enable_grad():
            return torch.mm(row, weight).requires_grad
