"""The example of a pipeline trains in four processes."""

from __future__ import annotations

import re

from tests.support.one_by_one import EXAMPLES
from tests.support.ranks import as_ranks

LIBRARIES = "torch,transformers.models.llama.modeling_llama,varlen.runtime.engine,varlen.simulate.api"


def test_four_processes_train_and_say_what_their_tasks_took() -> None:
    printed = as_ranks(EXAMPLES / "pipeline.py", "3", ranks=4, libraries=LIBRARIES)

    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    for stage in (0, 1):
        for pipeline in (0, 1):
            assert re.search(
                rf"stage {stage} of pipeline {pipeline}: forward 0 [\d.]+ ms.*, backward \d+ [\d.]+ ms",
                printed,
            )
