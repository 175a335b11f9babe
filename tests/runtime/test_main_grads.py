"""Half precision: the number of pieces of a step changes no gradient, and `.grad` is what an optimizer takes."""

import copy
import gc
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.rarely import mostly
from tests.support.sliced import tiny

import varlen as vl
from varlen.errors import SettingError

LENGTHS = [64] * 64
HALVES = [torch.bfloat16, torch.float16]
TIED = {"tie_word_embeddings": True, "attention_bias": True}

pytestmark = pytest.mark.filterwarnings("ignore:engine.step adds to gradients")


def batch_of(lengths: list[int] = LENGTHS) -> vl.PackedBatch:
    random = np.random.default_rng(3)
    documents = [random.integers(0, 61, length).astype(np.int32) for length in lengths]
    return vl.collate(documents, vl.pack(lengths, capacity=max(lengths)))


def gradients_of(model: Any, batch: vl.PackedBatch, slice_tokens: int) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    vl.SliceEngine(model, slice_tokens).step(batch)
    return {name: p.grad.double().clone() for name, p in model.named_parameters()}


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    mostly([(torch.bfloat16, TIED)], itertools.product(HALVES, ({}, TIED))),
)
def test_the_number_of_micropacks_does_not_change_gradients(dtype, settings):
    model, batch = tiny("llama", dtype, **settings), batch_of()
    exact = gradients_of(copy.deepcopy(model).double(), batch, 4096)

    errors = [error(gradients_of(model, batch, slice_tokens), exact) for slice_tokens in (512, 64, 8)]

    assert max(errors) < 1.25 * errors[0]


@pytest.mark.parametrize("seat", mostly([{}], [{}, {"mesh": vl.Mesh(), "rank": 0}]))
def test_gradients_of_long_steps_do_not_underflow_in_float16(seat):
    # The mean over 16,384 targets has gradients of 1e-8, below what float16 holds.
    model, batch = tiny("llama", torch.float16), batch_of([64] * 256)
    exact = gradients_of(copy.deepcopy(model).double(), batch, 4096)

    vl.SliceEngine(model, 64, **seat).step(batch)

    assert error({name: p.main_grad.double() for name, p in model.named_parameters()}, exact) < 0.02


def test_the_cast_goes_into_the_memory_of_the_gradient_before():
    model, batch = tiny("llama", torch.bfloat16), batch_of()
    engine = vl.SliceEngine(model, 64)
    engine.step(batch)
    held = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=False)
    engine.step(batch)

    for parameter, before in zip(model.parameters(), held):
        assert parameter.grad is before
        assert torch.equal(parameter.grad, parameter.main_grad.bfloat16())
    model.zero_grad()
    held.clear()
    del parameter, before
    gc.collect()
    assert all(parameter.main_grad is None for parameter in model.parameters()), "freed with .grad"


def test_weight_gradients_of_their_own_tasks_add_up_wide():
    model, batch = tiny("llama", torch.bfloat16), batch_of()
    cost = vl.CostModel(model=vl.ModelShape.from_config(model.config), hardware=vl.Hardware.named("h100"))
    search = vl.Search(least_rows=16, splits_backward=True, merges=False)
    plan = vl.plan_step(batch.document_lengths, cost=cost, mesh=vl.Mesh(pp=2), search=search)
    assert plan.splits_backward
    exact = gradients_of(copy.deepcopy(model).double(), batch, 4096)
    wanted = error(gradients_of(model, batch, 4096), exact)
    model.zero_grad()

    vl.SliceEngine(model).step(batch, plan)

    assert error({name: p.grad.double() for name, p in model.named_parameters()}, exact) < 1.25 * wanted


def sums(model: Any) -> list[torch.Tensor]:
    return [p.main_grad.clone() for p in model.parameters()]


def test_batches_add_up_where_grad_is_left_alone_and_begin_anew_where_it_is_dropped():
    model, batch = tiny("llama", torch.bfloat16), batch_of([20, 9])
    engine = vl.SliceEngine(model, 8)
    engine.step(batch)
    once = sums(model)

    engine.step(batch)

    for parameter, first in zip(model.parameters(), once):
        assert parameter.main_grad.dtype == torch.float32
        torch.testing.assert_close(parameter.main_grad, 2 * first, rtol=1e-5, atol=1e-8)
        assert torch.equal(parameter.grad, parameter.main_grad.bfloat16())

    model.zero_grad()
    gc.collect()
    assert all(parameter.main_grad is None for parameter in model.parameters()), "freed with .grad"
    engine.step(batch)
    assert all(map(torch.equal, sums(model), once))


