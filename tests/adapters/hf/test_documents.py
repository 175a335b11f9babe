"""One answer a document: pooling, heads and poolers, equal to each document alone and to padded rows."""

import functools
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, TaskType, get_peft_model
from tests.support.encoders import (
    CELLS,
    CONFIGS,
    LENGTHS,
    alone,
    differ,
    documents,
    made,
    packed,
    padded,
)
from tests.support.hf_models import gradients
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutput

import varlen as vl
from varlen.adapters import hf
from varlen.adapters.hf.head_trial import LAST_REAL, head_pooling
from varlen.errors import DocumentsError, ModelError, SettingError
from varlen.verify.models.backends import attending

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
# EPS of float32 for every number that a sum of a document's tokens rounds, twice: in our sum and in torch's.
POOLED = {
    "mean": lambda part: part.mean(0),
    "first": lambda part: part[0],
    "last": lambda part: part[-1],
    "max": lambda part: part.amax(0),
    "weighted_mean": lambda part: (
        torch.arange(1, len(part) + 1, dtype=part.dtype) @ part / (len(part) * (len(part) + 1) / 2)
    ),
}


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.sampled_from(["rows", "flat"]),
    st.integers(1, 4),
    st.sampled_from([*POOLED]),
)
def test_pooling_is_its_definition_and_so_is_its_gradient(lengths, layout, multiple, how):
    packing = vl.pack(lengths, 12, document_multiple_of=multiple)
    batch = vl.collate(documents(tuple(lengths)), packing, layout=layout)
    generator = torch.Generator().manual_seed(sum(lengths))
    shape = (*batch.input_ids.shape, 3)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    flat = hidden.flatten(0, 1)
    spans = list(zip(batch.segment_begins.tolist(), batch.document_lengths.tolist()))

    ours = hf.pool(hidden, batch, how)
    theirs = torch.stack([POOLED[how](flat[begin : begin + length]) for begin, length in spans])

    assert torch.allclose(ours, theirs, rtol=0, atol=1e-14 * 12)
    weights = torch.arange(ours.numel(), dtype=torch.float64).view_as(ours).cos()
    (mine,) = torch.autograd.grad((ours * weights).sum(), hidden)
    (other,) = torch.autograd.grad((theirs * weights).sum(), hidden)
    assert torch.allclose(mine, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("how", ["mean", "weighted_mean", "max"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, how):
    lengths = (300, 7)
    batch = vl.collate(documents(lengths), vl.pack(lengths, 400))
    hidden = torch.randn((1, 400, 5), generator=torch.Generator().manual_seed(0)).to(dtype)

    ours = hf.pool(hidden, batch, how)
    exact = torch.stack([POOLED[how](part) for part in hidden[0, :307].double().split(lengths)])

    assert ours.dtype == dtype
    assert torch.equal(ours, exact.to(dtype))  # sums in half precision would be off by percents


def test_tensors_and_numbers_a_token_are_pooled_too():
    batch = packed()
    hidden = torch.randn(batch.input_ids.shape)

    assert torch.equal(hf.pool(hidden, batch), hf.pool(hidden, batch.to_torch()))
    assert hf.pool(hidden, batch).shape == (len(LENGTHS),)
    assert hf.pool(hidden[..., None, None], batch, "max").shape == (len(LENGTHS), 1, 1)


@pytest.mark.parametrize(
    ("hidden", "how", "words"),
    [
        (torch.zeros(2, 3, 4), "mean", r"must be a tensor \[\d, 26, '...'\] for this batch, got \[2, 3, 4\]"),
        ([[1.0]], "mean", "got list"),
        (torch.zeros(3, 26, 4), "cls", "how must be one of mean, first, last"),
    ],
)
def test_what_can_not_be_pooled_is_refused_in_a_sentence(hidden, how, words):
    with pytest.raises((DocumentsError, SettingError), match=words):
        hf.pool(hidden, packed(), how)
    with pytest.raises(DocumentsError, match="was given dict"):
        hf.pool(torch.zeros(1, 2, 3), {"input_ids": [[1, 2]]})  # type: ignore[arg-type]


HEADS = {
    "bert": "first", "roberta": "first", "xlm-roberta": "first", "distilbert": "first", "electra": "first",
    "albert": "first", "modernbert": "first", "modernbert, mean": "mean",
    "llama": LAST_REAL, "qwen3": LAST_REAL, "qwen3, both ways": LAST_REAL,
}  # fmt: skip


def classifier(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    return made(AutoModelForSequenceClassification, family, attention, dtype, num_labels=3, **more)


@pytest.mark.parametrize(("attention", "layout"), CELLS)
@pytest.mark.parametrize("family", HEADS)
def test_logits_of_a_head_are_those_of_each_document_alone(family, attention, layout):
    model, batch = classifier(family, attention, torch.float32), packed(layout)
    exact = classifier(family)
    rounding = 0.0
    with attending(model, attention), torch.no_grad():
        ours = hf.document_outputs(model, batch).logits
        theirs = torch.cat([alone(model, documents()[one]).logits for one in batch.document_ids])
        doubles = torch.cat([alone(exact, documents()[one]).logits for one in batch.document_ids])
        rounding = float((theirs.double() - doubles).abs().max())

    assert head_pooling(model, model.base_model) == HEADS[family]
    assert ours.shape == (len(LENGTHS), 3)
    assert float((ours - theirs).abs().max()) <= 4 * rounding


LABELS = [0, 2, -100, 1, 1, 0, 2]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("family", HEADS)
def test_loss_and_gradients_of_a_head_are_those_of_padded_rows(family, attention):
    pad = CONFIGS[family]().pad_token_id
    model = classifier(family)
    rows = padded(pad=pad)
    if family == "qwen3, both ways":
        rows["is_causal"] = False  # type: ignore[assignment]
    theirs = model(**rows, labels=torch.tensor(LABELS)).loss
    exact = gradients(model, theirs)

    model.set_attn_implementation(attention)
    ours = hf.document_outputs(model, packed(document_labels=LABELS)).loss

    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert differ(gradients(model, ours), exact) < 1e-6


def no_documents() -> vl.PackedBatch:
    """A masked pack, as a loader makes it at the end of its data."""
    lengths = np.zeros(0, np.int32)
    packing = vl.Packing(
        document_ids=np.zeros(0, np.int64),
        starts=lengths,
        stops=lengths,
        offsets=np.zeros(2, np.int64),
        capacity=16,
        ledger=vl.Ledger(tokens_in=0, packed=0),
    )
    return vl.collate((lengths, np.zeros(1, np.int64)), packing)


@pytest.mark.parametrize("kind", ["classes, all -100", "no documents", "no documents, numbers"])
@pytest.mark.parametrize("family", HEADS)
def test_without_a_label_the_loss_is_0_with_gradients_of_0(family, kind):
    model = classifier(family)
    batch, labels = (packed(), [-100] * len(LENGTHS)) if "all" in kind else (no_documents(), np.zeros(0, int))
    if "numbers" in kind:
        labels = np.zeros((0, 3), np.float32)

    loss = hf.document_outputs(model, batch.replace(document_labels=labels)).loss

    assert loss.item() == 0
    loss.backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())
    one = [[0.0, 1.0, 1.0]] * len(LENGTHS) if "numbers" in kind else [*[-100] * (len(LENGTHS) - 1), 2]
    assert hf.document_outputs(model, packed(document_labels=one)).loss.item() > 0


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 26), min_size=1, max_size=9),
    st.sampled_from(["bert", "llama", "modernbert, mean"]),
)
def test_any_lengths_give_the_logits_of_documents_alone(lengths, family):
    model, batch = classifier(family, "varlen"), packed(lengths=tuple(lengths))
    with torch.no_grad():
        ours = hf.document_outputs(model, batch).logits
    theirs = torch.cat([alone(model, documents(tuple(lengths))[one]).logits for one in batch.document_ids])

    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "settings_", "loss"),
    [
        ([0.5, 1, 2, -1, 0, 3, 0.25], {"num_labels": 1}, "MSE"),
        ([1, 0, 2, 1, 0, 3, 1], {"num_labels": 1}, "MSE of whole numbers"),
        ([[0, 1, 1]] * 7, {"num_labels": 3, "problem_type": "multi_label_classification"}, "several labels"),
    ],
)
def test_other_problems_have_the_loss_of_padded_rows(labels, settings_, loss):
    model = made(AutoModelForSequenceClassification, "bert", **settings_)
    theirs = model(**padded(), labels=torch.tensor(labels, dtype=torch.float64)).loss
    ours = hf.document_outputs(model, packed(document_labels=labels)).loss

    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6), loss


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "albert"])
def test_a_model_without_a_head_has_a_pooler_output_a_document(family):
    model, batch = made(AutoModel, family), packed()
    ours = hf.document_outputs(model, batch)
    for number, document in enumerate(batch.document_ids):
        theirs = alone(model, documents()[document])
        if "pooler_output" in theirs:
            assert torch.allclose(ours.pooler_output[number], theirs.pooler_output[0], rtol=0, atol=1e-6)
    assert ("pooler_output" in ours) == ("pooler_output" in theirs) == (family != "electra")
    if family != "electra":
        with pytest.raises(ModelError, match=r"pools \(its pooler.*document_outputs"):
            hf.model_inputs(batch, model)


