"""Steps in slices, on one stage or several, have the loss and the gradients of the uncut model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.plan.accuracy import LENGTHS, TARGET_BYTES, cases, predicted_bytes
from hypothesis import given
from hypothesis import strategies as st
from tests.support.distances import assert_same
from tests.support.rarely import examples
from tests.support.sliced import (
    Slice,
    one_gpu_plan,
    plans,
    take_gradients,
    tiny,
    tokens_of,
    uncut,
    with_gradients,
)
from tests.support.tiny_families import EXPERTS

import varlen as vl
from varlen.cost.shape import ModelShape
from varlen.errors import DeadlockError, DocumentsError, ModelError, PlanError
from varlen.plan.check import check_plan
from varlen.plan.search import Search
from varlen.runtime.chunk import DeferredWeightGrads, add_up
from varlen.runtime.clock import TrackedBytes, bytes_meter
from varlen.runtime.decoder import HEAD_ROWS, DecoderParts
from varlen.runtime.step import run_stages, run_step, step_data
from varlen.step_plan import BACKWARD, FORWARD, WEIGHT, Mesh

MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "experts_implementation": "eager"},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS,
}


def check(model: Any, lengths: list[int], plan: Any) -> None:
    tokens = tokens_of(lengths)
    loss, wanted = uncut(model, tokens, lengths)

    run = run_step(model, tokens, plan)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert_same(take_gradients(model), wanted)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_a_sliced_step_has_the_gradients_of_the_uncut_model(family, recompute):
    forward: list[list[Slice]] = [[(0, 0, 13)], [(0, 13, 21), (1, 0, 7)], [(0, 21, 30), (2, 0, 1), (3, 0, 4)]]

    check(
        tiny(family, **MODELS[family]),
        [30, 7, 1, 4],
        one_gpu_plan([30, 7, 1, 4], forward, recompute=recompute),
    )


@given(plans())
@examples(15, 40)
def test_any_cut_of_either_pass_gives_the_same_gradients(case):
    check(tiny("llama"), *case)


@pytest.mark.parametrize("settings", [{}, {"splits_backward": True}])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_slices_of_a_document_in_one_micropack_stand_in_the_order_of_each_pass(recompute, settings):
    forward: list[list[Slice]] = [[(0, 0, 6), (1, 0, 5), (0, 6, 13)], [(1, 5, 7), (0, 13, 14), (0, 14, 30)]]
    backward: list[list[Slice]] = [[(0, 14, 30), (1, 5, 7), (0, 13, 14)], [(0, 6, 13), (0, 0, 6), (1, 0, 5)]]
    if recompute == "full":
        backward = [[(0, 20, 30), (0, 9, 20), (1, 3, 7)], [(0, 8, 9), (1, 0, 3), (0, 0, 8)]]
    plan = one_gpu_plan([30, 7], forward, backward, recompute=recompute)
    if settings:
        plan = replace(plan, **settings, tasks=np.array([0, 0, 1, 1, 2, 2], np.uint8))
        plan = replace(plan, task_offsets=np.array([0, 6], np.int32))
    check_plan(plan)

    for family in ("llama", "mistral"):
        check(tiny(family, **MODELS[family]), [30, 7], plan)


def test_tasks_run_in_the_order_of_the_plan():
    forward: list[list[Slice]] = [[(0, 0, 5)], [(1, 0, 5)], [(1, 5, 9)]]
    backward = [[(0, 0, 5)], [(1, 5, 9)], [(1, 0, 5)]]
    plan = one_gpu_plan([5, 9], forward, backward, tasks=[0, 0, 1, 0, 1, 1])

    run = run_step(tiny("llama"), tokens_of([5, 9]), plan)

    assert run.task_runs[0].kinds.tolist() == [0, 0, 1, 0, 1, 1]
    assert run.task_runs[0].micropacks.tolist() == [0, 1, 0, 2, 1, 2]
    assert (run.task_runs[0].seconds > 0).all()
    assert not run.task_runs[0].live_bytes.any()


def test_labels_say_what_is_learned_and_an_empty_micropack_runs():
    model, tokens = tiny("llama"), tokens_of([6])
    labels = torch.full((6,), -100)
    labels[3] = 5
    model.set_attn_implementation("sdpa")
    wanted = torch.nn.functional.cross_entropy(
        model(input_ids=tokens[None], use_cache=False).logits[0, 3:4], labels[3:4]
    )

    run = run_step(model, tokens, one_gpu_plan([6], [[(0, 0, 4)], [], [(0, 4, 6)]]), labels=labels)

    assert run.loss == pytest.approx(wanted.item(), rel=1e-12)


def test_the_head_runs_in_chunks_that_change_nothing():
    length = HEAD_ROWS + 30
    check(tiny("llama", num_hidden_layers=1), [length], one_gpu_plan([length], [[(0, 0, length)]]))


def test_gradients_are_added_to_those_already_there():
    model, tokens, plan = tiny("llama"), tokens_of([9]), one_gpu_plan([9], [[(0, 0, 4)], [(0, 4, 9)]])
    run_step(model, tokens, plan)
    once = {name: gradient.clone() for name, gradient in take_gradients(model).items()}

    run_step(model, tokens, plan)
    run_step(model, tokens, plan)

    assert_same(take_gradients(model), {name: 2 * gradient for name, gradient in once.items()})


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_byte_of_a_step_is_given_back(recompute):
    model, tokens = tiny("llama", torch.float32), tokens_of([64, 30])
    plan = one_gpu_plan([64, 30], [[(0, 0, 40)], [(0, 40, 64), (1, 0, 30)]], recompute=recompute)
    run_step(model, tokens, plan)

    with bytes_meter(tokens.device) as meter:
        run = run_step(model, tokens, plan, meter=meter)
        left = meter.live

    kept = run.task_runs[0].live_bytes
    assert kept[0] < kept[1] > kept[2] > kept[3]
    assert (run.task_runs[0].peak_bytes >= kept).all()
    assert left < 2000  # losses, labels and positions


@pytest.mark.parametrize("cuts", [[(0, 0, 256)], [(0, 0, 100), (0, 100, 256)]])
def test_recomputation_keeps_layer_inputs_and_keys_and_values_of_cut_documents_alone(cuts):
    model, tokens = tiny("llama", torch.float32), tokens_of([256])
    plan = one_gpu_plan([256], [[cut] for cut in cuts], recompute="full")
    with bytes_meter(tokens.device) as meter:
        run = run_step(model, tokens, plan, meter=meter)

    widths = 32 if len(cuts) == 1 else 32 + 2 * 2 * 8
    assert run.task_runs[0].live_bytes[len(cuts) - 1] == pytest.approx(256 * 2 * widths * 4, rel=0.1)


def test_tracked_bytes_follow_storages_and_not_views():
    with TrackedBytes() as meter:
        one = torch.zeros(1000)
        view = one[10:]
        assert meter.live == 4000
        two = one + 1
        assert (meter.live, meter.peak) == (8000, 8000)
        del one
        assert meter.live == 8000, "the view keeps it"
        del view, two
        assert (meter.live, meter.peak) == (0, 8000)
        meter.begin_peak()
        assert meter.peak == 0


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (one_gpu_plan([8], [[(0, 0, 8)]], mesh=Mesh(cp=2)), "cp=2"),
        (
            one_gpu_plan([8], [[(0, 0, 8)]], [[(0, 3, 8)], [(0, 0, 3)]]),
            r"in a MicroPack that stands in one pass alone \(3 do\)",
        ),
    ],
)
def test_a_plan_that_one_process_cannot_run_is_refused(plan, words):
    with pytest.raises(PlanError, match=words):
        run_step(tiny("llama"), tokens_of([8]), plan)


@pytest.mark.parametrize(
    ("forward", "is_backward_too", "tasks", "words"),
    [
        ([[(0, 4, 8)], [(0, 0, 4)]], False, None, "forward slice 0, tokens 4 to 8 of document 0"),
        ([[(0, 0, 4)], [(0, 4, 8)]], True, None, "backward slice 0, tokens 0 to 4 of document 0"),
        ([[(0, 0, 4), (0, 4, 8)]], True, None, "backward slice 0, tokens 0 to 4 of document 0"),
        ([[(0, 0, 4)], [(0, 4, 8)]], False, [0, 1, 0, 1], "backward slice 4-8 .* is out of turn"),
    ],
)
def test_slices_out_of_turn_are_refused_and_never_run_wrong(forward, is_backward_too, tasks, words):
    backward = forward if is_backward_too else None
    plan = one_gpu_plan([8], forward, backward, tasks=tasks, recompute="full")
    with pytest.raises(PlanError, match=words):
        run_step(tiny("llama"), tokens_of([8]), plan)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_peak_memory_is_what_the_cost_model_says(case):
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 2}
    model, tokens = tiny("llama", torch.bfloat16, head_dim=16, **sizes), tokens_of(LENGTHS)
    with_gradients(model)

    with bytes_meter(torch.device("cpu")) as meter:
        run = run_step(model, tokens, case.plan, meter=meter)

    predicted = predicted_bytes(ModelShape.from_config(model.config), case.plan)
    measured = run.task_runs[0].peak_bytes.max() - TARGET_BYTES * case.plan.num_tokens
    assert measured == pytest.approx(predicted, rel=0.02)


def test_tokens_that_do_not_match_the_plan_are_refused():
    plan = one_gpu_plan([8], [[(0, 0, 8)]])
    with pytest.raises(DocumentsError, match=r"shapes \[\(7,\)\]; the plan has 8 tokens"):
        run_step(tiny("llama"), tokens_of([7]), plan)
    with pytest.raises(DocumentsError, match="none of 8 tokens has a label"):
        run_step(tiny("llama"), tokens_of([8]), plan, labels=torch.full((8,), -100))


def test_a_model_outside_slices_is_told_which_attention_to_choose():
    model = tiny("llama")
    run_step(model, tokens_of([8]), one_gpu_plan([8], [[(0, 0, 8)]]))
    with pytest.raises(ModelError, match=r'set_attn_implementation\("sdpa"\)'):
        model(input_ids=tokens_of([8])[None], use_cache=False)


def test_plans_of_tests_are_whole():
    plan = one_gpu_plan([5], [[(0, 0, 2)], [(0, 2, 5)]])
    assert plan.backward.starts.tolist() == [2, 0]
    assert np.array_equal(plan.task_offsets, [0, 4])


SMALL = Search(merges=False, splits_backward=False, repairs=False, least_rows=4)


def planned(
    model: Any, lengths: list[int], mesh: vl.Mesh, *, search: Search = SMALL, **settings: Any
) -> vl.StepPlan:
    """A plan of the planner's, whose slices are small enough to be many."""
    cost = vl.CostModel(
        model=vl.ModelShape.from_config(model.config),
        hardware=vl.Hardware.named("h100"),
        mode="flops",
        **settings,
    )
    return vl.plan_step(lengths, cost=cost, mesh=mesh, search=search)


