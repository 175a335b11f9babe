"""Files that change, end or vanish after they were listed; fingerprints that tell whether they did."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varlen.documents.source import open_source
from varlen.errors import MissingExtraError, SettingError, SourceError
from varlen.files import fingerprints
from varlen.files.finding import find_files
from varlen.files.fingerprints import fingerprint, fingerprint_files, quick_fingerprint
from varlen.files.opening import open_stored
from varlen.files.paths import File
from varlen.files.retry import Retry, is_passing, retried, within

LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(5000))


def write(path: Path, kind: str) -> Path:
    if kind == "parquet":
        pq.write_table(pa.table({"text": [str(number) for number in range(5000)]}), path)
    else:
        path.write_bytes(gzip.compress(LINES) if kind == "jsonl.gz" else LINES)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "csv", "txt"])
@pytest.mark.parametrize("change", ["shorter", "longer", "empty", "gone"])
def test_a_file_that_is_not_what_was_listed_is_named_with_both_sizes(tmp_path, kind, change):
    path = write(tmp_path / f"a.{kind}", kind)
    size = path.stat().st_size
    source = open_source(path)
    new_size = {"shorter": size - 100, "longer": size + 1, "empty": 0, "gone": size}[change]
    os.truncate(path, new_size)
    said = f"has changed since the files were listed: it had {size:,} bytes then, now {new_size:,};"
    if change == "gone":
        path.unlink()
        said = "can't be read: it was there when the files were listed, and is gone now"

    with pytest.raises(SourceError, match=f"{path} {said}"):
        list(source.read(source.parts()[0]))


@pytest.mark.parametrize("count", [-1, 1 << 18, 50 << 20])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, count):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES * 50)
    [file] = find_files(path)

    with open_stored(file) as stored:
        stored.read(1 << 20)
        os.truncate(path, 1 << 20)
        with pytest.raises(SourceError, match=r"bytes then, now [\d,]+; let it be written"):
            list(iter(lambda: stored.read(count), b""))


@pytest.mark.parametrize("size", [-1, 5, 70_000])
def test_a_file_in_memory_that_changed_is_named(size):
    url = "memory://changes/a.jsonl"
    with fsspec.open(url, "wb") as sink:
        sink.write(LINES)
    [file] = find_files(url)
    fsspec.filesystem("memory").pipe_file("/changes/a.jsonl", (LINES * 2)[:size])

    with pytest.raises(SourceError, match=f"{url} has changed since the files were listed"):
        open_stored(file).read()


def test_small_sets_are_told_by_every_byte_wherever_they_lie(tmp_path):
    prints = set()
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.jsonl", "jsonl")
        os.utime(tmp_path / folder / "a.jsonl", (1, 1 if folder == "x" else 2))
        prints.add(fingerprint_files(find_files(tmp_path / folder)))
    assert len(prints) == 1

    content = bytearray(LINES)
    for place in (0, len(LINES) // 3, len(LINES) - 1):
        content[place] ^= 1
        (tmp_path / "y" / "a.jsonl").write_bytes(content)
        prints.add(fingerprint_files(find_files(tmp_path / "y")))
    (tmp_path / "y" / "a.jsonl").rename(tmp_path / "y" / "b.jsonl")
    prints.add(fingerprint_files(find_files(tmp_path / "y")))

    assert len(prints) == 5


def test_the_order_of_files_is_part_of_their_fingerprint(tmp_path):
    files = [find_files(write(tmp_path / name, "jsonl"))[0] for name in ("a.jsonl", "b.jsonl")]

    assert fingerprint_files(files) != fingerprint_files(files[::-1])


def sparse(path: Path, size: int, changed: int | None = None) -> File:
    """A large file of zeros that takes no disk, and one byte that isn't."""
    with path.open("wb") as sink:
        sink.truncate(size)
        if changed is not None:
            sink.seek(changed)
            sink.write(b"\1")
    return find_files(path)[0]


