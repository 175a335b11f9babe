"""Evaluations equal transformers' own loss, change nothing of a run, and decide what is kept and when it ends."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.support.offline_packs import write_chats
from tests.support.training import LLAMA, Notes, metrics_of, rewound, same_end, settings, steps_of, weights_of
from transformers import LlamaForCausalLM

import varlen as vl
from varlen.documents.source import open_source
from varlen.errors import InputError, SettingError, SourceError
from varlen.offline.index import index_source
from varlen.train.dry_run import forecast
from varlen.train.evaluate import Best
from varlen.train.trainer import train


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Other chats than those that are trained, as rows and as tokens."""
    folder = tmp_path_factory.mktemp("valid")
    write_chats(folder / "valid.jsonl", 17)
    index_source(open_source(str(folder / "valid.jsonl")), folder / "valid")
    return folder


@pytest.fixture(scope="module")
def run(store, valid, tmp_path_factory):
    output = tmp_path_factory.mktemp("evaluated") / "run"
    notes = Notes()
    summary = train(settings(store, output, **_sets(valid)), notes)
    return output, summary, notes


def _sets(valid, **more):
    sets = {"chats": str(valid / "valid"), "again": [str(valid / "valid.jsonl")]}
    made = {"sets": sets, "every": 2, "at_start": True, "lengths": [45, 60], **more}
    return {f"eval__{name}": value for name, value in made.items()}


def _losses(model, store):
    """Each document's length, sum of losses and number of targets, by transformers alone."""
    options = {"capacity": 128, "global_batch_size": 6, "worker": "thread", "shuffle": False}
    with vl.PackedLoader(str(store), **options) as loader:
        for batch in loader:
            ids, labels = batch.input_ids.reshape(-1), batch.labels.reshape(-1)
            for begin, end in pairwise(batch.cu_seqlens.tolist()):
                piece, wanted = (torch.from_numpy(each[begin:end].astype(np.int64)) for each in (ids, labels))
                targets = int((wanted != -100).sum())
                if targets:
                    with torch.no_grad():
                        mean = model(input_ids=piece[None], labels=wanted[None]).loss
                    yield len(piece), float(mean) * targets, targets


def test_the_loss_is_that_of_transformers_on_the_same_documents(run, valid):
    output, _, notes = run
    model = LlamaForCausalLM.from_pretrained(output / "model").eval()
    wanted = list(_losses(model, valid / "valid"))
    found = notes.evaluations[-1].sets["chats"]

    assert found.loss == pytest.approx(
        sum(row[1] for row in wanted) / sum(row[2] for row in wanted), rel=1e-6
    )
    assert (found.documents, found.tokens) == (len(wanted), sum(row[0] for row in wanted))
    for part in found.by_length:
        own = [row for row in wanted if part.above < row[0] <= (part.up_to or math.inf)]
        assert (part.documents, part.targets) == (len(own), sum(row[2] for row in own))
        assert part.loss == (pytest.approx(sum(r[1] for r in own) / part.targets, rel=1e-6) if own else None)
    assert sum(part.documents > 0 for part in found.by_length) > 1
    assert notes.evaluations[-1].sets["again"].loss == pytest.approx(found.loss, rel=1e-6)


def test_an_evaluation_changes_nothing_of_a_run(run, store, tmp_path):
    output, _, _ = run
    train(settings(store, tmp_path / "plain"), Notes())

    assert metrics_of(output) == metrics_of(tmp_path / "plain")
    assert weights_of(output).keys() == weights_of(tmp_path / "plain").keys()
    for name, weight in weights_of(tmp_path / "plain").items():
        assert torch.equal(weights_of(output)[name], weight)


def test_evaluations_come_before_the_first_step_every_few_steps_and_at_the_end(store, valid, tmp_path, run):
    _, summary, notes = run
    assert [each.step for each in notes.evaluations] == [0, 2, 4, 6]
    assert summary.best.step == min(notes.evaluations, key=lambda each: each.loss).step

    notes = Notes()
    train(settings(store, tmp_path / "end", **_sets(valid, every=4, at_start=False)), notes)
    assert [each.step for each in notes.evaluations] == [4, 6]


