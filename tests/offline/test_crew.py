"""Tasks over processes: every result once, every error a sentence, and no process left behind."""

import json
import os
import pickle
import signal
import sys
import threading
import time

import pytest
from tests.support.offline_packs import contents, pack, small_parts, write_texts

from varlen.documents.source import open_source
from varlen.errors import SettingError, SourceError, WorkerDiedError
from varlen.offline.crew import Crew
from varlen.text.load_tokenizer import load_tokenizer, train_bpe
from varlen.workers import child, pool


@pytest.fixture
def data(tmp_path, monkeypatch):
    small_parts(monkeypatch)
    path = tmp_path / "a.jsonl"
    write_texts(path)
    return path


def ord_of_each(text):
    return [ord(character) for character in text]


def test_errors_of_the_plan_end_the_run_and_its_processes_whatever_they_are():
    before = threading.active_count()
    for error in (SourceError("a"), OSError(5, "b"), EOFError("c"), KeyboardInterrupt("d")):
        with pytest.raises(type(error), match=str(error).replace("[", r"\[").replace("]", r"\]")):
            list(Crew(processes=2).run(add, 1, failing([1, 2, 3], error)))
    assert threading.active_count() == before


def failing(tasks, error):
    yield from tasks
    raise error


def add(shared, task):
    if task == "leave":
        sys.exit(3)
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "full":
        raise MemoryError
    if isinstance(task, str):
        raise SourceError(task)
    return shared + task


def test_results_of_all_tasks_come_once_and_errors_come_across():
    crew = Crew(processes=2)

    assert sorted(crew.run(add, 10, range(40))) == list(range(10, 50))
    assert list(crew.run(add, 10, [])) == []
    with pytest.raises(SourceError, match=r"^a sentence$"):
        list(crew.run(add, 10, [1, "a sentence", 2]))
    with pytest.raises(WorkerDiedError, match="killed by signal 9"):
        list(crew.run(add, 10, ["die"]))
    with pytest.raises(WorkerDiedError, match="ended with code 3"):
        list(crew.run(add, 10, ["leave"]))
    with pytest.raises(WorkerDiedError, match="ran out of memory; what is finished is kept"):
        list(crew.run(add, 10, ["full"]))
    with pytest.raises(RuntimeError, match="TypeError: unsupported operand"):
        list(crew.run(add, 10, [[1]]))


def test_no_process_is_left_where_the_caller_stops_listening(monkeypatch):
    started, start, before = [], child.fresh_interpreter, threading.active_count()

    def noted(*arguments, **more):
        started.append(start(*arguments, **more))
        return started[-1]

    monkeypatch.setattr(child, "fresh_interpreter", noted)

    results = Crew(processes=2).run(add, 1, range(10**9))
    next(results)
    results.close()

    assert started
    assert all(process.returncode is not None for process in started)
    assert all(process.stdin.closed and process.stdout.closed for process in started)
    assert threading.active_count() == before


def test_a_few_tasks_are_made_ahead_and_no_more(tmp_path):
    gate, made = tmp_path / "open", []

    def tasks():
        for number in range(100):
            made.append(number)
            yield number

    results = Crew(processes=2).run(add_behind, gate, tasks())
    first = threading.Thread(target=lambda: made.append(f"done {next(results)}"))
    first.start()
    least, most = 2 + 1, 2 + 2 + pool._AHEAD
    deadline = time.monotonic() + 30
    while len(made) < most and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # for those that should not be made
    count = len(made)
    gate.touch()
    first.join()
    assert least <= count <= most
    assert len(list(results)) == 99


def add_behind(gate, task):
    while not gate.exists():
        time.sleep(0.01)
    return task


def test_functions_that_other_processes_cannot_find_are_refused_in_a_sentence(tmp_path, data, monkeypatch):
    with pytest.raises(
        SettingError, match=r"can't be handed to other processes .*put it into a module, or use one"
    ):
        pack(open_source(data, lambda text: [1]), tmp_path / "out", processes=2)
    monkeypatch.setattr(sys.modules["__main__"], "of_this_session", ord_of_each, raising=False)
    monkeypatch.setattr(ord_of_each, "__module__", "__main__")
    monkeypatch.setattr(ord_of_each, "__qualname__", "of_this_session")
    with pytest.raises(SettingError, match=r"can't be handed to other processes \(Can't get attribute"):
        pack(open_source(data, ord_of_each), tmp_path / "out", processes=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_trained_tokenizer_crosses_processes(tmp_path, data):
    tokenizer = load_tokenizer(train_bpe(json.loads(data.read_text().split("\n")[0]).values(), 270), eos=5)
    assert (
        pickle.loads(pickle.dumps(tokenizer)).encode(["a b"])[0].tolist()
        == tokenizer.encode(["a b"])[0].tolist()
    )

    for processes in (1, 2):
        pack(open_source(data, tokenizer), tmp_path / f"out{processes}", processes=processes)

    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
