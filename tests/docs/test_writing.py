"""Pages say whom they are for, are short and listed, and quote messages, extras and names that exist."""

import ast
import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pages
import pytest
from tests.support.command_line import asked

import varlen as vl

DOCS = pages.ROOT / "docs"
WORDS = 1800
LONGER = ("reference/", "benchmarks.md", "strategies.md", "compatibility.md", "-results.md", "soak.md")
"""Pages of reference and results, which may be longer."""
READERS = r"anyone|engineers|everyone|maintainers|people|readers|users"
NAMES = [page.relative_to(DOCS).as_posix() for page in pages.pages() if page.is_relative_to(DOCS)]


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def opening(text: str) -> str:
    """The first two lines below a page's title."""
    return " ".join(text.split("\n\n", 1)[1].splitlines()[:2])


def words_of(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("name", NAMES)
def test_the_first_two_lines_say_whom_the_page_is_for(name):
    assert re.search(rf"\b[Ff]or ({READERS})\b", opening(text_of(name))), opening(text_of(name))


@pytest.mark.parametrize("name", [name for name in NAMES if not any(part in name for part in LONGER)])
def test_a_page_is_short_unless_it_is_reference_or_results(name):
    assert words_of(text_of(name)) <= WORDS


def test_the_exceptions_to_the_limit_are_pages():
    assert [part for part in LONGER if not any(part in name for name in NAMES)] == []


def listed(text: str) -> list[str]:
    """Pages of the site's hidden lists, in order."""
    lists = re.findall(r"^```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [f"{line}.md" for each in lists for line in each.split()]


def test_every_page_stands_once_in_a_list_of_the_site():
    found = [each for name in NAMES for each in listed(text_of(name))]

    assert sorted(found) == sorted(set(NAMES) - {"index.md"})


def test_the_first_page_links_what_its_lists_hold():
    text = text_of("index.md")
    linked = re.findall(r"\]\(([\w/-]+\.md)\)", text)

    assert set(listed(text)) - set(linked) == set()


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.relative_to(pages.ROOT).as_posix())
def test_public_names_on_a_page_are_public(page):
    named = set(re.findall(r"\bvl\.(\w+)", page.read_text(encoding="utf-8")))

    assert named - set(vl.__all__) == set()


@cache
def messages() -> str:
    """Texts of the code, one a line; what is filled in stands as an ellipsis."""
    found: set[str] = set()
    for path in (pages.ROOT / "src").rglob("*.py"):
        parts: set[int] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts |= {id(part) for part in node.values}
                found.add("".join(part.value if _is_text(part) else "…" for part in node.values))
            elif isinstance(node, ast.Expr):  # perhaps a docstring
                parts.add(id(node.value))
            elif _is_text(node) and id(node) not in parts:  # those above it came before
                found.add(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def quoted(text: str) -> list[str]:
    """Parts of messages that a page explains: in headings, or in the first column below "What fails"."""
    headings = re.findall(r'^### "(.+)"$', text, re.MULTILINE)
    _, _, table = text.partition("## What fails")
    return headings + re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def unknown(text: str) -> list[str]:
    """Quoted messages that no code has."""
    patterns = {
        each: ".*?".join(re.escape(part.strip()) for part in each.split("…")) for each in quoted(text)
    }
    return [each for each, pattern in patterns.items() if not re.search(pattern, messages())]


@pytest.mark.parametrize("name", ["troubleshooting.md", "long-documents.md", "several-nodes.md"])
def test_messages_that_a_page_explains_are_those_of_varlen(name):
    text = text_of(name)

    assert len(quoted(text)) >= 7
    assert unknown(text) == []


def test_a_message_that_nobody_says_is_found():
    assert unknown('### "is no setting; the … is"\n\n### "is no setting; the furthest … is"\n') == [
        "is no setting; the furthest … is"
    ]


def test_every_extra_stands_on_its_page_with_what_it_brings(root):
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    rows = dict(
        re.findall(r"^\| `([\w-]+)` \|(.*)\|$", text_of("extras.md").partition("Used where")[0], re.MULTILINE)
    )

    assert list(rows) == list(extras)
    for extra in set(extras) - {"dev"}:
        brought = {re.split(r"[\[<>=~]", each)[0] for each in extras[extra]}
        assert brought == set(re.split(r",\s*", rows[extra].rpartition("|")[2].strip())), extra


def test_modules_that_moved_are_where_the_page_says():
    moved = re.findall(
        r"^\| `(varlen\.[\w.]+)` \| `(varlen\.[\w.]+)` \|$", text_of("upgrading.md"), re.MULTILINE
    )

    assert len(moved) > 3
    for before, now in moved:
        assert importlib.util.find_spec(now) is not None
        folder = pages.ROOT / "src" / Path(*before.split("."))
        assert not folder.with_suffix(".py").exists()
        assert not folder.is_dir()


def test_figures_of_the_page_on_long_documents_are_those_of_the_results():
    _, _, text = text_of("long-documents.md").partition("## Figures")
    cells = re.findall(r"\d[\d,.]*\d", text.partition("## ")[0])
    results = text_of("running-results.md") + text_of("gpu-results.md")

    assert len(cells) > 20
    assert [cell for cell in cells if cell not in results] == []


@pytest.mark.parametrize("name", [name for name in NAMES if "```toml" in text_of(name)])
def test_settings_on_a_page_are_settings(name, tmp_path):
    for block in pages.blocks(text_of(name)):
        if block.language != "toml":
            continue
        table = tomllib.loads(block.code)
        needed = {
            "data.capacity": 8,
            "data.global_batch_size": 1,
            "data.source": "store",
            "model.type": "llama",
        }
        if {"source", "mixture"} & set(table.get("data", {})):
            del needed["data.source"]
        if "model" in table:
            del needed["model.type"]
        changes = [word for key, value in needed.items() for word in ("--set", f"{key}={value}")]
        (tmp_path / "config.toml").write_text(block.code, encoding="utf-8")

        said = asked("train", tmp_path / "config.toml", "--print-config", *changes)

        assert said.returncode == 0, said.stderr
