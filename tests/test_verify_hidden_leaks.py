"""vl.verify on what shows in training mode alone, on what is computed over a batch, and on models of unusual make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SMALL, make
from transformers import AutoModelForTokenClassification, LlamaConfig, LlamaForCausalLM, MixtralConfig

import varlen as vl
from varlen.adapters import hf
from varlen.errors import ModelError
from varlen.verify.models.backends import kernels_of


def llama(attention: str = "sdpa") -> Any:
    return make(LlamaConfig(**SMALL), attention, torch.float32)


def own(kind: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind._from_config(LlamaConfig(**SMALL, **settings), attn_implementation="sdpa").eval()


def changed(model: Any, change: Callable[[torch.Tensor, bool], torch.Tensor]) -> Any:
    """Change what the second layer's MLP gives, told whether it is training."""
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: change(plain(hidden), mlp.training)
    return model


def first_cell(model: Any, backend: str = "sdpa", layout: Any = "rows", **settings: Any) -> Any:
    return vl.verify(model, backends=[backend], layouts=[layout], calls=False, **settings).cells[0]


def test_a_leak_in_training_mode_alone_is_found() -> None:
    cell = first_cell(changed(llama(), lambda x, training: x + 0.1 * training * x.roll(1, 1)))

    assert cell.isolation.verdict == "isolated"
    assert cell.verdict == "leaks"
    assert cell.reason.startswith("in training mode, changing one document moved another's logits by")


def test_a_place_in_the_row_that_counts_in_training_mode_alone_is_found() -> None:
    def by_column(x: torch.Tensor, training: bool) -> torch.Tensor:
        return x * (1 + 0.1 * training * torch.arange(x.shape[1])[None, :, None] / x.shape[1])

    cell = first_cell(changed(llama(), by_column))

    assert cell.isolation.verdict == "isolated"
    assert cell.verdict == "leaks"
    assert cell.reason.startswith("in training mode, logits differ by")


def test_statistics_of_a_batch_in_training_mode_are_coupled_and_do_not_count_on() -> None:
    model = llama()
    norm = torch.nn.BatchNorm1d(32)
    changed(model, lambda x, _: norm(x.flatten(0, 1)).view_as(x))
    model.model.norm_of_batches = norm
    cell = first_cell(model)

    assert cell.verdict == "coupled", cell.reason
    assert cell.reason.startswith("in training mode, documents move each other")
    assert int(norm.num_batches_tracked) == 0
    assert float(norm.running_mean.abs().max()) == 0  # type: ignore[union-attr, operator]


def test_a_model_that_draws_numbers_beside_dropout_is_not_silently_isolated_in_training_mode() -> None:
    model = changed(llama(), lambda x, training: x + 0.1 * training * torch.randn_like(x))
    report = vl.verify(model, backends=["sdpa"], layouts=["rows"], calls=False)

    assert report.cells[0].verdict == "isolated"
    assert "gives other logits a second time" in report.cells[0].training
    assert "sdpa: training mode wasn't judged: the same batch gives other logits" in " ".join(
        str(report).split()
    )
    assert vl.verify(llama(), backends=["sdpa"], layouts=["rows"], calls=False).cells[0].training == ""


def test_dropout_is_no_leak() -> None:
    config = LlamaConfig(**SMALL, attention_dropout=0.3)
    for backend in ("eager", "sdpa", "varlen"):
        model = changed(make(config, "eager", torch.float32), torch.nn.functional.dropout)
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


def test_a_loss_with_a_term_over_the_batch_in_training_mode_is_coupled() -> None:
    cell = first_cell(own(WithTerm))

    assert cell.verdict == "coupled"
    assert cell.reason.startswith("in training mode, the model's own loss is")


def test_a_loss_that_is_a_sum_couples_nothing() -> None:
    cell = first_cell(own(Summing))

    assert cell.verdict == "isolated", cell.reason
    assert cell.own_loss > 100


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0])
def test_experts_that_turn_away_who_comes_last_are_coupled_and_no_leak(layout: Any, factor: float) -> None:
    def crowded(x: torch.Tensor, _: bool) -> torch.Tensor:
        flat = x.flatten(0, 1)
        chosen = torch.nn.functional.one_hot(flat[:, :4].argmax(-1), 4)
        served = (chosen.cumsum(0) * chosen).sum(1) <= factor * len(flat) / 4
        return (flat * served[:, None]).view_as(x)

    cell = first_cell(changed(llama(), crowded), layout=layout)

    assert cell.verdict == "coupled", cell.reason
    assert "over its whole batch" in cell.reason


