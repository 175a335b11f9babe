"""Runs of several processes, by plans too, equal one process, and a killed run goes on, on any number."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.rarely import IS_SOAK, mostly
from tests.support.training import (
    Notes,
    metrics_of,
    planned_table,
    priced,
    processes_naming,
    rewound,
    run,
    same_end,
    same_weights,
    settings,
    start_ranks,
    steps_of,
    table,
    use_float64,
    weights_of,
    write_hardware,
    write_store,
    write_toml,
)

from varlen.train.trainer import train

RANKS = 2
PLAIN = {
    "model__settings": {
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "data__micro_batch_size": 1,
    "optimizer__schedule": "constant",
}
"""Without dropout, which every rank draws for itself; several micro-batches a rank."""


def torchrun(*arguments, folder):
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def killed(store, tmp_path_factory):
    """A run of `varlen train` on several processes, one of which was killed; and what torchrun said."""
    folder = tmp_path_factory.mktemp("killed")
    made = table(store, folder / "run", **PLAIN, run__parallel="fsdp")
    made["data"]["worker"] = "process"
    write_toml(folder / "config.toml", made)
    # Slow enough to be struck in the midst of it: no run of a test waits for these steps to end.
    job = torchrun(
        "-m", "varlen", "train", folder / "config.toml", "--set", "run.steps=100000", "--set", "run.keep=100000",
        folder=folder,
    )  # fmt: skip
    try:
        end = time.monotonic() + 240
        while not (folder / "run/checkpoints/step-00000004").is_dir():
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < end, "the job is too slow"
            time.sleep(0.02)
        ranks = processes_naming(str(folder / "config.toml"))
        (victim,) = [process for process, env in ranks.items() if "RANK=1" in env and "LOCAL_RANK=1" in env]
        os.kill(victim, signal.SIGKILL)
        _, said = job.communicate(timeout=240)
    finally:
        job.kill()
    return folder, job.returncode, said


def all_finished(processes, folder):
    end = time.monotonic() + 240
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
        process.kill()
        process.join()
    said = {path.name: path.read_text() for path in folder.glob("rank*.txt")}
    assert [process.exitcode for process in processes] == [0] * len(processes), said


@pytest.fixture(scope="module")
def together(store, killed, tmp_path_factory):
    """Whole runs by DDP and FSDP2, and more of them from a checkpoint of theirs, all in one job."""
    folder = tmp_path_factory.mktemp("together")
    runs = {
        name: table(store, folder / name, **PLAIN, run__parallel=name.partition("_")[0], run__steps=steps)
        for name, steps in {"ddp": 6, "fsdp_2": 2, "fsdp": 6}.items()
    }
    again = rewound(killed[0] / "run", 4, folder / "killed")
    going_on = table(store, again, **PLAIN, run__parallel="fsdp")
    all_finished(start_ranks([*runs.values(), going_on], RANKS, folder), folder)
    return folder


@pytest.fixture(scope="module")
def alone(store, tmp_path_factory):
    """The same run in one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    train(settings(store, output, **PLAIN), Notes())
    return output


@pytest.mark.soak
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_processes_train_what_one_trains(alone, together, parallel):
    one, several = metrics_of(alone), metrics_of(together / parallel)
    ours, theirs = weights_of(alone), weights_of(together / parallel)

    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name].numpy(), value.numpy(), atol=2e-5, err_msg=name)
    for step, other in zip(one, several, strict=True):
        assert other.pop("loss") == pytest.approx(step.pop("loss"), rel=1e-6)
        assert other.pop("grad_norm") == pytest.approx(step.pop("grad_norm"), rel=1e-5)
        assert other == step


@pytest.mark.soak
def test_going_on_at_the_same_number_of_processes_ends_with_the_same_bits(together):
    same_end(together / "fsdp", together / "killed")


@pytest.mark.soak
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_three_processes_add_in_the_same_order_after_going_on(store, tmp_path, parallel):
    whole = table(store, tmp_path / "whole", **PLAIN, run__parallel=parallel)
    whole["model"]["settings"] = whole["model"]["settings"] | {"hidden_size": 64, "intermediate_size": 160}
    half, rest = (
        whole | {"run": {**whole["run"], "output": str(tmp_path / "half"), "steps": steps}}
        for steps in (4, 6)
    )

    all_finished(start_ranks([whole, half, rest], 3, tmp_path), tmp_path)

    same_end(tmp_path / "whole", tmp_path / "half")


