"""imoneoi's multipack sampler by its own name: one pack for each rank and step, and no document left out."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Sampler

from varlen.adapters.multipack import MultipackDistributedBatchSampler
from varlen.errors import OverlongDocumentError, SettingError

CAPACITY = 24
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=50)


def ranks_of(lengths: Any, ranks: int, **settings: Any) -> list[MultipackDistributedBatchSampler]:
    return [
        MultipackDistributedBatchSampler(CAPACITY, lengths, num_replicas=ranks, rank=rank, **settings)
        for rank in range(ranks)
    ]


@given(LENGTHS, st.integers(1, 5), st.integers(0, 2**64 - 1), st.integers(0, 5), st.integers(1, 5))
def test_over_all_ranks_every_document_comes_once_in_packs_that_hold_it(
    lengths, ranks, seed, epoch, balance_over
):
    samplers = ranks_of(np.array(lengths), ranks, seed=seed, fill="empty", balance_over=balance_over)
    for sampler in samplers:
        sampler.set_epoch(epoch)

    batches = [list(sampler) for sampler in samplers]

    assert {len(sampler) for sampler in samplers} == {sampler.num_batches() for sampler in samplers}
    assert [len(sampler) for sampler in samplers] == [len(of_rank) for of_rank in batches]
    assert len({len(of_rank) for of_rank in batches}) == 1
    packs = [batch for of_rank in batches for batch in of_rank]
    assert sorted(index for pack in packs for index in pack.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= CAPACITY for pack in packs)
    if len(lengths) >= len(packs):
        assert all(len(pack) for pack in packs)


@given(LENGTHS, st.integers(1, 5))
def test_no_batch_is_empty_by_default_and_what_comes_twice_is_counted(lengths, ranks):
    samplers = ranks_of(lengths, ranks)

    packs = [pack for sampler in samplers for pack in sampler]

    assert all(len(pack) for pack in packs)
    assert sum(map(len, packs)) == len(lengths) + samplers[0].steps.repeated_documents
    assert samplers[0].steps.repeated_documents < ranks


def test_epochs_and_seeds_have_orders_of_their_own_and_the_same_again():
    lengths = np.random.default_rng(7).integers(1, CAPACITY, 400)

    def epoch_of(seed: int, epoch: int) -> list[list[int]]:
        sampler = ranks_of(lengths, 2, seed=seed)[1]
        sampler.set_epoch(epoch)
        return [pack.tolist() for pack in sampler]

    assert epoch_of(0, 0) == epoch_of(0, 0)
    assert epoch_of(0, 1) != epoch_of(0, 0)
    assert epoch_of(0, 1) != epoch_of(1, 0)  # theirs adds the two


def test_efficiency_is_tokens_over_slots_of_all_ranks():
    lengths = np.random.default_rng(7).integers(1, CAPACITY, 400)
    samplers = ranks_of(lengths, 4)

    assert samplers[2].efficiency() == lengths.sum() / (4 * len(samplers[0]) * CAPACITY)
    assert isinstance(samplers[0], Sampler)


def test_a_document_longer_than_a_pack_is_an_error_or_dropped_and_counted():
    with pytest.raises(OverlongDocumentError):
        len(MultipackDistributedBatchSampler(CAPACITY, [5, 30, 6]))

    sampler = MultipackDistributedBatchSampler(CAPACITY, [5, 30, 6], overlong="drop")
    assert sorted(sampler.generate_batches()[0].tolist()) == [0, 2]
    assert sampler.steps.dropped_documents == 1


def test_one_of_rank_and_number_of_replicas_is_not_enough():
    with pytest.raises(SettingError, match="pass both"):
        MultipackDistributedBatchSampler(CAPACITY, [1], num_replicas=2)
    with pytest.raises(SettingError, match="rank"):
        MultipackDistributedBatchSampler(CAPACITY, [1], num_replicas=2, rank=2)
