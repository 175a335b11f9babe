"""vl.verify on models that leak in one place only, in training alone, in gradients, or are of unusual make."""

import importlib.machinery
import importlib.util
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hf_models import SMALL, make
from tests.support.rarely import mostly
from torch.nn.attention import flex_attention
from transformers import (
    AutoModelForTokenClassification,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
)

import varlen as vl
from varlen.adapters import hf
from varlen.errors import ModelError
from varlen.verify.batches.isolation import ONE_A_ROW
from varlen.verify.models.backends import computed_in, kernels_of
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
def test_a_backward_that_leaks_is_found_to_the_last_bit_although_the_forward_does_not(dtype):
    def to_the_token_before(gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1e-2 * gradient.roll(-1, 1)

    clean = first_cell(llama(dtype))
    leaking = first_cell(changed(llama(dtype), lambda x: Backward.apply(x, to_the_token_before)))

    assert clean.verdict == "isolated", clean.reason
    assert clean.gradients.across == 0
    assert leaking.isolation.verdict == "isolated"
    assert leaking.verdict == "leaks"
    assert "has a gradient at the tokens of another" in leaking.reason


def test_a_backward_that_is_wrong_within_its_document_is_found():
    cell = first_cell(changed(llama(), lambda x: Backward.apply(x, lambda g: g * (1 + 0.1 * (len(g) > 1)))))

    assert cell.gradients.across == 0
    assert cell.verdict == "leaks"
    assert "gradients differ by" in cell.reason
    assert cell.gradients.worst.startswith("model.")


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_a_leak_into_the_next_token_is_found_however_small(size, layout):
    cell = first_cell(changed(llama(), lambda x: x + size * x.roll(1, 1)), layout=layout)

    assert cell.verdict == "leaks"
    assert "changing one document moved another's logits" in cell.reason


def test_a_leak_out_of_long_documents_alone_is_found():
    def from_behind(x: torch.Tensor) -> torch.Tensor:
        moved = x.clone()
        moved[:, 25:] += 0.1 * x[:, :-25]  # reaches across documents only where they are far apart
        return moved

    assert first_cell(changed(llama(), from_behind)).verdict == "leaks"


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_mean_over_the_batch_is_coupled_in_either_layout(layout):
    cell = first_cell(changed(llama(), lambda x: x + 0.1 * x.mean((0, 1))), layout=layout)

    assert cell.verdict == "coupled", cell.reason


@pytest.mark.parametrize("backend", ["eager", "sdpa", "varlen"])
def test_autocast_is_judged_by_the_dtype_that_is_computed_in(backend):
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
def test_half_precision_is_isolated_and_not_so_coarse_that_a_leak_passes(dtype):
    assert first_cell(llama(dtype)).verdict == "isolated"
    assert first_cell(llama(dtype), "varlen").verdict == "isolated"
    assert first_cell(changed(llama(dtype), lambda x: x + 0.05 * x.roll(1, 1))).verdict == "leaks"


def test_a_model_that_answers_otherwise_a_second_time_is_not_judged():
    dropping = changed(llama(), lambda x: torch.nn.functional.dropout(x, 0.1, training=True))
    cell = first_cell(dropping)

    assert cell.verdict == "not run"
    assert "gives other logits a second time" in cell.reason


def test_gradients_that_boundaries_do_not_change_prove_nothing():
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=1)
    two = make(GPT2Config(**config.to_dict() | {"n_positions": 2}), "sdpa", torch.float32)
    gradients = first_cell(two).gradients

    assert gradients.difference is None
    assert gradients.reason.startswith("blind: without boundaries gradients differ by")


def test_experts_move_nothing_in_float64_and_a_small_leak_among_them_is_found():
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
def test_a_routers_loss_is_seen_however_small_and_in_any_dtype(dtype, weight):
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
def test_a_model_of_ones_own_needs_no_labels_no_cache_and_no_weights_of_attention(backend):
    torch.manual_seed(0)
    model = Bare._from_config(LlamaConfig(**SMALL), attn_implementation=backend).eval()
    report = vl.verify(model, backends=[backend])

    assert report.ok, str(report)
    assert report.attention is None
    assert report.cells[0].own_loss is None
    verdicts = {cell.call: cell.verdict for cell in report.calls}
    assert verdicts["position_ids, use_cache=False"] == "isolated"
    assert verdicts["position_ids, attention_mask of ones"] == "leaks"


