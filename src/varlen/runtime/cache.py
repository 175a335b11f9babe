"""DocumentCache and KeptRows: what a document's tasks on this stage leave for its later ones, layer by layer.

Keys and values of the whole document stand in one buffer a layer, allocated once, so that a slice neither copies nor
concatenates what came before it. Their gradients are gathered beside them while the document's slices run backward,
last to first. What went into layers is kept in the pieces that forward slices came in. All of it is given back while
the backward passes, and however many slices a document is cut into, what is copied meanwhile is linear in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Of keys and of values: `[1, key_heads, tokens, dim]`, neighbouring tokens side by side in memory."""
FREE_SHARE: Final = 1 / 16
"""A buffer is copied into a smaller one once this share of it is free: then all its copies together are at most
15 of it, and what is free but not given back is at most a 16th."""


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

        Once `FREE_SHARE` of a buffer is free, what stays moves into one of its own size, one layer at a time.
        """
        for held in (self.pairs, self.gradients):
            if start == 0:
                held.pop(layer, None)
            elif layer in held and held[layer][0].shape[2] - start >= FREE_SHARE * held[layer][0].shape[2]:
                keys, values = held.pop(layer)
                keys = _copied(keys, start)  # so that not both stand twice
                held[layer] = keys, _copied(values, start)


class KeptRows:
    """What went into a layer on a document's rows, in the pieces that forward slices came in; taken from the end."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        self._none: torch.Tensor | None = None

    def add(self, rows: torch.Tensor) -> None:
        """Keep the next rows.

        Args:
            rows: `[rows, hidden]`; it is not copied, so nobody may write to it.
        """
        self._pieces.append(rows)
        self._none = rows.new_empty(0, rows.shape[1]) if self._none is None else self._none

    def take(self, count: int) -> list[torch.Tensor]:
        """Return the last rows that are still there, in pieces, and keep them no longer.

        A piece's memory is given back with its first row.

        Args:
            count: of rows; at most as many as are there.
        """
        taken: list[torch.Tensor] = []
        while count:
            piece = self._pieces.pop()
            if len(piece) > count:
                self._pieces.append(piece[:-count])
                piece = piece[-count:]
            taken.append(piece)
            count -= len(piece)
        assert self._none is not None
        return taken[::-1] or [self._none]


def _copied(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first tokens in memory of their own."""
    return _tokens(tokens, length, tokens.dtype).copy_(tokens[:, :, :length])


def _tokens(like: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate `[1, heads, length, dim]` whose tokens lie side by side, as a model's projections write them."""
    _, heads, _, dim = like.shape
    return torch.empty(1, length, heads, dim, dtype=dtype, device=like.device).transpose(1, 2)
