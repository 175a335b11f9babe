"""Slots of anonymous shared memory that a worker fills and a trainer reads; and the messages about their batches.

::

    worker   marks slot 2 ──► fills it ──► sends "slot 2 holds batch 7"
    trainer  lends slot 2 as an array ──► the last array over it dies ──► clears the mark

The memory has no name, so no other process can open it, and the system releases it however its processes end. A slot
is free again when the last array over it is gone, in whatever order batches die, so a batch is valid as long as it is
referenced. The marks are in shared memory too: the trainer frees a slot by writing one byte, and the worker polls.
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
    """Slots of one size. One process creates the ring; the other opens it by the descriptor `file`."""

    def __init__(self, slots: int, slot_bytes: int, file: int | None = None) -> None:
        self.slots, self.slot_bytes = slots, _whole_pages(slot_bytes)
        marks, total = _whole_pages(slots), max(slots * self.slot_bytes, mmap.PAGESIZE)
        self._lent: dict[int, weakref.ref[Bytes]] = {}
        """Weak references to the arrays over the slots; their callbacks run only while they are kept."""
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # the usual limit of tmpfs
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
        """All slots end to end, for registration with a driver."""
        return np.frombuffer(memoryview(self._memory), dtype=np.uint8)

    def slot(self, number: int) -> Bytes:
        """Return a slot's bytes, writable."""
        start = number * self.slot_bytes
        return np.frombuffer(memoryview(self._memory)[start : start + self.slot_bytes], dtype=np.uint8)

    def mark(self) -> int | None:
        """Mark a free slot and return its number; None if no slot is free. Only the filling process calls this."""
        for number in range(self.slots):
            if not self._marks[number]:
                self._marks[number] = 1
                return number
        return None

    def free(self, number: int) -> None:
        """Clear a slot's mark."""
        self._marks[number] = 0

    def free_but(self, held: AbstractSet[int]) -> None:
        """Free all slots except those held, after the process that filled them has died."""
        for number in range(self.slots):
            if number not in held:
                self._marks[number] = 0

    def lend(self, number: int, on_free: Callable[[object], object]) -> Bytes:
        """Return a slot's bytes; calls `on_free` when the array and all views of it are gone."""
        whole = self.slot(number)
        # A view's base is this array, not the memory below it, so this array lives exactly as long as its views.
        self._lent[number] = weakref.ref(whole, on_free)
        return whole

    def close(self) -> None:
        """Release the memory; the memory below live arrays stays until they die."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        self._marks = bytearray(self.slots)
        self._lent.clear()  # no slot is filled again
        self._memory = mmap.mmap(-1, 1)  # drops the reference to the ring's mapping


def _anonymous(size: int) -> int:
    """Return the descriptor of a new anonymous memory file."""
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


# Messages between the trainer's process and the worker; each begins with its kind.
#
# ::
#
#     kind     to       content
#     SPEC     worker   the spec of the feed, pickled; first of all
#     BEGIN    worker   JSON: run, step, micro-batch and position of the state to begin after
#     REPLY    worker   JSON: run, key, and the values of all ranks or an error message
#     ASK      trainer  JSON: run, key, and the values of this rank
#     AT       trainer  JSON: the position of the states that follow, whenever it changes
#     MADE     trainer  run, slot, step and micro-batch, 8 bytes each; then the message of the batch
#     LAST     trainer  run, 8 bytes; then the message of the end
#     FAILED   trainer  run and error, pickled


class Kind:
    """Kinds of messages."""

    SPEC, BEGIN, REPLY = b"spec", b"from", b"repl"
    ASK, AT, MADE, LAST, FAILED = b"ask_", b"at__", b"made", b"last", b"fail"


# A batch between two processes: arrays in a slot of shared memory, numbers in a message of a few hundred bytes.
#
# ::
#
#     slot      input_ids | labels | position_ids | segment_ids | cu_seqlens | document_ids | ...
#     message   {"arrays": {"input_ids": ["<i4", [8, 32768], 0], ...}, "numbers": {"num_targets": 261004, ...}}
#
# Arrays with a value per position are built in the slot; the others are copied behind them, and those that don't fit
# (packs of thousands of tiny documents) are part of the message.

_BY_POSITION = ("input_ids", "labels", "position_ids", "segment_ids")
_FIELDS = tuple(field.name for field in fields(PackedBatch))
_COUNTS = tuple(field.name for field in fields(BatchCounts))
_LEDGER = tuple(field.name for field in fields(Ledger))
_INT32 = np.dtype(np.int32)
_ALIGNED = 64
_COLUMN = "columns."
"""Prefix of columns' names."""
_SEGMENT_BYTES = 64
"""Bytes per segment of all arrays with a value per segment, at most."""
_TOKENS_PER_SEGMENT = 32
"""Average for which slots are sized; with shorter segments, some arrays are part of the message."""


