"""Files that are replaced or rewritten while they are open, between epochs, and between runs."""

import gzip
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.files.buckets import LINES, PATIENT, served
from tests.support.listed_files import find_files
from tests.support.rarely import mostly

import varlen as vl
from varlen.errors import SourceError, StateError
from varlen.files import fingerprints
from varlen.files.opening import open_stored
from varlen.files.remote import replaced, report_of

KINDS = ("jsonl", "jsonl.gz", "csv", "txt", "parquet", "arrow", "json", "npz")
IN_MEMORY = ("parquet", "arrow")
SAID = "was replaced or rewritten since the files were listed"
NUM = 600
DAY = "Mon, 01 Jan 2024"


def content(kind: str, letter: str, folder: Path) -> bytes:
    """Return documents of a letter: the same size for each."""
    texts = [f"{number:05d} {letter * 500}" for number in range(NUM)]
    if kind.startswith("jsonl"):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        return lines if kind == "jsonl" else gzip.compress(lines, 0, mtime=0)
    if kind == "csv":
        return ("text\n" + "\n".join(texts) + "\n").encode()
    if kind == "txt":
        return "\n".join(texts).encode()
    if kind == "json":
        return json.dumps([{"text": text} for text in texts]).encode()
    path = folder / f".made.{kind}"
    if kind == "npz":
        ids = np.full((NUM, 400), ord(letter), dtype=np.int32)
        np.savez(path, input_ids=ids.ravel(), offsets=np.arange(NUM + 1) * 400)
    else:
        table = pa.table({"text": texts})
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=60, compression="none", use_dictionary=False)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=60)
    found = path.read_bytes()
    path.unlink()
    return found


def by_rename(path: Path, new: bytes) -> None:
    beside = path.with_name(".beside")
    beside.write_bytes(new)
    beside.replace(path)


def by_rename_with_old_times(path: Path, new: bytes) -> None:
    said, beside = path.stat(), path.with_name(".beside")
    beside.write_bytes(new)
    os.utime(beside, ns=(said.st_atime_ns, said.st_mtime_ns))
    beside.replace(path)


def in_place(path: Path, new: bytes) -> None:
    with path.open("r+b") as file:
        file.write(new)


def in_place_with_old_times(path: Path, new: bytes) -> None:
    said = path.stat()
    in_place(path, new)
    os.utime(path, ns=(said.st_atime_ns, said.st_mtime_ns))


WAYS = (by_rename, by_rename_with_old_times, in_place, in_place_with_old_times)


def loader_of(path: Path | str, **others: object) -> vl.PackedLoader:
    return vl.PackedLoader(
        path,
        "bytes",
        **{
            "capacity": 2048,
            "global_batch_size": 2,
            "mode": "streaming",
            "worker": "thread",
            "overlong": "split",
            "read_ahead_s": 0.01,
            "append_eos": False,
            **others,
        },
    )


@pytest.mark.parametrize("kind", mostly(("jsonl", "parquet"), KINDS))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_streamed_file_replaced_by_one_of_equal_size_is_told(tmp_path, kind, way):
    old, new = content(kind, "a", tmp_path), content(kind, "b", tmp_path)
    assert len(old) == len(new)
    path = tmp_path / f"data.{kind}"
    path.write_bytes(old)
    with loader_of(path, epochs=8) as loader:
        expected = [batch.input_ids.tobytes() for batch in loader]
    said, taken = "", []
    with loader_of(path, epochs=8) as loader:
        taken += [next(loader).input_ids.tobytes()]
        way(path, new)
        try:
            taken += [batch.input_ids.tobytes() for batch in loader]
        except SourceError as error:
            said = str(error)
    assert taken == expected[: len(taken)], "half old, half new"
    if kind in (*IN_MEMORY, "txt") and not said:  # all of it had been read, and is kept
        assert len(taken) == len(expected)
    else:
        assert said.startswith(f"{path} {SAID}: ")
        assert "put back what was there" in said


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_file_replaced_between_a_save_and_a_resume_is_told(tmp_path, way):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content("jsonl", "a", tmp_path))
    with loader_of(path) as loader:
        next(loader)
        state = loader.state_dict()
    way(path, content("jsonl", "b", tmp_path))
    with loader_of(path) as loader, pytest.raises(StateError, match=r"data was .* and is"):
        loader.load_state_dict(state)


def touched(path: Path) -> None:
    os.utime(path)


def copied_over(path: Path) -> None:
    by_rename(path, path.read_bytes())


def written_again(path: Path) -> None:
    in_place(path, path.read_bytes())


def moved_away_and_back(path: Path) -> None:
    time.sleep(0.3)  # until the worker has read ahead as far as it may: it must not open the file meanwhile
    path.rename(path.with_name(".away"))
    path.with_name(".away").rename(path)


