"""Result files: where they lie, what each says of machine and versions, and files that are written part by part.

A file names no host and no path.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Collection
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def machine() -> dict[str, str | int | float]:
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

    # The short name of the commit measured, with "+" where files differ from it.
    commit = _said("git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*")
    found = {"varlen": varlen.__version__, "commit": commit or "unknown"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def stamp() -> dict[str, Any]:
    return {"date": today(), "machine": machine(), "versions": versions()}


def _cpu_model() -> str:
    """Read the processor's name where the kernel tells it; else what Python knows."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    named = _said("sysctl", "-n", "machdep.cpu.brand_string") if platform.system() == "Darwin" else ""
    return named or platform.processor() or platform.machine()


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def newest(folder: Path) -> Path:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"no result file in benchmarks/{folder.name}; run `make bench`")
    return files[-1]


def save(result: Any, out: Path) -> None:
    """Write a result file, or text that is one, whole or not at all."""
    text = result if isinstance(result, str) else json.dumps(result, indent=1) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(out)


def parser(name: str, about: str | None, parts: Collection[str], *, quick: str) -> argparse.ArgumentParser:
    """Return what benchmarks that run part by part can be asked for; `quick` says what little --quick runs."""
    result = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=about)
    result.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all by default")
    result.add_argument(
        "--out", type=Path, help="result file; by default one of today under benchmarks/results"
    )
    result.add_argument("--again", action="store_true", help="throw away what the file holds of the parts")
    result.add_argument("--quick", action="store_true", help=quick)
    return result


def asked_for(
    reader: argparse.ArgumentParser, parts: Collection[str], arguments: list[str] | None
) -> argparse.Namespace:
    """Read arguments, and name all parts where none was named; ends the program where they make no sense."""
    asked = reader.parse_args(arguments)
    unknown = sorted(set(asked.parts) - set(parts))
    if unknown:
        reader.error(f"unknown part {unknown[0]!r}; there are {', '.join(parts)}")
    if asked.quick and asked.out is None:
        reader.error("--quick measures nothing worth keeping; say where it goes with --out")
    asked.parts = [part for part in parts if not asked.parts or part in asked.parts]
    return asked


def opened(asked: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Path]:
    """Return what the result file holds, but the parts that are measured again, and the file."""
    out: Path = asked.out or folder / f"{today()}.json"
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"parts": {}}
    for name in asked.parts if asked.again else ():
        result["parts"].pop(name, None)
    return result, out


def rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {str(key): rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part, digits) for part in value]
    return value
