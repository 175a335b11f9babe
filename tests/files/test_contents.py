"""What a file is, where its name doesn't say it or says something else: looked into, told, or refused by both."""

import gzip
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from tests.files.buckets import PATIENT
from tests.files.contents import LINES, arrow, parquet, texts_of

from varlen.documents.source import open_source
from varlen.errors import SettingError, SourceError
from varlen.files.contents import LOOKED_AT_BYTES, rows_in
from varlen.files.finding import find
from varlen.files.paths import Format

FIELDS = {"text", "messages", "prompt"}


def npz() -> bytes:
    sink = io.BytesIO()
    np.savez(sink, input_ids=np.array([111, 110, 101]), offsets=np.array([0, 3]))
    return sink.getvalue()


def tar() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, content in (("0.json", b'{"text": "a"}'), ("0.txt", b"some text")):
            told = tarfile.TarInfo(name)
            told.size = len(content)
            archive.addfile(told, io.BytesIO(content))
    return sink.getvalue()


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("content", "format_"),
    [
        (LINES, "jsonl"),
        (b"\xef\xbb\xbf" + LINES, "jsonl"),
        (LINES.replace(b"\n", b"\r\n"), "jsonl"),
        (b"\n \n" + LINES, "jsonl"),
        (b'{"text": "a"}', "jsonl"),
        (b'{"body": 1}\n{"body": 2}\n', "jsonl"),
        (b'{"id": 7, "text": "' + b"x" * LOOKED_AT_BYTES, "jsonl"),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * LOOKED_AT_BYTES, "jsonl"),
        (b'{"body": "' + b"x" * LOOKED_AT_BYTES, None),
        (b'[{"text": "a"}, {"text": "b"}]', "json"),
        (b'[\n  {"id": 1, "text": "a"', "json"),
        (b'[{"name": "a"}]', None),
        (b'{"name": "a package"}', None),
        (b'{\n  "text": "a"\n}\n', None),
        (b'{"text": "a"}\nand prose that goes on\n', None),
        (b"{% for m in messages %}\n{{ m }}\n", None),
        (b"{ int x = 1; }\n", None),
        (b'{"a": 1, /* not JSON */ "b": 2}\n{"a": 1}\n', None),
        (b"[1, 2]\n[3]\n", None),
        (b'"text"\n"more"\n', None),
        (b"text,id\na,1\n", None),
        (b"Once upon a time\n", None),
        (b"", None),
        (parquet(), "parquet"),
        (arrow(pa.ipc.new_file), "arrow"),
        (arrow(pa.ipc.new_stream), "arrow"),
        (npz(), "npz"),
        (b"PK\x03\x04" + bytes(40), None),
        (tar(), None),
    ],
)
def test_first_bytes_tell_rows_and_leave_everything_else_text(content, format_):
    head = content[:LOOKED_AT_BYTES]

    assert rows_in(head, FIELDS, is_whole=len(content) < LOOKED_AT_BYTES) == format_


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize("scheme", ["", "memory://"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("xaa", LINES),
        ("part-00000", LINES),
        ("data.jsonl.part1", LINES),
        ("rows.log", LINES),
        ("rows", parquet()),
        ("rows.0", arrow(pa.ipc.new_file)),
        ("stream", arrow(pa.ipc.new_stream)),
        ("array.dat", b'[{"text": "one"}, {"text": "two"}]'),
    ],
)
def test_rows_under_any_name_are_rows(tmp_path, scheme, name, content, pack):
    place = f"{scheme}{tmp_path}"
    with fsspec.open(f"{place}/{name}", "wb") as file:
        file.write(pack(content))

    assert texts_of(f"{place}/{name}") == ["one", "two"]
    assert texts_of(f"{place}/*") == ["one", "two"]
    assert texts_of(place) == ["one", "two"]


def test_pieces_of_a_file_are_rows_beside_others_and_texts_stay_texts(tmp_path):
    for name, content in {
        "a.jsonl": b'{"text": "zero"}\n',
        "xaa": LINES,
        "xab": b'{"text": "three"}\n',
        "_SUCCESS": b"",
        "LICENSE": b"of the data\n",
        "words": b"prose without an end in its name\n",
        "setup.py": b"{'text': 1}\n",
        "a.bin": b'{"text": "not a piece"}\n',
    }.items():
        (tmp_path / name).write_bytes(content)

    assert texts_of(tmp_path) == ["zero", "one", "two", "three"]
    assert texts_of([tmp_path / "words", tmp_path / "setup.py"]) == [
        "prose without an end in its name\n",
        "{'text': 1}\n",
    ]


