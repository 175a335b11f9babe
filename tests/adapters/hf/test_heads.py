"""model_inputs over all heads of transformers and over one's own code: each document as if alone, or refused."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, TaskType, get_peft_model
from tests.support.rarely import mostly
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, LlamaForTokenClassification, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto import modeling_auto
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

import varlen as vl
from varlen.adapters import hf
from varlen.batch.packed import Layout, PackedBatch
from varlen.errors import ModelError
from varlen.verify.models.loading import VOCABULARY, tiny_config

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "answer": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "next_sentence": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    "pretraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
"""Heads by transformers' own tables."""
LENGTHS = (5, 9, 3, 1, 7)
TOLERANCE = 1e-5
"""Parts of some families compute in float32 whatever the weights are."""


def classes() -> Iterator[tuple[str, str, str]]:
    """Give each kind of head, family and name of a class, of families that have a text model for some head."""
    text = {
        family
        for kind, table in KINDS.items()
        if kind not in ("base", "pretraining")
        for family in getattr(modeling_auto, table)
    }
    for kind, table in KINDS.items():
        for family, names in getattr(modeling_auto, table).items():
            if family in text:
                for name in (names,) if isinstance(names, str) else names:
                    yield kind, family, name


def tiny_class(family: str, name: str, *, is_decoder: bool) -> Any:
    """Return a tiny model of a class, in float64.

    Raises:
        ModelError: none can be made.
    """
    config = tiny_config(family)
    config.is_decoder = is_decoder
    config.num_labels = 2
    try:
        kind = getattr(transformers, name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = kind._from_config(config, attn_implementation="eager", experts_implementation="eager")
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim > 1 and weight.is_floating_point():
                        weight.normal_(0, 0.2)
    except Exception as error:
        raise ModelError(f"no tiny {name}: {type(error).__name__}: {error}") from error
    return model.to(torch.float64).eval()


def batch_of(layout: Layout) -> tuple[list[Any], PackedBatch]:
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in LENGTHS]
    return documents, vl.collate(documents, vl.pack(LENGTHS, capacity=14, method="next_fit"), layout=layout)


def outputs_of(model: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        found = model(**arguments)
    named = (
        found.items()
        if hasattr(found, "items")
        else enumerate(found if isinstance(found, tuple) else (found,))
    )
    return {
        str(name): value
        for name, value in named
        if torch.is_tensor(value) and value.is_floating_point() and name != "loss"
    }


def furthest_from_alone(model: Any, layout: Layout = "rows") -> float:
    """Return how far a model's packed outputs are from those of each document alone; infinite where one is missing.

    Raises:
        ModelError: `model_inputs` refuses the model.
    """
    documents, batch = batch_of(layout)
    arguments = {name: v for name, v in hf.model_inputs(batch, model).items() if name != "labels"}
    packed = outputs_of(model, arguments)
    segments = np.asarray(batch.segment_ids)
    worst, number = 0.0, 0
    for row, told in enumerate(segments):
        for segment in range(told.max() + 1):
            place = np.flatnonzero(told == segment)
            tokens = torch.as_tensor(documents[int(batch.document_ids[number])]).long()[None]
            number += 1
            for name, theirs in outputs_of(model, hf.plain_inputs(tokens, model)).items():
                ours = packed.get(name)
                if ours is None or ours.ndim < 2 or theirs.ndim < 2 or ours.shape[:2] != segments.shape:
                    return float("inf")
                if theirs.shape[1] != len(place):
                    return float("inf")
                worst = max(worst, float((ours[row, place] - theirs[0]).abs().max()))
    return worst


def runs_alone(model: Any) -> bool:
    try:
        outputs_of(model, hf.plain_inputs(torch.arange(3, 8)[None], model))
    except Exception:
        return False
    return True


OFTEN = [
    ("causal", "llama", "LlamaForCausalLM", False),
    ("causal", "bert", "BertLMHeadModel", True),
    ("causal", "bert", "BertLMHeadModel", False),
    ("causal", "gemma2", "Gemma2ForCausalLM", False),
    ("masked", "modernbert", "ModernBertForMaskedLM", False),
    ("masked", "deberta-v2", "DebertaV2ForMaskedLM", False),
    ("masked", "fnet", "FNetForMaskedLM", False),
    ("masked", "bert", "BertForMaskedLM", True),
    ("masked", "ultrabert", "UltrabertForMaskedLM", False),
    ("sequence", "llama", "LlamaForSequenceClassification", False),
    ("sequence", "bert", "BertForSequenceClassification", True),
    ("token", "llama", "LlamaForTokenClassification", False),
    ("token", "mobilebert", "MobileBertForTokenClassification", False),
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
    *("GPT2LMHeadModel", "LlamaModel", "BertLMHeadModel", "BertForMaskedLM", "ModernBertForMaskedLM"),
}
ALL = [(*each, is_decoder) for each in classes() for is_decoder in (True, False)]
KERNELS = "causal_conv1d"


@pytest.mark.parametrize(("kind", "family", "name", "is_decoder"), mostly(OFTEN, ALL))
def test_what_passes_agrees_with_each_document_alone(kind, family, name, is_decoder):
    try:
        model = tiny_class(family, name, is_decoder=is_decoder)
    except (ModelError, UserWarning) as error:  # complex buffers can't be float64
        pytest.skip(f"no tiny model: {error}")
    if not runs_alone(model):
        pytest.skip(f"{name} doesn't run on tokens alone")
    found, refusal = judged(model)
    if refusal:
        assert name not in PASS, refusal
        assert any(word in refusal for word in (name, family, KERNELS))
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
def test_heads_that_act_on_each_token_alone_pass_whatever_their_name(kind, layout):
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
def test_heads_that_mix_tokens_are_refused_whatever_their_name(kind, words):
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
def test_a_head_that_was_put_in_the_place_of_another_is_looked_at(module, words):
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
def test_modules_put_into_layers_are_looked_at(adapter):
    model = made(LlamaForCausalLM)
    layer = model.model.layers[0]
    layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, adapter.to(torch.float64))

    if type(adapter) is ByToken:
        assert furthest_from_alone(model) < TOLERANCE
    elif isinstance(adapter, nn.Conv1d):  # of one token each: the shapes aren't its own, but nothing is mixed
        assert hf.model_inputs(batch_of("rows")[1], model)
    else:
        with pytest.raises(ModelError, match=r"statistics of the whole batch|custom code \((ByRow|Causal)"):
            hf.model_inputs(batch_of("rows")[1], model)


