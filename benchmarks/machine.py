"""What a figure was measured on: processor, memory, load and versions; no host names and no paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "numpy",
    "numba",
    "pyarrow",
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "axolotl",
    "seqpack",
    "megatron-bridge",
    "grain",
    "mosaicml-streaming",
)
"""Packages whose versions a result file holds."""


def machine() -> dict[str, str | int | float]:
    """Return the processor's name, its cores, the memory in GiB and the operating system."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def load() -> float:
    """Return how many processes wanted to run during the last minute; above 1 the figures are disturbed."""
    return round(os.getloadavg()[0], 2)


def versions() -> dict[str, str]:
    """Return the versions of varlen and of the packages measured beside it, "absent" where not installed."""
    import varlen

    found = {"varlen": varlen.__version__, "commit": _commit()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _cpu_model() -> str:
    """Read the processor's name where the kernel tells it; else what Python knows."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    if platform.system() == "Darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if asked.stdout.strip():
            return asked.stdout.strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Return the short name of the commit measured, with "+" where files differ from it."""
    root = Path(__file__).resolve().parents[1]
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"
