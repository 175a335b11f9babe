"""The example of a pipeline trains in four processes, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from one_by_one import EXAMPLES


def test_four_processes_train_and_say_what_their_tasks_took() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run = subprocess.run(
        [*command, str(EXAMPLES / "pipeline.py"), "4"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
    )

    assert run.returncode == 0, run.stderr[-6000:]
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", run.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    for stage in (0, 1):
        for pipeline in (0, 1):
            assert re.search(
                rf"stage {stage} of pipeline {pipeline}: forward 0 [\d.]+ ms.*, backward \d+ [\d.]+ ms",
                run.stdout,
            )
