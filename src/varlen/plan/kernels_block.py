"""What the tasks of a block of ranks take, as a numba kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from varlen.cost.rates import (
    FORWARD_HEAD,
    FORWARD_LAYER,
    INPUT_HEAD,
    INPUT_LAYER,
    WEIGHT_HEAD,
    WEIGHT_LAYER,
)
from varlen.jit import compiled

Float = NDArray[np.float64]


@compiled
def task_seconds(
    ahead: Float, back: Float, layers: Float, heads: Float, gathers: Float, splits: bool, head_at_once: bool
) -> Any:
    """Return what tasks take the slowest rank, float64 `[chunks, MicroPacks]`: forward, backward, weight gradients.

    Args:
        ahead: float64 `[ranks, forward MicroPacks, 7]`: priced in an average layer.
        back: float64 `[ranks, backward MicroPacks, 7]`: in the order in which they run.
        layers: float64 `[chunks]`.
        heads: float64 `[chunks]`: 1 where the vocabulary head is.
        gathers: float64 `[3, chunks]`: seconds that a forward, backward and weight-gradient task takes at least.
        splits: whether weight gradients are tasks of their own; else theirs are 0.
        head_at_once: whether the head's forward runs in backward tasks.
    """
    chunks, ranks = layers.size, ahead.shape[0]
    forward, backward = np.empty((chunks, ahead.shape[1])), np.empty((chunks, back.shape[1]))
    weight = np.zeros((chunks, back.shape[1]))
    for chunk in range(chunks):
        many, head = layers[chunk], heads[chunk]
        forward[chunk], backward[chunk] = gathers[0, chunk], gathers[1, chunk]
        if splits:
            weight[chunk] = gathers[2, chunk]
        for rank in range(ranks):
            for pack in range(ahead.shape[1]):
                taken = many * ahead[rank, pack, FORWARD_LAYER]
                if not head_at_once:
                    taken = taken + head * ahead[rank, pack, FORWARD_HEAD]
                forward[chunk, pack] = max(taken, forward[chunk, pack])
            for pack in range(back.shape[1]):
                one = back[rank, pack]
                inputs = many * one[INPUT_LAYER] + head * one[INPUT_HEAD]
                weights = many * one[WEIGHT_LAYER]
                if head_at_once:
                    inputs = inputs + head * (one[FORWARD_HEAD] + one[WEIGHT_HEAD])
                else:
                    weights = weights + head * one[WEIGHT_HEAD]
                if splits:
                    weight[chunk, pack] = max(weights, weight[chunk, pack])
                else:
                    inputs = inputs + weights
                backward[chunk, pack] = max(inputs, backward[chunk, pack])
    return forward, backward, weight
