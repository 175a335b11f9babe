"""Loaders with plans: each rank is given the documents that it computes, and all of them train what one trains."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.distances import EXACT
from tests.support.pipelines import LIBRARIES
from tests.support.ranks import as_ranks

from varlen.documents.source import open_source
from varlen.offline.index import index_source

JOB = Path(__file__).with_name("share_job.py")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Texts of up to 120 tokens, and chats whose turns weigh."""
    folder = tmp_path_factory.mktemp("stores")
    random = np.random.default_rng(3)
    texts, chats = folder / "texts.jsonl", folder / "chats.jsonl"
    texts.write_text(
        "\n".join(
            json.dumps({"text": "".join(chr(c) for c in random.integers(1, 80, n))})
            for n in random.integers(1, 120, 24)
        )
    )
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "1" * 9, "weight": 0.5}]
    chats.write_text(
        "\n".join(
            json.dumps({"messages": [turns[0], {**turns[1], "content": "1" * int(n), "weight": float(w)}]})
            for n, w in zip(random.integers(1, 20, 24), random.choice([0.25, 0.5, 2], 24))
        )
    )
    found = []
    for path, settings in ((texts, {}), (chats, {"row_weights": True})):
        found.append(folder / path.stem)
        index_source(open_source(path, "bytes", **settings), found[-1])
    return found[0], found[1]


def run_job(folder: Path, ranks: int, stores: tuple[Path, Path]) -> Found:
    as_ranks(JOB, folder, *stores, ranks=ranks, libraries=LIBRARIES)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two(stores: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_job(tmp_path_factory.mktemp("two"), 2, stores)


def test_shares_train_what_one_process_trains(two):
    for rank in two:
        for one in rank["trained"]:
            assert max(one["loss"], one["gradients"], one["documents"]) <= EXACT, one
            assert one["targets"] == 0
            assert one["merged"] > 0


@pytest.fixture(scope="module")
def four(stores: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_job(tmp_path_factory.mktemp("four"), 4, stores)


@pytest.mark.soak
def test_shares_of_stages_train_what_one_process_trains(four):
    test_shares_train_what_one_process_trains(four)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_one_rank_plans_and_all_run_its_plans_whatever_happens(world, request):
    found = request.getfixturevalue({2: "two", 4: "four"}[world])

    plans = [[step and step[2] for step in rank["steps"]] for rank in found]
    assert plans[0]
    assert all(one == plans[0] for one in plans)
    assert sum(rank["plans_here"] for rank in found) == 1
    for rank in found:  # after a state of before, with a planner that knows nothing of what this one answered
        assert rank["again"] == rank["steps"][4:6]
    assert {"4", "5"} <= set(found[0]["ahead"])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_plan_of_other_ranks_is_refused_by_all_at_once(world, request):
    for rank in request.getfixturevalue({2: "two", 4: "four"}[world]):
        kind, said, seconds = rank["wrong"]
        assert kind == "PlanError"
        assert "is for dp=3, and the loader has dp_world_size=2" in said
        assert seconds < 30
