"""The pages are true: Python runs and prints what they say, links lead somewhere, pictures are current."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import draw
import pages
import pytest

PAGES = {page.relative_to(pages.ROOT).as_posix(): page for page in pages.pages()}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS = ("make", "varlen", "pip", "git", "cd", "python", "torchrun", "axolotl", ".ci/run")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Return the links of a page to files or headings that aren't there."""
    found = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?://[\w.-]+\.\w+(/\S*)?$", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists():
            found.append(f"{page.name}: {target} leads nowhere")
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            found.append(f"{page.name}: {target} names no heading")
    return found


@cache
def has_help(verb: str) -> bool:
    """Whether `varlen` knows a verb; pages name a few of them, many times."""
    return (
        subprocess.run([sys.executable, "-m", "varlen", verb, "--help"], capture_output=True).returncode == 0
    )


@pytest.mark.parametrize("name", [name for name in PAGES if name != "README.md"])
def test_every_block_of_the_page_prints_what_the_page_says(name: str) -> None:
    assert pages.differences(PAGES[name]) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_the_page_leads_somewhere(name: str) -> None:
    assert dead_links(PAGES[name]) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_the_page_is_one_that_exists(name: str, root: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block in pages.blocks(PAGES[name].read_text(encoding="utf-8")):
        for line in block.code.splitlines() if block.language == "bash" else ():
            words = [word for word in shlex.split(line, comments=True) if "=" not in word]
            assert not words or words[0] in COMMANDS, line
            for word in words:  # a page may say in which folder of examples its commands are
                is_there = (root / word).is_file() or any((root / "examples").rglob(word))
                assert not word.endswith(".py") or is_there, line
            if words[:1] == ["make"]:
                assert set(words[1:]) <= targets, line
            if words[:1] == ["varlen"]:
                assert has_help(words[1]), line


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_the_page_names_is_there(name: str, root: Path) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    for file, test in re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)(?:::(\w+))?`", text):
        code = (root / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in code, (file, test)


def test_every_page_is_reached_from_readme() -> None:
    reached, waiting = set(), [pages.ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if not target.startswith(("http", "#")):
                waiting.append(page.parent / target.partition("#")[0])

    assert {page.resolve() for page in PAGES.values()} - reached == set()


@pytest.mark.parametrize("name", draw.PICTURES)
def test_the_picture_is_drawn_from_what_varlen_computes_now(name: str) -> None:
    drawn = (draw.IMAGES / f"{name}.svg").read_text(encoding="utf-8")

    assert drawn == draw.PICTURES[name]().svg(), "run `make pages`"


def test_every_picture_is_drawn_by_a_program_and_shown_on_a_page() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES.values()
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if target.endswith(".svg")
    }

    assert shown == {path.resolve() for path in draw.IMAGES.iterdir() if path.suffix == ".svg"}
    assert {path.stem for path in draw.IMAGES.iterdir()} >= set(draw.PICTURES)


PAGE = """
# A page

```python
a = 1
print(a)
```

```text
1
```

```python
print(a + 1)
```

Words between, so this is no output.

```text
3
```
"""


def test_a_page_that_prints_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)

    (difference,) = pages.differences(page)

    assert difference == "page.md:14: printed\n2\nbut the page says\n"


def test_a_page_is_written_anew_with_what_it_prints(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("```text\n1", "```text\n7"))

    page.write_text(pages.rewritten(page))

    assert pages.differences(page) == []
    assert page.read_text() == PAGE.replace("print(a + 1)\n```\n", "print(a + 1)\n```\n\n```text\n2\n```\n")


def test_a_block_that_raises_is_found_and_ends_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("a = 1", "a = 1 / 0"))

    (difference,) = pages.differences(page)

    assert "ZeroDivisionError" in difference
    assert 'File "page.md", line 5' in difference
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        pages.rewritten(page)


@pytest.mark.parametrize("link", ["[a](missing.md)", "[a](#missing)", "[a](page.md#missing)", "![a](a.svg)"])
def test_a_link_that_leads_nowhere_is_found(link: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n[a](#here) [b](page.md#here) {link}\n")

    assert len(dead_links(page)) == 1
