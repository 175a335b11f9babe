"""Whose fault a failure of reading is: the file's, or the disk's, the network's or this machine's."""

from __future__ import annotations

import re

from varlen.errors import VarlenError

_NO_MEMORY = 1 << 42
"""Bytes that no machine has."""


def is_damage(error: Exception) -> bool:
    """Whether a failure is the file's, and neither the disk's nor the network's nor this machine's."""
    if isinstance(error, MemoryError):  # a damaged length asks for more than there is anywhere
        return any(int(size) >= _NO_MEMORY for size in re.findall(r"\d+", str(error)))
    return not isinstance(error, VarlenError) and getattr(error, "errno", None) is None
