"""Stages and replicas in processes of their own train what one process trains, and say who is gone."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.distances import EXACT, Distances, furthest
from tests.support.pipelines import DISTANCES, JOB, LIBRARIES, planned
from tests.support.ranks import as_ranks
from tests.support.tiny_families import FAMILIES

import varlen as vl

LENGTHS = [60, 3, 17, 9, 30, 8, 2, 44]
WHOLE_PLANS: list[tuple[dict[str, Any], list[int]]] = [
    ({"recompute": "none"}, LENGTHS),
    ({"recompute": "full", "recompute_share": 0.5}, LENGTHS),
    ({"recompute": "full"}, [20]),
]

AXES = ("pp", "dp", "cp", "tp", "virtual_stages")

Found = list[dict[str, Any]]
"""What each rank wrote."""


def run_job(folder: Path, ranks: int, *words: Any) -> Found:
    as_ranks(JOB, "plans", folder, *words, ranks=ranks, libraries=LIBRARIES)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_job(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("four")
    paths = []
    for number, (settings, lengths) in enumerate(WHOLE_PLANS):
        paths.append(folder / f"plan{number}")
        vl.save_plan(planned(settings, lengths, vl.Mesh(dp=2, pp=2)), paths[-1])
    return run_job(folder, 4, *paths)


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("struck")
    as_ranks(JOB, "struck", folder, ranks=1, libraries=LIBRARIES)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def both(name: str, *jobs: Found) -> list[dict[str, Any]]:
    """What all ranks of jobs found under a name."""
    found = [one for job in jobs for rank in job for one in rank.get(name, [])]
    assert found
    return found


def assert_exact(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert {name: one[name] for name in DISTANCES if not one[name] <= EXACT} == {}
        assert one["targets"] == 0


def test_random_plans_train_what_one_process_trains(two, four):
    found = both("random", two, four)

    assert_exact(found)
    meshes = {tuple(one["mesh"]) for one in found}
    assert {(2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 4, 1), (1, 4, 2)} <= meshes


def test_meshes_of_cp_and_tp_train_what_one_process_trains(two, four):
    assert_exact(both("meshes", two, four))
    assert_exact(both("cp_sharded", two, four))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_meshes_train_what_one_process_trains(tmp_path, ranks, record_property):
    as_ranks(JOB, "meshes", tmp_path, 0, 4, ranks=ranks, libraries=LIBRARIES)

    found = [json.loads((tmp_path / f"{rank}.json").read_text())["meshes"] for rank in range(ranks)]
    by_mesh: dict[str, list[dict[str, Any]]] = {}
    for one in itertools.chain(*found):
        axes = (f"{axis}={one['axes'][axis]}" for axis in AXES if one["axes"][axis] > 1)
        by_mesh.setdefault(", ".join(axes), []).append(one)
    for mesh, rows in by_mesh.items():
        worst = {name: max(row[name] for row in rows) for name in DISTANCES}
        record_property("mesh", json.dumps({"mesh": mesh, "steps": len(rows), **worst}))
    for rows in found:
        assert_exact(rows)


@pytest.mark.parametrize(
    "names",
    [
        ["gpt_oss", "apertus", "gemma4_text", "llama4_text"],
        pytest.param(
            [*FAMILIES, "llama tied", "gemma2 tied", "gpt_oss tied", "phi tied"], marks=pytest.mark.soak
        ),
    ],
)
def test_families_that_two_processes_divide_train_what_one_process_trains(tmp_path, names):
    as_ranks(JOB, "families", tmp_path, *names, ranks=2, libraries=LIBRARIES)

    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())["families"]
        assert_exact(found)
        assert [one["family"] for one in found] == names
        # transformers has no plan for layers of these, or none for the expert that all tokens share.
        whole = ("gpt_oss", "hunyuan", "persimmon", "qwen2_moe")
        shares = {one["family"]: one["share"] for one in found}
        much = [n for n, share in shares.items() if share > (0.99 if n.startswith(whole) else 0.75)]
        assert not much, shares


def test_a_model_that_is_divided_otherwise_than_the_mesh_says_is_refused(two):
    words = {
        "theirs": "is divided among 2 processes, not by the engine; give it the undivided model and the mesh",
        "theirs, other mesh": "is divided among 2 processes, not by the engine",
        "alone": "tensor parallelism has divided the model among processes, and the engine has no mesh",
        "plan": r"(1, 1, 2, 1, 1) and the engine's mesh is (1, 1, 1, 2, 1)",
        "ours, other mesh": "is divided among the ranks [0, 1], and the mesh of this engine has tp=1",
        "heads": "tp=2 doesn't divide the 4 query heads and 1 key heads of this llama model; tp may be 1",
        "heads of some layers": "divide the 4 query heads and 1 key heads or 4 query heads and 2 key heads of this",
        "chunks": "layers with chunks of 8 tokens don't attend to documents that ranks share; take cp=1",
        "fully_shard": "fully_shard has divided the model, and tp=2 would divide shards; load the model again, and",
        "columns": "and fully_shard hasn't divided rows of theirs among all replicas",
        "both, other mesh": "is divided among the ranks [0, 1], and the mesh of this engine has tp=1",
        "adapter": "model.layers.1.mlp.up_proj is a Sequential",
    }
    for said in both("tp_refused", two):
        assert said.keys() == words.keys()
        assert {name: said[name] for name in said if words[name] not in said[name]} == {}


def test_stages_add_up_to_the_names_of_the_whole_model(four):
    for every in zip(*(rank["random"] for rank in four)):
        names = {name for one in every for name in one["names"]}

        assert all(names == set(one["wanted"]) for one in every)
        assert all(len(one["names"]) < len(names) for one in every)


def test_plans_of_the_planner_train_what_one_process_trains(four):
    found = both("planned", four)

    assert_exact(found)
    assert {0 in one["counts"] for one in found} == {True, False}  # a replica without a document


def test_shards_train_what_one_process_trains(two, four):
    found = both("sharded", two, four)

    assert_exact(found)
    unequal = [counts for one in found for counts in one["counts"] if len(set(counts)) > 1]
    assert unequal  # where parameters are gathered once a step
    whole = {tuple(one["whole"]) for one in found if one["whole"] is not None}
    by_unit, by_step = ({(0, *(1, 0) * n, 0) for n in (2, 4)}, {(n,) * (2 * n + 2) for n in (2, 4)})
    assert whole == by_unit | by_step  # one layer at a time, or a stage's all through the step


def assert_divided_twice(found: list[dict[str, Any]]) -> None:
    assert_exact(found)
    assert max(one["held"] for one in found) < 0.5  # less than tp alone divides


def test_shards_of_what_tp_ranks_divide_train_what_one_process_trains(four):
    assert_divided_twice(both("tp_sharded", four))


@pytest.mark.soak
def test_shards_of_what_tp_ranks_divide_train_what_one_process_trains_in_all_ways(tmp_path):
    as_ranks(JOB, "tp_sharded", tmp_path, 0, 2, ranks=4, libraries=LIBRARIES)

    for rank in range(4):
        assert_divided_twice(json.loads((tmp_path / f"{rank}.json").read_text()))


def assert_predicted(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["said"] == pytest.approx(one["found"], rel=0.02)


def test_peaks_of_memory_are_predicted_whatever_ranks_divide(two, four):
    assert_predicted(both("memory", two, four))


SHARDINGS = [("none", "unit"), ("optimizer", "unit"), ("parameters", "unit"), ("parameters", "step")]


@pytest.mark.soak
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("ranks", "pp"), [(2, 1), (4, 1), (4, 2)])
def test_peaks_of_memory_are_predicted_in_all_ways(tmp_path, ranks, pp, sharding):
    ways = [
        (*sharding, pp, recompute, (256, 2000)[(number + slices) % 2], slices)
        for slices in (0, 1, 4, 5)
        for number, recompute in enumerate(("none", "selective", "full"))
    ]
    assert_predicted_of(ways, ranks, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_peaks_of_adapters_other_optimizers_and_float32_are_predicted(tmp_path, precision, sharding):
    ways = [
        (*sharding, 1, recompute, 256, slices, precision, rank, optimizer)
        for slices, recompute, rank, optimizer in (
            (0, "full", 4, "muon"),
            (0, "none", 0, "muon"),
            (4, "full", 4, "adamw"),
            (0, "selective", 4, "adamw"),
        )
    ]
    assert_predicted_of(ways, 2, tmp_path)


def assert_predicted_of(ways: list[Any], ranks: int, tmp_path: Path) -> None:
    as_ranks(JOB, "memory", tmp_path, json.dumps(ways), ranks=ranks, libraries=LIBRARIES)
    for rank in range(ranks):
        assert_predicted(json.loads((tmp_path / f"{rank}.json").read_text())["memory"])


def test_shards_that_share_documents_train_what_one_process_trains(two, four):
    found = both("shared", two, four)

    assert_exact(found)
    assert min(one["shared"] for one in found) > 0
    assert {one["splits"] for one in found} == {True, False}


def test_frozen_weights_among_shards_stay_and_the_others_train_as_in_one_process(two, four):
    found = both("frozen", two, four)

    assert_exact(found)
    assert all(one["frozen"] for one in found)
    assert all(one["kept"] for one in found)


def test_parameters_that_groups_of_two_hold_are_summed_over_all_four(four):
    found = both("hybrid", four)

    assert_exact(found)
    assert all(abs(one["held"] - 0.5) < 0.01 for one in found)


def test_a_weight_of_both_ends_that_shards_took_from_one_is_refused(two):
    said = {one for rank in two for one in rank["apart"]}

    assert len(said) == 1
    assert said.pop().startswith(
        "embedding and head share a weight, and fully_shard was called on one of them"
    )


def test_a_model_in_eval_mode_has_its_gradients_in_a_pipeline_too(two, four):
    found = both("evaluating", two, four)

    assert_exact(found)
    assert not any(one["training"] for one in found)


def test_replicas_that_ddp_holds_are_summed_once(two):
    assert_exact(both("ddp", two))


def test_batches_of_a_step_add_up_and_other_stages_may_be_on_meta(two, four):
    for one in both("parts", two, four):
        assert one["gradients"] <= EXACT


def test_half_precision_goes_between_stages_and_gradients_stay_wide(two, four):
    for one in both("half", two, four):
        assert 1e-4 < one["half"] < 0.03
        assert one["dtypes"] == ["torch.float32"]


def test_masters_train_as_those_of_one_process_whether_ranks_divide_them_or_not(two, four):
    for rank in (*two, *four):
        for one in rank["masters"]:
            sharding, is_exact = one["sharding"], one["dtype"] == "float64"
            assert one["norms"] < (1e-9 if is_exact else 0.02)
            # In bfloat16, a gradient near 0 may have the other sign, and AdamW's step of 0.01 with it.
            assert one["weights"] < (1e-8 if is_exact else 0.1)
            assert abs(one["share"] - (0.5 if sharding == "optimizer" else 1)) < 0.02


def test_neighbours_of_a_stage_have_groups_of_their_own(four):
    found = [one["ranks"] for one in both("neighbours", four)]

    assert found == [[[0, 1, 2, 3], [0, 1]]] * 2 + [[[0, 1, 2, 3], [2, 3]]] * 2


def test_ranks_that_mean_different_things_all_say_so(four):
    odd = "stage 1 of pipeline 0 (rank 2)"
    said = [rank["refused"][0] for rank in four]

    for name in ("plan", "batch", "model", "kind of batch", "step_num_targets"):
        assert len({one[name] for one in said}) == 1
        assert said[0][name].startswith(f"PlanError: {odd} has the {name} ")
        assert "(1 differ: 2)" in said[0][name]
    for rank, one in enumerate(said):
        if rank == 2:
            assert "the plan is of" in one["one rank"] or "in the plan and" in one["one rank"]
            assert "a batch of type dict" in one["no batch"]
            assert "the embedding of this llama model has 1 hook" in one["hook"]
        else:
            for name, what in (("one rank", "step"), ("no batch", "step"), ("hook", "model")):
                assert (
                    one[name] == f"VarlenError: {odd} refused the {what} (1 of 4 did); its own error says why"
                )
        assert one["settings"].startswith(f"PlanError: {odd} has the settings ")
        assert "4 GPUs without a plan" in one["no plan"]
        assert "(2, 2, 1, 1, 1) and the engine's mesh is (1, 4, 1, 1, 1)" in one["mesh"]
        assert "(2, 2, 1, 1, 1) and the engine's mesh is (1, 2, 2, 1, 1)" in one["no cp"]
        assert f"process {rank} of 4, and the engine was given rank {rank} of dp=4 x pp=2 = 8" in one["world"]
        assert "the engine is closed" in one["closed"]
        assert one["order"].startswith("DeadlockError: ")
        assert one["circle"].startswith("PlanError: the order of tasks waits in a circle: ")
        assert one["counts"].startswith("PlanError: stage 0 of rank 0 has 1 forward tasks")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed", "stage 1 of pipeline 0 (rank 1) is gone (killed, stuck, or out of memory)"),
        ("stuck", "stage 1 of pipeline 0 (rank 1) is gone (killed, stuck, or out of memory)"),
        (
            "fails",
            "stage 1 of pipeline 0 (rank 1) failed (ValueError: a wrong number, in stage 1 of pipeline 0, ",
        ),
        (
            "full",
            "stage 1 of pipeline 0 (rank 1) failed (DeviceMemoryError: out of memory (tried to allocate 2.50 GiB) in "
            "forward of MicroPack 2, layers 2-3, of stage 1 of pipeline 0, with ",
        ),
        (
            "fails, shared",
            "stage 0 of pipeline 1 (rank 1) failed (ValueError: a wrong number, in stage 0 of pipeline 1, ",
        ),
        ("stuck, sharded", "stage 0 of pipeline 1 (rank 1) is gone (killed, stuck, or out of memory)"),
    ],
)
def test_whoever_is_left_names_the_stage_that_is_gone(struck, how, words):
    for rank in (0, 2, 3):
        one = struck[f"{how} {rank}"]

        assert one["said"].startswith("WorkerDiedError: " + words), one["said"]
        # A broken connection is noticed at once, and the killed is given 5 s to answer; for a stuck one the deadline
        # is 8 s, for the others 5 minutes.
        assert one["seconds"] < 15


def test_a_gradient_that_is_no_number_is_infinitely_far():
    wanted = {"a": torch.ones(2), "b": torch.ones(2)}
    broken = wanted | {"b": torch.full((2,), torch.nan)}
    seen = Distances()
    seen.saw("loss", math.nan)

    assert furthest(broken, wanted) == seen.loss == math.inf
    assert furthest(wanted, wanted) == seen.norm == 0


def test_an_error_of_a_task_says_which_task_it_was(struck):
    said = struck["fails 1"]["said"]

    assert said.startswith("ValueError: a wrong number")
    assert "in stage 1 of pipeline 0, forward, MicroPack 2, layers 2-3" in said


def test_a_stage_without_memory_says_to_all_what_would_fit(struck):
    own = struck["full 1"]["said"]

    assert own.startswith(
        "DeviceMemoryError: out of memory (tried to allocate 2.50 GiB) in forward of MicroPack 2"
    )
    assert " rows would fit, by estimate: plan with a smaller memory_fraction of vl.CostModel" in own
    for rank in (0, 2, 3):
        assert (
            " rows would fit, by estimate: plan with a smaller memory_fraction of vl.CostModel"
            in struck[f"full {rank}"]["said"]
        )
