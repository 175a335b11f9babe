"""A rank of a job that plans ahead: `planner_job.py STORE STEPS FOLDER`; writes what it got beside the others.

Rank 0 plans and tells the others; each checks that its documents stand in the plan with their lengths.
"""

import datetime
import json
import os
import sys
from pathlib import Path

import numpy as np
from tests.support.stores import loader_of
from torch.distributed import TCPStore

import varlen as vl
from varlen.plan.serialize import broadcast_plan, plan_fingerprint


def main(store: str, steps: int, folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    job = TCPStore(os.environ["MASTER_ADDR"], port, world, rank == 0, timeout=datetime.timedelta(seconds=60))
    got = []
    with loader_of(store, dp_rank=rank, dp_world_size=world, micro_batch_size=4) as loader:
        planner = None
        if rank == 0:
            planner = vl.Planner(loader.lengths, function="tests.support.planner_jobs:one_by_one")
        for step in range(steps):
            plan = broadcast_plan(planner.take(step) if planner else None, job, step)
            held = loader.documents(step)
            numbers = {
                key: number
                for number, key in enumerate(zip(held.document_ids.tolist(), held.starts.tolist()))
            }
            for _ in range(loader.micro_batches):
                batch = next(loader)
                keys = zip(batch.document_ids.tolist(), batch.document_starts.tolist())
                mine = [numbers[key] for key in keys]
                assert np.array_equal(plan.lengths[mine], batch.document_lengths)
            got.append([plan_fingerprint(plan), plan.answered_by])
        if planner:
            planner.close()
    (folder / f"{rank}.json").write_text(json.dumps(got))
    job.set(f"done {rank}", "")
    if rank == 0:  # it holds the store, which must outlast what the others still ask of it
        job.wait([f"done {other}" for other in range(world)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
