"""Autocast: where a caller has it on, forward passes compute in half precision, and nothing else of a step does.

So it is with the uncut model, whose forward pass runs under `torch.autocast` and whose backward pass runs after it.
Of slices both come by turns while it is on, which PyTorch advises against for backward passes.
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
    """Return a tensor as autocast hands it to a matrix product; float64 stays, and all does where autocast is off."""
    if tensor.dtype == torch.float64 or not is_on(tensor):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def uncast(like: torch.Tensor) -> AbstractContextManager[Any]:
    """Return what backward passes, and kernels that know their dtypes, run in: autocast off."""
    return torch.autocast(like.device.type, enabled=False) if is_on(like) else nullcontext()


@contextmanager
def ungraphed(like: torch.Tensor) -> Iterator[None]:
    """Run without a graph, and leave later passes with one what they need.

    Autocast casts a weight once and keeps what it made; before PyTorch 2.11 that had no graph if it was first made
    here, and the weight then got no gradient (pytorch/pytorch#65766).
    """
    is_lost = is_on(like) and not _casts_keep_graphs()
    cached: Any = torch.autocast(like.device.type, cache_enabled=False) if is_lost else nullcontext()
    with torch.no_grad(), cached:
        yield


def add_product(parameter: torch.Tensor, gradient: torch.Tensor, rows: torch.Tensor) -> None:
    """Add `gradient.T @ rows` to a parameter's gradient, zeros at first.

    Where it is wider than both, the product is rounded before it is added, as autocast's backward pass rounds it.

    Args:
        parameter: `[outputs, inputs]`.
        gradient: `[rows, outputs]`, of what came out.
        rows: `[rows, inputs]`: what went in, in the gradient's dtype.
    """
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.dtype == gradient.dtype:
        parameter.grad.addmm_(gradient.T, rows)
    else:
        parameter.grad += gradient.T @ rows


@functools.cache
def _casts_keep_graphs() -> bool:
    """Return whether a weight that was first cast without a graph has one afterwards."""
    weight, row = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            torch.mm(row, weight)
        with torch.enable_grad():
            return torch.mm(row, weight).requires_grad
