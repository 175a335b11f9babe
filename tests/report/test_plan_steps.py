"""What a planned step says of its data, of other steps, and of the run that trains so."""

from dataclasses import replace

import numpy as np
import pytest
from tests.report.pages import read
from tests.report.printed import printed

from varlen.cost.hardware import Hardware
from varlen.cost.model import CostModel
from varlen.cost.shape import ModelShape
from varlen.report.page import duration
from varlen.report.plan import compare, sampling, step_documents, training_table
from varlen.report.plan_page import plan_page
from varlen.report.plan_table import plan_table
from varlen.step_plan import Mesh, spread
from varlen.train.configuration import read_config
from varlen.train.plans import mesh_of

COST = CostModel(model=ModelShape.named("llama-2-7b"), hardware=Hardware.named("h100"))
LENGTHS = np.random.default_rng(0).lognormal(7.5, 1.3, 60).clip(16, 40_000).astype(np.int64)


def test_a_step_is_said_to_be_a_sample_beside_the_mean_and_the_longest_of_its_data():
    lengths = np.array([0, 10, 30, 50, 90, 0, 200, 40])
    first, last = (
        step_documents(lengths, documents=2, step=step, capacity=100, seed=None) for step in (0, 2)
    )
    whole = step_documents(lengths, documents=8, step=0, capacity=100, seed=None)
    steps = [step_documents(lengths, documents=2, step=step, capacity=100, seed=None) for step in range(3)]

    assert first.mean_tokens == pytest.approx(np.mean([step.num_tokens for step in steps]))
    assert first.empty == 2
    assert sampling(first) == (
        "Step 0 is a sample, one of 3 steps of this data: it has 62.5 % fewer tokens than their mean, 107; its "
        "longest document has 30, that of the data 100. --step 1 plans another."
    )
    assert "30.9 % more tokens" not in sampling(last)
    assert "31.2 % more tokens than their mean" in sampling(last)
    assert sampling(last).endswith("--step 0 plans another.")
    assert sampling(whole) == ""
    found = compare(first, cost=COST, mesh=Mesh(tp=8), methods=("packed",))
    page, text = "".join(read(plan_page(found)).text), " ".join(printed(plan_table(found), 120).split())
    for said in (sampling(first), "2 documents of 0 tokens are left out of all steps."):
        assert said in page
        assert said in text
    assert found.to_json()["sample"] == sampling(first)
    assert found.to_json()["data"] == {
        "steps": 3, "mean_tokens": pytest.approx(320 / 3), "longest": 100, "empty_documents": 2,
    }  # fmt: skip


def test_several_steps_are_planned_by_the_fastest_method_and_summed_up():
    steps = [step_documents(LENGTHS, documents=20, step=step, capacity=4_096, seed=0) for step in range(3)]
    mesh = Mesh(dp=2, tp=8)

    found = compare(
        steps[0], more=steps[1:], cost=COST, mesh=mesh, methods=("packed", "sliced"), price=2.0, tokens=3e9
    )

    alone = [compare(step, cost=COST, mesh=mesh, methods=(found.best.name,)) for step in steps]
    seconds = [one.best.step_s for one in alone]
    hours = [one.gpu_hours_per_billion(one.best) for one in alone]
    all_tokens = sum(step.num_tokens for step in steps)
    over, record = found.over_steps(), found.to_json()
    mean_hours = 1e9 * sum(seconds) * mesh.num_gpus / 3600 / all_tokens
    assert [one["step_s"] for one in record["steps"]] == seconds
    assert over["step_s"].mean == pytest.approx(np.mean(seconds))
    assert (over["step_s"].least, over["step_s"].most) == (min(seconds), max(seconds))
    each = over["gpu_hours_per_billion_tokens"]
    assert (each.mean, each.least, each.most) == pytest.approx((mean_hours, min(hours), max(hours)))
    assert over["tokens_per_s_and_gpu"].mean == pytest.approx(all_tokens / sum(seconds) / mesh.num_gpus)
    assert record["training"] == pytest.approx(
        {"tokens": 3e9, "gpu_hours": 3 * mean_hours, "days": 3 * mean_hours / 16 / 24, "cost": 6 * mean_hours}
    )
    text = " ".join(printed(plan_table(found), 120).split())
    assert f"step {duration(np.mean(seconds))} {duration(min(seconds))} {duration(max(seconds))}" in text
    assert "at the mean of these steps" in text
    assert f"Steps 0 to 2, by {found.best.title}" in text
    assert "Over several steps" in "".join(read(plan_page(found)).text)
    assert "Over several steps" not in printed(plan_table(alone[0]), 120)


@pytest.mark.parametrize("sharding", ["optimizer", "parameters"])
def test_the_table_to_train_so_is_read_as_the_mesh_that_was_planned(sharding, tmp_path):
    mesh = Mesh(dp=4, pp=2, cp=2, tp=2, virtual_stages=2, sharding=sharding)
    step = step_documents(LENGTHS, documents=40, step=0, capacity=4_096, seed=0)
    found = compare(step, cost=COST, mesh=mesh, methods=("packed",), settings={"hardware": "h100"})
    config = tmp_path / "config.toml"
    words = training_table(found, found.best)
    config.write_text(
        f'[data]\nsource = "store"\ncapacity = 64\nglobal_batch_size = 2\n[model]\ntype = "llama"\n{words}\n'
    )

    settings = read_config(config)

    assert mesh_of(settings.plan, settings.run, mesh.num_gpus) == mesh
    assert (settings.plan.method, settings.plan.hardware) == ("packed", "h100")
    assert words in "".join(read(plan_page(found)).text)
    assert found.to_json()["train"] == words
    # Others than MicroPacks are planned so with the context parallelism that was best for them.
    wide = compare(step, cost=COST, mesh=Mesh(dp=4, tp=8), methods=("sliced",))
    shared = replace(wide.best, plan=spread(wide.best.plan, 1))
    assert ("cp = " in training_table(wide, shared)) == (shared.cp > 1)
    assert "cp = " not in training_table(wide, replace(shared, name="micropack"))
