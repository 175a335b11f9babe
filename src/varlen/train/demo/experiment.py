"""The demo's experiment: every method trains the same documents, and they take turns step by step.

Turns matter: whatever else the machine does hits all methods alike, so ratios hold even where seconds
don't. Further seeds are trained for their loss alone, in the fastest layout of the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np

from varlen.errors import LedgerError
from varlen.report.figures import IsolationFigures, MethodFigures
from varlen.train.demo.corpus import Corpus, Documents
from varlen.train.demo.job import Job, StepRecord
from varlen.train.demo.measure import Seconds
from varlen.train.demo.methods import FASTEST_LAYOUT, METHODS, ORDERS, LayoutName, Method, OrderName
from varlen.train.demo.orders import Order, make_order, step_slots
from varlen.train.demo.worker import Worker

OnProgress = Callable[[int, int, str], None]
"""Called with the work done, all work (in positions to compute), and what is going on."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What the experiment found."""

    methods: tuple[MethodFigures, ...]
    isolation: IsolationFigures
    documents: Documents
    """Of the first seed."""
    document_ids: np.ndarray
    """int64: which documents of the corpus those are."""
    orders: dict[OrderName, Order]
    """Of the first seed."""
    num_parameters: int


@dataclass(kw_only=True, slots=True)
class _Tally:
    """Work done so far, told to whoever watches."""

    total: int
    on_progress: OnProgress
    done: int = 0

    def add(self, slots: int, text: str) -> None:
        self.done += slots
        self.on_progress(self.done, self.total, text)

    def say(self, text: str) -> None:
        self.on_progress(self.done, self.total, text)


@dataclass(kw_only=True, slots=True)
class _Measured:
    """One method on the first seed."""

    records: list[StepRecord] = field(default_factory=list)
    memory_bytes: int = 0
    validation_loss: float = 0.0


class Experiment:
    """The runs of one demo: which there are, and what they found so far."""

    def __init__(self, corpus: Corpus, on_progress: OnProgress) -> None:
        """Draw every seed's documents and deal them to steps."""
        self._corpus = corpus
        self._settings = settings = corpus.settings
        self._seeds = [settings.seed + k for k in range(settings.num_seeds)]
        self._drawn = {seed: corpus.draw(settings.run_documents, seed) for seed in self._seeds}
        self._documents = {seed: corpus.documents.take(ids) for seed, ids in self._drawn.items()}
        self._orders = {
            (name, seed): make_order(
                name, documents.lengths, steps=settings.steps, max_length=settings.max_length, seed=seed
            )
            for seed, documents in self._documents.items()
            for name in ORDERS
        }
        self._tally = _Tally(total=self._all_slots(), on_progress=on_progress)

    def run(self) -> Outcome:
        """Train everything.

        Raises:
            VarlenError: a run was killed or failed.
            LedgerError: the methods didn't train the same documents and targets; a bug in varlen.
        """
        first = self._seeds[0]
        measured, isolation, num_parameters = self._take_turns(first)
        losses = {method.name: [measured[method.name].validation_loss] for method in METHODS}
        for seed in self._seeds[1:]:
            for method in METHODS:
                if method.same_loss_as is None:
                    losses[method.name].append(self._train_for_loss(method, seed))
        methods = tuple(
            self._figures(method, measured[method.name], losses[method.name]) for method in METHODS
        )
        check_equal_work(methods)
        return Outcome(
            methods=methods,
            isolation=isolation,
            documents=self._documents[first],
            document_ids=self._drawn[first],
            orders={name: order for (name, seed), order in self._orders.items() if seed == first},
            num_parameters=num_parameters,
        )

    def _take_turns(self, seed: int) -> tuple[dict[str, _Measured], IsolationFigures, int]:
        """Train all methods at once, one step of each after the other; one computes at a time."""
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for method in METHODS:
                self._tally.say(f"starting: {method.title}")
                worker = Worker(method.title, self._job(method, seed, method.layout))
                workers[method.name] = stack.enter_context(closing(worker))
                worker.wait_until_ready()
            measured = {method.name: _Measured() for method in METHODS}
            for step in range(self._settings.steps):
                for method in METHODS:
                    self._tally.say(f"step {step + 1} of {self._settings.steps} · {method.title}")
                    record = workers[method.name].request("step", step)
                    measured[method.name].records.append(record)
                    self._tally.add(record.num_slots, f"loss {record.loss:.3f} · {method.title}")
            for method in METHODS:
                self._tally.say(f"validating: {method.title}")
                measured[method.name].memory_bytes = workers[method.name].request("memory_bytes")
                measured[method.name].validation_loss = workers[method.name].request("validate")
            self._tally.say("proving isolation on the packed run's model")
            isolation = workers["packed"].request("prove_isolation")
            return measured, isolation, workers["packed"].request("num_parameters")

    def _train_for_loss(self, method: Method, seed: int) -> float:
        """Train one method on one seed in the fastest layout, and return its validation loss."""
        layout = FASTEST_LAYOUT.get(method.layout, method.layout)
        with closing(Worker(method.title, self._job(method, seed, layout))) as worker:
            worker.wait_until_ready()
            for step in range(self._settings.steps):
                record = worker.request("step", step)
                self._tally.add(record.num_slots, f"loss of seed {seed} · {method.title}")
            return float(worker.request("validate"))

    def _job(self, method: Method, seed: int, layout: LayoutName) -> Job:
        return Job(
            layout=layout,
            order=self._orders[method.order, seed],
            documents=self._documents[seed],
            validation=self._corpus.validation,
            vocab_size=self._corpus.vocab_size,
            seed=seed,
            settings=self._settings,
        )

    def _figures(self, method: Method, measured: _Measured, losses: list[float]) -> MethodFigures:
        seconds = sum((record.seconds for record in measured.records), Seconds())
        packing = self._orders[method.order, self._seeds[0]].packing
        unknown = [None] * (len(self._seeds) - len(losses))
        return MethodFigures(
            name=method.name,
            title=method.title,
            role=method.role,
            steps=len(measured.records),
            num_documents=len(np.unique(packing.document_ids)),
            num_tokens=sum(record.num_tokens for record in measured.records),
            num_targets=sum(record.num_targets for record in measured.records),
            num_slots=sum(record.num_slots for record in measured.records),
            wall_s=seconds.wall_s,
            user_s=seconds.user_s,
            system_s=seconds.system_s,
            memory_bytes=measured.memory_bytes,
            step_losses=tuple(record.loss for record in measured.records),
            validation_losses=(*losses, *unknown),
            same_loss_as=method.same_loss_as,
        )

    def _all_slots(self) -> int:
        """Count the positions that all runs will compute, for the progress bar."""
        total = 0
        for seed in self._seeds:
            for method in METHODS:
                is_first = seed == self._seeds[0]
                if is_first or method.same_loss_as is None:
                    layout = method.layout if is_first else FASTEST_LAYOUT.get(method.layout, method.layout)
                    total += step_slots(self._orders[method.order, seed], layout)
        return total


def check_equal_work(methods: tuple[MethodFigures, ...]) -> None:
    """Require that every method trained the same documents once, as many targets, in as many steps.

    Raises:
        LedgerError: they didn't, so nothing that they show could be compared.
    """
    for name in ("steps", "num_documents", "num_tokens", "num_targets"):
        counts = {method.title: getattr(method, name) for method in methods}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{title} {count:,}" for title, count in counts.items())
            raise LedgerError(
                f"the methods differ in {name} and can't be compared ({listed}); a bug in varlen"
            )
