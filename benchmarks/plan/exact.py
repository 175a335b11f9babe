"""What exact solvers bring over `assign`: HiGHS and CP-SAT on the same steps, from the same assignment.

    python -m benchmarks.plan.exact        writes benchmarks/results/plan/exact.json

Both run on one thread and stop by counted work (nodes; deterministic time), so figures but seconds are the same on
every run. CP-SAT (package ortools) is measured where it is installed; varlen doesn't use it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.plan.figures import EXACT
from benchmarks.records import save, stamp
from varlen.plan.assign import NODES, assign, improve_exactly, lightest_possible

DETERMINISTIC_S = 1.0
_UNITS = 1e6
"""Of the heaviest group, in the whole numbers that CP-SAT takes."""


class Step(NamedTuple):
    """Documents to be divided."""

    name: str
    work: np.ndarray
    num_groups: int


class Answer(NamedTuple):
    """What a solver made of an assignment."""

    group_of: np.ndarray
    bound: float
    is_proven: bool


def steps(seed: int = 0, repeats: int = 3) -> Iterator[Step]:
    """Yield steps with a few long documents, which are what training has, and even ones, which are hard to divide."""
    random = np.random.default_rng(seed)
    for count, num_groups in ((16, 4), (48, 8), (128, 8), (512, 4)):
        for _ in range(repeats):
            lengths = np.ceil(random.lognormal(7, random.uniform(0.5, 2), count)).clip(16, 131_072)
            yield Step(f"heavy-tailed, {count} to {num_groups}", 16_384 * lengths + lengths**2, num_groups)
    for count, num_groups in ((16, 4), (36, 12), (48, 12)):
        for _ in range(repeats):
            yield Step(f"even, {count} to {num_groups}", random.uniform(50, 100, count), num_groups)


def highs(step: Step, start: np.ndarray) -> Answer:
    found = improve_exactly(step.work, start, step.num_groups, nodes=NODES)
    return Answer(found.group_of, found.bound, found.is_optimal)


def cp_sat(step: Step, start: np.ndarray) -> Answer:
    """CP-SAT with the same start and the same way to tell groups apart."""
    from ortools.sat.python import cp_model

    scale = _UNITS / heaviest(step, start)
    units = np.ceil(step.work * scale).astype(int).tolist()
    order = np.argsort(-step.work, kind="stable").tolist()
    number_of: dict[int, int] = {}
    for item in order:
        number_of.setdefault(int(start[item]), len(number_of))
    model = cp_model.CpModel()
    most = model.new_int_var(0, 2 * int(_UNITS), "heaviest")
    chosen = {
        (item, group): model.new_bool_var("")
        for place, item in enumerate(order)
        for group in range(min(place + 1, step.num_groups))
    }
    for item in order:
        model.add_exactly_one(one for (owner, _), one in chosen.items() if owner == item)
    for group in range(step.num_groups):
        model.add(sum(units[item] * one for (item, number), one in chosen.items() if number == group) <= most)
    for (item, group), one in chosen.items():
        model.add_hint(one, number_of[int(start[item])] == group)
    model.minimize(most)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = DETERMINISTIC_S
    status = solver.solve(model)
    found = start.copy()
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        for (item, group), one in chosen.items():
            if solver.value(one):
                found[item] = group
    return Answer(found, solver.best_objective_bound / scale, status == cp_model.OPTIMAL)


def heaviest(step: Step, group_of: np.ndarray) -> float:
    return float(np.bincount(group_of, step.work, step.num_groups).max())


def measure(step: Step, solvers: dict[str, Callable[[Step, np.ndarray], Answer]]) -> dict[str, Any]:
    """One step: how far each is over the bound that no assignment can go below, and what it took."""
    floor = lightest_possible(step.work, np.zeros(step.num_groups))
    assign(step.work, step.num_groups)
    begun = time.perf_counter()
    start = assign(step.work, step.num_groups)
    row: dict[str, Any] = {
        "step": step.name,
        "assign": {"over_bound": heaviest(step, start) / floor - 1, "seconds": time.perf_counter() - begun},
    }
    for name, solver in solvers.items():
        begun = time.perf_counter()
        answer = solver(step, start)
        seconds = time.perf_counter() - begun
        reached = min(heaviest(step, answer.group_of), heaviest(step, start))
        row[name] = {
            "over_bound": reached / floor - 1,
            "gained": heaviest(step, start) / reached - 1,
            "proven": answer.is_proven,
            "seconds": seconds,
        }
    return row


def main() -> None:
    solvers: dict[str, Callable[[Step, np.ndarray], Answer]] = {"highs": highs}
    try:
        import ortools

        solvers["cp_sat"] = cp_sat
        peer = str(ortools.__version__)
    except ImportError:
        peer = "absent"
    rows = []
    for step in steps():
        rows.append(measure(step, solvers))
        print(json.dumps(rows[-1]), flush=True)
    import highspy

    made = stamp()
    found = {
        **made,
        "versions": {**made["versions"], "highs": highspy.Highs().version(), "ortools": peer},
        "limits": {"highs_nodes": NODES, "cp_sat_deterministic_s": DETERMINISTIC_S},
        "steps": rows,
    }
    save(found, EXACT)


if __name__ == "__main__":
    main()
