"""Whoever reads knows whether it is one of several: process groups, launchers' variables, DataLoaders, forks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import varlen as vl
from varlen.errors import InputError, SettingError
from varlen.launch import launched

VARIABLES = (
    *("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK"),
    *(
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_ID",
        "SLURM_STEPID",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_JOB_ID",
    ),
    "TORCHELASTIC_RUN_ID",
)
SEVERAL = {
    "torchrun": {"WORLD_SIZE": "4", "RANK": "2", "TORCHELASTIC_RUN_ID": "none"},
    "any launcher": {"WORLD_SIZE": "4", "RANK": "2"},
    "a number that is none": {"WORLD_SIZE": "four"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    "mpiexec of MPICH": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "srun": {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"},
    "srun within salloc": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2"},
    "mpirun in a shell with WORLD_SIZE=1": {"WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"},
}
ALONE = {
    "nothing": {},
    "empty": {"WORLD_SIZE": "", "SLURM_STEP_NUM_TASKS": ""},
    "none": {"WORLD_SIZE": "0", "OMPI_COMM_WORLD_SIZE": "-1", "PMI_SIZE": " 01 "},
    "one": {"WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"},
    "sbatch": {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"},
    "a batch script's step": {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": str(2**32 - 5)},
    "a shell of salloc": {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": str(2**32 - 6), "SLURM_PROCID": "0"},
    "one process of torchrun in each task": {
        **{"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "a"},
        **{"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0"},
    },
}


@pytest.fixture(autouse=True)
def _started_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} " * 20}) + "\n" for n in range(60)))
    return path


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def loader_of(texts: Path, **settings: Any) -> vl.PackedLoader:
    return vl.PackedLoader(
        texts, "bytes", **{"capacity": 512, "global_batch_size": 4, "worker": "thread"} | settings
    )


@pytest.mark.parametrize("how", SEVERAL)
def test_one_of_several_must_be_given_its_ranks_and_may_say_that_it_reads_alone(how, texts, monkeypatch):
    set_all(monkeypatch, SEVERAL[how])
    launch = launched()
    assert launch is not None

    with pytest.raises(InputError) as refused:
        loader_of(texts)

    said = str(refused.value)
    assert said.startswith(f"this is one of {launch.size} processes ({launch.source})")
    assert launch.arguments in said
    assert "dp_rank=0, dp_world_size=1" in said
    if launch.rank is not None and launch.size.isdigit():
        told = eval(f"dict({launch.arguments})", {"os": os})  # as a reader would copy it
        loader_of(texts, global_batch_size=8, **told).close()
    loader_of(texts, dp_rank=0, dp_world_size=1).close()


@pytest.mark.parametrize("how", ALONE)
def test_a_process_alone_reads_without_ranks(how, texts, monkeypatch):
    set_all(monkeypatch, ALONE[how])

    assert launched() is None
    with loader_of(texts) as loader:
        assert next(loader).num_tokens > 0


@pytest.mark.parametrize("how", ["any launcher", "srun"])
@pytest.mark.parametrize("verb", ["pack", "index"])
def test_verbs_that_write_a_folder_are_refused_in_each_of_several_processes(how, verb, texts, tmp_path):
    command = [sys.executable, "-m", "varlen", verb, str(texts), "-o", str(tmp_path / "out")]
    ended = subprocess.run(
        command, env=os.environ | SEVERAL[how], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 2
    assert "all of which would write the same folder; run the command once" in ended.stderr
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("arguments", [["inspect", "{}", "--capacity", "512"], ["pack", "--help"]])
def test_verbs_that_only_look_are_never_refused(arguments, texts):
    command = [sys.executable, "-m", "varlen", *(one.format(texts) for one in arguments)]
    ended = subprocess.run(
        command, env=os.environ | SEVERAL["srun"], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0
    assert "varlen:" not in ended.stderr


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "-2.5"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"},
        {"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "a"},
    ],
)
def test_variables_by_which_processes_cannot_find_each_other_are_a_sentence(variables, monkeypatch):
    from varlen.train.parallel import joined
    from varlen.train.settings import RunSettings

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    set_all(monkeypatch, variables)

    said = (
        r"this is one of several processes \(WORLD_SIZE='.*'\), and the others can't be found by .*torchrun"
    )
    with pytest.raises(SettingError, match=said), joined(RunSettings(output="run", steps=1, parallel="ddp")):
        pytest.fail("it was joined")


@pytest.mark.parametrize("how", [how for how in ALONE if "torchrun" not in how])
def test_training_alone_needs_no_others(how, monkeypatch):
    from varlen.train.parallel import joined
    from varlen.train.settings import RunSettings

    set_all(monkeypatch, ALONE[how])
    with joined(RunSettings(output="run", steps=1)) as ranks:
        assert ranks.world_size == 1


def test_training_in_tasks_that_torchrun_did_not_start_is_refused(texts, tmp_path, monkeypatch, verb):
    set_all(monkeypatch, SEVERAL["srun"])
    (tmp_path / "c.toml").write_text(
        f'[data]\nsource = "{texts}"\ncapacity = 64\nglobal_batch_size = 2\n[model]\ntype = "llama"\n'
        "[model.settings]\nhidden_size = 32\nintermediate_size = 64\nnum_hidden_layers = 1\n"
        f'num_attention_heads = 2\n[run]\noutput = "{tmp_path / "run"}"\nsteps = 1\n'
    )

    code, _, said = verb("train", tmp_path / "c.toml")

    assert code == 2
    assert said.startswith("varlen: rank 7: this is one of 8 processes (SLURM_STEP_NUM_TASKS) that torchrun")
    assert not (tmp_path / "run").exists()


_GROUP_JOB = """
import os
import sys
import torch.distributed as dist
import torch.multiprocessing as mp
import varlen as vl

