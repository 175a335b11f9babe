"""WindowPacker: packs a stream of lengths window by window, carries over what doesn't fill a pack yet.

::

    lengths ──► waiting ──(a window's worth)──► packed ──► full enough ──► out
                   ▲                                          │
                   └────────────── carried over ◄─────────────┘

Its state is record numbers and token ranges, never tokens, so that it fits in a checkpoint as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from varlen.errors import LengthsError, OverlongDocumentError, SettingError, StateError
from varlen.pack.api import as_choice, pack
from varlen.pack.lengths import LARGEST, as_count, as_lengths, check_multiple
from varlen.pack.pieces import fit
from varlen.types import Int32Array, IntArray, Ledger, Method, Overlong, Packing

_VERSION = 1
_PASSES: dict[Method, tuple[Method, ...]] = {
    "best_fit": ("best_fit", "balanced", "best_fit_decreasing"),
    "first_fit": ("first_fit", "balanced", "best_fit_decreasing"),
}
"""Methods that pack a window one after the other, each what the one before left in packs that aren't full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """Pieces that no pack holds yet, in the order of their arrival."""

    records: IntArray
    starts: Int32Array
    stops: Int32Array
    ages: Int32Array
    """Windows that a piece has been carried through."""

    def __len__(self) -> int:
        return len(self.records)

    def take(self, index: Any) -> _Waiting:
        """Some of the pieces."""
        return _Waiting(
            records=self.records[index],
            starts=self.starts[index],
            stops=self.stops[index],
            ages=self.ages[index],
        )

    def by_arrival(self) -> _Waiting:
        """The same pieces in the order in which they came."""
        return self.take(np.lexsort((self.starts, self.records)))

    def older(self) -> _Waiting:
        """The same pieces, one window older."""
        return _Waiting(
            records=self.records, starts=self.starts, stops=self.stops, ages=self.ages + np.int32(1)
        )

    def and_then(self, other: _Waiting) -> _Waiting:
        """These pieces and others after them."""
        return _Waiting(
            records=np.concatenate([self.records, other.records]),
            starts=np.concatenate([self.starts, other.starts]),
            stops=np.concatenate([self.stops, other.stops]),
            ages=np.concatenate([self.ages, other.ages]),
        )


def _nothing() -> _Waiting:
    empty = np.empty(0, np.int32)
    return _Waiting(records=np.empty(0, np.int64), starts=empty, stops=empty, ages=empty)


