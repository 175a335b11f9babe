"""Fit rate tables and curves of `Hardware` to measurements of a machine's kernels.

A rate is fitted in two steps. First, seconds per FLOP are fitted by a sum of four terms with non-negative weights:
constant, 1 / rows, 1 / keys, and their product. Then the ratio of measured to fitted is smoothed over neighbouring
samples on a grid of half octaves. So a few noisy samples give a plausible table, and many reproduce the machine's
steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from varlen.cost.hardware import Hardware, RateCurve, RateTable
from varlen.errors import SettingError
from varlen.types import FloatArray

# Standard deviation of the Gaussian weight of samples, in octaves of rows or keys.
_REACH_OCTAVES: Final = 0.5
_LEAST_TRUST: Final = 0.05  # least weight of the first fit, relative to one sample at the same point
_POINTS_AN_OCTAVE: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """Measured seconds of one kernel in one pass, repeats included; read-only."""

    rows: FloatArray
    """float64 `[num_samples]`: query rows of the MicroPack on one GPU."""
    keys: FloatArray
    """float64 `[num_samples]`: key length at the end of all its slices; fewer keys than rows are a pack of several
    documents. 1 for matrix products."""
    flops: FloatArray
    """float64 `[num_samples]`: on one GPU; attention's backward pass counts 2.5 times its forward pass."""
    seconds: FloatArray
    """float64 `[num_samples]`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            array = np.array(getattr(self, field.name), np.float64)
            wrong = np.flatnonzero(~(np.isfinite(array) & (array > 0)).ravel())
            if array.ndim != 1 or array.shape != np.shape(self.rows) or not array.size:
                raise SettingError(
                    f"samples need rows, keys, flops and seconds of one length of at least 1; "
                    f"{field.name} has shape {array.shape}, rows {np.shape(self.rows)}"
                )
            if wrong.size:
                raise SettingError(
                    f"{field.name} of sample {wrong[0]:,} is {float(array[wrong[0]])!r}; samples must be above 0 "
                    f"({wrong.size:,} of {array.size:,} aren't)"
                )
            array.flags.writeable = False
            object.__setattr__(self, field.name, array)


def median_of_repeats(samples: Samples) -> tuple[Samples, float]:
    """Return one sample for each point (rows, keys, FLOPs) with the median of its seconds, and the noise."""
    points = np.stack([samples.rows, samples.keys, samples.flops], axis=1)
    distinct, which, counts = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    which = which.ravel()
    seconds = np.array([np.median(samples.seconds[which == point]) for point in range(len(distinct))])
    rows, keys, flops = distinct.T
    apart = np.log(samples.seconds / seconds[which])[counts[which] > 1]
    # 1.48 converts a median to a standard deviation; pi / 2 is the variance of a median over that of a mean.
    single = (1.48 * float(np.median(np.abs(apart)))) ** 2 if apart.size else 0.0
    noise = 0.5 * math.pi * single / max(float(np.median(counts)) - 1.0, 1.0)
    return Samples(rows=rows, keys=keys, flops=flops, seconds=seconds), noise


def fit_table(samples: Samples) -> RateTable:
    """Fit attention's rate in one pass, on a grid over the measured rows and keys; more rows never take less time."""
    rows, keys = _grid(samples.rows), _grid(samples.keys)
    seconds = _fitted(samples, np.repeat(rows, len(keys)), np.tile(keys, len(rows)))
    return RateTable(
        query_rows=rows,
        key_lengths=keys,
        tflops=1e-12 / _never_less(rows, seconds.reshape(len(rows), len(keys)).T).T,
    )


def fit_curve(samples: Samples) -> RateCurve:
    """Fit the rate of matrix products in one pass."""
    if np.unique(samples.keys).size > 1:
        raise SettingError(
            f"matrix products have no keys, but samples of {np.unique(samples.keys).size} key lengths were given; "
            "give keys of 1, or fit attention by fit_table"
        )
    rows = _grid(samples.rows)
    seconds = _fitted(samples, rows, np.full(len(rows), samples.keys[0]))
    return RateCurve(rows=rows, tflops=1e-12 / _never_less(rows, seconds))


