"""model_inputs over all heads of transformers and over one's own: what passes computes each document as if alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from heads import TOLERANCE, batch_of, classes, furthest_from_alone, outputs_of, runs_alone, tiny_class
from peft import LoraConfig, TaskType, get_peft_model
from rarely import mostly
from torch import nn
from transformers import LlamaForCausalLM, LlamaForTokenClassification, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import varlen as vl
from varlen.adapters import hf
from varlen.errors import ModelError
from varlen.verify.models.loading import tiny_config

OFTEN = [
    ("causal", "llama", "LlamaForCausalLM", False),
    ("causal", "bert", "BertLMHeadModel", True),
    ("causal", "bert", "BertLMHeadModel", False),
    ("causal", "gemma2", "Gemma2ForCausalLM", False),
    ("masked", "modernbert", "ModernBertForMaskedLM", False),
    ("masked", "deberta-v2", "DebertaV2ForMaskedLM", False),
    ("masked", "fnet", "FNetForMaskedLM", False),
    ("masked", "bert", "BertForMaskedLM", True),
    ("sequence", "llama", "LlamaForSequenceClassification", False),
    ("sequence", "bert", "BertForSequenceClassification", True),
    ("token", "llama", "LlamaForTokenClassification", False),
    ("answer", "llama", "LlamaForQuestionAnswering", False),
    ("answer", "big_bird", "BigBirdForQuestionAnswering", True),
    ("choice", "bert", "BertForMultipleChoice", True),
    ("next_sentence", "bert", "BertForNextSentencePrediction", True),
    ("pretraining", "gpt2", "GPT2LMHeadModel", False),
    ("seq2seq", "t5", "T5ForConditionalGeneration", False),
    ("base", "llama", "LlamaModel", False),
    ("base", "bert", "BertModel", True),
]
"""One of each kind, and those that were seen to be wrong."""
PASS = {
    *("LlamaForCausalLM", "Gemma2ForCausalLM", "LlamaForTokenClassification", "LlamaForQuestionAnswering"),
    *("GPT2LMHeadModel", "LlamaModel"),
}
PASS_AS_DECODERS = {"BertLMHeadModel", "BertForMaskedLM"}
ALL = [(*each, is_decoder) for each in classes() for is_decoder in (True, False)]
KERNELS = "causal_conv1d"


@pytest.mark.parametrize(("kind", "family", "name", "is_decoder"), mostly(OFTEN, ALL))
def test_what_passes_agrees_with_each_document_alone(
    kind: str, family: str, name: str, is_decoder: bool
) -> None:
    try:
        model = tiny_class(family, name, is_decoder=is_decoder)
    except ModelError as error:
        pytest.skip(f"no tiny model: {error}")
    if not runs_alone(model):
        pytest.skip(f"{name} doesn't run on tokens alone")
    must_pass = name in PASS or (is_decoder and name in PASS_AS_DECODERS)
    found, refusal = judged(model)
    if refusal:
        assert not must_pass, refusal
        assert name in refusal or KERNELS in refusal
        return

    assert found < TOLERANCE
    assert kind not in ("sequence", "choice", "next_sentence")


def judged(model: Any) -> tuple[float, str]:
    """How far a model is from each document alone, or why it is refused; transformers refuses without its kernels."""
    try:
        return furthest_from_alone(model), ""
    except (ModelError, ValueError) as error:
        return 0.0, str(error)


class TokenWise(LlamaForCausalLM):
    """A head that acts on each token alone, in plain operations."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.value = nn.Sequential(
            nn.Linear(config.hidden_size, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)
        )

    def forward(self, input_ids: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        hidden = self.model(input_ids=input_ids, position_ids=position_ids, **rest).last_hidden_state
        return CausalLMOutput(logits=self.value(hidden * self.scale) - 1.5)


class RewardForSequenceClassification(TokenWise):
    """The same under a name of heads that pool."""


class InnocentForCausalLM(TokenWise):
    """Pools under a name of heads that don't."""

    def forward(self, *args: Any, **rest: Any) -> Any:
        return CausalLMOutput(logits=super().forward(*args, **rest).logits[:, -1])


class Centred(TokenWise):
    """Keeps the shape, and takes the row's mean off."""

    def forward(self, *args: Any, **rest: Any) -> Any:
        logits = super().forward(*args, **rest).logits
        return CausalLMOutput(logits=logits - logits.mean(1, keepdim=True))


class Shifted(TokenWise):
    """Gives each token the answer of the one before."""

    def forward(self, *args: Any, **rest: Any) -> Any:
        return CausalLMOutput(logits=super().forward(*args, **rest).logits.roll(1, 1))


class AfterSeparator(TokenWise):
    """Looks for a special token in the row."""

    def forward(self, input_ids: Any = None, **rest: Any) -> Any:
        ended = (input_ids == self.config.eos_token_id).cumsum(1)[..., None]
        return CausalLMOutput(logits=super().forward(input_ids=input_ids, **rest).logits + ended)


class LastReal(TokenWise):
    """A reward model of the usual kind: the last token that isn't padding."""

    def forward(self, input_ids: Any = None, **rest: Any) -> Any:
        logits = super().forward(input_ids=input_ids, **rest).logits
        last = (input_ids != self.config.pad_token_id).sum(1) - 1
        return CausalLMOutput(logits=logits[torch.arange(len(last)), last])


class Whole(PreTrainedModel):
    """A wrapper of one's own around a transformers model, with a value head."""

    config_class = type(tiny_config("llama"))

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.trunk = LlamaModel(config)
        self.v = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids: Any = None, position_ids: Any = None, attention_mask: Any = None) -> Any:
        told = {"position_ids": position_ids, "attention_mask": attention_mask}
        return CausalLMOutput(logits=self.v(self.trunk(input_ids, **told).last_hidden_state))