def test_slots_that_are_rounded_up_can_be_tried_in_every_way():
    rng = np.random.default_rng(0)
    lengths = [9, 21, 1, 13]
    packing = vl.pack(lengths, capacity=32, document_multiple_of=8)
    batch = vl.collate([rng.integers(0, 97, n) for n in lengths], packing)
    report = vl.verify(llama(attention="eager"), backends=["eager", "varlen"], batch=batch)

    assert report.ok, str(report)
    told = [cell for cell in report.calls if "cu_seq_lens" in cell.call]
    assert {cell.verdict for cell in told} == {"isolated"}


def test_documents_that_would_change_the_rope_of_all_others_are_told():
    config = LlamaConfig(**SMALL)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    notes = vl.verify(
        make(config, "eager", torch.float32), backends=["eager"], layouts=["rows"], calls=False
    ).notes

    assert any("change the rope of all others in their batch" in note for note in notes)


def test_where_positions_alone_leak_no_cache_is_blamed():
    report = vl.verify("opt", backends=["eager"], layouts=["rows"])

    whys = {cell.call: (cell.kind, cell.fix) for cell in report.leaks}
    assert whys["position_ids, use_cache=True"] == whys["position_ids, use_cache=False"]
    assert whys["position_ids, use_cache=True"][0] == "model_family"


def test_nobody_is_told_to_use_what_refuses_the_model():
    report = vl.verify("mamba", backends=["eager", "varlen"], layouts=["rows"])

    assert {cell.verdict for cell in report.cells} == {"refuses"}
    assert len(report.leaks) == len(report.calls)
    assert {(cell.why, cell.fix) for cell in report.leaks} == {(report.cells[0].reason, ONE_A_ROW)}


def test_masks_of_different_kinds_are_explained_one_by_one():
    text = str(vl.verify("llama", backends=["eager", "sdpa"], gradients=False))

    assert (
        "attention_mask of ones; attention_mask 0 at padding (eager, sdpa): attention_mask is all ones"
        in text
    )
    assert "attention_mask of numbers (eager, sdpa): attention_mask numbers segments" in text


def test_the_reason_of_a_refused_attention_is_that_of_making_the_model_with_it():
    cell = first_cell("falcon", "flex_attention")

    assert cell.verdict == "refuses"
    assert "flex" in cell.reason
    assert "make it with" not in cell.reason


def test_a_negative_seed_is_refused():
    with pytest.raises(vl.VarlenError, match="seed must be at least 0, got -1"):
        vl.verify("llama", seed=-1)


def test_the_callers_random_state_stays_when_a_model_is_copied():
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
def test_a_movement_is_coupled_only_where_rows_move_each_other_as_far(more, verdict):
    import dataclasses

    assert judge(dataclasses.replace(MOVED, **more), tolerance=1e-5)[0] == verdict


def test_a_wrong_gradient_is_found_where_all_gradients_are_small():
    def wrong_where_packed(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + 0.05 * (len(gradient) > 1))

    clean = first_cell(changed(llama(), lambda x: 1e-2 * x))
    cell = first_cell(changed(llama(), lambda x: 1e-2 * Backward.apply(x, wrong_where_packed)))

    assert clean.verdict == "isolated", clean.reason
    assert cell.verdict == "leaks"
    assert cell.gradients.worst.startswith(
        ("model.layers.1.mlp.", "model.layers.1.post_attention_layernorm.")
    )
    assert cell.gradients.difference == pytest.approx(0.05, rel=0.01)


@pytest.fixture
def forward_only() -> Iterator[Any]:
    """An operator without a backward, of which PyTorch only warns, and goes on."""
    library = torch.library.Library("varlen_tests", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: 2 * x, "CPU")
    yield torch.ops.varlen_tests.doubled
    library._destroy()


def test_an_operator_without_a_backward_is_told_and_not_compared(forward_only):
    cell = first_cell(changed(llama(), forward_only))

    assert cell.verdict == "isolated"
    assert cell.gradients.difference is None
    assert (
        "no backward: varlen_tests::doubled: an autograd kernel was not registered" in cell.gradients.reason
    )


