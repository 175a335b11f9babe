"""`pack_dataset` over tables and streams gives TRL's rows where TRL is right, and mends what TRL loses."""

import itertools
import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, IterableDataset, Value, load_from_disk
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapters.trl.tiny_models import losses_of_training, tiny_model
from tests.support.rarely import mostly
from trl.data_utils import pack_dataset as trl_pack_dataset

import varlen as vl
from varlen.adapters.trl import pack_dataset
from varlen.adapters.trl.streaming import _Pending
from varlen.errors import DocumentsError, SettingError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries about each other
STRATEGIES = ("bfd", "bfd_split", "wrapped")
ONE_BATCH = {"batch_size": 10**6}

# Inputs and outputs that TRL's own tests check: TestPackDatasetWrapped and TestPackDatasetBfd.
MASKED = {"input_ids": [[1, 2, 3], [4, 5, 6, 7], [8]], "attention_mask": [[0, 1, 1], [0, 0, 1, 1], [1]]}
OVERLONG = {"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12]]}
PUBLISHED = [
    (
        "wrapped",
        3,
        MASKED,
        {"input_ids": [[1, 2, 3], [4, 5, 6], [7, 8]], "attention_mask": [[0, 1, 1], [0, 0, 1], [1, 1]]},
    ),
    (
        "bfd",
        4,
        MASKED,
        {
            "input_ids": [[4, 5, 6, 7], [1, 2, 3, 8]],
            "attention_mask": [[0, 0, 1, 1], [0, 1, 1, 1]],
            "seq_lengths": [[4], [3, 1]],
        },
    ),
    (
        "bfd_split",
        4,
        OVERLONG,
        {"input_ids": [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7, 5, 12]], "seq_lengths": [[4], [4], [2, 1, 1]]},
    ),
    (
        "bfd_split",
        4,
        {
            "col1": [[1, -2, 3, -4, 5, -6], [7, -8, 9], [-10, 11, -12], [13, -14, 15, -16]],
            "col2": [[-1, 2, -3, 4, -5, 6], [-7, 8, -9], [10, -11, 12], [-13, 14, -15, 16]],
        },
        {
            "col1": [[1, -2, 3, -4], [13, -14, 15, -16], [7, -8, 9], [-10, 11, -12], [5, -6]],
            "col2": [[-1, 2, -3, 4], [-13, 14, -15, 16], [-7, 8, -9], [10, -11, 12], [-5, 6]],
            "seq_lengths": [[4], [4], [3], [3], [2]],
        },
    ),
    (
        "bfd_split",
        5,
        {"input_ids": [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10], [11, 12, 13]]},
        {"input_ids": [[1, 2, 3, 4, 5], [7, 8, 9, 10, 6], [11, 12, 13]], "seq_lengths": [[5], [4, 1], [3]]},
    ),
    (
        "bfd",
        4,
        OVERLONG,
        {"input_ids": [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7, 12]], "seq_lengths": [[4], [4], [2, 1]]},
    ),
    (
        "bfd",
        4,
        {"input_ids": [[1, 2], [], [3, 4], []]},
        {"input_ids": [[1, 2, 3, 4]], "seq_lengths": [[2, 2]]},
    ),
]


@pytest.mark.parametrize(("strategy", "length", "given_", "expected"), PUBLISHED)
def test_it_returns_what_trl_s_own_tests_expect(strategy, length, given_, expected):
    stored = Dataset.from_dict(given_)

    assert pack_dataset(stored, length, strategy).to_dict() == expected
    streamed = pack_dataset(stored.to_iterable_dataset(), length, strategy)
    assert next(iter(streamed.batch(batch_size=100))) == expected


def test_the_old_name_of_splitting_still_works_and_says_the_new_one():
    stored = Dataset.from_dict(OVERLONG)

    with pytest.warns(FutureWarning, match='"bfd-requeue" is now called "bfd_split"'):
        packed = pack_dataset(stored, 4, "bfd-requeue")

    assert packed.to_dict() == pack_dataset(stored, 4, "bfd_split").to_dict()


def chunked(documents: Dataset, size: int) -> Dataset:
    """The same documents, `size` of them in each chunk of Arrow's memory."""
    return Dataset(pa.Table.from_batches(documents.data.table.to_batches(max_chunksize=size)))


