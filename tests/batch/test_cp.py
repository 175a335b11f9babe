"""Context-parallel partitions: every position on one rank, and equal causal work on all."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.batches import tokens_like

import varlen as vl
from varlen.batch.context_parallel import contiguous_indices, zigzag_indices
from varlen.errors import DocumentsError, SettingError


def cut(bounds: list[int], rank: int, world: int) -> list[int]:
    positions = []
    for begin, end in zip(bounds[:-1], bounds[1:]):
        width = (end - begin) // (2 * world)
        for chunk in (rank, 2 * world - 1 - rank):
            positions += range(begin + chunk * width, begin + (chunk + 1) * width)
    return positions


BOUNDS = st.tuples(st.integers(1, 5), st.lists(st.integers(1, 6), max_size=6), st.sampled_from([0, 7])).map(
    lambda drawn: (drawn[0], np.cumsum([drawn[2], *(2 * drawn[0] * times for times in drawn[1])]).tolist())
)


@given(BOUNDS)
def test_zigzag_puts_every_position_on_one_rank(case):
    world, bounds = case
    ranks = [zigzag_indices(np.array(bounds, np.int32), rank, world) for rank in range(world)]

    assert sorted(np.concatenate(ranks).tolist()) == list(range(bounds[0], bounds[-1]))
    for rank, positions in enumerate(ranks):
        assert positions.dtype == np.int64
        assert sorted(positions.tolist()) == sorted(cut(bounds, rank, world))
        if world > 1:
            assert positions.tolist() == cut(bounds, rank, world)


@given(BOUNDS)
def test_zigzag_gives_every_rank_the_same_causal_work_in_every_segment(case):
    world, bounds = case
    for begin, end in zip(bounds[:-1], bounds[1:]):
        keys_seen = [
            sum(place - begin + 1 for place in zigzag_indices(bounds, rank, world) if begin <= place < end)
            for rank in range(world)
        ]
        assert len(set(keys_seen)) == 1


@given(BOUNDS)
def test_contiguous_parts_follow_one_another(case):
    world, bounds = case
    parts = [contiguous_indices(bounds, rank, world).tolist() for rank in range(world)]

    assert [place for part in parts for place in part] == list(range(bounds[0], bounds[-1]))
    assert len({len(part) for part in parts}) == 1


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_slots_of_a_packing_for_context_parallelism_divide_evenly(layout, world):
    lengths = [5, 11, 3, 16, 1, 7]
    packing = vl.pack(lengths, 32, document_multiple_of=2 * world)
    batch = vl.collate(tokens_like(lengths), packing, layout=layout)
    slots = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    ids = batch.input_ids.reshape(-1)
    ranks = [ids[zigzag_indices(slots, rank, world)] for rank in range(world)]

    assert {len(rank) for rank in ranks} == {ids.size // world}
    assert sorted(np.concatenate(ranks).tolist()) == sorted(ids.tolist())


def test_zigzag_worked_out_by_hand():
    assert zigzag_indices([0, 8, 12], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_indices([0, 8, 12], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]
    assert zigzag_indices(torch.tensor([0, 4]), 1, 2).tolist() == [1, 2]
    assert zigzag_indices([0], 0, 2).tolist() == zigzag_indices([0], 0, 1).tolist() == []
    assert zigzag_indices([0, 3], 0, 1).tolist() == [0, 1, 2]


def test_segments_that_do_not_divide_are_refused_with_the_multiple_that_does():
    words = r"segment 1 takes up 6 positions, .* \(2 of 3 segments\); pack with document_multiple_of=4"
    with pytest.raises(SettingError, match=words):
        zigzag_indices([0, 4, 10, 13], 0, 2)
    with pytest.raises(
        SettingError, match=r"13 positions can't be shared evenly by 2 .* pad to a multiple of 2"
    ):
        contiguous_indices([0, 4, 10, 13], 0, 2)


@pytest.mark.parametrize("function", [zigzag_indices, contiguous_indices])
@pytest.mark.parametrize(
    ("rank", "world"), [(2, 2), (-1, 2), (0, 0), (0, -1), (0.5, 2), (0, 2.0), ("0", 2), (0, None)]
)
def test_a_rank_out_of_range_is_refused(function, rank, world):
    words = f"cp_rank must be a whole number from 0 to cp_world_size - 1; got {rank!r} of {world!r}"
    with pytest.raises(SettingError, match=words):
        function([0, 8], rank, world)


@pytest.mark.parametrize("function", [zigzag_indices, contiguous_indices])
@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([], r"whole numbers in one dimension, one more than segments; got float64 \(0,\)"),
        ([[0, 8], [0, 8]], r"in one dimension, .*; got int64 \(2, 2\)"),
        ([0, 8.5], "got float64"),
        (None, "got object"),
        ([[0], [0, 8]], "can't be read as whole numbers"),
        ([0, 8, 4, 8, 0], r"segment 1 begins at 8 and ends at 4 \(2 of 4 segments\)"),
    ],
)
def test_boundaries_that_are_none_are_refused(function, bounds, words):
    with pytest.raises(DocumentsError, match=words):
        function(bounds, 0, 2)
