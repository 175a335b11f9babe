"""How far reading has come: parts that are done, and the bytes read of the one that is being read."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Watch:
    """Tells how far reading has come, as parts are done and, where it is told of them, as bytes are read."""

    def __init__(self, sizes: Sequence[int], on_progress: Callable[[int, int, str], None]) -> None:
        self._sizes, self._total = sizes, max(sum(sizes), 1)
        self._on_progress = on_progress
        self._done = self._parts = self._read = 0
        self._reached: dict[str, int] = {}
        on_progress(0, self._total, "tokenizing")

    def read(self, path: str, start: int, stop: int) -> None:
        """Take note of a file's bytes [start, stop), read for the first part that isn't done.

        A file is opened several times, to see what it is; its bytes count once. Of tables, whose end is read first,
        nothing counts until a part of them is done.
        """
        reached = self._reached.get(path, 0)
        if stop <= reached:
            return
        self._reached[path] = stop
        self._read += stop - max(start, reached)
        within = min(self._read, self._sizes[self._parts]) if self._parts < len(self._sizes) else 0
        self._on_progress(self._done + within, self._total, "tokenizing")

    def finish(self, part: int) -> None:
        """Take note of a part that is done, by its number."""
        self._done += self._sizes[part]
        self._parts += 1
        self._read = 0
        self._on_progress(self._done, self._total, "tokenizing")
