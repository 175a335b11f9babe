"""Configurations: TOML one to one, sentences for what is wrong; one run at a time in an output folder."""

import inspect
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, fields, is_dataclass, replace
from typing import get_args, get_type_hints

import pytest

import varlen as vl
from varlen.errors import InputError, SettingError, SourceError
from varlen.train.claim import claimed
from varlen.train.configuration import read_config, write_example
from varlen.train.settings import DataSettings, RunSettings, TrainSettings

SMALL = """
[data]
source = "store"
capacity = 128
global_batch_size = 4
[model]
type = "llama"
[model.settings]
hidden_size = 32
rope_parameters = {rope_type = "default", rope_theta = 1e4}
"""


@pytest.fixture
def config(tmp_path):
    def read(text=SMALL, *changes):
        (tmp_path / "a.toml").write_text(text)
        return read_config(tmp_path / "a.toml", changes)

    return read


def test_tables_become_settings_and_the_rest_has_defaults(config):
    read = config()

    assert (read.data.source, read.data.capacity, read.data.layout) == ("store", 128, None)
    assert read.model.settings["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    assert read.run == RunSettings()
    assert config(SMALL.replace('"store"', '["a", "b"]')).data.source == ("a", "b")


def test_the_data_table_takes_the_arguments_of_the_loader():
    given_by_the_run = {"dp_rank", "dp_world_size", "device", "model", "epochs", "plan"}
    of_mixtures = {"mixture", "unit", "until"}

    assert {field.name for field in fields(DataSettings)} == (
        set(inspect.signature(vl.PackedLoader).parameters) - given_by_the_run | of_mixtures
    )


def test_values_are_put_over_those_of_the_file(config):
    read = config(
        SMALL,
        "run.steps=100",
        "run.output=out/a b",
        "optimizer.learning_rate = 1",
        "model.settings.hidden_size=64",
        "data.shuffle=false",
        'data.columns={text = "body"}',
        "data.retry.attempts=3",
        'run.precision="bf16"',
    )

    assert (read.run.steps, read.run.output, read.run.precision) == (100, "out/a b", "bf16")
    assert read.optimizer.learning_rate == 1.0
    assert isinstance(read.optimizer.learning_rate, float)
    assert read.model.settings["hidden_size"] == 64
    assert read.data.shuffle is False
    assert read.data.columns == {"text": "body"}
    assert read.data.retry.attempts == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["run.stepz=1"], "run.stepz is no setting; the nearest is run.steps"),
        (["run.learning_rate=1"], "run.learning_rate is no setting; the nearest is optimizer.learning_rate"),
        (["data.capacty=1"], "data.capacty is no setting; the nearest is data.capacity"),
        (["modle.type=1"], "modle is no setting; the nearest is model"),
        (["run.steps=many"], "run.steps must be a whole number, got 'many'"),
        (["run.steps=1.5"], "run.steps must be a whole number, got 1.5"),
        (["run.steps=true"], "run.steps must be a whole number, got True"),
        (["data.shuffle=1"], "data.shuffle must be true or false, got 1"),
        (["run.parallel=zero"], 'run.parallel must be "none" or "ddp" or "fsdp", got \'zero\''),
        (["data.source=3"], "data.source must be a text in quotes or a list of texts, got 3"),
        (["model.settings=3"], "model.settings must be a table, got 3"),
        (["optimizer.beta2=1.5"], "optimizer.beta2 must be at most 1, got 1.5"),
        (["run.seed=-1"], "run.seed must be at least 0, got -1"),
        (["run.steps=0"], "run.steps must be at least 1, got 0"),
        (["optimizer.beta1=1.0"], "optimizer.beta1 must be below 1"),
        (["optimizer.epsilon=-1"], "optimizer.epsilon must be at least 0, got -1"),
        (
            ["log.metrics=checkpoints"],
            "log.metrics is the name of a file in run.output, and none of .running, ",
        ),
        (["log.metrics="], "log.metrics is the name of a file in run.output"),
        (["log.metrics=../a"], "log.metrics is the name of a file in run.output"),
        (["model.path=x"], "[model] names both"),
        (["steps=5"], "--set takes TABLE.KEY=VALUE"),
        (["run.steps"], "--set takes TABLE.KEY=VALUE"),
        (["data.source.a=5"], "source is no table"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(config, changes, words):
    with pytest.raises(InputError) as refused:
        config(SMALL, *changes)

    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


HINTS = get_type_hints(TrainSettings)
KINDS = {
    one.name: next(kind for kind in (HINTS[one.name], *get_args(HINTS[one.name])) if is_dataclass(kind))
    for one in fields(TrainSettings)
}


@pytest.mark.parametrize("table", KINDS)
def test_a_setting_of_any_other_table_is_refused_with_the_table_that_has_it(config, table):
    own = {one.name for one in fields(KINDS[table])}
    for kind in KINDS.values():
        for key in {one.name for one in fields(kind)} - own:
            home = next(name for name, each in KINDS.items() if key in {one.name for one in fields(each)})
            words = rf"^{table}\.{key} is no setting; the nearest is {home}\.{key}$"
            with pytest.raises(SettingError, match=words):
                config(SMALL, f"{table}.{key}=1")


def test_what_is_missing_is_said_with_its_key(config):
    with pytest.raises(SettingError, match=r"lacks data\.capacity"):
        config(SMALL.replace("capacity = 128", ""))
    with pytest.raises(SettingError, match=r"lacks the table \[model\]"):
        config(SMALL.partition("[model]")[0])
    with pytest.raises(SettingError, match="names neither"):
        config(SMALL.replace('type = "llama"', "").partition("[model.settings]")[0])


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"b\.toml can't be read: No such file.*varlen train --init"):
        read_config(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_text("[data\n")
    with pytest.raises(SourceError, match=r"c\.toml is no TOML: "):
        read_config(tmp_path / "c.toml")


def test_the_example_is_a_configuration_and_replaces_nothing(tmp_path):
    write_example(tmp_path / "a.toml")

    read = read_config(tmp_path / "a.toml")
    assert read.run.parallel == "fsdp"
    assert read.model.settings["max_position_embeddings"] >= read.data.capacity
    assert f"varlen train {tmp_path / 'a.toml'}" in (tmp_path / "a.toml").read_text()
    with pytest.raises(SettingError, match="is there already"):
        write_example(tmp_path / "a.toml")

    text = (tmp_path / "a.toml").read_text()
    tables = text[text.index("# [eval]") : text.index("[log]")]
    (tmp_path / "b.toml").write_text(text.replace(tables, re.sub(r"(?m)^# ?", "", tables)))
    every = read_config(tmp_path / "b.toml")
    assert all((every.eval, every.adapter, every.sample, every.track))


def test_settings_survive_being_noted_in_a_checkpoint(config):
    import json

    assert json.loads(json.dumps(asdict(config())))["data"]["source"] == "store"
    assert replace(config()).run.folder.name == "run"


HOLDER = """
import sys, time
from pathlib import Path
from varlen.train.claim import claimed
with claimed(Path(sys.argv[1])):
    (Path(sys.argv[1]) / "metrics.jsonl").write_text("")
    print("claimed", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
    folder = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, text=True)
    with holder, holder.stdout:
        assert holder.stdout.readline() == "claimed\n"
        with (
            pytest.raises(SettingError, match=f"process {holder.pid} trains into .*run; wait for it"),
            claimed(folder),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
    with claimed(folder):
        assert (folder / ".running").read_text() == f"process {os.getpid()}\n"
    assert (folder / "metrics.jsonl").exists()


def test_a_run_that_fails_before_it_writes_leaves_no_folder(tmp_path):
    with pytest.raises(SettingError, match="bad"), claimed(tmp_path / "run"):
        raise SettingError("bad")
    assert not (tmp_path / "run").exists()