SETTINGS = {"capacity": 512, "global_batch_size": 4, "worker": "thread"}


def say(*words):
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())  # at once: two processes share the pipe


def work(rank, file, texts):
    early = vl.PackedLoader(texts, "bytes", **SETTINGS)  # made before anything is known of the others
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for what in (lambda: next(early), lambda: vl.PackedLoader(texts, "bytes", **SETTINGS)):
        try:
            what()
            say("READ")
        except vl.VarlenError as error:
            say("REFUSED", error)
    told = {"dp_rank": dist.get_rank(), "dp_world_size": dist.get_world_size()}
    with vl.PackedLoader(texts, "bytes", **SETTINGS, **told) as loader:
        say("TOKENS", sum(batch.num_tokens for batch in loader))

if __name__ == "__main__":
    mp.start_processes(work, args=tuple(sys.argv[1:]), nprocs=2, start_method="fork")
"""


def test_the_processes_of_a_group_that_no_launcher_started_are_known(texts, tmp_path):
    (tmp_path / "job.py").write_text(_GROUP_JOB)

    ended = subprocess.run(
        [sys.executable, "job.py", str(tmp_path / "meeting"), str(texts)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    lines = ended.stdout.splitlines()
    assert sum("REFUSED" in line for line in lines) == 4, ended.stdout + ended.stderr
    assert all("the process group of torch.distributed" in line for line in lines if "REFUSED" in line)
    with loader_of(texts) as loader:
        whole = sum(batch.num_tokens for batch in loader)
    assert sum(int(line.split()[1]) for line in lines if line.startswith("TOKENS")) == whole


def dataset_of(make: Any) -> Any:
    from torch.utils.data import IterableDataset

    class Wrapped(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(make())

    return Wrapped()


@pytest.mark.parametrize("ranks", [{}, {"dp_rank": 0, "dp_world_size": 2}], ids=["none", "of the job"])
@pytest.mark.parametrize("is_carried", [False, True])
def test_the_workers_of_a_data_loader_are_refused(ranks, is_carried, texts, monkeypatch):
    from torch.utils.data import DataLoader, _utils

    # Each worker that has failed is waited for as long when its DataLoader goes.
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    with loader_of(texts, **ranks) as made:
        dataset = dataset_of((lambda: made) if is_carried else (lambda: loader_of(texts, **ranks)))
        failing = iter(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"))
        with pytest.raises(
            (InputError, RuntimeError), match=r"one of 2 worker processes of a DataLoader"
        ) as refused:
            list(failing)
        assert "DataLoader(dataset, batch_size=None, num_workers=0)" in str(refused.value)
        failing._shutdown_workers()

        tokens = sum(batch.num_tokens for batch in DataLoader(dataset, batch_size=None, num_workers=0))

    with loader_of(texts, **ranks) as loader:
        assert tokens == sum(batch.num_tokens for batch in loader)


@pytest.mark.parametrize("settings", [{}, {"mode": "indexed"}], ids=["streaming", "indexed"])
def test_a_data_loader_around_a_loader_and_a_batch_as_keywords_say_what_to_write(settings, texts, tmp_path):
    from torch.utils.data import DataLoader

    with loader_of(texts, cache=tmp_path / "cache", **settings) as loader:
        with pytest.raises((InputError, vl.VarlenError), match="for batch in loader"):
            next(iter(DataLoader(loader)))  # type: ignore[arg-type]
        with pytest.raises(SettingError, match=r"model\(\*\*model_inputs\(batch, model\)\)"):
            dict(**next(loader))  # type: ignore[arg-type]


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_fork_is_told_at_once_and_takes_nothing_from_the_process_that_it_came_from(worker, texts):
    with loader_of(texts, worker=worker) as loader, loader_of(texts) as other:
        wanted = [batch.input_ids.copy() for batch in other]
        first = next(loader)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            said = "nothing"
            try:
                del first  # its slot is the parent's
                next(loader)
            except SettingError as error:
                said = str(error)
            loader.close()
            loader._end()
            os.write(writing, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading, "rb") as told:
            said = told.read().decode()

        assert said.startswith(f"this loader was made in process {os.getpid()}, and this is a fork of it")
        found = [first.input_ids, *(batch.input_ids.copy() for batch in loader)]
        assert len(found) == len(wanted)
        assert all((a == b).all() for a, b in zip(found, wanted))
        assert loader.stats().restarts == 0
