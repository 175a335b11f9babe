"""Packed Parquet: what any release or we wrote comes back, in any order; broken files and rows are named."""

import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.megatron_rows import NAMES, many_rows, packed_rows, plain, write_parquet

from varlen.adapters.megatron import PackedParquet, PackedParquetWriter, write_packed_parquet
from varlen.adapters.megatron.files.reader import between, from_dicts
from varlen.errors import DocumentsError, SettingError, SourceError


def read_back(path: Path, **settings: int) -> list[dict[str, list[int]]]:
    with PackedParquet(path, **settings) as reader:
        return [plain(row) for row in reader]


@given(packed_rows(), st.integers(1, 12))
def test_what_is_written_comes_back_by_row_and_in_order(tmp_path_factory, rows, group):
    path = tmp_path_factory.mktemp("packed") / "a.idx.parquet"
    with PackedParquetWriter(path, row_group_tokens=group) as writer:
        for row in rows:
            writer.write(from_dicts([row]))

    with PackedParquet(path) as reader:
        whole = list(reader.batches())
        assert reader.num_rows == len(reader) == writer.num_rows == len(rows)
        assert [plain(row) for row in reader] == list(map(plain, rows))
        assert [i for part in whole for i in part.input_ids.tolist()] == [
            i for row in rows for i in row["input_ids"]
        ]


@given(packed_rows(lengths=False), st.sampled_from(["bool", "int64", "0.6", "large", "int32"]))
def test_every_dialect_comes_back(tmp_path_factory, rows, kind):
    path = tmp_path_factory.mktemp("packed") / "a.idx.pq"
    masks = {"bool": bool, "int64": int}
    rows = [row | {"loss_mask": [masks.get(kind, int)(value) for value in row["loss_mask"]]} for row in rows]
    if kind in ("large", "int32"):
        lists = pa.large_list if kind == "large" else pa.list_
        columns = {name: pa.array([row[name] for row in rows], type=lists(pa.int32())) for name in NAMES}
        pq.write_table(pa.table(columns), path)
    else:
        write_parquet(path, rows, dialect="0.6" if kind == "0.6" else "0.4", group=2)

    assert read_back(path) == list(map(plain, rows))


@given(packed_rows(lengths=False))
def test_schema_and_values_are_those_of_the_release(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("packed")
    write_parquet(folder / "theirs.idx.parquet", rows)
    write_packed_parquet(rows, folder / "ours.idx.parquet")

    ours, theirs = (pq.read_table(folder / f"{name}.idx.parquet") for name in ("ours", "theirs"))
    assert ours.schema.equals(theirs.schema, check_metadata=True)
    assert ours.equals(theirs)


def test_true_lengths_stand_in_a_column_of_their_own(tmp_path):
    row = {
        "input_ids": [1, 2, 3, 0, 4, 5],
        "loss_mask": [1, 1, 0, 0, 1, 0],
        "seq_start_id": [0, 4],
        "seq_lengths": [2, 1],
    }
    write_packed_parquet([row], tmp_path / "a.idx.parquet")

    schema = pq.read_schema(tmp_path / "a.idx.parquet")
    assert [f"{field.name} {field.type.value_type}" for field in schema] == [
        "input_ids int64",
        "loss_mask int8",
        "seq_start_id int64",
        "seq_lengths int32",
    ]
    assert read_back(tmp_path / "a.idx.parquet") == [row]


@given(st.data())
@settings(max_examples=50)
def test_rows_come_in_the_order_asked_for_from_many_files(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("packed")
    rows = many_rows(23, 9)
    write_parquet(folder / "a.parquet", rows[:10], group=3)
    write_packed_parquet(rows[10:17], folder / "b.idx.parquet", row_group_size=2)
    write_parquet(folder / "c.PQ", rows[17:], group=1)
    wanted = data.draw(st.lists(st.integers(-23, 22), max_size=30))

    with PackedParquet(folder, kept_bytes=data.draw(st.sampled_from([0, 300, 1 << 20]))) as reader:
        found = reader.rows(wanted)

        assert found.num_rows == len(wanted)
        for place, index in enumerate(wanted):
            one = between(found, place, place + 1)
            assert one.input_ids.tolist() == rows[index]["input_ids"]
            assert one.loss_mask.tolist() == rows[index]["loss_mask"]
            assert one.seq_start_id.tolist() == rows[index]["seq_start_id"]


def test_lengths_are_those_of_whole_documents_where_one_file_of_several_has_none(tmp_path):
    row = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0], "seq_start_id": [0], "seq_lengths": [1]}
    write_packed_parquet([row], tmp_path / "a.idx.parquet")
    write_parquet(tmp_path / "b.idx.parquet", [row])

    with PackedParquet(tmp_path) as reader:
        assert reader.rows([1, 0]).seq_lengths.tolist() == [2, 1]
        assert [part.seq_lengths.tolist() for part in reader.batches()] == [[1], [2]]


