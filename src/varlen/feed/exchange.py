"""Exchanges between the ranks of a loader, through the job's key-value store and never through its collectives.

Values are pure functions of the data and the settings. So a rank that repeats a stretch finds the values that it
found the first time, and writes what it wrote.
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


class Exchange(Protocol):
    """Exchanges values by lane or rank, in one run of a feed."""

    def all(self, key: str, mine: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the values of all lanes; waits until every rank has given its own."""

    def close(self) -> None:
        """Let a thread that waits in `all` fail; called from another thread, which closes the feed."""


OpenExchange = Callable[[], Exchange]
"""Opens the exchange of the run that a feed begins."""
OpenNumbered = Callable[[int], Exchange]
"""Opens the exchange of a run by its number, of which every rank begins as many; 0 while the loader is made."""
PLAN = "plan"
"""A key that isn't exchanged among ranks: it sends the lengths of a step, and returns the pieces that its plan gives
this rank."""


class Solo:
    """The exchange of a single process, which has all lanes."""

    def all(self, _key: str, mine: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return what was given."""
        return mine

    def close(self) -> None:
        """Do nothing: no thread waits."""


# Exchanges through the job's store.

_FIRST_S, _MOST_S = 0.001, 0.05
"""Shortest and longest pause between two checks of the store."""
_KEPT = 512
"""Keys that each rank keeps in the store; ranks are never further apart."""
_SHORT_S = 30.0
_numbers: dict[str, itertools.count[int]] = {}


def job_store() -> Any:
    """Return the store of the job's process group, on a new connection; None without a process group."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    clone = getattr(store, "clone", None)  # a wait blocks the other users of a connection
    return store if clone is None else clone()


def name_of(belongs_to: Mapping[str, Any], prefix: str = "") -> str:
    """Return the name under which the loaders of these settings meet, one of each rank; it differs with each call."""
    same = {key: value for key, value in belongs_to.items() if key != TOKENIZER}  # whose folder may differ
    key = prefix + hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]
    return f"varlen/{key}/{next(_numbers.setdefault(key, itertools.count()))}"


class StoreExchange:
    """Exchanges values among ranks through the job's store."""

    def __init__(self, job: Any, name: str, rank: int, ranks: int, deadline_s: float) -> None:
        self._job, self._name, self._rank, self._ranks = job, name, rank, ranks
        self._deadline_s = deadline_s
        self._published: deque[str] = deque()
        self._closed = threading.Event()
        job.set_timeout(timedelta(seconds=_SHORT_S))

    def all(self, key: str, mine: Mapping[int, Any]) -> dict[int, Any]:
        """Return the values of all ranks; waits until every rank has given its own."""
        # The first value stays, also for a restarted rank and for peers that share a data-parallel rank.
        stored = self._job.compare_set(self._key(key, self._rank), "", json.dumps(list(mine.items())))
        self._forget(key)
        found: dict[int, Any] = {int(lane): value for lane, value in json.loads(stored)}
        start_s, pause = time.monotonic(), _FIRST_S
        missing = [rank for rank in range(self._ranks) if rank != self._rank]
        while missing:
            there = [rank for rank in missing if self._job.check([self._key(key, rank)])]
            for rank in there:
                found.update(
                    (int(lane), value) for lane, value in json.loads(self._job.get(self._key(key, rank)))
                )
            missing = [rank for rank in missing if rank not in there]
            if not missing:
                break
            waited = time.monotonic() - start_s
            if waited >= self._deadline_s or self._closed.is_set():
                raise StalledError(self._stall_message(missing, key, waited))
            time.sleep(pause)
            pause = _FIRST_S if there else min(2 * pause, _MOST_S)
        return found

    def close(self) -> None:
        """Let waiting threads fail."""
        self._closed.set()

    def _key(self, key: str, rank: int) -> str:
        return f"{self._name}/{key}/{rank}"

    def _forget(self, key: str) -> None:
        """Remove the key of this rank that is too old to be read."""
        if key not in self._published:
            self._published.append(key)
        if len(self._published) > _KEPT:
            self._job.delete_key(self._key(self._published.popleft(), self._rank))

    def _stall_message(self, missing: list[int], key: str, waited: float) -> str:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        return (
            f"data-parallel rank {self._rank} has waited {waited:,.0f} s for {many(len(missing), 'rank')} of "
            f"{self._ranks:,} ({shown}) at {key}; either they are gone, or their loaders have other settings or were "
            "made in another order"
        )
