"""Reading documents from files: what comes out, and one sentence for whatever is wrong."""

import bz2
import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from varlen.documents.texts import interpreter_texts, read_texts
from varlen.errors import SourceError
from varlen.files.finding import find_files


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rows_of_jsonl_are_documents_in_order_and_empty_ones_are_left_out(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "  "}, {"text": "two"})

    assert list(read_texts(path)) == ["one", "two"]


def test_messages_become_role_and_content_lines(tmp_path):
    chat = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
    ]
    path = write_lines(tmp_path / "a.jsonl", {"messages": chat})

    assert list(read_texts(path)) == ["user: 2 + 2?\nassistant: 4!\nassistant: \n"]


def test_prompt_is_followed_by_its_completion_be_they_strings_or_messages(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "2 + 2 = ", "completion": "4"},
        {
            "prompt": [{"role": "user", "content": "hi"}],
            "completion": [{"role": "assistant", "content": "ho"}],
        },
    )

    assert list(read_texts(path)) == ["2 + 2 = 4", "user: hi\nassistant: ho\n"]


def test_messages_are_preferred_to_the_text_made_of_them(tmp_path):
    chat = [{"role": "assistant", "content": "chosen"}]
    path = write_lines(tmp_path / "a.jsonl", {"text": "<s>chosen</s>", "messages": chat})

    assert list(read_texts(path)) == ["assistant: chosen\n"]


def test_parquet_rows_are_documents_and_nested_messages_are_read(tmp_path):
    pq.write_table(pa.table({"text": ["one", "two"], "other": [1, 2]}), tmp_path / "a.parquet")
    chats = [[{"role": "user", "content": "hi"}]]
    pq.write_table(pa.table({"messages": chats}), tmp_path / "b.parquet")

    assert list(read_texts(tmp_path)) == ["one", "two", "user: hi\n"]


def test_each_text_file_of_a_folder_is_a_document(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.md").write_text("second\n\nstill second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\x00")

    assert list(read_texts(tmp_path)) == ["first", "second\n\nstill second"]


def test_a_single_text_file_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\nline\r\n\r\n \r\nsecond\n\n\n")

    assert list(read_texts(path)) == ["first\nline", "second"]


def test_a_glob_reaches_into_folders(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.tex").write_text("deep")
    (tmp_path / "a.tex").write_text("high")

    assert list(read_texts(tmp_path / "**" / "*.tex")) == ["high", "deep"]
    assert list(read_texts(tmp_path / "**")) == ["high", "deep"]


def test_a_path_with_brackets_in_its_name_is_not_taken_for_a_pattern(tmp_path):
    path = write_lines(tmp_path / "a[1].jsonl", {"text": "one"})

    assert list(read_texts(path)) == ["one"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"\n\n", "holds no text"),
        (b'{"text": ""}\n', "all documents are empty"),
        (b'{"text": "a"}\n{"text": \n', r"line 2 is not valid JSON"),
        (b'{"text": "a"}\n[1, 2]\n', r"line 2 is a JSON array, not an object"),
        (b'{"text": "a"}\n{"text": null}\n', r"line 2 can't be used: `text` must be a string, found null"),
        (b'{"text": 3}\n', r"`text` must be a string, found number"),
        (b'{"body": "a", "id": 1}\n', r"need `text`, .* found `body`, `id`; name yours: --column text=NAME"),
        (b'{"prompt": "a"}\n', r"found `prompt`"),
        (
            b'{"messages": "a"}\n',
            r"line 1 can't be used: a chat must be a list of messages or the JSON text of one",
        ),
        (b'{"messages": [{"content": "a"}]}\n', r"`role` and `content`"),
        (
            b'{"messages": [{"role": "user", "content": 3}]}\n',
            r"message 1 \(user\) must be text or a list of parts of text, found a number",
        ),
        (b'{"text": "\xff"}\n', r"line 1 is not valid UTF-8"),
        (b'{"text": "\\ud800"}\n', r"line 1 can't be used: it holds half a character \(a lone surrogate\)"),
        (b'{"messages": [{"role": "\\ud800", "content": "a"}]}\n', r"unknown role"),
        (b'{"messages": [{"role": "user", "content": [{"text": 5}]}]}\n', r"found a part of type None"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n", r"line 1 can't be read: a number of too many digits"),
        (b'{"text": ' + b"[" * 200_000 + b"\n", r"line 1 can't be read: .* brackets nested too deeply"),
        (bz2.compress(b'{"text": "a"}\n'), r"is compressed \(bzip2\); unpack it, or use gzip or zstd"),
    ],
)
def test_a_faulty_jsonl_file_is_named_with_its_line(tmp_path, content, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)

    with pytest.raises(SourceError, match=said) as caught:
        list(read_texts(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl"])
def test_a_gzip_file_is_unpacked_whatever_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "a"}\n'))

    assert list(read_texts(tmp_path / name)) == ["a"]


def test_an_empty_file_beside_others_is_left_out_and_alone_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(SourceError, match=r"empty \(0 bytes\)"):
        list(read_texts(tmp_path))
    (tmp_path / "b.txt").write_text("one")
    (tmp_path / "c.jsonl").write_text("")
    assert list(read_texts(tmp_path)) == ["one"]

    (tmp_path / "d.parquet").write_text("")
    with pytest.raises(SourceError, match=r"d\.parquet is empty \(0 bytes\)"):
        list(read_texts(tmp_path))


def test_what_is_neither_file_nor_folder_is_called_that(tmp_path):
    with pytest.raises(SourceError, match="an empty path"):
        find_files("")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match=r"neither a file nor a folder .*; save it to a file first"):
        find_files(tmp_path / "pipe")


def test_a_truncated_parquet_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-40])

    with pytest.raises(SourceError, match=r"a\.parquet is not a Parquet file, or is damaged"):
        list(read_texts(path))


def test_a_parquet_file_without_text_names_its_columns(tmp_path):
    pq.write_table(pa.table({"body": ["one"]}), tmp_path / "a.parquet")

    with pytest.raises(SourceError, match="found `body`"):
        list(read_texts(tmp_path / "a.parquet"))


def test_a_file_that_is_not_text_is_an_error_that_names_the_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")

    with pytest.raises(SourceError, match=r"byte 3 is 0xff"):
        list(read_texts(path))


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing.jsonl", "does not exist"), ("*.jsonl", "no file matches"), (".", "a folder without any")],
)
def test_where_no_file_is_found_the_way_out_is_named(tmp_path, name, said):
    with pytest.raises(SourceError, match=said):
        find_files(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_an_error(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"})
    path.chmod(0)

    with pytest.raises(SourceError, match="can't be read"):
        list(read_texts(path))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gsm8k_train.jsonl", 7473),
        ("taskmaster4.jsonl", 3710),
        ("oasst_en100_paths.parquet", 564),
        ("tau_bench_airline.parquet", 200),
        ("c4_demo.jsonl", 300),
        ("python_peps.parquet", 701),
        ("rust_rfcs.parquet", 639),
    ],
)
def test_every_row_of_real_files_is_read(data, name, rows):
    assert sum(1 for _ in read_texts(data / "text" / name)) == rows


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