@st.composite
def placed_cases(draw: st.DrawFn) -> tuple[list[int], vl.Mesh, dict[str, Any]]:
    lengths = draw(st.lists(st.integers(1, 60), min_size=2, max_size=8).filter(lambda x: max(x) > 1))
    pp = draw(st.integers(1, 3))
    mesh = vl.Mesh(dp=draw(st.integers(1, 3)), pp=pp, virtual_stages=draw(st.integers(1, 2)) if pp > 1 else 1)
    share = draw(st.sampled_from([0, 0.5, 1]))
    settings = {"recompute": "full", "recompute_share": share} if share else {}
    return lengths, mesh, settings


@given(placed_cases())
@examples(12, 60)
def test_every_rank_and_stage_does_its_part(case):
    lengths, mesh, chosen = case
    model = tiny("llama", num_hidden_layers=7)
    plan = planned(model, lengths, mesh, **chosen)
    check_plan(plan)
    tokens = tokens_of(lengths)
    loss, wanted = uncut(model, tokens, lengths)

    run = run_step(model, tokens, plan)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert sum(len(place.kinds) for place in run.task_runs) == len(plan.tasks)
    assert_same(take_gradients(model), wanted)


def test_stages_that_wait_for_each_other_are_told():
    mesh = vl.Mesh(pp=2)
    plan = one_gpu_plan([4, 4], [[(0, 0, 4)], [(1, 0, 4)]], mesh=mesh)
    order = [FORWARD, BACKWARD, FORWARD, BACKWARD]
    wrong = replace(
        plan,
        tasks=np.array([*order, FORWARD, FORWARD, BACKWARD, BACKWARD], np.uint8),
        task_offsets=np.array([0, 4, 8], np.int32),
    )

    with pytest.raises(
        DeadlockError, match=r"2 stages wait for each other; the first has come to \(1, 0, 0\)"
    ):
        run_step(tiny("llama"), tokens_of([4, 4]), wrong)


