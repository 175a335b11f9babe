"""Benchmarks that are run part by part, whose records are kept as they come: their arguments, and their figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def parser(name: str, about: str | None, parts: Collection[str], *, quick: str) -> argparse.ArgumentParser:
    """Return what all such benchmarks can be asked for.

    Args:
        name: as `python -m benchmarks NAME` has it; results lie in its folder.
        about: the docstring of its file.
        parts: that there are.
        quick: what little is run with --quick.
    """
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
    """Read arguments, and name all parts where none was named; ends the program where they make no sense.

    Args:
        reader: of `parser`.
        parts: that there are.
        arguments: None for those of the program.
    """
    asked = reader.parse_args(arguments)
    unknown = sorted(set(asked.parts) - set(parts))
    if unknown:
        reader.error(f"unknown part {unknown[0]!r}; there are {', '.join(parts)}")
    if asked.quick and asked.out is None:
        reader.error("--quick measures nothing worth keeping; say where it goes with --out")
    asked.parts = [part for part in parts if not asked.parts or part in asked.parts]
    return asked


def opened(asked: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Path]:
    """Return what the result file holds, but the parts that are measured again, and the file.

    Args:
        asked: of `asked_for`.
        folder: of results, with a file a day.
    """
    out: Path = asked.out or folder / f"{datetime.now(UTC).date().isoformat()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"parts": {}}
    for name in asked.parts if asked.again else ():
        result["parts"].pop(name, None)
    return result, out


def rounded(value: Any, digits: int) -> Any:
    """Return plain data with floats of so many digits that count."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {str(key): rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part, digits) for part in value]
    return value
