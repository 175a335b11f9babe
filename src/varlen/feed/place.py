"""Where a round begins: how far the input is claimed, and what waits in every lane; what a streaming state holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from varlen.errors import StateError
from varlen.feed.claims import Claimed, Print, as_claimed
from varlen.feed.lane import Counts, joined
from varlen.feed.record import from_record, to_record
from varlen.feed.state import ENDS, MOST
from varlen.pack.lengths import as_count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """Where a round begins."""

    number: int = 0
    step: int = 0
    claimed: Claimed = field(default_factory=Claimed)
    records: Sequence[Mapping[str, Any]] = ()
    """Of all lanes."""
    prints: Sequence[Print] = ()
    """Of rows that are given while they are read, to tell them when they are read again."""
    ends: Sequence[int] = ()
    """Numbers of epochs after which all that waits is packed, though more epochs follow, ascending: the data ended
    there when the packs before were made, and a state of that run goes on with more epochs."""

    @property
    def end(self) -> int | None:
        """The epochs after which all that waits is packed next; None for all epochs of the loader."""
        return next((end for end in self.ends if self.claimed.epoch < end), None)

    def to_at(self) -> dict[str, Any]:
        """Return it for a state."""
        return {
            "round": self.number,
            "step": self.step,
            "claimed": asdict(self.claimed),
            "lanes": list(self.records),
            **({"prints": [list(one) for one in self.prints]} if self.prints else {}),
            **({ENDS: list(self.ends)} if self.ends else {}),
        }


def beginning_of(at: Mapping[str, Any]) -> dict[str, Any]:
    """Return the place where the run of a place began.

    Args:
        at: of a state.
    """
    return {name: at[name] for name in (ENDS,) if name in at}


def place_of(at: Mapping[str, Any], lanes: int) -> Place:
    """Return where a round begins.

    Args:
        at: of a state; without all but `ends` where training begins.
        lanes: that there are.

    Raises:
        StateError: it is none of these lanes.
    """
    ends = _ends_of(at)
    if at == beginning_of(at):
        nothing = to_record(joined([]), Counts(), None, [0])
        return Place(records=[nothing] * lanes, ends=ends)
    try:
        number, step = (as_count(at[name], name, 0, MOST) for name in ("round", "step"))
        claimed, records = as_claimed(at["claimed"]), list(at["lanes"])
        prints = [_as_print(*one) for one in at.get("prints", ())]
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is no state of a loader: {type(error).__name__} {error}") from None
    if len(records) != lanes:
        raise StateError(f"the state has {len(records):,} lanes, this loader {lanes:,}")
    return Place(number=number, step=step, claimed=claimed, records=records, prints=prints, ends=ends)


def _as_print(block: Any, chunk: Any, told: Any, is_end: Any) -> Print:
    """Return a hash of a state.

    Raises:
        ValueError: it is none.
    """
    return as_count(block, "block", 0, MOST), as_count(chunk, "chunk", 0, MOST), str(told), bool(is_end)


def _ends_of(at: Mapping[str, Any]) -> list[int]:
    """Return the ends of a place.

    Raises:
        StateError: they are none.
    """
    try:
        return [as_count(end, ENDS, 1, MOST) for end in at.get(ENDS, ())]
    except (TypeError, ValueError) as error:
        raise StateError(f"this is no state of a loader: {type(error).__name__} {error}") from None


def check_place(at: Mapping[str, Any], lanes: int, seed: int | None, epochs: int | None) -> None:
    """Refuse a place where no round can begin, as far as that can be told without reading.

    Args:
        at: of a state; empty where training begins.
        lanes: that there are.
        seed: of the shuffle.
        epochs: of the loader; None for no end.

    Raises:
        StateError: it is none of these lanes, or was changed.
    """
    place = place_of(at, lanes)
    for record in place.records:
        from_record(record, seed)
    ends = list(place.ends)
    if ends != sorted(set(ends)) or (ends and epochs is not None and ends[-1] >= epochs):
        raise StateError(
            f"the state says that its run had ended after {ends} epochs, and this loader has epochs={epochs}; it was "
            "changed. Load it as it was saved, or an earlier one"
        )
