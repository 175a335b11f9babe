"""Stand-ins for kernels that need a GPU: transformers' own dispatch runs, and behind it each document by itself.

They prove that boundaries reach the place where a kernel would read them, and what a model does with the result. They
say nothing about the kernels themselves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch

from varlen.adapters.hf.per_document import attend
from varlen.adapters.hf.rules import LayerRules
from varlen.errors import ModelError

FLASH = "flash_attn_varlen_func"
"""What FlashAttention's package calls the kernel that `flash_attention` stands in for."""
_OF_FLA = ("delta",)
"""Kernels of flash-linear-attention are told `cu_seqlens`; those of causal-conv1d and mamba-ssm `seq_idx`."""


@contextmanager
def flash_attention() -> Iterator[None]:
    """Put kernels that need no GPU where transformers looks for FlashAttention's.

    Raises:
        ModelError: within: tokens that no segment covers, or segments longer than was said.
    """
    from transformers import modeling_flash_attention_utils
    from transformers.integrations import flash_attention as integration

    flash: Any = modeling_flash_attention_utils
    dtype_of: Any = integration.get_target_dtype

    def dtype_for(query: torch.Tensor, module: torch.nn.Module) -> torch.dtype | None:
        try:
            return dtype_of(query, module)  # type: ignore[no-any-return]
        except (
            StopIteration
        ):  # asked in float32 alone, which the kernel wouldn't take, of layers without nn.Linear
            return None

    process = flash._lazy_define_process_function(_varlen_kernel)
    padding = flash._pad_input, flash._unpad_input  # transformers' own, for masks with holes
    # transformers 5.23 unpacks a function for the cache's kernel beside it, 5.17 knows none
    arguments = (process, dict) if hasattr(flash, "_process_with_kvcache_kwargs_fn") else process
    kernels = (_dense_kernel, _varlen_kernel, None, *padding), arguments
    with (
        patch.object(flash, "lazy_import_flash_attention", lambda *_, **__: kernels),
        patch.object(integration, "get_target_dtype", dtype_for),
    ):
        yield


def _varlen_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **rest: Any,
) -> torch.Tensor:
    """Attend as `flash_attn_varlen_func` does, in Python."""
    if not causal:
        raise ModelError(
            "the stand-in for FlashAttention is causal, and the model attends in both directions"
        )
    if not torch.equal(cu_seqlens_q, cu_seqlens_k) or int(cu_seqlens_q[-1]) != len(q) or int(cu_seqlens_q[0]):
        raise ModelError(
            f"FlashAttention would be told segments from {int(cu_seqlens_q[0]):,} to {int(cu_seqlens_q[-1]):,} of "
            f"{len(q):,} tokens, and leave the others uncomputed"
        )
    longest = int(cu_seqlens_q.diff().max())
    if max(max_seqlen_q, max_seqlen_k) < longest:
        raise ModelError(
            f"FlashAttention would be told that the longest segment has {max_seqlen_q:,} tokens, and it has "
            f"{longest:,}"
        )
    sinks = rest.get("s_aux", rest.get("learnable_sink"))
    window = None if window_size[0] < 0 else window_size[0] + 1
    rules = LayerRules(scale=softmax_scale, window=window, softcap=softcap or None, sinks=sinks)
    return attend(q, k, v, ends=cu_seqlens_q, longest=None, rules=rules)


