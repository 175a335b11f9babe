"""`PackedDataset` gives torchtune's rows in torchtune's form, fuller, and without targets across documents."""

import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.adapters.torchtune import PackedDataset
from varlen.errors import DocumentsError, OverlongDocumentError, SettingError


def samples_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Samples whose tokens are all different, with labels that are told from tokens."""
    bounds = list(itertools.accumulate(lengths, initial=1))
    tokens = [list(range(begin, end)) for begin, end in itertools.pairwise(bounds)]
    return [{"tokens": ids, "labels": [-token for token in ids]} for ids in tokens]


def documents_in(row: dict[str, torch.Tensor], width: int) -> list[list[int]]:
    """The documents of a row, cut by its lengths; padding left out."""
    lengths = row["seq_lens"].tolist()
    assert sum(lengths) == width
    parts = [part.tolist() for part in row["tokens"].split(lengths)]
    return [part for part in parts if part[0] != 0]


@pytest.mark.parametrize("max_packs", [5, 200])
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("is_split", [False, True])
def test_the_grid_of_torchtune_s_own_test_gives_what_it_expects(size, max_packs, is_split):
    width = 25
    samples = [{"tokens": [n] * size, "labels": [n] * size} for n in range(1000)]

    packed = PackedDataset(samples, max_seq_len=width, max_packs=max_packs, split_across_pack=is_split)

    a_row = width / size if is_split else width // size
    rows = min(int(-(-1000 // a_row)), max_packs)
    rest = width % size
    whole = [*range(size)] * (width // size)
    tail = [*range(rest)] if is_split else [*range(size, size + rest)]
    if rows * width < 1000 * size or not rest:
        last = (rows * width - 1) // size if is_split or not rest else 0
        assert packed[-1]["tokens"][-1] == last
    assert len(packed) == rows
    assert packed[0]["seq_lens"].tolist() == [size] * (width // size) + [rest] * (rest > 0)
    assert packed[0]["input_pos"].tolist() == [*whole, *tail]
    assert {name: values.dtype for name, values in packed[0].items()} == dict.fromkeys(
        ("tokens", "labels", "input_pos", "seq_lens"), torch.int64
    )


def test_samples_that_are_cut_give_what_torchtune_s_own_test_expects():
    # Where torchtune has -1 for the end of a text, which is refused as no id, there is 11.
    texts = [[0, 4, 2, 1, 7, 4, 11], [0, 1, 9, 5, 2, 6, 4, 3, 8, 11], [0, 4, 3, 4, 3, 2, 5, 7, 11]]

    packed = PackedDataset(
        [{"tokens": ids, "labels": ids} for ids in texts], max_seq_len=10, split_across_pack=True
    )

    rows = [{name: values.tolist() for name, values in row.items()} for row in packed]  # type: ignore[attr-defined]
    assert [row["tokens"] for row in rows] == [
        [0, 4, 2, 1, 7, 4, 11, 0, 1, 9],
        [5, 2, 6, 4, 3, 8, 11, 0, 4, 3],
        [4, 3, 2, 5, 7, 11, 0, 0, 0, 0],
    ]
    assert [row["seq_lens"] for row in rows] == [[7, 3], [7, 3], [6, 4]]
    assert [row["input_pos"] for row in rows] == [
        [0, 1, 2, 3, 4, 5, 6, 0, 1, 2],
        [3, 4, 5, 6, 7, 8, 9, 0, 1, 2],
        [3, 4, 5, 6, 7, 8, 9, 9, 9, 9],
    ]
    # torchtune has the tokens themselves where documents begin: the target of the document before.
    assert [row["labels"] for row in rows] == [
        [-100, 4, 2, 1, 7, 4, 11, -100, 1, 9],
        [-100, 2, 6, 4, 3, 8, 11, -100, 4, 3],
        [-100, 3, 2, 5, 7, 11, -100, -100, -100, -100],
    ]


@given(st.lists(st.integers(0, 12), max_size=25), st.integers(12, 20))
def test_every_sample_stands_whole_in_one_row(lengths, width):
    samples = samples_of(lengths)
    packed = PackedDataset(samples, max_seq_len=width)
    rows = [packed[number] for number in range(len(packed))]

    found = [document for row in rows for document in documents_in(row, width)]

    assert sorted(found) == sorted(sample["tokens"] for sample in samples if sample["tokens"])
    assert len(packed) == vl.pack(lengths, width).num_packs


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 12))
def test_cut_samples_lie_end_to_end_and_lose_nothing(lengths, width):
    packed = PackedDataset(samples_of(lengths), max_seq_len=width, split_across_pack=True)
    rows = [packed[number] for number in range(len(packed))]

    tokens = torch.cat([row["tokens"] for row in rows]).tolist() if rows else []

    assert tokens[: sum(lengths)] == list(range(1, sum(lengths) + 1))
    assert not any(tokens[sum(lengths) :])
    assert len(rows) == -(-sum(lengths) // width)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=25), st.integers(12, 20), st.booleans())
def test_labels_are_those_given_but_where_a_document_begins(lengths, width, is_split):
    packed = PackedDataset(samples_of(lengths), max_seq_len=width, split_across_pack=is_split)

    for number in range(len(packed)):
        row = packed[number]
        begins = np.cumsum([0, *row["seq_lens"].tolist()])[:-1]
        expected = -row["tokens"]
        expected[row["tokens"] == 0] = -100
        expected[begins] = -100
        assert row["labels"].tolist() == expected.tolist()


def test_the_loss_over_a_row_is_that_of_its_samples_one_by_one():
    samples = [{"tokens": [3, 5, 7, 2], "labels": [3, 5, 7, 2]}, {"tokens": [4, 6, 1], "labels": [4, 6, 1]}]
    row = PackedDataset(samples, max_seq_len=8)[0]
    shifted = torch.cat([row["labels"][1:], torch.tensor([-100])])  # as torchtune's recipes do

    targets = [(int(token), int(target)) for token, target in zip(row["tokens"], shifted) if target != -100]

    assert targets == [(3, 5), (5, 7), (7, 2), (4, 6), (6, 1)]


def test_rows_are_fewer_than_by_filling_one_after_the_other():
    lengths = np.random.default_rng(0).integers(1, 100, 500).tolist()

    packed = PackedDataset(samples_of(lengths), max_seq_len=128)

    assert len(packed) < vl.pack(lengths, 128, "next_fit").num_packs


def test_the_token_of_padding_is_chosen_and_negative_numbers_count_from_the_end():
    packed = PackedDataset(samples_of([3, 2]), max_seq_len=4, padding_idx=-8)

    assert packed[-1]["tokens"].tolist() == [4, 5, -8, -8]
    assert packed[-1]["input_pos"].tolist() == [0, 1, 2, 3]
    assert packed[-1]["seq_lens"].tolist() == [2, 2]
    for number in (2, -3):
        with pytest.raises(IndexError, match="of 2"):
            packed[number]


def test_what_max_packs_leaves_out_is_logged_and_no_more_is_read_than_needed(caplog):
    read = []

    def reading() -> Any:
        for sample in samples_of([4] * 10):
            read.append(sample)
            yield sample

    with caplog.at_level(logging.WARNING, "varlen"):
        packed = PackedDataset(reading(), max_seq_len=6, max_packs=3)

    assert len(packed) == 3
    assert len(read) == 6
    assert "max_packs=3 leaves out 8 of the 20 tokens read, and all samples after them" in caplog.text


@pytest.mark.parametrize("seed", range(5))
def test_as_many_rows_hold_more_tokens_than_filled_one_after_the_other(seed):
    lengths = np.random.default_rng(seed).integers(1, 100, 500).tolist()
    filled = vl.pack(lengths, 128, "next_fit")

    packed = PackedDataset(samples_of(lengths), max_seq_len=128, max_packs=20)

    held = sum(int((packed[number]["tokens"] > 0).sum()) for number in range(len(packed)))
    assert held > filled.lengths[: filled.offsets[20]].sum()


def test_the_fullest_rows_are_kept():
    packed = PackedDataset(samples_of([7, 1, 8]), max_seq_len=9, max_packs=1)

    assert packed[0]["tokens"].tolist() == [8, *range(9, 17)]  # by first samples it would be the row of 7


def test_where_all_fits_nothing_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "varlen"):
        assert len(PackedDataset(samples_of([4, 2]), max_seq_len=6, max_packs=1)) == 1
        assert len(PackedDataset(samples_of([]), max_seq_len=6)) == 0

    assert not caplog.records


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    [
        (
            samples_of([2, 5]),
            OverlongDocumentError,
            "Dataset sample is too long: sample 1 has 5 tokens.*is 4",
        ),
        ([{"tokens": [1]}], DocumentsError, "sample 0 has no 'labels'"),
        ([[1, 2]], DocumentsError, "sample 0 has no 'tokens'"),
        ([{"tokens": [1, 2], "labels": [1]}], DocumentsError, "sample 0 has 2 tokens but 1 labels"),
        ([{"tokens": [1.5], "labels": [1]}], DocumentsError, "must be whole numbers of 32 bits"),
        ([{"tokens": [2**40], "labels": [1]}], DocumentsError, "must be whole numbers of 32 bits"),
        ([{"tokens": [[1], [2, 3]], "labels": [1]}], DocumentsError, "can't be read as numbers"),
    ],
)
def test_samples_that_can_t_be_packed_are_named(samples, error, words):
    with pytest.raises(error, match=words):
        PackedDataset(samples, max_seq_len=4)


@pytest.mark.parametrize("setting", [{"max_seq_len": 0}, {"max_seq_len": 4, "max_packs": 0}])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(SettingError, match="must be a whole number from 1"):
        PackedDataset(samples_of([1]), **setting)


def test_tensors_and_a_loader_s_workers_are_served():
    samples = [{name: torch.tensor(values) for name, values in s.items()} for s in samples_of([3, 4, 2, 5])]
    packed = PackedDataset(samples, max_seq_len=7)

    rows = list(torch.utils.data.DataLoader(packed, batch_size=None, num_workers=1))

    assert sorted(int(token) for row in rows for token in row["tokens"]) == list(range(1, 15))
