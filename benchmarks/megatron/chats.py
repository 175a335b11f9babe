"""Chats for the Megatron benchmarks: lengths of a real set, drawn tokens and masks, in the form each side takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import varlen as vl
from benchmarks.inputs import VOCABULARY, Int32Array, Int64Array, lognormal_lengths, real_lengths

EOS = 0
"""Ends every chat, and stands nowhere else in one."""
SET = "mix_sft"
_POOL = 1 << 16
_PART = 50_000
"""Chats that are drawn at a time, so that a million of them never stand in memory together."""

Int8Array = np.ndarray[Any, np.dtype[np.int8]]


@dataclass(frozen=True)
class Chats:
    """Tokenized chats end to end, and which of their tokens the assistant says."""

    tokens: Int32Array
    """int32 `[num_tokens]`."""
    mask: Int8Array
    """int8 `[num_tokens]`: 1 at what the assistant says, at the token itself."""
    offsets: Int64Array
    """int64 `[num_chats + 1]`."""

    @classmethod
    def draw(cls, count: int, longest: int, seed: int = 0) -> Chats:
        """Draw chats of at most so many positions of input; each holds one token more."""
        parts = list(cls.parts(count, longest, seed))
        sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.mask for part in parts]),
            np.concatenate([[0], np.cumsum(sizes)]),
        )

    @classmethod
    def parts(cls, count: int, longest: int, seed: int = 0) -> Iterator[Chats]:
        """Draw the same chats as `draw` does, some at a time."""
        lengths = chat_lengths(count, longest, seed) + 1
        rng = np.random.default_rng(seed)
        # Frequencies as of words: uniform ids would make files that nothing compresses.
        ranks = np.minimum(rng.zipf(1.3, _POOL), VOCABULARY - 1)
        pool = (1 + rng.permutation(VOCABULARY - 1)).astype(np.int32)[ranks - 1]
        for first in range(0, count, _PART):
            some = lengths[first : first + _PART]
            offsets = np.concatenate([[0], np.cumsum(some, dtype=np.int64)])
            tokens = pool[rng.integers(0, _POOL, offsets[-1], dtype=np.uint16)]
            tokens[offsets[1:] - 1] = EOS
            places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], some)
            yield cls(tokens, (places >= np.repeat(some // 3, some)).astype(np.int8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def positions(self) -> Int64Array:
        """int64 `[num_chats]`: positions of input, one less than tokens."""
        return np.diff(self.offsets) - 1

    @property
    def marked(self) -> Int64Array:
        """int64 `[num_tokens]`: token and mask in one number, so that one check covers both.

        The mask stands at the input that a target belongs to, as in packed rows, so it is one place earlier.
        """
        return marked(self.tokens, self.rolled_mask)

    @cached_property
    def rolled_mask(self) -> Int8Array:
        """int8 `[num_tokens]`: 1 at an input whose target the assistant says, as packed rows hold it."""
        rolled = np.append(self.mask[1:], np.int8(0))
        rolled[self.offsets[1:] - 1] = 0
        return rolled

    def examples(self) -> np.ndarray:
        """Return what Megatron-Bridge's chat data set makes of them: dictionaries of PyTorch tensors, in an array."""
        import torch

        tokens, mask = torch.from_numpy(self.tokens.astype(np.int64)), torch.from_numpy(self.mask != 0)
        bounds = self.offsets.tolist()
        return np.array(
            [
                {"input_ids": tokens[a:b].clone(), "loss_mask": mask[a:b].clone(), "metadata": {}}
                for a, b in zip(bounds, bounds[1:])
            ]
        )

    def rows(self, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the chats packed into rows of so many positions, best fit.

        Tokens, mask, offsets of the rows, starts of the chats within their rows, and offsets of those: what
        `PackedRows` holds, in its order.
        """
        packing = vl.pack(self.positions, capacity=capacity)
        ids = packing.document_ids
        sizes = np.diff(self.offsets)[ids]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        source = np.repeat(self.offsets[ids] - bounds[:-1], sizes) + np.arange(bounds[-1])
        offsets = bounds[packing.offsets]
        starts = bounds[:-1] - np.repeat(offsets[:-1], np.diff(packing.offsets))
        return self.tokens[source], self.rolled_mask[source], offsets, starts, packing.offsets


def chat_lengths(count: int, longest: int, seed: int = 0) -> Int64Array:
    """Return lengths of chats, drawn from the real set with replacement; log-normal ones where it isn't there."""
    known = dict(real_lengths(only=SET)).get(SET)
    if known is None:
        return lognormal_lengths(count, mean=309.0, longest=longest, seed=seed).astype(np.int64)
    drawn = np.random.default_rng(seed).choice(known, count).astype(np.int64)
    return np.clip(drawn, 1, longest)


def lengths_named() -> str:
    has_real = any(True for _ in real_lengths(only=SET))
    return f"lengths of {SET}" if has_real else "log-normal lengths, as the real sets aren't here"


def marked(tokens: np.ndarray, mask: np.ndarray) -> Int64Array:
    """Return int64 `[num_tokens]`: token and mask in one number."""
    return tokens.astype(np.int64) * 2 + (np.asarray(mask) != 0)
