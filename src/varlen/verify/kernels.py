"""Which attention kernels ran: a setting says what a model was asked for, and only a run what it did."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode

_ATTENTION = ("scaled_dot_product", "flash", "varlen_attn", "flex_attention")
"""What the names of attention kernels contain, in PyTorch and in the packages that register their own."""
_WEIGHING = ("_softmax", "_safe_softmax")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that reach a device."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()
        self.formed = 0
        """Scores that became weights in a layer of attention: routers have a softmax as well."""
        self._within: list[str] = []
        self._following = ExitStack()

    def __enter__(self) -> Any:
        """Begin to follow which module is at work; PyTorch's own are parts of the one that calls them."""

        def enters(module: torch.nn.Module, _: Any) -> None:
            kind = type(module)
            is_part = kind.__module__.startswith("torch.") and bool(self._within)
            self._within.append(self._within[-1] if is_part else kind.__name__)

        def leaves(*_: Any) -> None:
            if self._within:  # empty where somebody's hook before ours raised
                self._within.pop()

        self._following.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*global hooks on modules")  # they see a compiled model twice
        for hook in (
            modules.register_module_forward_pre_hook(enters),
            modules.register_module_forward_hook(leaves, always_call=True),
        ):
            self._following.callback(hook.remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End to follow."""
        self._following.close()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and run one operator."""
        name = _name(func)
        self.counts[name] += 1
        if name in _WEIGHING and self._within and "Attention" in self._within[-1]:
            self.formed += 1
        if name in _PRODUCTS:
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()}
        return func(*args, **(kwargs or {}))


def kernels_of(run: Callable[[], Any]) -> tuple[Any, tuple[tuple[str, int], ...]]:
    """Run something, and return what it returns, and which attention kernels ran and how often, by name.

    Args:
        run: one forward pass.

    Returns:
        The result; names of PyTorch's operators, such as "_scaled_dot_product_flash_attention_for_cpu", and "softmax"
        for layers that formed their scores. Where one kernel ran in some layers and another in others, both stand
        there.
    """
    with _Recorder() as recorder:
        result = run()
    counts = recorder.counts
    found = {name: count for name, count in counts.items() if any(word in name for word in _ATTENTION)}
    # A layer of attention is known by its name; where none has such a name, any softmax may have been its.
    formed = recorder.formed or (0 if found else sum(counts[name] for name in _WEIGHING))
    if formed:
        found["softmax"] = formed
    return result, tuple(sorted(found.items()))


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
