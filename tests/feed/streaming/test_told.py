"""Streaming where files change or fail in the midst of it: told whatever is skipped, counted in whichever epoch."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

import varlen as vl
from varlen.errors import SourceError
from varlen.feed.streaming import intake

SAID = "was replaced or rewritten since the files were listed"


def write(path: Path, letter: str, bad: int = 0) -> None:
    lines = [json.dumps({"text": letter * 900}) for _ in range(80)]
    lines[5 : 5 + bad] = [letter * 910] * bad
    beside = path.with_name(".beside")
    beside.write_text("\n".join(lines) + "\n")
    beside.replace(path)


def loader_of(path: Path, **others: object) -> vl.PackedLoader:
    given = {"capacity": 1024, "global_batch_size": 2, "worker": "thread", "overlong": "split", "epochs": 3}
    return vl.PackedLoader(path, "bytes", mode="streaming", read_ahead_s=0.01, **{**given, **others})


@pytest.mark.parametrize("change", ["same size", "longer", "shorter"])
def test_a_file_that_changes_is_told_where_what_cannot_be_read_is_skipped(tmp_path, change):
    path = tmp_path / "data.jsonl"
    write(path, "a", bad=1)
    with loader_of(path, on_error="skip", epochs=20) as loader:
        next(loader)
        write(path, "b", bad=1)
        if change != "same size":
            os.truncate(path, path.stat().st_size + (10 if change == "longer" else -10))
        with pytest.raises(
            SourceError, match=SAID if change == "same size" else "had [0-9,]+ bytes then, now"
        ):
            list(loader)


def test_a_file_that_is_put_back_is_read_on(tmp_path):
    path = tmp_path / "data.jsonl"
    write(path, "a")
    with loader_of(path, epochs=3) as loader:
        expected = [batch.input_ids.tobytes() for batch in loader]
    with loader_of(path, epochs=3) as loader:
        found = []
        path.rename(tmp_path / "kept")
        write(path, "b")
        with pytest.raises(SourceError, match=SAID):
            found += [batch.input_ids.tobytes() for batch in loader]
        (tmp_path / "kept").replace(path)
        found += [batch.input_ids.tobytes() for batch in loader]
    assert found == expected


def failing_from(monkeypatch: pytest.MonkeyPatch, epoch: int, error: Exception) -> None:
    """Let every block of the data fail from an epoch on, as a disk does."""
    bring = intake.Intake.read

    def read(self, claims, soon=()):
        if any(claim.epoch >= epoch for claim in claims):
            monkeypatch.setattr("varlen.files.opening._Stored.readinto", fail)
            monkeypatch.setattr("varlen.files.opening._Stored.readall", fail)
        return bring(self, claims, ())

    def fail(self, *_: object):
        raise error

    monkeypatch.setattr(intake.Intake, "read", read)


def test_what_a_disk_does_not_give_in_a_later_epoch_is_counted_there(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    write(path, "a", bad=2)
    with loader_of(path, on_error="skip", epochs=2) as loader:
        list(loader)
        usual = loader.stats().losses
    assert usual.records == 2
    assert usual.num_bytes == 0

    failing_from(monkeypatch, 1, OSError(errno.EIO, "Input/output error"))
    with loader_of(path, on_error="skip", epochs=2) as loader:
        list(loader)
        losses = loader.stats().losses
    assert losses.records == 2
    assert losses.num_bytes == path.stat().st_size, "all of the second epoch, once"


def test_records_that_are_bad_count_once_in_any_number_of_epochs(tmp_path):
    path = tmp_path / "data.jsonl"
    write(path, "a", bad=3)
    for epochs in (1, 2, 5):
        with loader_of(path, on_error="skip", epochs=epochs) as loader:
            list(loader)
            assert loader.stats().losses.records == 3


def form(value: object, depth: int = 3) -> object:
    """The names and kinds of a state, lists as those of their first entry."""
    if isinstance(value, dict) and depth:
        return {name: form(one, depth - 1) for name, one in sorted(value.items())}
    return type(value).__name__


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epochs", [1, 3, None])
def test_a_stream_has_one_form_of_state_before_its_first_batch_too(tmp_path, shuffle, epochs):
    write(tmp_path / "data.jsonl", "a")
    given = {"shuffle": shuffle, "epochs": epochs, "global_batch_size": 4, "micro_batch_size": 2}
    with loader_of(tmp_path / "data.jsonl", **given) as loader:
        states = [loader.state_dict()]
        for _ in range(3):
            next(loader)
            states.append(loader.state_dict())
        loader.seek(0)
        states.append(loader.state_dict())
        loader.load_state_dict(states[0])
        states.append(loader.state_dict())
    assert states[0]["at"], "it says where it stands"
    assert {json.dumps(form(state)) for state in states} == {json.dumps(form(states[0]))}
    assert states[0] == states[-1] == states[-2]
    assert {len(state["at"]["lanes"]) for state in states} == {4}


def test_states_of_old_without_a_place_before_the_first_batch_are_read(tmp_path):
    write(tmp_path / "data.jsonl", "a")
    with loader_of(tmp_path / "data.jsonl") as loader:
        state = loader.state_dict()
        expected = [batch.input_ids.tobytes() for batch in loader]
    for at in ({}, {"ends": []}):
        with loader_of(tmp_path / "data.jsonl") as loader:
            loader.load_state_dict({**state, "at": at})
            assert loader.state_dict() == state
            assert [batch.input_ids.tobytes() for batch in loader] == expected
