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
from tests.support.tiny_families import Wide, family
from torch.multiprocessing.reductions import StorageWeakRef

from varlen.runtime import chunk
from varlen.runtime.kv_cache import HostLink
from varlen.runtime.step import run_step

LENGTHS = [24, 9]
SLICES = [[(0, 0, 7)], [(0, 7, 16), (1, 0, 4)], [(1, 4, 9), (0, 16, 24)]]


class Unheld:
    """A tensor whose memory is held by others alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype

    def tensor(self) -> torch.Tensor:
        assert not self._storage.expired(), "memory was freed while a copy was queued"
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


class LateLink(HostLink):
    """Copies in order, each at the latest moment; until then, whoever has it copied must hold the memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._queued: deque[tuple[int, list[Unheld], list[Unheld]]] = deque()
        self._recorded = list[torch.Tensor]()
        self._count = 0

    def copy(self, into: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> Any:
        self._count += 1
        self._queued.append((self._count, [*map(Unheld, into)], [*map(Unheld, rows)]))
        return self._count

    def sent(self, rows: torch.Tensor) -> torch.Tensor:
        self._recorded.append(rows)  # as `record_stream` holds them
        return super().sent(rows)

    def wait(self, copied: Any) -> None:
        while copied is not None and self._queued and self._queued[0][0] <= copied:
            _, into, rows = self._queued.popleft()
            super().copy([one.tensor() for one in into], [one.tensor() for one in rows])


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("saved", ["layers", "stage"])
def test_late_copies_give_the_same_gradients(monkeypatch, recompute, saved):
    assert_same(monkeypatch, tiny("llama", num_hidden_layers=4), recompute, saved)


def test_layers_of_other_heads_wait_for_copies_of_those_before(monkeypatch):
    """Their keys and values don't go into the same memory."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    model = family("gemma4_text", num_hidden_layers=4, layer_types=kinds)
    assert_same(monkeypatch, model, "none", "layers", attention="by_scores")


def assert_same(monkeypatch: Any, model: Any, recompute: Any, saved: Any, attention: str = "sdpa") -> None:
    tokens = tokens_of(LENGTHS)
    monkeypatch.setattr(chunk, "HostLink", LateLink)
    plan = replace(one_gpu_plan(LENGTHS, SLICES, recompute=recompute), offload="kv")
    with Wide():
        _, true = uncut(model, tokens, LENGTHS, attention)
        run_step(model, tokens, plan, saved=saved)

    assert furthest(take_gradients(model), true) < EXACT
