"""The number of processors that this process may use, by its affinity and the quotas of its cgroups."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def processors(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Count the usable processors, at least one; a quota of 1.5 counts as 2."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([allowed, *(math.ceil(quota) for quota in _quotas(root, own))]), 1)


def _quotas(root: Path, own: Path) -> list[float]:
    """Return the quotas of this process's cgroups, in processors, for cgroup versions 1 and 2."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    quotas: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        inside = Path(path.strip("/"))
        # In a container, its cgroup may be mounted as the root, whatever its path is outside.
        for group in dict.fromkeys((base / inside, *(base / inside).parents, base)):
            if group == base or base in group.parents:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                values = [value for name in names for value in _read(group / name).split()]
                if len(values) == 2 and all(map(str.isdecimal, values)) and int(values[1]):
                    quotas.append(int(values[0]) / int(values[1]))
    return quotas


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