APART = Search(merges=False, repairs=False, least_rows=4)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_a_step_with_weight_gradients_apart_has_the_gradients_of_the_uncut_model(family, recompute):
    forward = [[(0, 0, 13)], [(0, 13, 21), (1, 0, 7)], [(0, 21, 30)]]
    tasks = [FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, WEIGHT, BACKWARD, WEIGHT, WEIGHT]
    plan = one_gpu_plan([30, 7], forward, recompute=recompute, tasks=tasks, splits_backward=True)
    model, tokens = tiny(family, **MODELS[family]), tokens_of([30, 7])
    loss, wanted = uncut(model, tokens, [30, 7])

    run = run_step(model, tokens, plan)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert run.task_runs[0].kinds.tolist() == tasks
    assert_same(take_gradients(model), wanted)


@given(placed_cases())
@examples(15, 30)
def test_every_rank_and_stage_of_a_zero_bubble_plan_does_its_part(case):
    lengths, mesh, chosen = case
    model = tiny("llama", num_hidden_layers=7)
    plan = planned(model, lengths, mesh, search=APART, **chosen)
    tokens = tokens_of(lengths)
    _, wanted = uncut(model, tokens, lengths)

    run_step(model, tokens, plan)

    assert_same(take_gradients(model), wanted)


