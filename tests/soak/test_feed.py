"""Long tests of the feed: a million batches in bounded memory, and states of a longer run on any ranks."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.loaders import content, drained, loader_of, random_store

pytestmark = pytest.mark.soak
BATCHES = int(os.environ.get("VARLEN_SOAK_BATCHES", 10**6))
GROWTH_BYTES = 8 << 20


def resident(pid):
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_grows_over_a_million_batches(tmp_path):
    store = random_store(tmp_path)
    seen = []
    with loader_of(store, micro_batch_size=1, epochs=None, worker="process") as loader:
        for number, _ in enumerate(loader):
            if number % (BATCHES // 20) == 0:
                descriptors = len(list(Path("/proc/self/fd").iterdir()))
                seen.append((resident(os.getpid()), resident(loader._worker.pid), descriptors))
            if number == BATCHES:
                break
    half = len(seen) // 4
    growth = np.array(seen[-1]) - np.array(seen[half])
    assert growth[0] < GROWTH_BYTES, seen
    assert growth[1] < GROWTH_BYTES, seen
    assert growth[2] <= 0, seen


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_states_of_a_longer_run_give_the_rest_at_every_world_size(tmp_path, world):
    store = random_store(tmp_path, shards=8, documents=300)

    def rows(state=None, size=1):
        found = {}
        for rank in range(size):
            with loader_of(store, micro_batch_size=1, dp_rank=rank, dp_world_size=size) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                for batch in loader:
                    found.setdefault(int(batch.pack_ids[0]) // 24, []).append(content(batch))
        return {step: sorted(taken) for step, taken in found.items()}

    whole = rows()
    with loader_of(store, micro_batch_size=24) as loader:
        states = [state for state in drained(loader)[1] if state["micro_batch"] == 0]
    for state in states[:: max(len(states) // 12, 1)]:
        assert rows(state, world) == {s: taken for s, taken in whole.items() if s >= state["step"]}