def test_columns_that_the_caller_names_tell_rows_too(tmp_path):
    (tmp_path / "xaa").write_text('{"body": "one"}')

    assert texts_of(tmp_path / "xaa") == ['{"body": "one"}']
    assert texts_of(tmp_path / "xaa", columns={"text": "body"}) == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.tar", tar(), r"a\.tar holds a tar archive; unpack it"),
        ("a.npy", b"\x93NUMPY\x01\0" + bytes(99), r"a\.npy holds a NumPy array \(\.npy\); leave it out"),
        ("shard", tar(), r"shard holds a tar archive"),
        ("a.tar.gz", gzip.compress(tar(), mtime=0), r"holds a tar archive"),
        ("a.jsonl", tar(), "holds a tar archive, though its name says JSON lines"),
        ("a.parquet", tar(), "holds a tar archive, though its name says Parquet"),
        ("a.txt", parquet(), r"holds a Parquet file, though its name says text; .*--read-as parquet"),
        ("a.jsonl", parquet(), "holds a Parquet file, though its name says JSON lines"),
        ("a.jsonl.gz", gzip.compress(parquet(), mtime=0), "holds a Parquet file, though its name says JSON lines"),
        ("a.csv", arrow(pa.ipc.new_stream), "holds an Arrow stream, though its name says CSV"),
        ("a.parquet", arrow(pa.ipc.new_file), "holds an Arrow file, though its name says Parquet"),
        ("a.arrow", parquet(), "holds a Parquet file, though its name says Arrow"),
        ("a.parquet", LINES, "holds JSON lines, though its name says Parquet"),
        ("a.csv", LINES, "holds JSON lines, though its name says CSV"),
        ("a.jsonl", b'[{"text": "a"}]', "holds JSON, though its name says JSON lines"),
        ("a.txt", LINES, "holds JSON rows, though its suffix is that of text; .*--read-as jsonl or --read-as text"),
        ("a.py", LINES, "holds JSON rows, though its suffix is that of text"),
        ("a.md", b'[{"text": "a"}]', "holds JSON rows, .*--read-as json or"),
        ("a.npz", parquet(), "holds a Parquet file, though its name says npz"),
        ("model.bin", b"\x93NUMPY\x01\0" + bytes(99), r"a NumPy array .*convert it"),
        ("x", b"abc\0def", "x line 1 is not text: byte 3 is NUL"),
        ("a.txt", b"text\0", "is not text: byte 4 is NUL"),
        ("db", b"SQLite format 3\0" + bytes(99), "holds an SQLite database"),
    ],
)  # fmt: skip
def test_a_content_that_isnt_what_the_name_says_is_refused_by_both(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)

    with pytest.raises(SourceError, match=said):
        texts_of(tmp_path / name)


def test_one_damaged_document_costs_itself_alone(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\ntw\0o\n\nthree\n")
    source = open_source(tmp_path / "a.txt", append_eos=False, on_error="skip")

    [documents] = source.read(source.parts()[0])

    assert len(documents) == 2
    assert [fault.number for fault in documents.faults] == [3]


@pytest.mark.parametrize(
    ("name", "content", "format_"),
    [
        ("a.txt", LINES, "jsonl"),
        ("a.jsonl", b'[{"text": "one"}, {"text": "two"}]', "json"),
        ("a.json", LINES, "jsonl"),
        ("a.dat", b"text\none\ntwo\n", "csv"),
        ("a.csv", b"text\tid\none\t1\ntwo\t2\n", "tsv"),
        ("a.txt", parquet(), "parquet"),
        ("a.txt.gz", gzip.compress(LINES, mtime=0), "jsonl"),
        ("a.arrow", parquet(), "parquet"),
        ("a.bin", arrow(pa.ipc.new_stream), "arrow"),
    ],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_the_caller_may_say_what_files_are(tmp_path, name, content, format_, is_folder):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "README.md").write_text("about it")
    data = tmp_path if is_folder else tmp_path / name

    assert texts_of(data, format=format_) == ["one", "two"]


def test_what_the_caller_says_goes_before_what_rows_look_like(tmp_path):
    (tmp_path / "xaa").write_bytes(LINES)

    (tmp_path / "p.parquet").write_bytes(parquet())

    assert texts_of(tmp_path / "xaa", format="text", text_cut="file") == [LINES.decode()]
    with pytest.raises(
        SourceError, match=r"holds a Parquet file, though --read-as \(format=\) says JSON lines"
    ):
        texts_of(tmp_path / "p.parquet", format="jsonl")
    with pytest.raises(SettingError, match="format must be one of " + ", ".join(get_args(Format))):
        open_source(tmp_path / "xaa", format="xml")


def test_the_format_and_binary_texts_change_the_fingerprint_and_their_absence_doesnt(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    prints = [
        open_source(tmp_path, **s).fingerprint for s in ({}, {"format": "jsonl"}, {"binary_as_text": True})
    ]

    assert len(set(prints)) == 3
    assert open_source(tmp_path, split=None, format=None, binary_as_text=False).fingerprint == prints[0]


@pytest.mark.parametrize("name", ["a[1].jsonl", "[x].jsonl", "a*b.jsonl", "a?.jsonl", "[ab]/c.jsonl"])
@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_a_file_whose_name_has_the_characters_of_a_glob_is_that_file(tmp_path, scheme, name):
    place = f"{scheme}{tmp_path}"
    for each in (name, "a1.jsonl", "x.jsonl", "acb.jsonl", "a/c.jsonl"):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        with fsspec.open(f"{place}/x", "wb"):
            pass
        with fsspec.core.url_to_fs(place)[0].open(f"{tmp_path}/{each}", "wb") as file:
            file.write(json.dumps({"text": each}).encode())

    assert texts_of(f"{place}/{name}") == [name]


class _Encoded(http.server.BaseHTTPRequestHandler):
    """Serves one body compressed, and says so."""

    body = gzip.compress(LINES)

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(self.body)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def encoded() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Encoded)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "xaa"])
def test_a_web_server_that_encodes_what_it_sends_gives_the_same(encoded, name):
    assert texts_of(f"{encoded}/{name}", retry=PATIENT) == ["one", "two"]


def test_a_folder_without_data_says_what_it_holds(tmp_path):
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(tar())

    with pytest.raises(
        SourceError, match=r"is a folder without any .*; it holds 2 other files, such as a\.tar"
    ):
        find(Path(tmp_path))
