"""What a loader can't be: copied, read in a fork, or asked for single items."""

from __future__ import annotations

import os
from collections.abc import Callable

from varlen.batch.packed import PackedBatch
from varlen.errors import SettingError


class OfOneProcess:
    """A reader with a worker, of the process that made it."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def _is_fork(self) -> bool:
        """Whether this process came from the one that made it."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        """Refuse to read in a fork."""
        if self._is_fork:
            raise SettingError(
                f"this loader was made in process {self._process}, and this is a fork of it, process {os.getpid()}, "
                "without the worker that makes the batches; make a loader in the process that reads it"
            )

    def _in_process(self, close: Callable[[], None]) -> Callable[[], None]:
        """Return what ends the worker, and does nothing in a fork: the worker is the other process's."""
        process = self._process
        return lambda: close() if os.getpid() == process else None

    def __getitem__(self, _: object) -> PackedBatch:
        """Refuse to be a data set of single items, as PyTorch's DataLoader asks for them."""
        raise SettingError(
            "a PackedLoader gives whole batches in their order and no single items, so a DataLoader around it has "
            "nothing to do; iterate it as it is: for batch in loader"
        )

    def __bool__(self) -> bool:
        """Be true, without counting anything."""
        return True

    def __reduce__(self) -> str:
        """Refuse to be copied: there is one place, and one worker."""
        raise SettingError(
            "a loader can't be copied or handed to another process; make another one, and load this one's state_dict"
        )
