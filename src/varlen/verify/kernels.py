"""Which attention kernels ran: a setting says what a model was asked for, and only a run what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATTENTION = ("scaled_dot_product", "flash", "varlen_attn", "flex_attention")
"""What the names of attention kernels contain, in PyTorch and in the packages that register their own."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that reach a device."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and run one operator."""
        name = _name(func)
        self.counts[name] += 1
        if name in _PRODUCTS:
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()}
        return func(*args, **(kwargs or {}))


def kernels_of(run: Callable[[], Any]) -> tuple[tuple[str, int], ...]:
    """Run something, and return which attention kernels ran and how often, by name.

    Args:
        run: one forward pass.

    Returns:
        Names of PyTorch's operators, such as "_scaled_dot_product_flash_attention_for_cpu". Where no fused kernel
        ran but scores were formed, "softmax".
    """
    with _Recorder() as recorder:
        run()
    counts = recorder.counts
    fused = {name: count for name, count in counts.items() if any(word in name for word in _ATTENTION)}
    formed = counts["_softmax"] + counts["_safe_softmax"]
    if not fused and formed:
        fused = {"softmax": formed}
    return tuple(sorted(fused.items()))


def computed_in(run: Callable[[], Any]) -> tuple[Any, torch.dtype | None]:
    """Run something, and return what it returns and the coarsest dtype of its matrix products.

    Weights don't tell: under autocast products are computed in another dtype.

    Args:
        run: one forward pass.

    Returns:
        The result; the dtype, None where there was no product.
    """
    with _Recorder() as recorder:
        result = run()
    coarsest = max(recorder.dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    return result, coarsest


def _name(operator: Any) -> str:
    """Return an operator's name without the library and the overload."""
    name = getattr(operator, "__name__", str(operator))
    return str(name).partition("::")[2].partition(".")[0] or str(name).partition(".")[0]
