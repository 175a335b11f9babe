"""One rank of jobs of stages and replicas: `pipeline_job.py JOB OUT ...`; writes down what it found.

A job runs many plans, since starting processes takes longer than most steps.
"""

import faulthandler
import itertools
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import sharded
from tests.support import pipelines

import varlen as vl

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
OUT = Path(sys.argv[2] if len(sys.argv) > 2 else ".")  # imported, as by doctest, it is no job
WAYS = (("unit", "layers"), ("step", "layers"), ("unit", "parts"), ("unit", "root"))
MEMORY = {
    2: (
        ("optimizer", "unit", 1, "none", 256),
        ("parameters", "step", 1, "full", 256, 4),
        ("parameters", "step", 1, "full", 256, 0, "bf16", 4, "muon"),
        ("parameters", "unit", 1, "full", 256, 0, "fp32", 4),
    ),
    4: (("parameters", "unit", 2, "none", 256),),
}
SEEDS = (0, 1, 4)
"""Of each mesh one."""
HELD = {2: (0, 1, 2, 3), 4: (1, 2)}
TP_SHARDED = ((0, ("unit", "layers alone")), (3, WAYS[1]))
"""A Llama, whose ends are divided by tp alone; a Qwen3 with norms of heads, whose head is its embedding."""
SHARED = {2: (0, 1), 4: (1,)}
"""By the number of processes, the numbers of ways."""


MESHES = {
    2: (vl.Mesh(cp=2),),
    4: (vl.Mesh(dp=2, cp=2), vl.Mesh(pp=2, cp=2), vl.Mesh(dp=2, tp=2), vl.Mesh(pp=2, tp=2)),
}
"""By the number of processes."""


def write(found: Any, name: Any = RANK) -> None:
    part = OUT / f"{name}.part"
    part.write_text(json.dumps(found))
    part.rename(OUT / f"{name}.json")


def plans(*paths: str) -> None:
    """Random plans, shards, plans of the planner's, and what is refused."""
    found: dict[str, Any] = {
        "random": [pipelines.run_random_plan(seed, RANK, WORLD) for seed in SEEDS],
        "sharded": [sharded.run_sharded(n, RANK, WORLD, *WAYS[n]) for n in HELD[WORLD]],
        "shared": [sharded.run_sharded(n, RANK, WORLD, *WAYS[n], shares=True) for n in SHARED[WORLD]],
        "cp_sharded": [sharded.run_sharded(0, RANK, WORLD, *WAYS[0], cp=2)],
        "meshes": [pipelines.run_mesh(n, mesh, RANK) for n, mesh in enumerate(MESHES[WORLD])],
        "half": [sharded.run_half(RANK, WORLD)],
        "masters": [sharded.run_masters(RANK, WORLD, *way) for way in sharded.MASTERS[WORLD]],
        "memory": [sharded.run_memory(RANK, WORLD, *way) for way in MEMORY[WORLD]],
        "frozen": [sharded.run_frozen(RANK, WORLD)],
        "evaluating": [pipelines.run_evaluating(RANK, WORLD)],
    }
    if WORLD == 2:
        found["tp_refused"] = [pipelines.refusals_of_tp(RANK, WORLD)]
    found["parts"] = [pipelines.run_in_parts(RANK, WORLD)]
    if WORLD == 2:
        found["ddp"] = [pipelines.run_replicas(RANK, WORLD)]
        found["apart"] = [sharded.tied_apart(RANK, WORLD)]
    else:
        found["tp_sharded"] = [
            sharded.run_sharded(seed, RANK, WORLD, *way, shares=seed > 0, tp=2) for seed, way in TP_SHARDED
        ]
        found["neighbours"] = [pipelines.run_neighbours(RANK, WORLD)]
        found["planned"] = [pipelines.run_plan(path, RANK) for path in paths]
        found["hybrid"] = [sharded.run_hybrid(RANK, WORLD)]
        found["refused"] = [pipelines.refusals(RANK, WORLD)]
    write(found)


def random_plans(first: str, last: str) -> None:
    """Random plans alone, of more documents."""
    seeds = range(int(first), int(last))
    write({"random": [pipelines.run_random_plan(seed, RANK, WORLD, most_documents=8) for seed in seeds]})