def other_permissions(path: Path) -> None:
    path.chmod(0o600)


def linked(path: Path) -> None:
    os.link(path, path.with_name(".link"))


SAME = (touched, copied_over, written_again, moved_away_and_back, other_permissions, linked)


@pytest.mark.parametrize("kind", mostly(("jsonl",), KINDS))
@pytest.mark.parametrize("way", SAME, ids=lambda way: way.__name__)
def test_a_file_that_is_touched_and_holds_the_same_is_read_on(tmp_path, kind, way):
    path = tmp_path / f"data.{kind}"
    path.write_bytes(content(kind, "a", tmp_path))
    with loader_of(path, epochs=2) as loader:
        expected = [batch.input_ids.tobytes() for batch in loader]
    with loader_of(path, epochs=2) as loader:
        found = [next(loader).input_ids.tobytes() for _ in range(3)]
        way(path)
        found += [batch.input_ids.tobytes() for batch in loader]
    assert found == expected


def test_of_a_large_file_a_new_time_is_refused_and_a_new_inode_is_held_against_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "WHOLE_BYTES", 0)
    monkeypatch.setattr(fingerprints.file_fingerprints, "__kwdefaults__", {"whole_bytes": 0})
    path = tmp_path / "data.txt"
    path.write_bytes(b"".join(b"%07d" % number + b"a" * 1016 + b"\n" for number in range(6000)))  # 6 MB
    for way, said in ((touched, "samples of so large a file"), (other_permissions, None), (linked, None)):
        with loader_of(path, text_cut="line", epochs=3, capacity=32768) as loader:
            next(loader)
            way(path)
            if said is None:
                assert sum(1 for _ in loader) > 200
            else:
                with pytest.raises(SourceError, match=said):
                    list(loader)
    with loader_of(path, text_cut="line", epochs=3, capacity=32768) as loader:
        next(loader)
        by_rename_with_old_times(path, path.read_bytes().replace(b"a", b"b"))
        with pytest.raises(SourceError, match="its content has changed"):
            list(loader)


def test_a_file_that_is_appended_to_is_refused_with_both_sizes(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content("jsonl", "a", tmp_path))
    size = path.stat().st_size
    with loader_of(path, epochs=2) as loader:
        next(loader)
        with path.open("ab") as file:
            file.write(b'{"text": "more"}\n')
        with pytest.raises(SourceError, match=rf"it had {size:,} bytes then, now {size + 17:,}"):
            list(loader)


def test_a_file_without_line_ends_that_is_replaced_ends_no_epoch_early(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content("jsonl", "a", tmp_path))
    with loader_of(path, shuffle=False) as loader:
        next(loader)
        by_rename(path, b"a" * path.stat().st_size)
        with pytest.raises(SourceError, match=SAID):
            list(loader)


def test_a_file_rewritten_in_place_while_it_is_open_is_told_at_the_next_read(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"a" * (4 << 20))
    [file] = find_files(path)
    with open_stored(file) as stored:
        assert set(stored.read(10)) == {ord("a")}
        in_place(path, b"b" * (4 << 20))
        with pytest.raises(SourceError, match=SAID):
            stored.read()


def test_a_fifo_or_a_folder_in_place_of_a_file_is_told_and_not_waited_for(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"text")
    [file] = find_files(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SourceError, match="it is a FIFO and not a file"):
        open_stored(file)
    path.unlink()
    path.mkdir()
    with pytest.raises(SourceError, match="it is a folder and not a file"):
        open_stored(file)


def test_packing_and_indexing_refuse_a_file_that_was_rewritten_since_it_was_listed(tmp_path):
    from varlen.documents.source import open_source

    path = tmp_path / "data.jsonl"
    path.write_bytes(content("jsonl", "a", tmp_path))
    source = open_source(path)
    by_rename(path, content("jsonl", "b", tmp_path))
    with pytest.raises(SourceError, match=f"{SAID}: its modification time has changed"):
        list(source.read(source.parts()[0]))


@pytest.fixture(scope="module")
def bucket():
    with served() as made:
        yield made


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("over", ["s3", "http"])
def test_an_object_replaced_by_one_of_equal_size_is_told_by_its_etag(bucket, over, compressed):
    key = f"equal.jsonl{'.gz' if compressed else ''}"
    old, new = (LINES * 8, (LINES * 8).replace(b"text", b"TEXT"))
    if compressed:
        old, new = (gzip.compress(one, 0, mtime=0) for one in (old, new))
    assert len(old) == len(new)
    url = bucket.put(key, old)
    url = url if over == "s3" else f"{bucket.proxy.url}/bucket/{key}"
    with loader_of(url, retry=PATIENT, epochs=3) as loader:
        next(loader)
        bucket.put(key, new)
        with pytest.raises(SourceError, match=f"{re.escape(url)} {SAID}: the server names another etag"):
            list(loader)