@pytest.mark.parametrize("before", [False, True])
def test_flex_attention_is_compiled_afterwards_as_before(before, monkeypatch):
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", before)
    cell = first_cell(llama(), "flex_attention", gradients=False)

    assert cell.verdict == "isolated", cell.reason
    assert flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is before


@pytest.mark.parametrize(
    ("backend", "package"),
    [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")],
)
def test_on_a_cpu_plain_pytorch_stands_in_for_flash_attention_that_is_installed(
    backend, package, monkeypatch
):
    plain = importlib.util.find_spec

    def found(name: str, *more: Any) -> Any:
        return importlib.machinery.ModuleSpec(name, None) if name == package else plain(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    cell = first_cell(llama(), backend, gradients=False)

    assert cell.verdict == "isolated", cell.reason
    assert cell.stand_in == ("flash_attn_varlen_func",)


def test_what_is_coupled_is_coupled_in_every_call_and_leaks_in_none_that_isolates():
    model = changed(llama(), lambda x: x + 0.1 * x.mean((0, 1)))
    report = vl.verify(model, backends=["sdpa"], layouts=["flat"], gradients=False)

    verdicts = {cell.call: cell.verdict for cell in report.calls}
    assert verdicts["position_ids, use_cache=False"] == "coupled"
    assert report.cells[0].verdict == "coupled"


def test_a_live_model_has_its_attention_and_experts_afterwards_as_before():
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    model = make(config, "eager", torch.float64)
    experts = model.config._experts_implementation_internal
    tried = vl.verify(
        model,
        backends=["sdpa", "varlen", "flash_attention_2"],
        layouts=["rows"],
        calls=False,
        gradients=False,
    )

    assert len(tried.cells) == 3
    assert hf.implementation(model) == "eager"
    assert model.config._experts_implementation_internal == experts != "eager"


def test_the_coarsest_dtype_of_all_products_says_how_far_rounding_may_go():
    fine, coarse = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)

    assert computed_in(lambda: (fine @ fine, coarse @ coarse, fine @ fine))[1] is torch.bfloat16
    assert computed_in(lambda: fine + fine)[1] is None


def own(kind: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind._from_config(LlamaConfig(**SMALL, **settings), attn_implementation="sdpa").eval()


def changed_by_mode(model: Any, change: Callable[[torch.Tensor, bool], torch.Tensor]) -> Any:
    """Change what the second layer's MLP gives, told whether it is training."""
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: change(plain(hidden), mlp.training)
    return model


def test_a_leak_in_training_mode_alone_is_found():
    cell = first_cell(changed_by_mode(llama(), lambda x, training: x + 0.1 * training * x.roll(1, 1)))

    assert cell.isolation.verdict == "isolated"
    assert cell.verdict == "leaks"
    assert cell.reason.startswith("in training mode, changing one document moved another's logits by")


def test_a_place_in_the_row_that_counts_in_training_mode_alone_is_found():
    def by_column(x: torch.Tensor, training: bool) -> torch.Tensor:
        return x * (1 + 0.1 * training * torch.arange(x.shape[1])[None, :, None] / x.shape[1])

    cell = first_cell(changed_by_mode(llama(), by_column))

    assert cell.isolation.verdict == "isolated"
    assert cell.verdict == "leaks"
    assert cell.reason.startswith("in training mode, logits differ by")


def test_statistics_of_a_batch_in_training_mode_are_coupled_and_do_not_count_on():
    model = llama()
    norm = torch.nn.BatchNorm1d(32)
    changed_by_mode(model, lambda x, _: norm(x.flatten(0, 1)).view_as(x))
    model.model.norm_of_batches = norm
    cell = first_cell(model)

    assert cell.verdict == "coupled", cell.reason
    assert cell.reason.startswith("in training mode, documents move each other")
    assert int(norm.num_batches_tracked) == 0
    assert float(norm.running_mean.abs().max()) == 0  # type: ignore[union-attr, operator]


def test_a_model_that_draws_numbers_beside_dropout_is_not_silently_isolated_in_training_mode():
    model = changed_by_mode(llama(), lambda x, training: x + 0.1 * training * torch.randn_like(x))
    report = vl.verify(model, backends=["sdpa"], layouts=["rows"], calls=False)

    assert report.cells[0].verdict == "isolated"
    assert "gives other logits a second time" in report.cells[0].training
    assert "sdpa: training mode wasn't judged: the same batch gives other logits" in " ".join(
        str(report).split()
    )
    assert vl.verify(llama(), backends=["sdpa"], layouts=["rows"], calls=False).cells[0].training == ""


def test_dropout_is_no_leak():
    config = LlamaConfig(**SMALL, attention_dropout=0.3)
    for backend in ("eager", "sdpa", "varlen"):
        model = changed_by_mode(make(config, "eager", torch.float32), torch.nn.functional.dropout)
        assert first_cell(model.train(), backend).verdict == "isolated"


class WithTerm(LlamaForCausalLM):
    """Adds a term over the batch to its loss, in training mode."""

    def forward(self, labels: Any = None, position_ids: Any = None, **rest: Any) -> Any:  # type: ignore[override]
        outputs = super().forward(labels=labels, position_ids=position_ids, **rest)
        if self.training and outputs.loss is not None:
            outputs.loss = outputs.loss + outputs.logits.exp().mean()
        return outputs


class Summing(LlamaForCausalLM):
    """Returns the sum of its targets' losses."""

    def forward(self, labels: Any = None, position_ids: Any = None, **rest: Any) -> Any:  # type: ignore[override]
        return super().forward(labels=labels, position_ids=position_ids, num_items_in_batch=1, **rest)


def test_a_loss_with_a_term_over_the_batch_in_training_mode_is_coupled():
    cell = first_cell(own(WithTerm))

    assert cell.verdict == "coupled"
    assert cell.reason.startswith("in training mode, the model's own loss is")


def test_a_loss_that_is_a_sum_couples_nothing():
    cell = first_cell(own(Summing))

    assert cell.verdict == "isolated", cell.reason
    assert cell.own_loss > 100


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0])
def test_experts_that_turn_away_who_comes_last_are_coupled_and_no_leak(layout, factor):
    def crowded(x: torch.Tensor, _: bool) -> torch.Tensor:
        flat = x.flatten(0, 1)
        chosen = torch.nn.functional.one_hot(flat[:, :4].argmax(-1), 4)
        served = (chosen.cumsum(0) * chosen).sum(1) <= factor * len(flat) / 4
        return (flat * served[:, None]).view_as(x)

    cell = first_cell(changed_by_mode(llama(), crowded), layout=layout)

    assert cell.verdict == "coupled", cell.reason
    assert "over its whole batch" in cell.reason


