"""Where a round begins: how far the input is claimed, and what waits in every lane; what a streaming state holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from varlen.errors import StateError
from varlen.feed.claims import Claimed, as_claimed
from varlen.feed.lane import Counts, joined
from varlen.feed.record import from_record, to_record
from varlen.feed.state import MOST
from varlen.pack.lengths import as_count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """Where a round begins."""

    number: int = 0
    step: int = 0
    claimed: Claimed = field(default_factory=Claimed)
    records: Sequence[Mapping[str, Any]] = ()
    """Of all lanes."""

    def to_at(self) -> dict[str, Any]:
        """Return it for a state."""
        return {
            "round": self.number,
            "step": self.step,
            "claimed": asdict(self.claimed),
            "lanes": list(self.records),
        }


def place_of(at: Mapping[str, Any], lanes: int) -> Place:
    """Return where a round begins.

    Args:
        at: of a state; empty where training begins.
        lanes: that there are.

    Raises:
        StateError: it is none of these lanes.
    """
    if not at:
        nothing = to_record(joined([]), Counts(), None, [0])
        return Place(records=[nothing] * lanes)
    try:
        number, step = (as_count(at[name], name, 0, MOST) for name in ("round", "step"))
        claimed, records = as_claimed(at["claimed"]), list(at["lanes"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is no state of a loader: {type(error).__name__} {error}") from None
    if len(records) != lanes:
        raise StateError(f"the state has {len(records):,} lanes, this loader {lanes:,}")
    return Place(number=number, step=step, claimed=claimed, records=records)


def check_place(at: Mapping[str, Any], lanes: int, seed: int | None) -> None:
    """Refuse a place where no round can begin, as far as that can be told without reading.

    Args:
        at: of a state; empty where training begins.
        lanes: that there are.
        seed: of the shuffle.

    Raises:
        StateError: it is none of these lanes, or was changed.
    """
    for record in place_of(at, lanes).records:
        from_record(record, seed)
