"""Attention of whole packs as one operator, so that `torch.compile` makes one graph whatever the documents.

Where documents end is data: traced, each number and length of documents would be a graph of its own. The operator is
opaque to the compiler. Its backward pass computes the forward pass again, since the kernels beneath differ in what
they keep.
"""

from __future__ import annotations

from typing import Any

import torch

from varlen.attention.documents import attend_in_packs
from varlen.attention.rules import LayerRules
from varlen.errors import ModelError

NO_WINDOW = 0
NO_CAP = 0.0


def attend_opaquely(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    ends: torch.Tensor,
    longest: int,
    rules: LayerRules,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as `attend_in_packs`, within a graph of the compiler.

    Args:
        query: see there, as for all others.
        longest: at least the tokens of the longest segment; a constant makes one graph.
    """
    if rules.dropout > 0:
        raise ModelError("compiled attention has no dropout: its backward pass would draw another mask")
    if torch.is_autocast_enabled(query.device.type):  # whose casts end where the operator begins
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        sinks = None if sinks is None else sinks.to(dtype)
    window = NO_WINDOW if rules.window is None else rules.window
    cap = NO_CAP if rules.softcap is None else rules.softcap
    out: torch.Tensor = torch.ops.varlen.attend(
        query, key, value, ends, sinks, longest, rules.scale, window, cap, rules.is_causal
    )
    return out


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    sinks: torch.Tensor | None,
    longest: int,
    scale: float,
    window: int,
    cap: float,
    causal: bool,
) -> torch.Tensor:
    rules = LayerRules(
        scale=scale,
        window=None if window == NO_WINDOW else window,
        softcap=None if cap == NO_CAP else cap,
        dropout=0.0,
        is_causal=causal,
    )
    return attend_in_packs(query, key, value, ends=ends, longest=longest, rules=rules, sinks=sinks)


@torch.library.custom_op("varlen::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    sinks: torch.Tensor | None,
    longest: int,
    scale: float,
    window: int,
    cap: float,
    causal: bool,
) -> torch.Tensor:
    with torch.no_grad():
        return _attended(query, key, value, ends, sinks, longest, scale, window, cap, causal).contiguous()


@_attend.register_fake
def _(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


@torch.library.custom_op("varlen::attend_backward", mutates_args=())
def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    sinks: torch.Tensor | None,
    longest: int,
    scale: float,
    window: int,
    cap: float,
    causal: bool,
) -> list[torch.Tensor]:
    given = [query, key, value, *([] if sinks is None else [sinks])]

    def attended(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v, *of_sinks = inputs
        sink = of_sinks[0] if of_sinks else None
        return _attended(q, k, v, ends, sink, longest, scale, window, cap, causal)

    # Within an operator autograd is off, and this isn't.
    _, pulled_back, *_ = torch.func.vjp(attended, *given)
    return [x.contiguous() for x in pulled_back(gradient)]


@_attend_backward.register_fake
def _(_gradient: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    query, key, value, _ends, sinks, *_ = given
    return [x.new_empty(x.shape) for x in (query, key, value, *([] if sinks is None else [sinks]))]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 - by name
    query, key, value, ends, sinks, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, ends, sinks)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    query, key, value, ends, sinks = ctx.saved_tensors
    found = torch.ops.varlen.attend_backward(
        gradient.contiguous(), query, key, value, ends, sinks, *ctx.settings
    )
    of_sinks = found[3] if sinks is not None else None
    return (*found[:3], None, of_sinks, None, None, None, None, None)


_attend.register_autograd(_backward, setup_context=_keep)
