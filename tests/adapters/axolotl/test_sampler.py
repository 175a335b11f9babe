"""axolotl's multipack sampler by its own name: exact lengths, equal ranks, every document once."""

import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from varlen.adapters.axolotl import MultipackBatchSampler
from varlen.errors import LengthsError, OverlongDocumentError, SettingError

CAPACITY = 24
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=50)


def sampler(lengths: Any, **settings: Any) -> MultipackBatchSampler:
    """A sampler over all documents in their order, unless told otherwise."""
    usual = {"sampler": range(len(lengths)), "batch_size": 1, "bin_size": 200, "drop_last": False}
    settings = {**usual, **settings}
    return MultipackBatchSampler(batch_max_len=CAPACITY, lengths=lengths, **settings)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.randoms())
def test_over_all_ranks_every_document_comes_once_in_packs_that_hold_it(
    lengths, ranks, batch_size, bin_size, sequential, random
):
    order = random.sample(range(len(lengths)), len(lengths))
    settings = {
        "sampler": order,
        "batch_size": batch_size,
        "bin_size": bin_size,
        "sequential": sequential,
        "num_replicas": ranks,
        "fill": "empty",
    }

    each = [sampler(lengths, **settings, rank=rank) for rank in range(ranks)]
    batches = [list(one) for one in each]

    assert len({len(of_rank) for of_rank in batches}) == 1
    assert [len(one) for one in each] == [len(of_rank) for of_rank in batches]
    packs = [pack for of_rank in batches for batch in of_rank for pack in batch]
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= CAPACITY for pack in packs)
    assert all(0 < len(pack) <= bin_size for pack in packs)
    assert all(len(batch) <= batch_size for of_rank in batches for batch in of_rank)
    assert all(type(index) is int for pack in packs for index in pack)
    together = sampler(lengths, **settings)
    assert len(together) == len(list(together)) == ranks * len(batches[0])
    # As accelerate deals them: batch i to rank i mod ranks.
    assert [list(together)[rank::ranks] for rank in range(ranks)] == batches


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_no_batch_is_empty_by_default_and_what_comes_twice_is_counted(lengths, ranks, batch_size, drop_last):
    one = sampler(lengths, batch_size=batch_size, num_replicas=ranks, drop_last=drop_last)

    batches = list(one)

    assert len(batches) == len(one)
    assert len(batches) % ranks == 0
    assert all(batch and all(batch) for batch in batches)
    taken = [index for batch in batches for pack in batch for index in pack]
    steps = one.steps
    assert len(taken) == len(lengths) - steps.dropped_documents + steps.repeated_documents
    assert len(set(taken)) == len(lengths) - steps.dropped_documents
    if len(lengths) >= len(batches) * batch_size:
        assert steps.repeated_documents == 0


@given(LENGTHS, st.integers(1, 3), st.randoms())
def test_sequential_packs_keep_the_order_of_the_sampler(lengths, batch_size, random):
    order = random.sample(range(len(lengths)), len(lengths))

    batches = list(sampler(lengths, sampler=order, batch_size=batch_size, sequential=True))

    assert [index for batch in batches for pack in batch for index in pack] == order


@given(LENGTHS)
def test_sequential_packs_of_one_rank_are_axolotls_own(lengths):
    theirs: list[list[int]] = []  # `allocate_sequentially` in other words; it takes no heed of bin_size
    space = 0
    for index, length in enumerate(lengths):
        if length > space:
            theirs.append([])
            space = CAPACITY
        theirs[-1].append(index)
        space -= length

    assert list(sampler(lengths, sequential=True, bin_size=0)) == [[pack] for pack in theirs]


def test_an_epoch_is_another_order_where_the_sampler_gives_one_and_the_same_again_at_its_number():
    class Shuffled:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter(np.random.default_rng(self.epoch).permutation(400).tolist())

    lengths = np.random.default_rng(7).integers(1, CAPACITY, 400)
    one, other = (sampler(lengths, sampler=Shuffled(), num_replicas=2) for _ in range(2))

    epochs = []
    for epoch in (0, 1, 0):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert list(one) == list(other)
        assert len(one) == len(list(one))
        epochs.append(list(one))

    assert epochs[0] == epochs[2] != epochs[1]


