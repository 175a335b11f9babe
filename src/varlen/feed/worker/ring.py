"""Slots of memory that a worker fills and a trainer reads, in no file system and for no other user.

::

    worker   marks slot 2 ──► fills it ──► says "slot 2 holds batch 7"
    trainer  lends slot 2 as an array ──► the last array over it dies ──► takes the mark away

The memory has no name, so nobody can open it and nothing is left of it, however its processes end. A slot is free
again when the last array over it is gone, whatever order batches die in, so that a batch keeps its bytes as long as
anybody holds it. The marks lie in the memory too: to free a slot is to write a byte, which costs the trainer nothing,
and whoever needs a slot looks for one.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch.packed import PackedBatch
from varlen.errors import SettingError
from varlen.feed.protocol import BatchCounts, Ended, Made, counts_of
from varlen.feed.state import FeedState
from varlen.files.losses import Losses
from varlen.types import Ledger

Bytes = npt.NDArray[np.uint8]


class Ring:
    """A number of slots of one size. Make it on one side, and hand `file` to the process on the other."""

    def __init__(self, slots: int, slot_bytes: int, file: int | None = None) -> None:
        self.slots, self.slot_bytes = slots, _whole_pages(slot_bytes)
        marks, total = _whole_pages(slots), max(slots * self.slot_bytes, mmap.PAGESIZE)
        self._lent: dict[int, weakref.ref[Bytes]] = {}
        """The last loan of each slot, which must live to take note of its end."""
        limit = (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        )  # as file systems in memory have it
        if total > limit:
            raise SettingError(
                f"{slots:,} slots of {slot_bytes / 1e6:,.1f} MB are more than half of this machine's memory "
                f"({2 * limit / 1e9:,.1f} GB); take fewer slots, or smaller batches"
            )
        try:
            self.file = _anonymous(marks + total) if file is None else file
            self._marks: mmap.mmap | bytearray = mmap.mmap(self.file, marks)
            self._memory = mmap.mmap(self.file, total, offset=marks)
        except (OSError, AttributeError) as error:
            raise SettingError(
                f"{slots:,} slots of {slot_bytes / 1e6:,.1f} MB can't be shared with a process here ({error}); pass "
                'worker="thread", or fewer slots'
            ) from error

    @property
    def memory(self) -> Bytes:
        """All slots end to end, to be registered with a driver."""
        return np.frombuffer(memoryview(self._memory), dtype=np.uint8)

    def slot(self, number: int) -> Bytes:
        """Return a slot's bytes, to be filled."""
        start = number * self.slot_bytes
        return np.frombuffer(memoryview(self._memory)[start : start + self.slot_bytes], dtype=np.uint8)

    def mark(self) -> int | None:
        """Mark a free slot and return its number, None where there is none; for the one process that fills slots."""
        for number in range(self.slots):
            if not self._marks[number]:
                self._marks[number] = 1
                return number
        return None

    def free(self, number: int) -> None:
        """Take the mark of a slot away."""
        self._marks[number] = 0

    def free_but(self, held: AbstractSet[int]) -> None:
        """Free all slots but some: whoever filled them is dead."""
        for number in range(self.slots):
            if number not in held:
                self._marks[number] = 0

    def lend(self, number: int, on_free: Callable[[object], object]) -> Bytes:
        """Return a slot's bytes, to be read as long as anybody likes."""
        whole = self.slot(number)
        # Arrays over arrays keep this one alive, and nothing else does: they never reach past it to the memory.
        self._lent[number] = weakref.ref(whole, on_free)
        return whole

    def close(self) -> None:
        """Give the memory back; arrays that are left keep theirs until they die."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        self._marks = bytearray(self.slots)
        self._lent.clear()  # nobody fills slots any more
        self._memory = mmap.mmap(-1, 1)  # the other one has a descriptor of its own


def _anonymous(size: int) -> int:
    """Return an open file of memory alone, readable by nobody who isn't given it."""
    file = os.memfd_create("varlen", os.MFD_CLOEXEC)
    try:
        os.fchmod(file, 0o600)
        os.ftruncate(file, size)
    except OSError:
        os.close(file)
        raise
    return file


def _whole_pages(size: int) -> int:
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


# A batch between two processes: its arrays in a slot of memory that both see, its numbers in a few hundred bytes.
#
# ::
#
#     slot      input_ids | labels | position_ids | segment_ids | cu_seqlens | document_ids | ...
#     message   {"arrays": {"input_ids": ["<i4", [8, 32768], 0], ...}, "numbers": {"num_targets": 261004, ...}}
#
# The arrays of a value a position are made in the slot; the others are copied behind them, and what doesn't fit there
# (packs of thousands of tiny documents) goes with the message.

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
    """Return the size of a slot for batches of so many positions, padding counted."""
    return (
        positions * 4 * (len(_BY_POSITION) + has_weights)
        + (positions // _TOKENS_A_SEGMENT + 1) * _SEGMENT_BYTES
        + 4096
    )


class Slot:
    """A slot that is being filled with one batch."""

    def __init__(self, memory: Bytes) -> None:
        self._memory, self._filled = memory, 0
        self._made: dict[str, tuple[npt.NDArray[Any], int]] = {}

    def arrays(self, shape: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
        """Return int32 arrays for the values of positions, as `vl.collate` fills them.

        Those of a batch that is larger than the slot are new, and go with the message.
        """
        if (math.prod(shape) * _INT32.itemsize + _ALIGNED) * len(_BY_POSITION) > len(self._memory):
            return {name: np.empty(shape, np.int32) for name in _BY_POSITION}
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
    """Return the batch that a message speaks of; its arrays lie in the memory, but for those that came with it."""
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
