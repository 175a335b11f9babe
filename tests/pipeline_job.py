"""One rank of jobs of stages and replicas: `pipeline_job.py JOB OUT ...`; writes down what it found.

A job runs many plans, since starting processes takes longer than most steps.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
OUT = Path(sys.argv[2])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    JOBS[sys.argv[1]](*sys.argv[3:])
    dist.destroy_process_group()


def write(found: Any) -> None:
    (OUT / f"{RANK}.json").write_text(json.dumps(found))


def random_plans(first: str, last: str) -> None:
    """Random plans, and with them shards, plans of the planner's, replicas by DDP, and what is refused."""
    import pipelines

    write([pipelines.run_random_plan(seed, RANK, WORLD) for seed in range(int(first), int(last))])


def shards(first: str, last: str) -> None:
    import pipelines

    ways = [("unit", "layers"), ("step", "layers"), ("unit", "parts"), ("unit", "root")]
    write(
        [
            pipelines.run_sharded(seed, RANK, WORLD, *ways[seed % len(ways)])
            for seed in range(int(first), int(last))
        ]
    )


JOBS = {"random_plans": random_plans, "shards": shards}

if __name__ == "__main__":
    main()
