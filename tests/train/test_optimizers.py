"""Optimizers by name update what they should, and runs of each go on from checkpoints to the same bits."""

import sys

import pytest
import torch
from tests.support.training import Notes, rewound, same_end, settings
from transformers import LlamaConfig, LlamaForCausalLM

from varlen.errors import SettingError, StateError
from varlen.train.model import embedding_names
from varlen.train.optimizers import learning_rate, make_optimizer, named_tensors
from varlen.train.settings import OptimizerSettings
from varlen.train.trainer import train

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY))


def made(model, **options):
    parameters = dict(model.named_parameters())
    return make_optimizer(parameters, OptimizerSettings(**options), CPU, embedding_names(model))


def with_gradients(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_updates_matrices_of_layers_as_torch_does_and_all_else_by_adamw():
    model, other = tiny(), tiny()
    optimizer = made(model, name="muon", weight_decay=0.3)
    names = embedding_names(other)
    held = dict(other.named_parameters())
    matrices = [p for name, p in held.items() if p.ndim == 2 and name not in names]
    vectors = [p for p in held.values() if p.ndim == 1]
    embeddings = [held[name] for name in names]
    theirs = [
        torch.optim.Muon(matrices, lr=0.1, momentum=0.95, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
            lr=0.1,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]
    assert names == {"model.embed_tokens.weight", "lm_head.weight"}
    for step in range(3):
        with_gradients(model, step)
        with_gradients(other, step)
        optimizer.step(0.1)
        for one in theirs:
            one.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, held[name]), name


def test_adafactor_is_torch_s_and_holds_a_row_and_a_column_of_each_matrix():
    model, other = tiny(), tiny()
    optimizer = made(model, name="adafactor", weight_decay=0.0)
    theirs = torch.optim.Adafactor(other.parameters(), lr=0.1)
    for step in range(3):
        with_gradients(model, step)
        with_gradients(other, step)
        optimizer.step(0.1)
        theirs.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name])
        sizes = sum(tensor.numel() for _, tensor in named_tensors(optimizer.state_of(parameter)))
        assert sizes == (sum(parameter.shape) if parameter.ndim == 2 else parameter.numel())


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_the_state_before_the_first_update_is_that_which_the_update_makes(name):
    model, other = tiny(), tiny()
    optimizers = [made(each, name=name, weight_decay=0.0) for each in (model, other)]
    for parameter in model.parameters():
        optimizers[0].state_of(parameter)
    for each, optimizer in zip((model, other), optimizers):
        with_gradients(each)
        optimizer.step(0.1)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)
        states = [optimizers[0].state_of(one), optimizers[1].state_of(two)]
        assert states[0].keys() == states[1].keys()
        for key in states[0]:
            assert torch.equal(states[0][key], states[1][key])


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_run_goes_on_to_the_same_bits(store, tmp_path, name):
    train(settings(store, tmp_path / "whole", optimizer__name=name), Notes())
    copy = rewound(tmp_path / "whole", 4, tmp_path / "from4")
    train(settings(store, copy, optimizer__name=name), Notes())
    same_end(tmp_path / "whole", copy)


def test_a_checkpoint_of_another_optimizer_is_refused_unless_its_state_may_begin_anew(store, tmp_path):
    train(settings(store, tmp_path / "run", run__steps=2), Notes())
    with pytest.raises(StateError, match=r"optimizer\.name was 'adamw' and is 'muon'"):
        train(settings(store, tmp_path / "run", optimizer__name="muon"), Notes())

    notes = Notes()
    train(settings(store, tmp_path / "run", optimizer__name="muon"), notes, allow_changed=True)
    assert [step.step for step in notes.steps] == [3, 4, 5, 6]


def test_an_optimizer_that_isnt_installed_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    words = (
        r"needs torchao, which isn't installed; install it \(pip install \"varlen\[adamw-8bit\]\"\), or set"
    )
    with pytest.raises(SettingError, match=words):
        made(tiny(), name="adamw_8bit")


def test_wsd_is_constant_and_then_falls():
    given = OptimizerSettings(
        learning_rate=1.0, schedule="wsd", warmup_share=0.1, decay_share=0.3, min_learning_rate=0.1
    )
    rates = [learning_rate(step, 20, given) for step in range(1, 21)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:14] == [1.0] * 12
    assert rates[14:] == pytest.approx([1 - 0.9 * part / 6 for part in range(1, 7)])


def test_two_warm_ups_are_refused():
    with pytest.raises(
        SettingError, match=r"warmup_steps = 5 and optimizer.warmup_share = 0.1 both set the warm-up"
    ):
        OptimizerSettings(warmup_steps=5, warmup_share=0.1)