@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=30).filter(any),
    st.integers(1, 16),
    st.sampled_from(STRATEGIES),
    st.integers(1, 30),
    st.sampled_from([None, pa.large_list(pa.int32()), pa.list_(pa.string()), pa.list_(pa.float32())]),
)
@settings(max_examples=60, deadline=None)
def test_the_rows_are_trl_s_where_trl_sees_the_whole_set(lengths, length, strategy, chunk, kind):
    stored = numbered(lengths, kind)

    theirs = trl_pack_dataset(stored, length, strategy, ONE_BATCH)
    ours = pack_dataset(chunked(stored, chunk), length, strategy)

    assert ours.to_dict() == theirs.to_dict()
    assert ours.features == theirs.features
    assert len(ours) == len(theirs)


@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=30).filter(any),
    st.integers(1, 16),
    st.sampled_from(STRATEGIES),
)
@settings(max_examples=30, deadline=None)
def test_a_set_shuffled_or_selected_from_is_packed_in_its_new_order(lengths, length, strategy):
    stored = numbered(lengths)
    order = np.random.default_rng(len(lengths)).permutation(len(lengths))
    copied = Dataset.from_dict(stored[order.tolist()], features=stored.features)

    assert pack_dataset(stored.select(order), length, strategy).to_dict() == (
        pack_dataset(copied, length, strategy).to_dict()
    )


def test_missing_values_and_flags_travel_along():
    stored = Dataset.from_dict(
        {"input_ids": [[1, None, 3], [4], [5, 6]], "flags": [[True, False, True], [False], [True, True]]}
    )

    packed = pack_dataset(stored, 3).to_dict()

    assert packed["input_ids"] == [[1, None, 3], [5, 6, 4]]
    assert packed["flags"] == [[True, False, True], [True, True, False]]


def test_a_whole_set_needs_fewer_rows_than_batches_of_a_thousand():
    lengths = np.random.default_rng(0).integers(200, 900, 3000)
    stored = numbered(lengths.tolist())

    ours, theirs = pack_dataset(stored, 2048), trl_pack_dataset(stored, 2048)

    assert len(ours) < len(theirs)
    assert sorted(itertools.chain(*ours["input_ids"])) == list(range(lengths.sum()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_neither_processes_nor_batch_sizes_change_the_rows(strategy):
    stored = numbered(np.random.default_rng(1).integers(0, 40, 300).tolist())
    expected = pack_dataset(stored, 32, strategy).to_dict()

    assert pack_dataset(stored, 32, strategy, {"num_proc": 2}).to_dict() == expected
    assert pack_dataset(stored, 32, strategy, {"batch_size": 7, "writer_batch_size": 3}).to_dict() == expected


def test_what_is_cut_off_is_counted_and_logged(caplog):
    with caplog.at_level(logging.WARNING, "varlen"):
        pack_dataset(Dataset.from_dict(OVERLONG), 3, "bfd")

    (record,) = caplog.records
    assert "3 of 12 tokens (25.00 %) were cut off the ends of 2 documents longer than 3" in record.message
    assert 'strategy="bfd_split" keeps them' in record.message


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_where_nothing_is_lost_nothing_is_logged(strategy, caplog):
    with caplog.at_level(logging.WARNING, "varlen"):
        packed = pack_dataset(Dataset.from_dict(OVERLONG), 3, strategy)

    assert not caplog.records
    assert sorted(itertools.chain(*packed["input_ids"])) == list(range(1, 13))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("documents", [[], [[], []]])
def test_a_set_without_tokens_gives_no_rows(strategy, documents):
    features = Features({"input_ids": [Value("int64")], "labels": [Value("int64")]})
    stored = Dataset.from_dict({"input_ids": documents, "labels": documents}, features=features)

    packed = pack_dataset(stored, 4, strategy)  # TRL: ArrowNotImplementedError where all documents are empty

    assert len(packed) == 0
    marked = [] if strategy == "wrapped" else ["seq_lengths"]
    assert packed.column_names == ["input_ids", "labels", *marked]
    if documents:  # datasets streams no set without rows
        assert list(pack_dataset(stored.to_iterable_dataset(), 4, strategy)) == []


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        (
            {"a": [[1], [1, 2], [1]], "b": [[1], [1], []]},
            r"row 1 has 2 values in 'a' but 1 in 'b' \(2 of 3 rows",
        ),
        ({"a": [[1]], "text": ["x"]}, r"column 'text' holds string.*\(1 of 2.*select_columns\(\['a'\]\)"),
        ({"text": ["x"]}, "tokenize the data set first"),
        ({"a": [[1], None]}, r"row 1 has no list in 'a' \(1 of 2 rows"),
        ({"a": [[1]], "seq_lengths": [[1]]}, "packed already"),
        ({}, "no columns"),
    ],
)
def test_columns_that_can_t_be_packed_are_named(documents, words):
    with pytest.raises(DocumentsError, match=words):
        pack_dataset(Dataset.from_dict(documents), 4)