CHANGES = [
    lambda parameter: parameter.grad.mul_(0.5),
    lambda parameter: parameter.grad.data.mul_(0.5),
    lambda parameter: setattr(parameter, "grad", parameter.grad * 0.5),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_grad_that_was_changed_is_what_the_next_batch_adds_to(change):
    model, batch = tiny("llama", torch.bfloat16), batch_of([20, 9])
    engine = vl.SliceEngine(model, 8)
    engine.step(batch)
    once = sums(model)
    for parameter in model.parameters():
        change(parameter)
    left = [parameter.grad.float() for parameter in model.parameters()]

    engine.step(batch)

    for found, first, before in zip(sums(model), once, left):
        torch.testing.assert_close(found, first + before, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("seat", [{}, {"mesh": vl.Mesh(), "rank": 0}])
def test_a_step_that_fails_leaves_grad_as_it_was(seat, monkeypatch):
    model, batch = tiny("llama", torch.bfloat16), batch_of([20, 9])
    vl.SliceEngine(model, 8, **seat).step(batch)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    broken = model.model.layers[0].register_forward_hook(lambda *_: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        vl.SliceEngine(model, 8, **seat).step(batch)

    broken.remove()
    assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), before))
    vl.SliceEngine(model, 8, **seat).step(batch)
    for parameter, one in zip(model.parameters(), before):
        torch.testing.assert_close(parameter.main_grad, 2 * one.float(), rtol=1e-2, atol=1e-6)


def test_an_optimizer_and_clipping_take_what_stands_in_grad():
    model, batch = tiny("llama", torch.bfloat16), batch_of([20, 9])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    for _ in range(2):
        vl.SliceEngine(model, 8).step(batch)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
        optimizer.step()
        optimizer.zero_grad()

    assert not any(torch.equal(p, one) for p, one in zip(model.parameters(), before))


def masters_of(model: Any, **settings: Any) -> tuple[vl.SliceEngine, torch.optim.Optimizer]:
    engine = vl.SliceEngine(model, 8)
    return engine, torch.optim.AdamW(engine.master_parameters(**settings), lr=1e-2, eps=1e-6)


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}])
def test_masters_go_where_float32_weights_go(settings):
    batch = batch_of([20, 9])
    exact = tiny("llama", torch.float32, **settings)
    model = copy.deepcopy(exact).bfloat16()
    weights = {name: parameter.detach().clone() for name, parameter in exact.named_parameters()}
    engine, optimizer = masters_of(model, weights=weights)
    wide, wide_optimizer = masters_of(exact)
    assert all(map(torch.equal, engine.master_parameters(), weights.values()))
    assert all(one is other for one, other in zip(wide.master_parameters(), exact.parameters()))

    for _ in range(4):
        for each, each_optimizer in ((engine, optimizer), (wide, wide_optimizer)):
            each.step(batch)
            each.clip_grad_norm_(1.0)
            each_optimizer.step()
            each.publish()
            each_optimizer.zero_grad()

    for (name, weight), parameter, master in zip(
        exact.named_parameters(), model.parameters(), engine.master_parameters()
    ):
        moved = (weight - weights[name]).norm()
        assert (master - weight).norm() < 0.3 * moved, name
        assert torch.equal(parameter, master.bfloat16())
        assert parameter.grad is None
        assert master.dtype == torch.float32


def test_batches_add_up_in_masters():
    model, batch = tiny("llama", torch.bfloat16), batch_of([20, 9])
    engine, _ = masters_of(model)
    engine.step(batch)
    once = [master.grad.clone() for master in engine.master_parameters()]

    engine.step(batch)

    for master, first in zip(engine.master_parameters(), once):
        torch.testing.assert_close(master.grad, 2 * first, rtol=1e-5, atol=1e-8)


def test_masters_that_a_step_would_leave_behind_are_refused():
    model, batch = tiny("llama", torch.bfloat16), batch_of([20, 9])
    with pytest.raises(SettingError, match=r"there are none; make the optimizer of engine.master_parameters"):
        vl.SliceEngine(model, 8).publish()
    with pytest.raises(
        SettingError, match=r"master of lm_head.weight has the shape \(3,\), and the parameter"
    ):
        masters_of(model, weights={"lm_head.weight": torch.zeros(3)})
    vl.SliceEngine(model, 8).step(batch)
    engine, optimizer = masters_of(model)
    with pytest.raises(
        SettingError, match=r"has a gradient \(21 of 21 parameters do\).* call model.zero_grad"
    ):
        engine.step(batch)
    model.zero_grad()
    engine.step(batch)
    optimizer.step()

    with pytest.raises(SettingError, match=r"21 master parameters have changed .* call engine.publish\(\)"):
        engine.step(batch)

    engine.publish()
    engine.step(batch)


def test_frozen_parameters_have_no_masters():
    model, batch = tiny("llama", torch.bfloat16), batch_of([20, 9])
    model.model.embed_tokens.weight.requires_grad_(False)
    frozen = model.model.embed_tokens.weight.clone()
    engine, optimizer = masters_of(model)

    engine.step(batch)
    optimizer.step()
    engine.publish()

    assert len(engine.master_parameters()) == 20
    assert torch.equal(model.model.embed_tokens.weight, frozen)