def _dense_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attend as `flash_attn_func` does: each row is a segment."""
    rows, width = q.shape[:2]
    ends = torch.arange(rows + 1, dtype=torch.int32, device=q.device) * width
    out = _varlen_kernel(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends, ends, width, width, **options
    )
    return out.view(rows, width, *out.shape[1:])


@contextmanager
def recurrence(model: Any) -> Iterator[tuple[str, ...]]:
    """Let a model's convolutions and recurrences keep segments apart where they are told them, as their kernels do.

    transformers' own fallbacks refuse boundaries. Each segment is given to them by itself here. A function that is
    told no boundaries runs over whole rows, as it would anywhere.

    Args:
        model: a transformers model.

    Yields:
        The names of the functions that stand in.
    """
    homes = {sys.modules[type(module).__module__] for module in model.modules()}
    found: list[str] = []
    with ExitStack() as stack:
        for home in homes:
            for name, function in inspect.getmembers(home, _is_fallback):
                stack.enter_context(patch.object(home, name, _by_segment(function)))
                found.append(name)
        yield tuple(sorted(found))


def _is_fallback(value: Any) -> bool:
    """Whether this is a function that transformers replaces by a kernel where its package is installed."""
    return (
        callable(value)
        and hasattr(value, "__wrapped__")
        and getattr(value.__wrapped__, "__module__", "").startswith("transformers.models.")
    )


def _by_segment(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fallback that takes segments in the form that its kernel takes, and runs over each by itself."""
    plain = inspect.unwrap(function)
    takes_ends = any(word in plain.__name__ for word in _OF_FLA)

    @wraps(plain)
    def apart(*args: Any, **kwargs: Any) -> Any:
        numbers, ends = kwargs.pop("seq_idx", None), kwargs.pop("cu_seqlens", None)
        numbers, ends = (None, ends) if takes_ends else (numbers, None)  # the other form is passed over
        if numbers is None and ends is None:
            return plain(*args, **kwargs)
        axis = 2 if plain.__name__.startswith("causal_conv1d") else 1
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        first = next(iter(given.values()))
        rows, width = first.shape[0], first.shape[axis]
        cut = partial(_cut, rows=rows, width=width, axis=axis)
        outputs = []
        for row, start, stop in _segments(numbers, ends, rows, width):
            parts = {name: cut(v, row, start, stop, is_first=v is first) for name, v in given.items()}
            named = {name: part for name, part in parts.items() if isinstance(name, str)}
            outputs.append((row, plain(*(parts[i] for i in range(len(args))), **named)))
        if any(out is None for _, out in outputs):
            return None  # a way round that kernels alone have: in training mode a layer's whole work in one
        return _joined(outputs, rows, axis)

    return apart


def _segments(numbers: Any, ends: Any, rows: int, width: int) -> list[tuple[int, int, int]]:
    """Return the row, the first token and the end of every segment."""
    if numbers is not None:
        changes = [
            [*torch.cat([torch.ones(1), line.diff()]).nonzero()[:, 0].tolist(), width]
            for line in numbers.cpu()
        ]
        return [(row, a, b) for row, at in enumerate(changes) for a, b in zip(at, at[1:])]
    bounds = ends.tolist()
    if rows != 1 or bounds[0] != 0 or bounds[-1] != width:
        raise ModelError(
            f"segments from {bounds[0]:,} to {bounds[-1]:,} were told of {rows:,} rows of {width:,} tokens; a "
            'recurrence takes them of one row alone: pass layout="flat"'
        )
    return [(0, a, b) for a, b in zip(bounds, bounds[1:]) if b > a]


def _cut(
    value: Any, row: int, start: int, stop: int, *, is_first: bool, rows: int, width: int, axis: int
) -> Any:
    """Return the part of an argument that belongs to a segment: all of it, unless it has a value for every token."""
    if not torch.is_tensor(value):
        return value
    if axis == 2:
        return value[row : row + 1, :, start:stop] if is_first else value
    if value.ndim >= 3 and value.shape[:2] == (rows, width):
        return value[row : row + 1, start:stop]
    return value


def _joined(outputs: list[tuple[int, Any]], rows: int, axis: int) -> Any:
    """Return the segments' outputs side by side; of what comes with them, such as a last state, the last one's."""
    parts = [out[0] if isinstance(out, tuple) else out for _, out in outputs]
    lines = [torch.cat([p for (r, _), p in zip(outputs, parts) if r == row], dim=axis) for row in range(rows)]
    whole = torch.cat(lines, dim=0)
    last = outputs[-1][1]
    return (whole, *last[1:]) if isinstance(last, tuple) else whole
