"""Callbacks are called with what is written, may stop a run on all ranks, and are named where they fail."""

import json

import pytest
from tests.support.training import (
    Notes,
    metrics_of,
    same_end,
    settings,
    start_ranks,
    steps_of,
    table,
    write_toml,
)

from varlen.errors import SettingError, VarlenError
from varlen.train import Callback, TrainSummary, train
from varlen.train import trainer as trainer_module


class Everything(Callback):
    """Writes down every call."""

    def __init__(self):
        self.calls = []

    def on_begin(self, overview):
        self.calls.append(("begin", overview.resumed_from))

    def on_step(self, metrics):
        self.calls.append(("step", metrics.step))

    def on_evaluate(self, evaluation):
        self.calls.append(("evaluate", evaluation.step))

    def on_checkpoint(self, step, folder):
        assert (folder / "checkpoint.json").is_file()
        self.calls.append(("checkpoint", step))

    def on_end(self, summary):
        self.calls.append(("end", summary.steps))


class Stops(Callback):
    """Asks to stop in a method, at a step."""

    def __init__(self, method, at):
        setattr(self, method, lambda about, *more: getattr(about, "step", about) == at)


def test_a_run_calls_in_the_order_of_what_it_does(store, tmp_path):
    heard = Everything()
    sets = {"eval__sets": {"same": str(store)}, "eval__every": 4}
    summary = train(settings(store, tmp_path / "run", run__steps=4, **sets), [Notes(), heard])

    before = [("begin", 0), ("step", 1), ("step", 2), ("checkpoint", 2), ("step", 3), ("step", 4)]
    assert heard.calls == [*before, ("evaluate", 4), ("checkpoint", 4), ("end", 4)]
    assert isinstance(summary, TrainSummary)
    assert summary.ended_by == "steps"


def test_callbacks_are_given_the_lines_that_are_written(store, tmp_path):
    notes = Notes()
    sets = {"eval__sets": {"same": str(store)}, "eval__every": 3}
    train(settings(store, tmp_path / "run", **sets), notes)

    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step.loss for step in notes.steps] == [line["loss"] for line in lines]
    lines = [json.loads(line) for line in (tmp_path / "run/evaluations.jsonl").read_text().splitlines()]
    assert [each.loss for each in notes.evaluations] == [line["loss"] for line in lines]


def test_tables_and_a_path_are_configurations_too(store, tmp_path):
    made = table(store, tmp_path / "tables")
    made["data"]["source"] = store  # a path, as Python has it
    train(made)
    write_toml(tmp_path / "a.toml", table(store, tmp_path / "file"))
    train(tmp_path / "a.toml")

    same_end(tmp_path / "tables", tmp_path / "file")


@pytest.mark.parametrize(
    ("method", "at", "ends"), [("on_step", 3, 3), ("on_evaluate", 4, 4), ("on_checkpoint", 2, 2)]
)
def test_a_callback_stops_a_run_which_goes_on_later(store, tmp_path, method, at, ends):
    sets = {"eval__sets": {"same": str(store)}, "eval__every": 4}
    train(settings(store, tmp_path / "whole", **sets))
    summary = train(settings(store, tmp_path / "run", **sets), callbacks=[Stops(method, at)])

    assert (summary.steps, summary.ended_by) == (ends, "callback")
    assert steps_of(tmp_path / "run")[-1] == f"step-{ends:08d}"
    assert (tmp_path / "run/model/config.json").is_file()
    train(settings(store, tmp_path / "run", **sets))
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def _stop_at_three():
    """Have every rank give a callback that stops; only the first rank's is called."""
    inner = trainer_module.Callbacks
    trainer_module.Callbacks = lambda given, ranks: inner([given, Stops("on_step", 3)], ranks)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_ranks_end_after_the_same_step(store, tmp_path, parallel):
    made = table(store, tmp_path / "run", data__micro_batch_size=1, run__parallel=parallel)
    processes = start_ranks([made], 2, tmp_path, prepare=_stop_at_three)
    for process in processes:
        process.join(120)

    assert [process.exitcode for process in processes] == [0, 0], [
        path.read_text() for path in tmp_path.glob("rank*")
    ]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3]
    assert steps_of(tmp_path / "run")[-1] == "step-00000003"


class Fails(Callback):
    """Fails at the second step."""

    def on_step(self, metrics):
        if metrics.step == 2:
            raise ZeroDivisionError("no good")


def test_a_callback_that_fails_is_named_and_the_run_goes_on_later(store, tmp_path):
    words = r"Fails\.on_step failed with ZeroDivisionError: no good; mend it, and the same call goes on"
    with pytest.raises(VarlenError, match=words) as failed:
        train(settings(store, tmp_path / "run", run__checkpoint_every=1), callbacks=[Fails()])
    assert isinstance(failed.value.__cause__, ZeroDivisionError)

    train(settings(store, tmp_path / "run", run__checkpoint_every=1))
    train(settings(store, tmp_path / "whole", run__checkpoint_every=1))
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def _fail_at_two():
    inner = trainer_module.Callbacks
    trainer_module.Callbacks = lambda given, ranks: inner([given, Fails()], ranks)


def test_other_ranks_say_which_callback_of_the_first_failed(store, tmp_path):
    made = table(store, tmp_path / "run", data__micro_batch_size=1)
    processes = start_ranks([made], 2, tmp_path, prepare=_fail_at_two)
    for process in processes:
        process.join(120)

    assert [process.exitcode for process in processes] == [1, 1]
    for rank in (0, 1):
        assert "Fails.on_step failed with ZeroDivisionError" in (tmp_path / f"rank{rank}.txt").read_text()


@pytest.mark.parametrize("wrong", [print, Fails])
def test_what_is_no_callback_is_refused(store, tmp_path, wrong):
    with pytest.raises(
        SettingError, match=r"callbacks\[0\] is .*; it must be an object of a subclass of varlen"
    ):
        train(settings(store, tmp_path / "run"), callbacks=[wrong])
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_is_written_in_the_background_is_told_when_it_is_whole(store, tmp_path):
    heard = Everything()
    train(settings(store, tmp_path / "run", run__save_in_background=True), callbacks=[heard])

    told = [step for what, step in heard.calls if what == "checkpoint"]
    assert told[-1] == 6
    assert set(told) <= {2, 4, 6}
    assert told == sorted(told)
