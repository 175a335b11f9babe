"""`pack_dataset` over streams: windows that carry over, exact from any row, shared among ranks and workers."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Value
from datasets.distributed import split_dataset_by_node
from tests.adapters.trl.numbered import numbered
from tests.support.rarely import mostly
from trl.data_utils import pack_dataset as trl_pack_dataset

import varlen as vl
from varlen.adapters.trl import pack_dataset
from varlen.adapters.trl.streaming import _Kept
from varlen.errors import DocumentsError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries about each other
STRATEGIES = ("bfd", "bfd_split", "wrapped")
OVERLONG = {"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12]]}


def streamed_lengths() -> list[int]:
    return np.random.default_rng(2).integers(0, 60, 500).tolist()


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_a_stream_loses_nothing_between_its_windows(strategy: str) -> None:
    lengths = streamed_lengths()
    stream = numbered(lengths).to_iterable_dataset()

    rows = list(pack_dataset(stream, 48, strategy, {"batch_size": 50}))

    assert sorted(itertools.chain(*(row["input_ids"] for row in rows))) == list(range(sum(lengths)))
    assert all(row["labels"] == [-token for token in row["input_ids"]] for row in rows)
    assert max(len(row["input_ids"]) for row in rows) <= 48
    assert strategy == "wrapped" or all(sum(row["seq_lengths"]) == len(row["input_ids"]) for row in rows)


def test_rows_of_a_stream_keep_documents_whole() -> None:
    lengths = streamed_lengths()
    begins = np.cumsum([0, *lengths])
    stream = numbered(lengths).to_iterable_dataset()

    for row in pack_dataset(stream, 64, map_kwargs={"batch_size": 50}):
        ends = np.cumsum([0, *row["seq_lengths"]])
        for begin, end in zip(ends[:-1], ends[1:]):
            document = int(np.searchsorted(begins, row["input_ids"][begin], side="right")) - 1
            assert row["input_ids"][begin:end] == list(range(begins[document], begins[document + 1]))


def test_windows_that_carry_over_need_fewer_rows_than_batches_by_themselves() -> None:
    stream = numbered(np.random.default_rng(3).integers(200, 900, 1000).tolist()).to_iterable_dataset()

    ours = list(pack_dataset(stream, 4096, map_kwargs={"batch_size": 50}))
    theirs = list(trl_pack_dataset(stream, 4096, map_kwargs={"batch_size": 50}))

    assert len(ours) < len(theirs)


def test_a_stream_says_at_its_end_what_was_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    stream = Dataset.from_dict(OVERLONG).to_iterable_dataset()

    with caplog.at_level(logging.WARNING, "varlen"):
        list(pack_dataset(stream, 3, "bfd", {"batch_size": 1}))

    assert "3 of 12 tokens (25.00 %) were cut off the ends of 2 documents" in caplog.text


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", mostly(["numpy"], [None, "numpy"]))
def test_a_stream_goes_on_from_any_row(strategy: str, form: str | None) -> None:
    def stream() -> IterableDataset:
        documents = numbered(streamed_lengths()[:60]).to_iterable_dataset(num_shards=2).with_format(form)
        return pack_dataset(documents, 48, strategy, {"batch_size": 8})

    packed, states, rows = stream(), [], []
    states.append(packed.state_dict())
    for row in packed:
        rows.append(np.asarray(row["input_ids"]).tolist())
        states.append(packed.state_dict())

    for number, state in enumerate(states):
        again = stream()
        again.load_state_dict(state)
        assert [np.asarray(row["input_ids"]).tolist() for row in again] == rows[number:]


@pytest.mark.parametrize("shards", [1, 4])
def test_two_ranks_share_the_rows_of_a_stream(shards: int) -> None:
    lengths = streamed_lengths()
    stream = numbered(lengths).to_iterable_dataset(num_shards=shards)
    packed = pack_dataset(stream, 64, "bfd_split", {"batch_size": 50})

    taken = [
        token
        for rank in range(2)
        for row in split_dataset_by_node(packed, rank=rank, world_size=2)
        for token in row["input_ids"]
    ]

    assert sorted(taken) == list(range(sum(lengths)))


def test_workers_share_the_rows_of_a_stream() -> None:
    lengths = streamed_lengths()
    stream = numbered(lengths).to_iterable_dataset(num_shards=4)
    packed = pack_dataset(stream, 64, "bfd_split", {"batch_size": 50})

    rows = list(torch.utils.data.DataLoader(packed, batch_size=None, num_workers=2))

    assert sorted(int(token) for row in rows for token in row["input_ids"]) == list(range(sum(lengths)))


def test_a_shuffled_stream_comes_in_another_order_each_epoch() -> None:
    lengths = streamed_lengths()
    stream = numbered(lengths).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=50)
    packed = pack_dataset(stream, 64, "bfd_split", {"batch_size": 50})

    first = [row["input_ids"] for row in packed]
    again = [row["input_ids"] for row in packed]
    packed.set_epoch(1)
    second = [row["input_ids"] for row in packed]

    assert first == again != second
    assert sorted(itertools.chain(*second)) == list(range(sum(lengths)))


@pytest.mark.parametrize("features", [None, Features({"input_ids": [Value("int32")]})])
def test_a_stream_of_python_rows_may_begin_with_an_empty_one(features: Features | None) -> None:
    def rows() -> Any:
        for size in range(6):
            yield {"input_ids": list(range(size))}

    packed = pack_dataset(IterableDataset.from_generator(rows, features=features), 5)

    expected = {"input_ids": [0, 1, 2, 3, 0], "seq_lengths": [4, 1]}
    assert list(packed) == [{"input_ids": [0, 1, 2, 3, 4], "seq_lengths": [5]}, expected, *list(packed)[2:]]
    assert [row["seq_lengths"] for row in packed] == [[5], [4, 1], [3, 2]]


def test_a_stream_whose_rows_change_their_type_is_refused() -> None:
    def rows() -> Any:
        yield {"input_ids": [1]}
        yield {"input_ids": ["a"]}

    with pytest.raises(DocumentsError, match=r"have no one type.*make the stream with features"):
        list(pack_dataset(IterableDataset.from_generator(rows), 4, map_kwargs={"batch_size": 1}))


def test_documents_are_let_go_once_they_are_handed_out() -> None:
    kept = _Kept(marked=True)
    lengths = kept.take_in(numbered([5, 2, 6, 3, 0]).data.table)
    kept.note(lengths)
    packer = vl.WindowPacker(capacity=8, window=4, method="best_fit_decreasing", max_age=0)

    first = packer.add([5, 2, 6, 3])
    kept.hand_out(first)

    assert first.num_pieces == 4
    assert sum(batch.num_rows for batch in kept._batches) == 0
