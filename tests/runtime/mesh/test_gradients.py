"""Sums over replicas begin as soon as gradients are whole, in one order."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.sliced import one_gpu_plan, tiny, tokens_of

from varlen.runtime.chunk import Units
from varlen.runtime.clock import Clock
from varlen.runtime.decoder import DecoderParts
from varlen.runtime.main_grads import gradient_of, set_gradient, step_gradients
from varlen.runtime.mesh import gradients
from varlen.runtime.mesh.gradients import Reduction, row_length
from varlen.runtime.stage_run import StageRunner
from varlen.runtime.step import LocalTransport, chunk_steps, step_data

LENGTHS = [12, 5]
SLICES = [[(0, 0, 7)], [(0, 7, 12), (1, 0, 5)]]


class Doubling:
    """The first of two ranks with the same gradients; notes what it was given, and adds when it is waited for."""

    size, index, device = 2, 0, torch.device("cpu")

    def __init__(self) -> None:
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sent: list[torch.Tensor] = []

    def begin_sum(self, tensors: Sequence[torch.Tensor]) -> Any:
        self.given += [(tensor, tensor.clone()) for tensor in tensors]
        return SimpleNamespace(wait=lambda: [tensor.mul_(2) for tensor in tensors])

    def send(self, tensor: torch.Tensor, _: int) -> Any:
        self.sent.append(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def receive(self, tensor: torch.Tensor, _: int) -> Any:
        """Of the other rank, which gives its number of messages so far."""
        number = len(self.sent)
        return SimpleNamespace(wait=lambda: tensor.fill_(number))

    def most(self, tensor: torch.Tensor) -> None:
        """The other rank has gradients of the same parameters."""

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_but_the_embedding_is_given_while_the_last_task_runs(
    recompute, dtype, splits_backward, monkeypatch
):
    model, group = tiny("llama", dtype, num_hidden_layers=3), Doubling()
    tasks = [0, 0, 1, 2, 1, 2] if splits_backward else None
    plan = one_gpu_plan(LENGTHS, SLICES, recompute=recompute, tasks=tasks, splits_backward=splits_backward)
    parts, parameters = DecoderParts.of(model), dict(model.named_parameters())
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    reduction = Reduction(parameters, group, parts)
    chunks = chunk_steps(parts, [range(3)], step_data(plan, tokens_of(LENGTHS), None), plan, units=reduction)
    found = []
    run_embedding = DecoderParts.embed_backward

    def embed_backward(*given: Any) -> None:
        found.append(len(group.given))
        run_embedding(*given)

    monkeypatch.setattr(DecoderParts, "embed_backward", embed_backward)
    runner = StageRunner(plan, 0, 0, chunks, LocalTransport(), clock=Clock(group.device))
    with step_gradients(parameters.values(), is_apart=True):
        while runner.next_task:
            runner.run_next()
        assert len(group.given) == len(parameters)
        whole = [gradient_of(p).clone() for p in parameters.values()]
        reduction.finish()
        summed = [gradient_of(p) for p in parameters.values()]

    assert found[0] == 0
    assert found[-1] == (2 if splits_backward else len(parameters) - 1)  # norm and head aren't split
    for (_, given), mine, total in zip(reversed(group.given), whole, summed):
        torch.testing.assert_close(given, mine, rtol=0, atol=0)
        torch.testing.assert_close(total, 2 * mine, rtol=0, atol=0)


def first_and_second_half(gradient: torch.Tensor) -> torch.Tensor:
    """Return the rows of two ranks, float32 `[2, row_length]`."""
    rows = row_length(gradient.shape, 2)
    flat = torch.zeros(2 * rows)
    flat[: gradient.numel()] = gradient.reshape(-1)
    return flat.view(2, rows)


@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_replicas_divide_are_sent_while_the_last_task_runs(dtype, splits_backward, monkeypatch):
    model, group = tiny("llama", dtype, num_hidden_layers=3), Doubling()
    tasks = [0, 0, 1, 2, 1, 2] if splits_backward else None
    plan = one_gpu_plan(LENGTHS, SLICES, recompute="full", tasks=tasks, splits_backward=splits_backward)
    parts, parameters = DecoderParts.of(model), dict(model.named_parameters())
    divided = {
        name for name in parameters if "norm" not in name
    }  # norms are summed as a whole, among the others
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    reduction = Reduction(parameters, group, parts, divided)
    data = step_data(plan, tokens_of(LENGTHS), None)
    sent_before: list[int] = []
    run_embedding = DecoderParts.embed_backward

    def embed_backward(*given: Any) -> None:
        sent_before.append(len(group.sent))
        run_embedding(*given)

    monkeypatch.setattr(DecoderParts, "embed_backward", embed_backward)

    def run(units: Units) -> None:
        chunks = chunk_steps(parts, [range(3)], data, plan, units=units)
        runner = StageRunner(plan, 0, 0, chunks, LocalTransport(), clock=Clock(group.device))
        while runner.next_task:
            runner.run_next()

    with step_gradients(parameters.values(), is_apart=True):
        run(Units())
        whole = {name: first_and_second_half(gradient_of(p)) for name, p in parameters.items()}
        for parameter in parameters.values():
            set_gradient(parameter, None)
        sent_before.clear()
        run(reduction)
        left = [name for name, p in parameters.items() if gradient_of(p) is not None]
        there = set(reduction.rows)
        reduction.finish()

    order = [name for name in [*parameters][::-1] if name in divided]
    assert sent_before[0] == 0  # the first task of two
    assert sent_before[-1] == (1 if splits_backward else len(divided) - 1)  # the head alone isn't split
    assert set(left) == parameters.keys() - divided  # what is sent is removed
    assert there == set(order[:-2])  # what was summed is freed during the stage's last task
    for number, (name, sent) in enumerate(zip(order, group.sent, strict=True)):
        torch.testing.assert_close(sent, whole[name][1], rtol=0, atol=0)
        torch.testing.assert_close(reduction.rows[name], whole[name][0] + number, rtol=0, atol=0)


class Noted(Units):
    """Notes what each task announces, and what is called."""

    def __init__(self) -> None:
        self.announced: list[Any] = []
        self.called: list[Any] = []

    def task(self, events: Sequence[Any], **_: bool) -> Any:
        self.announced.append(list(events))
        return nullcontext()

    def gather(self, unit: int) -> None:
        self.called.append(("gather", unit))

    def release(self, unit: int) -> None:
        self.called.append(("release", unit))

    def reduce(self, unit: int) -> None:
        self.called.append(("reduce", unit))


@pytest.mark.parametrize("is_forward_only", [False, True])
@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize(
    ("recompute", "share", "saved"),
    [("none", 1, "layers"), ("full", 1, "layers"), ("full", 0.5, "stage"), ("full", 1, "stage")],
)
def test_a_task_makes_the_calls_that_it_announces(recompute, share, saved, splits_backward, is_forward_only):
    model, noted = tiny("llama", torch.float32, num_hidden_layers=3), Noted()
    tasks = [0, 0, 1, 2, 1, 2] if splits_backward else None
    plan = one_gpu_plan(LENGTHS, SLICES, recompute=recompute, tasks=tasks, splits_backward=splits_backward)
    plan = replace(plan, recompute_share=share)
    data = step_data(plan, tokens_of(LENGTHS), None)
    settings: dict[str, Any] = {"saved": saved, "is_forward_only": is_forward_only, "units": noted}
    chunks = chunk_steps(DecoderParts.of(model), [range(3)], data, plan, **settings)
    clock = Clock(torch.device("cpu"))
    runner = StageRunner(plan, 0, 0, chunks, LocalTransport(), clock=clock, is_forward_only=is_forward_only)
    with step_gradients(list(model.parameters())):
        while runner.next_task:
            runner.run_next()

    assert noted.called == list(chain(*noted.announced))
    read = [unit for event, unit in noted.called if event == "gather"]
    assert read == [unit for event, unit in noted.called if event == "release"] or "full" in recompute
    assert set(read) == {-1, 0, 1, 2, 3}
    reduced = [unit for event, unit in noted.called if event == "reduce"]
    assert sorted(reduced) == ([] if is_forward_only else [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3])
