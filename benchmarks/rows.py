"""The rows of a result file: what was measured, and how a ratio and a verdict follow from it.

A file stores measurements and targets. Ratios and verdicts are computed when it is written and again when it
is read, so none of them can be written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Samples:
    """Seconds a call took in each round, by the clock on the wall and by the process's processor time."""

    wall_s: list[float]
    cpu_s: list[float]

    @property
    def median_s(self) -> float:
        return median(self.wall_s)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One side of a race."""

    name: str
    call: str
    """What was called with which settings, for a reader who wants to repeat it."""
    samples: Samples
    fill: float | None = None
    """Tokens over slots of the packs that came out, where packs came out."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """varlen and a peer on the same input, in alternating rounds."""

    section: str = ""
    """Filled in by whoever runs the section."""
    what: str
    ours: Contestant
    peer: Contestant
    tokens: int | None = None
    """Tokens that one call handles, where a rate says more than a time."""
    target: float | None = None
    """Times as fast as the peer that varlen must be; None where a row is only shown."""
    note: str = ""
    by_wall: bool = False
    """Both use all cores, so that what counts is when they are done."""

    @classmethod
    def of(
        cls,
        what: str,
        ours: tuple[str, Samples],
        theirs: tuple[str, str, Samples],
        fills: tuple[float | None, float | None] = (None, None),
        **more: Any,
    ) -> Race:
        """Say what was called and its samples, of the peer its name before; `more` is the rest."""
        mine = Contestant(name="varlen", call=ours[0], samples=ours[1], fill=fills[0])
        peer = Contestant(name=theirs[0], call=theirs[1], samples=theirs[2], fill=fills[1])
        return cls(what=what, ours=mine, peer=peer, **more)

    @property
    def ratio(self) -> float:
        """Times as fast as the peer: the median over rounds, in wall or processor time, whichever is less.

        Wall time alone would flatter varlen on a busy machine, where long calls lose their core more often
        than short ones. Where both use all cores it is what counts.
        """
        clocks = ("wall_s",) if self.by_wall else ("wall_s", "cpu_s")
        sides = self.peer.samples, self.ours.samples
        return min(
            median(a / b for a, b in zip(*(getattr(side, clock) for side in sides), strict=True))
            for clock in clocks
        )

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        is_as_full = self.ours.fill is None or self.peer.fill is None or self.ours.fill >= self.peer.fill
        return is_as_full and self.ratio >= self.target


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One figure that may not pass a limit."""

    section: str = ""
    what: str
    value: float
    unit: str
    """`s`, `GB`, `nats`, `packs`, `values`, `%` or `times`."""
    limit: float | None
    """The most that the value may be; None where a row is only shown."""
    limit_text: str = ""
    """How the limit comes about, where it isn't a plain number."""
    base: float | None = None
    """What the value is compared with, in the same unit."""
    group: str = ""
    """Rows of one group are shown as their worst."""
    samples: list[float] = field(default_factory=list)
    """Every measurement, where the value is one of several."""
    note: str = ""

    @classmethod
    def of_times(cls, what: str, seconds: list[float], limit: float | None, note: str = "") -> Limit:
        """The median of some times."""
        return cls(what=what, value=median(seconds), unit="s", limit=limit, samples=seconds, note=note)

    @classmethod
    def of_peaks(cls, what: str, peak_bytes: list[float], limit_gb: float | None, note: str = "") -> Limit:
        """The most memory of some runs."""
        peaks = [peak / 1e9 for peak in peak_bytes]
        return cls(what=what, value=max(peaks), unit="GB", limit=limit_gb, samples=peaks, note=note)

    @property
    def met(self) -> bool | None:
        return None if self.limit is None else self.value <= self.limit


Row = Race | Limit


@dataclass(frozen=True)
class Step:
    """Something to measure; nothing is imported or drawn before `run` is called."""

    title: str
    """For the progress bar."""
    run: Callable[[], list[Row]]

    @classmethod
    def absent(cls, title: str, why: str) -> Step:
        """What can't be measured here."""

        def run() -> list[Row]:
            raise RuntimeError(why)

        return cls(title, run)


def to_json(row: Row) -> dict[str, Any]:
    """Return a row as plain data, with its ratio and verdict for readers of the file."""
    plain = {"kind": type(row).__name__.lower(), **asdict(row), "met": row.met}
    if isinstance(row, Race):
        plain["ratio"] = row.ratio
    return plain


def from_json(plain: dict[str, Any]) -> Row:
    """Read a row back; its stored ratio and verdict are left aside and follow anew from the measurements."""
    stored = {key: value for key, value in plain.items() if key not in ("kind", "met", "ratio")}
    if plain["kind"] == "limit":
        return Limit(**stored)
    for side in ("ours", "peer"):
        stored[side] = Contestant(**{**stored[side], "samples": Samples(**stored[side]["samples"])})
    return Race(**stored)
