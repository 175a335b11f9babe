"""The ways of feeding the model that the demo compares: an order of documents, and a layout of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from varlen.report.figures import Role

OrderName = Literal["random", "bucketed", "packed"]
"""Which documents share a step; see `orders`."""

ORDERS: tuple[OrderName, ...] = ("random", "bucketed", "packed")

LayoutName = Literal["padded_with_mask", "padded", "flat", "rows", "rows_without_boundaries"]
"""How a step becomes arrays; see `layouts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way of feeding the model."""

    name: str
    title: str
    role: Role
    order: OrderName
    layout: LayoutName
    same_loss_as: str | None = None
    """The method that trains the same batches in a faster layout, whose loss is this one's too."""


METHODS = (
    Method(
        name="padded_with_mask",
        title="padded, with mask",
        role="baseline",
        order="random",
        layout="padded_with_mask",
        same_loss_as="flattened",
    ),
    Method(
        name="padded",
        title="padded, no mask",
        role="baseline",
        order="random",
        layout="padded",
        same_loss_as="flattened",
    ),
    Method(name="bucketed", title="length buckets", role="baseline", order="bucketed", layout="padded"),
    Method(name="flattened", title="flattened", role="varlen", order="random", layout="flat"),
    Method(name="packed", title="packed windows", role="varlen", order="packed", layout="rows"),
    Method(
        name="without_boundaries",
        title="packed, no boundaries",
        role="control",
        order="packed",
        layout="rows_without_boundaries",
    ),
)
"""Random batches padded, twice; buckets, the baseline that pads least; varlen's two ways; and the control."""

FASTEST_LAYOUT: dict[LayoutName, LayoutName] = {"padded_with_mask": "flat", "padded": "flat"}
"""Layouts with the same loss, for runs in which only the loss counts."""
