"""Trackers record every step and evaluation once, read back by their own libraries, and don't stop a run."""

import importlib.util
import json
import os
import signal
import struct
import time

import pytest
from tests.support.training import CONTEXT, Notes, metrics_of, rewound, settings, table

from varlen.errors import SettingError, VarlenError
from varlen.signals import Stopped
from varlen.train import train
from varlen.train.callbacks import Callback
from varlen.train.dry_run import forecast
from varlen.train.settings import TAKEN
from varlen.train.trackers import _OPENED

TRACKERS = tuple(_OPENED)
BLOCK, FULL, LAST = 32768, 1, 4
"""Of LevelDB's logs: the bytes of a block; the types of a record's only and last part."""
# MLflow uses parts of SQLAlchemy that the newest SQLAlchemy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


def installed(name):
    return pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(name) is None, reason=f"{name} isn't installed in this environment"
        ),
    )


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    """Every library writes into the test's folder, and asks nobody."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.delenv("WANDB_DIR", raising=False)


def tracked(store, output, name, **changes):
    sets = {"eval__sets": {"same": str(store)}, "eval__every": 2}
    return settings(store, output, track__to=[name], track__project="tests", **sets, **changes)


def read_tensorboard(output, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def leveldb_records(data, at):
    """Yield the records of a LevelDB log, the form of W&B's files, from a byte on; a cut end is left out."""
    parts = []
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, size, part = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if part in (FULL, LAST) and at <= len(data):
            yield b"".join(parts)
            parts = []


def wandb_records(output):
    from wandb.proto import wandb_internal_pb2

    for path in sorted(output.glob("wandb/offline-run-*/run-*.wandb"), key=lambda each: each.stat().st_mtime):
        data = path.read_bytes()
        assert data.startswith(b":W&B"), data[:8]
        for each in leveldb_records(data, 7):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(each)
            yield record


def read_wandb(output, name):
    found = []
    for record in wandb_records(output):
        values = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
        }
        if name in values:
            found.append((values["step"], values[name]))
    return found


def read_mlflow(output, name):
    from mlflow import MlflowClient

    record = json.loads((output / "trackers.json").read_text())["mlflow"]
    return [(each.step, each.value) for each in MlflowClient().get_metric_history(record, name)]


READ = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


def same_as_metrics(found, lines, name):
    assert [step for step, _ in found] == [line["step"] for line in lines]
    assert [value for _, value in found] == pytest.approx([line[name] for line in lines], rel=1e-6)


def evaluations_of(output):
    return [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [installed(name) for name in TRACKERS])
def test_every_step_and_evaluation_is_read_back(store, tmp_path, name):
    output = tmp_path / "run"
    train(tracked(store, output, name))

    for metric in ("loss", "learning_rate", "tokens_per_s", "grad_norm"):
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        same_as_metrics(READ[name](output, f"train/{metric}"), lines, metric)
    same_as_metrics(READ[name](output, "eval/loss"), evaluations_of(output), "loss")
    assert [step for step, _ in READ[name](output, "eval/same/loss_up_to_512")] == [2, 4, 6]


class KillsItself(Callback):
    """Ends its process by SIGKILL after a step."""

    def __init__(self, at):
        self._at = at

    def on_step(self, metrics):
        if metrics.step == self._at:
            time.sleep(1.0)  # W&B writes a little later than it is called
            os.kill(os.getpid(), signal.SIGKILL)


def _killed(made, at, environment):
    os.environ.clear()
    os.environ.update(
        environment
    )  # the process is forked from one that has the environment of an earlier test
    train(made, callbacks=[KillsItself(at)])  # after the trackers, which are called first


@pytest.mark.parametrize("name", [installed(name) for name in TRACKERS])
def test_a_killed_run_that_goes_on_misses_no_step(store, tmp_path, name):
    output = tmp_path / "run"
    changes = {"eval__sets": {"same": str(store)}, "eval__every": 2, "track__to": [name]}
    made = table(store, output, **changes, run__checkpoint_every=3)
    # W&B's service of this process would keep the run of the killed one open.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_SERVICE")}
    process = CONTEXT.Process(target=_killed, args=(made, 5, alone))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    train(made)

    assert [line["step"] for line in metrics_of(output)] == [1, 2, 3, 4, 5, 6]
    for kind, lines in (("train", metrics_of(output)), ("eval", evaluations_of(output))):
        found = {}
        for step, loss in READ[name](output, f"{kind}/loss"):
            # W&B may have written a step or not when the run is killed, so it gets those after the checkpoint again.
            assert step not in found or (name == "wandb" and step > 3 and found[step] == loss)
            found[step] = loss
        same_as_metrics(sorted(found.items()), lines, "loss")


class Fails(Callback):
    """Ends a run by an error in its second step."""

    def on_step(self, metrics):
        if metrics.step == 2:
            raise ArithmeticError


def ended_wandb(output):
    return [record.exit.exit_code for record in wandb_records(output) if record.HasField("exit")]


def ended_mlflow(output):
    from mlflow import MlflowClient

    record = json.loads((output / "trackers.json").read_text())["mlflow"]
    return [MlflowClient().get_run(record).info.status]