def test_a_random_sampler_is_asked_once_an_epoch_so_that_len_and_batches_agree():
    lengths = np.random.default_rng(7).integers(1, CAPACITY, 300)
    one = sampler(lengths, sampler=RandomSampler(range(300), generator=torch.Generator().manual_seed(1)))

    first = list(one)
    assert len(one) == len(first)
    assert list(one) == first
    one.set_epoch(1)
    assert list(one) != first
    assert len(one) == len(list(one))


def test_packs_are_random_samples_of_the_documents_not_sorted_by_length():
    lengths = np.tile([3, 12], 200)
    order = np.random.default_rng(0).permutation(400)

    packs = [pack for batch in sampler(lengths, sampler=order) for pack in batch]

    kinds = [tuple(sorted(lengths[pack].tolist())) for pack in packs]
    assert len(set(kinds)) > 2


def test_a_document_longer_than_a_pack_is_an_error_or_dropped_and_counted(caplog):
    with pytest.raises(OverlongDocumentError, match="document 1 has 30 tokens"):
        len(sampler([5, 30, 6]))

    one = sampler([5, 30, 6], overlong="drop")
    with caplog.at_level(logging.WARNING):
        assert list(one) == [[[0, 2]]]
    assert "leaves out 1 documents of 30 tokens" in caplog.text
    assert (one.steps.dropped_documents, one.steps.dropped_tokens) == (1, 30)


def test_fewer_documents_than_ranks_are_said_and_chosen_for(caplog):
    with caplog.at_level(logging.WARNING):
        assert list(sampler([5, 3], num_replicas=4)) == [[[0]], [[1]], [[1]], [[1]]]
    assert "2 given twice, 0 batches empty" in caplog.text

    assert list(sampler([5, 3], num_replicas=4, fill="empty")) == [[], [[0]], [], [[1]]]
    dropped = sampler([5, 3], num_replicas=4, drop_last=True)
    assert (len(dropped), list(dropped), dropped.steps.dropped_documents) == (0, [], 2)


def test_efficiency_is_tokens_over_slots_of_the_packs_that_come():
    lengths = np.random.default_rng(7).integers(1, CAPACITY, 300)
    one = sampler(lengths, num_replicas=3)

    assert one.efficiency() == lengths.sum() / (len(one) * CAPACITY) == one.gather_efficiency()
    assert sampler([]).efficiency() == 0.0
    assert one.gather_len_batches(5) == 5
    assert one.generate_batches() == list(one)


def test_all_arguments_of_axolotl_are_taken_by_place_and_by_name():
    lengths = [5, 3, 4]
    by_place = MultipackBatchSampler(
        SequentialSampler(lengths), 1, CAPACITY, lengths, 200, 0.9, True, 4, False, 100_000, 2, True, "spawn"
    )
    by_name = MultipackBatchSampler(
        sampler=range(3),
        batch_size=1,
        batch_max_len=CAPACITY,
        lengths=lengths,
        bin_size=200,
        later_argument=1,
    )

    assert isinstance(by_place, BatchSampler)
    assert list(by_place) == list(by_name) == [[[0, 1, 2]]]


def test_flat_batches_feed_a_loader_and_a_flattening_collator():
    from varlen.adapters.hf import DataCollatorWithFlattening

    lengths = [5, 3, 20, 7, 9]
    rows = [{"input_ids": list(range(length))} for length in lengths]
    packs = [pack for batch in sampler(lengths) for pack in batch]

    batches = list(DataLoader(rows, batch_sampler=packs, collate_fn=DataCollatorWithFlattening()))

    assert sum(batch["input_ids"].shape[1] for batch in batches) == sum(lengths)
    assert all(batch["input_ids"].shape[1] <= CAPACITY for batch in batches)


def test_the_sampler_can_be_pickled():
    one = sampler([5, 3, 20, 7, 9], num_replicas=2)

    assert list(pickle.loads(pickle.dumps(one))) == list(one)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"num_replicas": 2, "rank": 2}, "rank"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"overlong": "split"}, "overlong"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        list(sampler([1, 2], **settings))


def test_indices_without_a_length_are_refused():
    with pytest.raises(LengthsError, match=r"index 3, and there are 2 lengths \(1 of 3 indices"):
        list(sampler([1, 2], sampler=[0, 1, 3]))


def test_in_a_job_of_several_processes_the_number_of_replicas_must_be_known(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")

    with pytest.raises(SettingError, match="one of 4 processes by WORLD_SIZE"):
        sampler([1, 2])
    assert len(sampler([1, 2], num_replicas=2)) == 2
