"""Runs that end too early, or side by side: the bytes are those of one run, and nothing is done twice or half."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from offline_packs import (
    DyingTokenizer,
    contents,
    pack,
    small_parts,
    write_texts,
)
from rarely import mostly

from varlen.documents.source import open_source
from varlen.errors import SettingError, WorkerDiedError
from varlen.offline import index as index_module
from varlen.offline import outputs as places_module
from varlen.offline import pack as write_module

TOKEN_PARTS = 3


@pytest.fixture
def data(tmp_path, monkeypatch):
    small_parts(monkeypatch)
    path = tmp_path / "a.jsonl"
    write_texts(path)
    return path


@pytest.fixture
def whole(tmp_path, data):
    """What an undisturbed run writes."""
    pack(data, tmp_path / "whole")
    return contents(tmp_path / "whole")


def interrupt_at(monkeypatch, module, name, call, error=KeyboardInterrupt):
    """Have a function raise at its nth call; returns the list of calls."""
    real, calls = getattr(module, name), []

    def fake(*arguments, **settings):
        calls.append(arguments)
        if len(calls) == call:
            raise error
        return real(*arguments, **settings)

    monkeypatch.setattr(module, name, fake)
    return calls


def interrupted(monkeypatch, module, name, call, data, output, **settings):
    """Pack until the nth call of a function, where it is interrupted."""
    with monkeypatch.context() as patch:
        interrupt_at(patch, module, name, call)
        with pytest.raises(KeyboardInterrupt):
            pack(data, output, **settings)


@pytest.mark.parametrize("processes", mostly([3], [2, 3]))
def test_any_number_of_processes_writes_the_same_bytes(tmp_path, data, whole, processes):
    pack(data, tmp_path / "out", processes=processes)

    assert contents(tmp_path / "out") == whole
    assert len([name for name in whole if name.startswith("part-")]) > 2


@pytest.mark.parametrize("module", [index_module, write_module])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_run_goes_on_where_one_was_interrupted(tmp_path, data, whole, monkeypatch, module, call):
    first = int(module is index_module)  # an index writes what it is of before its first part
    interrupted(monkeypatch, module, "write_json", call + first, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    tokenized = interrupt_at(monkeypatch, index_module, "ShardWriter", 0)
    written = interrupt_at(monkeypatch, write_module, "write_table", 0)

    pack(data, tmp_path / "out")

    assert contents(tmp_path / "out") == whole
    parts = sum(name.startswith("part-") for name in whole)
    left = call - 1
    assert len(tokenized) == (0 if module is write_module else TOKEN_PARTS - left)
    assert len(written) == (parts - left if module is write_module else parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out", "whole"]


@pytest.mark.parametrize("name", ["finish", "write_json", "sync"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_interrupt_while_results_get_their_names_costs_nothing(
    tmp_path, data, whole, monkeypatch, name, call
):
    module = index_module if name == "finish" else places_module
    with monkeypatch.context() as patch:
        calls = interrupt_at(patch, module, name, call)
        try:
            pack(data, tmp_path / "out")
        except KeyboardInterrupt:
            assert len(calls) == call

    pack(data, tmp_path / "out")

    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("at", ["aside", "named"])
def test_a_set_that_is_being_replaced_is_never_there_in_halves(tmp_path, data, whole, monkeypatch, at):
    pack(data, tmp_path / "out", capacity=300)
    old = contents(tmp_path / "out")
    replace = type(tmp_path).replace

    def stop(self, target):
        if (self.name == "out") if at == "aside" else (self.name == "out.partial"):
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            pack(data, tmp_path / "out", overwrite=True)

    assert (tmp_path / "out").exists() == (at == "aside")
    assert at == "named" or contents(tmp_path / "out") == old
    pack(data, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == whole


def test_what_a_note_speaks_of_is_made_again_where_it_is_damaged(tmp_path, data, whole, monkeypatch):
    interrupted(monkeypatch, write_module, "write_json", 4, data, tmp_path / "out")
    partial = tmp_path / "out.partial"
    part = partial / "part-00001.parquet"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    (partial / "part-00002.parquet").unlink()
    (partial / ".work" / "part-00000.parquet.json").write_text("{")

    pack(data, tmp_path / "out")

    assert contents(tmp_path / "out") == whole


def test_damaged_tokens_of_an_unfinished_run_are_made_again(tmp_path, data, whole, monkeypatch):
    interrupted(monkeypatch, index_module, "write_json", 3, data, tmp_path / "out")
    tokens = tmp_path / "out.partial" / ".work" / "tokens.partial" / "00000-0000" / "tokens.bin"
    tokens.write_bytes(b"")

    pack(data, tmp_path / "out")

    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("change", ["data", "setting", "tokenizer"])
def test_what_an_interrupted_run_left_is_not_mixed_with_something_else(tmp_path, data, monkeypatch, change):
    interrupted(monkeypatch, write_module, "write_json", 2, data, tmp_path / "out")
    settings = {"setting": {"capacity": 300}, "tokenizer": {"tokenizer": ord_of_each}}.get(change, {})
    if change == "data":
        write_texts(data, seed=1)

    pack(data, tmp_path / "out", **settings)
    pack(data, tmp_path / "alone", **settings)

    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def ord_of_each(text):
    return [ord(character) for character in text]


def test_a_worker_that_is_killed_ends_the_run_in_a_sentence_and_a_rerun_goes_on(tmp_path, data):
    trigger = tmp_path / "trigger"
    tokenizer = DyingTokenizer("50 ", trigger)
    pack(data, tmp_path / "whole", tokenizer=tokenizer)
    trigger.touch()

    with pytest.raises(
        WorkerDiedError, match=r"was killed by signal 9 \(out of memory\?\); what is finished is kept"
    ):
        pack(data, tmp_path / "out", processes=2, tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()
    assert not trigger.exists()

    pack(data, tmp_path / "out", processes=2, tokenizer=tokenizer)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_that_is_killed_leaves_no_process_and_no_lock(tmp_path, data, whole, root):
    script = root / "tests" / "offline_packs.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, script, data, tmp_path / "out", "2"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"something is finished\n"
        workers = children_of(run.pid)
        run.kill()

    assert list((tmp_path / "out.partial" / ".work").rglob("0*.json"))
    deadline = time.monotonic() + 30
    assert not (tmp_path / "out").exists()
    assert workers
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, workers))
    pack(data, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def children_of(pid):
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    return [int(child) for child, parent in map(str.split, listed.splitlines()) if int(parent) == pid]


def is_running(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


def test_a_second_run_is_refused_while_one_works(tmp_path, data, whole):
    waiting, going_on = threading.Event(), threading.Event()

    def hold(done, total, text):
        waiting.set()
        assert going_on.wait(60)

    from varlen.offline.pack import PackSettings, pack_source

    first = threading.Thread(
        target=pack_source,
        args=(open_source(data), tmp_path / "out", PackSettings(capacity=256, part_tokens=1000)),
        kwargs={"on_progress": lambda *a: hold(*a) if a[2] == "packing" else None},
    )
    first.start()
    assert waiting.wait(60)
    for settings in ({}, {"capacity": 300, "overwrite": True}):
        with pytest.raises(
            SettingError, match=r"another run is writing .*out; wait for it, or name another folder"
        ):
            pack(data, tmp_path / "out", **settings)
    going_on.set()
    first.join()

    assert contents(tmp_path / "out") == whole
    assert pack(data, tmp_path / "out").was_there


def test_a_run_that_waited_at_the_door_of_a_finished_one_takes_nothing_from_it(
    tmp_path, data, whole, monkeypatch
):
    calls = []

    def finish_first(lock, how):
        calls.append(how)
        if len(calls) == 1:  # another run finishes between this one's opening of the lock and taking it
            with monkeypatch.context() as patch:
                patch.setattr(places_module, "fcntl", locks(lambda *a: None))
                pack(data, tmp_path / "out")
        return fcntl.flock(lock, how)

    def locks(flock):  # of this file alone: other libraries lock files in threads of theirs
        return SimpleNamespace(**{**vars(fcntl), "flock": flock})

    monkeypatch.setattr(places_module, "fcntl", locks(finish_first))
    with pytest.raises(SettingError, match="holds a set made from other data or settings"):
        pack(data, tmp_path / "out", capacity=300)

    assert contents(tmp_path / "out") == whole
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("place", ["tokens", "rows", "note", "manifest"])
def test_a_full_disk_is_one_sentence_and_a_rerun_goes_on(tmp_path, data, whole, monkeypatch, place, call):
    full = OSError(errno.ENOSPC, "No space left on device")
    where = {
        "tokens": (index_module.ShardWriter, "append"),
        "rows": (write_module, "write_table"),
        "note": (index_module, "write_json"),
        "manifest": (places_module, "write_json"),
    }
    with monkeypatch.context() as patch:
        interrupt_at(patch, *where[place], call, full)
        said = (
            r"out.* can't be written: the disk is full \([\d,]+ MB free\); make room and run the same again"
        )
        with pytest.raises(SettingError, match=said) as caught:
            pack(data, tmp_path / "out")
    is_kept = (tmp_path / "out.partial").exists()
    assert str(caught.value).endswith("again: what is finished is kept" if is_kept else "the same again")
    assert is_kept == (place == "rows" or call > (2 if place in ("note", "manifest") else 1))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.part"))

    pack(data, tmp_path / "out")
    assert contents(tmp_path / "out") == whole
