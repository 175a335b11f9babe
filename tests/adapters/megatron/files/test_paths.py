"""What a spec stands for: files, globs, folders, pairs; what isn't there is refused, what comes late awaited."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from varlen.adapters.megatron import (
    is_packed_parquet_file,
    is_packed_parquet_spec,
    resolve_packed_parquet_paths,
)
from varlen.adapters.megatron.files.reader import resolve_packed
from varlen.errors import SourceError


@pytest.mark.parametrize(
    ("name", "is_file", "is_spec"),
    [
        ("data.idx.parquet", True, True),
        ("data.idx.pq", True, True),
        ("shard_*.idx.parquet", True, True),
        ("DATA.IDX.PARQUET", True, True),
        ("data.parquet", False, True),
        ("data.PQ", False, True),
        ("data.parquet*", False, True),
        ("shard_[0-4].pq.?", False, True),
        ("data*", False, False),
        ("data.npy", False, False),
        ("missing", False, False),
    ],
)
def test_names_are_told_apart_as_the_releases_do(name, is_file, is_spec):
    assert is_packed_parquet_file(name) is is_file
    assert is_packed_parquet_spec(Path(name)) is is_spec


def touch(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).touch()
    return [str(folder / name) for name in names]


def test_a_file_a_glob_a_folder_and_several_of_them_are_found_in_order(tmp_path):
    a, b, c, _, _ = touch(tmp_path, "a1.idx.parquet", "a2.PQ", "b.parquet", "c.npy", ".a3.parquet.12.part")

    assert resolve_packed_parquet_paths(a) == [a]
    assert resolve_packed_parquet_paths(tmp_path / "a*") == [a, b]
    assert resolve_packed_parquet_paths(f"{tmp_path}/a[2-9].*") == [b]
    assert resolve_packed_parquet_paths(f"{tmp_path}/?.parquet") == [c]
    assert resolve_packed_parquet_paths(tmp_path) == [a, b, c]
    assert resolve_packed_parquet_paths([c, tmp_path / "a*"]) == [c, a, b]
    assert is_packed_parquet_spec(tmp_path) is True


def test_a_file_whose_name_holds_brackets_goes_before_the_glob(tmp_path):
    literal, other = touch(tmp_path, "run[1].parquet", "run1.parquet")

    assert resolve_packed_parquet_paths(literal) == [literal]
    Path(literal).unlink()
    assert resolve_packed_parquet_paths(literal) == [other]


def test_pairs_are_found_by_any_of_their_names(tmp_path):
    touch(tmp_path, "a.sft.bin", "a.sft.idx", "b.npy", "tokens.bin", "tokens.idx")
    pair = str(tmp_path / "a.sft")

    for name in ("a.sft", "a.sft.bin", "a.sft.idx", "a", "*.sft", "a.*", "*.sft.idx"):
        assert resolve_packed(tmp_path / name) == [pair], name
    assert resolve_packed(tmp_path) == [pair, str(tmp_path / "b.npy")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.idx.parquet", r"missing\.idx\.parquet isn't there; .* pass wait_s=60"),
        ("*.parquet", r"no Parquet files match .*\*\.parquet; their names end in \.parquet or \.pq"),
        ("", r"is a folder without Parquet files"),
        ("c.npy", r"c\.npy isn't one of the Parquet files; their names end in"),
    ],
)
def test_what_is_not_there_is_refused_at_once(tmp_path, name, said):
    touch(tmp_path, "c.npy")
    begun = time.monotonic()

    with pytest.raises(SourceError, match=said) as caught:
        resolve_packed_parquet_paths(tmp_path / name)

    assert isinstance(caught.value, ValueError)
    assert time.monotonic() - begun < 1
    with pytest.raises(SourceError, match="no packed data was named"):
        resolve_packed_parquet_paths([])


def test_what_another_node_writes_is_awaited_as_long_as_is_said(tmp_path):
    path = tmp_path / "new" / "a.idx.parquet"

    def write() -> None:
        path.parent.mkdir()
        path.touch()

    timer = threading.Timer(0.3, write)
    timer.start()
    assert resolve_packed_parquet_paths(path, wait_s=30) == [str(path)]
    timer.join()
    begun = time.monotonic()
    with pytest.raises(SourceError, match="no Parquet files match"):
        resolve_packed_parquet_paths(tmp_path / "nowhere" / "b*.parquet", wait_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 5
