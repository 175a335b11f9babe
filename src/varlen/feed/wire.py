"""A batch between two processes: its arrays in a slot of memory that both see, its numbers in a few hundred bytes.

::

    slot      input_ids | labels | position_ids | segment_ids | cu_seqlens | document_ids | ...
    message   {"arrays": {"input_ids": ["<i4", [8, 32768], 0], ...}, "numbers": {"num_targets": 261004, ...}}

The arrays of a value a position are made in the slot; the others are copied behind them, and what doesn't fit there
(packs of thousands of tiny documents) goes with the message.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch.packed import PackedBatch
from varlen.feed.feed import BatchCounts, Ended, Made, counts_of
from varlen.feed.ring import Bytes
from varlen.feed.state import FeedState
from varlen.files.losses import Losses
from varlen.types import Ledger

_BY_POSITION = ("input_ids", "labels", "position_ids", "segment_ids")
_FIELDS = tuple(field.name for field in fields(PackedBatch))
_COUNTS = tuple(field.name for field in fields(BatchCounts))
_LEDGER = tuple(field.name for field in fields(Ledger))
_INT32 = np.dtype(np.int32)
_ALIGNED = 64
_COLUMN = "columns."
"""Stands before the names of columns."""
_SEGMENT_BYTES = 64
"""Arrays with a value a segment take at most so much of each."""
_TOKENS_A_SEGMENT = 32
"""Fewer than these on the average, and some arrays go with the message."""


def slot_bytes(positions: int, *, has_weights: bool = False) -> int:
    """Return the size of a slot for batches of so many positions, padding counted.

    Args:
        positions: of a batch.
        has_weights: it may hold `target_weights`.
    """
    return (
        positions * 4 * (len(_BY_POSITION) + has_weights)
        + (positions // _TOKENS_A_SEGMENT + 1) * _SEGMENT_BYTES
        + 4096
    )


class Slot:
    """A slot that is being filled with one batch."""

    def __init__(self, memory: Bytes) -> None:
        """Take its bytes."""
        self._memory, self._filled = memory, 0
        self._made: dict[str, tuple[npt.NDArray[Any], int]] = {}

    def arrays(self, shape: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
        """Return int32 arrays for the values of positions, as `vl.collate` fills them."""
        self._made = {name: self._take(_INT32, shape) for name in _BY_POSITION}
        return {name: array for name, (array, _) in self._made.items()}

    def _take(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], int]:
        """Return the next part of the memory as an array, and where it begins."""
        start, size = self._filled, math.prod(shape) * dtype.itemsize
        self._filled = -(-(start + size) // _ALIGNED) * _ALIGNED
        return self._memory[start : start + size].view(dtype).reshape(shape), start

    def message(self, made: Made) -> bytes:
        """Put what isn't in the slot yet there, and return what says where everything is."""
        batch = made.batch
        arrays: dict[str, Any] = {}
        numbers: dict[str, Any] = {}
        inline: list[bytes] = []
        sent = 0
        held = {name: getattr(batch, name) for name in _FIELDS}
        columns = held.pop("columns")
        for name, value in (*held.items(), *((f"{_COLUMN}{name}", value) for name, value in columns.items())):
            if not isinstance(value, np.ndarray):
                numbers[name] = value
                continue
            made_here, start = self._made.get(name, (None, -1))
            if made_here is not value:
                start = self._put(value)
            if start < 0:
                content = np.ascontiguousarray(value).tobytes()
                inline.append(content)
                sent += len(content)
                start = -sent
            arrays[name] = [value.dtype.str, value.shape, start]
        counts, ledger = counts_of(batch), made.ledger
        said = {
            "arrays": arrays,
            "numbers": numbers,
            "told": _told(ledger, made.losses),
            "skipped": made.skipped,
            "counts": [getattr(counts, name) for name in _COUNTS],
        }
        head = json.dumps(said).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *reversed(inline)])

    def _put(self, value: npt.NDArray[Any]) -> int:
        """Copy an array behind the others; returns where, or -1 where there is no room."""
        if self._filled + value.nbytes > len(self._memory):
            return -1
        room, start = self._take(value.dtype, value.shape)
        room[...] = value
        return start


def read_made(message: bytes, memory: Bytes, state: FeedState) -> Made:
    """Return the batch that a message speaks of; its arrays lie in the memory, but for those that came with it.

    Args:
        message: of `Slot.message`.
        memory: of the slot.
        state: after the batch.
    """
    size = int.from_bytes(message[:8], "little")
    said = json.loads(message[8 : 8 + size])
    found: dict[str, Any] = {**said["numbers"], "columns": {}}
    for name, (dtype, shape, start) in said["arrays"].items():
        kind = np.dtype(dtype)
        count = math.prod(shape)
        if start >= 0:
            found[name] = memory[start : start + count * kind.itemsize].view(kind).reshape(shape)
        else:  # counted from the message's end, since its length wasn't known; and it is not to be kept alive
            flat = np.frombuffer(message, dtype=kind, count=count, offset=len(message) + start)
            found[name] = flat.reshape(shape).copy()
    for name in [name for name in found if name.startswith(_COLUMN)]:
        found["columns"][name.removeprefix(_COLUMN)] = found.pop(name)
    ledger, losses = _heard(said["told"])
    counts = BatchCounts(**dict(zip(_COUNTS, said["counts"])))
    return Made(
        batch=PackedBatch.of(found),
        state=state,
        ledger=ledger,
        skipped=said["skipped"],
        losses=losses,
        counts=counts,
    )


def ended_message(ended: Ended) -> bytes:
    """Return what says that no batch follows."""
    return json.dumps(_told(ended.ledger, ended.losses)).encode()


def read_ended(message: bytes) -> Ended:
    """Return what a message of `ended_message` says."""
    ledger, losses = _heard(json.loads(message))
    return Ended(ledger=ledger, losses=losses)


def _told(ledger: Ledger | None, losses: Losses | None) -> list[Any]:
    return [
        None if ledger is None else {name: getattr(ledger, name) for name in _LEDGER},
        None if losses is None else losses.to_json(),
    ]


def _heard(told: list[Any]) -> tuple[Ledger | None, Losses | None]:
    ledger, losses = told
    return (
        None if ledger is None else Ledger(**ledger),
        None if losses is None else Losses.from_json(losses),
    )
