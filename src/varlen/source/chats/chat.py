"""A chat: messages in the one form, and what the author says of their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """The messages of a row, and which of them are trained on."""

    messages: list[dict[str, Any]]
    off: frozenset[int] = frozenset()
    """Index of each message whose labels its author switches off."""
    is_plain: bool = False
    """All are known to be of role and text alone."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """What the labels of a message weigh, by its index, where that is neither 0 nor 1."""

    def behind(self, number: int) -> tuple[frozenset[int], dict[int, float]]:
        """Return `off` and `weights` of the same messages behind some others.

        Args:
            number: of these.
        """
        return (
            frozenset(index + number for index in self.off),
            {index + number: weight for index, weight in self.weights.items()},
        )
