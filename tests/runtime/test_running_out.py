"""Out of memory: the task, its documents and rows are named, and slices as short as is said do run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sliced import one_gpu_plan, take_gradients, tiny, tokens_of

from varlen.errors import DeviceMemoryError, VarlenError
from varlen.plan.one_gpu import one_gpu_plan as planned
from varlen.runtime.clock import TrackedBytes
from varlen.runtime.stage_run import Took, is_out_of_memory, rows_that_fit
from varlen.runtime.step import run_step

LENGTH = 512


class FullCard(TrackedBytes):
    """A device with so many bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def _add(self, size: int, is_far: bool) -> None:
        if not is_far and size > 0 and self.live + size > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        super()._add(size, is_far)


def refuses_more_rows_than(model: Any, most: int) -> None:
    """Let a layer find no memory for more rows than that."""

    def look(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].shape[1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total")

    model.model.layers[1].register_forward_pre_hook(look)


def test_a_task_without_memory_is_named_with_its_documents_and_the_rows_that_run() -> None:
    model = tiny("llama")
    refuses_more_rows_than(model, 9)
    plan = one_gpu_plan([30, 5], [[(0, 0, 8)], [(0, 8, 18), (1, 0, 5)], [(0, 18, 30)]])

    with pytest.raises(DeviceMemoryError) as caught:
        run_step(model, tokens_of([30, 5]), plan)

    assert str(caught.value).startswith(
        "out of memory (tried to allocate 2.50 GiB) in forward of MicroPack 1, layers 0-1, of stage 0 of pipeline 0, "
        "with 15 rows: 0-5 of document 1, 8-18 of document 0; MicroPacks of at most 8 rows would fit, by estimate: "
        "plan with slice_tokens=8; "
    )
    assert isinstance(caught.value, VarlenError)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.__cause__.__notes__ == ["in stage 0 of pipeline 0, forward, MicroPack 1, layers 0-1"]
    take_gradients(model)
    run_step(model, tokens_of([30, 5]), planned(np.array([30, 5], np.int32), caught.value.rows_that_fit))


def peak_of(model: Any, recompute: Any) -> int:
    """The most bytes alive at once while one document runs as one slice."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with TrackedBytes() as free:
        run = run_step(model, tokens_of([LENGTH]), one_slice(LENGTH, recompute), meter=free)
    return int(run.places[0].peak_bytes.max())


def one_slice(rows: int, recompute: Any) -> Any:
    """A document in slices of so many rows."""
    return planned(np.array([LENGTH], np.int32), rows, recompute=recompute)


def advised(model: Any, limit: int, recompute: Any) -> list[int]:
    """Rows as advised, one after the other, until a step runs or none is advised any more."""
    rows = [LENGTH]
    while rows[-1]:
        try:
            with FullCard(limit) as card:
                run_step(model, tokens_of([LENGTH]), one_slice(rows[-1], recompute), meter=card)
            return rows
        except DeviceMemoryError as error:
            rows.append(error.rows_that_fit)
    return rows


@pytest.mark.parametrize("share", [0.9, 0.7, 0.55])
def test_slices_as_short_as_is_said_come_to_a_step_that_runs(share: float) -> None:
    model = tiny("llama", torch.float32)
    rows = advised(model, int(share * peak_of(model, "full")), "full")

    assert 2 <= len(rows) <= 3
    assert rows[-1] >= 32


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_that_is_tried_again_has_the_gradients_of_one_step(recompute: Any) -> None:
    model = tiny("llama", torch.float32)
    limit = int(0.9 * peak_of(model, recompute))
    take_gradients(model)
    run_step(model, tokens_of([LENGTH]), one_slice(32, recompute))
    wanted = take_gradients(model)

    with FullCard(limit) as card, pytest.raises(DeviceMemoryError):
        run_step(model, tokens_of([LENGTH]), one_slice(LENGTH, recompute), meter=card)
    assert all(parameter.grad is None for parameter in model.parameters())
    run_step(model, tokens_of([LENGTH]), one_slice(32, recompute))

    for name, gradient in take_gradients(model).items():
        assert torch.equal(gradient, wanted[name]), name


def test_where_gradients_were_there_before_the_error_says_that_they_have_a_part_now() -> None:
    model = tiny("llama", torch.float32)
    run_step(model, tokens_of([LENGTH]), one_slice(32, "full"))

    with FullCard(int(0.9 * peak_of(model, "full"))) as card, pytest.raises(DeviceMemoryError) as found:
        run_step(model, tokens_of([LENGTH]), one_slice(LENGTH, "full"), meter=card)

    assert any("call optimizer.zero_grad" in note for note in found.value.__notes__)


def test_where_held_rows_alone_are_too_many_no_slice_is_said_to_fit() -> None:
    model = tiny("llama", torch.float32)

    assert advised(model, peak_of(model, "none") // 4, "none")[-1] == 0


@given(
    st.integers(2, 9999),
    st.lists(st.tuples(st.integers(1, 9999), st.integers(0, 10**6)), max_size=5),
    st.integers(0, 10**9),
)
def test_rows_that_fit_are_fewer_and_take_what_is_there_at_most(
    rows: int, took: list[tuple[int, int]], room: int
) -> None:
    ran = [Took(rows=count, bytes=size) for count, size in took]
    fits = rows_that_fit(rows, ran, room)

    assert 0 <= fits < rows
    if room and any(each.bytes for each in ran):
        assert all(fits * each.bytes <= 0.91 * room * each.rows for each in ran)
    elif any(each.rows < rows for each in ran):
        assert fits in {each.rows for each in ran}
    else:
        assert fits == rows // 2


def test_memory_that_nobody_has_is_known_by_what_python_and_torch_say() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
    )
    assert not is_out_of_memory(RuntimeError("shapes don't match"))
    assert not is_out_of_memory(DeviceMemoryError("said already"))
