"""The check of a built site finds what a reader would meet: links that lead nowhere, and files that lie elsewhere."""

from pathlib import Path

import pytest
import website

PAGE = """<html><head><link rel="stylesheet" href="look.css"><script src="find.js"></script></head>
<body><h1 id="top">A</h1><a href="#top">up</a> <a href="b.html#end">b</a> <a href="https://example.org/x">x</a> {}
<img src="a%20b.svg"></body></html>"""


def site(folder: Path, html: str = "", text: str = "") -> Path:
    files = {
        "a.html": PAGE.format(html),
        "b.html": '<p id="end">b</p>',
        "a.html.md": f"[b](b.html.md#end) {text}",
    }
    files |= dict.fromkeys(("look.css", "find.js", "a b.svg", "b.html.md"), "")
    files["llms.txt"] = "- [A](a.html.md): a"
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def test_a_site_whose_links_lead_somewhere_is_sound(tmp_path):
    assert list(website.faults(site(tmp_path))) == []


@pytest.mark.parametrize(
    ("html", "text", "said"),
    [
        ('<a href="c.html">c</a>', "", "a.html: c.html leads nowhere"),
        ('<a href="b.html#start">b</a>', "", "a.html: b.html#start leads nowhere"),
        ('<a href="#end">b</a>', "", "a.html: #end leads nowhere"),
        ('<img src="c.svg">', "", "a.html: c.svg leads nowhere"),
        (
            '<script src="https://example.org/x.js"></script>',
            "",
            "loads https://example.org/x.js from elsewhere",
        ),
        (
            '<link rel="stylesheet" href="//example.org/x.css">',
            "",
            "loads //example.org/x.css from elsewhere",
        ),
        ("", "[c](c.html.md)", "a.html.md: c.html.md leads nowhere"),
        ("", "see [`[plan]` below]()", "a.html.md: the link of 'code below' is empty"),
    ],
)
def test_a_link_that_leads_nowhere_and_a_file_from_elsewhere_are_found(html, text, said, tmp_path):
    (found,) = website.faults(site(tmp_path, html, text))

    assert said in found


def test_links_to_headings_of_the_same_page_are_kept():
    source = "see [below](#one), [`[plan]`](#two), [below](#three), [a\nb](#four) and [b](b.md)"
    built = "| [below]() | see [`[plan]`]() | [below]() | [a b]() and [b](b.html.md), not [else]()"

    assert website._with_links_within(built, source) == (
        "| [below](#one) | see [`[plan]`](#two) | [below](#three) | [a b](#four) and [b](b.html.md), not [else]()"
    )


def test_code_that_looks_like_a_link_is_none(tmp_path):
    assert list(website.faults(site(tmp_path, text="`calls[0]()`\n\n```python\ncalls[0]()\n```"))) == []
