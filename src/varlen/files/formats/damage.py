"""Whether a failed read is due to the file, or to the disk, the network or this machine."""

from __future__ import annotations

import re

from varlen.errors import VarlenError

_NO_MEMORY = 1 << 42  # more bytes than any machine has


def is_damage(error: Exception) -> bool:
    """Whether a failure is due to the file, and not to the disk, the network or this machine."""
    if isinstance(error, MemoryError):  # a damaged length requests an absurd allocation
        return any(int(size) >= _NO_MEMORY for size in re.findall(r"\d+", str(error)))
    return not isinstance(error, VarlenError) and getattr(error, "errno", None) is None
