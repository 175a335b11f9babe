"""How much memory this process holds and held at most, where the kernel tells.

`getrusage` won't do: on Linux a new process inherits the peak of the one that started it.
"""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
TELLS_RESIDENT = _STATUS.exists()
"""Whether what is held now is known; elsewhere only what was held at most."""


def forget_peak() -> None:
    """Let the peak start anew from what is held now; where that can't be done, it only comes out higher."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the most memory held so far."""
    return _status("VmHWM")


def resident_bytes() -> int:
    """Return the memory held now; on macOS the most held so far, so that differences are at least told."""
    return _status("VmRSS")


def _status(name: str) -> int:
    """Read a size from Linux's account of this process, or the peak from `getrusage` elsewhere."""
    if not TELLS_RESIDENT:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return int(kilobytes) * 1024
