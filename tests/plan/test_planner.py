"""Steps are planned ahead in another process, never wait for it, and are run again by the plans that they had."""

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
from tests.support import planner_jobs as plan_jobs
from tests.support.planning import is_there, until

from varlen.errors import PlanError, SettingError, StalledError, StateError
from varlen.plan.planner import MOST_CHOICES, Planner
from varlen.plan.serialize import plan_fingerprint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
STEPS = [[5, 7], [3], [9, 9, 9], [4, 1], [8]]


def planner_of(lengths: Any = STEPS, **settings: Any) -> Planner:
    return Planner(lengths, function="tests.support.planner_jobs:one_by_one", **settings)


def knows(planner: Planner, step: int) -> bool:
    return step in planner._process.results


def pid_of(planner: Planner) -> int:
    until(lambda: planner._process.child is not None)
    return planner._process.child.pid  # type: ignore[union-attr]


def test_a_step_has_the_plan_that_was_made_ahead_in_another_process():
    with planner_of() as planner:
        for step, lengths in enumerate(STEPS):
            until(lambda step=step: knows(planner, step))
            plan = planner.take(step)

            assert plan.lengths.tolist() == lengths
            assert plan.method == "micropack"
            assert plan.answered_by == f"one by one in process {pid_of(planner)}"


def test_a_step_never_waits_and_says_that_the_quick_answer_was_taken(tmp_path):
    with planner_of(gate=str(tmp_path / "gate"), gated=9) as planner:
        planner.take(0)
        planner.take(1)
        begun = time.monotonic()
        plan = planner.take(2)

        assert time.monotonic() - begun < 20  # whoever waited for its plan would wait for 300 s
        assert plan.method == "sliced"
        assert plan.answered_by == f"quick, its plan was not there: one by one in process {os.getpid()}"
        (tmp_path / "gate").touch()
        until(lambda: knows(planner, 3))
        assert planner.take(3).method == "micropack"


def test_the_first_step_waits_for_its_plan_and_loads_what_quick_answers_need():
    plan_jobs.CALLED.clear()
    with planner_of() as planner:
        assert planner.take(0).method == "micropack"
        assert plan_jobs.CALLED == ["sliced"]
        until(lambda: knows(planner, 1))
        assert planner.take(1).method == "micropack"
        assert plan_jobs.CALLED == ["sliced"]

    with planner_of(first_step=3) as planner:
        until(lambda: knows(planner, 4))
        assert sorted(planner._process.results) == [3, 4]
        assert planner.take(3).method == "micropack"


def test_each_step_s_lengths_are_asked_for_once():
    asked: list[int] = []
    with planner_of(lambda step: asked.append(step) or [step + 1], ahead=3) as planner:
        for step in range(20):
            assert planner.take(step).lengths.tolist() == [step + 1]

    assert asked == list(range(23))


def test_a_first_step_whose_plan_hangs_is_answered_quickly_after_the_deadline(caplog):
    with caplog.at_level(logging.WARNING), planner_of([[13], [2]], faults="hangs", deadline_s=0.2) as planner:
        assert planner.take(0).method == "sliced"

    assert "the plan of step 0 didn't come within 0.2 s" in caplog.text


def test_a_worker_that_says_nothing_any_more_is_replaced(caplog):
    with caplog.at_level(logging.WARNING), planner_of([[2], [13], [3], [4], [5]], faults="hangs") as planner:
        planner.take(0)
        hanging = pid_of(planner)
        until(lambda: planner._process.busy_with == 1)
        planner._deadline_s = 0.2
        assert planner.take(1).method == "sliced"
        time.sleep(0.3)
        planner.take(2)
        until(lambda: planner.restarts == 1)
        until(lambda: knows(planner, 3))
        assert planner.take(3).method == "micropack"
        assert not is_there(hanging)

    assert "said nothing for 0.2 s; it is ended" in caplog.text


def test_steps_that_were_passed_meanwhile_are_not_planned(tmp_path):
    with planner_of(lambda step: [step + 1], gate=str(tmp_path / "gate"), gated=4) as planner:
        for step in range(3):
            until(lambda step=step: knows(planner, step))
            planner.take(step)
        until(lambda: planner._process.busy_with == 3)
        for step in range(3, 40):
            assert planner.take(step).method == "sliced"
        (tmp_path / "gate").touch()
        until(lambda: knows(planner, 40))
        told = [planner._process.busy_with, *planner._process.results]

    assert {40, 41} >= set(told) - {None}


def test_a_replayed_plan_that_does_not_come_is_an_error_after_the_deadline(tmp_path):
    (tmp_path / "gate").touch()
    with planner_of(gate=str(tmp_path / "gate")) as planner:
        planner.take(0)
        state = planner.state_dict()
        (tmp_path / "gate").unlink()
    with planner_of(gate=str(tmp_path / "gate"), deadline_s=0.2) as again:
        again.load_state_dict(state)
        with pytest.raises(StalledError, match=r"didn't come again within 0.2 s; pass a larger deadline_s"):
            again.take(0)


def test_where_no_quick_plan_holds_a_step_it_waits_for_the_other(tmp_path):
    gate = tmp_path / "gate"
    settings = {"gate": str(gate), "gated": 13, "quick": {"faults": "fails", "gate": ""}}
    with planner_of([[2], [13], [3]], **settings) as planner:
        planner.take(0)
        threading.Timer(0.2, gate.touch).start()

        assert str(os.getpid()) not in planner.take(1).answered_by
        assert planner.state_dict()["choices"]["1"][0] == "planned"


def test_settings_that_the_planning_function_refuses_are_said_by_the_first_step():
    with planner_of(unknown=1) as planner, pytest.raises(TypeError, match="unknown"):
        planner.take(0)