def test_padding_ids_at_a_document_s_end_are_passed_over_as_transformers_does():
    model = classifier("llama")
    given_ = [np.array(ids) for ids in ([5, 6, 0, 0], [7, 0, 8], [0, 0], [9])]
    batch = vl.collate(given_, vl.pack([4, 3, 2, 1], 10))

    ours = hf.document_outputs(model, batch).logits
    for logits, document in zip(ours, given_):
        assert torch.allclose(logits, alone(model, document).logits[0], rtol=0, atol=1e-6)
    last = hf.pool(model.model(**hf.model_inputs(batch, model.model)).last_hidden_state, batch, "last")
    assert not torch.allclose(model.score(last)[0], ours[0])


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_a_pooler_that_does_not_pool_the_first_token_is_refused(kind):
    model = made(kind, "bert", "sdpa", torch.float32)
    model.base_model.pooler = nn.Linear(model.config.hidden_size, model.config.hidden_size)  # of all tokens

    words = r"pools otherwise than by a row's first token.*add_pooling_layer=False"
    with pytest.raises(ModelError, match=words):
        hf.document_outputs(model, packed())


def test_an_embedding_is_the_last_token_of_each_document():
    model, batch = made(AutoModel, "qwen3"), packed("flat")
    ours = hf.pool(model(**hf.model_inputs(batch, model)).last_hidden_state, batch, "last")
    theirs = torch.stack(
        [alone(model, documents()[one]).last_hidden_state[0, -1] for one in batch.document_ids]
    )

    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