def test_a_leak_among_experts_that_gradients_do_not_show_is_no_rounding() -> None:
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
def test_logits_are_found_however_they_are_returned(form: Any) -> None:
    model = own(Returning)
    model.form = form

    assert first_cell(model).verdict == "isolated"
    assert first_cell(changed(model, lambda x, _: x + 0.1 * x.roll(1, 1))).verdict == "leaks"


def test_a_head_that_predicts_no_tokens_is_refused_in_a_sentence() -> None:
    model = AutoModelForTokenClassification.from_config(LlamaConfig(**SMALL), attn_implementation="sdpa")

    assert "returns 2 logits for each token, and embeds 97 ids" in first_cell(model.eval()).reason


def failing(error: Exception, when: Callable[[], bool] = lambda: True) -> Any:
    def fail(x: torch.Tensor, _: bool) -> torch.Tensor:
        if when():
            raise error
        return x

    return changed(llama(), fail)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotImplementedError(), "fails in its own forward: NotImplementedError, and no word of why"),
        (AssertionError(), "fails in its own forward: AssertionError, and no word of why"),
        (ValueError("one\n  two"), "one two"),
        (ValueError("word " * 500), "word word"),
    ],
)
def test_no_refusal_is_without_a_sentence_or_longer_than_one(error: Exception, words: str) -> None:
    cell = first_cell(failing(error))

    assert cell.verdict == "refuses"
    assert words in cell.reason
    assert len(cell.reason) < 400


@pytest.mark.parametrize("error", [ValueError("not with gradients"), KeyError("not with gradients")])
def test_a_model_that_fails_with_gradients_alone_is_refused_in_a_sentence(error: Exception) -> None:
    cell = first_cell(failing(error, torch.is_grad_enabled))

    assert cell.verdict == "refuses"
    assert "not with gradients" in cell.reason


class Silent(LlamaForCausalLM):
    """Doesn't say where it embeds."""

    def get_input_embeddings(self) -> Any:
        raise NotImplementedError

    def get_output_embeddings(self) -> Any:
        raise NotImplementedError


def test_a_model_that_does_not_say_where_it_embeds_is_checked_by_its_config() -> None:
    model = own(Silent, tie_word_embeddings=False)

    assert hf.vocabulary_size(model) == hf.logits_size(model) == 97
    assert first_cell(model).verdict == "isolated"


class Configured(torch.nn.Module):
    """Has a config and nothing else of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(**SMALL)


def test_live_models_that_can_not_be_asked_are_refused_in_a_sentence() -> None:
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


def test_a_seed_that_is_no_number_is_refused() -> None:
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
def test_wrapped_models_are_checked_through_their_wrappers(one_rank: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    assert first_cell(DistributedDataParallel(llama())).verdict == "isolated"
    sharded = FullyShardedDataParallel(llama(), device_id=torch.device("cpu"), use_orig_params=True)
    assert type(hf.unwrap(sharded)) is LlamaForCausalLM
    cell = first_cell(sharded)
    assert cell.verdict == "isolated"
    assert "FSDP's first version" in cell.gradients.reason


@pytest.mark.filterwarnings("ignore")  # peft asks transformers by an old name
def test_virtual_tokens_are_refused() -> None:
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)

    assert "has a soft prompt of" in first_cell(peft.get_peft_model(llama(), config)).reason


def test_a_family_without_linear_layers_runs_by_flash_attentions_stand_in() -> None:
    cell = first_cell("gpt2", "flash_attention_2", "flat")

    assert cell.verdict == "isolated", cell.reason


@pytest.mark.parametrize("family", ["openai-gpt", "xlm", "reformer"])
def test_families_that_take_no_finished_mask_are_refused_by_model_inputs(family: str) -> None:
    assert "takes masks of padding alone" in first_cell(family, "eager").reason


def test_the_softmax_of_a_router_is_no_attention_and_that_of_a_layer_beside_a_kernel_is() -> None:
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    assert first_cell(make(config, "eager", torch.float32), "eager").kernels == (("softmax", 2),)

    model = llama("eager")
    ids = torch.arange(9)[None]
    model.model.layers[1].self_attn.config = LlamaConfig(**SMALL, attn_implementation="sdpa")
    with torch.no_grad():
        _, kernels = kernels_of(lambda: model(ids, use_cache=False))
    assert [name for name, _ in kernels] == ["_scaled_dot_product_flash_attention_for_cpu", "softmax"]
    assert dict(kernels)["softmax"] == 1
