"""Kernels that a layer launches, on the path of CUDA: they don't grow with documents that are whole in a MicroPack."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.sliced import Slice, one_gpu_plan, tiny, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode

from varlen.attention.kernels import Lengths, Qkv
from varlen.attention.rules import LayerRules
from varlen.runtime import attention
from varlen.runtime.step import run_step

ALLOCATIONS = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten.detach,
    torch.ops.aten._unsafe_view,
)


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel on a GPU: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view and function.overloadpacket not in ALLOCATIONS
        return function(*args, **(kwargs or {}))


class OneLaunch:
    """Stands in for a kernel of whole slices; a pass of it is as many operations as it has outputs."""

    has_softcap = True

    def forward(self, given: Qkv, lengths: Lengths, rules: LayerRules) -> Any:
        query = given.query
        return torch.zeros_like(query), query.new_zeros(query.shape[1], query.shape[0])

    def backward(
        self, gradient: torch.Tensor, given: Qkv, merged: Any, lengths: Lengths, rules: LayerRules
    ) -> Qkv:
        return Qkv(*(torch.zeros_like(x) for x in given))


def launches_a_layer(plan: Any, saved: Any = "layers", **how: Any) -> float:
    """Of a step: that of six layers, less that of two."""
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "chosen", lambda *_: OneLaunch())
        for layers in (2, 6):
            model = tiny("llama", torch.float32, num_hidden_layers=layers)
            with Launches() as launches:
                run_step(model, tokens_of(plan.lengths.tolist()), replace(plan, **how), saved=saved)
            counts.append(launches.count)
    return (counts[1] - counts[0]) / 4


def whole(count: int, rows: int = 1024) -> tuple[list[int], list[Slice]]:
    return [rows // count] * count, [(number, 0, rows // count) for number in range(count)]
