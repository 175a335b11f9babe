"""Long documents that are held back come within the steps allowed, each once, and side by side."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.errors import LengthsError, SettingError, StateError

STEPS = st.lists(st.lists(st.integers(0, 100), max_size=12), min_size=1, max_size=15)
LINES = st.lists(st.integers(1, 100), min_size=1, max_size=3, unique=True).map(sorted)


def flat(steps: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([length for step in steps for length in step], np.int32)
    return lengths, np.cumsum([0, *(len(step) for step in steps)])


def one_by_one(
    steps: list[list[int]], waiting: vl.Waiting, first: int = 0, **settings: Any
) -> tuple[list[list[int]], list[vl.Waiting]]:
    """What each step trains on, and who waits behind it."""
    got, behind = [], []
    for step in steps:
        ids, _, waiting = vl.delay_step(np.arange(first, first + len(step)), step, waiting, **settings)
        got.append(ids.tolist())
        behind.append(waiting)
        first += len(step)
    return got, behind


@given(STEPS, LINES, st.integers(1, 5), st.integers(1, 6))
def test_nothing_is_lost_and_no_document_waits_too_long(steps, thresholds, count, most_steps):
    lengths, offsets = flat(steps)

    ids, new_offsets = vl.delay_outliers(
        lengths, offsets, thresholds=thresholds, count=count, most_steps=most_steps
    )

    assert sorted(ids.tolist()) == list(range(lengths.size))
    assert new_offsets.size == offsets.size
    drawn = np.searchsorted(offsets, ids, side="right") - 1
    trained = np.searchsorted(new_offsets, np.arange(ids.size), side="right") - 1
    assert ((trained - drawn) >= 0).all()
    assert ((trained - drawn) <= most_steps).all()
    assert (trained == drawn)[lengths[ids] < thresholds[0]].all()
    assert (np.diff(new_offsets)[np.diff(offsets) > 0] > 0).all()


@given(STEPS, LINES, st.integers(1, 5))
def test_documents_of_a_line_come_in_the_order_in_which_they_were_drawn(steps, thresholds, count):
    lengths, offsets = flat([[*step, 0] for step in steps])  # a step that would be empty takes the newest

    ids, _ = vl.delay_outliers(lengths, offsets, thresholds=thresholds, count=count)

    lines = np.searchsorted(thresholds, lengths[ids], side="right")
    for line in range(len(thresholds) + 1):
        assert (np.diff(ids[lines == line]) > 0).all()


@given(STEPS, st.integers(1, 5))
def test_a_line_never_holds_as_many_as_there_are_micro_batches(steps, count):
    _, behind = one_by_one(steps, vl.Waiting(), thresholds=[40, 80], count=count, most_steps=1000)

    for waiting in behind:
        assert ((waiting.lengths >= 40) & (waiting.lengths < 80)).sum() < count
        assert (waiting.lengths >= 80).sum() < count


@given(STEPS, LINES, st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_run_goes_on_from_a_saved_state_as_if_it_had_not_stopped(
    steps, thresholds, count, most_steps, data
):
    settings: dict[str, Any] = {"thresholds": thresholds, "count": count, "most_steps": most_steps}
    stop = data.draw(st.integers(1, len(steps)))
    whole, behind = one_by_one(steps, vl.Waiting(), **settings)

    before, there = one_by_one(steps[:stop], vl.Waiting(), **settings)
    saved = json.dumps(there[-1].state_dict())
    first = sum(map(len, steps[:stop]))
    after, end = one_by_one(steps[stop:], vl.Waiting.from_state(json.loads(saved)), first, **settings)

    assert before + after == whole
    assert (end or there)[-1].state_dict() == behind[-1].state_dict()
    lengths, offsets = flat(steps)
    ids, _ = vl.delay_outliers(lengths, offsets, **settings)
    assert ids.tolist() == [d for step in whole for d in step] + behind[-1].document_ids.tolist()


def test_long_documents_are_trained_together():
    lengths = [90, 1, 1, 95, 1, 1, 50, 1]

    ids, offsets = vl.delay_outliers(lengths, [0, 3, 6, 8], thresholds=[80], count=2)

    assert ids.tolist() == [1, 2, 0, 3, 4, 5, 6, 7]
    assert offsets.tolist() == [0, 2, 6, 8]


def test_whoever_has_waited_long_enough_goes_alone():
    settings: dict[str, Any] = {"thresholds": [80], "count": 2, "most_steps": 2}

    ids, _, waiting = vl.delay_step([7, 8], [90, 1], vl.Waiting(), **settings)
    again, _, waiting = vl.delay_step([], [], waiting, **settings)
    last, lengths, none = vl.delay_step([], [], pickle.loads(pickle.dumps(waiting)), **settings)

    assert (ids.tolist(), again.tolist()) == ([8], [])
    assert waiting.steps.tolist() == [1]
    assert not waiting.steps.flags.writeable
    assert (last.tolist(), lengths.tolist(), none.lengths.size) == ([7], [90], 0)


def test_a_step_of_long_documents_alone_is_not_left_empty():
    settings: dict[str, Any] = {"thresholds": [80], "count": 4}
    _, _, waiting = vl.delay_step([1, 2], [90, 5], vl.Waiting(), **settings)

    ids, lengths, waiting = vl.delay_step([3, 4], [95, 99], waiting, **settings)

    assert (ids.tolist(), lengths.tolist()) == ([3, 4], [95, 99])
    assert waiting.document_ids.tolist() == [1]


def test_a_document_that_waits_may_be_drawn_again_in_the_next_epoch():
    settings: dict[str, Any] = {"thresholds": [80], "count": 2}
    _, _, waiting = vl.delay_step([5, 6], [90, 1], vl.Waiting(), **settings)

    ids, _, waiting = vl.delay_step([5, 6], [90, 1], waiting, **settings)

    assert (ids.tolist(), waiting.document_ids.size) == ([5, 5, 6], 0)


@pytest.mark.soak
def test_whole_documents_gain_more_from_waiting_than_slices_do():
    lengths = np.random.default_rng(7).lognormal(7.5, 1.6, 4 * 48).clip(32, 131_072).astype(np.int32)
    drawn = np.arange(lengths.size), np.arange(5) * 48
    waited = vl.delay_outliers(lengths, drawn[1], thresholds=[32_768], count=8)
    cost = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))

    def seconds(order: np.ndarray, bounds: np.ndarray, method: Any) -> float:
        steps = (lengths[order[a:b]] for a, b in zip(bounds, bounds[1:]))
        plans = (
            vl.plan_step(step, cost=cost, mesh=vl.Mesh(dp=4, pp=2, tp=8), method=method) for step in steps
        )
        return sum(vl.simulate(plan, cost).makespan_s for plan in plans)

    gain = {name: seconds(*drawn, name) / seconds(*waited, name) for name in ("balanced", "micropack")}

    assert gain["balanced"] > max(1.1, gain["micropack"])


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (
            {"thresholds": [80, 40]},
            LengthsError,
            r"threshold 40 stands after 80 \(1 of 2 don't rise\); give them in rising",
        ),
        ({"thresholds": [40, 40]}, LengthsError, "threshold 40 stands after 40"),
        ({"thresholds": []}, SettingError, "thresholds is empty; give at least one length"),
        ({"count": 0}, SettingError, "count"),
        ({"most_steps": 0}, SettingError, "most_steps"),
        (
            {"step_offsets": [0, 1]},
            LengthsError,
            r"must be whole numbers that rise from 0 to 2, .* got \[0 1\]",
        ),
        ({"step_offsets": [0, 2, 1, 2]}, LengthsError, "rise from 0 to 2"),
        ({"step_offsets": [[0, 2]]}, LengthsError, "rise from 0 to 2"),
        ({"step_offsets": [0.0, 2.0]}, LengthsError, "rise from 0 to 2"),
    ],
)
def test_lines_that_make_no_sense_are_refused(changed, error, words):
    given: dict[str, Any] = {"step_offsets": [0, 2], "thresholds": [40], "count": 2} | changed

    with pytest.raises(error, match=words):
        vl.delay_outliers([1, 2], **given)


@pytest.mark.parametrize("ids", [[1], [[1, 2]], [1.0, 2.0], [1, 2**63], [1, 2**70]])
def test_documents_without_a_length_are_refused(ids):
    with pytest.raises(LengthsError, match=r"must be 2 whole numbers below 2\^63, one a length; got"):
        vl.delay_step(ids, [5, 6], vl.Waiting(), thresholds=[40], count=2)


def test_a_state_is_not_taken_for_who_waits():
    state: Any = vl.Waiting().state_dict()

    with pytest.raises(SettingError, match=r"waiting is a dict; .* or vl\.Waiting\.from_state\(state\)"):
        vl.delay_step([1], [5], state, thresholds=[40], count=2)


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"lengths": [5]},
        {"document_ids": [1]},
        {"document_ids": [1, 2.5]},
        {"document_ids": [[1], [2]]},
        {"document_ids": [1, 2**63]},
        {"steps": [0, -1]},
        {"steps": None},
        {"lengths": "ab"},
    ],
)
def test_a_state_that_was_changed_is_refused(changed):
    good = {"version": 1, "document_ids": [1, 2], "lengths": [50, 60], "steps": [0, 1]}
    assert vl.Waiting.from_state(good).state_dict() == good

    with pytest.raises(StateError, match="state"):
        vl.Waiting.from_state(good | changed)
    with pytest.raises(StateError, match="this is no state of"):
        vl.Waiting.from_state({})