def test_a_stream_names_columns_that_can_t_be_packed_too():
    stream = Dataset.from_dict({"a": [[1], [1, 2]], "b": [[1], [1]]}).to_iterable_dataset()

    with pytest.raises(DocumentsError, match="row 1 has 2 values in 'a' but 1 in 'b'"):
        list(pack_dataset(stream, 4))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda d: pack_dataset(d, 0), "seq_length must be a whole number from 1"),
        (lambda d: pack_dataset(d, 4, "bdf"), "strategy must be one of bfd, bfd_split"),
        (lambda d: pack_dataset(d, 4, map_kwargs={"batched": True}), "map_kwargs has 'batched', which"),
        (
            lambda d: pack_dataset(d.to_iterable_dataset(), 4, map_kwargs={"num_proc": 2}),
            r"map_kwargs has 'num_proc', which packing a IterableDataset.*pass only batch_size",
        ),
        (
            lambda d: pack_dataset(d.to_iterable_dataset(), 4, map_kwargs={"batch_size": 0}),
            "batch_size must be a whole number from 1",
        ),
    ],
)
def test_settings_that_can_t_be_are_refused_in_a_sentence(call, words):
    with pytest.raises(SettingError, match=words):
        call(Dataset.from_dict(OVERLONG))
    with pytest.raises(DocumentsError, match="got list; make one with"):
        pack_dataset([[1, 2]], 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_format_is_kept(strategy):
    stored = Dataset.from_dict(MASKED).with_format("torch", columns=["input_ids"], dtype=None)

    ours, theirs = pack_dataset(stored, 4, strategy), trl_pack_dataset(stored, 4, strategy)

    assert ours.format == theirs.format
    assert [row["input_ids"].tolist() for row in ours] == [row["input_ids"].tolist() for row in theirs]
    assert ours.split == theirs.split


def test_each_set_of_a_dictionary_is_packed_by_itself():
    sets = DatasetDict({"train": Dataset.from_dict(MASKED), "test": Dataset.from_dict(OVERLONG)})

    packed = pack_dataset(sets, 4)

    assert type(packed) is DatasetDict
    assert {name: part.to_dict() for name, part in packed.items()} == {
        name: pack_dataset(part, 4).to_dict() for name, part in sets.items()
    }


def test_a_set_on_disk_is_packed_once_and_read_again(tmp_path):
    numbered([3, 5, 2, 7]).save_to_disk(tmp_path / "set")
    stored = load_from_disk(tmp_path / "set")

    first, again = pack_dataset(stored, 8), pack_dataset(stored, 8)
    other = pack_dataset(stored, 9)

    assert first.cache_files == again.cache_files
    assert str(tmp_path) in first.cache_files[0]["filename"]
    assert other.cache_files != first.cache_files
    assert first.to_dict() == again.to_dict() == pack_dataset(numbered([3, 5, 2, 7]), 8).to_dict()


# Training.


def loss_of(documents: list[list[int]]) -> float:
    """The mean over the tokens of all documents, each alone in the model."""
    import torch

    model = tiny_model().eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in documents:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
            count += len(ids) - 1
    return total / count


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_packed_set_trains_with_the_loss_of_its_documents(tmp_path, is_streamed):
    random = np.random.default_rng(4)
    documents = [random.integers(0, 256, size).tolist() for size in random.integers(2, 60, 24)]
    stored = Dataset.from_dict({"input_ids": documents, "labels": documents})
    packed = pack_dataset(stored.to_iterable_dataset() if is_streamed else stored, 96)
    rows = len(list(packed))

    loss = losses_of_training(tmp_path, packed, rows, steps=1)[0]

    assert rows > 4
    assert loss == pytest.approx(loss_of(documents), abs=1e-5)


def numbered(lengths: list[int], kind: pa.DataType | None = None) -> Dataset:
    """Documents whose tokens are all different, and a second column of their negatives."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.arange(offsets[-1])
    ids = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(tokens))
    others = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(-tokens))
    if kind is not None:
        ids, others = ids.cast(kind), others.cast(kind)
    return Dataset(pa.table({"input_ids": ids, "labels": others}))


def streamed_lengths() -> list[int]:
    return np.random.default_rng(2).integers(0, 60, 500).tolist()


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_a_stream_loses_nothing_between_its_windows(strategy):
    lengths = streamed_lengths()
    stream = numbered(lengths).to_iterable_dataset()

    rows = list(pack_dataset(stream, 48, strategy, {"batch_size": 50}))

    assert sorted(itertools.chain(*(row["input_ids"] for row in rows))) == list(range(sum(lengths)))
    assert all(row["labels"] == [-token for token in row["input_ids"]] for row in rows)
    assert max(len(row["input_ids"]) for row in rows) <= 48
    assert strategy == "wrapped" or all(sum(row["seq_lengths"]) == len(row["input_ids"]) for row in rows)


def test_rows_of_a_stream_keep_documents_whole():
    lengths = streamed_lengths()
    begins = np.cumsum([0, *lengths])
    stream = numbered(lengths).to_iterable_dataset()

    for row in pack_dataset(stream, 64, map_kwargs={"batch_size": 50}):
        ends = np.cumsum([0, *row["seq_lengths"]])
        for begin, end in zip(ends[:-1], ends[1:]):
            document = int(np.searchsorted(begins, row["input_ids"][begin], side="right")) - 1
            assert row["input_ids"][begin:end] == list(range(begins[document], begins[document + 1]))


def test_windows_that_carry_over_need_fewer_rows_than_batches_by_themselves():
    stream = numbered(np.random.default_rng(3).integers(200, 900, 1000).tolist()).to_iterable_dataset()

    ours = list(pack_dataset(stream, 4096, map_kwargs={"batch_size": 50}))
    theirs = list(trl_pack_dataset(stream, 4096, map_kwargs={"batch_size": 50}))

    assert len(ours) < len(theirs)


def test_a_stream_says_at_its_end_what_was_cut_off(caplog):
    stream = Dataset.from_dict(OVERLONG).to_iterable_dataset()

    with caplog.at_level(logging.WARNING, "varlen"):
        list(pack_dataset(stream, 3, "bfd", {"batch_size": 1}))

    assert "3 of 12 tokens (25.00 %) were cut off the ends of 2 documents" in caplog.text


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", mostly(["numpy"], [None, "numpy"]))
def test_a_stream_goes_on_from_any_row(strategy, form):
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
def test_two_ranks_share_the_rows_of_a_stream(shards):
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


def test_workers_share_the_rows_of_a_stream():
    lengths = streamed_lengths()
    stream = numbered(lengths).to_iterable_dataset(num_shards=4)
    packed = pack_dataset(stream, 64, "bfd_split", {"batch_size": 50})

    rows = list(torch.utils.data.DataLoader(packed, batch_size=None, num_workers=2))

    assert sorted(int(token) for row in rows for token in row["input_ids"]) == list(range(sum(lengths)))


def test_a_shuffled_stream_comes_in_another_order_each_epoch():
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
def test_a_stream_of_python_rows_may_begin_with_an_empty_one(features):
    def rows() -> Any:
        for size in range(6):
            yield {"input_ids": list(range(size))}

    packed = pack_dataset(IterableDataset.from_generator(rows, features=features), 5)

    expected = {"input_ids": [0, 1, 2, 3, 0], "seq_lengths": [4, 1]}
    assert list(packed) == [{"input_ids": [0, 1, 2, 3, 4], "seq_lengths": [5]}, expected, *list(packed)[2:]]
    assert [row["seq_lengths"] for row in packed] == [[5], [4, 1], [3, 2]]


def test_a_stream_whose_rows_change_their_type_is_refused():
    def rows() -> Any:
        yield {"input_ids": [1]}
        yield {"input_ids": ["a"]}

    with pytest.raises(DocumentsError, match=r"differ in type.*make the stream with features"):
        list(pack_dataset(IterableDataset.from_generator(rows), 4, map_kwargs={"batch_size": 1}))


def test_documents_are_let_go_once_they_are_handed_out():
    kept = _Pending(with_lengths=True)
    lengths = kept.take_in(numbered([5, 2, 6, 3, 0]).data.table)
    kept.note(lengths)
    packer = vl.WindowPacker(capacity=8, window=4, method="best_fit_decreasing", max_age=0)

    first = packer.add([5, 2, 6, 3])
    kept.packed_rows(first)

    assert first.num_pieces == 4
    assert sum(batch.num_rows for batch in kept._batches) == 0
