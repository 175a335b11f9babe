"""Embedding and head are computed by their weights: what else is around them is run, or refused, never passed by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.test_engine import batch_of, documents_of
from tests.support.sliced import one_gpu_plan, take_gradients, tiny, tokens_of, uncut
from torch import nn

import varlen as vl
from varlen.errors import ModelError
from varlen.runtime.step import run_step

LENGTHS = [20, 9]


class LowRank(nn.Module):
    """What a low-rank adapter puts in the place of a module: what that gives, and a product that learns."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        outputs = getattr(base_layer, "out_features", getattr(base_layer, "embedding_dim", 0))
        self.adapter = nn.Parameter(torch.full((outputs,), 0.5, dtype=torch.float64))

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Any:
        return getattr(self.base_layer, "bias", None)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.base_layer(given) * self.adapter  # type: ignore[no-any-return]


class ModulesToSaveWrapper(nn.Module):
    """As peft's: a frozen module, and a copy that is used and learns."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})
        self.original_module = original.requires_grad_(False)

    def __getattr__(self, name: str) -> Any:
        if name in ("original_module", "modules_to_save") or name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self.modules_to_save["default"], name)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.modules_to_save["default"](given)  # type: ignore[no-any-return]


def head_is(wrap: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.lm_head = wrap(model.lm_head)

    return change


def embedding_is(wrap: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.embed_tokens = wrap(model.model.embed_tokens)

    return change


def doubled(head: nn.Linear) -> nn.Linear:
    forward = head.forward
    head.forward = lambda given: 2 * forward(given)  # type: ignore[method-assign]
    return head


def is_stepped(model: Any) -> None:
    for parameter in model.model.layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)


WAYS_TO_BE_PASSED_BY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an adapter of the head": (
        head_is(LowRank),
        r"the head of this llama model is a .*LowRank.*modules_to_save",
    ),
    "an adapter of the embedding": (
        embedding_is(LowRank),
        "the embedding of this llama model is a .*LowRank",
    ),
    "a head of a forward of its own": (head_is(doubled), "the head of .* computes more than its weight says"),
    "a head whose weight is computed": (
        lambda model: nn.utils.parametrizations.weight_norm(model.lm_head),
        "the head of .* computes more than its weight says",
    ),
    "a hook on logits": (
        lambda model: model.lm_head.register_forward_hook(lambda *given: given[2] / 2),
        "the head of this llama model has 1 hook on what it gives or on its gradient",
    ),
    "a hook on the embedding's gradient": (
        lambda model: model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * 0),
        "the embedding of this llama model has 1 hook",
    ),
    "what learns elsewhere": (
        lambda model: model.add_module("prompt", nn.Embedding(3, 32)),
        r"prompt\.weight stands outside of .* \(1 parameter that learns does\)",
    ),
    "an optimizer in the backward pass": (
        is_stepped,
        r"layers\.0\..* hook that runs .* \(18 parameters have one\)",
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_BE_PASSED_BY)
def test_what_a_step_would_pass_by_is_refused_before_anything_changes(way: str) -> None:
    change, words = WAYS_TO_BE_PASSED_BY[way]
    model = tiny("llama")
    before = model.config._attn_implementation
    change(model)

    with pytest.raises(ModelError, match=words):
        vl.SliceEngine(model, 8)

    assert model.config._attn_implementation == before


def test_what_is_added_after_an_engine_was_made_is_refused_too() -> None:
    model, batch = tiny("llama"), batch_of(documents_of(LENGTHS))
    engine = vl.SliceEngine(model, 8)
    model.lm_head = LowRank(model.lm_head)

    with pytest.raises(ModelError, match="the head of this llama model"):
        engine.step(batch)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_within_layers_and_copies_of_the_ends_learn_as_in_the_uncut_model(
    recompute: Any,
) -> None:
    model = tiny("llama")
    head_is(ModulesToSaveWrapper)(model)
    embedding_is(ModulesToSaveWrapper)(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("modules_to_save" in name)
    model.model.layers[1].mlp.down_proj = LowRank(model.model.layers[1].mlp.down_proj)
    tokens = tokens_of(LENGTHS)
    loss, wanted = uncut(model, tokens, LENGTHS)
    plan = one_gpu_plan(LENGTHS, [[(0, 0, 12)], [(0, 12, 20), (1, 0, 9)]], recompute=recompute)

    run = run_step(model, tokens, plan)
    found = take_gradients(model)

    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert sorted(found) == sorted(wanted)
    assert len(found) == 3
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() <= 1e-12 * wanted[name].norm(), name


def test_what_does_not_learn_and_hooks_that_are_run_are_no_reason_to_refuse() -> None:
    model, batch = tiny("llama"), batch_of(documents_of(LENGTHS))
    model.prompt = nn.Embedding(3, 32).requires_grad_(False)
    seen: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda *_: seen.append(1))
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(2))

    vl.SliceEngine(model, 8).step(batch)

    assert set(seen) == {1, 2}
