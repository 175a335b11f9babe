"""Copies between a device and host memory are waited for before their values are used.

On a GPU a copy is done at some time after it was queued; here it is done when something waits for it or for a later
copy, and not before.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.distances import EXACT, furthest
from tests.support.sliced import one_gpu_plan, take_gradients, tiny, tokens_of, uncut
from tests.support.tiny_families import Wide

from varlen.runtime import chunk
from varlen.runtime.kv_cache import HostLink
from varlen.runtime.step import run_step

LENGTHS = [24, 9]
SLICES = [[(0, 0, 7)], [(0, 7, 16), (1, 0, 4)], [(1, 4, 9), (0, 16, 24)]]


class LateLink(HostLink):
    """Copies in order, each at the latest moment."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._queued: deque[tuple[int, Sequence[torch.Tensor], Sequence[torch.Tensor]]] = deque()
        self._count = 0

    def copy(self, into: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> Any:
        self._count += 1
        self._queued.append((self._count, into, rows))
        return self._count

    def wait(self, copied: Any) -> None:
        while copied is not None and self._queued and self._queued[0][0] <= copied:
            _, into, rows = self._queued.popleft()
            super().copy(into, rows)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("saved", ["layers", "stage"])
def test_late_copies_give_the_same_gradients(monkeypatch, recompute, saved):
    model, tokens = tiny("llama", num_hidden_layers=4), tokens_of(LENGTHS)
    monkeypatch.setattr(chunk, "HostLink", LateLink)
    plan = replace(one_gpu_plan(LENGTHS, SLICES, recompute=recompute), offload="kv")
    with Wide():
        _, true = uncut(model, tokens, LENGTHS)
        run_step(model, tokens, plan, saved=saved)

    assert furthest(take_gradients(model), true) < EXACT
