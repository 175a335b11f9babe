"""Checkpoints that are damaged, or of a run that has changed since: one sentence with the way out."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.support.training import (
    LLAMA,
    Notes,
    rewound,
    same_end,
    settings,
    start_ranks,
    steps_of,
    table,
    write_store,
)

from varlen.documents.source import open_source
from varlen.errors import StateError, VarlenError
from varlen.offline.index import index_source
from varlen.train.checkpoint import WITHOUT_CHECKSUMS, Checkpoint, checksum_of, load, newest, read_weights
from varlen.train.configuration import as_settings
from varlen.train.parallel import Ranks
from varlen.train.settings import TrainSettings
from varlen.train.trainer import train

OLD, NEW = "step-00000002", "step-00000004"


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    train(settings(store, output), Notes())
    return output


@pytest.fixture(scope="module")
def other(store, tmp_path_factory):
    """Another run: of the same shapes, and so of the same sizes."""
    output = tmp_path_factory.mktemp("other") / "run"
    train(settings(store, output, run__seed=7), Notes())
    return output


def shard(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


def edited(folder: Path, *, again: bool = True, **changes: object) -> None:
    """Change what a checkpoint says of itself; a value of ... takes it out."""
    path = folder / "checkpoint.json"
    told = json.loads(path.read_text()) | changes
    told = {name: value for name, value in told.items() if value is not ...}
    if again and "checksum" in told:
        told["checksum"] = checksum_of(told)
    path.write_text(json.dumps(told))


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[min(int(at * len(content)), len(content) - 1)] ^= 4
    path.write_bytes(content)


def take_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def take_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


TOLD_LATER = {(name, value) for name in ("total_tokens", "seed") for value in ("-1", str(2**80))} | {
    (name, "{}") for name in ("loader", "model")
}
"""What is of the right kind, so that who reads it tells."""
DAMAGES = {
    "shard of another step": lambda new, old, other: shutil.copy(shard(old), shard(new)),
    "shard of another run": lambda new, old, other: shutil.copy(shard(other), shard(new)),
    "description of another step": lambda new, old, other: shutil.copy(old / "checkpoint.json", new),
    "description of another run": lambda new, old, other: shutil.copy(other / "checkpoint.json", new),
    "another step under this name": lambda new, old, other: (shutil.rmtree(new), shutil.copytree(old, new)),
    "one more shard": lambda new, old, other: shutil.copy(
        shard(other), new / "shard-00009-model.safetensors"
    ),
    "shard cut short": lambda new, old, other: os.truncate(shard(new), shard(new).stat().st_size - 8),
    "shard empty": lambda new, old, other: os.truncate(shard(new), 0),
    "bit of a header": lambda new, old, other: flip(shard(new), 0.0),
    "bit of a tensor": lambda new, old, other: flip(shard(new), 0.7),
    "garbled": lambda new, old, other: shard(new).write_bytes(
        random.Random(1).randbytes(shard(new).stat().st_size)
    ),
    "shard gone": lambda new, old, other: shard(new).unlink(),
    "shard a FIFO": lambda new, old, other: take_fifo(shard(new)),
    "shard a folder": lambda new, old, other: take_folder(shard(new)),
    "description gone": lambda new, old, other: (new / "checkpoint.json").unlink(),
    "description a FIFO": lambda new, old, other: take_fifo(new / "checkpoint.json"),
    "description a folder": lambda new, old, other: take_folder(new / "checkpoint.json"),
    "description of garbage": lambda new, old, other: (new / "checkpoint.json").write_bytes(b"\xff\0{"),
    "description cut short": lambda new, old, other: os.truncate(new / "checkpoint.json", 300),
    "description a list": lambda new, old, other: (new / "checkpoint.json").write_text("[1]"),
    "description nested": lambda new, old, other: (new / "checkpoint.json").write_text("[" * 100_000),
    "description of a huge number": lambda new, old, other: (new / "checkpoint.json").write_text(
        '{"step": ' + "9" * 5000 + "}"
    ),
    "no keys": lambda new, old, other: (new / "checkpoint.json").write_text('{"format": 3}'),
    "a digit of the loader's state": lambda new, old, other: edited(
        new, again=False, loader=json.loads((old / "checkpoint.json").read_text())["loader"]
    ),
    "no checksums": lambda new, old, other: edited(new, sha256=...),
    "no checksum of its own": lambda new, old, other: edited(new, checksum=...),
    "no checksums, as of 0.1.0, and a shard of another step": lambda new, old, other: (
        edited(new, format=2, sha256=..., checksum=...),
        shutil.copy(shard(old), shard(new)),
    ),
    "no checksums, as of 0.1.0, and garbled": lambda new, old, other: (
        edited(new, format=2, sha256=..., checksum=...),
        shard(new).write_bytes(b"\xff" * shard(new).stat().st_size),
    ),
    **{
        f"{name} {value!r}": lambda new, old, other, name=name, value=value: edited(new, **{name: value})
        for name in ("step", "files", "sha256", "loader", "model", "seed", "total_tokens", "format")
        for value in (..., None, "4", -1, 2**80, [], {}, True)
        if (name, str(value)) not in TOLD_LATER
    },
    "checksums of another kind": lambda new, old, other: edited(new, sha256={shard(new).name: 5}),
    "a name that leads elsewhere": lambda new, old, other: edited(
        new, files={"../x.safetensors": 3}, sha256={"../x.safetensors": "0" * 64}
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_sentence_that_names_the_one_before(
    whole, other, tmp_path, damage
):
    folder = rewound(whole, 4, tmp_path / "copy") / "checkpoints"
    DAMAGES[damage](folder / NEW, folder / OLD, other / "checkpoints" / NEW)

    with pytest.raises(StateError) as told:
        newest(folder, Ranks())

    said = str(told.value)
    assert "\n" not in said
    assert str(folder / NEW) in said
    assert said.endswith(
        f"; remove {folder / NEW} to go on from the checkpoint before, {OLD}, which is whole"
    )


@pytest.mark.parametrize("damage", ["shard of another run", "bit of a tensor", "description gone"])
def test_a_run_goes_on_from_the_checkpoint_that_was_named(whole, other, store, tmp_path, damage):
    copy = rewound(whole, 4, tmp_path / "copy")
    folder = copy / "checkpoints"
    DAMAGES[damage](folder / NEW, folder / OLD, other / "checkpoints" / NEW)
    with pytest.raises(StateError, match=re.escape(str(folder / NEW))):
        train(settings(store, copy), Notes())

    shutil.rmtree(folder / NEW)
    train(settings(store, copy), Notes())
    same_end(whole, copy)


def test_where_all_are_damaged_nothing_is_advised_to_be_removed(whole, tmp_path):
    folder = rewound(whole, 4, tmp_path / "copy") / "checkpoints"
    for name in (OLD, NEW):
        flip(shard(folder / name), 0.5)
    with pytest.raises(StateError, match="no other checkpoint here is whole: put back a copy of it"):
        newest(folder, Ranks())


def test_one_between_that_is_damaged_too_is_passed_over(whole, tmp_path):
    folder = rewound(whole, 6, tmp_path / "copy") / "checkpoints"
    flip(shard(folder / "step-00000006"), 0.5)
    (folder / NEW / "checkpoint.json").unlink()
    with pytest.raises(StateError, match=f"remove .*step-00000006 and {NEW} to go on from .*{OLD}"):
        newest(folder, Ranks())


def test_a_checkpoint_of_an_earlier_version_is_accepted_with_a_sentence(whole, store, tmp_path):
    copy = rewound(whole, 4, tmp_path / "copy")
    edited(copy / "checkpoints" / NEW, format=2, sha256=..., checksum=...)
    notes = Notes()
    train(settings(store, copy), notes)
    same_end(whole, copy)
    assert [said for said in notes.said if "has no checksums" in said and NEW in said]


def test_folders_that_cannot_be_listed_are_not_taken_for_empty_ones(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StateError, match="can't be listed"):
        newest(tmp_path / "checkpoints", Ranks())
    assert newest(tmp_path / "none", Ranks()) is None


def test_checksums_are_those_of_the_files(whole):
    import hashlib

    folder = whole / "checkpoints" / NEW
    told = json.loads((folder / "checkpoint.json").read_text())
    assert told["sha256"] == {shard(folder).name: hashlib.sha256(shard(folder).read_bytes()).hexdigest()}


@pytest.mark.parametrize("how", ["garbled", "a tensor less", "other shapes"])
def test_tensors_that_cannot_be_read_are_one_sentence_without_checksums_too(whole, tmp_path, how):
    import torch

    folder = rewound(whole, 4, tmp_path / "copy") / "checkpoints" / NEW
    tensors = load_file(shard(folder))
    wanted = {name: torch.zeros_like(value) for name, value in tensors.items()}
    if how == "garbled":
        shard(folder).write_bytes(b"\x08\0\0\0\0\0\0\0{}      " + b"\xff" * 90)
    elif how == "a tensor less":
        save_file(dict(list(tensors.items())[1:]), shard(folder))
    else:
        save_file({name: torch.zeros(3) for name in tensors}, shard(folder))
    told = Checkpoint(folder=folder, step=4, manifest={})
    with pytest.raises(StateError, match=re.escape(str(folder))):
        load(told, wanted, Ranks())
    if how == "garbled":
        shard(folder).write_bytes(b"\xff" * 90)
        with pytest.raises(StateError, match="can't be read"):
            read_weights(folder)


@pytest.mark.soak
@pytest.mark.parametrize("damage", ["bit of a tensor", "description cut short"])
def test_all_ranks_refuse_together(store, tmp_path, damage):
    made = table(store, tmp_path / "run", run__parallel="fsdp", run__steps=2, run__timeout_s=60)
    made["data"]["micro_batch_size"] = 1
    run = [*start_ranks([made], 2, tmp_path)]
    for process in run:
        process.join(120)
        assert process.exitcode == 0, [path.read_text() for path in tmp_path.glob("*rank*")]
    folder = tmp_path / "run" / "checkpoints" / OLD
    files = sorted(folder.glob("*.safetensors"))
    assert len(json.loads((folder / "checkpoint.json").read_text())["sha256"]) == len(files)
    flip(files[-1], 0.7) if damage == "bit of a tensor" else os.truncate(folder / "checkpoint.json", 99)

    (tmp_path / "again").mkdir()
    made["run"]["steps"] = 4
    run = start_ranks([made], 2, tmp_path / "again")
    for process in run:
        process.join(120)
        assert process.exitcode not in (0, None), "a rank waits, or goes on"
    said = sorted(path.read_text() for path in (tmp_path / "again").iterdir() if path.is_file())
    assert len(said) == 2
    assert any(str(folder) in one for one in said), said
    assert all(one.startswith(("StateError: ", "VarlenError: rank ")) for one in said), said


@given(data=st.data())
@hypothesis(max_examples=60, deadline=None)
def test_any_damage_is_one_sentence_or_none(whole, tmp_path_factory, data):
    folder = rewound(whole, 4, tmp_path_factory.mktemp("any") / "copy") / "checkpoints"
    path = data.draw(st.sampled_from(sorted((folder / NEW).iterdir())))
    content = bytearray(path.read_bytes())
    before = bytes(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        how = data.draw(st.sampled_from(("flip", "cut", "insert", "swap")))
        if how == "flip" and content:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del content[at:]
        elif how == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            content[at : at + 8], content[:8] = content[:8], content[at : at + 8]
    path.write_bytes(content)
    found, said = None, ""
    try:
        found = newest(folder, Ranks())
    except VarlenError as error:
        said = str(error)
    finally:
        shutil.rmtree(folder.parent.parent)
    assert "\n" not in said
    if found is None:
        assert said
        return
    assert found.step == 4
    if path.suffix == ".safetensors":
        assert bytes(content) == before
    else:  # spaces between
        assert json.loads(content) == json.loads(before)


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


def test_a_checkpoint_without_settings_and_weights_is_accepted_with_a_sentence(base, tmp_path):
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
