"""Batches as tensors: the same values on the host's device, and on CUDA where there is one."""

import numpy as np
import pytest
import torch
from tests.support.loaders import NAMES, content, loader_of, random_store

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return random_store(tmp_path_factory.mktemp("feed"))


def rows(loader):
    """The values of all batches, and their states."""
    found = []
    for batch in loader:
        values = [np.asarray(getattr(batch, name).cpu()).tolist() for name in NAMES]
        found.append((values, batch.step_num_targets, loader.state_dict()))
    return found


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_tensors_on_the_cpu_hold_what_arrays_hold(store, worker):
    with (
        loader_of(store, micro_batch_size=8) as plain,
        loader_of(store, micro_batch_size=8, device="cpu", worker=worker) as loader,
    ):
        taken = rows(loader)
        expected = [
            ([getattr(b, name).tolist() for name in NAMES], b.step_num_targets, plain.state_dict())
            for b in plain
        ]
    assert taken == expected
    with loader_of(store, device="cpu") as loader:
        assert next(loader).input_ids.dtype == torch.int64


@needs_cuda
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_tensors_on_cuda_hold_what_arrays_hold_while_the_device_is_busy(store, worker):
    with loader_of(store, micro_batch_size=8, epochs=20) as plain:
        expected = [content(batch) for batch in plain]
    with loader_of(
        store, micro_batch_size=8, epochs=20, device="cuda", worker=worker, ring_slots=3
    ) as loader:
        held = []
        for batch in loader:
            torch.cuda._sleep(2_000_000)  # the trainer's stream is behind
            held.append([getattr(batch, name).clone() for name in NAMES])
    assert len(held) == len(expected)
    for tensors, plain_bytes in zip(held, expected):
        for tensor, name, one in zip(tensors, NAMES, plain_bytes):
            kind = np.int64 if name in ("document_ids", "pack_ids") else np.int32
            assert tensor.cpu().numpy().astype(kind).tobytes() == one


@needs_cuda
def test_the_ring_is_pinned_and_copies_are_asynchronous(store):
    with loader_of(store, device="cuda", worker="process") as loader:
        next(loader)
        assert loader._worker._pinned
        host = torch.from_numpy(loader._worker._worker.memory)
        assert host.is_pinned()
