"""Weight gradients that wait for tasks of their own are those of whole backward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.test_places import cases, planned
from tests.runtime.test_slices import MODELS, assert_equal
from tests.support.rarely import examples
from tests.support.sliced import one_gpu_plan, take_gradients, tiny, tokens_of, uncut

import varlen as vl
from varlen.plan.search import Search
from varlen.runtime.chunk import DeferredWeightGrads, add_up
from varlen.runtime.clock import bytes_meter
from varlen.runtime.step import run_step
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT

APART = Search(merges=False, repairs=False, least_rows=4)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_a_step_with_weight_gradients_apart_has_the_gradients_of_the_uncut_model(
    family: str, recompute: Any
) -> None:
    forward = [[(0, 0, 13)], [(0, 13, 21), (1, 0, 7)], [(0, 21, 30)]]
    tasks = [FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, WEIGHT, BACKWARD, WEIGHT, WEIGHT]
    plan = one_gpu_plan([30, 7], forward, recompute=recompute, tasks=tasks, splits_backward=True)
    model, tokens = tiny(family, **MODELS[family]), tokens_of([30, 7])
    loss, wanted = uncut(model, tokens, [30, 7])

    run = run_step(model, tokens, plan)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert run.places[0].kinds.tolist() == tasks
    assert_equal(take_gradients(model), wanted)


@given(cases())
@examples(15, 30)
def test_every_rank_and_stage_of_a_zero_bubble_plan_does_its_part(case: tuple[Any, vl.Mesh, Any]) -> None:
    lengths, mesh, chosen = case
    model = tiny("llama", num_hidden_layers=7)
    plan = planned(model, lengths, mesh, search=APART, **chosen)
    tokens = tokens_of(lengths)
    _, wanted = uncut(model, tokens, lengths)

    run_step(model, tokens, plan)

    assert_equal(take_gradients(model), wanted)


def test_the_planner_makes_such_plans() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 12).tolist()
    assert planned(tiny("llama"), lengths, vl.Mesh(pp=2), search=APART).splits_backward


def test_weights_have_no_gradient_before_their_task_and_norms_do() -> None:
    model, tokens = tiny("llama"), tokens_of([9])
    plan = one_gpu_plan([9], [[(0, 0, 9)]], tasks=[FORWARD, BACKWARD], splits_backward=True)

    run_step(model, tokens, plan)

    layer = model.model.layers[0]
    assert layer.mlp.up_proj.weight.grad is None
    assert layer.input_layernorm.weight.grad is not None


def test_what_waits_is_kept_until_its_task_and_no_longer() -> None:
    model, tokens = tiny("llama", torch.float32), tokens_of([200])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plan = one_gpu_plan([200], [[(0, 0, 200)]], tasks=[FORWARD, BACKWARD, WEIGHT], splits_backward=True)

    with bytes_meter(tokens.device) as meter:
        kept = run_step(model, tokens, plan, meter=meter).places[0].live_bytes

    hidden, inner, heads, key_heads = 32, 40, 32, 16
    inputs = 2 * hidden + heads + inner  # of q, k and v together; of gate and up together; of o; of down
    gradients = heads + 2 * key_heads + hidden + 2 * inner + hidden
    assert kept[1] == pytest.approx(
        2 * 200 * 4 * (inputs + gradients) + 200 * (8 + 8), abs=4000
    )  # labels and weights
    assert kept[2] < 4000


@given(st.integers(1, 9), st.booleans(), st.booleans())
def test_a_linear_layer_gives_what_it_gives_without(rows: int, has_bias: bool, is_frozen: bool) -> None:
    torch.manual_seed(rows)
    layer, later = torch.nn.Linear(5, 3, bias=has_bias).double(), DeferredWeightGrads()
    layer.weight.requires_grad_(not is_frozen)
    given_rows = torch.randn(1, rows, 5, dtype=torch.float64, requires_grad=True)
    layer(given_rows).square().sum().backward()
    wanted = [given_rows.grad, *(p.grad for p in layer.parameters())]
    given_rows.grad = None
    layer.zero_grad()

    with later:
        out = layer(given_rows)
    out.square().sum().backward()
    waiting = later.take()
    add_up(waiting)

    assert len(waiting) == (not is_frozen)
    for found, right in zip([given_rows.grad, *(p.grad for p in layer.parameters())], wanted, strict=True):
        assert (found is None) == (right is None)
        if found is not None:
            torch.testing.assert_close(found, right, rtol=1e-13, atol=1e-13)


def test_without_gradients_a_linear_layer_is_left_alone() -> None:
    layer, later = torch.nn.Linear(5, 3), DeferredWeightGrads()
    with later, torch.no_grad():
        assert torch.equal(
            layer(torch.ones(2, 5)), torch.nn.functional.linear(torch.ones(2, 5), *layer.parameters())
        )
    with later:
        layer(torch.ones(2, 5)).sum().backward()
    assert layer.weight.grad is not None, "rows that need no gradient leave nothing for later"
    assert not later.take()