def test_row_groups_hold_as_many_tokens_however_rows_are_handed_over(tmp_path):
    rows = from_dicts(many_rows(40, 10))
    for name, step in (("one", 1), ("seven", 7), ("all", 40)):
        with PackedParquetWriter(tmp_path / f"{name}.parquet", row_group_tokens=35) as writer:
            for start in range(0, 40, step):
                writer.write(between(rows, start, min(start + step, 40)))

    one, seven, every = (tmp_path / f"{name}.parquet" for name in ("one", "seven", "all"))
    groups = pq.ParquetFile(one).metadata
    assert [groups.row_group(g).num_rows for g in range(groups.num_row_groups)] == [3] * 13 + [1]
    assert one.read_bytes() == seven.read_bytes() == every.read_bytes()


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    rows = from_dicts(many_rows(3, 10))
    writer = PackedParquetWriter(tmp_path / "a.idx.parquet", row_group_tokens=1)

    def fail() -> None:
        with writer:
            writer.write(rows)
            assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DocumentsError, match="no rows were written"):
        write_packed_parquet([], tmp_path / "a.idx.parquet")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SettingError, match="is closed"):
        writer.write(rows)


def test_threads_read_side_by_side_and_a_fork_or_pickle_reads_on(tmp_path):
    rows = many_rows(60, 20)
    write_packed_parquet(rows, tmp_path / "a.idx.parquet", row_group_size=2)
    reader = PackedParquet(tmp_path / "a.idx.parquet", kept_bytes=2000)
    reader.rows([0])
    wrong: list[int] = []

    def work(seed: int) -> None:
        for index in np.random.default_rng(seed).integers(0, 60, 40).tolist():
            if reader[index]["input_ids"] != rows[index]["input_ids"]:
                wrong.append(index)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []
    with reader._lock:  # as another thread may hold it while a process is forked
        process = multiprocessing.get_context("fork").Process(
            target=lambda: exit(reader[7]["input_ids"] != rows[7]["input_ids"])
        )
        process.start()
    process.join(60)
    process.kill()  # nothing where it has ended
    assert process.exitcode == 0
    assert pickle.loads(pickle.dumps(reader))[59]["input_ids"] == rows[59]["input_ids"]
    reader.close()
    assert reader[3]["input_ids"] == rows[3]["input_ids"]


def test_a_row_group_larger_than_what_is_kept_is_decoded_once_for_its_rows(tmp_path):
    write_parquet(tmp_path / "a.idx.parquet", many_rows(20, 50), group=10)
    reader = PackedParquet(tmp_path / "a.idx.parquet", kept_bytes=0)

    first, again = reader._group(0), reader._group(0)
    reader._group(1)

    assert again is first
    assert list(reader._kept) == [1]


GOOD = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0], "seq_start_id": [0, 2]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss_mask": [1]}, r"row 2: 3 `input_ids`, but 1 values of `loss_mask`"),
        ({"loss_mask": [1, 2, 0]}, r"row 2: `loss_mask` holds 2 at place 1 \(0 to 1\)"),
        ({"input_ids": [1, -2, 3]}, r"row 2: `input_ids` holds -2 at place 1"),
        ({"input_ids": [1, 2**31, 3]}, r"row 2: `input_ids` holds 2147483648 at place 1"),
        ({"seq_start_id": [1, 2]}, r"row 2: `seq_start_id` begins at 1 and not at 0"),
        ({"seq_start_id": [0, 2, 2]}, r"row 2: `seq_start_id` must rise"),
        ({"seq_start_id": [0, 3]}, r"row 2: `seq_start_id` reaches past the row's 3 tokens"),
        ({"seq_start_id": []}, r"row 2: `seq_start_id` is empty"),
    ],
)
def test_a_row_that_is_none_is_named_when_it_is_read_or_written(tmp_path, change, said):
    rows = [GOOD, GOOD | change]
    columns = {name: pa.array([row[name] for row in rows], type=pa.list_(pa.int64())) for name in NAMES}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")

    reader = PackedParquet(tmp_path / "a.parquet")
    with pytest.raises(DocumentsError, match=rf"a\.parquet {said}"):
        reader.rows([0])
    with pytest.raises(DocumentsError, match=said.replace("row 2", "row 1")):
        write_packed_parquet(rows, tmp_path / "b.parquet")
    assert not (tmp_path / "b.parquet").exists()


def test_rows_without_a_key_or_with_words_are_refused(tmp_path):
    for row, said in (
        ({"input_ids": [1], "loss_mask": [1]}, "row 1 has no 'seq_start_id'"),
        (GOOD | {"input_ids": ["a", "b", "c"]}, "row 1: 'input_ids' must be a list of whole numbers"),
        (GOOD | {"loss_mask": [0.5, 1, 0]}, "row 1: 'loss_mask' must be a list of whole numbers"),
        (GOOD | {"seq_lengths": [1, 0]}, "some rows have 'seq_lengths' and others don't"),
    ):
        with pytest.raises(DocumentsError, match=said):
            write_packed_parquet([GOOD, row], tmp_path / "a.parquet")
    with PackedParquetWriter(tmp_path / "a.parquet") as writer:
        writer.write(from_dicts([GOOD]))
        with pytest.raises(DocumentsError, match="give all or none"):
            writer.write(from_dicts([GOOD | {"seq_lengths": [1, 0]}]))


