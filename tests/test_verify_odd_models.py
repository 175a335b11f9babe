"""vl.verify on models that leak in one place only, compute in another dtype, waver, or lack what others have."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import SMALL, make
from rarely import mostly
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, MixtralConfig

import varlen as vl
from varlen.verify.batches.isolation import ONE_A_ROW
from varlen.verify.models.isolation import Movements, judge
from varlen.verify.models.loading import tiny_model


def llama(dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    return make(LlamaConfig(**SMALL), attention, dtype)


def changed(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change what the second layer's MLP gives."""
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: change(plain(hidden))
    return model


def first_cell(model: Any, backend: str = "sdpa", layout: Any = "rows", **settings: Any) -> Any:
    return vl.verify(model, backends=[backend], layouts=[layout], calls=False, **settings).cells[0]


class Backward(torch.autograd.Function):
    """Hands something else back than its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, change: Any) -> torch.Tensor:
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.change(gradients[0]), None


@pytest.mark.parametrize(
    "dtype",
    mostly([torch.float64, torch.bfloat16], [torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_backward_that_leaks_is_found_to_the_last_bit_although_the_forward_does_not(
    dtype: torch.dtype,
) -> None:
    def to_the_token_before(gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1e-2 * gradient.roll(-1, 1)

    clean = first_cell(llama(dtype))
    leaking = first_cell(changed(llama(dtype), lambda x: Backward.apply(x, to_the_token_before)))

    assert clean.verdict == "isolated", clean.reason
    assert clean.gradients.across == 0
    assert leaking.isolation.verdict == "isolated"
    assert leaking.verdict == "leaks"
    assert "has a gradient at the tokens of another" in leaking.reason


def test_a_backward_that_is_wrong_within_its_document_is_found() -> None:
    cell = first_cell(changed(llama(), lambda x: Backward.apply(x, lambda g: g * (1 + 0.1 * (len(g) > 1)))))

    assert cell.gradients.across == 0
    assert cell.verdict == "leaks"
    assert "gradients differ by" in cell.reason
    assert cell.gradients.worst.startswith("model.")


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_a_leak_into_the_next_token_is_found_however_small(size: float, layout: Any) -> None:
    cell = first_cell(changed(llama(), lambda x: x + size * x.roll(1, 1)), layout=layout)

    assert cell.verdict == "leaks"
    assert "changing one document moved another's logits" in cell.reason


def test_a_leak_out_of_long_documents_alone_is_found() -> None:
    def from_behind(x: torch.Tensor) -> torch.Tensor:
        moved = x.clone()
        moved[:, 25:] += 0.1 * x[:, :-25]  # reaches across documents only where they are far apart
        return moved

    assert first_cell(changed(llama(), from_behind)).verdict == "leaks"


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_mean_over_the_batch_is_coupled_in_either_layout(layout: Any) -> None:
    cell = first_cell(changed(llama(), lambda x: x + 0.1 * x.mean((0, 1))), layout=layout)

    assert cell.verdict == "coupled", cell.reason


@pytest.mark.parametrize("backend", ["eager", "sdpa", "varlen"])
def test_autocast_is_judged_by_the_dtype_that_is_computed_in(backend: str) -> None:
    model = llama()
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*args, **kwargs)

    model.forward = forward
    model.forward.__signature__ = __import__("inspect").signature(plain)
    cell = first_cell(model, backend)

    assert cell.isolation.computed_in is torch.bfloat16
    assert cell.verdict == "isolated", cell.reason
    assert first_cell(llama(), backend).isolation.computed_in is torch.float32


@pytest.mark.parametrize("dtype", mostly([torch.bfloat16], [torch.bfloat16, torch.float16]))
def test_half_precision_is_isolated_and_not_so_coarse_that_a_leak_passes(dtype: torch.dtype) -> None:
    assert first_cell(llama(dtype)).verdict == "isolated"
    assert first_cell(llama(dtype), "varlen").verdict == "isolated"
    assert first_cell(changed(llama(dtype), lambda x: x + 0.05 * x.roll(1, 1))).verdict == "leaks"


def test_a_model_that_answers_otherwise_a_second_time_is_not_judged() -> None:
    dropping = changed(llama(), lambda x: torch.nn.functional.dropout(x, 0.1, training=True))
    cell = first_cell(dropping)

    assert cell.verdict == "not run"
    assert "gives other logits a second time" in cell.reason


def test_gradients_that_boundaries_do_not_change_prove_nothing() -> None:
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=1)
    two = make(GPT2Config(**config.to_dict() | {"n_positions": 2}), "sdpa", torch.float32)
    gradients = first_cell(two).gradients

    assert gradients.difference is None
    assert gradients.reason.startswith("blind: without boundaries gradients differ by")


def test_experts_move_nothing_in_float64_and_a_small_leak_among_them_is_found() -> None:
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    clean = first_cell(make(config, "sdpa", torch.float64))
    leaking = make(config, "sdpa", torch.float64)
    attention = leaking.model.layers[1].post_attention_layernorm
    plain = attention.forward
    attention.forward = lambda x: plain(x) + 1e-9 * plain(x).roll(1, 1)

    assert clean.verdict == "isolated", clean.reason
    assert clean.isolation.rounding == 0
    assert clean.isolation.movements.largest_difference == 0
    assert first_cell(leaking).verdict == "leaks"


@pytest.mark.parametrize(
    ("dtype", "weight"),
    mostly(
        [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
        product((torch.float32, torch.bfloat16), (2e-2, 1e-5)),
    ),
)
def test_a_routers_loss_is_seen_however_small_and_in_any_dtype(dtype: torch.dtype, weight: float) -> None:
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    config.output_router_logits, config.router_aux_loss_coef = True, weight

    assert first_cell(make(config, "eager", dtype), "varlen").verdict == "coupled"
    config.router_aux_loss_coef = 0.0
    assert first_cell(make(config, "eager", dtype), "varlen").verdict == "isolated"


class Bare(LlamaForCausalLM):
    """A user's own model, whose forward takes the least."""

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:  # type: ignore[override]
        hidden = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=self.lm_head(hidden.last_hidden_state))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_model_of_ones_own_needs_no_labels_no_cache_and_no_weights_of_attention(backend: str) -> None:
    torch.manual_seed(0)
    model = Bare._from_config(LlamaConfig(**SMALL), attn_implementation=backend).eval()
    report = vl.verify(model, backends=[backend])

    assert report.ok, str(report)
    assert report.attention is None
    assert report.cells[0].own_loss is None
    verdicts = {cell.call: cell.verdict for cell in report.calls}
    assert verdicts["position_ids, use_cache=False"] == "isolated"
    assert verdicts["position_ids, attention_mask of ones"] == "leaks"