def made(kind: Any) -> Any:
    torch.manual_seed(0)
    model = kind(tiny_config("llama"))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.2)
    return model.to(torch.float64).eval()


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize(
    "kind", [TokenWise, RewardForSequenceClassification, Whole, LlamaForTokenClassification]
)
def test_heads_that_act_on_each_token_alone_pass_whatever_their_name(kind: Any, layout: Any) -> None:
    assert furthest_from_alone(made(kind), layout) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (InnocentForCausalLM, r"pools \(InnocentForCausalLM\): logits has the shape \[1, 1\] for a row of 6"),
        (LastReal, r"pools \(LastReal\)"),
        (Centred, r"mixes the tokens of a row in its head \(Centred\)"),
        (Shifted, r"mixes the tokens of a row in its head \(Shifted\)"),
        (AfterSeparator, r"mixes the tokens of a row in its head"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_heads_that_mix_tokens_are_refused_whatever_their_name(kind: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        hf.model_inputs(batch_of("rows")[1], made(kind))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.GRU(32, 97, batch_first=True), "gives no numbers"),
        (nn.Sequential(nn.Linear(32, 32), nn.Softmax(dim=1), nn.Linear(32, 97)), "mixes the tokens of a row"),
        (nn.Sequential(nn.Linear(32, 97), nn.Softplus()), None),
    ],
    ids=["recurrent", "softmax over tokens", "by token"],
)
def test_a_head_that_was_put_in_the_place_of_another_is_looked_at(module: Any, words: str | None) -> None:
    model = made(LlamaForCausalLM)
    model.lm_head = module.to(torch.float64)

    if words is None:
        assert furthest_from_alone(model) < TOLERANCE
        return
    with pytest.raises(ModelError, match=words):
        hf.model_inputs(batch_of("rows")[1], model)


class ByToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(32, 4), nn.Linear(4, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.up(torch.relu(self.down(hidden)))


class ByRow(ByToken):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + hidden.mean(1, keepdim=True)


class Causal(ByToken):
    """Mixes only what stands before, as a model may: but of the whole row."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + hidden.cumsum(1)


@pytest.mark.parametrize("adapter", [ByToken(), nn.Conv1d(32, 32, 1), nn.BatchNorm1d(32), ByRow(), Causal()])
def test_modules_put_into_layers_are_looked_at(adapter: Any) -> None:
    model = made(LlamaForCausalLM)
    layer = model.model.layers[0]
    layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, adapter.to(torch.float64))

    if type(adapter) is ByToken:
        assert furthest_from_alone(model) < TOLERANCE
    elif isinstance(adapter, nn.Conv1d):  # of one token each: the shapes aren't its own, but nothing is mixed
        assert hf.model_inputs(batch_of("rows")[1], model)
    else:
        with pytest.raises(
            ModelError, match=r"statistics of the whole batch|code of its own \((ByRow|Causal)"
        ):
            hf.model_inputs(batch_of("rows")[1], model)


class OwnLayer(type(made(LlamaForCausalLM).model.layers[0])):  # type: ignore[misc]
    """A layer of one's own code, which mixes nothing more."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **rest: Any) -> Any:
        return super().forward(hidden_states * 1.0, *args, **rest)


class LeakingLayer(OwnLayer):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **rest: Any) -> Any:
        return super().forward(hidden_states, *args, **rest) + hidden_states.cumsum(1)


@pytest.mark.parametrize(("kind", "is_apart"), [(OwnLayer, True), (LeakingLayer, False)])
def test_unknown_code_is_refused_until_verify_has_found_documents_apart(kind: Any, is_apart: bool) -> None:
    model = made(LlamaForCausalLM)
    model.model.layers[0].__class__ = kind
    batch = batch_of("rows")[1]

    with pytest.raises(
        ModelError, match=rf"code of its own \({kind.__name__} in layers.0\).*vl\.verify\(model\)"
    ):
        hf.model_inputs(batch, model)
    report = vl.verify(model, backends=["eager"], layouts=["rows"], calls=False, gradients=False)
    assert report.ok is is_apart
    if is_apart:
        assert furthest_from_alone(model) < TOLERANCE
        return
    with pytest.raises(ModelError, match="code of its own"):
        hf.model_inputs(batch, model)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_peft_ddp_and_compiled_models_are_judged_by_what_they_wrap(tmp_path: Any) -> None:
    batch = batch_of("rows")[1]
    good = [made(LlamaForCausalLM), made(LlamaForTokenClassification)]
    pooling = tiny_class("llama", "LlamaForSequenceClassification", is_decoder=False)
    lora = [
        get_peft_model(made(LlamaForCausalLM), LoraConfig(r=2, target_modules=["q_proj", "down_proj"])),
        get_peft_model(
            made(LlamaForTokenClassification),
            LoraConfig(r=2, task_type=TaskType.TOKEN_CLS, target_modules=["q_proj"]),
        ),
    ]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = [nn.parallel.DistributedDataParallel(model) for model in good]
        refused = [nn.parallel.DistributedDataParallel(pooling), torch.compile(pooling)]
        refused.append(
            get_peft_model(pooling, LoraConfig(r=2, task_type=TaskType.SEQ_CLS, target_modules=["q_proj"]))
        )
        for model in [*wrapped, *map(torch.compile, good), *lora]:
            assert hf.model_inputs(batch, model)
        for model in refused:
            with pytest.raises(ModelError, match="pools"):
                hf.model_inputs(batch, model)
    finally:
        dist.destroy_process_group()
    for model in lora:
        assert furthest_from_alone(model.eval()) < TOLERANCE


def test_a_look_leaves_the_model_as_it_was() -> None:
    model = made(TokenWise).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()

    hf.model_inputs(batch_of("rows")[1], model)

    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert outputs_of(model, {"input_ids": torch.arange(3, 6)[None]})


def test_labels_go_to_losses_of_the_next_token_alone() -> None:
    batch = batch_of("rows")[1]

    assert "labels" in hf.model_inputs(batch, made(LlamaForCausalLM))
    assert "labels" not in hf.model_inputs(batch, made(LlamaForTokenClassification))
