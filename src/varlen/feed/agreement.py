"""What ranks tell each other, through the key-value store of the training job and never through its collectives.

Values are pure functions of the data and the settings, so a rank that does a stretch again finds there what it found
the first time, and says itself what it said.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

from varlen.counts import many
from varlen.errors import StalledError
from varlen.feed.state import TOKENIZER

_FIRST_S, _MOST_S = 0.001, 0.05
"""Pauses between two looks."""
PLAN = "plan"
"""The key of what isn't told to all ranks: a step's lengths, of which its plan comes back."""
_KEPT = 512
"""Keys that each rank leaves in the store: more than ranks can be apart."""
_SHORT_S = 30.0
_numbers: dict[str, itertools.count[int]] = {}


def job_store() -> Any:
    """Return the store of the process group of this job, on a connection of its own; None without a group."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    clone = getattr(store, "clone", None)  # whoever waits on a connection keeps others from using it
    return store if clone is None else clone()


def name_of(belongs_to: Mapping[str, Any], prefix: str = "") -> str:
    """Return the name under which the loaders of these settings meet, one of each rank; it differs with each call."""
    same = {key: value for key, value in belongs_to.items() if key != TOKENIZER}  # whose folder may differ
    key = prefix + hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]
    return f"varlen/{key}/{next(_numbers.setdefault(key, itertools.count()))}"


class Agreement:
    """Brings together what the ranks know."""

    def __init__(self, store: Any, name: str, rank: int, ranks: int, deadline_s: float) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._deadline_s = deadline_s
        self._said: deque[str] = deque()
        self._closed = threading.Event()
        store.set_timeout(timedelta(seconds=_SHORT_S))

    def all(self, key: str, mine: Mapping[int, Any]) -> dict[int, Any]:
        """Return the values of all ranks; waits until every rank has given its own."""
        # What was said first stands, also for who comes back, and for peers that share a data-parallel rank.
        said = self._store.compare_set(self._key(key, self._rank), "", json.dumps(list(mine.items())))
        self._forget(key)
        found: dict[int, Any] = {int(lane): value for lane, value in json.loads(said)}
        begun, pause = time.monotonic(), _FIRST_S
        missing = [rank for rank in range(self._ranks) if rank != self._rank]
        while missing:
            there = [rank for rank in missing if self._store.check([self._key(key, rank)])]
            for rank in there:
                found.update(
                    (int(lane), value) for lane, value in json.loads(self._store.get(self._key(key, rank)))
                )
            missing = [rank for rank in missing if rank not in there]
            if not missing:
                break
            waited = time.monotonic() - begun
            if waited >= self._deadline_s or self._closed.is_set():
                raise StalledError(self._whom(missing, key, waited))
            time.sleep(pause)
            pause = _FIRST_S if there else min(2 * pause, _MOST_S)
        return found

    def close(self) -> None:
        """Have whoever waits give up."""
        self._closed.set()

    def _key(self, key: str, rank: int) -> str:
        return f"{self._name}/{key}/{rank}"

    def _forget(self, key: str) -> None:
        """Remove what nobody can need any more."""
        if key not in self._said:
            self._said.append(key)
        if len(self._said) > _KEPT:
            self._store.delete_key(self._key(self._said.popleft(), self._rank))

    def _whom(self, missing: list[int], key: str, waited: float) -> str:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        return (
            f"data-parallel rank {self._rank} has waited {waited:,.0f} s for {many(len(missing), 'rank')} of "
            f"{self._ranks:,} ({shown}) at {key}; either they are gone, or their loaders have other settings or were "
            "made in another order"
        )


# What ranks tell each other while they prepare a round: so much of each lane that all can say what comes next.


class Exchange(Protocol):
    """Brings together what the ranks know of their lanes, in one run of a feed."""

    def all(self, key: str, mine: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the values of all lanes; waits until every rank has given its own."""

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
