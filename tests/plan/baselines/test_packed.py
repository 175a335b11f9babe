"""Packs as users run them are dealt in turn, and tuned ones lose no document at any setting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.baselines.candidates import check, steps

from varlen.plan.baselines.packed import (
    balanced_candidates,
    by_differencing,
    capacities,
    equal_counts,
    micro_batch_counts,
    packed,
    packed_candidates,
    packs_of,
)
from varlen.step_plan import Mesh

Step = tuple[np.ndarray, np.ndarray, Mesh]


@given(steps(), st.integers(500, 6000))
def test_packs_as_users_run_them_hold_every_document(step: Step, capacity: int) -> None:
    lengths, _, mesh = step

    check(packed(lengths, mesh, capacity), lengths, mesh)


def test_packs_are_dealt_in_turn() -> None:
    candidate = packed(np.array([8, 8, 8, 5, 3], np.int32), Mesh(dp=3), 8)

    assert candidate.forward.counts.tolist() == [2, 1, 1]
    assert candidate.first_ranks.tolist() == [0, 1, 2, 0, 0]
    assert candidate.schedule == "one_f_one_b"
    assert candidate.label == "capacity 8, round robin"


def test_where_parameters_are_sharded_empty_micropacks_even_the_counts_out() -> None:
    candidate = packed(np.array([8, 8, 8, 5, 3], np.int32), Mesh(dp=3, sharding="parameters"), 8)

    assert candidate.forward.counts.tolist() == [2, 2, 2]
    assert np.diff(candidate.forward.slice_offsets).tolist() == [1, 2, 1, 0, 1, 0]


@settings(max_examples=30)
@given(steps(), st.integers(500, 20_000))
def test_tuned_packs_hold_every_document(step: Step, capacity: int) -> None:
    lengths, work, mesh = step

    for candidate in packed_candidates(lengths, work[:, 0], mesh, capacity):
        check(candidate, lengths, mesh)


@settings(max_examples=20)
@given(steps())
def test_balanced_micro_batches_hold_every_document(step: Step) -> None:
    lengths, work, mesh = step

    for candidate in balanced_candidates(lengths, work[:, 0], mesh):
        check(candidate, lengths, mesh)
        assert candidate.forward.counts.max() <= max(lengths.size, 1)


def test_what_is_longer_than_a_smaller_capacity_is_a_pack_of_its_own() -> None:
    pack_of, num_packs = packs_of(np.array([9, 2, 20, 0, 6], np.int32), 8)

    assert pack_of.tolist() == [1, 0, 2, -1, 0]
    assert num_packs == 3


def test_capacities_are_halved_down_to_what_kernels_need() -> None:
    assert capacities(65_536) == [65_536, 32_768, 16_384, 8_192, 4_096, 2_048]
    assert capacities(3_000) == [3_000, 1_500]
    assert capacities(100) == [100]


@given(st.lists(st.integers(1, 100), min_size=9, max_size=60), st.integers(2, 8))
def test_equal_numbers_of_packs_are_nearly_equal(work: list[int], dp: int) -> None:
    ranks = equal_counts(np.array(work, np.float64), dp)

    counts = np.bincount(ranks, minlength=dp)
    assert counts.max() == -(-len(work) // dp)


def test_tuning_finds_even_ranks_and_short_packs_where_packs_are_uneven() -> None:
    lengths = np.array([4096, 4096, *[64] * 128], np.int32)
    work = lengths.astype(np.float64) ** 2
    mesh = Mesh(dp=2)

    labels = [candidate.label for candidate in packed_candidates(lengths, work, mesh, 8192)]
    heaviest = [
        np.bincount(candidate.first_ranks, weights=work).max()
        for candidate in packed_candidates(lengths, work, mesh, 8192)
    ]

    assert heaviest[0] > 1.9 * min(heaviest)
    assert "capacity 1,024, even work in equal numbers, long first" in labels
    assert len(labels) == len(set(labels))


def test_counts_of_micro_batches_follow_stages_and_tokens() -> None:
    mesh = Mesh(dp=2, pp=4)

    tokens = np.full(1000, 1000, np.int32)
    assert micro_batch_counts(tokens, mesh) == (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 488)
    assert micro_batch_counts(np.full(10, 2000, np.int32), mesh) == (4, 6, 8, 9)
    assert micro_batch_counts(np.full(3, 100, np.int32), mesh) == (1,)
    assert micro_batch_counts(np.full(3, 10**6, np.int32), mesh) == (3,)


def test_differencing_leaves_no_rank_more_than_the_longest_document() -> None:
    work = np.array([10.0, 1, 1, 1, 1, 1, 1, 1, 1, 0])

    pack_of, ranks = by_differencing(work, 4, 2)

    held = pack_of >= 0
    assert held.tolist() == [True] * 9 + [False]
    assert np.bincount(ranks[pack_of[held]], weights=work[held]).tolist() in ([10, 8], [8, 10])
    assert sorted(np.bincount(ranks).tolist()) == [1, 4]


@given(steps())
def test_filling_by_workload_keeps_within_twice_the_even_share_of_tokens(step: Step) -> None:
    lengths, work, mesh = step
    lengths = lengths[lengths > 0]
    if not lengths.size:
        return
    longest, share = int(lengths.max()), lengths.sum() / (4 * mesh.dp)
    work = lengths.astype(np.float64) ** 2
    for candidate in balanced_candidates(lengths, work, mesh, counts=(4,), orders=("given",)):
        if candidate.label.startswith("WLB"):
            tokens = np.bincount(candidate.forward.micropack_of_slice, weights=candidate.forward.stops)
            assert tokens.max() <= max(2 * share, longest)


def test_short_documents_spill_over_from_a_micro_batch_that_is_full_of_tokens() -> None:
    lengths = np.array([1000] * 3 + [10] * 1000, np.int32)
    work = lengths.astype(np.float64) ** 2  # all the short ones together are a tenth of a long one

    candidate = next(balanced_candidates(lengths, work, Mesh(), counts=(4,), orders=("given",)))

    tokens = np.bincount(candidate.forward.micropack_of_slice, weights=candidate.forward.stops)
    assert candidate.label.startswith("WLB")
    assert 2 * 13_000 / 4 - 10 < tokens.max() <= 2 * 13_000 / 4