def test_a_leak_among_experts_that_gradients_do_not_show_is_no_rounding():
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    leaking = make(config, "sdpa", torch.float32)
    norm = leaking.model.layers[1].post_attention_layernorm
    plain = norm.forward
    norm.forward = lambda x: plain(x) + 1.5e-3 * plain(x).roll(1, 1).detach()
    cell = first_cell(leaking)

    assert cell.isolation.movements.largest_difference < cell.isolation.movements.control_difference / 1000
    assert cell.verdict == "leaks"
    assert "changing one document moved" in cell.reason


class Returning(LlamaForCausalLM):
    """Returns what its class says, in place of an object."""

    form: Any = staticmethod(lambda logits: (logits,))

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:  # type: ignore[override]
        plain = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        return self.form(plain.logits)


@pytest.mark.parametrize(
    "form",
    [lambda x: (x,), lambda x: (torch.zeros(()), x), lambda x: {"logits": x}, lambda x: x],
    ids=["tuple", "loss in front", "mapping", "tensor"],
)
def test_logits_are_found_however_they_are_returned(form):
    model = own(Returning)
    model.form = form

    assert first_cell(model).verdict == "isolated"
    assert first_cell(changed_by_mode(model, lambda x, _: x + 0.1 * x.roll(1, 1))).verdict == "leaks"


def test_a_head_that_predicts_no_tokens_is_proven_by_its_classes():
    model = AutoModelForTokenClassification.from_config(LlamaConfig(**SMALL), attn_implementation="sdpa")

    assert first_cell(model.eval()).verdict == "isolated"
    assert first_cell(changed_by_mode(model, lambda x, _: x + 0.1 * x.roll(1, 1))).verdict == "leaks"


