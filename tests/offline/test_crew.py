"""Tasks over processes and clusters: every result once, the bytes of one run however it ends, no process left."""

import errno
import fcntl
import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from tests.support.offline_packs import DyingTokenizer, contents, pack, small_parts, table_of, write_texts
from tests.support.rarely import mostly

from varlen.documents.source import open_source
from varlen.errors import MissingExtraError, OverlongDocumentError, SettingError, SourceError, WorkerDiedError
from varlen.files import ours
from varlen.offline import index as index_module
from varlen.offline import outputs as places_module
from varlen.offline import pack as write_module
from varlen.offline.crew import Crew, _task
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
        SettingError, match=r"can't be sent to other processes .*put it into a module, or use one"
    ):
        pack(open_source(data, lambda text: [1]), tmp_path / "out", processes=2)
    monkeypatch.setattr(sys.modules["__main__"], "of_this_session", ord_of_each, raising=False)
    monkeypatch.setattr(ord_of_each, "__module__", "__main__")
    monkeypatch.setattr(ord_of_each, "__qualname__", "of_this_session")
    with pytest.raises(SettingError, match=r"can't be sent to other processes \(Can't get attribute"):
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


TOKEN_PARTS = 3


@pytest.fixture
def whole(tmp_path, data):
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


@pytest.mark.parametrize(
    ("module", "name"),
    [(index_module, "finish"), (places_module, "write_json"), (places_module, "sync"), (ours, "sync")],
)
@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_interrupt_while_results_get_their_names_costs_nothing(
    tmp_path, data, whole, monkeypatch, module, name, call
):
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
    script = root / "tests" / "support" / "offline_packs.py"
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


def test_a_run_that_waited_for_a_finished_one_takes_nothing_from_it(tmp_path, data, whole, monkeypatch):
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


HAS_RAY = find_spec("ray") is not None


@pytest.fixture(scope="module")
def cluster():
    if not HAS_RAY:
        pytest.skip("ray isn't installed here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        ray.init(
            num_cpus=2,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=50,
        )
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker finds a file of tests
        yield ray
        ray.shutdown()


def give_back(shared, task):
    if task == "die":
        os._exit(7)
    if task < 0:
        raise SourceError(f"{task} is below {shared}")
    return shared + task


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_cluster_writes_the_same_bytes_and_goes_on_like_processes(tmp_path, monkeypatch, cluster):
    small_parts(monkeypatch)
    write_texts(tmp_path / "a.jsonl")
    pack(tmp_path / "a.jsonl", tmp_path / "out")
    monkeypatch.chdir(tmp_path)  # paths are relative to where the command was given

    pack("a.jsonl", tmp_path.relative_to(tmp_path) / "over", crew=Crew(ray=True))
    with pytest.raises(OverlongDocumentError, match="pass --overlong split"):
        pack("a.jsonl", tmp_path / "short", crew=Crew(ray=True), capacity=20, overlong="error")

    assert contents(tmp_path / "over") == contents(tmp_path / "out")
    assert len(contents(tmp_path / "out")) > 3


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_cluster_loses_what_one_process_does(tmp_path, monkeypatch, cluster):
    small_parts(monkeypatch)
    write_texts(tmp_path / "a.jsonl")
    sound = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "b.jsonl").write_bytes(sound[:300] + b"\xff{" + sound[302:] + b'{"text": 5}\n{')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(sound)[:-30])
    source = open_source(tmp_path, on_error="skip")

    alone = pack(source, tmp_path / "out" / "alone", crew=Crew(processes=1))
    pack(source, tmp_path / "out" / "over", crew=Crew(ray=True))

    assert alone.manifest["losses"]["records"] >= 3
    assert alone.manifest["losses"]["cut_files"] == 1
    assert contents(tmp_path / "out" / "over") == contents(tmp_path / "out" / "alone")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_results_come_once_and_errors_come_across_a_cluster(cluster):
    crew = Crew(ray=True)

    assert sorted(crew.run(give_back, 10, range(20))) == list(range(10, 30))
    with pytest.raises(SourceError, match=r"^-1 is below 10$"):
        list(crew.run(give_back, 10, [1, -1, 2, 3, 4, 5, 6]))
    with pytest.raises(
        WorkerDiedError, match=r"Ray lost a part \(WorkerCrashedError: .*what is finished is kept"
    ):
        list(crew.run(give_back, 10, ["die"]))


def test_a_machine_that_does_not_share_the_folders_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    is_done, error = _task((tmp_path / "elsewhere", give_back, 1), 1)

    assert not is_done
    assert isinstance(error, SettingError)
    assert "all machines must share the folders" in str(error)


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(
        MissingExtraError, match=r'--ray takes Ray, not installed here; run: pip install "varlen\[ray\]"'
    ):
        list(Crew(ray=True).run(give_back, 1, [1]))


@pytest.mark.skipif(not HAS_RAY, reason="ray isn't installed here")
@pytest.mark.soak
def test_a_cluster_that_is_not_there_is_bad_input(tmp_path):
    write_texts(tmp_path / "a.jsonl")
    command = [sys.executable, "-m", "varlen", "pack", "a.jsonl", "-o", "out", "--ray"]
    environment = {
        **os.environ,
        "RAY_ADDRESS": "nonsense",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }

    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    assert run.returncode == 2, run.stderr
    assert run.stderr.splitlines()[-1].startswith("varlen: no Ray cluster at nonsense (")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.soak
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_packed_folder_is_a_parquet_data_set_of_ray(tmp_path, cluster):
    write_texts(tmp_path / "a.jsonl")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{\n")
    pack(open_source(tmp_path / "a.jsonl", on_error="skip"), tmp_path / "out")

    rows = cluster.data.read_parquet(str(tmp_path / "out"), concurrency=1, override_num_blocks=1).take_all()

    assert sorted(path.name for path in (tmp_path / "out").iterdir())[:2] == [
        ".manifest.json",
        ".skipped.log",
    ]
    read = sorted([list(row["input_ids"]) for row in rows])
    assert read == sorted(table_of(tmp_path / "out")["input_ids"].to_pylist())
