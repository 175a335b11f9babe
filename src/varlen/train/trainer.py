"""The run: what is built before the first step, the loop over steps, and when it saves, stops and resumes."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from varlen import __version__
from varlen.adapters import hf
from varlen.batch.packed import PackedBatch
from varlen.errors import SourceError, VarlenError
from varlen.feed.loader import PackedLoader
from varlen.signals import SCHEDULERS, Stopped, end_soon, is_main_thread, was_interrupted
from varlen.train.callbacks import Callback, Callbacks, EndedBy, Exposed, RunOverview, Totals, TrainSummary
from varlen.train.changes import (
    BEGUN,
    WEIGHTS,
    WeightsMark,
    check_unchanged,
    checkpoint_of,
    is_same_evaluation,
    optimizer_of,
)
from varlen.train.checkpoint import (
    WEIGHT,
    Checkpoint,
    Saver,
    load,
    name_of,
    put_steps,
    read_weights,
    state_tensors,
)
from varlen.train.claim import CHECKPOINTS, MODEL, claimed, prepare
from varlen.train.configuration import as_config
from varlen.train.evaluate import EVALUATIONS, Best, Evaluation, Evaluator
from varlen.train.loaders import open_loader, steps_of
from varlen.train.lora import (
    add_adapter,
    backward_share,
    check_adapter,
    merged_weights,
    targets_of,
    write_adapter,
)
from varlen.train.metrics import MetricsFile, StepMetrics, Utilization
from varlen.train.model import (
    bare_model,
    build_model,
    checkpoint_activations,
    described,
    embedding_names,
    export,
    model_config,
    saved_dtype,
    tied_names,
    whole_weights,
    write_generation,
    write_model,
)
from varlen.train.optimizers import learning_rate, make_optimizer
from varlen.train.parallel import Ranks, joined
from varlen.train.plans import SliceGradients, plans_of
from varlen.train.samples import SAMPLES, Sample, Sampler
from varlen.train.settings import TrainSettings
from varlen.train.step import Gradients, PackGradients, StepDone, Stepper
from varlen.train.tokens import run_tokenizer, stop_ids, templates_of, write_tokenizer
from varlen.train.trackers import check_trackers, trackers_of

_EVALUATED = "evaluations"
"""Key of a manifest: what a run remembers of its evaluations."""


def train(
    config: TrainSettings | Mapping[str, Any] | str | Path,
    callbacks: Callback | Sequence[Callback] = (),
    *,
    allow_changed: bool = False,
) -> TrainSummary:
    """Train a model as `varlen train` does, from the beginning or from the newest checkpoint.

    Nothing is printed but what callbacks print. Every process of `torchrun` calls it; callbacks are called on rank 0.
    While it runs, Ctrl-C, SIGTERM and SIGUSR1 save the current step and end the run, if it runs in the main thread.

    Args:
        config: the path of a configuration file, or its tables as a mapping.
        callbacks: objects of subclasses of `Callback`, which are called in this order.
        allow_changed: whether it goes on from a checkpoint of another model, tokenizer, data, capacity, batch, seed
            or precision.

    Returns:
        Steps, tokens, times, and where the model and the newest checkpoint are; the same on every rank.

    Raises:
        InputError: a setting, file, model or checkpoint that can't be used; says which, and the way out.
        VarlenError: a loss that is no number, a full disk, a callback that failed.
        WorkerDiedError: another process is gone.
        KeyboardInterrupt: a signal stopped it, after it has saved; `Stopped`, which is one, of schedulers' signals.

    >>> summary = train("config.toml", callbacks=[MyCallback()])                            # doctest: +SKIP
    """
    settings = as_config(config)
    with Interrupt() as interrupt, joined(settings.run) as ranks, ExitStack() as stack:
        if ranks.is_first:
            stack.enter_context(claimed(settings.run.folder))
        run = _Run(settings, ranks, Callbacks(callbacks, ranks), stack, interrupt, allow_changed)
        return run.train()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Launched:
    """A step whose numbers aren't read yet: a GPU may still compute it."""

    done: StepDone
    before: Mapping[str, Any]
    """The loader's state before the step; empty unless steps are replayed."""
    position: dict[str, Any]