def test_processes_that_tokenize_on_the_fly_train_what_one_trains(store, tmp_path):
    source = PLAIN | {"data__source": str(store.parent / "chats.jsonl"), "data__mode": "streaming"}
    made = table(store, tmp_path / "two", **source, run__steps=3)

    all_finished(start_ranks([made], RANKS, tmp_path), tmp_path)
    train(settings(store, tmp_path / "one", **source, run__steps=3), Notes())

    for name, value in weights_of(tmp_path / "one").items():
        np.testing.assert_allclose(weights_of(tmp_path / "two")[name].numpy(), value.numpy(), atol=2e-5)


@pytest.mark.soak
def test_whoever_is_left_names_the_rank_that_is_gone(store, tmp_path):
    jobs = {}  # side by side, since most of the time is spent waiting for an answer
    for folder in (tmp_path / "ddp", tmp_path / "fsdp") if IS_SOAK else (tmp_path / "fsdp",):
        folder.mkdir()
        made = table(store, folder / "run", **PLAIN, run__parallel=folder.name)
        jobs[folder] = start_ranks([made], 3, folder, waits_at=4)
    for folder, processes in jobs.items():
        end = time.monotonic() + 240
        while not (folder / "waits").exists():
            assert time.monotonic() < end, [process.exitcode for process in processes]
            time.sleep(0.02)
        processes[2].kill()

    codes = {}
    for folder, processes in jobs.items():
        for process in processes:
            process.join(90)
        codes[folder.name] = [process.exitcode for process in processes]
        for process in processes:
            process.kill()

    assert list(codes.values()) == [[1, 1, -signal.SIGKILL]] * len(jobs)
    for path in (folder / f"rank{rank}.txt" for folder in jobs for rank in (0, 1)):
        said = path.read_text()
        assert said.startswith(
            "WorkerDiedError: rank 2 is gone (killed, stuck, or out of memory), one of 3"
        ), said


@pytest.mark.soak
def test_a_killed_rank_ends_the_job_with_an_error_that_names_it(killed):
    folder, code, said = killed

    assert code != 0
    assert re.search(r"rank\s*:\s*1 \(local_rank: 1\)\s+exitcode\s*:\s*-9", said), said
    assert processes_naming(str(folder)) == {}


@pytest.mark.soak
def test_a_killed_run_goes_on_alone_with_the_bits_of_one_that_changed_its_size(
    store, killed, together, tmp_path
):
    after_a_kill = rewound(killed[0] / "run", 2, tmp_path / "killed")
    undisturbed = rewound(together / "fsdp_2", 2, tmp_path / "undisturbed")
    assert steps_of(undisturbed) == ["step-00000002"]

    notes = Notes()
    for output in (after_a_kill, undisturbed):
        train(settings(store, output, **PLAIN, run__parallel="fsdp"), notes)

    assert [overview.world_size for overview in notes.overviews] == [1, 1]
    same_end(undisturbed, after_a_kill)
    theirs = weights_of(together / "fsdp")
    for name, value in weights_of(after_a_kill).items():
        torch.testing.assert_close(value, theirs[name], atol=2e-5, rtol=0)


def test_all_processes_wrote_their_shard(together):
    last = together / "fsdp" / "checkpoints" / "step-00000006"

    assert len(list(last.glob("*.safetensors"))) == RANKS
    assert json.loads((last / "checkpoint.json").read_text())["world_size"] == RANKS