class WindowPacker:
    """Pack a stream of documents whose lengths come bit by bit.

    Whenever `window` pieces are waiting they are packed; packs at least `min_fill` full go out, and the
    pieces of the others wait for the next window, oldest first. A piece that has waited `max_age` windows goes
    out however full its pack is, and at most half a window is ever carried over, so nothing starves and memory
    stays bounded. With the default method a window is packed best-fit in the order of arrival, what that
    leaves over balanced, and only the rest best-fit-decreasing, so that packs stay nearly random samples of the
    documents.

    The packs depend on the settings and the order of lengths, not on how they are divided among calls of
    `add`.

    Args:
        capacity: tokens a pack can hold.
        window: pieces packed at a time.
        method: any of `vl.pack`'s methods.
        overlong: what becomes of documents longer than `capacity`, as in `vl.pack`.
        max_documents: most pieces a pack may hold; None for no limit.
        document_multiple_of: round the space each piece takes up to this multiple.
        min_fill: packs at least this full go out at once, from 0 to 1.
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
        min_fill: float = 0.995,
        max_age: int = 4,
    ) -> None:
        as_choice(method, "method", get_args(Method))
        as_choice(overlong, "overlong", get_args(Overlong))
        if not 0 <= min_fill <= 1:
            raise SettingError(f"min_fill must be from 0 to 1, got {min_fill!r}")
        self._capacity = as_count(capacity, "capacity")
        self._multiple = as_count(document_multiple_of, "document_multiple_of")
        check_multiple(self._capacity, self._multiple, "document_multiple_of")
        self._window = as_count(window, "window")
        self._max_documents = None if max_documents is None else as_count(max_documents, "max_documents")
        self._method: Method = method
        self._overlong: Overlong = overlong
        self._min_fill = float(min_fill)
        self._max_age = as_count(max_age, "max_age", least=0)
        self._num_records = 0
        self._waiting = _nothing()
        self._fresh = 0  # pieces at the end of `_waiting` that no window has held yet
        self._totals = Ledger(tokens_in=0, packed=0)

    @property
    def num_records(self) -> int:
        """Documents taken so far; the next one gets this number."""
        return self._num_records

    @property
    def num_waiting(self) -> int:
        """Pieces that no pack holds yet."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that no pack holds yet: `ledger.tokens_in - packed - truncated - dropped`."""
        return int((self._waiting.stops - self._waiting.starts).sum(dtype=np.int64))

    @property
    def ledger(self) -> Ledger:
        """All that has come in and gone out so far; its balance is `waiting_tokens`."""
        return self._totals

    def add(self, lengths: npt.ArrayLike) -> Packing:
        """Take the next documents and return the packs that are ready.

        Args:
            lengths: `[any]` tokens of each document, in order; they get the next record numbers.

        Returns:
            A Packing whose `document_ids` are record numbers. Its ledger speaks of the packs in it and of what
            was cut or dropped in this call; `documents_in` counts all records so far.

        Raises:
            LengthsError: lengths that can't be; nothing has been taken then.
            OverlongDocumentError: a document doesn't fit and `overlong` is "error"; nothing has been taken then.
        """
        checked = as_lengths(lengths)
        if self._num_records + checked.size > np.iinfo(np.int64).max:
            raise LengthsError("record numbers are exhausted")
        arrived, losses = self._arrive(checked)
        self._num_records += checked.size
        self._waiting = self._waiting.and_then(arrived)
        self._fresh += len(arrived)
        parts = []
        while self._fresh and len(self._waiting) >= self._window:
            size = max(self._window, len(self._waiting) - self._fresh + 1)
            now, later = self._waiting.take(slice(0, size)), self._waiting.take(slice(size, None))
            ready, carried = self._pack_window(now)
            parts.append(ready)
            self._fresh = len(later)
            self._waiting = carried.and_then(later)
        return self._hand_out(parts, losses, checked)

    def flush(self) -> Packing:
        """Pack all that is waiting and return it; the packer is empty then and may go on."""
        parts = [
            self._packed(self._waiting, "wrapped" if self._method == "wrapped" else "best_fit_decreasing")
        ]
        self._waiting, self._fresh = _nothing(), 0
        return self._hand_out(parts, {}, np.empty(0, np.int32))

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to go on from here, as JSON-able numbers and lists."""
        waiting = {name: getattr(self._waiting, name).tolist() for name in _Waiting.__slots__}
        return {
            "version": _VERSION,
            "settings": self._settings(),
            "num_records": self._num_records,
            "fresh": self._fresh,
            "ledger": asdict(self._totals),
            "waiting": waiting,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that a packer with the same settings gave.

        Args:
            state: what `state_dict` returned, as it is or back from JSON.

        Raises:
            StateError: another version or other settings, named; the packer is unchanged then.
        """
        try:
            version, settings = state["version"], state["settings"]
            waiting = state["waiting"]
            restored = _Waiting(
                records=np.asarray(waiting["records"], np.int64),
                starts=np.asarray(waiting["starts"], np.int32),
                stops=np.asarray(waiting["stops"], np.int32),
                ages=np.asarray(waiting["ages"], np.int32),
            )
            num_records, fresh, ledger = (
                int(state["num_records"]),
                int(state["fresh"]),
                Ledger(**state["ledger"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"this is no state of a WindowPacker: {type(error).__name__} {error}") from None
        if version != _VERSION:
            raise StateError(f"the state has version {version!r}, this varlen reads version {_VERSION}")
        changed = [name for name, value in self._settings().items() if settings.get(name) != value]
        if changed:
            was = ", ".join(
                f"{name} {settings.get(name)!r}, here {self._settings()[name]!r}" for name in changed
            )
            raise StateError(f"the state was made with other settings: {was}; make the packer with those")
        sizes = {len(restored.records), len(restored.starts), len(restored.stops), len(restored.ages)}
        tokens = int((restored.stops.astype(np.int64) - restored.starts).sum())
        if len(sizes) != 1 or tokens != ledger.balance or not 0 <= fresh <= len(restored):
            raise StateError(
                f"the state doesn't add up: {tokens:,} tokens wait, but its ledger leaves {ledger.balance:,}; "
                "it was cut or changed"
            )
        self._num_records, self._fresh, self._totals, self._waiting = num_records, fresh, ledger, restored

    def _settings(self) -> dict[str, Any]:
        """What the packs depend on."""
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

    def _arrive(self, lengths: Int32Array) -> tuple[_Waiting, dict[str, int]]:
        """New documents as pieces, and what was cut or dropped."""
        if self._method == "wrapped" and self._overlong in ("error", "split"):
            kept, documents, starts, losses = lengths, None, None, {}
        else:
            try:
                pieces = fit(lengths, self._capacity, self._overlong)
            except OverlongDocumentError as error:
                raise OverlongDocumentError(
                    f"{error}; documents are counted from record {self._num_records:,}"
                ) from None
            kept, documents, starts, losses = pieces.lengths, pieces.documents, pieces.starts, pieces.losses
        numbers = np.arange(kept.size) if documents is None else documents
        first = np.zeros(kept.size, np.int32) if starts is None else starts
        real = kept > 0
        arrived = _Waiting(
            records=(numbers + self._num_records)[real],
            starts=first[real],
            stops=(first + kept)[real],
            ages=np.zeros(int(real.sum()), np.int32),
        )
        return arrived, losses

    def _packed(self, pieces: _Waiting, method: Method) -> tuple[_Waiting, IntArray]:
        """Pieces in the order of their packs, and where each pack begins."""
        packing = pack(
            pieces.stops - pieces.starts,
            self._capacity,
            method,
            max_documents=self._max_documents,
            document_multiple_of=self._multiple,
        )
        ordered = pieces.take(packing.document_ids)
        if method == "wrapped":
            starts = ordered.starts + packing.starts
            stops = starts + packing.lengths
            ordered = _Waiting(records=ordered.records, starts=starts, stops=stops, ages=ordered.ages)
        return ordered, packing.offsets

    def _pack_window(self, pieces: _Waiting) -> tuple[tuple[_Waiting, IntArray], _Waiting]:
        """Pack one window; returns the packs to hand out and the pieces to carry over."""
        ready: tuple[_Waiting, IntArray] = (_nothing(), np.zeros(1, np.int64))
        rest = pieces
        for method in _PASSES.get(self._method, (self._method,)):
            packs = self._packed(rest, method)
            full = self._is_full(*packs)
            ready, rest = _joined(ready, _packs(*packs, full)), _packs(*packs, ~full)[0].by_arrival()
        last = _packs(*packs, ~full)
        if self._method != "wrapped":  # a stream without holes waits for its next token, whatever its age
            out = self._must_go(*last)
            ready, rest = _joined(ready, _packs(*last, out)), _packs(*last, ~out)[0].by_arrival()
        return ready, rest.older()

    def _is_full(self, pieces: _Waiting, offsets: IntArray) -> npt.NDArray[np.bool_]:
        """Which packs are full enough to hand out, by the space their slots leave or their number of pieces."""
        lengths = (pieces.stops - pieces.starts).astype(np.int64)
        slots = -(-lengths // self._multiple) * self._multiple
        used = np.add.reduceat(slots, offsets[:-1]) if len(offsets) > 1 else slots
        least = self._capacity if self._method == "wrapped" else self._min_fill * self._capacity
        return (used >= least) | (np.diff(offsets) >= (self._max_documents or LARGEST))

    def _must_go(self, pieces: _Waiting, offsets: IntArray) -> npt.NDArray[np.bool_]:
        """Which packs go out though not full: old ones, then the fullest until half a window is left."""
        if len(offsets) < 2:
            return np.zeros(0, np.bool_)
        lengths = (pieces.stops - pieces.starts).astype(np.int64)
        used = np.add.reduceat(lengths, offsets[:-1])
        old = np.maximum.reduceat(pieces.ages, offsets[:-1]) >= self._max_age
        order = np.lexsort((-used, ~old))
        sizes = np.diff(offsets)[order]
        left = sizes.sum() - np.cumsum(sizes) + sizes  # pieces still here before each pack goes
        leaves = old[order] | (left > self._window // 2)
        must = np.empty(len(order), np.bool_)
        must[order] = leaves
        return must

    def _hand_out(
        self, parts: list[tuple[_Waiting, IntArray]], losses: dict[str, int], lengths: Int32Array
    ) -> Packing:
        """Join the packs of this call into one Packing and enter them in the ledger."""
        pieces, offsets = _nothing(), np.zeros(1, np.int64)
        for part in parts:
            pieces, offsets = _joined((pieces, offsets), part)
        packed = int((pieces.stops - pieces.starts).sum(dtype=np.int64))
        settled = packed + losses.get("truncated", 0) + losses.get("dropped", 0)
        empty = {"empty_documents": int((lengths == 0).sum())}
        ledger = Ledger(tokens_in=settled, packed=packed, documents_in=self._num_records, **empty, **losses)
        totals = asdict(self._totals)
        for name, value in {**losses, **empty, "packed": packed}.items():
            totals[name] += value
        totals["tokens_in"] += int(lengths.sum(dtype=np.int64))
        totals["documents_in"] = self._num_records
        self._totals = Ledger(**totals)
        if self._totals.balance != self.waiting_tokens:
            self._totals.check()
        return Packing(
            document_ids=pieces.records,
            starts=pieces.starts,
            stops=pieces.stops,
            offsets=offsets,
            capacity=self._capacity,
            ledger=ledger.check(),
            method=self._method,
            overlong=self._overlong,
            document_multiple_of=self._multiple,
        )


def _packs(pieces: _Waiting, offsets: IntArray, chosen: npt.NDArray[np.bool_]) -> tuple[_Waiting, IntArray]:
    """Some of the packs."""
    sizes = np.diff(offsets)
    return pieces.take(np.repeat(chosen, sizes)), np.concatenate([[0], np.cumsum(sizes[chosen])]).astype(
        np.int64
    )


def _joined(first: tuple[_Waiting, IntArray], second: tuple[_Waiting, IntArray]) -> tuple[_Waiting, IntArray]:
    """Packs and others after them."""
    return first[0].and_then(second[0]), np.concatenate([first[1], second[1][1:] + first[1][-1]])