def test_a_killed_run_evaluates_as_if_it_had_never_been_stopped(run, store, valid, tmp_path):
    output, _, _ = run
    for step in (2, 4):
        copy = rewound(output, step, tmp_path / f"from{step}")
        train(settings(store, copy, **_sets(valid)), Notes())
        same_end(output, copy)
        assert _evaluations(copy) == _evaluations(output)


def _evaluations(output):
    lines = [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def _worse_after(step, monkeypatch):
    """Let the losses of evaluations rise after a step, whatever the model."""
    true = Best.after

    def after(self, number, loss, least_gain):
        return true(self, number, 1.0 + abs(number - step), least_gain)

    monkeypatch.setattr(Best, "after", after)


def test_the_best_checkpoint_is_kept_and_exported(store, valid, tmp_path, monkeypatch):
    _worse_after(2, monkeypatch)
    output = tmp_path / "run"
    given = settings(store, output, run__keep=1, **_sets(valid, keep_best=True))
    train(given, Notes())

    assert steps_of(output) == ["step-00000002", "step-00000006"]
    train(settings(store, tmp_path / "short", run__keep=9, **_sets(valid)), Notes())
    copy = rewound(tmp_path / "short", 2, tmp_path / "two")
    train(settings(store, copy, run__steps=2, optimizer__schedule="constant"), Notes())
    for name, weight in weights_of(copy).items():
        assert torch.equal(weights_of(output)[name], weight)


def test_a_run_ends_after_patience_and_stays_ended(store, valid, tmp_path, monkeypatch):
    _worse_after(1, monkeypatch)
    given = settings(store, tmp_path / "run", **_sets(valid, every=1, patience=2))
    notes = Notes()
    assert train(given, notes).steps == 3
    assert [each.step for each in notes.evaluations] == [0, 1, 2, 3]

    again = Notes()
    assert train(given, again).steps == 3
    assert again.steps == again.evaluations == []


def test_the_least_gain_is_for_patience_and_the_best_is_the_lowest_loss(store, valid, tmp_path, monkeypatch):
    losses = {0: 3.0, 2: 2.0, 4: 1.99, 6: 1.98}
    true = Best.after
    monkeypatch.setattr(
        Best, "after", lambda self, step, loss, least_gain: true(self, step, losses[step], least_gain)
    )
    asked = _sets(valid, keep_best=True, least_gain=0.05, patience=2)
    output = tmp_path / "run"
    summary = train(settings(store, output, run__keep=1, run__steps=8, **asked), Notes())

    assert (summary.ended_by, summary.steps) == ("patience", 6)
    assert (summary.best.step, summary.best.loss) == (6, 1.98)
    assert steps_of(output) == ["step-00000006"]
    copy = rewound(output, 6, tmp_path / "again")
    assert train(settings(store, copy, run__keep=1, run__steps=8, **asked), Notes()).ended_by == "patience"


@pytest.mark.parametrize("least_gain", [0.0, 0.03])
def test_patience_counts_from_the_last_loss_that_fell_enough(least_gain):
    best = Best()
    for step, loss in enumerate([0.3215, 0.3120, 0.3043, 0.2900]):
        best = best.after(step, loss, least_gain)
        assert (best.step, best.loss, best.last) == (step, loss, step)
        best = Best.from_json(json.loads(json.dumps(best.to_json())))
    assert (best.since, best.reference) == (0, 0.29)
    assert best.after(4, 0.2895, least_gain).since == (1 if least_gain else 0)
    assert Best.from_json({"step": 2, "loss": 0.5, "since": 1, "last": 4}).reference == 0.5


def test_slices_evaluate_to_the_same_losses(store, valid, tmp_path):
    still = {"model__settings": {**LLAMA, "attention_dropout": 0.0}, "run__steps": 2}
    packs, slices = Notes(), Notes()
    train(settings(store, tmp_path / "packs", **still, **_sets(valid)), packs)
    train(settings(store, tmp_path / "slices", **still, plan__slice_tokens=32, **_sets(valid)), slices)

    assert [each.step for each in slices.evaluations] == [0, 2]
    for one, other in zip(slices.evaluations, packs.evaluations):
        for name, wanted in other.sets.items():
            found = one.sets[name]
            assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
            for part, same in zip(found.by_length, wanted.by_length):
                assert (part.documents, part.targets) == (same.documents, same.targets)
                assert part.loss == (None if same.loss is None else pytest.approx(same.loss, rel=1e-5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sets": {}}, r"\[eval.sets\] names no set"),
        ({"sets": {"chats": 3}}, "eval.sets.chats must be a text in quotes or a list of texts, got 3"),
        (
            {"monitor": "chat"},
            "eval.monitor is 'chat', which is no set of .eval.sets.; the nearest is 'chats'",
        ),
        ({"lengths": [80, 40]}, r"eval.lengths must rise and be above 0, got \[80, 40\]"),
        ({"patience": 0}, "eval.patience must be at least 1"),
    ],
)
def test_settings_that_make_no_evaluation_are_refused(store, valid, tmp_path, changes, words):
    with pytest.raises(SettingError, match=words):
        settings(store, tmp_path, **_sets(valid, **changes))


def test_a_set_without_labels_is_refused_with_its_name(store, tmp_path):
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "weight": 0}]
    (tmp_path / "empty.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    sets = {"none": str(tmp_path / "empty.jsonl")}
    refused = settings(store, tmp_path / "run", eval__sets=sets)
    with pytest.raises(InputError, match=r"line 1 can't be used: every assistant turn .* is switched off"):
        train(refused, Notes())

    given = settings(store, tmp_path / "run", eval__sets=sets, data__on_error="skip")
    with pytest.raises(
        (SourceError, InputError), match=r"eval\.sets\.none: the data holds nothing to train on"
    ):
        train(given, Notes())


WITHOUT = {
    "answers that are switched off": {
        "messages": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "So.", "weight": 0},
        ]
    },
    "documents of one token": {"input_ids": [5]},
    "tokens without labels": {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]},
}