def test_telling_that_an_object_is_the_one_that_was_listed_costs_no_request(bucket):
    url = bucket.put("counted.jsonl", LINES * 4)
    [file] = find_files(url, retry=PATIENT)
    bucket.proxy.spoil()
    with open_stored(file) as stored:
        assert stored.read() == LINES * 4
    assert len(bucket.proxy.requests) == 1


def test_a_file_in_a_store_without_etags_is_told_by_its_time():
    url = "memory://replaced/a.txt"
    with fsspec.open(url, "wb") as sink:
        sink.write(b"a" * 100)
    [file] = find_files(url)
    with fsspec.open(url, "wb") as sink:
        sink.write(b"b" * 100)
    with pytest.raises(SourceError, match=f"{SAID}: the server names another created"):
        open_stored(file).read()


class _Web(BaseHTTPRequestHandler):
    """Serves one text; heeds ranges, and no condition, as simple servers do."""

    text, headers_of, heads = b"", {}, 0

    def do_HEAD(self) -> None:
        type(self).heads += 1
        self._answer(self.text, 200, body=False)

    def do_GET(self) -> None:
        asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(self.text))
        self._answer(self.text[start:stop], 206 if asked else 200)

    def _answer(self, content: bytes, status: int, *, body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in self.headers_of.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Callable[[bytes, dict[str, str]], str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def put(text: bytes, headers: dict[str, str]) -> str:
        _Web.text, _Web.headers_of = text, headers
        return f"http://127.0.0.1:{server.server_port}/data.jsonl"

    yield put
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({"ETag": 'W/"1"'}, {"ETag": 'W/"2"'}, "etag"),
        ({"ETag": '"1"'}, {"ETag": '"2"'}, "etag"),
        ({"Last-Modified": f"{DAY} 00:00:00 GMT"}, {"Last-Modified": f"{DAY} 00:00:01 GMT"}, "last-modified"),
    ],
)
def test_a_web_server_that_heeds_no_condition_is_looked_at_before_each_block(web, before, after, what):
    url = web(LINES * 20, before)
    with loader_of(url, retry=PATIENT, epochs=2) as loader:
        next(loader)
        web((LINES * 20).replace(b"text", b"TEXT"), after)
        with pytest.raises(SourceError, match=f"{SAID}: the server names another {what}"):
            list(loader)


def test_times_of_another_precision_replace_nothing_where_a_mark_is_the_same():
    listed = report_of({"ETag": '"1"', "LastModified": "2024-01-01 00:00:00.123"})
    seen = report_of({"ETag": '"1"', "LastModified": "2024-01-01 00:00:00"})
    assert replaced(listed, seen) is None
    assert replaced(listed, report_of({"size": 3})) is None
    assert replaced(None, seen) is None


def test_a_folder_of_links_is_told_too(tmp_path):
    """As a cache of the hub has it: names lead to contents, and another revision is another content."""
    for letter in "ab":
        (tmp_path / letter).write_bytes(content("jsonl", letter, tmp_path))
    (tmp_path / "data").mkdir()
    link = tmp_path / "data" / "train.jsonl"
    link.symlink_to(tmp_path / "a")
    with loader_of(tmp_path / "data", epochs=2) as loader:
        next(loader)
        link.unlink()
        link.symlink_to(tmp_path / "b")
        with pytest.raises(SourceError, match=SAID):
            list(loader)
    shutil.rmtree(tmp_path / "data")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_rewritten_in_place_with_its_old_time_is_told_while_it_is_open(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    path.write_bytes(content(kind, "a", tmp_path))
    found = find_files(path)
    [file] = [replace(file, known=fingerprints.file_fingerprints([file])[0]) for file in found]
    said = path.stat()
    with open_stored(file, 64) as stored:
        before = stored.read(10)
        time.sleep(0.02)  # file systems keep a time for some milliseconds
        in_place(path, content(kind, "b", tmp_path))
        os.utime(path, ns=(said.st_atime_ns, said.st_mtime_ns))
        assert len(before) == 10
        with pytest.raises(SourceError, match=SAID):
            stored.read()


def test_an_open_file_whose_name_or_rights_change_is_read_on(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content("jsonl", "a", tmp_path))
    [file] = [replace(file, known=fingerprints.file_fingerprints([file])[0]) for file in find_files(path)]
    changes = [lambda: path.chmod(0o600), lambda: os.link(path, tmp_path / "other"), path.unlink]
    changes.insert(2, lambda: by_rename(path, content("jsonl", "a", tmp_path)))
    for change in changes:
        with open_stored(file, 64) as stored:
            before = stored.read(10)
            time.sleep(0.02)
            change()
            assert before + stored.read() == content("jsonl", "a", tmp_path)
