"""One rank of jobs whose loaders have plans: `share_job.py OUT STORE ...`; writes down what it found."""

import json
import os
import signal
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.support.distances import EXACT, furthest, whole_of
from tests.support.random_plans import random_plan
from tests.support.rarely import IS_SOAK
from tests.support.sliced import take_gradients, tiny

import varlen as vl
from varlen.plan.check import check_plan as check_whole
from varlen.plan.serialize import plan_fingerprint
from varlen.runtime.mesh.process_groups import coordinate_of
from varlen.runtime.step import check_order
from varlen.step_plan import StepPlan

LAYERS = 2
WAYS = (("texts", "token", "process"), ("texts", "document", "thread"), ("chats", "token", "thread"))
"""Stores, weightings and workers of loaders; one worker process a mesh is enough."""
SETTINGS: dict[str, Any] = {"capacity": 128, "global_batch_size": 4, "seed": 5}


def small() -> Any:
    """A model that knows all ids of the built-in tokenizer."""
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 300}
    return tiny("llama", head_dim=4, **sizes)


def plan_by_dice(mesh: vl.Mesh, step: int, lengths: Any) -> StepPlan:
    """A plan by dice that a job runs, of given documents; every other one shares some of them surely."""
    for attempt in range(1000):
        plan = random_plan(step * 1000 + attempt, mesh=mesh, lengths=lengths.tolist())
        if plan.splits_backward or (step % 2 == 0 and mesh.dp > 1 and not plan.num_merged):
            continue
        try:
            if plan.num_merged:
                check_whole(plan)
            else:
                for rank in range(mesh.dp):
                    check_order(plan, rank)
        except vl.VarlenError:
            continue
        return plan
    raise AssertionError("no plan in 1,000 attempts")


def meshes(world: int) -> list[vl.Mesh]:
    """Of as many GPUs as there are processes."""
    if world == 2:
        return [vl.Mesh(dp=2)]
    others = [vl.Mesh(dp=2, pp=world // 2), vl.Mesh(dp=world)] if IS_SOAK else []
    return [vl.Mesh(dp=2, cp=world // 2), *others]


def trained(mesh: vl.Mesh, rank: int, store: str, weighting: str, worker: Any) -> dict[str, float]:
    """Run steps of the shares that loaders give, and of whole batches in this process alone; say how they differ."""
    coordinate = coordinate_of(mesh, rank)
    plans = partial(plan_by_dice, mesh)
    far = dict.fromkeys(("loss", "gradients", "documents", "targets"), 0.0)
    mine = {"dp_rank": coordinate.dp_rank, "dp_world_size": mesh.dp, "worker": worker}
    alone = {"dp_rank": 0, "dp_world_size": 1, "layout": "flat", "worker": "thread"}
    merged = 0
    with (
        vl.PackedLoader(store, **SETTINGS, **mine, plan=plans) as shares,
        vl.PackedLoader(store, **SETTINGS, **alone) as whole,
        closing(vl.SliceEngine(small(), mesh=mesh, rank=rank, deadline_s=60, weighting=weighting)) as engine,
    ):
        model = small()
        one = vl.SliceEngine(model, slice_tokens=64, weighting=weighting)
        for share, batch in zip(shares, whole):
            merged += share.plan.num_merged
            evaluated = engine.evaluate(share, document_losses=True, log_probs=True)
            stats = engine.step(share, document_losses=True)
            wanted_stats = one.step(batch, document_losses=True)
            far["loss"] = max(far["loss"], abs(evaluated.loss - wanted_stats.loss))
            np.testing.assert_allclose(evaluated.document_losses, stats.document_losses, rtol=EXACT)
            if evaluated.log_probs is not None:
                here = share.plan.documents_of(coordinate.dp_rank)
                known = np.nan_to_num(wanted_stats.document_losses) * np.asarray(batch.document_targets)
                np.testing.assert_allclose(float(evaluated.log_probs.sum()), -known[here].sum(), rtol=EXACT)
            wanted, found = take_gradients(model), whole_of(take_gradients(engine.model))
            wanted = {name: wanted[name] for name in found}
            far["gradients"] = max(far["gradients"], furthest(found, wanted))
            far["loss"] = max(far["loss"], abs(stats.loss - wanted_stats.loss))
            far["targets"] += abs(stats.num_targets - batch.num_targets)
            far["documents"] = max(
                far["documents"], float(np.nanmax(abs(stats.document_losses - wanted_stats.document_losses)))
            )
            assert (np.isnan(stats.document_losses) == np.isnan(wanted_stats.document_losses)).all()
    return {**far, "merged": merged}


def ours(store: str, mesh: vl.Mesh, rank: int, plan: Any, **settings: Any) -> vl.PackedLoader:
    dp_rank = coordinate_of(mesh, rank).dp_rank
    return vl.PackedLoader(
        store, **SETTINGS, dp_rank=dp_rank, dp_world_size=mesh.dp, plan=plan, deadline_s=60, **settings
    )


def planner(mesh: vl.Mesh) -> vl.Planner:
    model = vl.ModelShape.from_config(small().config)
    cost = vl.CostModel(model=model, hardware=vl.Hardware.named("h100"), mode="flops")
    search = vl.Search(merges=False, splits_backward=False, repairs=False, least_rows=4)
    return vl.Planner(cost=cost, mesh=mesh, search=search)


def main() -> None:
    out, store, weighted = sys.argv[1:]
    stores = {"texts": store, "chats": weighted}
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"trained": []}
    for mesh in meshes(world):
        for job in WAYS:
            found["trained"].append(trained(mesh, rank, stores[job[0]], *job[1:]))
    mesh = vl.Mesh(dp=2, pp=world // 2)

    def batch_of(loader: vl.PackedLoader) -> Any:
        batch = next(loader, None)
        if batch is None:
            return None
        how = "quick" if batch.plan.answered_by.startswith("quick") else "planned"
        return [
            batch.document_ids.tolist(),
            batch.document_starts.tolist(),
            [how, plan_fingerprint(batch.plan)],
        ]

    # Plans of one planner, a worker that is killed, and a state from which all go on, without what was read ahead.
    steps, states = [], []
    with ours(store, mesh, rank, planner(mesh), epochs=3) as loader:
        for number in range(6):
            steps.append(batch_of(loader))
            end = time.monotonic() + 60
            while number == 3 and loader._worker.ready < 2 and time.monotonic() < end:
                time.sleep(0.02)
            states.append(loader.state_dict())
            if number == 2 and rank == 1:
                os.kill(loader._worker.pid, signal.SIGKILL)
                time.sleep(0.2)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, states[3])
    merged = vl.merge_states(every)
    with ours(store, mesh, rank, planner(mesh), worker="thread", epochs=3) as loader:
        loader.load_state_dict(merged)
        again = [batch_of(loader) for _ in range(2)]
        children = loader._opened.plans._given._process.child is not None
    found |= {
        "steps": steps,
        "again": again,
        "ahead": sorted(merged["plans"]["choices"]),
        "plans_here": children,
    }
    dist.barrier()

    # What is wrong with a plan is said by all, at once.
    begun = time.monotonic()
    try:
        wrong = partial(plan_by_dice, vl.Mesh(dp=3))
        with ours(store, mesh, rank, wrong, worker="thread") as loader:
            next(loader)
    except vl.VarlenError as error:
        found["wrong"] = [type(error).__name__, str(error), time.monotonic() - begun]
    dist.barrier()
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
