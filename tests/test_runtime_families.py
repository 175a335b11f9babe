"""Every family of the table has the gradients of its uncut model in slices; the others are refused, and told why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distances import largest
from hypothesis import given
from rarely import examples
from sliced import Slice, one_gpu_plan, plans, take_gradients, tiny, tokens_of, uncut
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from varlen.errors import ModelError
from varlen.model_families import FAMILIES
from varlen.runtime.clock import TrackedBytes
from varlen.runtime.decoder import HEAD_ROWS, SLICED, DecoderParts, Logits
from varlen.runtime.step import run_step

RECURRENT = [name for name, family in FAMILIES.items() if family.is_recurrent]
OWN_ATTENTION = [name for name, family in FAMILIES.items() if family.has_own_attention]


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "experts_implementation": "eager",
}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3, **BOTH},
    "cwm": BOTH,
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "experts_implementation": "eager",
    },
    "dots1": {
        **EXPERTS,
        **BOTH,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "exaone4": BOTH,
    "flex_olmo": EXPERTS,
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9, **BOTH},
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 0.9, **BOTH},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {
        **EXPERTS,
        "head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": {**LOCAL_EXPERTS, **BOTH, "head_dim": 8},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.7,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "granitemoe": {**LOCAL_EXPERTS, "embedding_multiplier": 3.0, "logits_scaling": 0.7},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ministral": {"head_dim": 8, **BOTH},
    "mistral": {"sliding_window": 9},
    "mixtral": {**LOCAL_EXPERTS, "sliding_window": 7},
    "olmo3": BOTH,
    "olmoe": EXPERTS,
    "phi3": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, **BOTH},
    "qwen2_moe": EXPERTS,
    "qwen3": {"head_dim": 16},
    "qwen3_moe": EXPERTS,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0, "head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 7},
    "vaultgemma": {"head_dim": 8, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9, **BOTH},
    "youtu": LATENT,
}
"""What makes a tiny model of each family use all that sets it apart."""


class Wide(TorchFunctionMode):
    """What a float64 model computes in float32, norms and positions among it, it computes in float64 here.

    Else its rounding, and not how it is cut, is what a test would see.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = [torch.float64 if x is torch.float32 else x for x in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*wide, **named)


def by_scores(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as papers write it, with transformers' own mask: windows and causality are the model's word."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask[..., : scores.shape[-1]]
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2), None


