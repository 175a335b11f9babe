"""A run in one process: it equals a plain loop, goes on from every step with the same bits, and says what it did."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.rarely import IS_SOAK
from tests.support.training import (
    STEPS,
    Notes,
    metrics_of,
    rewound,
    same_end,
    settings,
    steps_of,
    weights_of,
    write_store,
)
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import varlen as vl
from varlen.errors import InputError, SettingError, StateError, VarlenError
from varlen.train import trainer as trainer_module
from varlen.train.step import learning_rate
from varlen.train.trainer import train


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """A run that nothing has disturbed."""
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


def test_going_on_from_any_checkpoint_ends_with_the_same_bits(whole, store, tmp_path):
    output, _, _ = whole

    assert steps_of(output) == [f"step-{step:08d}" for step in (2, 4, 6)]
    for step in (2, 4):
        copy = rewound(output, step, tmp_path / f"from{step}")
        notes = Notes()
        summary = train(settings(store, copy), notes)
        assert notes.plans[0].resumed_from == step
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
    monkeypatch.setattr("varlen.train.step.Stepper._seed", lambda self, number: 7)

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


@pytest.mark.parametrize("mode", ["streaming", "indexed"])
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

    assert (more.plan.resumed_from, more.total_tokens) == (first.steps, 2 * once)
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

    assert half.plans[0].precision == "bf16"
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