PIECE = 64 << 10
SIZE = (300 << 20) + 12_345
STARTS = [(SIZE - PIECE) * index // 63 for index in range(64)]


@settings(max_examples=15, deadline=None)
@given(piece=st.integers(0, 63), inside=st.integers(0, PIECE - 1), longer=st.integers(-PIECE, PIECE))
def test_a_large_file_is_told_by_its_size_and_what_stands_in_its_pieces(
    tmp_path_factory, piece, inside, longer
):
    folder = tmp_path_factory.mktemp("large")
    path = folder / "a.jsonl"
    before = quick_fingerprint(sparse(path, SIZE))

    assert quick_fingerprint(sparse(path, SIZE, STARTS[piece] + inside)) != before
    assert (quick_fingerprint(sparse(path, SIZE + longer)) == before) == (longer == 0)
    path.unlink()


def test_large_sets_are_sampled_and_small_ones_read_whole(tmp_path):
    between = STARTS[1] - 1
    plain = fingerprint_files([sparse(tmp_path / "a.jsonl", SIZE)])

    assert fingerprint_files([sparse(tmp_path / "a.jsonl", SIZE, between)]) == plain
    assert fingerprint_files([sparse(tmp_path / "a.jsonl", SIZE, STARTS[-1])]) != plain

    whole = fingerprint_files([sparse(tmp_path / "a.jsonl", 9 << 20)])
    assert fingerprint_files([sparse(tmp_path / "a.jsonl", 9 << 20, PIECE + 1)]) != whole


def test_samples_read_four_megabytes_and_no_more(tmp_path):
    file = sparse(tmp_path / "a.jsonl", SIZE)
    seen = []
    file = fingerprints.File(
        path=file.path,
        name=file.name,
        size=file.size,
        format=file.format,
        on_read=lambda _, start, stop: seen.append(stop - start),
    )

    quick_fingerprint(file)

    assert sum(seen) == 64 * PIECE


def test_a_remote_file_without_a_mark_is_told_by_its_size_in_haste_and_else_by_its_content():
    prints = []
    for content in (b"abc", b"abd", b"abcd"):
        fsspec.filesystem("memory").pipe_file("/prints/a.txt", content)
        [file] = find_files("memory://prints/a.txt")
        prints.append((quick_fingerprint(file), fingerprint(file)))

    assert [quick for quick, _ in prints] == ["size:3", "size:3", "size:4"]
    assert len({whole for _, whole in prints}) == 3


@pytest.mark.parametrize(
    ("url", "package", "command"),
    [
        ("gs://bucket/a.jsonl", "gcsfs", "pip install gcsfs"),
        ("hf://datasets/org/name/a.jsonl", "huggingface_hub", "pip install huggingface_hub"),
        ("s3://bucket/a.jsonl", "s3fs", 'pip install "varlen[s3]"'),
        ("https://host/a.jsonl", "fsspec.implementations.http", "pip install aiohttp"),
    ],
)
def test_urls_whose_package_is_missing_say_how_to_install_it(monkeypatch, url, package, command):
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition("://")[0], raising=False)
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(MissingExtraError) as caught:
        find_files(url)

    assert str(caught.value).startswith(f"{url} can't be opened: ")
    assert str(caught.value).endswith(f"; run: {command}")


@pytest.mark.parametrize("name", ["attempts", "first_s", "most_s", "silence_s", "deadline_s"])
def test_settings_of_tries_are_above_zero(name):
    with pytest.raises(SettingError, match=f"{name} must be"):
        Retry(**{name: 0})


@given(failures=st.integers(1, 10_000))
def test_waits_double_up_to_the_longest_and_are_shortened_by_half_at_most(failures):
    retry = Retry(first_s=0.5, most_s=20)
    longest = min(0.5 * 2 ** min(failures - 1, 50), 20)

    assert longest / 2 <= retry.wait_s(failures) <= longest


@pytest.mark.parametrize("fails", [0, 3, 4])
def test_a_call_is_made_again_as_often_as_said(fails):
    calls = []

    def call() -> str:
        calls.append(1)
        if len(calls) <= fails:
            raise ConnectionResetError("gone")
        return "here"

    retry = Retry(attempts=4, first_s=0.001)
    if fails < 4:
        assert retried(call, "x://y", retry) == "here"
    else:
        with pytest.raises(SourceError, match=r"x://y can't be read: gone; tried 4 times in \d\.\d s"):
            retried(call, "x://y", retry)
    assert len(calls) == min(fails + 1, 4)


def test_a_call_that_is_slower_than_its_limit_is_given_up():
    import threading

    done = threading.Event()
    with pytest.raises(TimeoutError, match=r"no full answer within 0\.05 s"):
        within(0.05, done.wait)
    done.set()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True),
        (BrokenPipeError(), True),
        (OSError(5, "I/O error"), False),
        (FileNotFoundError("x"), False),
        (PermissionError("x"), False),
        (ValueError("x"), False),
    ],
)
def test_what_may_pass_is_told_from_what_lasts(error, passes):
    assert is_passing(error) == passes
    wrapped = RuntimeError("outer")
    wrapped.__cause__ = error
    assert is_passing(wrapped) == passes
