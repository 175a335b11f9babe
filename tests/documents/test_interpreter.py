"""The interpreter's own sources as documents."""

import pytest

from varlen.documents.texts import interpreter_texts
from varlen.errors import SourceError

MODULE = '''"""A module."""
import os

@decorated(
    once=True,
)
def first():
    def inner():
        return 1
    return inner

class Second:
    """é"""

    def method(self):
        pass

value = 3
async def third(): pass
'''


def names_that_are_cut(tmp_path, count=4):
    """Write the same module under several names, and return those that were cut to pieces."""
    for index in range(count):
        (tmp_path / f"m{index}.py").write_text(MODULE, encoding="utf-8")
    return list(interpreter_texts(tmp_path))


def test_top_level_functions_and_classes_are_documents_decorators_included(tmp_path):
    texts = names_that_are_cut(tmp_path)

    pieces = [text for text in texts if not text.startswith('"""A module')]
    assert pieces[0].startswith("@decorated(\n    once=True,\n)\ndef first")
    assert pieces[0].endswith("return inner\n")
    assert pieces[1].startswith("class Second:")
    assert pieces[1].endswith("pass\n")
    assert pieces[2] == "async def third(): pass\n"


def test_about_five_percent_of_modules_stay_whole_by_their_names(tmp_path):
    texts = names_that_are_cut(tmp_path, count=400)

    whole = [text for text in texts if text == MODULE]
    assert 8 <= len(whole) <= 36
    assert texts == list(interpreter_texts(tmp_path))


def test_tests_and_installed_packages_are_left_out(tmp_path):
    for folder in ("test", "json/tests", "site-packages/numpy", "idlelib/idle_test"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("def hidden(): pass\n")
    (tmp_path / "kept.py").write_text("def kept(): pass\n")

    assert all("kept" in text for text in interpreter_texts(tmp_path))


def test_files_that_do_not_parse_or_decode_are_left_out(tmp_path):
    (tmp_path / "a.py").write_text("def broken(:\n")
    (tmp_path / "b.py").write_bytes(b"# \xff\ndef f(): pass\n")
    (tmp_path / "c.py").write_bytes(b"def f(): pass\x00\n")
    (tmp_path / "d.py").write_text("def kept(): '\\d'\n")

    assert list(interpreter_texts(tmp_path)) == ["def kept(): '\\d'\n"]


def test_an_interpreter_without_sources_is_an_error_that_names_the_way_out(tmp_path):
    with pytest.raises(SourceError, match="--data"):
        list(interpreter_texts(tmp_path))


def test_this_interpreter_has_thousands_of_documents():
    texts = interpreter_texts()

    assert sum(1 for _, _ in zip(range(300), texts)) == 300
