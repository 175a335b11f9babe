"""Build the pages as a site, and check what a browser and a program would read: `python docs/website.py FOLDER`.

The site is plain files: it works from a disk, loads nothing from elsewhere, and each page stands beside its Markdown.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

DOCS = Path(__file__).resolve().parent
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TEXT = r"\[((?:[^\[\]]|\[[^\]]*\])*)\]"
_WITHIN = re.compile(_TEXT + r"\((#[^)\s]+)\)")
_EMPTY = re.compile(_TEXT + r"\(\s*\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src"}


class _Page(HTMLParser):
    """What a page of HTML links to and loads, and the names of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.links, self.loaded, self.places = list[str](), list[str](), set[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one tag."""
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag in _LOADING and _LOADING[tag] in given:
            self.loaded.append(given[_LOADING[tag]])
        if "href" in given:
            (self.loaded if tag == "link" else self.links).append(given["href"])


def build(folder: Path) -> None:
    """Write the site into a folder; raises SystemExit if a page has a fault that Sphinx finds."""
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--fail-on-warning", "--quiet"]
    command += ["--fresh-env", "--doctree-dir", str(folder / ".doctrees"), str(DOCS), str(folder)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)
    _complete_markdown(folder)


def _complete_markdown(folder: Path) -> None:
    """Let the pages' Markdown find its pictures and downloads, which its builder links to as sources do."""
    shutil.copytree(DOCS / "images", folder / "images", dirs_exist_ok=True)
    for path in sorted(folder.rglob("*.md")):
        up = "../" * (len(path.relative_to(folder).parts) - 1)
        text = path.read_text(encoding="utf-8").replace("](_downloads/", f"]({up}_downloads/")
        source = DOCS / str(path.relative_to(folder)).replace(".html.md", ".md")
        if source.is_file():
            text = _with_links_within(text, source.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")


def _with_links_within(text: str, source: str) -> str:
    """Return a page whose links to its own headings lead there; the builder leaves them empty."""
    known: dict[str, list[str]] = {}
    for words, target in _WITHIN.findall(source):
        known.setdefault(" ".join(words.split()), []).append(target)

    def linked(found: re.Match[str]) -> str:
        targets = known.get(" ".join(found[1].split()))
        return f"[{found[1]}]({targets.pop(0)})" if targets else found[0]

    return _EMPTY.sub(linked, text)


def faults(folder: Path) -> Iterator[str]:
    """Yield a sentence for each link of a built site that leads nowhere, and for each file that lies elsewhere."""
    for path in sorted(folder.rglob("*.html")):
        page = _page(path)
        for target in page.loaded:
            if urlsplit(target).scheme not in ("", "data") or urlsplit(target).netloc:
                yield f"{path.relative_to(folder)}: loads {target} from elsewhere"
        for target in (*page.links, *page.loaded):
            if not _leads_somewhere(path, target):
                yield f"{path.relative_to(folder)}: {target} leads nowhere"
    for path in (folder / "llms.txt", *sorted(folder.rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for words in _EMPTY.findall(_CODE.sub("code", text)):
            yield f"{path.relative_to(folder)}: the link of {words!r} is empty"
        for target in _LINK.findall(text):
            if not _leads_somewhere(path, target.partition("#")[0]):
                yield f"{path.relative_to(folder)}: {target} leads nowhere"


def _leads_somewhere(path: Path, target: str) -> bool:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return True
    found = path.parent / unquote(parts.path) if parts.path else path
    if not found.is_file():
        return False
    return not parts.fragment or found.suffix != ".html" or unquote(parts.fragment) in _page(found).places


@cache
def _page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def main(folder: Path) -> None:
    """Build the site and check it."""
    build(folder)
    found = list(faults(folder))
    if found:
        sys.exit("\n".join(found))
    print(folder / "index.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