class OwnLayer(type(made(LlamaForCausalLM).model.layers[0])):  # type: ignore[misc]
    """A layer of one's own code, which mixes nothing more."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **rest: Any) -> Any:
        return super().forward(hidden_states * 1.0, *args, **rest)


class LeakingLayer(OwnLayer):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **rest: Any) -> Any:
        return super().forward(hidden_states, *args, **rest) + hidden_states.cumsum(1)


@pytest.mark.parametrize(("kind", "is_apart"), [(OwnLayer, True), (LeakingLayer, False)])
def test_unknown_code_is_refused_until_verify_has_found_documents_apart(kind, is_apart):
    model = made(LlamaForCausalLM)
    model.model.layers[0].__class__ = kind
    batch = batch_of("rows")[1]

    with pytest.raises(
        ModelError, match=rf"custom code \({kind.__name__} in layers.0\).*vl\.verify\(model\)"
    ):
        hf.model_inputs(batch, model)
    report = vl.verify(model, backends=["eager"], layouts=["rows"], calls=False, gradients=False)
    assert report.ok is is_apart
    if is_apart:
        assert furthest_from_alone(model) < TOLERANCE
        return
    with pytest.raises(ModelError, match="custom code"):
        hf.model_inputs(batch, model)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_peft_ddp_and_compiled_models_are_judged_by_what_they_wrap(tmp_path):
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


def test_a_look_leaves_the_model_as_it_was():
    model = made(TokenWise).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()

    hf.model_inputs(batch_of("rows")[1], model)

    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert outputs_of(model, {"input_ids": torch.arange(3, 6)[None]})


def test_labels_go_to_losses_of_the_next_token_alone():
    batch = batch_of("rows")[1]

    assert "labels" in hf.model_inputs(batch, made(LlamaForCausalLM))
    assert "labels" not in hf.model_inputs(batch, made(LlamaForTokenClassification))


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
def test_heads_that_depend_on_the_rest_of_a_row_are_refused(kind):
    with pytest.raises(ModelError, match=rf"mixes the tokens of a row in its head \({kind.__name__}\)"):
        hf.model_inputs(batch_of("rows")[1], made(kind))


def test_a_head_with_dropout_passes():
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
def test_code_that_was_put_on_modules_is_unknown(name):
    with pytest.raises(ModelError, match=r"custom code \(.*vl\.verify\(model\)"):
        hf.model_inputs(batch_of("rows")[1], OF_ONES_OWN[name]())


@pytest.mark.parametrize("put", ["forward", "_apply_gate"])
def test_code_that_was_put_on_a_librarys_class_is_unknown(put, monkeypatch):
    kind = modeling_mixtral.MixtralExperts if put == "_apply_gate" else modeling_llama.LlamaMLP
    before = getattr(kind, put)
    monkeypatch.setattr(kind, put, lambda self, *given: before(self, *given).cumsum(-2))
    family = "mixtral" if put == "_apply_gate" else "llama"
    model = tiny_class(family, f"{family.title()}ForCausalLM", is_decoder=True)

    with pytest.raises(ModelError, match=rf"custom code \({kind.__name__} in"):
        hf.model_inputs(batch_of("rows")[1], model)


def test_a_part_of_a_librarys_class_that_is_replaced_in_a_subclass_is_unknown():
    class Gated(modeling_mixtral.MixtralExperts):  # type: ignore[misc]
        def _apply_gate(self, *given: Any) -> Any:
            return super()._apply_gate(*given).cumsum(0)

    model = tiny_class("mixtral", "MixtralForCausalLM", is_decoder=True)
    model.model.layers[0].mlp.experts.__class__ = Gated

    with pytest.raises(ModelError, match=r"custom code \(Gated in"):
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
def test_what_changes_no_answer_of_a_token_passes(make):
    assert furthest_from_alone(make()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LlamaForCausalLM", None),
        ("LlamaForTokenClassification", None),
        ("LlamaForSequenceClassification", "pools"),
    ],
)
def test_fully_sharded_models_are_judged_as_what_they_were(name, words, tmp_path):
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
