"""Slices under autocast round as the uncut model does under it, wherever backward passes come between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.runtime.test_families import family
from tests.support.distances import largest
from tests.support.sliced import Slice, one_gpu_plan, take_gradients, tiny, tokens_of

import varlen as vl
from varlen.runtime import casting
from varlen.runtime.attention import CachedSlice, slice_attention
from varlen.runtime.flash import Rule
from varlen.runtime.kv_cache import DocumentCache
from varlen.runtime.step import run_step
from varlen.step_plan import StepPlan

LENGTHS = [50, 7, 24]
FORWARD: list[list[Slice]] = [[(0, 0, 21), (1, 0, 7)], [(0, 21, 33), (0, 33, 50)], [(2, 0, 24)]]
APART: list[list[Slice]] = [[(2, 9, 24), (0, 30, 50)], [(2, 0, 9), (0, 8, 30)], [(1, 0, 7), (0, 0, 8)]]
Gradients = dict[str, torch.Tensor]


def half() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def whole(model: Any, autocast: Callable[[], Any] | None) -> tuple[float, Gradients]:
    """The uncut model, its forward pass alone under autocast."""
    model.set_attn_implementation("sdpa")
    targets, total = sum(LENGTHS) - len(LENGTHS), 0.0
    for document in torch.split(tokens_of(LENGTHS), LENGTHS):
        with autocast() if autocast else torch.enable_grad():
            logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total, take_gradients(model)


def sliced(model: Any, plan: StepPlan, **settings: Any) -> tuple[float, Gradients]:
    with half():
        run = run_step(model, tokens_of(LENGTHS), plan, **settings)
    return run.loss, take_gradients(model)


def off(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """How far each gradient is from another, relative to it."""
    assert found.keys() == wanted.keys()
    return {name: float((found[name] - x).norm() / x.norm()) for name, x in wanted.items()}


def check(model: Any, *plans: StepPlan, **settings: Any) -> None:
    """Require slices to be as far from exact gradients as the uncut model is, and as near to the uncut model."""
    loss, exact = whole(model, None)
    rounded_loss, rounded = whole(model, half)
    wanted = off(rounded, exact)
    for plan in plans:
        found_loss, found = sliced(model, plan, **settings)

        assert {x.dtype for x in found.values()} == {torch.float32}
        assert abs(found_loss - loss) < 3 * abs(rounded_loss - loss) + 1e-3 * loss
        for name, distance in off(found, exact).items():
            assert 0.3 * wanted[name] < distance < 2 * wanted[name] + 1e-3, name
        for name, distance in off(found, rounded).items():
            assert distance < 2 * wanted[name] + 1e-3, name


def plans_of(recompute: Any) -> list[StepPlan]:
    alike = one_gpu_plan(LENGTHS, FORWARD, recompute=recompute)
    tasks = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    later = one_gpu_plan(LENGTHS, FORWARD, recompute=recompute, splits_backward=True, tasks=tasks)
    return [alike, later] + (
        [one_gpu_plan(LENGTHS, FORWARD, APART, recompute="full")] if recompute == "full" else []
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_slices_round_as_the_uncut_model_does(recompute: Any) -> None:
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
def test_windows_biases_and_tied_weights_round_so_too(name: str, settings: dict[str, Any]) -> None:
    check(family(name, torch.float32, **settings), plans_of("full")[-1])


def test_rows_that_wait_elsewhere_round_so_too() -> None:
    plan = replace(plans_of("full")[-1], offload="kv")

    check(tiny("llama", torch.float32, num_hidden_layers=4), plan, saved="stage")


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_cast_without_a_graph_is_kept_where_it_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    model, seen = tiny("llama", torch.float32), set()
    monkeypatch.setattr(casting, "_casts_keep_graphs", lambda: keeps)
    model.model.layers[0].register_forward_pre_hook(
        lambda *_: seen.add((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
    )

    sliced(model, plans_of("full")[0])

    assert seen == {(True, True), (False, keeps)}


def test_backward_passes_run_without_it() -> None:
    model, seen = tiny("llama", torch.float32), {}
    for name, parameter in model.named_parameters():
        if ".layers." in name or ".norm." in name:  # the ends' gradients come without hooks
            parameter.register_hook(
                lambda _, name=name: seen.update({name: torch.is_autocast_enabled("cpu")})
            )

    sliced(model, plans_of("full")[0])

    assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.weight"} <= seen.keys()
    assert not any(seen.values())


@pytest.mark.parametrize("rule", [Rule(0.3), Rule(0.3, window=3), Rule(0.3, cap=2.0)])
def test_attention_takes_its_dtype_and_rounds_nowhere_else(rule: Rule) -> None:
    made = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 12, 8, generator=made, requires_grad=True) for _ in range(3)]
    layer = torch.nn.Identity()
    layer.layer_idx = 0  # type: ignore[assignment]
    settings = {"scaling": rule.scale, "sliding_window": rule.window, "softcap": rule.cap}
    found = []
    for tensors, autocast in ((given, half()), ([x.bfloat16() for x in given], nullcontext())):
        piece = CachedSlice(cache=DocumentCache(12), start=0, stop=12)
        with autocast:
            out, _ = slice_attention(layer, *tensors, None, slices=[piece], **settings)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), given)))

    assert found[0][0].dtype == torch.bfloat16
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_float64_stays_exact_under_autocast() -> None:
    model, plan = tiny("llama"), plans_of("full")[-1]

    _, found = sliced(model, plan)

    assert largest(off(found, whole(model, None)[1]).values()) < 1e-12


def test_the_engine_trains_under_autocast() -> None:
    model = tiny("llama", torch.float32)
    documents = [x.int().numpy() for x in torch.split(tokens_of(LENGTHS), LENGTHS)]
    batch = vl.collate(documents, vl.pack(LENGTHS, capacity=64))
    _, wanted = whole(model, half)

    with half():
        vl.SliceEngine(model, slice_tokens=16).step(batch)

    found = take_gradients(model)
    assert max(off(found, wanted).values()) < 0.02
