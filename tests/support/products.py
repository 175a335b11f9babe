"""Half precision on processors without instructions for it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PRODUCTS = {
    "mm": 1,
    "addmm": 1,
    "bmm": 1,
    "baddbmm": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
}
"""Operators, and how many of their results have the type of what they are given; a logsumexp is in float32."""


@contextmanager
def wide_products() -> Iterator[None]:
    """Multiply half-precision matrices in float32 and round once, as instructions for half precision do.

    Without such instructions, torch multiplies them up to 100 times slower than float32 matrices.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
        for name, count in PRODUCTS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _widened(kernel, count), "CPU", with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _widened(kernel: Any, count: int) -> Callable[..., Any]:
    def run(keys: Any, *given: Any, **more: Any) -> Any:
        dtype = given[0].dtype
        if dtype.itemsize != 2:
            return kernel.call_boxed(keys, *given, **more)
        made = kernel.call_boxed(keys, *map(_wide, given), **{key: _wide(x) for key, x in more.items()})
        if isinstance(made, torch.Tensor):
            return made.to(dtype)
        return tuple(x.to(dtype) if number < count else x for number, x in enumerate(made))

    return run


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.itemsize == 2 else value