@pytest.mark.parametrize("rows", WITHOUT)
@pytest.mark.parametrize("way", ["packs", "slices", "dry run"])
def test_every_kind_of_set_without_labels_is_refused_by_name_before_the_first_step(
    store, tmp_path, rows, way
):
    (tmp_path / "none.jsonl").write_text((json.dumps(WITHOUT[rows]) + "\n") * 9)
    sets = {"none": str(tmp_path / "none.jsonl")}
    changes = {"data__on_error": "skip", "data__cache": str(tmp_path / "cache")}
    if way == "slices":
        changes |= {"plan__slice_tokens": 64, "model__settings": {**LLAMA, "attention_dropout": 0.0}}
    given = settings(store, tmp_path / "run", eval__sets=sets, **changes)
    notes = Notes()
    with pytest.raises((SourceError, InputError), match=r"eval\.sets\.none|none\.jsonl") as refused:
        forecast(given) if way == "dry run" else train(given, notes)
    assert "\n" not in str(refused.value)
    assert notes.steps == []


def test_a_set_that_isnt_there_is_refused_before_the_first_step(store, tmp_path):
    notes = Notes()
    given = settings(store, tmp_path / "run", eval__sets={"none": str(tmp_path / "no.jsonl")})
    with pytest.raises(InputError, match=r"no\.jsonl"):
        train(given, notes)
    assert notes.steps == []


def test_a_dry_run_counts_the_documents_of_the_data_and_of_sets(valid, tmp_path):
    rows, store = str(valid / "valid.jsonl"), str(valid / "valid")
    found = forecast(settings(store, tmp_path / "run", eval__sets={"chats": rows, "tokens": store}))

    assert (found.data, found.sets) == (17, {"chats": None, "tokens": 17})
    assert "data         17 documents\n" in found.words()
    assert "evaluation   chats: counted as it is read; tokens: 17 documents\n" in found.words()

    streamed = settings(store, tmp_path / "run", data__source=rows, data__mode="streaming")
    assert "data         counted as it is read\n" in forecast(streamed).words()
