"""A planner beside a loader: the lengths of its steps, runs that go on, and ranks that are told."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.pipelines import LIBRARIES
from tests.support.planning import until
from tests.support.ranks import as_ranks
from tests.support.stores import loader_of, random_store

import varlen as vl
from varlen.plan.check import check_plan
from varlen.plan.serialize import plan_fingerprint

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_store(tmp_path_factory.mktemp("feed"))


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    cost = vl.CostModel(model=vl.ModelShape.named("llama-3-8b"), hardware=vl.Hardware.named("h100"))
    return {"cost": cost, "mesh": vl.Mesh(dp=2, pp=2, tp=4)}


def test_a_run_that_goes_on_has_the_plans_that_its_steps_had(store, settings):
    fingerprints, quickly = [], []
    with loader_of(store) as loader, vl.Planner(loader.lengths, **settings) as planner:
        for step in range(5):
            if step == 2:
                checkpoint = json.dumps(loader.state_dict())
            if step in (1, 3):  # as if the worker were late
                with planner._process.changed:
                    planner._process.results.pop(step, None)
                    planner._process.requests.pop(step, None)
            elif step:
                until(lambda known=step: known in planner._process.results, 60)
            plan = planner.take(step)
            check_plan(plan)
            fingerprints.append(plan_fingerprint(plan))
            assert plan.method == "micropack"
            quickly.append(plan.answered_by.startswith("quick"))
            next(loader)
            journal = json.dumps(planner.state_dict())

    assert quickly == [False, True, False, True, False]
    with loader_of(store) as loader:
        loader.load_state_dict(json.loads(checkpoint))
        with vl.Planner(loader.lengths, first_step=loader.step, **settings) as planner:
            planner.load_state_dict(json.loads(journal))
            for step in range(2, 5):
                plan = planner.take(step)
                assert plan_fingerprint(plan) == fingerprints[step]
                assert sorted(plan.lengths.tolist()) == sorted(next(loader).document_lengths.tolist())


def test_ranks_run_the_plan_that_the_first_made_of_the_documents_that_all_get(store, tmp_path):
    as_ranks(HERE / "planner_job.py", store, 4, tmp_path, libraries=LIBRARIES)

    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert len({fingerprint for fingerprint, _ in first}) == 4
