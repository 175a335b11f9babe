"""Long runs of planning: micropacks against every other method on many steps, and a planner that is killed often."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.plan.test_planner import until
from tests.plan.test_step import METHODS, cost_of, long_tailed
from tests.support.plan_sizes import large_plan

import varlen as vl
from varlen.plan.check import check_plan

pytestmark = pytest.mark.soak
STEPS = 5_000
KILLS = 50
SEEDS = 4


@pytest.mark.parametrize("dp_pp", [(4, 4), (8, 2), (2, 8), (8, 8)])
@pytest.mark.parametrize("mode", ["calibrated", "flops"])
def test_micropacks_are_slower_than_no_other_method_on_any_of_many_steps(
    dp_pp: tuple[int, int], mode: Any
) -> None:
    mesh, cost = vl.Mesh(dp=dp_pp[0], pp=dp_pp[1], tp=4), cost_of(mode=mode)
    for seed in range(SEEDS):
        lengths = long_tailed(64 * mesh.dp, 100_000, seed)
        took = {}
        for method in METHODS:
            plan = vl.plan_step(lengths, cost=cost, mesh=mesh, method=method)
            check_plan(plan, cost)
            took[method] = vl.simulate(plan, cost).makespan_s
        assert took["micropack"] <= min(took.values()) * 1.02, (seed, took)


def test_a_million_tasks_a_second_are_simulated() -> None:
    plan, took = large_plan(), []
    plain = cost_of()
    cost = plain.replace(model=dataclasses.replace(plain.model, max_positions=None))
    for _ in range(6):
        begun = time.perf_counter()
        tasks = len(vl.simulate(plan, cost).kinds)
        took.append(time.perf_counter() - begun)

    assert tasks > 200_000
    assert tasks / min(took) >= 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_planner_killed_at_random_moments_answers_every_step_and_leaves_nothing() -> None:
    dice, threads = random.Random(0), threading.active_count()
    kills, ahead, struck = set(dice.sample(range(STEPS - 1), KILLS)), 4, False
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    function = "tests.support.planner_jobs:one_by_one"
    with vl.Planner(lambda step: [1 + step % 99, 5], function=function, ahead=ahead) as planner:
        for step in range(STEPS):
            assert planner.take(step).lengths.tolist() == [1 + step % 99, 5]
            if (
                struck
            ):  # what was asked after a kill is answered by another process, which may be killed in turn
                until(lambda known=step + ahead: known in planner._line.answers)
            time.sleep(dice.random() * 0.002)
            struck = step in kills
            if struck:
                os.kill(planner._line.process.pid, signal.SIGKILL)
        assert planner.restarts == KILLS
        assert len(planner._known) <= ahead
    until(lambda: threading.active_count() == threads)
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before + 1