def test_no_more_steps_are_planned_than_asked_for_and_none_behind_the_last():
    asked: list[int] = []

    def lengths(step: int) -> list[int] | None:
        asked.append(step)
        return STEPS[step] if step < len(STEPS) else None

    with planner_of(lengths, ahead=3) as planner:
        until(lambda: knows(planner, 2))
        assert max(asked) == 2
        planner.take(0)
        until(lambda: knows(planner, 3))
        assert max(asked) == 3
        planner.take(4)
        assert not planner._process.results
        assert not planner._process.requests
        with pytest.raises(SettingError, match="there is no step 5 to plan; its lengths are missing"):
            planner.take(5)


def test_steps_run_again_have_the_plans_that_they_had(tmp_path):
    gate = tmp_path / "gate"
    with planner_of(gate=str(gate), gated=3) as planner:
        first = [planner.take(0), planner.take(1)]
        gate.touch()
        until(lambda: knows(planner, 2))
        first.append(planner.take(2))
        state = json.loads(json.dumps(planner.state_dict()))

    with planner_of(gate=str(gate), gated=3) as again:
        again.load_state_dict(state)
        assert again.state_dict() == state
        second = [again.take(step) for step in range(3)]  # at once: step 2 waits for its plan, which it had
        later = again.state_dict()

    assert [str(os.getpid()) in plan.answered_by for plan in second] == [False, True, False]
    assert [plan.method for plan in second] == ["micropack", "sliced", "micropack"]
    assert list(map(plan_fingerprint, second)) == list(map(plan_fingerprint, first))
    assert later == state


def test_the_state_keeps_the_last_steps_alone():
    with planner_of(lambda step: [step + 1]) as planner:
        for step in range(MOST_CHOICES + 10):
            planner.take(step)
        choices = planner.state_dict()["choices"]
        assert len(planner._choices) == MOST_CHOICES

    assert list(choices) == [str(step) for step in range(10, MOST_CHOICES + 10)]


def test_a_step_whose_data_changed_is_refused():
    with planner_of() as planner:
        planner.take(0)
        state = planner.state_dict()

    with planner_of([[6, 6], *STEPS[1:]]) as again:
        again.load_state_dict(state)
        with pytest.raises(
            StateError, match=r"step 0 was run with another plan than .* the data or varlen has changed"
        ):
            again.take(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "no state of a planner of version 1"),
        ({"belongs_to": "other"}, "another cost, mesh, method or quick settings"),
        ({"choices": [1]}, "no state of a planner: AttributeError"),
        ({"choices": {"one": ["quick", "x"]}}, "no state of a planner: ValueError"),
        ({"choices": {"1": ["slow", "x"]}}, r"step 1 was planned 'slow' \(1 step with neither"),
    ],
)
def test_another_planner_s_state_is_refused(change, words):
    with planner_of() as planner:
        with pytest.raises(StateError, match=words):
            planner.load_state_dict(planner.state_dict() | change)
        with pytest.raises(StateError, match="no state of a planner of version 1"):
            planner.load_state_dict(None)  # type: ignore[arg-type]


def test_a_killed_worker_is_replaced_and_told_of_once(caplog):
    with caplog.at_level(logging.WARNING), planner_of() as planner:
        for step in range(3):
            until(lambda step=step: knows(planner, step))
            planner.take(step)
            os.kill(pid_of(planner), signal.SIGKILL)
            until(lambda step=step: planner.restarts == step + 1)
        until(lambda: knows(planner, 3))

        assert planner.take(3).method == "micropack"

    assert [record.getMessage() for record in caplog.records if "started again" in record.getMessage()] == [
        "the process that plans steps ahead was killed by signal 9; it is started again, and steps that it isn't "
        "ready for are planned by the quick answer"
    ]


def test_a_worker_that_dies_of_a_step_again_and_again_leaves_the_quick_answer(caplog):
    with caplog.at_level(logging.WARNING), planner_of([[13], [13]], faults="dies") as planner:
        until(lambda: not planner._process.is_alive)

        assert planner.take(0).method == "sliced"

    assert "died 3 times in a row; the quick answer alone plans now" in caplog.text


@pytest.mark.parametrize(
    ("faults", "words"),
    [("fails", "^no plan holds thirteen$"), ("breaks", "planning failed with KeyError: 'thirteen'")],
)
def test_a_step_that_no_plan_holds_is_said_where_it_is_taken(faults, words):
    with planner_of([[13], [2]], faults=faults) as planner:
        until(lambda: knows(planner, 1))

        with pytest.raises(PlanError, match=words):
            planner.take(0)
        assert planner.take(1).method == "micropack"


def test_closed_or_forgotten_it_leaves_no_process_behind():
    closed, forgotten = planner_of(), planner_of()
    pids = [pid_of(closed), pid_of(forgotten)]

    closed.close()
    del forgotten
    gc.collect()

    until(lambda: not any(map(is_there, pids)))
    with pytest.raises(SettingError, match="the planner is closed"):
        closed.take(0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"deadline_s": 0}, "deadline_s must be a number of seconds above 0, got 0"),
        ({"ahead": 0}, "ahead must be a whole number of at least 1, got 0"),
        (
            {"function": "tests.support.planner_jobs:absent"},
            "'tests.support.planner_jobs:absent' can't be found",
        ),
        ({"function": "no_such_module:plan"}, "write it as 'module:function'"),
        ({"gate": object()}, r"a builtins.object can't be sent to the process that plans"),
    ],
)
def test_what_can_t_plan_is_refused_in_a_sentence(settings, words):
    with pytest.raises(SettingError, match=words):
        Planner(STEPS, **({"function": "tests.support.planner_jobs:one_by_one"} | settings))