def calibrated(
    hardware: Hardware,
    *,
    attention: tuple[Samples, Samples],
    gemm: Samples,
    gemm_backward: Samples | None = None,
    heads: int,
    launch_s: float = 0.0,
    name: str = "this machine",
    source: str,
) -> Hardware:
    """Return hardware with the rates of measured kernels."""
    return dataclasses.replace(
        hardware,
        name=name,
        source=source,
        attention=(fit_table(attention[0]), fit_table(attention[1])),
        gemm=fit_curve(gemm),
        gemm_backward=None if gemm_backward is None else fit_curve(gemm_backward),
        launch_s=launch_s,
        measured_heads=heads,
    )


def mape(predicted: FloatArray, measured: FloatArray) -> float:
    """Return the mean absolute error of predictions, as a share of the measured values.

    >>> round(mape(np.array([1.0, 2.2]), np.array([1.0, 2.0])), 3)
    0.05
    """
    return float(np.mean(np.abs(predicted - measured) / measured))


def _grid(values: FloatArray) -> FloatArray:
    """Return points from the least to the greatest value, in steps of at most half an octave."""
    low, high = float(values.min()), float(values.max())
    steps = math.ceil(_POINTS_AN_OCTAVE * math.log2(high / low))
    return np.geomspace(low, high, steps + 1) if steps else np.array([low])


def _parts(rows: FloatArray, keys: FloatArray) -> FloatArray:
    """Return the four terms of seconds per FLOP, scaled to about 1; float64 `[4, n]`."""
    few, short = rows.min() / rows, keys.min() / keys
    return np.stack([np.ones_like(rows), few, short, few * short])


def _fitted(samples: Samples, rows: FloatArray, keys: FloatArray) -> FloatArray:
    """Return seconds per FLOP at rows and keys, float64 `[n]`, none below the least that was measured."""
    points, noise = median_of_repeats(samples)
    measured = points.seconds / points.flops
    parts = _parts(np.append(points.rows, rows), np.append(points.keys, keys))
    weights = _not_negative(parts[:, : len(measured)] / measured)
    smooth = weights @ parts
    ratios = np.log(measured / smooth[: len(measured)])
    apart = np.log2(rows[:, None] / points.rows) ** 2 + np.log2(keys[:, None] / points.keys) ** 2
    near = np.exp(-0.5 * apart / _REACH_OCTAVES**2)
    # Shrink ratios by noise over the machine's own variance (what is left of their variance without noise).
    own = float(np.mean(ratios**2)) - noise
    trust = max(noise / own, _LEAST_TRUST) if own > 0 else math.inf
    fitted = smooth[len(measured) :] * np.exp(near @ ratios / (near.sum(axis=1) + trust))
    capped: FloatArray = np.maximum(fitted, measured.min())
    return capped


def _not_negative(parts: FloatArray) -> FloatArray:
    """Return non-negative weights of parts with which their sum is nearest to 1 everywhere.

    This is the non-negative least-squares solution (Lawson & Hanson 1974, "Solving Least Squares Problems", chapter
    23), found by trying all fifteen subsets of the four parts.
    """
    best, best_error = np.zeros(len(parts)), math.inf
    for size in range(1, len(parts) + 1):
        for chosen in itertools.combinations(range(len(parts)), size):
            some = parts[list(chosen)]
            weights = np.linalg.lstsq(some.T, np.ones(some.shape[1]), rcond=None)[0]
            error = float(((weights @ some - 1.0) ** 2).sum())
            if (weights >= 0).all() and error < best_error:
                best, best_error = np.zeros(len(parts)), error
                best[list(chosen)] = weights
    return best


def _never_less(rows: FloatArray, seconds: FloatArray) -> FloatArray:
    """Raise seconds per FLOP, `[..., G]`, where more rows would take less time than fewer."""
    raised: FloatArray = np.maximum.accumulate(seconds * rows, axis=-1) / rows
    return raised
