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

import mmap
import os
import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from varlen.errors import SettingError

Bytes = npt.NDArray[np.uint8]


class Ring:
    """A number of slots of one size. Make it on one side, and hand `file` to the process on the other."""

    def __init__(self, slots: int, slot_bytes: int, file: int | None = None) -> None:
        """Take the number of slots and their size, and the open file of a ring that is there already.

        Raises:
            SettingError: no memory of this kind on this system, or not as much.
        """
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
        """Free all slots but some: whoever filled them is dead.

        Args:
            held: numbers of slots; they may be freed meanwhile.
        """
        for number in range(self.slots):
            if number not in held:
                self._marks[number] = 0

    def lend(self, number: int, on_free: Callable[[object], object]) -> Bytes:
        """Return a slot's bytes, to be read as long as anybody likes.

        Args:
            number: of the slot.
            on_free: called once no array over these bytes is left; it may be called from any thread, and in the
                middle of anything, so it must do no more than take note and `free` the slot.
        """
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
