"""Pieces of documents out of the files of many shards, read by one call; the files stay open for the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.source import kernels
from varlen.source.loss_masks import Mask
from varlen.source.shard import Shard, ShardFiles
from varlen.types import Int32Array, IntArray

OPEN_SHARDS = 64
"""Shards whose files stay open: the documents of a window come from a few dozen."""


_TOKENS, _MASK, _WEIGHTS, _WIDTH, _MASK_WIDTH, _WEIGHTS_WIDTH, _OFFSETS, _HAS_MASK, _HAS_WEIGHTS = range(9)
_CLOSED, _NOTHING = -1, -2
"""Files that aren't open, and those that aren't there, of which nothing is read."""


class Reader:
    """Reads pieces of documents of a store's shards, for one thread at a time."""

    def __init__(self, shard: Callable[[int], Shard]) -> None:
        """Take what opens a shard by its number."""
        self._shard = shard
        self._opened: OrderedDict[int, tuple[Shard, ShardFiles]] = OrderedDict()
        self._table: IntArray = np.full((9, 0), _CLOSED, dtype=np.int64)
        """Of every shard its open files, the bytes of a value in them, the address of its offsets, and whether it has
        a mask or weights: what the kernel takes."""

    def read(
        self, shards: IntArray, documents: IntArray, starts: IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces end to end; arguments as `TokenStore.gather` has them.

        Raises:
            SourceError: a shard is damaged.
        """
        pieces = [np.ascontiguousarray(part, dtype=np.int64) for part in (shards, documents, starts, lengths)]
        for index in np.unique(shards).tolist():  # the kernel looks into their offsets
            self._shard(index).check_offsets()
        most = int(shards.max(initial=-1)) + 1
        if most > self._table.shape[1]:
            more = np.full((9, 2 * most - self._table.shape[1]), _CLOSED, dtype=np.int64)
            self._table = np.concatenate([self._table, more], axis=1)
        tokens = np.empty(int(lengths.sum()), dtype=np.int32)
        self._fill(pieces, _TOKENS, _WIDTH, tokens)
        if not len(shards) or self._table[_HAS_MASK, shards].max() <= 0:
            return tokens, None
        mask = np.ones(len(tokens), dtype=np.uint8)
        self._fill(pieces, _MASK, _MASK_WIDTH, mask)
        if self._table[_HAS_WEIGHTS, shards].max() <= 0:
            return tokens, mask
        weights = mask.astype(np.float32)
        self._fill(pieces, _WEIGHTS, _WEIGHTS_WIDTH, weights)
        return tokens, weights

    def _fill(self, pieces: list[IntArray], role: int, width: int, values: npt.NDArray[Any]) -> None:
        """Read one value a token."""
        table, first = self._table, 0
        shards, documents, starts, lengths = pieces
        places = table[role], table[width], table[_OFFSETS]
        while (
            failed := kernels.read_pieces(shards, documents, starts, lengths, *places, first, values)
        ) >= 0:
            index, document, start, length = (int(part[failed]) for part in pieces)
            if table[role, index] == _CLOSED:
                self._open(index)
                first = failed
                continue
            to = int(pieces[3][:failed].sum())
            with self._shard(index) as shard:  # once more, in a way that says what is wrong
                at = int(shard.offsets[document]) + start
                again = shard.read_tokens if role == _TOKENS else shard.read_mask
                values[to : to + length] = again(at, at + length)
            first = failed + 1

    def _open(self, index: int) -> None:
        """Open a shard's files, and close those of the one that was opened longest ago."""
        shard = self._shard(index)
        files = shard.files()
        while len(self._opened) >= OPEN_SHARDS:
            closed, _ = self._opened.popitem(last=False)
            self._table[[_TOKENS, _MASK, _WEIGHTS], closed] = _CLOSED
        self._opened[index] = shard, files
        address = shard.offsets.__array_interface__["data"][0]
        mask = _NOTHING if files.mask < 0 or files.is_weighted else files.mask
        weights = files.mask if files.is_weighted else _NOTHING
        has = files.mask >= 0, files.is_weighted
        self._table[:, index] = (files.tokens, mask, weights, files.width, 1, 4, address, *has)