def failing(error: Exception, when: Callable[[], bool] = lambda: True) -> Any:
    def fail(x: torch.Tensor, _: bool) -> torch.Tensor:
        if when():
            raise error
        return x

    return changed_by_mode(llama(), fail)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotImplementedError(), "fails in its own forward: NotImplementedError"),
        (AssertionError(), "fails in its own forward: AssertionError"),
        (ValueError("one\n  two"), "one two"),
        (ValueError("word " * 500), "word word"),
    ],
)
def test_no_refusal_is_without_a_sentence_or_longer_than_one(error, words):
    cell = first_cell(failing(error))

    assert cell.verdict == "refuses"
    assert words in cell.reason
    assert len(cell.reason) < 400


@pytest.mark.parametrize("error", [ValueError("not with gradients"), KeyError("not with gradients")])
def test_a_model_that_fails_with_gradients_alone_is_refused_in_a_sentence(error):
    cell = first_cell(failing(error, torch.is_grad_enabled))

    assert cell.verdict == "refuses"
    assert "not with gradients" in cell.reason


class Silent(LlamaForCausalLM):
    """Doesn't say where it embeds."""

    def get_input_embeddings(self) -> Any:
        raise NotImplementedError

    def get_output_embeddings(self) -> Any:
        raise NotImplementedError


def test_a_model_that_does_not_say_where_it_embeds_is_checked_by_its_config():
    model = own(Silent, tie_word_embeddings=False)

    assert hf.vocabulary_size(model) == hf.logits_size(model) == 97
    assert first_cell(model).verdict == "isolated"


class Configured(torch.nn.Module):
    """Has a config and nothing else of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(**SMALL)


def test_live_models_that_can_not_be_asked_are_refused_in_a_sentence():
    with pytest.raises(ModelError, match="has a transformers config and no device, dtype"):
        vl.verify(Configured())
    with torch.device("meta"):
        empty = LlamaForCausalLM(LlamaConfig(**SMALL))
    for device in (None, "cpu"):
        with pytest.raises(ModelError, match="21 of 21 weights of LlamaForCausalLM are on the meta device"):
            vl.verify(empty, device=device)
    partly = llama()
    partly.model.layers[1].mlp.up_proj.to("meta")
    with pytest.raises(ModelError, match="1 of 21 weights of LlamaForCausalLM are on the meta device"):
        vl.verify(partly)


def test_a_seed_that_is_no_number_is_refused():
    for seed in ("x", 1.5):
        with pytest.raises(vl.VarlenError, match="seed must be a whole number, got"):
            vl.verify("llama", seed=seed)  # type: ignore[arg-type]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of its first FSDP
def test_wrapped_models_are_checked_through_their_wrappers(one_rank):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    assert first_cell(DistributedDataParallel(llama())).verdict == "isolated"
    sharded = FullyShardedDataParallel(llama(), device_id=torch.device("cpu"), use_orig_params=True)
    assert type(hf.unwrap(sharded)) is LlamaForCausalLM
    cell = first_cell(sharded)
    assert cell.verdict == "isolated"
    assert "FSDP's first version" in cell.gradients.reason


@pytest.mark.filterwarnings("ignore")  # peft asks transformers by an old name
def test_virtual_tokens_are_refused():
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)

    assert "has a soft prompt of" in first_cell(peft.get_peft_model(llama(), config)).reason


def test_a_family_without_linear_layers_runs_by_flash_attentions_stand_in():
    cell = first_cell("gpt2", "flash_attention_2", "flat")

    assert cell.verdict == "isolated", cell.reason


@pytest.mark.parametrize("family", ["openai-gpt", "xlm", "reformer"])
def test_families_that_take_no_finished_mask_are_refused_by_model_inputs(family):
    assert "takes masks of padding alone" in first_cell(family, "eager").reason


def test_the_softmax_of_a_router_is_no_attention_and_that_of_a_layer_beside_a_kernel_is():
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    assert first_cell(make(config, "eager", torch.float32), "eager").kernels == (("softmax", 2),)

    model = llama(attention="eager")
    ids = torch.arange(9)[None]
    model.model.layers[1].self_attn.config = LlamaConfig(**SMALL, attn_implementation="sdpa")
    with torch.no_grad():
        _, kernels = kernels_of(lambda: model(ids, use_cache=False))
    assert [name for name, _ in kernels] == ["_scaled_dot_product_flash_attention_for_cpu", "softmax"]
    assert dict(kernels)["softmax"] == 1