def meshes(first: str, last: str) -> None:
    """Random plans of all meshes of dp, pp, cp and tp of 1 or 2, and of chunks, by as many processes as here."""
    sizes = [dict(zip(("dp", "pp", "cp", "tp"), each)) for each in itertools.product((1, 2), repeat=4)]
    every = [vl.Mesh(**axes) for axes in sizes if math.prod(axes.values()) == WORLD]
    every += [vl.Mesh(**asdict(mesh) | {"virtual_stages": 2}) for mesh in every if mesh.pp > 1]
    seeds = range(int(first), int(last))
    found = [(asdict(mesh), pipelines.run_mesh(seed, mesh, RANK)) for seed in seeds for mesh in every]
    write({"meshes": [{"axes": axes, **one} for axes, one in found]})


def tp_sharded(first: str, last: str) -> None:
    """Random plans where FSDP2 divides the parts of tp ranks, in all ways."""
    ways = (*WAYS, ("unit", "layers alone"))
    every = itertools.product(range(int(first), int(last)), ways, (False, True))
    write(
        [
            sharded.run_sharded(seed, RANK, WORLD, *way, shares=shares, tp=2)
            for seed, way, shares in every
            if way[1] != "parts" or seed % 2 == 0  # it would untie
        ]
    )


def families(*names: str) -> None:
    """Models of families, whose layers the processes divide."""
    write({"families": [pipelines.run_family(name, RANK) for name in names]})


def memory(ways: str) -> None:
    """Peaks of memory alone."""
    write({"memory": [sharded.run_memory(RANK, WORLD, *way) for way in json.loads(ways)]})


def struck() -> None:
    """Six jobs, in each of which something else happens to the second rank; those that wait for it wait at once."""
    waiting = [how for how in STRIKES if "fails" not in how and how != "full"]
    groups = [["fails"], ["full"], ["fails, shared"], waiting]
    # All are forked while no store has a client: a lock that a store's thread holds would stay locked in a fork.
    stores = [
        [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in jobs]
        for jobs in groups
    ]
    gates = [os.pipe() for _ in groups]
    children = [
        [child for how, store in zip(jobs, ports) for child in ranks_of(how, store.port, gate[0])]
        for jobs, ports, gate in zip(groups, stores, gates)
    ]
    for jobs, ranks, gate in zip(groups, children, gates):
        os.write(gate[1], bytes(len(ranks)))
        awaited = [OUT / f"{how} {rank}.json" for how in jobs for rank in (0, 2, 3)]
        end = time.monotonic() + 150
        while not all(path.exists() for path in awaited) and time.monotonic() < end:
            time.sleep(0.05)
        for child in ranks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if late := [path.stem for path in awaited if not path.exists()]:
            sys.exit(f"nothing within 150 s from {', '.join(late)}; what they last did stands above")


def ranks_of(how: str, port: int, gate: int) -> list[int]:
    """Fork the four ranks of a job, each of which begins once it has read a byte of the gate."""
    children = []
    for rank in range(4):
        child = os.fork()
        if not child:
            as_rank(rank, port, how, STRIKES[how], gate)
        children.append(child)
    return children


def as_rank(rank: int, port: int, how: str, strikes: Callable[[], Any], gate: int) -> None:
    try:
        os.read(gate, 1)
        faulthandler.dump_traceback_later(130)
        store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=90))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        write(pipelines.struck(rank, 4, how, strikes), f"{how} {rank}")
        time.sleep(150)  # it lives on, and the others are told all the same
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(0)


def fails() -> None:
    raise ValueError("a wrong number")


def runs_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total")


STRIKES = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fails": fails,
    "full": runs_out,
    "fails, shared": fails,
    "stuck, sharded": lambda: time.sleep(60),
    "stuck": lambda: time.sleep(60),
}


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "struck":
        struck()
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    jobs = {"plans": plans, "random": random_plans, "meshes": meshes, "families": families, "memory": memory}
    jobs["tp_sharded"] = tp_sharded
    jobs[sys.argv[1]](*sys.argv[3:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