def test_the_planner_makes_such_plans():
    lengths = np.random.default_rng(0).integers(1, 60, 12).tolist()
    assert planned(tiny("llama"), lengths, vl.Mesh(pp=2), search=APART).splits_backward


def test_weights_have_no_gradient_before_their_task_and_norms_do():
    model, tokens = tiny("llama"), tokens_of([9])
    plan = one_gpu_plan([9], [[(0, 0, 9)]], tasks=[FORWARD, BACKWARD], splits_backward=True)

    run_stages(model, DecoderParts.of(model), step_data(plan, tokens, None), plan)

    layer = model.model.layers[0]
    assert layer.mlp.up_proj.weight.grad is None
    assert layer.input_layernorm.weight.grad is not None


def test_what_waits_is_kept_until_its_task_and_no_longer():
    model, tokens = tiny("llama", torch.float32), tokens_of([200])
    with_gradients(model)
    plan = one_gpu_plan([200], [[(0, 0, 200)]], tasks=[FORWARD, BACKWARD, WEIGHT], splits_backward=True)

    with bytes_meter(tokens.device) as meter:
        kept = run_step(model, tokens, plan, meter=meter).task_runs[0].live_bytes

    hidden, inner, heads, key_heads = 32, 40, 32, 16
    inputs = 2 * hidden + heads + inner  # of q, k and v together; of gate and up together; of o; of down
    gradients = heads + 2 * key_heads + hidden + 2 * inner + hidden
    # `8 + 8`: labels and weights.
    assert kept[1] == pytest.approx(2 * 200 * 4 * (inputs + gradients) + 200 * (8 + 8), abs=4000)
    assert kept[2] < 4000


@given(st.integers(1, 9), st.booleans(), st.booleans())
def test_a_linear_layer_gives_what_it_gives_without(rows, has_bias, is_frozen):
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


def test_without_gradients_a_linear_layer_is_left_alone():
    layer, later = torch.nn.Linear(5, 3), DeferredWeightGrads()
    with later, torch.no_grad():
        assert torch.equal(
            layer(torch.ones(2, 5)), torch.nn.functional.linear(torch.ones(2, 5), *layer.parameters())
        )
    with later:
        layer(torch.ones(2, 5)).sum().backward()
    assert layer.weight.grad is not None, "rows that need no gradient leave nothing for later"
    assert not later.take()