STAGES = {"pp": 2, "quick": "micropack"}
TENSOR = {"tp": 2, "quick": "micropack"}
REPLICAS = {"quick": "micropack"}
DEEP = {
    "model__settings": {
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    "run__steps": 4,
}
"""Four layers, and a head that is the embedding; few steps."""


@pytest.fixture(scope="module")
def hardware(tmp_path_factory):
    return write_hardware(tmp_path_factory.mktemp("hardware") / "slow.json")


@pytest.fixture(scope="module")
def planned_alone(store, tmp_path_factory):
    """Runs of whole packs in one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    run(store, output, None, **DEEP)
    return output


HALF = {"run__precision": "bf16"}
FEW = {"data__global_batch_size": 2, "optimizer__learning_rate": 1e-3}
"""Steps of so few documents that ranks share all of some of them; of so few tokens that many a gradient is next to
nothing, which a higher rate would make much of."""


@pytest.fixture(scope="module")
def few_alone(store, tmp_path_factory):
    """The same of steps of few documents."""
    output = tmp_path_factory.mktemp("few") / "run"
    run(store, output, None, **DEEP, **FEW)
    return output


OTHERS = {
    "ddp": (REPLICAS, {}),
    "half, stages": (STAGES, HALF),
    "half, replicas": (REPLICAS, HALF),
    "half, tensor": (TENSOR, HALF),
    "half, tensor shards": (TENSOR, HALF | {"run__parallel": "fsdp"}),
    "shared, ddp": (REPLICAS, FEW),
    "shared, fsdp": (REPLICAS, FEW | {"run__parallel": "fsdp"}),
    "shared, in host memory": (REPLICAS | {"recompute": "selective", "offload": "kv"}, FEW),
    "unshared": (REPLICAS | {"merges": False}, FEW),
}
OFTEN = ("half, tensor", "shared, fsdp")
"""What isn't left to the soak."""


def near(one, other):
    """Require that two runs trained the same, to the rounding of float32."""
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name].numpy(), value.numpy(), atol=2e-5, err_msg=name)
    for step, other_step in zip(metrics_of(one), metrics_of(other), strict=True):
        assert other_step["loss"] == pytest.approx(step["loss"], rel=1e-5)
        assert other_step["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
        for name in ("tokens", "supervised_tokens", "fill", "position"):
            assert other_step[name] == step[name], name


@pytest.fixture(scope="module")
def planned_together(store, hardware, planned_alone, tmp_path_factory):
    """Runs of two processes: whole ones, begun and gone on ones, all in one job."""
    folder = tmp_path_factory.mktemp("together")
    for name in ("chunks from alone", "tp from alone"):
        rewound(planned_alone, 2, folder / name)
    runs = {
        "stages": planned_table(store, folder / "stages", priced(hardware, **STAGES), **DEEP),
        "cp": planned_table(store, folder / "cp", priced(hardware, cp=2, quick="micropack"), **DEEP),
        "tp": planned_table(store, folder / "tp", priced(hardware, **TENSOR), **DEEP),
        "tp from alone": planned_table(store, folder / "tp from alone", priced(hardware, **TENSOR), **DEEP),
        "halves": planned_table(
            store, folder / "halves", priced(hardware, **STAGES), **DEEP | {"run__steps": 2}
        ),
        "halves again": planned_table(store, folder / "halves", priced(hardware, **STAGES), **DEEP),
        "fsdp": planned_table(
            store, folder / "fsdp", priced(hardware, **REPLICAS), **DEEP, run__parallel="fsdp"
        ),
        "chunks from alone": planned_table(
            store, folder / "chunks from alone", priced(hardware, **STAGES, virtual_stages=2), **DEEP
        ),
    }
    for name, (plan, how) in OTHERS.items():
        if IS_SOAK or name in OFTEN:
            runs[name] = planned_table(store, folder / name, priced(hardware, **plan), **DEEP | how)
    all_finished(start_ranks(list(runs.values()), 2, folder), folder)
    return folder


@pytest.mark.parametrize(
    "how", ["stages", "cp", "tp", "tp from alone", "chunks from alone", "fsdp", *mostly([], ["ddp"])]
)
def test_two_processes_train_what_one_trains(planned_alone, planned_together, how):
    near(planned_alone, planned_together / how)


@pytest.mark.parametrize(
    ("how", "least"),
    mostly(
        [("shared, fsdp", 1)],
        [("shared, ddp", 1), ("shared, fsdp", 1), ("shared, in host memory", 1), ("unshared", 0)],
    ),
)
def test_two_processes_that_share_documents_train_what_one_trains(few_alone, planned_together, how, least):
    near(few_alone, planned_together / how)
    answers = [line["plan_answered_by"] for line in metrics_of(planned_together / how)]
    shared = [answer for answer in answers if ", 0 of" not in answer or "every document on" in answer]
    assert len(shared) >= least
    assert least or not shared


@pytest.fixture(scope="module")
def half_alone(store, tmp_path_factory):
    """The same in half precision."""
    output = tmp_path_factory.mktemp("half") / "run"
    run(store, output, None, **DEEP, **HALF)
    return output


@pytest.mark.parametrize("how", mostly(["tensor"], ["stages", "replicas", "tensor", "tensor shards"]))
def test_half_precision_of_two_processes_stays_near_that_of_one(
    planned_alone, half_alone, planned_together, how
):
    ours, theirs, exact = (
        metrics_of(x) for x in (planned_together / f"half, {how}", half_alone, planned_alone)
    )
    assert ours[0]["loss"] != exact[0]["loss"]
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.01)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.03)
    assert {str(value.dtype) for value in weights_of(planned_together / f"half, {how}").values()} == {
        "torch.float32"
    }


def test_what_several_did_is_noted_with_their_plans(planned_together):
    lines = metrics_of(planned_together / "stages")

    assert {line["plan_method"] for line in lines} == {"micropack"}
    assert all(line["plan_simulated_s"] > 0 for line in lines)
    assert all("MicroPacks a rank" in line["plan_answered_by"] for line in lines)


def test_stages_that_go_on_end_with_the_same_bits(planned_together):
    same_weights(planned_together / "stages", planned_together / "halves")