class OwnHead(transformers.BertPreTrainedModel):
    """A head of one's own: dropout, the mean, and two layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.first, self.second = nn.Linear(32, 8), nn.Linear(8, 1)
        self.post_init()

    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(1)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        return SequenceClassifierOutput(logits=self.second(torch.tanh(self.first(self.pooled(hidden)))))


class FirstAndLast(OwnHead):
    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, 0] * hidden[:, -1]


def own(kind: Any) -> Any:
    torch.manual_seed(0)
    model = kind(CONFIGS["bert"]()).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    return model


def test_heads_of_one_s_own_are_tried_and_not_named():
    model, batch = own(OwnHead), packed()
    ours = hf.document_outputs(model, batch).logits
    theirs = [model(torch.as_tensor(documents()[one]).long()[None]).logits for one in batch.document_ids]

    assert torch.allclose(ours, torch.cat(theirs), rtol=0, atol=1e-6)
    with pytest.raises(ModelError, match=r"FirstAndLast pools a row neither by.*vl\.PaddedSampler"):
        hf.document_outputs(own(FirstAndLast), batch)


BERT, LLAMA = (functools.partial(classifier, family) for family in ("bert", "llama"))


@pytest.mark.parametrize(
    ("make", "labels", "words"),
    [
        (BERT, [0, 1, 2, 3, 0, 0, 0], r"document 3 has class 3 \(1 of the batch's 7.*0 to 2"),
        (BERT, [0, -1, -2, 2, 0, 0, 0], r"document 1 has class -1 \(2 of"),
        (BERT, [0.5] * 7, r"tells 3 classes apart.*whole numbers"),
        (BERT, [[0, 1]] * 7, r"2 numbers a document.*answers with 3"),
        (
            lambda: made(AutoModelForTokenClassification, "bert"),
            None,
            r"answers for each token.*model_inputs",
        ),
        (lambda: LLAMA(pad_token_id=None), None, r"set model\.config\.pad_token_id"),
        (lambda: nn.Linear(2, 2), None, "no transformers config"),
    ],
    ids=["too large", "negative", "numbers", "too many", "tokens", "padding unknown", "no model"],
)
def test_labels_and_models_that_do_not_fit_are_refused_in_a_sentence(make, labels, words):
    with pytest.raises((DocumentsError, ModelError), match=words):
        hf.document_outputs(make(), packed(document_labels=labels))


def test_what_is_no_batch_is_refused_in_a_sentence():
    with pytest.raises(DocumentsError, match=r"takes a PackedBatch.*given dict"):
        hf.document_outputs(classifier("bert"), {"input_ids": [[1]]})  # type: ignore[arg-type]


def _broken(*_: Any) -> None:
    raise RuntimeError("broken")


def test_a_call_leaves_the_model_as_it_was():
    model = classifier("bert")
    state = torch.random.get_rng_state()
    hf.document_outputs(model, packed())

    assert torch.equal(torch.random.get_rng_state(), state)
    assert "forward" not in vars(model.bert)
    model.bert.encoder.layer[0].register_forward_hook(_broken)
    with pytest.raises(RuntimeError, match="broken"):
        hf.document_outputs(model, packed())
    model.bert.encoder.layer[0]._forward_hooks.clear()
    assert "forward" not in vars(model.bert)
    assert model(**padded()).logits.shape == (len(LENGTHS), 3)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_wrapped_models_give_the_same_answers_and_gradients(tmp_path):
    batch = packed(document_labels=LABELS)
    plain = classifier("llama")
    exact = gradients(plain, hf.document_outputs(plain, batch).loss)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(classifier("llama"))
        found = gradients(wrapped.module, hf.document_outputs(wrapped, batch).loss)
    finally:
        dist.destroy_process_group()
    checkpointed = classifier("llama")
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed.train()
    lora = get_peft_model(
        classifier("llama"), LoraConfig(r=2, task_type=TaskType.SEQ_CLS, target_modules=["q_proj"])
    ).eval()
    compiled = torch.compile(classifier("llama"))

    for name, gradient in gradients(checkpointed, hf.document_outputs(checkpointed, batch).loss).items():
        assert torch.allclose(gradient, exact[name], rtol=0, atol=1e-10), name
        assert torch.allclose(found[name], exact[name], rtol=0, atol=1e-10), name
    with torch.no_grad():
        wanted = hf.document_outputs(plain, batch).logits
        assert torch.allclose(hf.document_outputs(lora, batch).logits, wanted, rtol=0, atol=1e-10)
        assert torch.allclose(hf.document_outputs(compiled, batch).logits, wanted, rtol=0, atol=1e-10)


# Pairs and triplets: what a reward model and an embedding are trained on.

ROWS = [([5, 6, 7], [8, 9]), ([10], [11, 12, 13, 14]), ([15, 16], [17]), ([18, 19, 20], [21, 22, 23, 24, 25])]


def batch_of_pairs(capacity: int = 9) -> vl.PackedBatch:
    texts = [text for row in ROWS for text in row]
    lengths = [len(text) for text in texts]
    packing = vl.pack(lengths, capacity, groups=np.repeat(np.arange(len(ROWS)), 2), seed=3)
    return vl.collate(texts, packing)


def test_rewards_of_pairs_have_the_loss_of_rows():
    model, batch = made(AutoModelForSequenceClassification, "llama", num_labels=1), batch_of_pairs()
    rewards = hf.document_outputs(model, batch).logits[:, 0]
    chosen, rejected = rewards[batch.group_segments()].unbind(1)
    loss = -logsigmoid(chosen - rejected).mean()

    one = [torch.cat([alone(model, np.array(text)).logits[0] for text in row]) for row in ROWS]
    first, second = torch.stack(one).unbind(1)
    assert batch.document_ids.tolist() != sorted(batch.document_ids.tolist())  # else any order would do
    assert loss.item() == pytest.approx(-logsigmoid(first - second).mean().item(), rel=1e-6)


needs_sentence_transformers = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None,
    reason="sentence-transformers, whose pooling and losses are the oracle, is not installed",
)


@needs_sentence_transformers
@pytest.mark.parametrize(
    ("how", "mode"),
    [
        *(("mean", "mean"), ("first", "cls"), ("last", "lasttoken"), ("max", "max")),
        ("weighted_mean", "weightedmean"),
    ],
)
def test_pooling_is_that_of_sentence_transformers(how, mode):
    from sentence_transformers.sentence_transformer.modules import Pooling

    model, batch = made(AutoModel, "bert"), packed()
    ours = hf.pool(hf.document_outputs(model, batch).last_hidden_state, batch, how)

    rows = padded()
    features = {"token_embeddings": model(**rows).last_hidden_state, "attention_mask": rows["attention_mask"]}
    theirs = Pooling(32, pooling_mode=mode)(features)["sentence_embedding"]
    assert torch.allclose(ours, theirs[batch.document_ids], rtol=0, atol=1e-6)


class Embedding(nn.Module):
    """A model as sentence-transformers' losses call it: padded rows in, pooled vectors out."""

    def __init__(self, model: Any) -> None:
        from sentence_transformers.sentence_transformer.modules import Pooling

        super().__init__()
        self.model, self.pooling = model, Pooling(32, pooling_mode="mean")

    def forward(self, features: dict[str, Any]) -> Any:
        hidden = self.model(**features).last_hidden_state
        return self.pooling({**features, "token_embeddings": hidden})


@needs_sentence_transformers
def test_embeddings_of_pairs_have_the_ranking_loss_and_gradients_of_sentence_transformers():
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model, batch = made(AutoModel, "bert"), batch_of_pairs()
    columns = []
    for place in (0, 1):
        width = max(len(row[place]) for row in ROWS)
        ids = torch.tensor([row[place] + [0] * (width - len(row[place])) for row in ROWS])
        columns.append({"input_ids": ids, "attention_mask": (ids > 0).long()})
    theirs = MultipleNegativesRankingLoss(model=Embedding(model))(columns, None)
    exact = gradients(model, theirs)

    hidden = hf.document_outputs(model, batch).last_hidden_state
    embeddings = normalize(hf.pool(hidden, batch, "mean")[batch.group_segments()], dim=-1)
    anchors, positives = embeddings.unbind(1)
    ours = cross_entropy(20 * anchors @ positives.T, torch.arange(len(anchors)))

    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert differ(gradients(model, ours), exact) < 1e-6
