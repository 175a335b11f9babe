"""Cutting files into parts: however large the parts are, the documents are the same, each of them once."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.documents.source import Source, open_source
from varlen.errors import SourceError
from varlen.files.formats import jsonl
from varlen.offline.crew import Crew
from varlen.offline.index import build_store
from varlen.store.lengths import read_lengths

TEXTS = st.lists(st.text(st.sampled_from("ab\n\r\ufeffż🦆\u2028"), max_size=12), min_size=1, max_size=12)
BLANKS = st.lists(st.sampled_from(["", " ", "\t", "\r", "\ufeff"]), min_size=12, max_size=12)


def read_texts(source: Source, target_bytes: int) -> tuple[list[str], list[str]]:
    texts, faults = [], []
    for part in source.parts(target_bytes):
        for documents in source.read(part):
            bounds = documents.offsets.tolist()
            texts += [bytes(documents.tokens[a:b].tolist()).decode() for a, b in zip(bounds, bounds[1:])]
            faults += [str(fault) for fault in documents.faults]
    return texts, faults


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parts")


ENDS = st.sampled_from(["\n", "\r\n"])


@given(TEXTS, BLANKS, ENDS, st.booleans(), st.integers(1, 90))
def test_a_jsonl_file_cut_anywhere_gives_each_line_once_and_in_order(folder, texts, blanks, end, ended, size):
    path = folder / "a.jsonl"
    rows = [json.dumps({"text": text}, ensure_ascii=False) + end for text in texts]
    content = "".join(row + (blank + end if blank else "") for row, blank in zip(rows, blanks))
    path.write_bytes(content.encode() if ended else content.rstrip().encode())
    source = open_source(path, append_eos=False)

    assert read_texts(source, size) == (texts, [])


@given(TEXTS, st.integers(1, 4), st.sampled_from([1, 100, 200, 1000]))
def test_tables_cut_at_row_groups_or_batches_give_each_row_once_and_in_order(
    folder, texts, rows, target_bytes
):
    table = pa.table({"text": texts})
    pq.write_table(table, folder / "a.parquet", row_group_size=rows)
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=rows)

    for name in ("a.parquet", "a.arrow"):
        source = open_source(folder / name, append_eos=False)
        assert read_texts(source, target_bytes) == (texts, [])
        assert len(source.parts(1)) == -(-len(texts) // rows)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 300))
def test_a_fault_in_the_middle_of_a_cut_file_is_named_by_its_line(folder, are_good, target_bytes):
    path = folder / "b.jsonl"
    rows = ['{"text": "first"}', *('{"text": "good"}' if good else '{"text": 5}' for good in are_good)]
    path.write_text("\n\n".join(rows) + "\n{}")
    bad = [2 * n + 3 for n, good in enumerate(are_good) if not good]
    source = open_source(path, append_eos=False, on_error="skip")

    texts, faults = read_texts(source, target_bytes)

    assert texts == ["first"] + ["good"] * sum(are_good)
    expected = [f"{path} line {n} holds number in `text`, which must be a string" for n in bad]
    assert faults == [*expected, f"{path} line {2 * len(rows)} has no `text`; it has none"]
    with pytest.raises(SourceError) as caught:
        read_texts(replace(source, on_error="raise"), target_bytes)
    assert str(caught.value) == faults[0]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_fault_in_the_middle_of_a_cut_table_is_named_by_its_row(tmp_path, name):
    table = pa.table({"text": [None if n in (7, 123) else "abc" * 9 for n in range(200)]})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name, row_group_size=10)
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as file:
            file.write_table(table, max_chunksize=10)
    source = open_source(tmp_path / name, on_error="skip", append_eos=False)

    texts, faults = read_texts(source, 300)

    assert len(source.parts(300)) > 5
    assert len(texts) == 198
    assert [fault.split(" holds")[0] for fault in faults] == [f"{tmp_path / name} row {n}" for n in (8, 124)]


def test_the_first_fault_of_a_batch_is_raised_whoever_found_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 5}\n{\n{"text": null}\n')

    with pytest.raises(SourceError, match="line 2 holds number"):
        read_texts(open_source(tmp_path), 1 << 20)
    faults = read_texts(open_source(tmp_path, append_eos=False, on_error="skip"), 1 << 20)[1]
    assert [fault.split("line ")[1][0] for fault in faults] == ["2", "3", "4"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_first_object_without_fields_is_a_fault_and_hides_no_other_row(tmp_path, name):
    (tmp_path / name).write_text('{}\n{"text": "a"}\n')

    texts, faults = read_texts(open_source(tmp_path, on_error="skip", append_eos=False), 1 << 20)

    assert texts == ["a"]
    assert faults[0].endswith(" 1 has no `text`; it has none")
    (tmp_path / name).write_text("{}")
    with pytest.raises(SourceError, match="begins with an object without any field"):
        read_texts(open_source(tmp_path), 1 << 20)


def test_small_files_share_a_part_and_large_ones_are_cut_in_the_order_of_their_names(tmp_path):
    for name, size in (("a", 10), ("b", 10), ("c", 400), ("d", 10), ("e", 60), ("f", 60)):
        lines = [json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(size // 10)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    source = open_source(tmp_path, append_eos=False)

    parts = source.parts(150)

    assert [[span.file for span in part] for part in parts][:2] == [[0, 1], [2]]
    assert [len(part) for part in parts][-2:] == [2, 1]
    assert (
        read_texts(source, 150)[0]
        == read_texts(source, 1 << 20)[0]
        == sorted(read_texts(source, 1)[0], key=_place)
    )


def _place(text: str) -> tuple[str, int]:
    return text[0], int(text[1:])


def test_a_line_that_is_too_long_is_refused_by_the_part_that_it_begins_in_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MOST_RECORD_BYTES", 1000)
    long = json.dumps({"text": "x" * 3000})
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + long + '\n{"text": "b"}\n')

    texts, faults = read_texts(open_source(tmp_path, append_eos=False, on_error="skip"), 500)

    assert texts == ["a", "b"]
    assert len(faults) == 1
    assert "holds a line of more than" in faults[0]


def test_a_broken_file_among_others_is_skipped_when_files_are_cut(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + bytes(500) + b"PAR1")

    texts, faults = read_texts(open_source(tmp_path, append_eos=False, on_error="skip"), 100)

    assert texts == ["a"]
    assert [fault.split(":")[0] for fault in faults] == [f"{tmp_path / 'b.parquet'} (what is left of it)"]
    with pytest.raises(SourceError, match=r"b\.parquet is not a Parquet file, or is damaged"):
        open_source(tmp_path).parts(100)


def test_a_packed_table_is_one_part_since_each_would_unpack_it_whole(tmp_path):
    pq.write_table(pa.table({"text": ["abc"] * 100}), tmp_path / "a.parquet", row_group_size=10)
    packed = gzip.compress((tmp_path / "a.parquet").read_bytes())
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet.gz")
    (tmp_path / "b.parquet.gz").write_bytes(packed)

    source = open_source(tmp_path, append_eos=False)

    assert len(source.parts(100)) == 1
    assert read_texts(source, 100)[0] == ["abc"] * 100


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_large_batches_are_cut_without_losing_a_row_and_their_faults_are_numbered(tmp_path, name):
    texts = [None if n in (8200, 17_000, 19_998) else f"{n:05}" for n in range(20_000)]
    table = pa.table({"text": texts})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name, row_group_size=16_000)
    else:
        opened = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
        with opened(tmp_path / name, table.schema) as file:
            file.write_table(table, max_chunksize=16_000)

    found, faults = read_texts(open_source(tmp_path, on_error="skip", append_eos=False), 1 << 30)

    assert found == [text for text in texts if text]
    assert [fault.split(" holds")[0].split(" row ")[1] for fault in faults] == ["8,201", "17,001", "19,999"]


def test_a_table_that_breaks_off_says_after_which_row(tmp_path):
    table = pa.table({"text": ["abc" * 9] * 90})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=30)
    content = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(content[:-300])

    with pytest.raises(
        SourceError, match=r"rows 61 to 90 \(record batch 3\) can't be read, as it is damaged: "
    ):
        read_texts(open_source(tmp_path, append_eos=False), 1 << 30)


def test_progress_moves_within_a_file_that_cannot_be_cut(tmp_path):
    random = np.random.default_rng(0)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(4):
            file.write(json.dumps({"text": random.bytes(1 << 20).hex()}).encode() + b"\n")
    size = (tmp_path / "a.jsonl.gz").stat().st_size
    source, packed, looked_at = open_source(tmp_path / "a.jsonl.gz"), [], []

    read_lengths(source, lambda done, total, text: looked_at.append((done, total)))
    with Crew(processes=2).hired() as team:
        build_store(
            source, tmp_path / "store", {}, team=team, on_progress=lambda *said: packed.append(said[:2])
        )

    for said in (looked_at, packed):
        assert said == sorted(said)
        assert (said[0], said[-1]) == ((0, size), (size, size))
        assert len({done for done, _ in said}) >= 4


def test_progress_counts_what_is_read_once_however_often_it_is_opened(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.jsonl").write_text(json.dumps({"text": "a" * 5000}) + "\n")
    sizes = [file.stat().st_size for file in sorted(tmp_path.iterdir())]
    seen = []

    read_lengths(open_source(tmp_path), lambda done, total, text: seen.append(done))

    assert sorted(set(seen)) == np.cumsum([0, *sizes]).tolist()
