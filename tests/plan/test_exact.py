"""An exact solver lightens an assignment or proves it, the same on every run, and is asked for only where wanted."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from varlen.errors import InputError, MissingExtraError, PlanError, SettingError
from varlen.plan.assign import assign, improve_exactly

needs_solver = pytest.mark.skipif(
    importlib.util.find_spec("highspy") is None, reason="highspy is not installed"
)


def heaviest(work: Any, group_of: Any, num_groups: int, loads: Any = 0.0) -> float:
    return float((np.asarray(loads) + np.bincount(group_of, np.asarray(work, np.float64), num_groups)).max())


@needs_solver
def test_a_bad_assignment_becomes_the_best_there_is_and_is_proven() -> None:
    work = [8.0, 7.0, 6.0, 5.0, 4.0]

    found = improve_exactly(work, np.array([0, 0, 0, 1, 1], np.int32), 2)

    assert heaviest(work, found.group_of, 2) == 15
    assert found.is_optimal
    assert found.bound == pytest.approx(15, rel=1e-5)
    assert found.group_of.dtype == np.int32


@needs_solver
@pytest.mark.parametrize("seed", range(6))
def test_it_never_does_worse_keeps_to_limits_and_its_bound_holds(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(10, 100, 14)
    work = tokens.astype(np.float64) ** 2
    loads = random.integers(0, 3, 3) * 1000.0 if seed % 2 else np.zeros(3)
    limit = int(tokens.sum()) // 3 + 40
    settings: dict[str, Any] = {"tokens": tokens, "token_limit": limit, "loads": loads}
    start = assign(work, 3, steps=1, **settings)

    found = improve_exactly(work, start, 3, nodes=30, **settings)
    again = improve_exactly(work, start, 3, nodes=30, **settings)

    best = heaviest(work, assign(work, 3, **settings), 3, loads)
    assert np.bincount(found.group_of, tokens, 3).max() <= limit
    assert heaviest(work, found.group_of, 3, loads) <= heaviest(work, start, 3, loads)
    assert found.bound <= best * (1 + 1e-6)
    assert found.group_of.tolist() == again.group_of.tolist()
    assert (found.bound, found.nodes, found.is_optimal) == (again.bound, again.nodes, again.is_optimal)
    assert found.nodes <= 30


@needs_solver
def test_of_many_documents_those_of_the_heaviest_and_the_lightest_groups_are_rearranged() -> None:
    random = np.random.default_rng(3)
    work = random.lognormal(0, 0.5, 1500)
    start = (np.arange(1500) % 6).astype(np.int32)

    found = improve_exactly(work, start, 6, nodes=2)

    second = np.sort(np.bincount(start, work, 6))[-2]
    assert heaviest(work, found.group_of, 6) == pytest.approx(second)
    assert (found.group_of != start).any()


@needs_solver
def test_what_is_best_already_takes_no_solving() -> None:
    found = improve_exactly([9.0, 1.0, 2.0], np.array([0, 1, 1], np.int32), 2)

    assert (found.nodes, found.is_optimal, found.bound) == (0, True, 9.0)
    assert improve_exactly([], np.zeros(0, np.int32), 3).is_optimal


@needs_solver
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"nodes": 0}, SettingError, "nodes must be a whole number of at least 1, got 0"),
        (
            {"group_of": np.array([0, 2])},
            PlanError,
            r"must be 2 groups from 0 to 1; got int64 of shape \(2,\)",
        ),
        ({"group_of": np.array([0])}, PlanError, r"must be 2 groups"),
        (
            {"tokens": [9, 9], "token_limit": 10, "group_of": np.array([0, 0])},
            PlanError,
            "over the token limit in 1 of 2",
        ),
    ],
)
def test_what_can_t_be_improved_is_refused_in_a_sentence(
    arguments: dict[str, Any], error: type[InputError], words: str
) -> None:
    with pytest.raises(error, match=words):
        improve_exactly(**({"work": [1.0, 2.0], "group_of": np.array([0, 1]), "num_groups": 2} | arguments))


@needs_solver
def test_the_solver_prints_nothing() -> None:
    # In a process of its own: what it would print comes once a process.
    script = (
        "import numpy as np\n"
        "from varlen.plan.assign import improve_exactly\n"
        "found = improve_exactly([8.0, 7.0, 6.0, 5.0, 4.0], np.array([0, 0, 0, 1, 1], np.int32), 2)\n"
        "assert found.nodes\n"
    )

    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_without_the_solver_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)

    with pytest.raises(MissingExtraError, match=r'pip install "varlen\[plan\]"'):
        improve_exactly([1.0], np.array([0]), 1)