ENDS = {
    "wandb": (ended_wandb, [[1], [0], [0]]),
    "mlflow": (ended_mlflow, [["FAILED"], ["FINISHED"], ["FINISHED"]]),
}


class StopsItself(Callback):
    """Sends its process the signal of a scheduler after a step."""

    def on_step(self, metrics):
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("name", [installed(name) for name in ENDS])
def test_a_record_says_whether_its_run_failed(store, tmp_path, name):
    read, wanted = ENDS[name]
    with pytest.raises(VarlenError, match=r"Fails\.on_step failed"):
        train(tracked(store, tmp_path / "failed", name), callbacks=[Fails()])
    with pytest.raises(Stopped):
        train(tracked(store, tmp_path / "stopped", name), callbacks=[StopsItself()])
    train(tracked(store, tmp_path / "ended", name))

    assert [read(tmp_path / output) for output in ("failed", "stopped", "ended")] == wanted


@pytest.mark.parametrize("name", [installed(name) for name in TRACKERS])
def test_a_run_that_goes_on_without_a_record_begins_one(store, tmp_path, name):
    train(settings(store, tmp_path / "plain", run__steps=2, optimizer__schedule="constant"))
    copy = rewound(tmp_path / "plain", 2, tmp_path / "run")
    train(settings(store, copy, run__steps=4, optimizer__schedule="constant", track__to=[name]))

    assert [step for step, _ in READ[name](copy, "train/loss")] == [3, 4]


BROKEN = {
    "tensorboard": ("torch.utils.tensorboard", "SummaryWriter", "add_scalar"),
    "wandb": ("wandb.sdk.wandb_run", "Run", "log"),
    "mlflow": ("mlflow", "MlflowClient", "log_batch"),
}


@pytest.mark.parametrize("name", [installed(name) for name in TRACKERS])
def test_a_tracker_that_fails_is_left_out_and_training_goes_on(store, tmp_path, name, monkeypatch):
    module, kind, method = BROKEN[name]
    owner = getattr(importlib.import_module(module), kind)
    inner, calls = getattr(owner, method), []

    def failing(self, *given, **named):
        calls.append(1)
        if len(calls) > 20:
            raise ConnectionError("nobody is there")
        return inner(self, *given, **named)

    if name != "tensorboard":

        def failing(self, *given, **named):
            if named.get("params") is None:
                calls.append(1)
                if len(calls) > 2:
                    raise ConnectionError("nobody is there")
            return inner(self, *given, **named)

    monkeypatch.setattr(owner, method, failing)
    notes = Notes()
    train(settings(store, tmp_path / "run", track__to=[name]), notes)

    words = f"{name} isn't tracked to any more, and training goes on: nobody is there"
    assert [sentence for sentence in notes.said if "tracked" in sentence] == [words]
    assert len(notes.steps) == 6


@pytest.mark.parametrize("name", [installed(name) for name in TRACKERS])
def test_a_tracker_that_cant_be_opened_is_a_sentence(store, tmp_path, name, monkeypatch):
    def refuses(run):
        raise RuntimeError("no key")

    monkeypatch.setitem(_OPENED, name, refuses)
    words = (
        f"{name} can't be opened: no key; set it up as for the library itself, or leave it out of track.to"
    )
    with pytest.raises(SettingError, match=words):
        train(settings(store, tmp_path / "run", track__to=[name]))


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.parametrize("asked", [train, forecast], ids=["run", "dry run"])
def test_a_tracker_that_isnt_installed_is_refused_before_anything_is_built(
    store, tmp_path, name, asked, monkeypatch
):
    inner = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one: None if one == name else inner(one))
    words = rf"track\.to names \"{name}\", which isn't installed; install it \(pip install \"varlen\[track\]\"\), or"
    with pytest.raises(SettingError, match=words):
        asked(settings(store, tmp_path / "run", track__to=[name]))
    assert not (tmp_path / "run").exists()


def test_all_that_a_run_writes_is_known(store, tmp_path):
    there = [name for name in TRACKERS if importlib.util.find_spec(name) is not None]
    sets = {"eval__sets": {"same": str(store)}, "sample__prompts": ["Why"], "sample__tokens": 2}
    plan = {"plan__method": "micropack", "plan__calibrate_s": 0.01}
    still = {**settings(store, tmp_path).model.settings, "attention_dropout": 0.0}
    train(
        settings(
            store, tmp_path / "run", track__to=there, run__steps=2, model__settings=still, **sets, **plan
        )
    )
    written = {path.name for path in (tmp_path / "run").iterdir()}

    assert written <= TAKEN | {"metrics.jsonl"}
    assert TAKEN - written <= {"tensorboard", "wandb"} - set(there)
    for name in TAKEN:
        with pytest.raises(
            SettingError, match=r"log\.metrics is the name of a file in run\.output, and none of"
        ):
            settings(store, tmp_path, log__metrics=name)


def test_the_folder_of_a_tracker_is_never_a_link(store, tmp_path):
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard isn't installed in this environment")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match=r"tensorboard is a link \(to .*links aren't followed"):
        train(settings(store, tmp_path / "run", track__to=["tensorboard"]))
    assert list((tmp_path / "elsewhere").iterdir()) == []
