"""Trackers of experiments: TensorBoard, Weights & Biases and MLflow behind one protocol.

A run that resumes continues its record. Steps that are trained again after a kill have the same numbers, unless
settings have changed. TensorBoard's files drop such steps, MLflow says which it has, and Weights & Biases, which
writes a little later than it is called, records them again, so that no step is missing.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from varlen.errors import SettingError, VarlenError, described
from varlen.files.ours import is_folder, open_own, write_json
from varlen.missing import installation
from varlen.parsed import parse_json
from varlen.regular import read_regular
from varlen.train.callbacks import Callback
from varlen.train.configuration import flat
from varlen.train.evaluate import Evaluation
from varlen.train.metrics import StepMetrics
from varlen.train.settings import TrackSettings, TrainSettings

RECORDS: Final = "trackers.json"
"""File in a run's folder with the names of its records."""
_KINDS = ("train", "eval")
_FLUSH = "x_transaction_log_flush_interval"
"""Seconds for which Weights & Biases holds numbers back."""
_OUT = "move it away, or choose another run.output"


class Tracker(Protocol):
    """Records numbers of a run; only the first rank has one."""

    record: str
    """The tracker's name of the run, by which it goes on after a stop."""
    last: Mapping[str, int]
    """Steps up to which it holds numbers already, by kind ("train" and "eval")."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of a step, by names such as "train/loss", so that they stay if the run is killed."""

    def close(self, failed: bool) -> None:
        """Write what is not written yet, and whether the run failed."""


def check_trackers(settings: TrackSettings) -> None:
    """Refuse a tracker that isn't installed."""
    for name in settings.to:
        if importlib.util.find_spec(name) is None:
            raise SettingError(
                f'track.to names "{name}", which isn\'t installed; install it ({installation(name)}), or leave it out'
            )


@contextmanager
def trackers_of(
    settings: TrainSettings, done: int, seen: Mapping[str, int], note: Callable[[str], object]
) -> Iterator[Tracked]:
    """Yield the trackers of a run, open until the block ends.

    Args:
        settings: of the run.
        done: steps that are trained already; 0 for a new run.
        seen: the last steps that were reported before the run was stopped, by kind; -1 for none.
        note: shows a sentence.
    """
    assert settings.track is not None, "such a run is tracked"
    check_trackers(settings.track)
    folder = settings.run.folder
    records = _records(folder / RECORDS) if done else {}
    configuration = json.loads(json.dumps(asdict(settings), default=str))
    opened, failed = Tracked(note), False
    try:
        for name in settings.track.to:
            run = _Run(settings.track, folder, configuration, records.get(name), done, seen)
            try:
                tracker = _OPENED[name](run)
            except VarlenError:
                raise
            except Exception as error:  # libraries raise errors of many types
                raise SettingError(
                    f"{name} can't be opened: {described(error)}; set it up as for the library itself, or leave it "
                    "out of track.to"
                ) from error
            records[name] = tracker.record
            opened.add(name, tracker)
        write_json(folder / RECORDS, records)
        yield opened
    except Exception:  # a run that is stopped by a signal or Ctrl-C hasn't failed
        failed = True
        raise
    finally:
        opened.close(failed)


def _records(path: Path) -> dict[str, str]:
    """Return the names of a run's records; none if the run wasn't tracked before."""
    if not path.exists():
        return {}
    try:
        found = parse_json(read_regular(path))
        return {str(name): str(record) for name, record in found.items() if name in _OPENED}
    except (OSError, ValueError, AttributeError) as error:
        raise SettingError(f"{path} can't be read ({error}); {_OUT}") from None


def check_records(path: Path) -> None:
    """Refuse a file that isn't a list of records."""
    if path.exists():
        open_own(path, _OUT).close()
        _records(path)


