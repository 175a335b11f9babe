"""Read a token store while it is being written, waiting for parts that aren't finished.

::

    STORE.partial/
      00000-0000/ ...          finished shards
      .work/
        plan.json              the final number of parts, and the store's fingerprint
        lock                   held while a run writes
        00000.json ...         a note of each finished part: its shards

The order of parts is fixed before the first is begun, so every result is that of the finished store, or not available
yet. The folder is renamed in the end, and reading continues under the new name.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from varlen.counts import many
from varlen.errors import SourceError
from varlen.files.losses import Losses
from varlen.files.written import LOCK, PARTIAL, PLAN, WORK, matches_checksum, read_manifest
from varlen.regular import read_regular
from varlen.store.store import ROW_WEIGHTS, TokenStore, open_store
from varlen.text.loss_masks import Mask
from varlen.types import Int32Array, IntArray

_Result = TypeVar("_Result")
PATIENCE_S = 1800.0  # default for how long to wait for the next part while a run writes
_STOPPED_S = 60.0
_SHORTEST_S, _LONGEST_S = 0.05, 2.0  # bounds of the polling interval


class PartialStore:
    """A token store that is still being written, of which the first parts are finished."""

    def __init__(
        self,
        folder: Path,
        *,
        patience_s: float = PATIENCE_S,
        stopped_s: float = _STOPPED_S,
        check_tokens: bool = True,
    ) -> None:
        self.folder = folder
        self._partial = folder.with_name(folder.name + PARTIAL)
        self._patience_s, self._stopped_s = patience_s, min(stopped_s, patience_s)
        plan = _read_plan(self._partial)
        if plan is None:
            raise SourceError(f"{folder} is no token store, and none is being written there (varlen index)")
        self.fingerprint, self.num_parts = plan
        written_plan = _read_json(self._partial)
        self._source = {name: written_plan.get(name) for name in ("tokenizer", ROW_WEIGHTS)}
        self._listed: list[dict[str, Any]] = []
        self._finished_parts = 0
        self._is_whole = False
        self._check_tokens = check_tokens
        self._store = TokenStore(self._partial, self._manifest(), check_tokens=check_tokens)
        self._look()

    def _manifest(self) -> dict[str, Any]:
        known = {"num_parts": self.num_parts, "fingerprint": self.fingerprint, "source": self._source}
        return {"shards": self._listed, **known}

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the finished parts."""
        return self._store.manifest

    @property
    def documents(self) -> IntArray:
        """int64 `[shards]`: documents of each finished shard."""
        return self._store.documents

    @property
    def parts(self) -> IntArray:
        """int64 `[shards]`: the part that each of them belongs to."""
        return self._store.parts

    @property
    def tokens(self) -> IntArray:
        """int64 `[shards]`: tokens of each of them."""
        return self._store.tokens

    @property
    def tables(self) -> Path | None:
        """Folder for tables computed from the lengths, once the store is finished."""
        return self._store.tables if self._is_whole else None

    @property
    def losses(self) -> Losses:
        """Losses of the finished parts."""
        with suppress(SourceError):  # reading reports it
            self._look()
        return self._store.losses

    def fingerprint_at(self, num_parts: int) -> str | None:
        """Return the fingerprint of the first parts alone: that of all, as the store hasn't grown yet."""
        return self.fingerprint if num_parts == self.num_parts else None

    def wait_for(self, num_parts: int) -> None:
        """Wait until the first `num_parts` parts are finished."""
        if self._finished_parts >= min(num_parts, self.num_parts):
            return
        begun = since = time.monotonic()
        free_since: float | None = None
        pause = _SHORTEST_S
        while True:
            before = self._finished_parts
            self._look()
            if self._finished_parts >= min(num_parts, self.num_parts):
                return
            now = time.monotonic()
            if self._finished_parts > before:
                since, pause = now, _SHORTEST_S
            free_since = None if self._is_being_written() else free_since or now
            if free_since is not None and now - free_since >= self._stopped_s:
                why = (
                    "indexing has stopped (no run holds its lock); run the same varlen index again, which goes on "
                    "where it stopped"
                )
                raise self._missing(num_parts, now - begun, why)
            if now - since >= self._patience_s:
                why = "indexing runs, but no further part was finished; look at what it says, or be more patient"
                raise self._missing(num_parts, now - begun, why)
            time.sleep(max(min(pause, self._patience_s - (now - since)), _SHORTEST_S))
            pause = min(2 * pause, _LONGEST_S)

    def _missing(self, num_parts: int, waited_s: float, why: str) -> SourceError:
        first, last = self._finished_parts, min(num_parts, self.num_parts) - 1
        which = f"part {first}" if first == last else f"parts {first} to {last}"
        return SourceError(
            f"{self.folder}: {which} of {many(self.num_parts, 'part')} aren't indexed after {waited_s:,.0f} s of "
            f"waiting: {why}"
        )

    def _look(self) -> None:
        """Update to the parts finished since the last call."""
        if self._is_whole or self._has_moved():
            return
        plan = _read_plan(self._partial)
        if plan != (self.fingerprint, self.num_parts):
            if self._has_moved():  # between the two reads
                return
            raise SourceError(
                f"{self._partial} is gone, or written from other data by now; start over with what is there"
            )
        before = self._finished_parts
        while self._finished_parts < self.num_parts:
            try:
                number = f"{self._finished_parts:05d}"
                listed = json.loads(read_regular(self._partial / WORK / f"{number}.json"))
                self._check_note(number, listed)
                self._listed = self._listed + listed
            except SourceError:
                if self._is_being_written():  # it may be rewritten at this moment
                    break
                raise
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                break
            self._finished_parts += 1
        if self._finished_parts > before:
            try:
                self._store.take(self._manifest())
            except (KeyError, TypeError, ValueError) as error:
                raise SourceError(
                    f"{self._partial} holds damaged notes of its parts; index the data again"
                ) from error

    def _check_note(self, number: str, listed: Any) -> None:
        """Raise unless a part's note lists the shards that exist, which are written before it."""
        there = {path.name for path in self._partial.iterdir() if path.name.startswith(f"{number}-")}
        if {shard["name"] for shard in listed} != there:
            raise SourceError(
                f"{self._partial} holds damaged notes of its parts: that of part {int(number):,} lists "
                f"{len(listed):,} shards, and {len(there):,} are there; index the data again"
            )

    def _has_moved(self) -> bool:
        """Switch to the finished store, if there is one; return whether."""
        if read_manifest(self.folder) is None:
            return False
        store = open_store(self.folder, check_tokens=self._check_tokens)
        if store.fingerprint_at(self.num_parts) != self.fingerprint:
            return False
        self._store, self._is_whole, self._finished_parts = store, True, self.num_parts
        return True

    def _is_being_written(self) -> bool:
        """Whether a run holds the lock, or that is unknown."""
        try:
            with (self._partial / WORK / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once, for which runs wait
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def _asked(self, ask: Callable[[TokenStore], _Result]) -> _Result:
        """Call the store; retry if it was renamed meanwhile."""
        try:
            return ask(self._store)
        except SourceError:
            if self._is_whole or not self._has_moved():
                raise
            return ask(self._store)

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        """Return the lengths of documents, given by shard and number."""
        return self._asked(lambda store: store.lengths(shards, documents))

    def where(self, shard: int) -> str:
        """Describe a shard's location."""
        return self._store.where(shard)

    def will_need(self, shards: IntArray, documents: IntArray) -> None:
        """Prefetch documents; arguments as in `lengths`."""
        self._asked(lambda store: store.will_need(shards, documents))

    def count_targets(
        self, shards: IntArray, documents: IntArray, starts: IntArray, stops: IntArray
    ) -> IntArray:
        """Count the labels of pieces; arguments as in `TokenDocuments`."""
        return self._asked(lambda store: store.count_targets(shards, documents, starts, stops))

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents in the given order; arguments as in `TokenDocuments`."""
        return self._asked(lambda store: store.gather(shards, documents, starts, lengths))


def is_begun(folder: Path) -> bool:
    """Whether a store with this name is being written."""
    return bool(folder.name) and _read_plan(folder.with_name(folder.name + PARTIAL)) is not None


def _read_plan(partial: Path) -> tuple[str, int] | None:
    """Return the store's fingerprint and number of parts; None where there is no plan."""
    plan = _read_json(partial)
    if not matches_checksum(plan):
        return None
    try:
        return str(plan["fingerprint"]), int(plan["num_parts"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _read_json(partial: Path) -> dict[str, Any]:
    """Return the plan that a run wrote for its store; {} where there is none."""
    try:
        plan = json.loads(read_regular(partial / WORK / PLAN))
    except (OSError, ValueError, RecursionError):
        return {}
    return plan if isinstance(plan, dict) else {}
