"""The pages' Python and shell commands, run block by block, and what they print beside what the page says.

A page's blocks share their names and their folder, as in a notebook; blocks of `sh` are run by the shell. A block
of `text` right below one of them is what it prints. A block of Python or TOML whose first line is a comment with a
file name, such as `# train.py`, is written into that file and not run. `python docs/pages.py` writes into every page
what its blocks print now, `python docs/pages.py PAGE ...` into some.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs")
LONG = ("docs/heads.md", "docs/long-documents.md", "docs/own-trainer.md", "docs/several-nodes.md")
"""Pages whose examples take half a minute or more; the long tests run them."""
RUN = ("python", "sh", "toml")
"""Languages of blocks that are run, or written into files."""
_FILE = re.compile(r"# (?P<name>[\w-]+\.(?:py|toml))\n")
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$\n?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    code: str
    line: int
    """Line of the page on which its code begins, from 1."""
    start: int
    """Where the block begins in the page's text."""
    stop: int


@dataclass(frozen=True)
class Printed:
    """A block of Python, what the page says that it prints, and what it printed."""

    block: Block
    expected: str
    printed: str
    output: Block | None
    """The block of text that shows the output, if the page has one."""
    failed: bool
    """Whether it raised; what it printed then ends in the traceback."""


def pages(root: Path = ROOT) -> list[Path]:
    """Return every page of a checkout, README first."""
    found: list[Path] = []
    for name in PAGES:
        path = root / name
        found += sorted(path.glob("**/*.md")) if path.is_dir() else [path]
    return found


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page that name a language."""
    return [
        Block(
            language=match["language"],
            code=match["code"],
            line=text.count("\n", 0, match.start()) + 2,
            start=match.start(),
            stop=match.end(),
        )
        for match in _BLOCK.finditer(text)
    ]


def run(page: Path, folder: Path | None = None) -> list[Printed]:
    """Run the Python and shell blocks of a page in a folder of their own.

    Args:
        page: the page.
        folder: to be made, and kept; by default a temporary one.

    Returns:
        One record a block, in order. A block that raises prints its traceback, and ends the page.
    """
    text = page.read_text(encoding="utf-8")
    found = blocks(text)
    names: dict[str, Any] = {"__name__": "__page__"}
    records = []
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(_made(folder) or temporary):
        for block, after in zip(found, [*found[1:], None]):
            if block.language not in RUN:
                continue
            named = _FILE.match(block.code)
            if named is not None:
                Path(named["name"]).write_text(block.code, encoding="utf-8")
                continue
            if block.language == "toml":  # an excerpt
                continue
            below = (
                after is not None and after.language == "text" and not text[block.stop : after.start].strip()
            )
            output = after if below else None
            is_shell = block.language == "sh"
            printed, failed = _execute_in_shell(block) if is_shell else _execute(block, page, names)
            records.append(Printed(block, output.code if output else "", printed, output, failed))
            if failed:
                break
    return records


def _made(folder: Path | None) -> Path | None:
    """Make a folder, if one is named."""
    if folder is not None:
        folder.mkdir()
    return folder


def _execute(block: Block, page: Path, names: dict[str, Any]) -> tuple[str, bool]:
    """Run one block; returns what it printed and whether it raised."""
    stream = io.StringIO()
    # Lines of a traceback then are lines of the page.
    code = "\n" * (block.line - 1) + block.code
    with contextlib.redirect_stdout(stream):
        try:
            exec(compile(code, page.name, "exec"), names)
        except Exception:
            stream.write(traceback.format_exc(limit=-1))
            return stream.getvalue(), True
    return stream.getvalue(), False


def _execute_in_shell(block: Block) -> tuple[str, bool]:
    """Run commands of this environment; returns what they printed, errors last, and whether one failed."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run(["sh", "-e"], input=block.code, env=environment, capture_output=True, text=True)
    return run.stdout + (run.stderr if run.returncode else ""), run.returncode != 0


def differences(page: Path) -> list[str]:
    """Return one sentence for every block of a page that prints something else than the page says."""
    return [
        f"{page.name}:{record.block.line}: printed\n{record.printed}but the page says\n{record.expected}"
        for record in run(page)
        if record.printed != record.expected
    ]


def rewritten(page: Path) -> str:
    """Return a page's text with the output that its blocks print now; raises SystemExit where one raised."""
    text = page.read_text(encoding="utf-8")
    for record in reversed(run(page)):
        if record.failed:
            raise SystemExit(f"{page.name}:{record.block.line}: {record.printed}")
        place = record.output or Block("text", "", 0, record.block.stop, record.block.stop)
        output = f"```text\n{record.printed}```\n" if record.printed else ""
        gap = "" if record.output or not output else "\n"
        text = text[: place.start] + gap + output + text[place.stop :]
    return text


if __name__ == "__main__":
    for path in [*map(Path, sys.argv[1:])] or pages():
        path.write_text(rewritten(path), encoding="utf-8")