def slot_bytes(positions: int, *, has_weights: bool = False) -> int:
    """Return the size of a slot for batches of `positions` positions, padding included."""
    return (
        positions * 4 * (len(_BY_POSITION) + has_weights)
        + (positions // _TOKENS_PER_SEGMENT + 1) * _SEGMENT_BYTES
        + 4096
    )


class Slot:
    """A slot that is being filled with one batch."""

    def __init__(self, memory: Bytes) -> None:
        self._memory, self._filled = memory, 0
        self._made: dict[str, tuple[npt.NDArray[Any], int]] = {}

    def arrays(self, shape: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
        """Return int32 arrays with a value per position, for `vl.collate` to fill.

        The arrays of a batch that is larger than the slot are new ones outside it, and become part of the message.
        """
        if (math.prod(shape) * _INT32.itemsize + _ALIGNED) * len(_BY_POSITION) > len(self._memory):
            return {name: np.empty(shape, np.int32) for name in _BY_POSITION}
        self._made = {name: self._take(_INT32, shape) for name in _BY_POSITION}
        return {name: array for name, (array, _) in self._made.items()}

    def _take(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], int]:
        """Return the next part of the memory as an array, and its offset."""
        start, size = self._filled, math.prod(shape) * dtype.itemsize
        self._filled = -(-(start + size) // _ALIGNED) * _ALIGNED
        return self._memory[start : start + size].view(dtype).reshape(shape), start

    def message(self, made: Made) -> bytes:
        """Copy the remaining arrays into the slot, and return the message with the offsets of all arrays."""
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
        payload = {
            "arrays": arrays,
            "numbers": numbers,
            "ledger": _to_json(ledger, made.losses),
            "skipped": made.skipped,
            "counts": [getattr(counts, name) for name in _COUNTS],
        }
        head = json.dumps(payload).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *reversed(inline)])

    def _put(self, value: npt.NDArray[Any]) -> int:
        """Copy an array behind the others; returns its offset, or -1 if there is no space."""
        if self._filled + value.nbytes > len(self._memory):
            return -1
        target, start = self._take(value.dtype, value.shape)
        target[...] = value
        return start


def read_made(message: bytes, memory: Bytes, state: FeedState) -> Made:
    """Return the batch of a message; its arrays are views of the slot's memory, or copies of those in the message."""
    size = int.from_bytes(message[:8], "little")
    content = json.loads(message[8 : 8 + size])
    values: dict[str, Any] = {**content["numbers"], "columns": {}}
    for name, (dtype, shape, start) in content["arrays"].items():
        kind = np.dtype(dtype)
        count = math.prod(shape)
        if start >= 0:
            values[name] = memory[start : start + count * kind.itemsize].view(kind).reshape(shape)
        else:  # an offset from the message's end, as the head's length wasn't known; a copy, to release the message
            flat = np.frombuffer(message, dtype=kind, count=count, offset=len(message) + start)
            values[name] = flat.reshape(shape).copy()
    for name in [name for name in values if name.startswith(_COLUMN)]:
        values["columns"][name.removeprefix(_COLUMN)] = values.pop(name)
    ledger, losses = _from_json(content["ledger"])
    counts = BatchCounts(**dict(zip(_COUNTS, content["counts"])))
    return Made(
        batch=PackedBatch.of(values),
        state=state,
        ledger=ledger,
        skipped=content["skipped"],
        losses=losses,
        counts=counts,
    )


def ended_message(ended: Ended) -> bytes:
    """Return the message of a feed's end."""
    return json.dumps(_to_json(ended.ledger, ended.losses)).encode()


def read_ended(message: bytes) -> Ended:
    """Read a message of `ended_message`."""
    ledger, losses = _from_json(json.loads(message))
    return Ended(ledger=ledger, losses=losses)


def _to_json(ledger: Ledger | None, losses: Losses | None) -> list[Any]:
    return [
        None if ledger is None else {name: getattr(ledger, name) for name in _LEDGER},
        None if losses is None else losses.to_json(),
    ]


def _from_json(values: list[Any]) -> tuple[Ledger | None, Losses | None]:
    ledger, losses = values
    return (
        None if ledger is None else Ledger(**ledger),
        None if losses is None else Losses.from_json(losses),
    )
