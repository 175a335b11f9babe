"""DocumentCache: what a document's later slices need of its earlier ones on this stage, layer by layer.

Keys and values of the whole document stand in one buffer a layer, allocated once, so that a slice neither copies nor
concatenates what came before it. Their gradients are gathered beside them while the document's slices run backward,
last to first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Of keys and of values: `[1, key_heads, tokens, dim]`, neighbouring tokens side by side in memory."""


@dataclass(slots=True)
class DocumentCache:
    """Keys and values of one document, and the gradients that its later slices have sent to them."""

    length: int
    pairs: dict[int, Pair] = field(default_factory=dict)
    """By layer."""
    gradients: dict[int, Pair] = field(default_factory=dict)
    """By layer: float32 or wider, of the tokens before the last slice that ran backward first."""

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Keep a slice's keys and values, and return those of the document up to the slice's end.

        Args:
            layer: its index.
            start: of the slice within the document.
            key: `[1, key_heads, rows, dim]`.
            value: as `key`.
        """
        if layer not in self.pairs:
            self.pairs[layer] = (
                _tokens(key, self.length, key.dtype),
                _tokens(value, self.length, value.dtype),
            )
        stop = start + key.shape[2]
        keys, values = self.pairs[layer]
        keys[:, :, start:stop] = key
        values[:, :, start:stop] = value
        return keys[:, :, :stop], values[:, :, :stop]

    def read(self, layer: int, stop: int) -> Pair:
        """Return the keys and values of the tokens before `stop`."""
        keys, values = self.pairs[layer]
        return keys[:, :, :stop], values[:, :, :stop]

    def earlier_gradients(self, layer: int, start: int) -> Pair | None:
        """Return where the gradients of the tokens before a slice are gathered; None for a document's first slice.

        The first call, by the last slice, allocates them.
        """
        if start == 0:
            return None
        if layer not in self.gradients:
            pair = self.pairs[layer]
            wide = torch.promote_types(pair[0].dtype, torch.float32)
            keys, values = (_tokens(x, start, wide).zero_() for x in pair)
            self.gradients[layer] = (keys, values)
        keys, values = self.gradients[layer]
        return keys[:, :, :start], values[:, :, :start]

    def own_gradients(self, layer: int, start: int, stop: int) -> Pair | None:
        """Return what later slices have sent to this slice's keys and values; None where there are none."""
        if layer not in self.gradients or self.gradients[layer][0].shape[2] < stop:
            return None
        keys, values = self.gradients[layer]
        return keys[:, :, start:stop], values[:, :, start:stop]

    def release(self, layer: int, start: int) -> None:
        """Give the memory of a slice back, after its backward: that of all tokens from `start` on.

        What stays moves into a buffer of its own size, one layer at a time.
        """
        for held in (self.pairs, self.gradients):
            if start == 0:
                held.pop(layer, None)
            elif layer in held and held[layer][0].shape[2] > start:
                keys, values = held[layer]
                held[layer] = (_copied(keys, start), _copied(values, start))


def _copied(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first tokens in memory of their own."""
    return _tokens(tokens, length, tokens.dtype).copy_(tokens[:, :, :length])


def _tokens(like: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate `[1, heads, length, dim]` whose tokens lie side by side, as a model's projections write them."""
    _, heads, _, dim = like.shape
    return torch.empty(1, length, heads, dim, dtype=dtype, device=like.device).transpose(1, 2)