def test_files_of_something_else_are_refused_by_name_and_column(tmp_path):
    path = tmp_path / "a.parquet"
    lists = pa.array([[1]])
    for columns, said in (
        (
            {"input_ids": lists, "text": ["a"]},
            "has no column `loss_mask`, `seq_start_id`; .* and this file has `input_ids`, `text`",
        ),
        (
            {"input_ids": [1], "loss_mask": lists, "seq_start_id": lists},
            "holds int64 in the column `input_ids`",
        ),
        (
            {"input_ids": lists, "loss_mask": [[0.5]], "seq_start_id": lists},
            "list<.*double> in the column `loss_mask`",
        ),
        (
            {"input_ids": [[True]], "loss_mask": lists, "seq_start_id": lists},
            "bool> in the column `input_ids`",
        ),
    ):
        pq.write_table(pa.table(columns), path)
        with pytest.raises(SourceError, match=said):
            PackedParquet(path)
    pq.write_table(
        pa.table({"input_ids": [[1], None], "loss_mask": [[1], [1]], "seq_start_id": [[0], [0]]}), path
    )
    with pytest.raises(SourceError, match="row 2 holds null in `input_ids`"):
        PackedParquet(path).rows([0])
    pq.write_table(pa.table({name: pa.array([], type=pa.list_(pa.int64())) for name in NAMES}), path)
    with pytest.raises(SourceError, match="with no row"):
        PackedParquet(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(SourceError, match="is not a Parquet file, or is damaged"):
        PackedParquet(path)


def test_a_file_that_is_replaced_or_gone_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write_packed_parquet(many_rows(4, 9), path, row_group_size=1)
    reader = PackedParquet(path)
    write_packed_parquet(many_rows(9, 9), path)
    with pytest.raises(SourceError, match="was replaced while it was read"):
        reader.rows([0])
    path.unlink()
    with pytest.raises(SourceError, match="isn't there any more"):
        reader.rows([0])


def test_damaged_pages_are_an_error_or_the_right_rows(tmp_path):
    rows = many_rows(6, 40)
    path = tmp_path / "a.parquet"
    write_packed_parquet(rows, path, row_group_size=2)
    whole = path.read_bytes()
    refused = 0
    for at in range(4, len(whole) - 4, 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            assert read_back(path) == rows
        except (SourceError, DocumentsError):
            refused += 1
    assert refused > 3


def test_a_row_that_is_not_there_is_an_index_error(tmp_path):
    write_packed_parquet([GOOD], tmp_path / "a.parquet")
    reader = PackedParquet(tmp_path / "a.parquet")

    assert reader.rows([]).num_rows == 0
    with pytest.raises(IndexError, match=r"there is no row 1: rows are numbered 0 to 0.*\(2 indices of 3"):
        reader.rows([0, 1, -2])
    with pytest.raises(IndexError, match="a list of whole numbers, got float64"):
        reader.rows(np.array([0.5]))


def test_a_mask_of_fractions_is_refused_and_one_of_whole_fractions_taken(tmp_path):
    rows = from_dicts([GOOD])
    with PackedParquetWriter(tmp_path / "a.parquet") as writer:
        writer.write(replace(rows, loss_mask=np.array([1.0, 0.0, 0.0])))
        with pytest.raises(DocumentsError, match=r"row 1: `loss_mask` holds 0\.5 at place 1 \(0 to 1\)"):
            writer.write(replace(rows, loss_mask=np.array([1.0, 0.5, 0.0])))

    assert read_back(tmp_path / "a.parquet") == [GOOD | {"loss_mask": [1, 0, 0]}]


def test_row_groups_without_rows_are_passed_over(tmp_path):
    rows = many_rows(3, 9)
    table = pq.read_table(write_parquet(tmp_path / "whole.parquet", rows))
    (tmp_path / "some").mkdir()
    with pq.ParquetWriter(tmp_path / "some" / "a.parquet", table.schema) as writer:
        for start, stop in ((0, 0), (0, 2), (2, 2), (2, 3)):
            writer.write_table(table.slice(start, stop - start))
    write_parquet(tmp_path / "some" / "c.parquet", rows)
    pq.write_table(table.slice(0, 0), tmp_path / "some" / "b.parquet")

    with PackedParquet(tmp_path / "some") as reader:
        assert [plain(row) for row in reader] == [*rows, *rows]


def test_settings_that_no_file_can_have_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"must end in \.parquet or \.pq"):
        PackedParquetWriter(tmp_path / "a.npy")
    with pytest.raises(SettingError, match="row_group_tokens must be at least 1, got 0"):
        PackedParquetWriter(tmp_path / "a.parquet", row_group_tokens=0)
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="can't be written"):
        PackedParquetWriter(tmp_path / "file" / "a.parquet")
