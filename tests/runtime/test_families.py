"""Every family of the table has the gradients of its uncut model in slices, under autocast too."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from tests.support import tiny_families
from tests.support.distances import largest
from tests.support.rarely import examples
from tests.support.sliced import Slice, one_gpu_plan, plans, take_gradients, tiny, tokens_of, uncut
from tests.support.tiny_families import FAILING, SETTINGS, VISION, Wide, family, with_vision

import varlen as vl
from varlen.attention.rules import LayerRules
from varlen.errors import ModelError
from varlen.model_families import FAMILIES
from varlen.runtime import casting
from varlen.runtime.attention import slice_attention
from varlen.runtime.clock import TrackedBytes
from varlen.runtime.decoder import HEAD_ROWS, DecoderParts, Logits, Targets
from varlen.runtime.kv_cache import CachedSlice, DocumentCache
from varlen.runtime.step import run_step
from varlen.step_plan import StepPlan

RECURRENT = [name for name, family in FAMILIES.items() if family.is_recurrent]
OWN_ATTENTION = [name for name, family in FAMILIES.items() if family.has_own_attention]


def off(model: Any, lengths: list[int], plan: Any, own: Any = None) -> float:
    """The largest relative error of a gradient of the sliced model, of the largest norm of all.

    `own`: the part of it whose own forward is the uncut model's; None for all.
    """
    tokens, own = tokens_of(lengths), model if own is None else own
    loss, wanted = uncut(own, tokens, lengths, "by_scores")
    run = run_step(model, tokens, plan)
    found = take_gradients(own)
    assert found.keys() == wanted.keys()
    errors = [abs(run.loss - loss) / loss]
    for name, gradient in found.items():
        size = wanted[name].norm()
        errors.append(((gradient - wanted[name]).norm() / size).item() if size else gradient.norm().item())
    return largest(errors)


LENGTHS = [30, 7, 1, 4]
FORWARD: list[list[Slice]] = [[(0, 0, 13)], [(0, 13, 21), (1, 0, 7)], [(0, 21, 30), (2, 0, 1), (3, 0, 4)]]
BACKWARD: list[list[Slice]] = [[(3, 0, 4), (1, 3, 7), (0, 17, 30)], [(2, 0, 1), (1, 0, 3), (0, 0, 17)]]


@pytest.mark.parametrize("name", tiny_families.FAMILIES)
def test_a_family_in_slices_has_the_gradients_of_its_uncut_model(name):
    with Wide():
        model = family(name)
        assert off(model, LENGTHS, one_gpu_plan(LENGTHS, FORWARD)) < 1e-12
        cut_apart = one_gpu_plan(LENGTHS, FORWARD, BACKWARD, recompute="full")
        assert off(model, LENGTHS, cut_apart) < 1e-12


@pytest.mark.parametrize("name", VISION)
def test_the_text_of_a_model_with_a_vision_tower_has_the_gradients_of_its_uncut_model(name):
    with Wide():
        model = with_vision(name)
        own = model.language_model if name in FAILING else model
        assert off(model, LENGTHS, one_gpu_plan(LENGTHS, FORWARD, BACKWARD, recompute="full"), own) < 1e-12


def test_a_vision_tower_that_learns_is_refused_and_told_what_to_do():
    model = with_vision("gemma3").requires_grad_(True)

    with pytest.raises(
        ModelError, match=r"vision_tower.* stands outside .*freeze it by requires_grad_\(False\)"
    ):
        DecoderParts.of(model)
    assert model.model.vision_tower.config._attn_implementation != "varlen_slices"


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "deepseek_v3", "llama4_text"]
)
@given(case=plans())
@examples(3, 6)
def test_any_cut_of_either_pass_gives_a_family_the_same_gradients(name, case):
    with Wide():
        assert off(family(name), *case) < 1e-12


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gemma2", "granite", "qwen3", "cohere", "gpt_neox", "olmo2"])
def test_embeddings_may_be_those_of_the_head_or_not(name, tied):
    with Wide():
        model = family(name, tie_word_embeddings=tied)
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
        assert off(model, LENGTHS, one_gpu_plan(LENGTHS, FORWARD, BACKWARD, recompute="full")) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gemma3_text", "gpt_oss", "gpt_neox", "qwen3_moe", "deepseek_v3"]
)
def test_gradients_in_fewer_bits_are_as_near_to_float64_as_those_of_the_uncut_model(name, dtype):
    lengths, tokens = [90, 38], tokens_of([90, 38])
    plan = one_gpu_plan(lengths, [[(0, 0, 50)], [(0, 50, 90), (1, 0, 38)]], recompute="full")
    # Each expert is chosen always: in few bits a cut may choose another, and nothing is to compare.
    every = {"num_experts_per_tok": 4} if name in ("gpt_oss", "qwen3_moe", "deepseek_v3") else {}
    model = family(name, dtype, **every)
    with Wide():
        exact = family(name, **every)
        exact.load_state_dict(model.state_dict())
        true = uncut(exact, tokens, lengths, "by_scores")[1]
    whole = uncut(model, tokens, lengths, "by_scores")[1]

    run_step(model, tokens, plan)

    found = take_gradients(model)
    size = torch.stack([x.norm() for x in true.values()]).norm()
    ours, theirs = (
        torch.stack([(x[name].double() - known).norm() for name, known in true.items()]).norm() / size
        for x in (found, whole)
    )
    assert ours < 1.5 * theirs + torch.finfo(dtype).eps / 4


def test_positions_by_the_length_of_a_text_are_those_of_the_whole_document():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 10,
    }
    plan = one_gpu_plan(
        [30, 7],
        [[(0, 0, 6)], [(0, 6, 30), (1, 0, 7)]],
        [[(1, 0, 7), (0, 4, 30)], [(0, 0, 4)]],
        recompute="full",
    )
    with Wide():
        model = family("phi3", rope_parameters=rope, original_max_position_embeddings=10)
        assert off(model, [30, 7], plan) < 1e-12


def test_logits_are_multiplied_and_then_capped_in_both_passes():
    parts = replace(DecoderParts.of(family("llama")), logits=Logits(factor=0.3, cap=0.9))
    made = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 5, 32, dtype=torch.float64, generator=made).requires_grad_()
    labels, weights = torch.tensor([3, 9, -100, 0, 60]), torch.tensor([0.5, 1.0, 0.0, 2.0, 0.1]).double()
    logits = 0.9 * torch.tanh(parts.head(parts.norm(hidden[0])) * 0.3 / 0.9)
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    (wanted * weights).sum().backward()
    by_head = parts.head.weight.grad
    parts.head.weight.grad = None

    losses, gradient = parts.head_backward(hidden.detach(), Targets(labels), lambda _, some: weights[some])

    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-7, atol=1e-12)  # the norm is in float32
    torch.testing.assert_close(parts.head.weight.grad, by_head, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "rows"), [("gemma2", HEAD_ROWS // 2), ("granite", HEAD_ROWS)])
def test_few_logits_are_there_at_once_whatever_becomes_of_them(name, rows):
    model, length, vocabulary = family(name, torch.float32, vocab_size=2048), 3 * HEAD_ROWS, 2048
    model.train(False)
    parts = DecoderParts.of(model)
    weights = torch.ones(length)
    given = (
        torch.zeros(1, length, 32),
        Targets(torch.zeros(length, dtype=torch.long)),
        lambda _, some: weights[some],
    )
    parts.head_backward(*given)

    with TrackedBytes() as meter:
        parts.head_backward(*given)

    buffers = 2 if name == "gemma2" else 1
    assert meter.peak < 1.3 * rows * vocabulary * 4 * buffers


@pytest.mark.parametrize("name", [*RECURRENT, *OWN_ATTENTION])
def test_other_families_are_refused_by_name_and_told_why(name):
    model = SimpleNamespace(config=SimpleNamespace(model_type=name))
    reason = {
        True: "carry a state from token to token",
        False: "so no function of transformers' registry can take its place",
    }[name in RECURRENT]

    with pytest.raises(ModelError, match=f"^slices don't run {name} models.*{reason}"):
        DecoderParts.of(model)


def test_a_recurrent_model_is_refused_before_anything_of_it_changes():
    model = tiny("mamba", state_size=4)
    with pytest.raises(ModelError, match="slices don't run mamba models: some of their layers carry a state"):
        run_step(model, tokens_of([8]), one_gpu_plan([8], [[(0, 0, 8)]]))
    assert model.config._attn_implementation != "varlen_slices"


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        ("gpt_neox", {"hidden_dropout": 0.1}, r"\(gpt_neox.emb_dropout.p=0.1; 5 such settings in all\)"),
        (
            "llama",
            {"attention_dropout": 0.25},
            r"\(model.layers.0.self_attn.attention_dropout=0.25; 2 such settings in all\)",
        ),
        ("phi", {"embd_pdrop": 0.1}, r"\(model.embed_dropout.p=0.1; 1 such"),
        ("starcoder2", {"residual_dropout": 0.1, "embedding_dropout": 0.0}, "residual_dropout=0.1; 4 such"),
        ("mixtral", {"router_jitter_noise": 0.02}, "jitter_noise=0.02; 2 such .* would draw others"),
        (
            "mixtral",
            {"output_router_logits": True},
            r"balances its experts \(output_router_logits=True, router_aux",
        ),
        ("gpt_oss", {"output_router_logits": True}, "set output_router_logits=False"),
    ],
)
def test_what_training_adds_at_random_or_over_a_batch_is_refused_and_evaluation_runs(name, setting, words):
    model, plan = tiny(name, **{**SETTINGS.get(name, {}), **setting}), one_gpu_plan([8], [[(0, 0, 8)]])

    with pytest.raises(ModelError, match=words):
        run_step(model, tokens_of([8]), plan)
    assert model.config._attn_implementation != "varlen_slices"
    run_step(model.eval(), tokens_of([8]), plan)


def test_settings_under_which_slices_would_learn_something_else_are_refused():
    plan = one_gpu_plan([8], [[(0, 0, 8)]])
    both_ways = family("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="this gemma3_text model attends to later tokens"):
        run_step(both_ways, tokens_of([8]), plan)
    moving = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ModelError, match=r'depend on the longest text it has seen \(rope_type="dynamic"\)'):
        run_step(moving, tokens_of([8]), plan)


def test_a_balancing_loss_of_weight_0_is_no_loss():
    with Wide():
        model = family("mixtral", output_router_logits=True, router_aux_loss_coef=0.0)
        assert off(model, LENGTHS, one_gpu_plan(LENGTHS, FORWARD)) < 1e-12


CAST_LENGTHS = [50, 7, 24]
CAST_FORWARD: list[list[Slice]] = [[(0, 0, 21), (1, 0, 7)], [(0, 21, 33), (0, 33, 50)], [(2, 0, 24)]]
APART: list[list[Slice]] = [[(2, 9, 24), (0, 30, 50)], [(2, 0, 9), (0, 8, 30)], [(1, 0, 7), (0, 0, 8)]]
Gradients = dict[str, torch.Tensor]


def half() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def whole(model: Any, autocast: Callable[[], Any] | None) -> tuple[float, Gradients]:
    """The uncut model, its forward pass alone under autocast."""
    model.set_attn_implementation("sdpa")
    targets, total = sum(CAST_LENGTHS) - len(CAST_LENGTHS), 0.0
    for document in torch.split(tokens_of(CAST_LENGTHS), CAST_LENGTHS):
        with autocast() if autocast else torch.enable_grad():
            logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total, take_gradients(model)


def sliced(model: Any, plan: StepPlan, **settings: Any) -> tuple[float, Gradients]:
    with half():
        run = run_step(model, tokens_of(CAST_LENGTHS), plan, **settings)
    return run.loss, take_gradients(model)


def distances_of(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """How far each gradient is from another, relative to it."""
    assert found.keys() == wanted.keys()
    return {name: float((found[name] - x).norm() / x.norm()) for name, x in wanted.items()}


def check(model: Any, *plans: StepPlan, **settings: Any) -> None:
    """Require slices to be as far from exact gradients as the uncut model is, and as near to the uncut model."""
    loss, exact = whole(model, None)
    rounded_loss, rounded = whole(model, half)
    wanted = distances_of(rounded, exact)
    for plan in plans:
        found_loss, found = sliced(model, plan, **settings)

        assert {x.dtype for x in found.values()} == {torch.float32}
        assert abs(found_loss - loss) < 3 * abs(rounded_loss - loss) + 1e-3 * loss
        for name, distance in distances_of(found, exact).items():
            assert 0.3 * wanted[name] < distance < 2 * wanted[name] + 1e-3, name
        for name, distance in distances_of(found, rounded).items():
            assert distance < 2 * wanted[name] + 1e-3, name


def plans_of(recompute: Any) -> list[StepPlan]:
    alike = one_gpu_plan(CAST_LENGTHS, CAST_FORWARD, recompute=recompute)
    tasks = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    later = one_gpu_plan(CAST_LENGTHS, CAST_FORWARD, recompute=recompute, splits_backward=True, tasks=tasks)
    return [alike, later] + (
        [one_gpu_plan(CAST_LENGTHS, CAST_FORWARD, APART, recompute="full")] if recompute == "full" else []
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_slices_round_as_the_uncut_model_does(recompute):
    check(tiny("llama", torch.float32, num_hidden_layers=3), *plans_of(recompute))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt_neox", {}),
        ("phi3", {}),
    ],
)
def test_windows_biases_and_tied_weights_round_so_too(name, settings):
    check(family(name, torch.float32, **settings), plans_of("full")[-1])


def test_rows_that_wait_elsewhere_round_so_too():
    plan = replace(plans_of("full")[-1], offload="kv")

    check(tiny("llama", torch.float32, num_hidden_layers=4), plan, saved="stage")


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_cast_without_a_graph_is_kept_where_it_does_no_harm(monkeypatch, keeps):
    model, seen = tiny("llama", torch.float32), set()
    monkeypatch.setattr(casting, "_casts_keep_graphs", lambda: keeps)
    model.model.layers[0].register_forward_pre_hook(
        lambda *_: seen.add((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
    )

    sliced(model, plans_of("full")[0])

    assert seen == {(True, True), (False, keeps)}


def test_backward_passes_run_without_it():
    model, seen = tiny("llama", torch.float32), {}
    for name, parameter in model.named_parameters():
        if ".layers." in name or ".norm." in name:  # the ends' gradients come without hooks
            parameter.register_hook(
                lambda _, name=name: seen.update({name: torch.is_autocast_enabled("cpu")})
            )

    sliced(model, plans_of("full")[0])

    assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.weight"} <= seen.keys()
    assert not any(seen.values())


@pytest.mark.parametrize("rules", [LayerRules(0.3), LayerRules(0.3, window=3), LayerRules(0.3, softcap=2.0)])
def test_attention_takes_its_dtype_and_rounds_nowhere_else(rules):
    made = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 12, 8, generator=made, requires_grad=True) for _ in range(3)]
    layer = torch.nn.Identity()
    layer.layer_idx = 0  # type: ignore[assignment]
    settings = {"scaling": rules.scale, "sliding_window": rules.window, "softcap": rules.softcap}
    found = []
    for tensors, autocast in ((given, half()), ([x.bfloat16() for x in given], nullcontext())):
        piece = CachedSlice(cache=DocumentCache(12), start=0, stop=12)
        with autocast:
            out, _ = slice_attention(layer, *tensors, None, slices=[piece], **settings)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), given)))

    assert found[0][0].dtype == torch.bfloat16
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_float64_stays_exact_under_autocast():
    model, plan = tiny("llama"), plans_of("full")[-1]

    _, found = sliced(model, plan)

    assert largest(distances_of(found, whole(model, None)[1]).values()) < 1e-12


def test_the_engine_trains_under_autocast():
    model = tiny("llama", torch.float32)
    documents = [x.int().numpy() for x in torch.split(tokens_of(CAST_LENGTHS), CAST_LENGTHS)]
    batch = vl.collate(documents, vl.pack(CAST_LENGTHS, capacity=64))
    _, wanted = whole(model, half)

    with half():
        vl.SliceEngine(model, slice_tokens=16).step(batch)

    found = take_gradients(model)
    assert max(distances_of(found, wanted).values()) < 0.02