class Tracked(Callback):
    """Several trackers as one callback; one that fails is left out from then on, so that training goes on."""

    may_stop = False

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note, self._trackers = note, dict[str, Tracker]()

    def add(self, name: str, tracker: Tracker) -> None:
        """Add a tracker."""
        self._trackers[name] = tracker

    def on_step(self, metrics: StepMetrics) -> None:
        """Record a step."""
        values = {
            name: float(value)
            for name, value in asdict(metrics).items()
            if name != "step" and isinstance(value, int | float)
        }
        self._log("train", values, metrics.step)

    def on_evaluate(self, evaluation: Evaluation) -> None:
        """Record the losses of an evaluation."""
        values = {"loss": evaluation.loss, "seconds": evaluation.seconds}
        for name, found in evaluation.sets.items():
            values[f"{name}/loss"] = found.loss
            for part in found.by_length:
                if part.loss is not None:
                    above = f"over_{part.above}" if part.up_to is None else f"up_to_{part.up_to}"
                    values[f"{name}/loss_{above}"] = part.loss
        self._log("eval", values, evaluation.step)

    def close(self, failed: bool) -> None:
        """Close all trackers of a run that failed, or ended or stopped as it should."""
        for name in list(self._trackers):
            self._tried(name, partial(self._trackers[name].close, failed))

    def _log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        named = {f"{kind}/{name}": value for name, value in values.items()}
        for name, tracker in list(self._trackers.items()):
            if step > tracker.last.get(kind, -1):
                self._tried(name, partial(tracker.log, named, step))

    def _tried(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # libraries raise errors of many types
            del self._trackers[name]
            self._note(f"{name} isn't tracked to any more, and training goes on: {described(error)}")


class _Run(NamedTuple):
    """What a tracker is opened for."""

    settings: TrackSettings
    folder: Path
    configuration: Mapping[str, Any]
    record: str | None
    """That the run had before it stopped; None for a new one."""
    done: int
    """Steps that are trained already."""
    seen: Mapping[str, int]
    """The last steps that were reported before it stopped, by kind."""


class _TensorBoard:
    def __init__(self, run: _Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.record = "tensorboard"
        self.last: Mapping[str, int] = {}
        is_folder(run.folder / self.record, "TensorBoard's files go to", _OUT)
        # Readers of the files drop steps from here on that earlier files hold.
        purge = run.done + 1 if run.done else 0
        self._writer: Any = SummaryWriter(str(run.folder / self.record), purge_step=purge)
        if run.record is None:
            self._writer.add_text("settings", f"```\n{json.dumps(run.configuration, indent=1)}\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:  # noqa: ARG002 - its files don't say how a run ended
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, run: _Run) -> None:
        import wandb

        self.record = run.record or secrets.token_hex(8)
        # What was reported after the checkpoint may not have been written before a kill.
        kept = {} if run.record is None else run.seen
        self.last: Mapping[str, int] = {kind: min(step, run.done) for kind, step in kept.items()}
        # A kill loses what the library holds back: 15 s as it is set; older versions lack the setting.
        soon: dict[str, Any] = {_FLUSH: 0.1} if _FLUSH in wandb.Settings.model_fields else {}
        self._run: Any = wandb.init(
            project=run.settings.project,
            name=run.settings.name,
            id=self.record,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.configuration),
            settings=wandb.Settings(**soon),
        )
        for kind in _KINDS:
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        # The library's own step would hold numbers back until the next one, and lose them if the run is killed.
        self._run.log({**values, "step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow:
    def __init__(self, run: _Run) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient()
        self.last: Mapping[str, int] = {}
        if run.record is not None:
            self.record = run.record
            self._client.update_run(self.record, status="RUNNING")
            self.last = {kind: self._last(f"{kind}/loss") for kind in _KINDS}
            return
        project = run.settings.project
        found = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if found is None else found.experiment_id
        self.record = self._client.create_run(experiment, run_name=run.settings.name).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in flat(run.configuration)]
        for first in range(0, len(params), 100):  # the most that it takes at once
            self._client.log_batch(self.record, params=params[first : first + 100])

    def _last(self, name: str) -> int:
        """Return the last step of a metric; -1 for none."""
        return max((each.step for each in self._client.get_metric_history(self.record, name)), default=-1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.record, metrics=metrics)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.record, status="FAILED" if failed else "FINISHED")


_OPENED: dict[str, Callable[[_Run], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
}
