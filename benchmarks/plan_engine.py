"""How many tasks a second the simulator runs: the event engine alone, and all of `vl.simulate`, on one core."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.checks import WrongResultError
from benchmarks.plan_methods import planned
from benchmarks.plan_times import engine_cell
from varlen.plan.search import Search
from varlen.simulate import kernels
from varlen.simulate.api import simulate
from varlen.simulate.durations import durations
from varlen.simulate.graph import build_graph


def engine_speed(rounds: int) -> dict[str, Any]:
    """Simulate the plan of a large step and time it; return plain data.

    Args:
        rounds: how often it is simulated after the first time, which compiles.

    Raises:
        WrongResultError: the engine alone ends at another time than the whole.
    """
    cell = engine_cell()
    lengths, _ = cell.drawn()
    plan = planned("micropack", lengths, cell, cell.cost(), Search())
    cost = cell.cost().as_planned(plan)
    graph = build_graph(plan, durations(plan, cost), np.ones(plan.mesh.dp * plan.mesh.pp), True, True)
    count = len(graph.kinds)
    starts, stops, deciders = np.empty(count), np.empty(count), np.empty(count, np.int32)
    engine_s, whole_s = [], []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        kernels.run_tasks(
            graph.stream_offsets,
            graph.afters,
            graph.lags_s,
            graph.lengths_s,
            graph.groups,
            graph.num_groups,
            starts,
            stops,
            deciders,
        )
        engine_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        timeline = simulate(plan, cost)
        whole_s.append(time.perf_counter() - begun)
        if not np.array_equal(timeline.stops_s, stops):
            raise WrongResultError(f"{cell.key}: the engine alone ends tasks at other times than vl.simulate")
    return {"cell": cell.to_json(), "tasks": count, "engine_s": engine_s[1:], "seconds": whole_s[1:]}
