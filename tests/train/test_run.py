"""A run in one process equals a plain loop and goes on from every step; its parts by themselves."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rarely import IS_SOAK, mostly
from tests.support.stores import count_openings
from tests.support.training import (
    LLAMA,
    STEPS,
    Notes,
    metrics_of,
    rewound,
    same_end,
    settings,
    steps_of,
    weights_of,
)
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import varlen as vl
from varlen.adapters import hf
from varlen.errors import InputError, ModelError, SettingError, StateError, VarlenError
from varlen.train import step as loss_module
from varlen.train import trainer as trainer_module
from varlen.train.model import build_model, model_config
from varlen.train.optimizers import learning_rate, make_optimizer
from varlen.train.settings import ModelSettings, OptimizerSettings
from varlen.train.step import target_loss_sum
from varlen.train.trainer import train


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    notes = Notes()
    summary = train(settings(store, output), notes)
    return output, summary, notes


def plain_documents(store, given):
    """The documents of every step with their labels, one after the other, as the loader deals them."""
    data = given.data
    with vl.PackedLoader(
        data.source, capacity=data.capacity, global_batch_size=data.global_batch_size, worker="thread", seed=0
    ) as loader:
        for batch in loader:
            flat, labels = batch.input_ids.reshape(-1), batch.labels.reshape(-1)
            segments = batch.segment_ids.reshape(-1)
            ends = batch.cu_seqlens
            spans = [(a, b) for a, b in zip(ends, ends[1:]) if b > a and segments[a] >= 0]
            yield [(flat[a:b].astype(np.int64), labels[a:b].astype(np.int64)) for a, b in spans]


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("micro_batch_size", [1, 6])
def test_a_run_equals_a_plain_loop_over_documents_one_by_one(store, tmp_path, layout, micro_batch_size):
    llama = {"attention_dropout": 0.0}
    given = settings(
        store, tmp_path / "run", run__steps=3, data__micro_batch_size=micro_batch_size, data__layout=layout
    )
    given = replace(given, model=replace(given.model, settings={**given.model.settings, **llama}))
    notes = Notes()
    train(given, notes)

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=260, **given.model.settings))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=False,
    )
    losses = []
    for step, documents in enumerate(plain_documents(store, given), start=1):
        if step > 3:
            break
        targets = sum(int((labels != -100).sum()) for _, labels in documents)
        total = 0.0
        for tokens, labels in documents:
            logits = model(input_ids=torch.from_numpy(tokens)[None]).logits[0, :-1]
            loss = cross_entropy(logits, torch.from_numpy(labels[1:]), reduction="sum") / targets
            total += loss.item() if targets else 0.0
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, 3, given.optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)

    assert [step.loss for step in notes.steps] == pytest.approx(losses, rel=1e-5)
    ours = weights_of(tmp_path / "run")
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(ours[name].numpy(), parameter.detach().numpy(), atol=2e-5, err_msg=name)


@pytest.mark.parametrize("plan", [None, 64], ids=["packs", "slices"])
def test_a_run_opens_its_store_once(store, tmp_path, monkeypatch, plan):
    changes = {} if plan is None else {"plan__slice_tokens": plan}
    llama = {**LLAMA, "attention_dropout": 0.0}
    given = settings(store, tmp_path / "run", run__steps=1, model__settings=llama, **changes)
    counts = count_openings(monkeypatch, store)

    train(given, Notes())

    assert counts == {"opened": 1, "read": 1}


def test_going_on_from_any_checkpoint_ends_with_the_same_bits(whole, store, tmp_path):
    output, _, _ = whole

    assert steps_of(output) == [f"step-{step:08d}" for step in (2, 4, 6)]
    for step in (2, 4):
        copy = rewound(output, step, tmp_path / f"from{step}")
        notes = Notes()
        summary = train(settings(store, copy), notes)
        assert notes.overviews[0].resumed_from == step
        assert (summary.steps, summary.totals.steps) == (STEPS, STEPS - step)
        same_end(output, copy)


def test_a_run_that_tokenizes_on_the_fly_goes_on_with_the_same_bits(store, tmp_path):
    source = {"data__source": str(store.parent / "chats.jsonl"), "data__mode": "streaming"}
    train(settings(store, tmp_path / "whole", **source), Notes())
    copy = rewound(tmp_path / "whole", 2, tmp_path / "copy")

    train(settings(store, copy, **source), Notes())

    same_end(tmp_path / "whole", copy)
    assert metrics_of(copy)[0]["position"] == {"step": 1}


def test_a_lost_dropout_seed_would_be_seen(whole, store, tmp_path, monkeypatch):
    output, _, _ = whole
    copy = rewound(output, 2, tmp_path / "copy")
    monkeypatch.setattr("varlen.train.step.Stepper._seed_of", lambda self, number: 7)

    train(settings(store, copy), Notes())

    assert metrics_of(copy) != metrics_of(output)


def test_every_step_is_written_with_what_it_trained(whole):
    output, summary, notes = whole
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]

    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.005, 0.01, 0.0075, 0.005, 0.0025, 0])
    assert lines[-1]["total_tokens"] == sum(line["tokens"] for line in lines) == summary.total_tokens
    for line in lines:
        assert 0 < line["supervised_tokens"] < line["tokens"] <= 6 * 128
        assert line["fill"] == line["tokens"] / (6 * 128)
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_s"])
        assert 0 <= line["data_wait_s"] <= line["step_s"]
        assert line["epoch"] in (0, 1, 2)
    assert [step.loss for step in notes.steps] == [line["loss"] for line in lines]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_lines_after_the_checkpoint_are_cut_off_and_a_torn_one_too(whole, store, tmp_path):
    output, _, _ = whole
    copy = rewound(output, 2, tmp_path / "copy")
    lines = (output / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:20])

    train(settings(store, copy), Notes())

    assert metrics_of(copy) == metrics_of(output)


def test_a_finished_run_trains_no_more_and_a_longer_one_goes_on(whole, store, tmp_path):
    output, _, _ = whole
    copy = shutil.copytree(output, tmp_path / "copy")
    shutil.rmtree(copy / "model")
    (copy / "checkpoints/.step-00000004.part").mkdir()

    notes = Notes()
    assert train(settings(store, copy), notes).totals.steps == 0
    assert notes.steps == []
    same_end(output, copy)
    assert train(settings(store, copy, run__steps=STEPS + 1), Notes()).totals.steps == 1


@pytest.mark.parametrize("mode", mostly(["indexed"], ["streaming", "indexed"]))
def test_a_run_goes_on_for_more_epochs_from_any_checkpoint(store, tmp_path, mode):
    source = {"data__source": str(store.parent / "chats.jsonl"), "data__mode": mode}
    once = json.loads((store / "manifest.json").read_text())["num_tokens"]

    def trained(folder, epochs):
        given = settings(store, folder, optimizer__schedule="constant", run__epochs=epochs, **source)
        return train(replace(given, run=replace(given.run, steps=None, keep=99)), Notes())

    first = trained(tmp_path / "whole", 1)
    assert first.total_tokens == once
    copies = [
        rewound(tmp_path / "whole", step, tmp_path / f"from{step}")
        for step in ((2, first.steps // 4 * 2) if IS_SOAK else (2,))
    ]
    more = trained(tmp_path / "whole", 2)

    assert (more.overview.resumed_from, more.total_tokens) == (first.steps, 2 * once)
    for copy in copies:
        assert trained(copy, 2).total_tokens == 2 * once
        same_end(tmp_path / "whole", copy)
    if mode == "streaming":
        with pytest.raises(StateError, match="epochs=2, and this loader has fewer, epochs=1"):
            trained(tmp_path / "whole", 1)


def test_only_the_newest_checkpoints_are_kept(store, tmp_path):
    train(settings(store, tmp_path / "run", run__checkpoint_every=1, run__keep=2), Notes())

    assert steps_of(tmp_path / "run") == ["step-00000005", "step-00000006"]


def test_an_epoch_ends_where_the_data_does(store, tmp_path):
    given = settings(store, tmp_path / "run", optimizer__schedule="constant", run__epochs=1)
    given = replace(given, run=replace(given.run, steps=None))
    notes = Notes()

    summary = train(given, notes)

    manifest = json.loads((store / "manifest.json").read_text())
    assert summary.total_tokens == manifest["num_tokens"]
    assert sum(step.supervised_tokens for step in notes.steps) == manifest["num_targets"]
    assert steps_of(tmp_path / "run")[-1] == f"step-{summary.steps:08d}"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"run__resume": "never"}, SettingError, 'run.resume is "never"'),
        ({"run__seed": 1}, StateError, "seed was 0 and is 1"),
        ({"data__capacity": 64}, StateError, "capacity was 128 and is 64"),
        (
            {"model__settings": {"hidden_size": 64, "max_position_embeddings": 128}},
            StateError,
            "model.hidden_size was 32",
        ),
    ],
)
def test_a_changed_setting_is_refused_by_name(whole, store, tmp_path, changes, error, words):
    output, _, _ = whole
    copy = shutil.copytree(output, tmp_path / "copy")
    before = sorted(path.relative_to(copy) for path in copy.rglob("*"))

    with pytest.raises(error, match=words):
        train(settings(store, copy, **changes), Notes())

    assert sorted(path.relative_to(copy) for path in copy.rglob("*")) == before


def test_a_damaged_checkpoint_is_refused_and_the_one_before_serves(whole, store, tmp_path):
    output, _, _ = whole
    copy = rewound(output, 4, tmp_path / "copy")
    (shard,) = (copy / "checkpoints/step-00000004").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-8])

    with pytest.raises(StateError, match=r"step-00000004.* to go on from the checkpoint before"):
        train(settings(store, copy), Notes())

    shutil.rmtree(copy / "checkpoints/step-00000004")
    train(settings(store, copy), Notes())
    same_end(output, copy)


def test_a_loss_that_is_no_number_stops_the_run_and_is_not_saved(store, tmp_path):
    given = settings(store, tmp_path / "run", optimizer__learning_rate=1e30, optimizer__warmup_steps=0)

    with pytest.raises(VarlenError, match="nothing of it was saved"):
        train(given, Notes())

    for name in steps_of(tmp_path / "run") if (tmp_path / "run/checkpoints").exists() else []:
        assert int(name[-8:]) < len(metrics_of(tmp_path / "run")) + 1


def test_a_full_disk_leaves_the_checkpoint_before(whole, store, tmp_path, monkeypatch):
    output, _, _ = whole
    copy = rewound(output, 2, tmp_path / "copy")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("varlen.train.checkpoint.sync", full)
        with pytest.raises(
            VarlenError, match=r"step 4 can't be written.*No space left.*the checkpoint before"
        ):
            train(settings(store, copy), Notes())

    assert [name for name in steps_of(copy) if not name.startswith(".")] == ["step-00000002"]
    train(settings(store, copy), Notes())
    same_end(output, copy)


def test_half_precision_trains_and_stays_near(whole, store, tmp_path):
    _, _, notes = whole
    half = Notes()

    train(settings(store, tmp_path / "run", run__precision="bf16"), half)

    assert half.overviews[0].precision == "bf16"
    assert half.steps[0].loss != notes.steps[0].loss
    assert half.steps[-1].loss == pytest.approx(notes.steps[-1].loss, rel=0.02)
    assert all(value.dtype == torch.float32 for value in weights_of(tmp_path / "run").values())


def test_what_data_cost_is_measured_after_the_run_and_changes_nothing(whole, store, tmp_path, monkeypatch):
    output, _, _ = whole
    given = settings(store, tmp_path / "run", measure__exposed_data=True, measure__steps=3)
    taken = []
    inner = trainer_module.Stepper.step
    monkeypatch.setattr(
        trainer_module.Stepper,
        "step",
        lambda self, number, rate, take: inner(self, number, rate, lambda: taken.append(take()) or taken[-1]),
    )

    summary = train(given, Notes())

    assert summary.exposed.steps == 3
    assert summary.exposed.real_s > 0 < summary.exposed.cached_s
    assert summary.to_json()["exposed"]["stall"] == 1 - summary.exposed.cached_s / summary.exposed.real_s
    real, again = taken[3 * 3 : 3 * 6], taken[3 * 7 :]
    assert [b.input_ids.tolist() for b in again] == [b.input_ids.tolist() for b in real]
    assert [b.cu_seqlens.tolist() for b in again] == [b.cu_seqlens.tolist() for b in real]
    same_end(output, tmp_path / "run")


def test_a_saved_folder_is_trained_on(whole, store, tmp_path):
    output, _, notes = whole
    made = settings(store, tmp_path / "run")
    made = replace(made, model=replace(made.model, type=None, settings={}, path=str(output / "model")))
    more = Notes()

    train(made, more)

    assert more.steps[0].loss < notes.steps[0].loss - 0.5
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no config\.json"):
        train(replace(made, model=replace(made.model, path=str(tmp_path / "empty"))), Notes())


@given(
    st.sampled_from(["constant", "cosine", "linear"]), st.integers(0, 20), st.integers(1, 50), st.floats(0, 1)
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
    given = OptimizerSettings(weight_decay=0.5)
    optimizer = make_optimizer(dict(model.named_parameters()), given, torch.device("cpu"))

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
        ({"model__settings": LLAMA | {"max_position_embeddings": 4}}, "is longer than the 4 positions"),
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


def test_a_run_holds_no_more_batches_than_the_ring_has_slots(store, tmp_path, caplog):
    train(settings(store, tmp_path / "run", data__worker="process", data__micro_batch_size=1), Notes())

    assert "batches are copied" not in " ".join(caplog.messages)
