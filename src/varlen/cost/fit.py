"""Measured samples in, rate tables and curves out: how a machine's own kernels become `Hardware`.

A rate is fitted in two steps. First a saturating one, whose seconds per FLOP are a sum of four parts that can't be
negative: constant, by 1 / rows, by 1 / keys, and by both. Then what the machine does otherwise, a ratio at each
sample, is smoothed over neighbours on a grid of half octaves. So a few noisy samples give a sound table, and many
give the machine's own steps.
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

_REACH_OCTAVES: Final = 0.5
"""A sample counts exp(-1/2) as much where rows or keys are this many octaves away."""
_LEAST_TRUST: Final = 0.05
"""How many samples on the spot the saturating rate itself is worth, at least."""
_POINTS_AN_OCTAVE: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """Measured seconds of one kernel in one pass; a point measured again is a sample again; read-only."""

    rows: FloatArray
    """float64 `[num_samples]`: query rows of the MicroPack on one GPU."""
    keys: FloatArray
    """float64 `[num_samples]`: where its slices end, all of them at one key length: fewer keys than rows are a pack
    of several documents, which tells how short ones run. For matrix products 1."""
    flops: FloatArray
    """float64 `[num_samples]`: of one GPU; attention's backward pass counted at 2.5 times its forward pass."""
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
    # 1.48 makes a median deviation a standard one, pi / 2 the variance of a mean that of a median.
    single = (1.48 * float(np.median(np.abs(apart)))) ** 2 if apart.size else 0.0
    noise = 0.5 * math.pi * single / max(float(np.median(counts)) - 1.0, 1.0)
    return Samples(rows=rows, keys=keys, flops=flops, seconds=seconds), noise


def fit_table(samples: Samples) -> RateTable:
    """Fit attention's rate in one pass, on a grid over the rows and keys that were measured.

    Outside that grid the rate at its edge holds. More rows of equal keys never take less time.

    Cost: O(samples x grid).
    """
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


def fit_launch_s(measured_s: FloatArray, predicted_s: FloatArray) -> float:
    """Return the seconds by which layers take longer than their kernels: the median difference, at least 0.

    Args:
        measured_s: float64 `[num_samples]`: of whole layers.
        predicted_s: float64 `[num_samples]`: of the same by tables and curve, without launch time.
    """
    return max(float(np.median(np.asarray(measured_s) - np.asarray(predicted_s))), 0.0)


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
    """Return hardware with the rates of measured kernels, and all else as given."""
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
    """Return the mean absolute error of predictions, as a share of what was measured.

    Args:
        predicted: `[n]`.
        measured: `[n]`, above 0.

    >>> round(mape(np.array([1.0, 2.2]), np.array([1.0, 2.0])), 3)
    0.05
    """
    return float(np.mean(np.abs(predicted - measured) / measured))


def _grid(values: FloatArray) -> FloatArray:
    """Points from the least to the greatest value, in half octaves or less."""
    low, high = float(values.min()), float(values.max())
    steps = math.ceil(_POINTS_AN_OCTAVE * math.log2(high / low))
    return np.geomspace(low, high, steps + 1) if steps else np.array([low])


def _parts(rows: FloatArray, keys: FloatArray) -> FloatArray:
    """float64 `[4, n]`: what seconds per FLOP are a sum of, scaled to about 1."""
    few, short = rows.min() / rows, keys.min() / keys
    return np.stack([np.ones_like(rows), few, short, few * short])


def _fitted(samples: Samples, rows: FloatArray, keys: FloatArray) -> FloatArray:
    """Seconds per FLOP at rows and keys, float64 `[n]`."""
    points, noise = median_of_repeats(samples)
    measured = points.seconds / points.flops
    parts = _parts(np.append(points.rows, rows), np.append(points.keys, keys))
    weights = _not_negative(parts[:, : len(measured)] / measured)
    smooth = weights @ parts
    ratios = np.log(measured / smooth[: len(measured)])
    apart = np.log2(rows[:, None] / points.rows) ** 2 + np.log2(keys[:, None] / points.keys) ** 2
    near = np.exp(-0.5 * apart / _REACH_OCTAVES**2)
    # Ratios vary by the machine's own and by noise; the share of its own is how much of a ratio to believe.
    own = float(np.mean(ratios**2)) - noise
    trust = max(noise / own, _LEAST_TRUST) if own > 0 else math.inf
    fitted: FloatArray = smooth[len(measured) :] * np.exp(near @ ratios / (near.sum(axis=1) + trust))
    return fitted


def _not_negative(parts: FloatArray) -> FloatArray:
    """The weights of parts, none below 0, whose sum is nearest to 1 everywhere.

    Of least squares over every subset of the four parts, the best one without negative weights: the solution of
    Lawson & Hanson 1974, "Solving Least Squares Problems", chapter 23, found by looking at all fifteen.
    """
    best, best_error = np.zeros(len(parts)), math.inf
    for size in range(1, len(parts) + 1):
        for chosen in itertools.combinations(range(len(parts)), size):
            some = parts[list(chosen)]
            found = np.linalg.lstsq(some.T, np.ones(some.shape[1]), rcond=None)[0]
            error = float(((found @ some - 1.0) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(len(parts)), error
                best[list(chosen)] = found
    return best


def _never_less(rows: FloatArray, seconds: FloatArray) -> FloatArray:
    """Seconds per FLOP, `[..., G]`, raised where more rows would take less time than fewer."""
    raised: FloatArray = np.maximum.accumulate(seconds * rows, axis=-1) / rows
    return raised
