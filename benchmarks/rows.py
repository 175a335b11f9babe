"""The rows of a result file: what was measured, and how a ratio and a verdict follow from it.

A file stores measurements and targets. Ratios and verdicts are computed when it is written and again when it
is read, so none of them can be written by hand.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.stopwatch import Samples


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One side of a race: what was called, how long each round took, and how good the result was."""

    name: str
    call: str
    """What was called with which settings, for a reader who wants to repeat it."""
    samples: Samples
    fill: float | None = None
    """Tokens over slots of the packs that came out, where packs came out."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """varlen and a peer on the same input, in alternating rounds."""

    section: str
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

    @property
    def ratio(self) -> float:
        """Times as fast as the peer: the median over rounds, in wall or processor time, whichever is less.

        Wall time alone would flatter varlen on a busy machine, where long calls lose their core more often
        than short ones. Where both use all cores it is what counts.
        """
        if self.by_wall:
            return _median_ratio(self.peer.samples.wall_s, self.ours.samples.wall_s)
        return min(
            _median_ratio(self.peer.samples.wall_s, self.ours.samples.wall_s),
            _median_ratio(self.peer.samples.cpu_s, self.ours.samples.cpu_s),
        )

    @property
    def met(self) -> bool | None:
        """Whether the target is reached at equal or better fill; None without a target."""
        if self.target is None:
            return None
        is_as_full = self.ours.fill is None or self.peer.fill is None or self.ours.fill >= self.peer.fill
        return is_as_full and self.ratio >= self.target


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One figure that may not pass a limit."""

    section: str
    what: str
    value: float
    unit: str
    """`s`, `GB`, `nats`, `packs`, `values` or `times`."""
    limit: float | None
    """The most that the value may be; None where a row is only shown."""
    limit_text: str = ""
    """How the limit comes about, where it isn't a plain number."""
    base: float | None = None
    """What the value is compared with, in the same unit."""
    group: str = ""
    """Rows of one group are shown as their worst."""
    samples: list[float] = field(default_factory=list)
    """Every measurement, where the value is the median of several."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value keeps to the limit; None without one."""
        return None if self.limit is None else self.value <= self.limit


Row = Race | Limit


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
        contestant = dict(stored[side])
        contestant["samples"] = Samples(**contestant["samples"])
        stored[side] = Contestant(**contestant)
    return Race(**stored)


def _median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Return the median of the ratios of each round."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))
