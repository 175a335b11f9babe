"""Documents are shared by the ranks that the methods give them, in an order that waits in no circle."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.baselines.candidates import check, steps

from varlen.plan.baselines.dynamic_cp import by_need, by_speed, divisions, dynamic_cp_candidates, seated
from varlen.step_plan import Mesh

Step = tuple[np.ndarray, np.ndarray, Mesh]


@settings(max_examples=20)
@given(steps(), st.integers(500, 20_000))
def test_shared_documents_stand_on_each_of_their_ranks_in_one_order(step: Step, capacity: int) -> None:
    lengths, work, mesh = step

    labels = []
    for candidate in dynamic_cp_candidates(lengths, work, mesh, capacity):
        check(candidate, lengths, mesh, is_even=True)
        labels.append(candidate.label)

    assert len(labels) == len(set(labels))


def test_a_long_document_is_shared_by_as_few_ranks_as_hold_it() -> None:
    lengths = np.array([8000, 3000, 900, 0], np.int32)
    work = np.repeat(lengths.astype(np.float64)[:, None], 4, axis=1) / 2.0 ** np.arange(4)

    group_of, levels, batches = by_need(lengths, work, 8, 1000, 1)

    assert levels[group_of[:3]].tolist()[0] == 3  # 8 ranks hold 8,000 tokens at 1,000 each
    assert levels[group_of[1]] >= 2
    assert group_of[3] == -1
    assert batches[group_of[0]] == 0
    assert batches[group_of[1]] == batches[group_of[2]] == 1


def test_ranks_that_are_left_over_share_the_slowest() -> None:
    lengths = np.array([1000, 100], np.int32)
    work = np.repeat(lengths.astype(np.float64)[:, None], 3, axis=1) / 2.0 ** np.arange(3)

    group_of, levels, _ = by_need(lengths, work, 4, 4000, 1)

    assert levels[group_of].tolist() == [1, 1]


def test_a_micro_batch_is_about_as_fast_as_all_ranks_together() -> None:
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(7, 1.5, 400), 100_000).astype(np.int32) + 1
    own = 1e-6 * lengths + 1e-10 * lengths.astype(np.float64) ** 2
    work = np.stack([own / 2**level for level in range(5)], axis=1)
    batch_of = np.zeros(lengths.size, np.int32)

    group_of, levels, _ = by_speed(lengths, work, 16, 400_000, batch_of)

    loads = np.bincount(group_of, weights=work[np.arange(400), levels[group_of]])
    assert (2**levels).sum() <= 16
    assert levels.max() >= 1
    assert own.sum() / 16 <= loads.max() < 1.15 * own.sum() / 16


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50), st.integers(1, 10))
def test_divisions_hold_every_document_once_and_leave_no_micro_batch_empty(
    lengths: list[int], count: int
) -> None:
    values = np.array(lengths, np.int32)
    count = min(count, np.count_nonzero(values))
    if not count:
        return
    for name, batch_of in divisions(values, values.astype(np.float64) ** 2, count):
        assert (batch_of >= 0).tolist() == (values > 0).tolist(), name
        assert np.unique(batch_of[batch_of >= 0]).tolist() == list(range(batch_of.max() + 1))
        assert batch_of.max() < count
        if name.startswith("sorted"):
            shortest = [values[batch_of == batch].min() for batch in range(batch_of.max() + 1)]
            longest = [values[batch_of == batch].max() for batch in range(batch_of.max() + 1)]
            assert all(low >= high for low, high in zip(shortest, longest[1:]))
    assert batch_of.max() == count - 1


def test_groups_are_seated_on_the_ranks_with_the_least_work_so_far() -> None:
    loads = np.array([5.0, 1.0, 3.0, 2.0])
    levels = np.array([1, 0, 0, 1], np.int32)
    batches = np.array([0, 0, 0, 1], np.int32)

    assert seated(loads, levels, batches, 4).tolist() == [0, 3, 2, 2]


def test_what_a_rank_cannot_hold_is_never_left_to_fewer_ranks() -> None:
    lengths = np.full(3, 3000, np.int32)  # four ranks each: two side by side on eight, and one alone
    work = np.repeat(lengths.astype(np.float64)[:, None], 4, axis=1) / 2.0 ** np.arange(4)

    group_of, _, batches = by_need(lengths, work, 8, 1000, 1)

    assert sorted(batches[group_of].tolist()) == [0, 0, 1]