@pytest.mark.parametrize("how", ["stages", "tp"])
def test_one_process_goes_on_where_two_stopped(store, planned_together, planned_alone, tmp_path, how):
    copy = rewound(planned_together / how, 2, tmp_path / "copy")

    notes = run(store, copy, None, **DEEP)

    assert notes.overviews[0].resumed_from == 2
    near(planned_alone, copy)


@pytest.mark.soak
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("plan", [STAGES, TENSOR])
def test_two_replicas_of_two_processes_train_what_one_process_trains(
    store, hardware, planned_alone, tmp_path, parallel, plan
):
    made = planned_table(store, tmp_path / "run", priced(hardware, **plan), **DEEP, run__parallel=parallel)

    all_finished(start_ranks([made], 4, tmp_path), tmp_path)

    near(planned_alone, tmp_path / "run")
    copy = rewound(tmp_path / "run", 2, tmp_path / "copy")
    run(store, copy, None, **DEEP)
    near(planned_alone, copy)


def test_experts_whose_division_checkpoints_cannot_hold_are_refused(store, hardware, tmp_path):
    sizes = {"num_local_experts": 2, "num_key_value_heads": 2}
    experts = {"model__type": "mixtral", "model__settings": DEEP["model__settings"] | sizes}
    made = planned_table(store, tmp_path / "run", priced(hardware, **TENSOR), **DEEP | experts)

    for process in start_ranks([made], 2, tmp_path):
        process.join(240)
        assert process.exitcode == 1

    for rank in range(2):
        said = (tmp_path / f"rank{rank}.txt").read_text()
        assert said.startswith(
            "ModelError: tp divides model.layers.0.mlp.experts.gate_up_proj in interleaved rows (4 "
        )
        assert "set plan.tp = 1, and divide the model by plan.pp" in said


@pytest.mark.parametrize("steps", mostly([40], [40, 200]))
def test_many_steps_in_a_pipeline_have_the_loss_curve_of_whole_packs(
    store, hardware, tmp_path, monkeypatch, steps
):
    more = {"run__steps": steps, "run__checkpoint_every": 0, "optimizer__learning_rate": 1e-3}
    more |= {"data__global_batch_size": 2}
    made = planned_table(store, tmp_path / "stages", priced(hardware, pp=2), **more)

    all_finished(start_ranks([made], 2, tmp_path, prepare=use_float64), tmp_path)
    use_float64(monkeypatch.setattr)
    run(store, tmp_path / "plain", None, **more)

    ours, theirs = (metrics_of(tmp_path / name) for name in ("stages", "plain"))
    assert len(ours) == steps
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-11)
    assert ours[-1]["loss"] < ours[0]["loss"] - 1
    for name, value in weights_of(tmp_path / "plain").items():
        torch.testing.assert_close(weights_of(tmp_path / "stages")[name], value, rtol=0, atol=1e-8)


def test_all_end_where_the_first_has_no_plan(store, hardware, tmp_path):
    made = planned_table(store, tmp_path / "run", priced(hardware, memory_fraction=1e-9), **DEEP)

    processes = start_ranks([made], 2, tmp_path)
    for process in processes:
        process.join(120)

    assert [process.exitcode for process in processes] == [1, 1]
    said = [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0].startswith("PlanError: ")
    assert said[1] == said[0]


def test_whoever_is_left_names_the_stage_that_is_gone(store, hardware, tmp_path):
    made = planned_table(store, tmp_path / "run", priced(hardware, pp=2), **DEEP)
    processes = start_ranks([made], 2, tmp_path, waits_at=4)
    end = time.monotonic() + 120
    while not (tmp_path / "waits").exists():
        assert time.monotonic() < end, [process.exitcode for process in processes]
        time.sleep(0.02)

    processes[1].kill()
    for process in processes:
        process.join(90)

    assert [process.exitcode for process in processes] == [1, -signal.SIGKILL]
    assert "stage 1 of pipeline 0 (rank 1) is gone" in (tmp_path / "rank0.txt").read_text()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"pp": 3},
            "plan.pp = 3 stages, and there are 2 processes; start 3, or set a plan.pp that divides 2",
        ),
        ({"slice_tokens": 24}, "plan.slice_tokens is for one process, and there are 2"),
        ({"pp": 2, "virtual_stages": 4, "hardware": "h100"}, "4 layers can't fill pp=2 x virtual_stages=4"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_on_every_rank(store, tmp_path, plan, words):
    made = planned_table(store, tmp_path / "run", plan, **DEEP)

    processes = start_ranks([made], 2, tmp_path)
    for process in processes:
        process.join(120)

    assert [process.exitcode for process in processes] == [1, 1]
    assert all(words in (tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1))
