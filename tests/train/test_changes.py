"""What changed since a checkpoint is said, or refused unless it is allowed; each by its old and its new value."""

import json
import re
import shutil

import pytest
from tests.support.training import LLAMA, Notes, rewound, settings, steps_of, table, write_store

from varlen.documents.source import open_source
from varlen.errors import StateError
from varlen.offline.index import index_source
from varlen.train.checkpoint import WITHOUT_CHECKSUMS, checksum_of
from varlen.train.settings import TrainSettings, as_settings
from varlen.train.trainer import train


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run from a folder of weights, stopped after step 2."""
    folder = tmp_path_factory.mktemp("base")
    store = write_store(folder)
    model = {"model__settings": {**LLAMA, "attention_dropout": 0.0}}
    train(settings(store, folder / "first", run__steps=1, **model), Notes())
    shutil.copytree(folder / "first/model", folder / "weights")
    given = {"model__type": None, "model__settings": {}, "model__path": str(folder / "weights")}
    train(made(store, folder / "whole", given), Notes())
    return store, rewound(folder / "whole", 2, folder / "run"), given


def made(store, output, given, **changes):
    found = table(store, output, **given | changes)
    found["model"] = {key: value for key, value in found["model"].items() if value}
    return as_settings(TrainSettings, found, "")


SAID = {
    "optimizer__learning_rate": ("optimizer.learning_rate was 0.01 and is 0.5", 0.5),
    "optimizer__schedule": ("optimizer.schedule was 'linear' and is 'constant'", "constant"),
    "run__steps": ("run.steps was 6 and is 3", 3),
    "run__checkpoint_every": ("run.checkpoint_every was 2 and is 1", 1),
    "log__every": ("log.every was 10 and is 3", 3),
}


def test_what_may_change_is_said_a_line_each(base, tmp_path):
    store, run, given = base
    copy = shutil.copytree(run, tmp_path / "run")
    notes = Notes()

    train(made(store, copy, given, **{name: value for name, (_, value) in SAID.items()}), notes)

    assert [line for line in notes.said if " was " in line] == [words for words, _ in SAID.values()]
    assert steps_of(copy)[-1] == "step-00000003"


def other_store(store, folder):
    (folder / "other").mkdir()
    lines = (store.parent / "chats.jsonl").read_text().splitlines(keepends=True)
    (folder / "other/chats.jsonl").write_text("".join(lines[::-1]))
    index_source(open_source(str(folder / "other/chats.jsonl")), folder / "other/store")
    return folder / "other/store"


REFUSED = {
    "seed": ({"run__seed": 1}, r"run\.seed was 0 and is 1"),
    "precision": ({"run__precision": "bf16"}, r"run\.precision was 'fp32' and is 'bf16'"),
    "capacity": ({"data__capacity": 64}, r"data\.capacity was 128 and is 64"),
    "batch": ({"data__global_batch_size": 2}, r"data\.global_batch_size was 6 and is 2"),
    "path": ({}, r"model\.path was '.*weights' and is '.*moved', and model\.safetensors had"),
    "weights": ({}, r"model\.path .*: model\.safetensors had the SHA-256 \w{12} and has \w{12}"),
    "data": ({}, r"data\.source was '.*store' and is '.*store'; its place in the data isn't this run's"),
    "several": (
        {"run__seed": 1, "data__capacity": 64},
        r"data\.capacity was 128 .*; run\.seed was 0 and is 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_it_another_run_is_refused_by_both_values_unless_it_is_allowed(base, tmp_path, name):
    store, run, given = base
    changes, words = REFUSED[name]
    copy = shutil.copytree(run, tmp_path / "run")
    weights = shutil.copytree(given["model__path"], tmp_path / "moved")
    if name in ("path", "weights"):
        changed = bytearray((weights / "model.safetensors").read_bytes())
        changed[-1] ^= 1
        (weights / "model.safetensors").write_bytes(changed)
    if name == "path":
        changes = {"model__path": str(weights)}
    if name == "weights":
        manifest = copy / "checkpoints/step-00000002/checkpoint.json"
        notes = json.loads(manifest.read_text().replace(given["model__path"], str(weights)))
        manifest.write_text(json.dumps({**notes, "checksum": checksum_of(notes)}))
        changes = {"model__path": str(weights)}
    if name == "data":
        store = other_store(store, tmp_path)
    before = sorted(path.relative_to(copy) for path in copy.rglob("*"))

    with pytest.raises(StateError, match=words) as refused:
        train(made(store, copy, given, **changes), Notes())
    assert "--allow-changed" in str(refused.value)
    assert sorted(path.relative_to(copy) for path in copy.rglob("*")) == before

    notes = Notes()
    summary = train(made(store, copy, given, **changes), notes, allow_changed=True)
    assert summary.steps == 6
    assert summary.totals.steps == 4
    assert any(re.search(words.split("; its")[0].split(" .*;")[0], line) for line in notes.said), notes.said
    is_anew = any("the data is read from its beginning" in line for line in notes.said)
    assert is_anew == (name not in ("precision", "path", "weights"))


def test_weights_that_were_moved_or_touched_are_the_same(base, tmp_path):
    store, run, given = base
    copy = shutil.copytree(run, tmp_path / "run")
    moved = tmp_path / "moved"
    shutil.copytree(given["model__path"], moved, copy_function=shutil.copy)

    assert train(made(store, copy, given, model__path=str(moved)), Notes()).steps == 6


def test_a_checkpoint_of_an_earlier_version_is_accepted_with_a_sentence(base, tmp_path):
    store, run, given = base
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "checkpoints/step-00000002/checkpoint.json"
    manifest = json.loads(path.read_text())
    for name in ("settings", "weights", "data_begun_at", "sha256", "checksum"):
        del manifest[name]
    manifest["format"] = WITHOUT_CHECKSUMS
    path.write_text(json.dumps(manifest))
    notes = Notes()

    assert train(made(store, copy, given), notes).steps == 6
    assert any("didn't note its settings" in line for line in notes.said)
    assert any("doesn't say which weights" in line for line in notes.said)
