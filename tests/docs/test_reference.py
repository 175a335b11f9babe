"""The pages of reference hold every public name, setting, option and word."""

import importlib
import inspect
import re

import pytest
import reference

import varlen as vl
import varlen.train

DOCS = reference.FOLDER.parent


def headings(name: str, level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", (DOCS / name).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_public_name_is_in_the_reference():
    named = re.findall(
        r"^\.\. auto\w+:: varlen\.(\w+)$", (DOCS / "reference/api.md").read_text(), re.MULTILINE
    )

    errors = {name for name in vl.__all__ if getattr(getattr(vl, name), "__module__", "") == "varlen.errors"}
    assert set(named) == set(vl.__all__) - errors | {"errors"}
    assert len(named) == len(set(named))


def test_every_public_name_of_training_is_in_the_reference():
    text = (DOCS / "reference/api.md").read_text()
    named = re.findall(r"^\.\. auto\w+:: varlen\.train\.(\w+)$", text, re.MULTILINE)

    assert sorted(named) == sorted(varlen.train.__all__)
    assert all(getattr(varlen.train, name).__name__ == name for name in named)


@pytest.mark.parametrize("made", [reference.settings_page, reference.cli_page], ids=["settings", "cli"])
def test_pages_of_declarations_are_up_to_date(made):
    name = {"settings_page": "settings.md", "cli_page": "cli.md"}[made.__name__]

    assert (reference.FOLDER / name).read_text(encoding="utf-8") == made(), "run: python docs/reference.py"


def test_what_pages_on_proofs_use_is_in_the_reference():
    text = (DOCS / "reference/api.md").read_text()
    named = re.findall(r"^\.\. auto\w+:: varlen\.verify\.([\w.]+)\.(\w+)$", text, re.MULTILINE)

    found = {name: getattr(importlib.import_module(f"varlen.verify.{room}"), name) for room, name in named}
    assert {*found} == {"BatchReport", "Finding", "IsolationReport", "Movements", "check_isolation"}
    assert inspect.getdoc(found["check_isolation"]).count("Args:") == 1


TABLES = ["data", "model", "optimizer", "run", "log", "measure", "plan", "eval", "track", "adapter", "sample"]


def test_every_table_and_verb_has_a_section():
    assert headings("reference/settings.md", 2) == [f"`[{name}]`" for name in TABLES]
    verbs = ("demo", "index", "inspect", "pack", "plan", "train", "verify")
    assert sorted(headings("reference/cli.md", 2)) == [f"`varlen {verb}`" for verb in verbs]


def test_every_setting_says_what_it_is_for():
    rows = [row for row in reference.settings_page().splitlines() if row.startswith("| `")]
    silent = [row.split("`")[1] for row in rows if row.endswith("|  |")]

    assert silent == ["device"]


def test_words_of_the_glossary_are_in_order():
    text = (DOCS / "reference/glossary.md").read_text(encoding="utf-8")
    words = [word for word, _ in re.findall(r"^(\S.*)\n(: )", text, re.MULTILINE)]

    assert len(words) > 30
    assert words == sorted(words, key=lambda word: word.lower().replace("_", " "))
