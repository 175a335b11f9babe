"""Slots of memory that a worker fills and a trainer reads, in no file system and for no other user.

::

    worker   fills slot 2 ──► says "slot 2 holds batch 7"
    trainer  lends slot 2 as an array ──► the last array over it dies ──► says "slot 2 is free"

The memory has no name, so nobody can open it and nothing is left of it, however its processes end. A slot is free
again when the last array over it is gone, whatever order batches die in, so that a batch keeps its bytes as long as
anybody holds it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable

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
        total = max(slots * self.slot_bytes, mmap.PAGESIZE)
        limit = (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        )  # as file systems in memory have it
        if total > limit:
            raise SettingError(
                f"{slots:,} slots of {slot_bytes / 1e6:,.1f} MB are more than half of this machine's memory "
                f"({2 * limit / 1e9:,.1f} GB); take fewer slots, or smaller batches"
            )
        try:
            self.file = _anonymous(total) if file is None else file
            self._memory = mmap.mmap(self.file, total)
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

    def lend(self, number: int, on_free: Callable[[int], object]) -> Bytes:
        """Return a slot's bytes, to be read as long as anybody likes.

        Args:
            number: of the slot.
            on_free: called with the number once no array over these bytes is left; it may be called from any thread,
                and in the middle of anything, so it must do no more than take note.
        """
        whole = self.slot(number)
        # Arrays over arrays keep this one alive, and nothing else does: they never reach past it to the memory.
        weakref.finalize(whole, on_free, number).atexit = False
        return whole

    def close(self) -> None:
        """Give the memory back; arrays that are left keep theirs until they die."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
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
