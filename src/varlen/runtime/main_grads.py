"""`main_grad`: the gradient of a half-precision parameter adds up in float32, and `.grad` gets its cast.

    autograd ──► .grad, as it is made ─┐
    head, embedding, deferred matrices ┴─► main_grad ──► sum over ranks ──► .grad = main_grad.to(parameter.dtype)

A step adds to a gradient once a MicroPack and once a block of logits. A bfloat16 sum loses addends below 1/512 of it,
so the gradient would depend on the number of pieces. All other parameters add up in `.grad` itself.
(Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740; the name is Megatron's.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from varlen.counts import many


def is_narrow(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's gradient adds up in a wider dtype than its own."""
    return wide(parameter.dtype) != parameter.dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a dtype add up: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def gradient_of(parameter: Any) -> torch.Tensor | None:
    """Return what a parameter's gradient adds up in during a step; None before the first addend."""
    found: torch.Tensor | None = (
        getattr(parameter, "main_grad", None) if is_narrow(parameter) else parameter.grad
    )
    return found


def set_gradient(parameter: Any, gradient: torch.Tensor | None) -> None:
    """Replace what a parameter's gradient adds up in during a step."""
    if is_narrow(parameter):
        parameter.main_grad = gradient
    else:
        parameter.grad = gradient


def take_gradient(parameter: Any) -> torch.Tensor | None:
    """Remove a parameter's gradient of a step, or else autograd's, and return it."""
    found = gradient_of(parameter)
    found = parameter.grad if found is None else found
    set_gradient(parameter, None)
    parameter.grad = None
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return what a parameter's gradient adds up in during a step, zeros at first."""
    found = gradient_of(parameter)
    if found is None:
        found = torch.zeros_like(parameter, dtype=wide(parameter.dtype))
        set_gradient(parameter, found)
    return found


def add_product(parameter: torch.Tensor, by_outputs: torch.Tensor, rows: torch.Tensor) -> None:
    """Add `by_outputs.T @ rows` to a parameter's gradient.

    Where the sum is wider than both, the product is rounded before it is added, as autograd rounds it. Of a parameter
    that tp ranks divide, rows or outputs are divided alike, and the product is of this rank's part.

    Args:
        parameter: `[outputs, inputs]`.
        by_outputs: `[rows, outputs]`: gradient of what came out.
        rows: `[rows, inputs]`: what went in, in the dtype of `by_outputs`.
    """
    total, by_outputs, rows = local(gradient(parameter)), local(by_outputs), local(rows)
    if total.dtype == by_outputs.dtype:
        total.addmm_(by_outputs.T, rows)
    else:
        total += by_outputs.T @ rows


def add_from_autograd(parameters: Iterable[Any]) -> list[Any]:
    """Let autograd's gradients of narrow parameters be added to `main_grad` as they are made; returns the hooks.

    Frozen parameters have no gradients, and get no hook.
    """
    return [
        p.register_post_accumulate_grad_hook(_add) for p in parameters if p.requires_grad and is_narrow(p)
    ]


def _add(parameter: Any) -> None:
    if parameter.grad is None:  # its product is deferred, see `add_product`
        return
    gradient(parameter).add_(parameter.grad)
    parameter.grad = None


def unscale(parameters: Iterable[Any], scale: float, rows: Iterable[torch.Tensor] = ()) -> None:
    """Divide what gradients add up in, and rows of sums of some, by a power of two."""
    found = [local(total) for parameter in parameters if (total := gradient_of(parameter)) is not None]
    found += rows
    if scale != 1 and found:
        torch._foreach_mul_(found, 1 / scale)


@contextmanager
def step_gradients(parameters: Iterable[Any], *, is_apart: bool = False) -> Iterator[None]:
    """Add up the gradients of a step, on top of those of earlier batches.

    An earlier `main_grad` goes on where `.grad` is still its cast, entry by entry; where `.grad` was changed, its
    value counts. If the step fails, `.grad` is what it was; without `is_apart`, that of a wide parameter has a part
    of the step added, and a note on the error says so.

    Args:
        parameters: those that learn.
        is_apart: whether earlier gradients are added at the end, so that what ranks reduce is this step's alone.
    """
    before = [(p, p.grad, _carried(p)) for p in parameters]
    for parameter, _, carried in before:
        if is_narrow(parameter):
            parameter.grad = None
        set_gradient(parameter, None if is_apart else carried)
    hooks = add_from_autograd(parameter for parameter, _, _ in before)
    try:
        yield
    except BaseException as error:
        for parameter, grad, carried in before:
            set_gradient(parameter, carried if is_apart else None)
            parameter.grad = grad
        added = sum(grad is not None and not is_narrow(p) for p, grad, _ in before)
        if added and not is_apart:
            error.add_note(
                f"gradients of earlier batches have a part of this step's added ({many(added, 'does', 'do')}); call "
                "optimizer.zero_grad before another step"
            )
        raise
    finally:
        for hook in hooks:
            hook.remove()
    for parameter, grad, carried in before:
        found = gradient_of(parameter)
        if is_apart and carried is not None:
            found = carried if found is None else carried.add_(found)
            set_gradient(parameter, found)
        if is_narrow(parameter) and found is not None:
            _cast(parameter, found, grad)


def _carried(parameter: Any) -> torch.Tensor | None:
    """Return the gradient of earlier batches, in the dtype in which gradients add up."""
    grad: torch.Tensor | None = parameter.grad
    if grad is None or not is_narrow(parameter):
        return grad
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if main is None or main.shape != grad.shape:
        return grad.to(wide(grad.dtype))
    if (freeing := vars(main).pop("freeing", None)) is not None:
        freeing.detach()
    mine, its = local(main), local(grad)
    mine.copy_(torch.where(its == mine.to(its.dtype), mine, its))
    return main


def _cast(parameter: Any, main: Any, before: Any) -> None:
    """Set `.grad` to the cast of a sum, which is freed with it; an earlier `.grad` takes it in its own memory."""
    fits = before is not None and before.shape == main.shape and before.dtype == parameter.dtype
    parameter.grad = before.copy_(main) if fits else main.to(parameter.dtype)
    main.freeing = weakref.finalize(parameter.grad, _free, weakref.ref(parameter), weakref.ref(main))
    main.freeing.atexit = False


def _free(owner: weakref.ref[Any], main: weakref.ref[torch.Tensor]) -> None:
    parameter = owner()
    if parameter is not None and getattr(parameter, "main_grad", None) is main():
        parameter.main_grad = None
