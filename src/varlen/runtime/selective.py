"""`selectively`: layers whose graphs don't keep products that one multiplication makes again: norm outputs, gates.

A norm ends in `weight * normed` and a gated layer in `act(gate) * up`. Each factor is kept by the multiplication for
its own backward, and the linear layers behind keep the product a second time. Here they keep the factors alone
and multiply again: the same operation on the same bits (selective recomputation; Korthikanti et al. 2022, arXiv
2205.05198, §5). Nothing of the model is patched; hooks stand on its linear layers meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class _Product(NamedTuple):
    """A view of a product, as its factors."""

    one: torch.Tensor
    other: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def selectively(layers: Iterable[nn.Module], is_on: bool = True) -> Iterator[None]:
    """Let graphs that are made meanwhile keep factors instead of products that go into these layers' linear layers.

    A product whose factors aren't both kept, as where one of them needs no gradient, is kept itself.

    Args:
        layers: of the model.
        is_on: False changes nothing.
    """
    if not is_on:
        yield
        return
    products: dict[
        int, tuple[torch.Tensor, torch.Tensor]
    ] = {}  # of the linear layer that runs, by its storage

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        product = given[0] if given else None
        node: Any = product.grad_fn if isinstance(product, torch.Tensor) else None
        if product is None or node is None or node.name() != "MulBackward0":
            return
        one, other = node._saved_self, node._saved_other
        if one is not None and other is not None:
            products[product.untyped_storage()._cdata] = (one.detach(), other.detach())

    def forget(*_: Any) -> None:
        products.clear()  # the product may die now, and its storage's place be another's

    def pack(kept: torch.Tensor) -> torch.Tensor | _Product:
        factors = products.get(kept.untyped_storage()._cdata)
        if factors is None:
            return kept
        return _Product(*factors, kept.size(), kept.stride(), int(kept.storage_offset()))

    def unpack(kept: torch.Tensor | _Product) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        product = kept.one * kept.other
        return product.as_strided(kept.size, kept.stride, kept.offset)

    linear = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(note) for module in linear]
    hooks += [module.register_forward_hook(forget) for module in linear]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for hook in hooks:
            hook.remove()
