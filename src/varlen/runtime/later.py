"""`Later`: weight gradients of linear layers that wait until a task of their own adds them up.

Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) run a MicroPack's input gradients as soon as they can, since
the stage before waits for them, and its weight gradients where a stage would idle. No module is changed for that:
while a layer runs, calls of `torch.nn.functional.linear` with a parameter as weight are seen, and go through a
function whose backward keeps what the weight gradient is made of. All other parameters, of norms, biases and stacked
experts among them, get their gradients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from varlen.runtime.casting import add_product, lowered


class Waiting(NamedTuple):
    """A weight gradient that hasn't been computed: `gradient.T @ rows`."""

    weight: torch.nn.Parameter
    """`[outputs, inputs]`."""
    rows: torch.Tensor
    """`[..., inputs]`: what went into the layer."""
    gradient: torch.Tensor
    """`[..., outputs]`: of what came out."""


class Later(TorchFunctionMode):
    """While entered, linear layers are run so that their backward leaves weight gradients in `collected`."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Waiting] = []
        """In the order in which backward passes came by; whoever runs one takes them out."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, `linear` in another way where its weight is a parameter that learns."""
        kwargs = kwargs or {}
        if function is not torch.nn.functional.linear or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return self._linear(*args, **kwargs)

    def take(self) -> list[Waiting]:
        """Return what was collected since the last call."""
        taken, self.collected = self.collected, []
        return taken

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        is_own = isinstance(weight, torch.nn.Parameter) and weight.requires_grad and weight.is_leaf
        if not is_own or not input.requires_grad:
            return torch.nn.functional.linear(input, weight, bias)
        out: torch.Tensor = _Linear.apply(lowered(input), weight, self)  # type: ignore[no-untyped-call]
        return out if bias is None else out + lowered(bias)


class _Linear(torch.autograd.Function):
    """A linear layer without bias, whose weight gradient is left to `Later`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.nn.Parameter, later: Later) -> torch.Tensor:
        # The weight is kept as itself, and not as a saved tensor: it takes part in no graph here.
        ctx.save_for_backward(rows)
        ctx.weight, ctx.later = weight, later
        return torch.nn.functional.linear(rows, weight.detach().to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        # Apart from the graph, which would otherwise live on with them.
        ctx.later.collected.append(Waiting(ctx.weight, rows.detach(), gradient.detach()))
        return gradient @ ctx.weight.detach().to(gradient.dtype), None, None


def add_up(waiting: Sequence[Waiting]) -> None:
    """Add weight gradients to those of their parameters; what they were made of is free then.

    Args:
        waiting: of one MicroPack and chunk of layers.

    Cost: a matrix product each, which adds where the gradient stands.
    """
    for weight, rows, gradient in waiting:
        add_product(weight, gradient.flatten(0, -2), rows.flatten(0, -2))
