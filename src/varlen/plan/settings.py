"""The ways to compose a rank that the planner tries, and which it tries next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from varlen.plan.compose import Grading
from varlen.plan.search import Search


@dataclass(frozen=True, slots=True)
class Sharing:
    """How shared documents are cut."""

    size: float
    """A slice over a MicroPack's mean work."""
    mixes: bool
    """Whether what is left of a MicroPack holds documents of the rank alone."""


SHARINGS = (
    Sharing(1.0, mixes=True),
    Sharing(0.7, mixes=True),
    Sharing(0.5, mixes=True),
    Sharing(1.5, mixes=True),
    Sharing(2.0, mixes=True),
    Sharing(1.0, mixes=False),
)
"""Cuts of shared documents that are tried."""
GRADINGS = (
    Grading(heads=1, tails=1, smallest=0.2),
    Grading(),
    Grading(heads=2, tails=2, smallest=0.1),
    Grading(heads=1, smallest=0.2),
    Grading(heads=2, smallest=0.1),
)
"""Small MicroPacks that are tried; their numbers count in a pipeline's stages."""
EVEN = 1
"""The grading that leaves all MicroPacks as large."""
_FIRST_TRIED = 6
"""MicroPacks per stage that are tried first; the search climbs from there."""
_FAR = ((1, 2, 4, 7), (0, 3), (1, 0, 3), (False, True))
"""Places from which a thorough search climbs too: of each part of a setting."""


class Setting(NamedTuple):
    """One way to compose and run a rank."""

    size: int
    """Place in `Search.sizes`."""
    grading: int = 0
    """Place in `GRADINGS`."""
    sharing: int = 0
    """Place in `SHARINGS`."""
    forward_first: bool = False
    """As `simulate.dispatch.dispatch`."""
    whole: bool = False
    """Each document whole, in a MicroPack of its own, whatever the size: where memory holds hardly more than one."""


def first_setting(search: Search) -> Setting:
    """Return where the search begins.

    Args:
        search: what may be tried.
    """
    sizes = search.sizes
    return Setting(min(range(len(sizes)), key=lambda place: abs(sizes[place] - _FIRST_TRIED)))


def neighbours(
    best: Setting, finest: int, search: Search, *, shares: bool, is_full: bool
) -> Iterator[Setting]:
    """Yield the settings that differ from one in one thing, the most promising first.

    Args:
        best: that one.
        finest: the last size.
        search: what may be tried.
        shares: whether there are documents that ranks share.
        is_full: whether memory is what holds the best back.
    """
    for step in (-1, 1):
        if 0 <= best.size + step <= finest:
            yield best._replace(size=best.size + step)
    if shares:
        yield from (best._replace(sharing=place) for place in range(len(SHARINGS)))
    if search.grades:
        yield from (best._replace(grading=place) for place in range(len(GRADINGS)))
    if search.orders:
        yield best._replace(forward_first=not best.forward_first)
    if is_full and not best.whole:
        yield best._replace(whole=True)


def far_settings(finest: int, search: Search, *, shares: bool) -> Iterator[Setting]:
    """Yield settings far from each other, for a step that is slow at the one to which the search climbed.

    Args:
        finest: the last size.
        search: what may be tried.
        shares: whether there are documents that ranks share.
    """
    sizes, gradings, sharings, orders = _FAR
    for size, grading, sharing, forward_first in itertools.product(
        [place for place in sizes if place <= finest],
        gradings if search.grades else gradings[:1],
        sharings if shares else (0,),
        orders if search.orders else (False,),
    ):
        yield Setting(size, grading, sharing, forward_first)
