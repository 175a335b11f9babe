"""Pieces of documents that wait for a pack, and packs of them, as flat arrays: what WindowPacker moves about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import StateError
from varlen.types import Int32Array, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Pieces that no pack holds yet, in the order of their arrival."""

    records: IntArray
    """int64 `[num_pieces]`: number of each piece's document, counted from the first ever taken."""
    starts: Int32Array
    """int32 `[num_pieces]`: first token of the piece within its document."""
    stops: Int32Array
    """int32 `[num_pieces]`: one past its last token."""
    ages: Int32Array
    """int32 `[num_pieces]`: windows that a piece has been carried through."""

    def __len__(self) -> int:
        """Pieces."""
        return len(self.records)

    @property
    def lengths(self) -> Int32Array:
        """int32 `[num_pieces]`: tokens of each piece."""
        return self.stops - self.starts

    def take(self, index: Any) -> Waiting:
        """Some of the pieces."""
        return Waiting(
            records=self.records[index],
            starts=self.starts[index],
            stops=self.stops[index],
            ages=self.ages[index],
        )

    def by_arrival(self) -> Waiting:
        """The same pieces in the order in which they came."""
        return self.take(np.lexsort((self.starts, self.records)))

    def older(self) -> Waiting:
        """The same pieces, one window older."""
        return Waiting(
            records=self.records, starts=self.starts, stops=self.stops, ages=self.ages + np.int32(1)
        )

    def and_then(self, other: Waiting) -> Waiting:
        """These pieces and others after them."""
        return Waiting(
            records=np.concatenate([self.records, other.records]),
            starts=np.concatenate([self.starts, other.starts]),
            stops=np.concatenate([self.stops, other.stops]),
            ages=np.concatenate([self.ages, other.ages]),
        )

    def to_state(self) -> dict[str, list[int]]:
        """The pieces as lists of numbers."""
        return {name: getattr(self, name).tolist() for name in self.__slots__}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], num_records: int, fresh: int) -> Waiting:
        """Read what `to_state` wrote.

        Args:
            state: lists by name.
            num_records: documents taken so far; every piece belongs to one of them.
            fresh: pieces at the end that no window has held, and so have age 0.

        Raises:
            StateError: not pieces in the order of their arrival.
            KeyError: a list is missing.
        """
        columns = {name: _whole_numbers(state[name], name) for name in cls.__slots__}
        records, starts, stops, ages = columns.values()
        rising = (records[1:] > records[:-1]) | ((records[1:] == records[:-1]) & (starts[1:] >= stops[:-1]))
        sound = (
            len({len(column) for column in columns.values()}) == 1
            and bool(rising.all())
            and ((records >= 0) & (records < num_records) & (starts >= 0) & (starts < stops)).all()
            and stops.max(initial=0) < 2**31
            and ages.min(initial=0) >= 0
            and 0 <= fresh <= len(records)
            and not ages[len(ages) - fresh :].any()
        )
        if not sound:
            raise StateError(
                f"the state's {len(records):,} waiting pieces are not pieces of {num_records:,} documents in the "
                "order of their arrival; it was cut or changed"
            )
        return cls(
            records=records,
            starts=starts.astype(np.int32),
            stops=stops.astype(np.int32),
            ages=ages.astype(np.int32),
        )


def _whole_numbers(values: Any, name: str) -> IntArray:
    """A list of a state as int64.

    Raises:
        StateError: it holds anything but whole numbers.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind != "i"):
        raise StateError(f"the state's {name} are no list of whole numbers; it was cut or changed")
    return array.astype(np.int64)


def nothing() -> Waiting:
    """No pieces."""
    empty = np.empty(0, np.int32)
    return Waiting(records=np.empty(0, np.int64), starts=empty, stops=empty, ages=empty)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """Pieces pack by pack."""

    pieces: Waiting
    offsets: IntArray
    """int64 `[num_packs + 1]`: where each pack's pieces begin."""

    def __len__(self) -> int:
        """Packs."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> IntArray:
        """int64 `[num_packs]`: pieces of each pack."""
        return np.diff(self.offsets)

    def space(self, multiple: int) -> IntArray:
        """Tokens that each pack takes up, its pieces rounded up to a multiple; int64 `[num_packs]`."""
        slots = -(-self.pieces.lengths.astype(np.int64) // multiple) * multiple
        return np.add.reduceat(slots, self.offsets[:-1]) if len(self) else slots[:0]

    def oldest(self) -> Int32Array:
        """The age of each pack's oldest piece, int32 `[num_packs]`."""
        ages = self.pieces.ages
        return np.maximum.reduceat(ages, self.offsets[:-1]) if len(self) else ages[:0]

    def where(self, chosen: npt.NDArray[np.bool_]) -> Packs:
        """Some of the packs."""
        return self._at(np.flatnonzero(chosen))

    def in_order(self) -> Packs:
        """The same packs in the order of their first piece."""
        first = self.pieces.take(self.offsets[:-1])
        return self._at(np.lexsort((first.starts, first.records)))

    def and_then(self, other: Packs) -> Packs:
        """These packs and others after them."""
        return Packs(
            pieces=self.pieces.and_then(other.pieces),
            offsets=np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
        )

    def _at(self, packs: IntArray) -> Packs:
        """Packs by number."""
        sizes = self.sizes[packs]
        ends = np.cumsum(sizes)
        index = np.arange(sizes.sum()) + np.repeat(self.offsets[packs] - (ends - sizes), sizes)
        return Packs(pieces=self.pieces.take(index), offsets=np.concatenate([[0], ends]).astype(np.int64))


def no_packs() -> Packs:
    """No packs."""
    return Packs(pieces=nothing(), offsets=np.zeros(1, np.int64))
