"""How many processors this process may use: those it may run on, and the share of them that its cgroup grants."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def processors(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Count the processors that this process may use, at least one; a quota of 1.5 counts as 2."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([allowed, *(math.ceil(quota) for quota in _quotas(root, own))]), 1)


def _quotas(root: Path, own: Path) -> list[float]:
    """Return the quotas of the cgroups that this process is in, in processors: of version 2 and of version 1."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        inside = Path(path.strip("/"))
        # In a container its own group may be mounted as the root, whatever its path is outside.
        for group in dict.fromkeys((base / inside, *(base / inside).parents, base)):
            if group == base or base in group.parents:
                quota = _quota_1(group) if controllers else _quota_2(group)
                found += [] if quota is None else [quota]
    return found


def _quota_2(group: Path) -> float | None:
    """Return the quota of a cgroup of version 2, or None where it has none."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _quota_1(group: Path) -> float | None:
    """Return the quota of a cgroup of version 1, or None where it has none."""
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
