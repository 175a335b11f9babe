"""model_inputs over code of one's own, wherever it stands: in heads, in modules, in libraries' classes, in hooks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module
from tests.adapters.hf.heads import TOLERANCE, batch_of, furthest_from_alone, tiny_class
from tests.adapters.hf.test_heads import TokenWise, made
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from varlen.adapters import hf
from varlen.errors import ModelError


class BesideOthers(TokenWise):
    """What a head may do by the rest of a row, which one changed token of a short row doesn't show."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(1)

    def forward(self, input_ids: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        logits = super().forward(input_ids=input_ids, position_ids=position_ids, **rest).logits
        return CausalLMOutput(logits=self.changed(logits))


class ByWidth(BesideOthers):
    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / logits.shape[1]


class ByPlace(BesideOthers):
    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * (1 + torch.arange(logits.shape[1]).to(logits))[None, :, None]


class FarBack(BesideOthers):
    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([logits[:, :8], logits[:, 8:] + logits[:, :-8]], 1)


class InTraining(BesideOthers):
    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        return logits - logits.mean(1, keepdim=True) * self.training


class Statistics(BesideOthers):
    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        return self.norm(logits.transpose(1, 2)).transpose(1, 2)


class ByChance(BesideOthers):
    """Acts on each token alone, in training by chance."""

    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(logits, 0.5, self.training)


@pytest.mark.parametrize("kind", [ByWidth, ByPlace, FarBack, InTraining, Statistics])
def test_heads_that_depend_on_the_rest_of_a_row_are_refused(kind: Any) -> None:
    with pytest.raises(ModelError, match=rf"mixes the tokens of a row in its head \({kind.__name__}\)"):
        hf.model_inputs(batch_of("rows")[1], made(kind))


def test_a_head_with_dropout_passes() -> None:
    assert furthest_from_alone(made(ByChance)) < TOLERANCE


class Mixed(nn.Module):
    """In the place of a layer's norm."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.change(hidden, self.training)


class Bigrams(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + super().forward(ids).roll(1, 1)


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2.0


def with_norm(change: Any) -> Any:
    model = made(LlamaForCausalLM)
    model.model.norm = Mixed(change)
    return model


def with_embedding(kind: Any) -> Any:
    model = made(LlamaForCausalLM)
    model.model.embed_tokens.__class__ = kind
    return model


def with_forward(wraps: bool, name: str = "model.layers.0.mlp") -> Any:
    """A model with a function of one's own in the place of a module's forward."""
    model = made(LlamaForCausalLM)
    module = model.get_submodule(name)
    before = module.forward

    def mixing(*args: Any, **rest: Any) -> Any:
        found = before(*args, **rest)
        found = getattr(found, "logits", found)
        return CausalLMOutput(logits=found + found.cumsum(1)) if not name else found + found.cumsum(1)

    module.forward = functools.update_wrapper(mixing, before) if wraps else mixing
    return model


def with_hook(name: str, hook: Any, *, before: bool = False) -> Any:
    model = made(LlamaForCausalLM)
    module = model.get_submodule(name)
    (module.register_forward_pre_hook if before else module.register_forward_hook)(hook)
    return model


OF_ONES_OWN = {
    "forward of a layer's part": lambda: with_forward(False),
    "forward that is named as another's": lambda: with_forward(True),
    "forward of the model": lambda: with_forward(True, ""),
    "forward of the head": lambda: with_forward(False, "lm_head"),
    "hook in a layer": lambda: with_hook("model.layers.0", lambda _, __, found: found + found.cumsum(1)),
    "hook before the head": lambda: with_hook(
        "lm_head", lambda _, given: (given[0].roll(1, 1),), before=True
    ),
    "embedding of neighbours": lambda: with_embedding(Bigrams),
    "norm by place": lambda: with_norm(
        lambda hidden, _: hidden + torch.arange(hidden.shape[1])[None, :, None]
    ),
    "norm by width": lambda: with_norm(lambda hidden, _: hidden / hidden.shape[1]),
    "norm in training": lambda: with_norm(lambda hidden, on: hidden - hidden.mean(1, keepdim=True) * on),
}


@pytest.mark.parametrize("name", OF_ONES_OWN)
def test_code_that_was_put_on_modules_is_unknown(name: str) -> None:
    with pytest.raises(ModelError, match=r"code of its own \(.*vl\.verify\(model\)"):
        hf.model_inputs(batch_of("rows")[1], OF_ONES_OWN[name]())


@pytest.mark.parametrize("put", ["forward", "_apply_gate"])
def test_code_that_was_put_on_a_librarys_class_is_unknown(put: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = modeling_mixtral.MixtralExperts if put == "_apply_gate" else modeling_llama.LlamaMLP
    before = getattr(kind, put)
    monkeypatch.setattr(kind, put, lambda self, *given: before(self, *given).cumsum(-2))
    family = "mixtral" if put == "_apply_gate" else "llama"
    model = tiny_class(family, f"{family.title()}ForCausalLM", is_decoder=True)

    with pytest.raises(ModelError, match=rf"code of its own \({kind.__name__} in"):
        hf.model_inputs(batch_of("rows")[1], model)


def test_a_part_of_a_librarys_class_that_is_replaced_in_a_subclass_is_unknown() -> None:
    class Gated(modeling_mixtral.MixtralExperts):  # type: ignore[misc]
        def _apply_gate(self, *given: Any) -> Any:
            return super()._apply_gate(*given).cumsum(0)

    model = tiny_class("mixtral", "MixtralForCausalLM", is_decoder=True)
    model.model.layers[0].mlp.experts.__class__ = Gated

    with pytest.raises(ModelError, match=r"code of its own \(Gated in"):
        hf.model_inputs(batch_of("rows")[1], model)


class WithHelpers(LlamaForCausalLM):  # type: ignore[misc]
    """Of one's own, with methods that no call runs."""

    def prepare_inputs_for_generation(self, *args: Any, **rest: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **rest)

    def training_step(self, batch: Any) -> Any:
        return batch


def watched() -> Any:
    seen: list[Any] = []

    def keep(_: Any, __: Any, found: Any) -> None:
        seen.append(found)

    return with_hook("model.layers.0", keep)


def of_accelerate() -> Any:
    model = made(LlamaForCausalLM)
    add_hook_to_module(model.model.layers[0], ModelHook())
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize(
    "make", [watched, of_accelerate, lambda: made(WithHelpers), lambda: with_embedding(Scaled)]
)
def test_what_changes_no_answer_of_a_token_passes(make: Any) -> None:
    assert furthest_from_alone(make()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LlamaForCausalLM", None),
        ("LlamaForTokenClassification", None),
        ("LlamaForSequenceClassification", "pools"),
    ],
)
def test_fully_sharded_models_are_judged_as_what_they_were(
    name: str, words: str | None, tmp_path: Any
) -> None:
    model = tiny_class("llama", name, is_decoder=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for part in (model.model.layers[0], model):
            fully_shard(part)
        if words is None:
            assert furthest_from_alone(model) < TOLERANCE
        else:
            with pytest.raises(ModelError, match=words):
                hf.model_inputs(batch_of("rows")[1], model)
    finally:
        dist.destroy_process_group()