class _Run:
    """One call of `train`, from what it builds to its summary."""

    def __init__(
        self,
        settings: TrainSettings,
        ranks: Ranks,
        callbacks: Callbacks,
        stack: ExitStack,
        interrupt: Interrupt,
        allow_changed: bool,
    ) -> None:
        self._settings, self._ranks, self._callbacks, self._stack = settings, ranks, callbacks, stack
        self._folder = settings.run.folder
        self._checkpoints = self._folder / CHECKPOINTS
        self._interrupt, self._totals, self._total_tokens = interrupt, Totals(), 0
        self._replay = Replay(most=settings.measure.steps) if settings.measure.exposed_data else None
        self._pending: _Launched | None = None
        self._stop = 0  # the signal that stops the run; 0 for none
        if settings.track is not None:
            check_trackers(settings.track)
        self._tokenizer = run_tokenizer(settings.data, settings.model)
        self._config = model_config(settings.model, self._tokenizer.vocab_size)
        self._dtype = saved_dtype(self._config, settings.model)
        check_adapter(settings, self._config)
        found = checkpoint_of(settings.run, self._checkpoints, ranks)
        if ranks.is_first:
            prepare(settings.run, settings.log.metrics)
        self._plans = plans_of(settings, self._config, ranks, callbacks.note)
        given = None if self._plans is None else self._plans.given
        self._loader = stack.enter_context(open_loader(settings, self._config, self._tokenizer, ranks, given))
        self._templates = templates_of(settings.data, self._tokenizer)
        self._stop_ids = stop_ids(self._templates, settings.data, self._tokenizer)
        self._done = self._saved = self._told = self._begun_at = 0
        self._changes: list[str] = []
        self._best = Best()
        if found is not None:
            self._go_on(found, allow_changed)
            is_same = is_same_evaluation(found, settings)
            self._best = Best.from_json(found.manifest.get(_EVALUATED), is_same=is_same)
        self._evaluator: Evaluator | None = None
        if settings.eval is not None:
            plans = None if self._plans is None else self._plans.of_evaluation
            self._evaluator = Evaluator(settings, self._config, self._tokenizer, ranks, plans, stack)
        self._steps = steps_of(self._loader, settings, self._begun_at)
        has_other_model = any("model." in sentence for sentence in self._changes)
        known = None if found is None or has_other_model else found.manifest.get(WEIGHTS)
        path = settings.model.path if ranks.is_first else None
        self._began_with = WeightsMark(path, self._config, known)
        if self._plans is not None:
            self._plans.restore_choices(self._loader)
        if self._steps is None or self._done < self._steps:
            self._loader.start_prefetch()  # while the model is built
        self._stepper = self._build(found)
        run = settings.run
        self._saver = Saver(self._checkpoints, ranks, run)
        stack.callback(self._saver.close)
        self._utilization = Utilization(
            self._config, ranks.device, settings.log.peak_tflops, **self._of_adapter
        )
        self._overview = self._describe()
        self._metrics = self._lines(settings.log.metrics, self._done, StepMetrics)
        self._evaluations: MetricsFile | None = None
        if self._evaluator is not None:
            self._evaluations = self._lines(EVALUATIONS, self._best.last, Evaluation)
        if settings.track is not None and ranks.is_first:
            files = {"train": self._metrics, "eval": self._evaluations}
            seen = {kind: file.seen for kind, file in files.items() if file is not None}
            callbacks.add(stack.enter_context(trackers_of(settings, self._done, seen, callbacks.note)))
        self._sampler, self._samples = self._sampling()

    def _sampling(self) -> tuple[Sampler | None, MetricsFile | None]:
        """Return what writes texts, and the first rank's file of them."""
        if self._settings.sample is None:
            return None, None
        sampler = Sampler(self._settings, self._tokenizer, self._templates)
        return sampler, self._lines(SAMPLES, self._done, Sample)

    def _lines(self, name: str, after: int, kind: type[Any]) -> MetricsFile | None:
        """Open a file of lines on the first rank."""
        if not self._ranks.is_first:
            return None
        file = MetricsFile(self._folder / name, after, kind)
        self._stack.callback(file.close)
        return file

    def _go_on(self, found: Checkpoint, allow_changed: bool) -> None:
        """Continue from a checkpoint, and note which settings have changed since."""
        self._done = self._saved = found.step
        self._changes, begins_anew = check_unchanged(
            found, self._settings, self._config, self._loader, allow_changed=allow_changed
        )
        self._begun_at = found.step if begins_anew else int(found.manifest.get(BEGUN, 0))

    def _build(self, found: Checkpoint | None) -> Stepper[PackedBatch]:
        """Build model and optimizer, and load a checkpoint into them."""
        settings, ranks = self._settings, self._ranks
        model = build_model(
            self._config,
            settings.model,
            settings.run.seed,
            weights=found is None or settings.adapter is not None,
            is_sliced=self._plans is not None,
        )
        if settings.adapter is not None:
            torch.manual_seed(settings.run.seed)
            add_adapter(model, settings.adapter)
        if settings.run.checkpoint_activations:
            checkpoint_activations(model)
        self._of_adapter: dict[str, Any] = {}
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._num_trained = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        if settings.adapter is not None:
            share = backward_share(model)
            self._of_adapter = {"adapter_parameters": self._num_trained, "backward_share": share}
        self._tied, embeddings = tied_names(model), embedding_names(model)
        gradients: Gradients[PackedBatch]
        if self._plans is not None:
            gradients = SliceGradients(model, settings, ranks)
        else:
            gradients = PackGradients(model, settings, ranks, has_weights=self._loader.has_weights)
        self._stack.callback(gradients.close)
        stepper = Stepper(
            gradients,
            make_optimizer(gradients.parameters, settings.optimizer, ranks.device, embeddings),
            ranks=ranks,
            seed=settings.run.seed,
            max_grad_norm=settings.optimizer.max_grad_norm,
            micro_batches=self._loader.micro_batches,
        )
        if found is not None:
            tensors = self._tensors(stepper)
            if optimizer_of(found) != settings.optimizer.name:  # which was allowed; its state begins anew
                tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
            load(found, tensors, ranks)
            put_steps(gradients.parameters, stepper.optimizer, self._tied, tensors)
            gradients.publish()
            self._total_tokens = int(found.manifest["total_tokens"])
        return stepper

    def _describe(self) -> RunOverview:
        run, model = self._settings.run, self._stepper.model
        return RunOverview(
            steps=self._steps,
            resumed_from=self._done,
            num_parameters=self._num_parameters,
            num_trained=self._num_trained,
            model=self._config.model_type,
            attention="varlen_slices" if self._plans is not None else hf.implementation(model),
            world_size=self._ranks.world_size,
            parallel=run.parallel,
            device=self._ranks.device.type,
            precision=run.precision,
            plans=None if self._plans is None else self._plans.words,
            cross_entropy=self._stepper.gradients.cross_entropy,
        )

    def train(self) -> TrainSummary:
        """Train all steps, save, and export the model."""
        self._callbacks.call("on_begin", self._overview)
        for sentence in (*self._changes, *self._tokenizer.words, *self._stepper.gradients.notes):
            self._callbacks.note(sentence)
        self._interrupt.defer()
        self._evaluate(is_last=False)
        while (ended_by := self._ended_by()) is None:
            launched = self._launch()
            if launched is None:
                ended_by = "data"
                break
            self._report()  # the step before, while a GPU computes this one
            self._done, self._pending = self._done + 1, launched
            is_best = self._evaluate(is_last=self._done == self._steps)
            self._sample(is_last=self._done == self._steps)
            is_due = self._is_checkpoint_due() or is_best
            if self._ranks.device.type == "cpu" or is_due:
                self._report()
            if self._stop or is_due:
                self._save()
                self._stop = self._stop or self._agreed_signal()  # signals may have come while it was saved
            if self._stop and self._done != self._steps:
                self._saver.wait()
            self._tell_saved()
            if self._stop and self._done != self._steps:
                where = self._newest
                raise raised(
                    self._stop, f"step {self._done:,} is saved in {where}, where the same command goes on"
                )
        if self._done == 0:
            raise SourceError(
                f"{self._settings.data.named}: no document to train on; name other data as data.source"
            )
        self._evaluate(is_last=True)
        self._sample(is_last=True)
        self._save()
        self._saver.wait()
        self._tell_saved()
        weights = self._weights()  # which all ranks gather
        export(self._folder / MODEL, self._ranks, lambda folder: self._write_trained(folder, weights))
        summary = self._summary(self._measure(), ended_by)
        self._callbacks.call("on_end", summary)
        return summary

    def _evaluate(self, *, is_last: bool) -> bool:
        """Evaluate if it is due; returns whether the checkpoint of this step is to be kept as the best."""
        evaluator, settings = self._evaluator, self._settings.eval
        if evaluator is None or not evaluator.is_due(self._done, self._best, is_last=is_last):
            return False
        self._report()
        evaluation, self._best = evaluator.evaluate(self._done, self._stepper.gradients, self._best)
        if self._evaluations is not None:
            self._evaluations.write(evaluation)
        self._callbacks.call("on_evaluate", evaluation)
        return settings is not None and settings.keep_best and evaluation.is_best and self._done > 0

    def _sample(self, *, is_last: bool) -> None:
        """Let the model write texts if they are due."""
        if self._sampler is None or not self._sampler.is_due(self._done, is_last=is_last):
            return
        self._report()
        for sample in self._sampler.write(self._done, self._stepper.model):
            if self._samples is not None:
                self._samples.write(sample)
            self._callbacks.note(f"after step {sample.step:,}: {sample.words}")

    def _ended_by(self) -> EndedBy | None:
        """Return why no further step is trained; None to train one."""
        if self._steps is not None and self._done >= self._steps:
            return "steps"
        if self._evaluator is not None and self._evaluator.is_over(self._best):
            return "patience"
        return "callback" if self._callbacks.ask_to_stop() and self._done > 0 else None

    def _tell_saved(self) -> None:
        """Tell callbacks of a checkpoint that is whole since the last call."""
        if self._saver.saved > self._told:
            self._told = self._saver.saved
            self._callbacks.call("on_checkpoint", self._told, self._checkpoints / name_of(self._told))

    def _launch(self) -> _Launched | None:
        """Launch a step, without waiting for a GPU; None at the end of the data."""
        before = self._loader.state_dict() if self._replay is not None else {}
        rate = learning_rate(self._done + 1, self._steps, self._settings.optimizer)
        done = self._stepper.step(self._done + 1, rate, lambda: next(self._loader, None))
        if done is None:
            return None
        if self._plans is not None and done.part.plan is not None:
            self._plans.record_choice(self._loader.step - 1, done.part.plan)
            planned = self._loader.plan_wait_s
            done = replace(done, waited_s=max(done.waited_s - planned, 0.0), plan_wait_s=planned)
        return _Launched(done=done, before=before, position=self._position())

    def _position(self) -> dict[str, Any]:
        """Return the loader's position in a few numbers, for the metrics."""
        position: dict[str, Any] = {"step": self._loader.step}
        if self._loader.mode == "indexed":
            at = self._loader.state_dict()["at"]
            position |= {name: value for name, value in at.items() if isinstance(value, int)}
        return position

    def _agreed_signal(self) -> int:
        """Return the signal that stops the run; 0 for none."""
        return agreed(self._ranks.gather([self._interrupt.signal])[:, 0].tolist())

    def _report(self) -> None:
        """Write the metrics of the last launched step, and note the signal that stops the run."""
        if self._pending is None:
            return
        launched, self._pending = self._pending, None
        done = launched.done
        seconds = done.watch.seconds()
        numbers = [
            float(done.part.loss_sum),
            int(done.part.tokens),
            done.part.packs,
            done.waited_s,
            seconds,
            self._interrupt.signal,
            done.plan_wait_s,
            self._utilization.flops(done.part.lengths),
            done.peak_bytes,
        ]
        every = self._ranks.gather(numbers)
        losses, tokens, packs, waited, took, signals, planned, flops, peaks = every.unbind(dim=1)
        self._total_tokens += int(tokens.sum())
        metrics = StepMetrics(
            step=done.number,
            loss=float(losses.sum()) / done.step_weight,
            learning_rate=done.learning_rate,
            grad_norm=float(done.grad_norm),
            tokens=int(tokens.sum()),
            supervised_tokens=done.part.step_targets,
            fill=float(tokens.sum() / (packs.sum() * self._settings.data.capacity)),
            total_tokens=self._total_tokens,
            epoch=launched.position.get("epoch"),
            position=launched.position,
            tokens_per_s=float(tokens.sum() / took.max()),
            data_wait_s=float(waited.max()),
            step_s=float(took.max()),
            mfu=self._utilization.mfu(float(flops.sum()), float(took.max()), len(flops)),
            peak_bytes=int(peaks.max()) or None,
            **self._of_plan(done, float(planned.max())),
        )
        if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
            self._saver.close()
            newest = _newest_words(max(self._saver.saved, self._overview.resumed_from))
            raise VarlenError(
                f"step {metrics.step:,} has loss {metrics.loss} and gradient norm {metrics.grad_norm}, and "
                f"nothing of it was saved; {newest}; lower optimizer.learning_rate, or look "
                "at its documents"
            )
        self._totals.add(metrics)
        if self._metrics is not None:
            self._metrics.write(metrics)
        self._callbacks.call("on_step", metrics)
        if self._replay is not None:
            self._replay.note(launched.before, seconds, done.waited_s)
        self._stop = self._stop or agreed(signals.tolist())

    def _of_plan(self, done: StepDone, waited_s: float) -> dict[str, Any]:
        """Return the metrics of a step's plan."""
        plan = done.part.plan
        if self._plans is None or plan is None:
            return {}
        return {
            "plan_method": plan.method,
            "plan_answered_by": plan.answered_by,
            "plan_wait_s": waited_s,
            "plan_simulated_s": self._plans.simulated_s(plan),
        }

    def _is_checkpoint_due(self) -> bool:
        every = self._settings.run.checkpoint_every
        return every > 0 and self._done % every == 0

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        self._report()
        if self._saved == self._done:
            return
        if self._metrics is not None:
            self._metrics.sync()
        stepper, settings = self._stepper, self._settings
        self._saver.save(
            self._done,
            self._tensors(stepper),
            {
                "varlen": __version__,
                "kind": "checkpoint",
                "model": described(self._config),
                "seed": settings.run.seed,  # dropout depends on it and on the step alone
                "total_tokens": self._total_tokens,
                "loader": self._loader.state_dict(),
                "settings": asdict(settings),
                WEIGHTS: self._began_with.get(),
                BEGUN: self._begun_at,
                _EVALUATED: self._best.to_json(),
            },
            self._best.step if settings.eval is not None and settings.eval.keep_best else None,
        )
        self._saved = self._done

    def _tensors(self, stepper: Stepper[PackedBatch]) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, by name."""
        of_adapter = self._settings.adapter is not None
        trained = stepper.gradients.parameters
        return state_tensors(stepper.model, trained, stepper.optimizer, self._tied, only_trained=of_adapter)

    def _weights(self) -> Mapping[str, torch.Tensor]:
        """Return the whole model's weights on the first rank; of the best step, or with plans, from a checkpoint."""
        best = self._best_checkpoint
        if best is None and self._settings.plan is None and self._settings.adapter is None:
            return whole_weights(self._stepper.model, self._tied)
        return read_weights(best or self._newest) if self._ranks.is_first else {}

    @property
    def _best_checkpoint(self) -> Path | None:
        """Folder of the best step's checkpoint, if it is to be exported; None where the last step is."""
        settings = self._settings.eval
        if settings is None or not settings.keep_best or self._best.step in (self._done, -1):
            return None
        folder = self._checkpoints / name_of(self._best.step)
        return folder if folder.is_dir() else None

    @property
    def _newest(self) -> Path:
        """Folder of this step's checkpoint."""
        return self._checkpoints / name_of(self._done)

    def _write_trained(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write the model or its adapter, the tokenizer and the generation settings into the model's folder."""
        settings = self._settings
        if settings.adapter is not None:
            if settings.adapter.export == "adapter":
                targets = targets_of(bare_model(self._config), settings.adapter)
                write_adapter(folder, settings.adapter, targets, weights, settings.model.path)
            else:
                weights = merged_weights(self._base(), weights, self._tied)
        if settings.adapter is None or settings.adapter.export == "merged":
            write_model(folder, weights, self._config, self._dtype)
        write_tokenizer(self._tokenizer, self._templates, folder)
        write_generation(settings.model, folder, self._stop_ids)

    def _base(self) -> Any:
        """Return the model of the run before its first step, with its adapter's layers."""
        settings = self._settings
        base = build_model(self._config, settings.model, settings.run.seed, is_sliced=True)
        assert settings.adapter is not None, "it is a run of an adapter"
        add_adapter(base, settings.adapter)
        return base

    def _measure(self) -> Exposed | None:
        """Measure exposed data time; the run is finished, so training more steps changes nothing of it."""
        if self._replay is None or self._agreed_signal():  # after a signal there is no time to measure
            return None
        number, note = self._done + 1, self._callbacks.note
        return self._replay.measure(self._loader, self._stepper, self._ranks, number, note)

    def _summary(self, exposed: Exposed | None, ended_by: EndedBy) -> TrainSummary:
        return TrainSummary(
            overview=self._overview,
            steps=self._done,
            ended_by=ended_by,
            total_tokens=self._total_tokens,
            totals=self._totals,
            checkpoint=str(self._newest),
            model_folder=str(self._folder / MODEL),
            metrics=str(self._folder / self._settings.log.metrics),
            exposed=exposed,
            best=None if self._best.step < 0 else self._best,
        )


def _newest_words(step: int) -> str:
    return f"the newest checkpoint is of step {step:,}" if step else "there is no checkpoint yet"


# Signals that end a run: Ctrl-C, and SIGTERM and SIGUSR1, which schedulers send.
#
# While a run is built, a signal ends it at once, since nothing is trained yet. From the first step on, it ends the
# run after the current step; a second Ctrl-C ends it at once.

_AT_ONCE_S = 1.0
"""Signals within this time count as one: a terminal and torchrun both deliver the same Ctrl-C."""
_ORDER = (*SCHEDULERS, signal.SIGINT)


class Interrupt:
    """A context in which signals that end a run set `signal`; leaving it restores the handlers."""

    def __init__(self) -> None:
        self.signal: int = signal.SIGINT if was_interrupted() else 0
        """The first signal; 0 for none."""
        self._defers = False
        self._first_s = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._take_back: Callable[[], None] = lambda: None

    def __enter__(self) -> Interrupt:
        """Install handlers, in the main thread, for signals that aren't ignored."""
        if is_main_thread():
            for number in _ORDER:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN and before is not None:
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_back()
        for number, before in self._before.items():
            signal.signal(number, before)

    def defer(self) -> None:
        """Let signals wait until a step ends, including one that came earlier and whose exception was lost."""
        self._defers = True
        self._take_back()

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        is_first, self.signal = not self.signal, self.signal or number
        if is_first:
            self._first_s = time.monotonic()
            if not self._defers:
                if number != signal.SIGINT:
                    self._take_back = end_soon(number)
                raise raised(number)
        elif number == signal.SIGINT and time.monotonic() - self._first_s > _AT_ONCE_S:
            raise KeyboardInterrupt


def agreed(signals: Iterable[float]) -> int:
    """Return the signal that all ranks follow; 0 where none has come."""
    came = set(map(int, signals))
    return next((number for number in _ORDER if number in came), 0)


def raised(number: int, message: str = "") -> KeyboardInterrupt:
    """Return the exception that ends a run after a signal."""
    if number == signal.SIGINT:
        return KeyboardInterrupt(*([message] if message else []))
    return Stopped(number, message)


# Exposed data time, measured as a difference: the last steps are trained again with batches from memory.
#
# The time spent in `next` isn't enough: a loader that keeps the CPU busy makes the steps themselves slower, and on a
# GPU the host waits at no cost while kernels are queued. So the same batches are trained twice (DS-Analyzer,
# arXiv:2007.06775), and the stall is `1 - cached / real`.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    before: Mapping[str, Any]
    """The loader's state."""
    seconds: float
    waited_s: float


@dataclass(slots=True)
class Replay:
    """Records the last steps, to train them again."""

    most: int
    """Steps that are kept."""
    _steps: deque[_Step] = field(default_factory=deque)
    _seen: int = 0

    def note(self, before: Mapping[str, Any], seconds: float, waited_s: float) -> None:
        """Record a step, unless it is the first: its batches weren't made ahead, and its kernels weren't warm."""
        self._seen += 1
        if self._seen == 1:
            return
        self._steps.append(_Step(before=before, seconds=seconds, waited_s=waited_s))
        while len(self._steps) > self.most:
            self._steps.popleft()

    def measure(
        self,
        loader: PackedLoader,
        stepper: Stepper[PackedBatch],
        ranks: Ranks,
        number: int,
        note: Callable[[str], None],
    ) -> Exposed | None:
        """Train the recorded steps again from memory; the weights aren't the run's afterwards."""
        if not self._steps:
            return None
        count = len(self._steps)
        note(f"training the last {count:,} steps again from memory")
        loader.load_state_dict(self._steps[0].before)
        # Copies, so that the ring is free.
        batches = [deepcopy(next(loader)) for _ in range(count * loader.micro_batches)]
        per_step = loader.micro_batches
        _seconds(stepper, batches[:per_step], number)  # warms up
        cached_s = sum(
            _seconds(stepper, batches[first : first + per_step], number)
            for first in range(0, len(batches), per_step)
        )
        mine = [sum(step.seconds for step in self._steps), cached_s, sum(s.waited_s for s in self._steps)]
        real_s, cached_s, waited_s = ranks.gather(mine).amax(dim=0).tolist()
        return Exposed(steps=count, real_s=real_s, cached_s=cached_s, waited_s=waited_s)


def _seconds(stepper: Stepper[PackedBatch], batches: list[PackedBatch], number: int) -> float:
    """Train one step at learning rate 0, and return the seconds that it took."""
    left = iter(batches)
    done = stepper.step(number, 0.0, lambda: next(left))
    assert done is not None, "batches come from memory"
    return done.watch.seconds()