def test_slots_that_are_rounded_up_can_be_tried_in_every_way() -> None:
    rng = np.random.default_rng(0)
    lengths = [9, 21, 1, 13]
    packing = vl.pack(lengths, capacity=32, document_multiple_of=8)
    batch = vl.collate([rng.integers(0, 97, n) for n in lengths], packing)
    report = vl.verify(llama(attention="eager"), backends=["eager", "varlen"], batch=batch)

    assert report.ok, str(report)
    told = [cell for cell in report.calls if "cu_seq_lens" in cell.call]
    assert {cell.verdict for cell in told} == {"isolated"}


def test_documents_that_would_change_the_rope_of_all_others_are_told() -> None:
    config = LlamaConfig(**SMALL)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    notes = vl.verify(
        make(config, "eager", torch.float32), backends=["eager"], layouts=["rows"], calls=False
    ).notes

    assert any("change the rope of all others in their batch" in note for note in notes)


def test_where_positions_alone_leak_no_cache_is_blamed() -> None:
    report = vl.verify("falcon", backends=["eager"], layouts=["rows"])

    whys = {cell.call: (cell.kind, cell.fix) for cell in report.leaks}
    assert whys["position_ids, use_cache=True"] == whys["position_ids, use_cache=False"]
    assert whys["position_ids, use_cache=True"][0] == "model_family"


def test_nobody_is_told_to_use_what_refuses_the_model() -> None:
    report = vl.verify("mamba", backends=["eager", "varlen"], layouts=["rows"])

    assert {cell.verdict for cell in report.cells} == {"refuses"}
    assert len(report.leaks) == len(report.calls)
    assert {(cell.why, cell.fix) for cell in report.leaks} == {(report.cells[0].reason, ONE_A_ROW)}


def test_masks_of_different_kinds_are_explained_one_by_one() -> None:
    text = str(vl.verify("llama", backends=["eager", "sdpa"], gradients=False))

    assert (
        "attention_mask of ones; attention_mask 0 at padding (eager, sdpa): attention_mask is all ones"
        in text
    )
    assert "attention_mask of numbers (eager, sdpa): attention_mask numbers segments" in text


def test_the_reason_of_a_refused_attention_is_that_of_making_the_model_with_it() -> None:
    cell = first_cell("falcon", "flex_attention")

    assert cell.verdict == "refuses"
    assert "flex" in cell.reason
    assert "make it with" not in cell.reason


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(vl.VarlenError, match="seed must be at least 0, got -1"):
        vl.verify("llama", seed=-1)


def test_the_callers_random_state_stays_when_a_model_is_copied() -> None:
    model = tiny_model("falcon", attention="sdpa")
    before = torch.get_rng_state()
    vl.verify(model, backends=["eager"], layouts=["rows"], calls=False)

    assert torch.equal(torch.get_rng_state(), before)


MOVED = Movements(changed_documents=2, own_difference=1.0, control_difference=0.5, largest_difference=0.1)


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({"row_coupling": None}, "leaks"),
        ({"row_coupling": 0.0}, "leaks"),
        ({"row_coupling": 0.05}, "coupled"),
        ({"row_coupling": 0.03}, "leaks"),
        ({"row_coupling": 0.05, "attention_across": 0.1}, "leaks"),
        ({"row_coupling": 0.05, "attention_across": 0.0}, "coupled"),
        ({"row_coupling": 0.05, "padding_difference": 1.0}, "leaks"),
    ],
)
def test_a_movement_is_coupled_only_where_rows_move_each_other_as_far(
    more: dict[str, Any], verdict: str
) -> None:
    import dataclasses

    assert judge(dataclasses.replace(MOVED, **more), tolerance=1e-5)[0] == verdict
