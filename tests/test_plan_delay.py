"""Long documents that are held back come within the steps allowed, each once, and side by side."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.errors import LengthsError, SettingError
from varlen.plan.delay import delay_outliers, delay_step, nobody

STEPS = st.lists(st.lists(st.integers(0, 100), max_size=12), min_size=1, max_size=15)


def flat(steps: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([length for step in steps for length in step], np.int32)
    return lengths, np.cumsum([0, *(len(step) for step in steps)])


@given(
    STEPS,
    st.lists(st.integers(1, 100), min_size=1, max_size=3, unique=True),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_nothing_is_lost_and_no_document_waits_too_long(
    steps: list[list[int]], thresholds: list[int], count: int, most_steps: int
) -> None:
    lengths, offsets = flat(steps)
    rising = sorted(thresholds)

    ids, new_offsets = delay_outliers(lengths, offsets, thresholds=rising, count=count, most_steps=most_steps)

    assert sorted(ids.tolist()) == list(range(lengths.size))
    assert new_offsets.size == offsets.size
    drawn = np.searchsorted(offsets, ids, side="right") - 1
    trained = np.searchsorted(new_offsets, np.arange(ids.size), side="right") - 1
    assert ((trained - drawn) >= 0).all()
    assert ((trained - drawn) <= most_steps).all()
    assert (trained == drawn)[lengths[ids] < rising[0]].all()


@given(STEPS, st.integers(1, 5))
def test_a_line_never_holds_as_many_as_there_are_micro_batches(steps: list[list[int]], count: int) -> None:
    waiting, begin = nobody(), 0
    for step in steps:
        _, _, waiting = delay_step(
            np.arange(begin, begin + len(step)),
            np.array(step, np.int32),
            waiting,
            thresholds=[40, 80],
            count=count,
            most_steps=1000,
        )
        begin += len(step)
        assert ((waiting.lengths >= 40) & (waiting.lengths < 80)).sum() < count
        assert (waiting.lengths >= 80).sum() < count


def test_long_documents_are_trained_together() -> None:
    lengths = np.array([90, 1, 1, 95, 1, 1, 50, 1], np.int32)

    ids, offsets = delay_outliers(lengths, np.array([0, 3, 6, 8]), thresholds=[80], count=2)

    assert ids.tolist() == [1, 2, 0, 3, 4, 5, 6, 7]
    assert offsets.tolist() == [0, 2, 6, 8]


def test_whoever_has_waited_long_enough_goes_alone() -> None:
    ids, _, waiting = delay_step(
        np.array([7]), np.array([90], np.int32), nobody(), thresholds=[80], count=2, most_steps=2
    )
    nothing = np.zeros(0, np.int64)
    again, _, waiting = delay_step(
        nothing, nothing.astype(np.int32), waiting, thresholds=[80], count=2, most_steps=2
    )
    last, lengths, none = delay_step(
        nothing,
        nothing.astype(np.int32),
        pickle.loads(pickle.dumps(waiting)),
        thresholds=[80],
        count=2,
        most_steps=2,
    )

    assert (ids.size, again.size) == (0, 0)
    assert waiting.steps.tolist() == [1]
    assert not waiting.steps.flags.writeable
    assert (last.tolist(), lengths.tolist(), none.lengths.size) == ([7], [90], 0)


@pytest.mark.parametrize(
    ("thresholds", "count", "error", "words"),
    [
        (
            [80, 40],
            2,
            LengthsError,
            r"threshold 40 stands after 80 \(1 of 2 don't rise\); give them in rising",
        ),
        ([40, 40], 2, LengthsError, "threshold 40 stands after 40"),
        ([], 2, SettingError, "thresholds is empty; give at least one length"),
        ([40], 0, SettingError, "count"),
    ],
)
def test_lines_that_make_no_sense_are_refused(
    thresholds: list[int], count: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        delay_outliers([1, 2], np.array([0, 2]), thresholds=thresholds, count=count)
