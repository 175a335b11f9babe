"""A mixture: several sources of documents, and what share of the training each is to have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from varlen.errors import SettingError
from varlen.files.paths import Data

Unit = Literal["tokens", "documents"]
Until = Literal["first", "all", "endless"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources and their shares; a source for `vl.PackedLoader`.

    The next document comes from a source that isn't ahead of its share, so that each stays within one longest
    document of it all the time. Every source is shuffled by itself, has epochs of its own, and gives each of its
    documents once in each of them; what comes again is counted as `repeated`.

    Args:
        sources: token stores or documents, by name.
        weights: of each source, by name: positive numbers, of which only the proportions count.
        unit: shares of "tokens", or of "documents".
        until: the end: where the "first" source is over, where "all" have been read once, or "endless".

    Raises:
        SettingError: no source, names that don't match, or a weight that is no positive number.

    >>> Mixture({"web": "web/*.jsonl", "code": "code-store"}, {"web": 3, "code": 1}).shares
    (0.75, 0.25)
    """

    sources: Mapping[str, Data]
    weights: Mapping[str, float]
    unit: Unit = "tokens"
    until: Until = "first"

    def __post_init__(self) -> None:
        if not isinstance(self.sources, Mapping) or not self.sources:
            raise SettingError(
                'a mixture takes sources by name, such as {"web": "web/*.jsonl", "code": "code-store"}'
            )
        if not isinstance(self.weights, Mapping) or set(self.weights) != set(self.sources):
            raise SettingError(
                f"a mixture takes a weight for each source ({_listed(self.sources)}), got {_listed(self.weights)}"
            )
        for name, weight in self.weights.items():
            is_number = isinstance(weight, Real) and not isinstance(weight, bool)
            if not is_number or not (math.isfinite(weight) and weight > 0):
                raise SettingError(f"the weight of {name} must be a positive number, got {weight!r}")
        for name, value, known in (
            ("unit", self.unit, get_args(Unit)),
            ("until", self.until, get_args(Until)),
        ):
            if value not in known:
                raise SettingError(f"{name} must be one of {', '.join(known)}; got {value!r}")

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each source, in their order; they add up to 1."""
        whole = math.fsum(float(weight) for weight in self.weights.values())
        return tuple(float(self.weights[name]) / whole for name in self.sources)


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) if isinstance(names, Mapping | Sequence) else type(names).__name__
