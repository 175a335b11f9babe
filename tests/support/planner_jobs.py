"""Planning functions for a planner's process: one document a MicroPack on one rank, quickly, slowly or not at all."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from varlen.errors import PlanError
from varlen.step_plan import Mesh, MicroPacks, StepPlan

CALLED: list[str] = []
"""The method of each call in this process."""


def one_by_one(
    lengths: np.ndarray, method: str = "micropack", gate: str = "", gated: int = 0, faults: str = ""
) -> StepPlan:
    """Each document a MicroPack of its own; after a file is there, or with faults.

    Args:
        lengths: int32 `[num_documents]`.
        method: of the plan; "sliced" is never slow and has no faults.
        gate: a file that must be there first.
        gated: the first length of steps that wait for it; 0 for all.
        faults: "dies" ends the process at a first length of 13, "fails" and "breaks" raise there, "hangs" hangs.
    """
    CALLED.append(method)
    print("what a planning function prints disturbs nobody")
    if method != "sliced":
        while gate and gated in (0, lengths[0]) and not Path(gate).exists():
            time.sleep(0.01)
        if faults == "dies" and lengths[0] == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        while faults == "hangs" and lengths[0] == 13:
            time.sleep(0.01)
        if faults == "fails" and lengths[0] == 13:
            raise PlanError("no plan holds thirteen")
        if faults == "breaks" and lengths[0] == 13:
            raise KeyError("thirteen")
    count = lengths.size
    packs = MicroPacks(
        rank_offsets=np.array([0, count], np.int32),
        slice_offsets=np.arange(count + 1, dtype=np.int32),
        document_ids=np.arange(count, dtype=np.int32),
        starts=np.zeros(count, np.int32),
        stops=lengths.astype(np.int32),
    )
    return StepPlan(
        lengths=lengths.astype(np.int32),
        first_ranks=np.zeros(count, np.int32),
        num_ranks=np.ones(count, np.int32),
        forward=packs,
        backward=packs,
        tasks=np.array([0, 1] * count, np.uint8),
        task_offsets=np.array([0, 2 * count], np.int32),
        mesh=Mesh(),
        method=method,  # type: ignore[arg-type]
        answered_by=f"one by one in process {os.getpid()}",
    )
