"""FLOPs of slices and steps: what the hardware computes, and apart from it what a model needs, for MFU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from varlen.cost.shape import ModelShape
from varlen.errors import SettingError
from varlen.step_plan import Recompute
from varlen.types import FloatArray

BACKWARD_RATIO = 2.5
"""Attention's backward pass has five matrix products where the forward pass has two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs of a whole step on all GPUs."""

    model: float
    """Forward, and twice that backward: what MFU counts (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    Causal attention counts the pairs that are seen."""
    hardware: float
    """What is computed: attention's backward pass at 2.5 times its forward pass, and recomputation."""
    attention: float
    """Those of `hardware` that attention takes."""


def pairs_of(starts: FloatArray, stops: FloatArray, window: int = 0) -> FloatArray:
    """Return how many keys the queries of slices see in all, float64 `[num_slices]`: query t sees min(t+1, window).

    Args:
        starts: `[num_slices]`, first tokens.
        stops: `[num_slices]`, past the last tokens.

    >>> pairs_of(np.array([2.0]), np.array([4.0])).tolist()
    [7.0]
    """
    whole: FloatArray = (stops * (stops + 1.0) - starts * (starts + 1.0)) / 2.0
    if window <= 0:
        return whole
    inside = np.minimum(stops, window)
    first = np.minimum(starts, inside)
    near: FloatArray = (inside * (inside + 1.0) - first * (first + 1.0)) / 2.0
    far: FloatArray = (stops - np.maximum(starts, inside)) * float(window)
    return near + far


def slice_flops(model: ModelShape, starts: npt.ArrayLike, stops: npt.ArrayLike) -> FloatArray:
    """Return FLOPs of slices without recomputation, float64 `[num_slices, 2]`: forward and backward.

    Per layer 2·heads·(head_dim + value_head_dim) a pair and 2 a linear parameter and row, and the vocabulary head;
    backward 2.5 and 2 times that.

    Args:
        starts: `[num_slices]`.
        stops: `[num_slices]`.
    """
    attention, linear = _forward(model, np.asarray(starts, np.float64), np.asarray(stops, np.float64))
    return np.stack([attention + linear, BACKWARD_RATIO * attention + 2.0 * linear], axis=-1)


def step_flops(
    model: ModelShape, lengths: npt.ArrayLike, recompute: Recompute = "none", recompute_share: float = 1.0
) -> Flops:
    """Return FLOPs of training on whole documents once.

    Args:
        lengths: `[num_documents]`.
    """
    stops = np.asarray(lengths, np.float64)
    each, products = _forward(model, np.zeros_like(stops), stops)
    attention, linear = float(each.sum()), float(products.sum())
    head = 2.0 * model.head_parameters * float(stops.sum())
    again = recompute_share if recompute == "full" else 0.0
    attended = attention * (1.0 + BACKWARD_RATIO + again)
    return Flops(
        model=3.0 * (attention + linear),
        hardware=attended + 3.0 * linear + again * (linear - head),
        attention=attended,
    )


def mfu(flops: Flops, seconds: float, num_gpus: int, peak_tflops: float) -> float:
    """Return the share of the GPUs' peak that a model's own FLOPs took."""
    if not (seconds > 0 and num_gpus > 0 and peak_tflops > 0):
        raise SettingError(
            f"MFU of {seconds!r} s on {num_gpus!r} GPUs of {peak_tflops!r} TFLOP/s; all must be above 0"
        )
    return flops.model / (seconds * num_gpus * peak_tflops * 1e12)


def _forward(model: ModelShape, starts: FloatArray, stops: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Forward FLOPs of attention and of matrix products, all layers and the head, float64 `[num_slices]` each."""
    per_pair = 2.0 * model.heads * (model.head_dim + model.value_head_dim)
    seen = pairs_of(starts, stops) * (model.layers - model.windowed_layers)
    seen += pairs_of(starts, stops, model.window) * model.windowed_layers
    weights = model.linear_parameters_per_layer * model.layers + model.head_parameters
    return per_pair * seen, 2.0 * weights * (stops - starts)
