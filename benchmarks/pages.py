"""Pages of docs/ that are written from result files: tables, and the command that writes or checks a page.

Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a markdown table; all columns but the first stand to the right."""
    names = list(head)
    lines = [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def write(
    module: str, about: str | None, page: Path, fresh: Callable[[str], str], arguments: list[str] | None
) -> int:
    """Write what `fresh` makes of a page, or with --check say whether it is up to date; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where it is stale")
    is_check = parser.parse_args(arguments).check
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    try:
        after = fresh(before)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    if after != before and is_check:
        print(f"{page.name} is not what the newest result says; run `python -m {module}`", file=sys.stderr)
        return 1
    if after != before:
        page.write_text(after, encoding="utf-8")
    return 0
