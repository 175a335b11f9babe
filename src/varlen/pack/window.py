"""WindowPacker: packs a stream of lengths window by window, and carries over pieces whose packs aren't full yet.

::

    lengths ──► waiting ──(a window's worth)──► packed ──► full enough ──► out
                   ▲                                          │
                   └────────────── carried over ◄─────────────┘

Its state is record numbers and token ranges, never tokens, and fits in a checkpoint as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from numbers import Real
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from varlen.arguments import LARGEST, as_choice, as_count, check_multiple
from varlen.errors import (
    LedgerError,
    LengthsError,
    OverlongDocumentError,
    SettingError,
    StateError,
    reading_state,
)
from varlen.pack.lengths import as_lengths
from varlen.pack.passes import MIN_FILL, Packs, Passes, Waiting, arrived, no_packs, nothing, whole
from varlen.pack.pieces import fit
from varlen.types import Int32Array, Ledger, Method, Overlong, Packing

_VERSION = 1
_MOST = 2**63 - 1  # most records, and most tokens, of a stream


def _as_share(value: object, name: str) -> float:
    """Return a number from 0 to 1."""
    if isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1:
        return float(value)
    raise SettingError(f"{name} must be a number from 0 to 1, got {value!r}")


class WindowPacker:
    """Pack a stream of documents whose lengths arrive in parts.

    Whenever `window` pieces are waiting, they are packed. Packs that are at least `min_fill` full are returned, and
    the pieces of the others wait for the next window. A piece that has waited `max_age` windows is returned however
    full its pack is, and at most half a window is carried over, so that no piece waits forever and memory stays
    bounded. Methods "next_fit" and "wrapped" keep one pack open instead, and their packs are those of `vl.pack` over
    the whole stream. The packs of a window are ordered by their first document.

    The default method packs a window best-fit in the order of arrival, the remaining pieces balanced, and only the
    rest best-fit-decreasing, so that packs stay nearly random samples of the documents. This also holds for the packs
    that `flush` returns.

    Packs depend on the settings and the order of lengths, not on how lengths are divided among calls of `add`.

    Args:
        capacity: tokens a pack can hold.
        window: pieces packed at a time.
        method: any of `vl.pack`'s methods.
        overlong: what happens to documents longer than `capacity`, as in `vl.pack`.
        max_documents: most pieces a pack may hold; None for no limit.
        document_multiple_of: round the space each piece takes up to this multiple.
        min_fill: packs at least this full are returned at once, from 0 to 1.
        max_age: windows that a piece waits at most.

    Raises:
        SettingError: a setting out of range.

    >>> packer = WindowPacker(capacity=8, window=4)
    >>> packer.add([5, 2, 6]).to_lists(), packer.add([3, 4]).to_lists(), packer.flush().to_lists()
    ([], [[0, 3], [1, 2]], [[4]])
    """

    def __init__(
        self,
        *,
        capacity: int,
        window: int = 16_384,
        method: Method = "best_fit",
        overlong: Overlong = "split",
        max_documents: int | None = None,
        document_multiple_of: int = 1,
        min_fill: float = MIN_FILL,
        max_age: int = 4,
    ) -> None:
        as_choice(method, "method", get_args(Method))
        as_choice(overlong, "overlong", get_args(Overlong))
        self._min_fill = _as_share(min_fill, "min_fill")
        self._capacity = as_count(capacity, "capacity")
        self._multiple = as_count(document_multiple_of, "document_multiple_of")
        check_multiple(self._capacity, self._multiple, "document_multiple_of")
        self._window = as_count(window, "window")
        self._max_documents = None if max_documents is None else as_count(max_documents, "max_documents")
        self._method: Method = method
        self._overlong: Overlong = overlong
        self._max_age = as_count(max_age, "max_age", least=0)
        self._passes = Passes(
            capacity=self._capacity,
            method=method,
            max_documents=self._max_documents,
            multiple=self._multiple,
            min_fill=self._min_fill,
        )
        self._num_records = 0
        self._waiting = nothing()
        self._fresh = 0  # pieces at the end of `_waiting` that were in no window yet
        self._totals = Ledger(tokens_in=0, packed=0)

    @property
    def num_records(self) -> int:
        """Documents taken so far; the next one gets this number."""
        return self._num_records

    @property
    def num_waiting(self) -> int:
        """Pieces that wait for a pack."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for a pack: `ledger.tokens_in - packed - truncated - dropped`."""
        return int(self._waiting.lengths.sum(dtype=np.int64))

    @property
    def ledger(self) -> Ledger:
        """Totals of the stream so far; its balance is `waiting_tokens`."""
        return self._totals

    def add(self, lengths: npt.ArrayLike) -> Packing:
        """Take the next documents and return the packs that are ready.

        Args:
            lengths: `[any]` tokens of each document, in order; they get the next record numbers.

        Returns:
            A Packing whose `document_ids` are record numbers. Its ledger counts the packs in it and what was cut or
            dropped in this call; `documents_in` counts all records so far.

        Raises:
            LengthsError: invalid lengths; none has been taken then.
            OverlongDocumentError: a document doesn't fit and `overlong` is "error"; none has been taken then.
        """
        checked = as_lengths(lengths)
        if self._num_records + checked.size > _MOST:
            raise LengthsError("record numbers are exhausted")
        arrived, losses = self._arrive(checked)
        self._num_records += checked.size
        self._waiting = self._waiting.and_then(arrived)
        self._fresh += len(arrived)
        parts = no_packs()
        while len(self._waiting) >= (size := self._next_window()):
            now, later = self._waiting.take(slice(0, size)), self._waiting.take(slice(size, None))
            ready, carried = self._pack_window(now)
            parts = parts.and_then(ready)
            self._fresh = len(later)
            self._waiting = carried.and_then(later)
        return self._returned(parts, losses, checked)

    def flush(self) -> Packing:
        """Pack all waiting pieces and return the packs; the packer is empty then, and can be used further."""
        parts = self._passes.all_of(self._waiting)
        self._waiting, self._fresh = nothing(), 0
        return self._returned(parts, {}, np.empty(0, np.int32))

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue from here, as numbers and lists for JSON."""
        return {
            "version": _VERSION,
            "settings": self._settings(),
            "num_records": self._num_records,
            "fresh": self._fresh,
            "ledger": asdict(self._totals),
            "waiting": self._waiting.to_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that a packer with the same settings returned.

        Args:
            state: what `state_dict` returned, as it is or back from JSON.

        Raises:
            StateError: another version or other settings, named; the packer is unchanged then.
        """
        with reading_state("a WindowPacker"):
            version, settings = state["version"], dict(state["settings"])
            num_records, fresh = (as_count(state[name], name, 0, _MOST) for name in ("num_records", "fresh"))
            ledger = Ledger(**{name: as_count(n, name, 0, _MOST) for name, n in state["ledger"].items()})
            restored = (
                Waiting.from_state(state["waiting"], num_records, fresh) if version == _VERSION else nothing()
            )
        if version != _VERSION:
            raise StateError(f"the state has version {version!r}, this varlen reads version {_VERSION}")
        changed = [name for name, value in self._settings().items() if settings.get(name) != value]
        if changed:
            was = ", ".join(
                f"{name} {settings.get(name)!r}, here {self._settings()[name]!r}" for name in changed
            )
            raise StateError(f"the state was made with other settings: {was}; make the packer with those")
        tokens = int(restored.lengths.sum(dtype=np.int64))
        if tokens != ledger.balance or ledger.documents_in != num_records:
            raise StateError(
                f"the state doesn't add up: {tokens:,} tokens of {num_records:,} documents wait, but its ledger "
                f"leaves {ledger.balance:,} of {ledger.documents_in:,}; it was truncated or modified"
            )
        self._num_records, self._fresh, self._totals, self._waiting = num_records, fresh, ledger, restored

    def _settings(self) -> dict[str, Any]:
        return {
            "capacity": self._capacity,
            "window": self._window,
            "method": self._method,
            "overlong": self._overlong,
            "max_documents": self._max_documents,
            "document_multiple_of": self._multiple,
            "min_fill": self._min_fill,
            "max_age": self._max_age,
        }

    def _arrive(self, lengths: Int32Array) -> tuple[Waiting, dict[str, int]]:
        """Return new documents as pieces, and counts of what was cut or dropped."""
        try:
            return arrived(lengths, self._num_records, self._capacity, self._method, self._overlong)
        except OverlongDocumentError as error:
            raise OverlongDocumentError(
                f"{error}; documents are counted from record {self._num_records:,}"
            ) from None

    def _next_window(self) -> int:
        """Return the size of the next window: the pieces carried over, and at least half a window of new ones."""
        carried = len(self._waiting) - self._fresh
        return max(self._window, carried + (self._window + 1) // 2)

    def _pack_window(self, pieces: Waiting) -> tuple[Packs, Waiting]:
        """Pack one window; returns the finished packs and the pieces to carry over."""
        ready, last = self._passes.run(pieces)
        if not self._passes.keeps_order:
            out = self._must_go(last)
            ready, last = ready.and_then(last.where(out)), last.where(~out)
        return ready.in_order(), last.pieces.by_arrival().older()

    def _must_go(self, packs: Packs) -> npt.NDArray[np.bool_]:
        """Select packs to return though they aren't full: old ones, then the fullest until half a window is left."""
        old = packs.oldest() >= self._max_age
        order = np.lexsort((-packs.space(self._multiple), ~old))
        sizes = packs.sizes[order]
        left = sizes.sum() - np.cumsum(sizes) + sizes  # pieces still here before each pack goes
        must = np.empty(len(packs), np.bool_)
        must[order] = old[order] | (left > self._window // 2)
        return must

    def _returned(self, packs: Packs, losses: dict[str, int], lengths: Int32Array) -> Packing:
        """Return the packs of this call as a Packing, and add them to the ledger."""
        pieces = packs.pieces
        packed = int(pieces.lengths.sum(dtype=np.int64))
        settled = packed + losses.get("truncated", 0) + losses.get("dropped", 0)
        counts = {**losses, "empty_documents": int((lengths == 0).sum())}
        if self._method == "wrapped":
            counts["split_documents"] = self._newly_cut(pieces)
        ledger = Ledger(tokens_in=settled, packed=packed, documents_in=self._num_records, **counts)
        totals = asdict(self._totals)
        for name, value in {**counts, "packed": packed}.items():
            totals[name] += value
        totals["tokens_in"] += int(lengths.sum(dtype=np.int64))
        totals["documents_in"] = self._num_records
        self._totals = Ledger(**totals)
        if self._totals.balance != self.waiting_tokens:
            raise LedgerError(
                f"{self.waiting_tokens:,} tokens wait, but the ledger leaves {self._totals.balance:,}. "
                "This is a bug in varlen; please report the lengths and the settings"
            )
        return Packing(
            document_ids=pieces.records,
            starts=pieces.starts,
            stops=pieces.stops,
            offsets=packs.offsets,
            capacity=self._capacity,
            ledger=ledger.check(),
            method=self._method,
            overlong=self._overlong,
            document_multiple_of=self._multiple,
        )

    def _newly_cut(self, pieces: Waiting) -> int:
        """Count documents whose first piece is returned now and isn't the only one."""
        later = np.concatenate([part.records[part.starts > 0] for part in (pieces, self._waiting)])
        return int(np.intersect1d(pieces.records[pieces.starts == 0], later).size)


def count_packs(
    lengths: npt.ArrayLike,
    *,
    capacity: int,
    method: Method = "best_fit",
    overlong: Overlong = "split",
    max_documents: int | None = None,
    document_multiple_of: int = 1,
) -> int:
    """Count the packs that a WindowPacker with these settings flushes if it gets all lengths in one window.

    Takes a third of the time of making them.
    """
    if method in ("best_fit", "first_fit"):
        pieces = fit(as_lengths(lengths), capacity, overlong).lengths
        return whole(pieces[pieces > 0], capacity, method, max_documents or LARGEST, document_multiple_of)[1]
    packer = WindowPacker(
        capacity=capacity,
        window=LARGEST,
        method=method,
        overlong=overlong,
        max_documents=max_documents,
        document_multiple_of=document_multiple_of,
    )
    packer.add(lengths)
    return packer.flush().num_packs
