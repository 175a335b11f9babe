"""Blocks of ranks: what they share stands at the same place on all; MicroPacks take as long as the slowest rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.test_compose import COSTS, composed, rank_of

from varlen.cost.memory import OWN, RETURNED
from varlen.plan.assign import Groups, documents_of_ranks, grouped, merged_sizes
from varlen.plan.compose import Grading, seconds_of
from varlen.plan.local_search import blocks_of, padded, pipeline_of_block, work_of_block
from varlen.plan.micropack import recut


def test_shared_documents_are_cut_alike_on_all_ranks_and_stand_at_the_same_place() -> None:
    lengths = np.array([90_000, 70_000, 3000, 2000, 1500, 9000, 800, 100], np.int32)
    groups = grouped(lengths, np.array([4, 2, 1, 1, 1, 1, 1, 1], np.int32), 4, COSTS.rates)
    made = padded(
        [
            composed(
                documents,
                12,
                Grading(heads=2, smallest=0.3),
                in_step=True,
                budget=0.002,
            )
            for documents in documents_of_ranks(groups, lengths, 4)
        ]
    )

    assert len({composition.num_micropacks for composition in made}) == 1
    for document, ranks in ((0, range(4)), (1, range(groups.first_ranks[1], groups.first_ranks[1] + 2))):
        places = []
        for rank in ranks:
            table, packs = (
                made[rank].slices,
                np.repeat(np.arange(made[rank].num_micropacks), np.diff(made[rank].slice_offsets)),
            )
            mine = table[3] == document
            places.append((packs[mine].tolist(), table[:2, mine].tolist()))
        assert len(places[0][0]) > 1
        assert all(place == places[0] for place in places)


def test_what_goes_into_layers_goes_in_the_pieces_of_forward_slices() -> None:
    ahead = composed(rank_of([50_000, 800, 900]), 8)
    back = recut(ahead, 1.5, least_rows=1024, rates=COSTS.rates)
    pieces = ahead.slices[[0, 1, 3]].T.tolist()
    wanted = [
        sum(
            last - first
            for start, stop, _, document, _ in back.slices[:, slice(*ends)].T.tolist()
            for first, last, of in pieces
            if of == document and start <= first < stop
        )
        for ends in pairwise(back.slice_offsets.tolist())
    ]

    counts = work_of_block([ahead], [back], COSTS).counts_backward[0]

    assert sorted(counts[RETURNED].tolist()) == sorted(wanted)
    assert sorted(counts[OWN].tolist()) != sorted(wanted)


def test_a_block_takes_as_long_as_its_slowest_rank_in_each_micropack() -> None:
    ranks = padded(
        [composed(rank_of([50_000, 800, 900]), 8), composed(rank_of([20_000, 9000, 4000], first_id=3), 8)]
    )
    alone = [pipeline_of_block(work_of_block([rank], [rank], COSTS), COSTS) for rank in ranks]
    block = pipeline_of_block(work_of_block(ranks, ranks, COSTS), COSTS)

    np.testing.assert_array_equal(block.forward, np.maximum(alone[0].forward, alone[1].forward))
    np.testing.assert_array_equal(block.after, np.maximum(alone[0].after, alone[1].after))
    np.testing.assert_array_equal(block.backward, np.maximum(alone[0].backward, alone[1].backward))
    np.testing.assert_array_equal(
        block.send_backward, np.maximum(alone[0].send_backward, alone[1].send_backward)
    )
    for rank, one in enumerate(alone):
        np.testing.assert_array_equal(block.forward_peaks[rank], one.forward_peaks[0])
        np.testing.assert_array_equal(block.backward_left[rank], one.backward_left[0])


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=30), st.integers(0, 4), st.floats(0.1, 1.5))
@settings(deadline=None, max_examples=60)
def test_groups_are_aligned_powers_of_two_and_blocks_hold_them_whole(
    lengths: list[int], levels: int, threshold: float
) -> None:
    held, dp = np.array(lengths, np.int32), 2**levels
    sizes = merged_sizes(held, dp, COSTS.rates, threshold=threshold, most_ranks=8, most_rows=30_000)
    groups = grouped(held, sizes, dp, COSTS.rates)
    bounds = blocks_of(groups, dp, in_step=False)

    assert ((groups.first_ranks >= 0) == (held > 0)).all()
    assert set(sizes.tolist()) <= {1, 2, 4, 8, 16}
    used = groups.first_ranks >= 0
    assert (groups.first_ranks[used] % sizes[used] == 0).all()
    assert (groups.first_ranks[used] + sizes[used] <= dp).all()
    assert bounds[0] == 0
    assert bounds[-1] == dp
    first = np.searchsorted(bounds, groups.first_ranks[used], side="right")
    last = np.searchsorted(bounds, groups.first_ranks[used] + sizes[used] - 1, side="right")
    assert (first == last).all()
    assert groups.loads(dp).sum() == pytest.approx((groups.work * sizes)[used].sum())


def test_a_document_that_costs_more_than_a_rank_is_shared_by_as_few_ranks_as_are_enough() -> None:
    lengths = np.append(np.full(60, 2000), [120_000]).astype(np.int32)
    alone = seconds_of(lengths, np.ones(61, np.int32), 8192.0, COSTS.rates)

    sizes = merged_sizes(lengths, 8, COSTS.rates, threshold=0.9, most_ranks=8, most_rows=1e9)

    share = alone.sum() / 8
    assert sizes[:60].tolist() == [1] * 60
    work = seconds_of(lengths, sizes, 8192.0, COSTS.rates)
    assert work[60] <= 0.9 * share or sizes[60] == 8
    assert seconds_of(lengths, sizes // 2 + (sizes == 1), 8192.0, COSTS.rates)[60] > 0.9 * share


def test_loads_count_every_rank_that_shares_a_document() -> None:
    groups = Groups(
        first_ranks=np.array([0, 2, -1, 3], np.int32),
        num_ranks=np.array([2, 2, 1, 1], np.int32),
        work=np.array([5.0, 1.0, 9.0, 0.5]),
    )

    assert groups.loads(4).tolist() == [5.0, 5.0, 1.0, 1.5]