AttentionInterface.register("by_scores", by_scores)
AttentionMaskInterface.register("by_scores", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def family(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A tiny model with random weights in all its parameters."""
    model = tiny(name, dtype, **{**SETTINGS.get(name, {}), **more})
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=made, dtype=torch.float64).to(dtype)
    return model


def off(model: Any, lengths: list[int], plan: Any) -> float:
    """The largest relative error of a gradient of the sliced model, of the largest norm of all."""
    tokens = tokens_of(lengths)
    loss, wanted = uncut(model, tokens, lengths, "by_scores")
    run = run_step(model, tokens, plan)
    found = take_gradients(model)
    assert found.keys() == wanted.keys()
    assert run.num_targets == sum(length - 1 for length in lengths)
    errors = [abs(run.loss - loss) / loss]
    for name, gradient in found.items():
        size = wanted[name].norm()
        errors.append(((gradient - wanted[name]).norm() / size).item() if size else gradient.norm().item())
    return largest(errors)


LENGTHS = [30, 7, 1, 4]
FORWARD: list[list[Slice]] = [[(0, 0, 13)], [(0, 13, 21), (1, 0, 7)], [(0, 21, 30), (2, 0, 1), (3, 0, 4)]]
BACKWARD: list[list[Slice]] = [[(3, 0, 4), (1, 3, 7), (0, 17, 30)], [(2, 0, 1), (1, 0, 3), (0, 0, 17)]]


@pytest.mark.parametrize("name", SLICED)
def test_a_family_in_slices_has_the_gradients_of_its_uncut_model(name: str) -> None:
    with Wide():
        model = family(name)
        assert off(model, LENGTHS, one_gpu_plan(LENGTHS, FORWARD)) < 1e-12
        cut_apart = one_gpu_plan(LENGTHS, FORWARD, BACKWARD, recompute="full")
        assert off(model, LENGTHS, cut_apart) < 1e-12


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "deepseek_v3"])
@given(case=plans())
@examples(3, 6)
def test_any_cut_of_either_pass_gives_a_family_the_same_gradients(name: str, case: Any) -> None:
    with Wide():
        assert off(family(name), *case) < 1e-12


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gemma2", "granite", "qwen3", "cohere", "gpt_neox", "olmo2"])
def test_embeddings_may_be_those_of_the_head_or_not(name: str, tied: bool) -> None:
    with Wide():
        model = family(name, tie_word_embeddings=tied)
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
        assert off(model, LENGTHS, one_gpu_plan(LENGTHS, FORWARD, BACKWARD, recompute="full")) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "gpt_oss", "gpt_neox", "qwen3_moe"])
def test_gradients_in_fewer_bits_are_as_near_to_float64_as_those_of_the_uncut_model(
    name: str, dtype: torch.dtype
) -> None:
    lengths, tokens = [90, 38], tokens_of([90, 38])
    plan = one_gpu_plan(lengths, [[(0, 0, 50)], [(0, 50, 90), (1, 0, 38)]], recompute="full")
    # Each expert is chosen always: in few bits a cut may choose another, and nothing is to compare.
    model = family(name, dtype, **({"num_experts_per_tok": 4} if name in ("gpt_oss", "qwen3_moe") else {}))
    with Wide():
        exact = family(name, **({"num_experts_per_tok": 4} if name in ("gpt_oss", "qwen3_moe") else {}))
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


def test_positions_by_the_length_of_a_text_are_those_of_the_whole_document() -> None:
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


def test_logits_are_multiplied_and_then_capped_in_both_passes() -> None:
    parts = replace(DecoderParts.of(family("llama")), logits=Logits(factor=0.3, cap=0.9))
    made = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 5, 32, dtype=torch.float64, generator=made).requires_grad_()
    labels, weights = torch.tensor([3, 9, -100, 0, 60]), torch.tensor([0.5, 1.0, 0.0, 2.0, 0.1]).double()
    logits = 0.9 * torch.tanh(parts.head(parts.norm(hidden[0])) * 0.3 / 0.9)
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    (wanted * weights).sum().backward()
    by_head = parts.head.weight.grad
    parts.head.weight.grad = None

    losses, gradient = parts.head_backward(hidden.detach(), labels, weights)

    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-7, atol=1e-12)  # the norm is in float32
    torch.testing.assert_close(parts.head.weight.grad, by_head, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "rows"), [("gemma2", HEAD_ROWS // 2), ("granite", HEAD_ROWS)])
def test_few_logits_are_there_at_once_whatever_becomes_of_them(name: str, rows: int) -> None:
    model, length, vocabulary = family(name, torch.float32, vocab_size=2048), 3 * HEAD_ROWS, 2048
    model.train(False)
    parts = DecoderParts.of(model)
    given = (torch.zeros(1, length, 32), torch.zeros(length, dtype=torch.long), torch.ones(length))
    parts.head_backward(*given)

    with TrackedBytes() as meter:
        parts.head_backward(*given)

    buffers = 2 if name == "gemma2" else 1
    assert meter.peak < 1.3 * rows * vocabulary * 4 * buffers


@pytest.mark.parametrize("name", [*RECURRENT, *OWN_ATTENTION, "unheard_of"])
def test_other_families_are_refused_by_name_and_told_why(name: str) -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type=name))
    reason = {
        True: "hand a state on from token to token",
        False: "so no function of transformers' registry can take its place",
    }[name in RECURRENT]
    reason = (
        "aren't known to mix tokens in their attention alone; they run apertus, "
        if name == "unheard_of"
        else reason
    )

    with pytest.raises(ModelError, match=f"^slices don't run {name} models.*{reason}"):
        DecoderParts.of(model)


def test_a_recurrent_model_is_refused_before_anything_of_it_changes() -> None:
    model = tiny("mamba", state_size=4)
    with pytest.raises(
        ModelError, match="slices don't run mamba models: some of their layers hand a state on"
    ):
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
def test_what_training_adds_at_random_or_over_a_batch_is_refused_and_evaluation_runs(
    name: str, setting: dict[str, Any], words: str
) -> None:
    model, plan = tiny(name, **{**SETTINGS.get(name, {}), **setting}), one_gpu_plan([8], [[(0, 0, 8)]])

    with pytest.raises(ModelError, match=words):
        run_step(model, tokens_of([8]), plan)
    assert model.config._attn_implementation != "varlen_slices"
    run_step(model.eval(), tokens_of([8]), plan)


def test_settings_under_which_slices_would_learn_something_else_are_refused() -> None:
    plan = one_gpu_plan([8], [[(0, 0, 8)]])
    both_ways = family("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="this gemma3_text model attends to later tokens"):
        run_step(both_ways, tokens_of([8]), plan)
    moving = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ModelError, match=r'depend on the longest text it has seen \(rope_type="dynamic"\)'):
        run_step(moving, tokens_of([8]), plan)


def test_a_balancing_loss_of_weight_0_is_no_loss() -> None:
    with Wide():
        model = family("mixtral", output_router_logits=True, router_aux_loss_coef=0.0)
        assert off(model, LENGTHS, one_gpu_plan(LENGTHS, FORWARD)) < 1e-12
