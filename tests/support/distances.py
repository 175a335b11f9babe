"""How far several processes are from one, tensor by tensor."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

EXACT = 1e-12
"""Relative, of float64: what several processes and one may differ by."""


def largest(distances: Iterable[float]) -> float:
    """The largest of distances, of which 0 is the least; infinite where one is no number, which `max` passes by."""
    return max((math.inf if math.isnan(distance) else distance for distance in distances), default=0.0)


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor, relative to that tensor.

    A gradient that is 0 comes out as 0 on one processor, and as a rounding of what cancels out on another: what is
    less than float64's epsilon of the largest tensor is exact.
    """
    size = max((float(wanted[n].norm()) for n in found), default=0.0)
    least = max(size * torch.finfo(torch.float64).eps / EXACT, 1e-300)
    return largest(float((found[n] - wanted[n]).norm() / wanted[n].norm().clamp_min(least)) for n in found)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], most: float = EXACT) -> None:
    assert found.keys() == wanted.keys()
    assert furthest(found, wanted) <= most


@dataclass
class Distances:
    """How far several processes are from one, as the largest relative difference of each kind."""

    loss: float = 0.0
    documents: float = 0.0
    evaluated: float = 0.0
    """Losses of steps, documents and labels by the forward pass alone."""
    gradients: float = 0.0
    """Of the first step, from equal weights."""
    later_gradients: float = 0.0
    """From weights that an optimizer has moved."""
    norm: float = 0.0
    weights: float = 0.0
    rounding: float = 0.0
    """How far the uncut model is from itself with weights that differ by a rounding, where a step is further off than
    rounding explains: norms and rotations compute in float32, and what lies between two of its numbers may go to
    either."""

    def saw(self, name: str, distance: float) -> None:
        setattr(self, name, largest((getattr(self, name), distance)))


def whole_of(gradients: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in gradients.items()}
