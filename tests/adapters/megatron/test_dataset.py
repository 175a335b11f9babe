"""Packed rows in flat arrays and data sets of them: what the releases' classes do, and where they are wrong."""

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from varlen.adapters.megatron import GPTSFTPackedDataset, GPTSFTPackedParquetDataset, PackedRows
from varlen.adapters.megatron.rows import as_dialect
from varlen.errors import DocumentsError, SettingError, SourceError

EOS = 2
TOKENIZER = SimpleNamespace(eos_id=EOS)


def packed(first: int = 10, sizes: tuple[int, ...] = (4, 4)) -> dict[str, list[int]]:
    ids = [token for size in sizes for token in [*range(first, first + size - 1), EOS]]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return {"input_ids": ids, "loss_mask": [1] * len(ids), "seq_start_id": starts}


def written(path: Path, rows: list[dict[str, Any]], group: int = 3) -> Path:
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    pq.write_table(table, path, row_group_size=group)
    return path


def dataset(path: Path | str, **settings: Any) -> GPTSFTPackedParquetDataset:
    return GPTSFTPackedParquetDataset(path, TOKENIZER, **{"max_seq_length": 64} | settings)


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Ten rows, of which row r begins with token 10 (r + 1)."""
    return written(tmp_path / "data.idx.parquet", [packed(10 * (row + 1)) for row in range(10)])


def test_every_row_is_there_with_the_boundaries_of_its_documents(ten):
    rows = dataset(ten)

    assert len(rows) == 10
    for number in range(10):
        row = rows[number]
        assert row["input_ids"].tolist() == packed(10 * (number + 1))["input_ids"]
        assert row["seq_boundaries"] == [0, 4, 8]
        assert row["loss_mask"].tolist() == [1] * 8
        assert "is_padding" not in row


def test_rows_of_several_files_are_numbered_through(tmp_path):
    for shard, count in enumerate((5, 10, 7)):
        written(tmp_path / f"shard_{shard}.idx.parquet", [packed(100 * shard + 10)] * count)

    for spec in (tmp_path, tmp_path / "shard_*.idx.parquet"):
        rows = dataset(spec)
        assert len(rows) == 22
        assert [int(rows[n]["input_ids"][0]) for n in (0, 4, 5, 14, 15, 21)] == [10, 10, 110, 110, 210, 210]


def test_negative_numbers_count_from_the_end_and_train_nothing(ten):
    rows = dataset(ten)

    row = rows[-1]

    assert row["input_ids"][0] == 100
    assert not row["loss_mask"].any()
    assert int(rows.collate_fn([rows[0], row])["loss_mask"][1].sum()) == 0


@pytest.mark.parametrize("answer_only_loss", [True, False])
def test_rows_that_complete_a_batch_train_nothing_where_samples_are_mapped(ten, answer_only_loss):
    rows = dataset(ten, max_num_samples=5, answer_only_loss=answer_only_loss)

    batch = rows.collate_fn([rows[0], rows[-1]])

    assert int(batch["loss_mask"][0].sum()) > 0
    assert int(batch["loss_mask"][1].sum()) == 0


def test_compatible_rows_of_the_older_dialects_check_the_sign_too_late(ten):
    rows = dataset(ten, max_num_samples=5, dialect="0.4", compatible=True)

    assert rows[-1]["loss_mask"].any()
    assert not dataset(ten, dialect="0.4", compatible=True)[-1]["loss_mask"].any()
    assert not dataset(ten, max_num_samples=5, compatible=True)[-1]["loss_mask"].any()


@pytest.mark.parametrize("count", [5, 10, 25])
def test_passes_are_shuffled_as_the_releases_shuffle_them(ten, count):
    rows = dataset(ten, max_num_samples=count, seed=42)

    assert len(rows) == count
    assert rows.samples_mapping is not None
    np.random.seed(42)  # noqa: NPY002
    wanted: list[int] = []
    while len(wanted) < count:
        order = np.arange(10)
        np.random.shuffle(order)  # noqa: NPY002
        wanted += order.tolist()
    assert rows.samples_mapping.tolist() == wanted[:count]
    assert [int(rows[n]["input_ids"][0]) // 10 - 1 for n in range(count)] == wanted[:count]


def test_the_global_random_numbers_are_left_alone(ten):
    np.random.seed(7)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002

    dataset(ten, max_num_samples=30)

    assert np.random.get_state()[1].tolist() == before  # type: ignore[index] # noqa: NPY002


@pytest.mark.parametrize(
    ("dialect", "names"),
    [
        ("0.4", {"attention_mask", "cu_seqlens", "cu_seqlens_argmin", "max_seqlen"}),
        ("0.5.1", {"attention_mask", "cu_seqlens", "cu_seqlens_argmin", "max_seqlen"}),
        ("0.6.0", {"attention_mask", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"}),
    ],
)
def test_batches_have_the_keys_of_the_release(ten, dialect, names):
    rows = dataset(ten, dialect=dialect)

    batch = rows.collate_fn([rows[0], rows[3]])

    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids", "token_count"} | names
    assert batch["tokens"].shape == (2, 16)
    assert batch["token_count"] == [6, 6]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gets_batches_with_and_without_workers(ten, workers):
    loader: Any = DataLoader(
        dataset(ten),
        batch_sampler=[[0, 9], [4, -1]],
        num_workers=workers,
        collate_fn=dataset(ten).collate_fn,
        multiprocessing_context="spawn" if workers else None,
    )

    batches = list(loader)

    assert [batch["tokens"][:, 0].tolist() for batch in batches] == [[10, 100], [50, 100]]
    assert batches[1]["loss_mask"].sum(1).tolist() == [6, 0]


def test_a_data_set_that_was_pickled_reads_the_same(ten):
    rows = dataset(ten, max_num_samples=12)
    rows[0]

    again = pickle.loads(pickle.dumps(rows))

    assert [again[n]["input_ids"].tolist() for n in range(12)] == [
        rows[n]["input_ids"].tolist() for n in range(12)
    ]


def test_closed_files_are_opened_again_and_may_be_closed_twice(ten):
    rows = dataset(ten)
    rows[0]

    rows.close()
    rows.close()

    assert int(rows[1]["input_ids"][0]) == 20


def test_an_npy_file_gives_what_parquet_gives(tmp_path):
    given = [packed(10), packed(50, (3, 2, 6))]
    path = tmp_path / "packed.npy"
    np.save(path, np.array([*given, {}], dtype=object)[:2], allow_pickle=True)
    written(tmp_path / "packed.idx.parquet", given)

    ours = GPTSFTPackedDataset(path, TOKENIZER, max_seq_length=64)
    other = dataset(tmp_path / "packed.idx.parquet")

    for name, value in other.collate_fn([other[0], other[1]]).items():
        same = ours.collate_fn([ours[0], ours[1]])[name]
        assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value


def test_lengths_in_the_file_say_where_padding_begins(tmp_path):
    row = packed(10, (5, 5)) | {"seq_lengths": [4, 2]}
    rows = dataset(written(tmp_path / "data.idx.parquet", [row]), pad_seq_to_mult=4)

    batch = rows.collate_fn([rows[0]])

    assert rows[0]["seq_lengths"].tolist() == [4, 2]
    assert batch["cu_seqlens_q"].tolist() == [[0, 4, 6, 6]]
    assert batch["cu_seqlens_q_padded"].tolist() == [[0, 4, 8, 16]]


def test_rows_with_other_numbers_of_documents_make_one_batch(ten):
    rows = dataset(ten, max_seq_length=8, pad_seq_length_to_mult=1)
    items = [
        {"input_ids": [10, 11, 12, 13, 20, 21, 22, 23], "seq_boundaries": [0, 4, 8], "loss_mask": [1] * 8},
        {"input_ids": [*range(30, 38)], "seq_boundaries": (0, 8), "loss_mask": np.ones(8)},
    ]

    batch = rows.collate_fn(items)

    assert batch["cu_seqlens_q"].tolist() == [[0, 3, 6, 7], [0, 7, 7, 7]]
    assert batch["max_seqlen_q"].tolist() == [[3], [7]]


def test_tokens_outside_of_the_boundaries_are_left_out(ten):
    item = {"input_ids": [*range(101, 106)], "seq_boundaries": (1, 4), "loss_mask": [0, 0, 1, 1, 1]}

    batch = dataset(ten, pad_seq_length_to_mult=1).collate_fn([item])

    assert batch["tokens"].tolist() == [[102, 103]]
    assert batch["labels"].tolist() == [[103, 104]]
    assert batch["loss_mask"].tolist() == [[0, 1]]


def test_metadata_gives_every_batch_one_shape(ten, tmp_path):
    metadata = tmp_path / "64_metadata.jsonl"
    metadata.write_text(
        '[{"dataset_max_seqlen": 3, "max_samples_per_bin": 4, "pack_size": 64, "min_packed_seqlen": 6}]'
    )
    settings = {"pad_to_max_length": True, "pad_cu_seqlens": True, "pack_metadata_file_path": metadata}

    rows = dataset(ten, **settings)

    batch = rows.collate_fn([rows[0]])
    assert batch["cu_seqlens_q"].shape == (1, 6)
    assert batch["max_seqlen_q"].tolist() == [58]
    with pytest.raises(SourceError, match="`pack_size` is 64, but"):
        dataset(ten, **settings | {"max_seq_length": 128})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pad_cu_seqlens": True, "pad_to_max_length": True}, "needs the metadata"),
        ({"virtual_tokens": 3}, "P-Tuning with packed sequence is not supported: virtual_tokens=3"),
        ({"pad_to_maxlength": True}, "'pad_to_maxlength' is no argument of GPTSFTPackedParquetDataset"),
        ({"max_num_samples": 3, "seed": -1}, "seed must be a whole number from 0 to 4,294,967,295, got -1"),
        ({"max_num_samples": 0}, "max_num_samples must be a whole number from 1 on, or None; got 0"),
        ({"tokenizer": SimpleNamespace(bos_id=1)}, "no whole number eos_id, eod or eos_token_id"),
    ],
)
def test_settings_that_cannot_work_are_refused(ten, settings, words):
    with pytest.raises(SettingError, match=words):
        GPTSFTPackedParquetDataset(ten, **{"tokenizer": TOKENIZER} | settings)


def test_arguments_for_data_that_is_not_packed_change_nothing(ten):
    rows = dataset(
        ten, add_bos=False, prompt_template="{input} {output}", memmap_workers=1, pad_seq_to_mult=None
    )

    assert rows.collate_fn([rows[0]])["tokens"].shape == (1, 16)
    for name in ("eod", "eos_token_id"):
        other = GPTSFTPackedParquetDataset(ten, SimpleNamespace(**{name: 9}))
        assert other.collate_fn([other[0]])["tokens"][0, -1] == 9


def test_files_that_hold_no_packed_rows_are_refused(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1]], "seq_start_id": [[0]]}), tmp_path / "a.idx.parquet")
    empty = {name: pa.array([], pa.list_(pa.int32())) for name in ("input_ids", "loss_mask", "seq_start_id")}
    pq.write_table(pa.table(empty), tmp_path / "b.idx.parquet")

    with pytest.raises(SourceError, match=r"a\.idx\.parquet has no column .*loss_mask"):
        dataset(tmp_path / "a.idx.parquet")
    with pytest.raises(SourceError, match="with no row"):
        dataset(tmp_path / "b.idx.parquet")
    with pytest.raises(SourceError):
        dataset(tmp_path / "none.idx.parquet")


def test_rows_outside_of_the_data_are_no_rows(ten):
    rows = dataset(ten)

    for number in (10, -11):
        with pytest.raises(IndexError, match=f"row {number} of 10 in .*data"):
            rows[number]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_boundaries": [0, 3]}, "2 input_ids, but seq_bound"),
        ({"seq_boundaries": [0]}, "at least two whole numbers"),
        ({"loss_mask": [1]}, "but 1 values of loss_mask"),
        ({"input_ids": None, "loss_mask": None}, r"the shape \(\) in input_ids"),
        ({"input_ids": [1, None]}, "of one dimension, got obj"),
        ({"input_ids": [1.5, 2]}, "of one dimension, got float"),
        ({"input_ids": ["a", "b"]}, "whole numbers of one dim"),
        ({"seq_boundaries": None}, r"seq_boundaries \[None\]"),
        (
            {"seq_lengths": [1, 0]},
            r"has 1 document, but seq_lengths \[1, 0\]; they must be whole numbers, one per document",
        ),
        ({"seq_lengths": [1.5]}, r"but seq_lengths \[1.5\]"),
        (
            {"input_ids": [1, 2, 3], "loss_mask": [1] * 3, "seq_boundaries": [0, 2, 1]},
            "row 0 of the batch: `seq_start_id`",
        ),
    ],
)
def test_items_that_are_no_packed_rows_are_refused(ten, changes, words):
    item = {"input_ids": [1, 2], "loss_mask": [1, 1], "seq_boundaries": [0, 2]}

    with pytest.raises(DocumentsError, match=words):
        dataset(ten).collate_fn([item | changes])
    with pytest.raises(DocumentsError, match="row 0 of the batch has no 'loss_mask'"):
        dataset(ten).collate_fn([{"input_ids": [1, 2]}])
    with pytest.raises(DocumentsError, match="at least one packed row"):
        dataset(ten).collate_fn([])


def test_a_row_that_is_too_long_is_said_with_its_file(ten):
    rows = dataset(ten, max_seq_length=4)

    with pytest.raises(
        SettingError,
        match=r"data\.idx\.parquet: row 10 holds 6 inputs but max_seq_length is 4 \(2 rows of 3\)",
    ):
        rows.collate_fn(
            [{"input_ids": [1, 2], "loss_mask": [1, 1], "seq_boundaries": [0, 2]}, rows[-1], rows[3]]
        )
    with pytest.raises(SettingError, match=r"data\.idx\.parquet: row 1 of the batch holds 5 inputs but"):
        rows.collate_fn(
            [
                {"input_ids": [1] * size, "loss_mask": [1] * size, "seq_boundaries": [0, size]}
                for size in (2, 6)
            ]
        )


def test_a_sound_row_is_valid():
    GPTSFTPackedParquetDataset.validate_row(0, [1, 2, 3, 4], [1, 1, 0, 1], [0, 2])


@pytest.mark.parametrize(
    ("mask", "starts", "words"),
    [
        ([1, 1], [0], r"Row 7: loss_mask length \(2\) != input_ids length \(4\)"),
        ([1] * 4, [1], "Row 7: seq_start_id must start with 0, got \\[1\\]"),
        ([1] * 4, [], "must start with 0, got \\[\\]"),
        ([1] * 4, [0, 5], r"seq_start_id\[1\]=5 >= 4"),
        ([1] * 4, [0, 3, 1], "not non-decreasing and distinct at index 2: 3, then 1"),
        ([1] * 4, [0, 2, 2], "at index 2: 2, then 2; every document holds a token"),
    ],
)
def test_a_row_that_is_none_is_said_by_number(mask, starts, words):
    with pytest.raises(DocumentsError, match=words):
        GPTSFTPackedParquetDataset.validate_row(7, [1, 2, 3, 4], mask, starts)


ROWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=5)


def stored_rows(stored: list[list[int]]) -> PackedRows:
    """Rows whose documents are stored with these lengths, and all of whose tokens are real."""
    sizes = [sum(row) for row in stored]
    starts = [start for row in stored for start in np.cumsum([0, *row[:-1]]).tolist()]
    return PackedRows(
        input_ids=np.arange(sum(sizes)),
        loss_mask=np.ones(sum(sizes), dtype=np.int8),
        offsets=np.cumsum([0, *sizes]),
        seq_start_id=np.array(starts, dtype=np.int64),
        document_offsets=np.cumsum([0, *map(len, stored)]),
        seq_lengths=np.array([length - 1 for row in stored for length in row], dtype=np.int32),
    )


@given(ROWS)
def test_documents_lie_where_rows_say(stored):
    rows = stored_rows(stored).check()

    lengths = [length for row in stored for length in row]
    assert rows.num_rows == len(stored)
    assert rows.num_documents == len(lengths)
    assert rows.stored_lengths.tolist() == lengths
    assert rows.begins.tolist() == np.cumsum([0, *lengths])[:-1].tolist()


TWO = stored_rows([[4, 2], [3]])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (replace(TWO, loss_mask=TWO.loss_mask[:-1]), "9 `input_ids`, but 8 values of `loss_mask`"),
        (replace(TWO, document_offsets=np.array([0, 3])), "3 `offsets`, but 2 `document_offsets`"),
        (replace(TWO, seq_start_id=np.array([0])), "1 `seq_start_id`, but `document_offsets` end at 3"),
        (replace(TWO, seq_lengths=np.ones(1, np.int32)), "3 `seq_start_id`, but 1 values of `seq_lengths`"),
        (
            replace(
                TWO, seq_start_id=np.array([0, 4]), document_offsets=np.array([0, 2, 2]), seq_lengths=None
            ),
            "row 1: `seq_start_id` is empty",
        ),
        (replace(TWO, seq_start_id=np.array([0, 4, 1])), "row 1: `seq_start_id` begins at 1 and not at 0"),
        (
            replace(TWO, seq_start_id=np.array([0, 6, 0])),
            "row 0: `seq_start_id` reaches past the row's 6 tokens",
        ),
        (replace(TWO, seq_start_id=np.array([0, -2, 0])), "row 0: `seq_start_id` must rise"),
        (
            replace(stored_rows([[2, 2, 2]]), seq_start_id=np.array([0, 4, 2])),
            "row 0: `seq_start_id` must rise",
        ),
        (
            replace(stored_rows([[2, 2, 2]]), seq_start_id=np.array([0, 2, 2])),
            "row 0: `seq_start_id` must rise",
        ),
        (
            replace(TWO, seq_lengths=np.array([3, 2, 2], dtype=np.int32)),
            "row 0: `seq_lengths` has a document longer than what is stored of it",
        ),
        (
            replace(TWO, seq_lengths=np.array([3, 1, -1], dtype=np.int32)),
            "row 1: `seq_lengths` has a negative length",
        ),
    ],
)
def test_rows_that_no_release_could_mean_are_refused(wrong, words):
    with pytest.raises(DocumentsError, match=words.replace("(", r"\(")):
        wrong.check()


def test_the_refusal_names_the_row_as_it_is_asked_to_and_counts_those_like_it():
    wrong = replace(stored_rows([[2], [2], [2]]), seq_start_id=np.array([0, 1, 1]))

    with pytest.raises(
        DocumentsError, match=r"file.npy, row 11: .* \(2 rows of 3 like it\); pack the data again"
    ):
        wrong.check(lambda row: f"file.npy, row {row + 10:,}")


def test_a_release_speaks_one_dialect():
    releases = ("0.3.0", "v0.4.2", "0.5.1", "0.6", "0.7.0.dev0", "1.0")

    assert [as_dialect(release) for release in releases] == ["0.4", "0.4", "0.5", "0.6", "0.6", "0.6"]


@pytest.mark.parametrize("wrong", ["", "0", "0.2.1", "main", "0.x"])
def test_a_dialect_that_nobody_speaks_is_refused(wrong):
    with pytest.raises(SettingError, match=r"names no dialect .* '0\.4', '0\.5', '0\.6'"):
        as_dialect(wrong)
