"""Packing over a local Ray cluster: the same bytes, and errors that are sentences."""

import gzip
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from tests.support.offline_packs import contents, pack, small_parts, table_of, write_texts

from varlen.documents.source import open_source
from varlen.errors import MissingExtraError, OverlongDocumentError, SettingError, SourceError, WorkerDiedError
from varlen.offline.crew import Crew, _task

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
