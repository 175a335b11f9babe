"""What ranks tell each other while they prepare a round: so much of each lane that all can say what comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Exchange(Protocol):
    """Brings together what the ranks know of their lanes, in one run of a feed."""

    def all(self, key: str, mine: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the values of all lanes; waits until every rank has given its own.

        Args:
            key: the same on all ranks, and used once in a run.
            mine: a value for each lane of this rank, of numbers, texts, lists and mappings.
        """

    def close(self) -> None:
        """Let whoever waits in `all` give up with an error; called from another thread, where the feed is closed."""


Exchanges = Callable[[int], Exchange]
"""Opens the exchange of a run: the first has number 0, and every rank begins as many runs."""


class Solo:
    """The exchange of a process that has all lanes."""

    def __init__(self, _run: int = 0) -> None:
        """Begin a run."""

    def all(self, _key: str, mine: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return what is given, which is everything."""
        return mine

    def close(self) -> None:
        """Do nothing: nobody waits."""
