"""Losses by kernels without logits: the same as PyTorch's in the head of any wrapped model, or a sentence why not."""

import importlib.util

import pytest
import torch
from tests.support.training import LLAMA, Notes, metrics_of, settings, start_ranks, table
from torch.nn.functional import cross_entropy, linear
from transformers import AutoConfig, AutoModelForCausalLM

from varlen.errors import SettingError
from varlen.train import step as step_module
from varlen.train import train

STILL = {**LLAMA, "attention_dropout": 0.0}


def _in_blocks(name, device):
    """A kernel as those libraries have: from hidden states and the head's weight, block by block."""

    def kernel(hidden, weight, bias, targets):
        blocks = zip(hidden.split(64), targets.split(64))
        return sum(
            cross_entropy(linear(rows, weight, bias).float(), wanted, ignore_index=-100, reduction="sum")
            for rows, wanted in blocks
        )

    return kernel


def put_kernel():
    step_module.kernel_of = _in_blocks


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data__layout": "flat"},
        {"run__precision": "bf16"},
        {"run__checkpoint_activations": True},
        {"model__settings": {**STILL, "tie_word_embeddings": True}},
    ],
)
def test_the_head_gives_the_same_losses_and_gradients(store, tmp_path, changes, monkeypatch):
    monkeypatch.setattr(step_module, "kernel_of", _in_blocks)
    changes = {"model__settings": STILL, **changes}
    plain, fused = Notes(), Notes()
    train(settings(store, tmp_path / "plain", **changes), plain)
    train(settings(store, tmp_path / "fused", run__cross_entropy="liger", **changes), fused)

    assert (plain.overviews[0].cross_entropy, fused.overviews[0].cross_entropy) == ("torch", "liger")
    margin = 2e-2 if "run__precision" in changes else 1e-4
    for one, other in zip(plain.steps, fused.steps, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=margin / 10)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=margin)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_have_the_same_losses(store, tmp_path, parallel):
    changes = {"model__settings": STILL, "data__micro_batch_size": 1, "run__parallel": parallel}
    plain = table(store, tmp_path / "plain", **changes)
    fused = table(store, tmp_path / "fused", run__cross_entropy="cut", **changes)
    for process in start_ranks([plain, fused], 2, tmp_path, prepare=put_kernel):
        process.join(120)
        assert process.exitcode == 0, [path.read_text() for path in tmp_path.glob("rank*")]

    for one, other in zip(metrics_of(tmp_path / "plain"), metrics_of(tmp_path / "fused"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0, "head_dim": 8}),
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),
    ],
)
def test_a_model_that_changes_its_logits_is_refused(store, tmp_path, kind, more, monkeypatch):
    monkeypatch.setattr(step_module, "kernel_of", _in_blocks)
    small = {
        name: value for name, value in STILL.items() if name in AutoConfig.for_model(kind).to_dict()
    } | more
    given = settings(
        store, tmp_path / "run", model__type=kind, model__settings=small, run__cross_entropy="liger"
    )
    words = 'run.cross_entropy = "liger" can\'t be had: the model changes logits after its head; set'
    with pytest.raises(SettingError, match=words):
        train(given)


@pytest.mark.parametrize(("name", "package"), step_module.FUSED.items())
def test_a_kernel_that_isnt_installed_says_what_to_install(store, tmp_path, name, package, monkeypatch):
    def missing(name, device):
        raise ImportError

    monkeypatch.setattr(step_module, "kernel_of", missing)
    words = rf"{package} isn't installed; install it \(pip install {package}\), or set run.cross_entropy"
    with pytest.raises(SettingError, match=words):
        train(settings(store, tmp_path / "run", run__cross_entropy=name))


def test_an_adapter_of_the_head_is_refused(store, tmp_path, monkeypatch):
    monkeypatch.setattr(step_module, "kernel_of", _in_blocks)
    given = {"adapter__targets": ["lm_head"], "adapter__export": "merged", "run__cross_entropy": "cut"}
    with pytest.raises(SettingError, match=r"can't be had: the model's head is a peft\."):
        train(settings(store, tmp_path / "run", **given))


def test_plans_compute_losses_themselves(store, tmp_path):
    with pytest.raises(SettingError, match=r'run\.cross_entropy = "liger" is for whole packs'):
        settings(store, tmp_path / "run", run__cross_entropy="liger", plan__slice_tokens=64)


@pytest.mark.skipif(
    importlib.util.find_spec("cut_cross_entropy") is None,
    reason="cut-cross-entropy isn't installed in this environment",
)
def test_cut_cross_entropy_itself_has_the_same_losses(store, tmp_path):
    plain, fused = Notes(), Notes()
    train(settings(store, tmp_path / "plain", model__settings=STILL, run__steps=3), plain)
    train(
        settings(store, tmp_path / "fused", model__settings=STILL, run__steps=3, run__cross_entropy="cut"),
        fused,
    )
    assert [step.loss for step in fused.steps] == pytest.approx([step.loss for step in plain.steps], rel=1e-5)


def test_a_forward_that_was_replaced_is_put_back():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=32, **STILL))
    head = model.get_output_embeddings()
    with step_module.replaced_forward(head, lambda hidden: hidden[..., :1]):
        assert model(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 1)
    assert model(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 32)
