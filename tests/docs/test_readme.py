"""README's Python runs as it stands, and prints what README says that it prints."""

from __future__ import annotations

from pathlib import Path

import pages


def test_every_block_of_readme_prints_what_readme_says(root: Path) -> None:
    assert pages.differences(root / "README.md") == []


def test_the_first_python_of_readme_shows_its_output_on_the_first_screen(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    first = next(block for block in pages.blocks(text) if block.language == "python")
    output = pages.blocks(text)[pages.blocks(text).index(first) + 1]

    assert output.language == "text"
    assert output.line + output.code.count("\n") <= 40
