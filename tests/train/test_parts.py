"""Parts of the trainer by themselves: learning rates, losses in blocks, AdamW's groups, models that are refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.training import LLAMA, Notes, settings, write_store
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from varlen.adapters import hf
from varlen.errors import InputError, ModelError, SettingError
from varlen.train import step as loss_module
from varlen.train.model import build_model, model_config
from varlen.train.settings import ModelSettings, OptimizerSettings
from varlen.train.step import learning_rate, make_optimizer, target_loss_sum
from varlen.train.trainer import train


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"))


@given(
    st.sampled_from(["constant", "cosine", "linear"]),
    st.integers(0, 20),
    st.integers(1, 50),
    st.floats(0, 1),
)
def test_the_learning_rate_rises_to_its_highest_and_falls_to_its_lowest(schedule, warmup, after, lowest):
    made = OptimizerSettings(
        learning_rate=2.0, schedule=schedule, warmup_steps=warmup, min_learning_rate=lowest
    )
    steps = warmup + after
    rates = [learning_rate(step, steps, made) for step in range(1, steps + 1)]

    assert all(0 < rate <= 2 for rate in rates[:warmup])
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[-1] == (2.0 if schedule == "constant" else pytest.approx(lowest))
    if warmup:
        assert rates[warmup - 1] == 2.0
    assert learning_rate(steps + 5, steps, made) == rates[-1]


def test_the_cosine_stands_halfway_in_the_middle():
    made = OptimizerSettings(learning_rate=1.0, schedule="cosine", min_learning_rate=0.2)

    assert learning_rate(5, 10, made) == pytest.approx(0.6)
    assert learning_rate(2, 8, made) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("block", [5, 4096])
def test_losses_in_blocks_are_those_of_all_targets_at_once(monkeypatch, block):
    monkeypatch.setattr(loss_module, "BLOCK", block)
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 7, requires_grad=True)
    labels = torch.randint(0, 7, (2, 9))
    labels[0, 3:5] = -100

    ours = target_loss_sum(logits, labels)
    (ours_grad,) = torch.autograd.grad(ours, logits)
    plain = cross_entropy(
        logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
    )
    (plain_grad,) = torch.autograd.grad(plain, logits)

    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(ours_grad, plain_grad)
    assert float(target_loss_sum(logits.detach(), torch.full_like(labels, -100))) == 0


def test_matrices_decay_and_norms_and_biases_do_not():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **LLAMA, attention_bias=True))
    optimizer = make_optimizer(model, OptimizerSettings(weight_decay=0.5), torch.device("cpu"))

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays = {
        names[id(parameter)]: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert len(decays) == len(names)
    for name, decay in decays.items():
        assert decay == (0.0 if "norm" in name or "bias" in name else 0.5), name
    assert optimizer.param_groups[0]["fused"]


def test_the_vocabulary_is_that_of_the_data_unless_said_otherwise():
    assert model_config(ModelSettings(type="llama"), 260).vocab_size == 260
    assert model_config(ModelSettings(type="llama", settings={"vocab_size": 512}), 260).vocab_size == 512


def test_a_vocabulary_that_nobody_knows_is_asked_for():
    with pytest.raises(SettingError, match=r"set model\.settings\.vocab_size"):
        model_config(ModelSettings(type="llama"), None)

    assert model_config(ModelSettings(type="llama", settings={"vocab_size": 512}), None).vocab_size == 512


def test_a_seed_decides_the_weights_and_attention_is_per_document():
    made = ModelSettings(type="llama", settings=LLAMA)
    config = model_config(made, 260)
    first, again, other = (build_model(config, made, seed) for seed in (1, 1, 2))

    assert hf.implementation(first) == "varlen"
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert np.dtype("float32") == first.lm_head.weight.detach().numpy().dtype


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__settings": LLAMA | {"vocab_size": 200}}, "260 tokens, but the model knows 200"),
        ({"data__capacity": 256}, "capacity 256 is longer than the 128 positions"),
        ({"model__settings": {"hidden_sise": 4}}, "the nearest is model.settings.hidden_size"),
        ({"model__settings": {"hidden_size": "wide"}}, "model.settings are refused by llama"),
        ({"model__type": "lama"}, "the nearest of its 1"),
        ({"model__attention": "quick"}, 'model.attention = "quick" can\'t be had'),
        (
            {"model__type": "mamba", "model__settings": {"hidden_size": 32, "num_hidden_layers": 1}},
            "keep documents apart",
        ),
        ({"data__global_batch_size": 5}, "global_batch_size 5 doesn't divide"),
        ({"data__source": "nowhere"}, "nowhere"),
        ({"run__device": "cuda"}, 'run.device is "cuda" and PyTorch finds no GPU'),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(store, tmp_path, changes, words):
    if torch.cuda.is_available() and "run__device" in changes:
        pytest.skip("there is a GPU here, so that asking for one is no mistake")
    if words.startswith("the nearest of its"):
        words = "is no causal language model of transformers; the nearest of its "

    with pytest.raises(InputError) as refused:
        train(settings(store, tmp_path / "run", **changes), Notes())

    assert words in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_several_processes_need_a_way_to_share_the_work(store, tmp_path, monkeypatch):
    for name, value in (
        ("WORLD_SIZE", "2"),
        ("RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)

    with pytest.raises(SettingError, match=r'run\.parallel is "none", and there are 2 processes'):
        train(settings(store, tmp_path / "run", run__parallel="none"), Notes())


def test_a_family_without_an_argument_that_keeps_documents_apart_is_no_causal_trainee():
    made = ModelSettings(type="mamba", settings={"hidden_size": 32, "num_hidden_layers": 1})

    with pytest.raises(ModelError, match="keep documents apart"):
        build_model(model_config(made, 260), made, 0)
