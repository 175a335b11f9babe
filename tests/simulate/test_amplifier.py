"""The same uneven work costs more in a pipeline than under data parallelism alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.errors import SettingError
from varlen.simulate.schedules import amplify


@given(st.integers(1, 4), st.integers(1, 9))
def test_even_work_is_not_amplified(dp: int, count: int) -> None:
    found = amplify(np.full((dp, count), 8.0), np.full((dp, count), 16.0), stages=(1, 2, 4))

    assert found.slowdown.tolist() == [1.0, 1.0, 1.0]
    assert found.bubble_ratio == pytest.approx([(pp - 1) / (count + pp - 1) for pp in (1, 2, 4)])


def test_one_outlier_costs_more_the_longer_the_pipeline() -> None:
    work = np.ones((4, 16))
    work[0, 3] = 8.0

    found = amplify(work, 2 * work)

    assert found.stages.tolist() == [1, 2, 4, 8]
    assert found.slowdown[0] == pytest.approx(23 / 17.75)
    assert (np.diff(found.slowdown) > 0.03).all()
    assert (np.diff(found.bubble_ratio) > 0.03).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 6))
def test_alone_data_parallelism_takes_what_its_busiest_rank_takes(seed: int, dp: int, count: int) -> None:
    random = np.random.default_rng(seed)
    ahead, back = random.integers(0, 9, (2, dp, count))

    found = amplify(ahead, back, stages=(1,))

    assert found.makespan_s.tolist() == [(ahead + back).sum(1).max()]
    assert found.even_s == pytest.approx([(ahead + back).sum() / dp])


@pytest.mark.parametrize(
    ("forward", "backward", "words"),
    [
        (
            [[1.0, 2.0]],
            [[1.0]],
            r"the shape \(1, 2\), backward ones \(1, 1\); both must be \[ranks, micro-batches\]",
        ),
        ([1.0], [1.0], r"the shape \(1,\)"),
        (
            [[1.0], [-2.0]],
            [[1.0], [1.0]],
            r"micro-batch 0 of rank 1 takes -2.0 s forward .* \(1 of 2 aren't\)",
        ),
    ],
)
def test_work_of_the_wrong_shape_is_refused(forward: object, backward: object, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        amplify(forward, backward)  # type: ignore[arg-type]
