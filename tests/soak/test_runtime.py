"""Long runs of the engine: stages and replicas run a thousand random plans, and never wait for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.distributed.test_pipelines import DISTANCES, EXACT, JOB, LIBRARIES
from tests.support.ranks import as_ranks

pytestmark = pytest.mark.soak
PLANS = 1_000
AT_ONCE = 125
"""Of a job, so that each stays within the time that a job may take."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_plans_come_to_an_end_with_exact_gradients(tmp_path: Path, ranks: int) -> None:
    seen = 0
    for first in range(0, PLANS // 2, AT_ONCE):
        as_ranks(JOB, "random", tmp_path, first, first + AT_ONCE, ranks=ranks, libraries=LIBRARIES)
        for rank in range(ranks):
            found = json.loads((tmp_path / f"{rank}.json").read_text())["random"]
            far = [
                (first + at, {n: one[n] for n in DISTANCES if not one[n] <= max(EXACT, 2 * one["rounding"])})
                for at, one in enumerate(found)
            ]
            assert [(seed, names) for seed, names in far if names] == []
            # Roundings to float32 that fall otherwise are as rare as they should be.
            assert sum(one["rounding"] > 0 for one in found) <= 2
            seen += len(found)

    assert seen == PLANS // 2 * ranks
