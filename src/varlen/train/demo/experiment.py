"""The demo's experiment: every method trains the same documents, and they take turns step by step.

Turns matter: whatever else the machine does hits all methods alike, so ratios hold even where seconds
don't. Further seeds are trained for their loss alone, in the fastest layout of the same batches.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np

from varlen.errors import LedgerError
from varlen.report.demo import (
    CorpusFigures,
    DemoFigures,
    IsolationFigures,
    LedgerFigures,
    MethodFigures,
    PictureFigures,
    PieceFigures,
)
from varlen.train.demo.corpus import Corpus, Documents, read_corpus
from varlen.train.demo.job import Job, Seconds, StepRecord
from varlen.train.demo.orders import Order, batches_as_packing, make_order, most_crowded_pack, step_slots
from varlen.train.demo.settings import (
    FASTEST_LAYOUT,
    METHODS,
    ORDERS,
    DemoSettings,
    LayoutName,
    Method,
    OrderName,
)
from varlen.train.demo.worker import Worker, prepare
from varlen.types import IntArray

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
    """Work done so far, for progress displays."""

    total: int
    on_progress: OnProgress
    done: int = 0

    def add(self, slots: int, text: str) -> None:
        self.done += slots
        self.on_progress(self.done, self.total, text)

    def show(self, text: str) -> None:
        self.on_progress(self.done, self.total, text)


@dataclass(kw_only=True, slots=True)
class _Measured:
    """One method on the first seed."""

    records: list[StepRecord] = field(default_factory=list)
    memory_bytes: int = 0
    validation_loss: float = 0.0


class Experiment:
    """The runs of one demo: their documents and orders, and how far the work has come."""

    def __init__(self, corpus: Corpus, on_progress: OnProgress) -> None:
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
        """Train everything."""
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
                self._tally.show(f"starting: {method.title}")
                worker = Worker(method.title, self._job(method, seed, method.layout))
                workers[method.name] = stack.enter_context(closing(worker))
                worker.wait_until_ready()
            measured = {method.name: _Measured() for method in METHODS}
            for step in range(self._settings.steps):
                for method in METHODS:
                    self._tally.show(f"step {step + 1} of {self._settings.steps} · {method.title}")
                    record = workers[method.name].request("step", step)
                    measured[method.name].records.append(record)
                    self._tally.add(record.num_slots, f"loss {record.loss:.3f} · {method.title}")
            for method in METHODS:
                self._tally.show(f"validating: {method.title}")
                measured[method.name].memory_bytes = workers[method.name].request("memory_bytes")
                measured[method.name].validation_loss = workers[method.name].request("validate")
            self._tally.show("proving isolation on the packed run's model")
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
    """Require that every method trained the same documents once, as many targets, in as many steps."""
    for name in ("steps", "num_documents", "num_tokens", "num_targets"):
        counts = {method.title: getattr(method, name) for method in methods}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{title} {count:,}" for title, count in counts.items())
            raise LedgerError(
                f"the methods differ in {name} and can't be compared ({listed}): a bug in varlen; please report it"
            )


# The demo from documents to figures: read, train every method, and gather what was measured.

BUCKET_POOL_BATCHES = 50
"""Batches that transformers' length-grouped sampler sorts together; `bucketed_ratio` is measured in such pools."""
_EXCERPT_CHARACTERS = 110


def run_demo(data: str | Path | None, settings: DemoSettings, on_progress: OnProgress) -> DemoFigures:
    """Run the whole demo."""
    start = time.perf_counter()
    on_progress(0, 1, "reading documents")
    # Reading the interpreter's sources takes as long as importing torch, so both run at once; a user's file may be
    # refused before torch is needed.
    if data is None:
        prepare()
    corpus = read_corpus(data, settings)
    settings = corpus.settings
    outcome = Experiment(corpus, on_progress).run()
    return DemoFigures(
        methods=outcome.methods,
        corpus=_corpus_figures(corpus, settings),
        ledger=_ledger_figures(outcome.orders["packed"]),
        isolation=outcome.isolation,
        picture=_picture_figures(corpus, outcome),
        seeds=tuple(settings.seed + k for k in range(settings.num_seeds)),
        steps=settings.steps,
        batch_documents=settings.batch_documents,
        max_length=settings.max_length,
        num_parameters=outcome.num_parameters,
        threads=settings.threads,
        machine=_machine(),
        total_s=time.perf_counter() - start,
    )


def _corpus_figures(corpus: Corpus, settings: DemoSettings) -> CorpusFigures:
    lengths = corpus.documents.lengths
    pool = BUCKET_POOL_BATCHES * settings.batch_documents
    return CorpusFigures(
        description=corpus.description,
        documents_found=corpus.documents_found,
        num_documents=len(lengths),
        too_short=corpus.too_short,
        is_cut=corpus.is_cut,
        vocab_size=corpus.vocab_size,
        lengths=tuple(lengths.tolist()),
        padded_ratio=_padded_ratio(lengths, settings, pool=None),
        bucketed_ratio=_padded_ratio(lengths, settings, pool=pool),
        bucket_pool=min(pool, len(lengths)),
    )


def _padded_ratio(lengths: IntArray, settings: DemoSettings, pool: int | None) -> float:
    """Return slots per token over all documents, in random batches, or in pools sorted by length.

    Documents stand in random order already; the last, partial batch is left out.
    """
    size = settings.batch_documents
    whole = np.minimum(lengths[: len(lengths) // size * size], settings.max_length)
    if pool is not None:
        whole = np.concatenate([np.sort(whole[first : first + pool]) for first in range(0, len(whole), pool)])
    packing = batches_as_packing(whole, np.arange(len(whole)).reshape(-1, size), settings.max_length)
    order = Order(packing=packing, step_offsets=np.arange(packing.num_packs + 1))
    return step_slots(order, "padded") / packing.num_tokens


def _ledger_figures(order: Order) -> LedgerFigures:
    ledger = order.packing.ledger
    return LedgerFigures(
        tokens_in=ledger.tokens_in,
        packed=ledger.packed,
        truncated=ledger.truncated,
        dropped=ledger.dropped,
        duplicated=ledger.duplicated,
        documents_in=ledger.documents_in,
        truncated_documents=ledger.truncated_documents,
        balance=ledger.balance,
    )


def _picture_figures(corpus: Corpus, outcome: Outcome) -> PictureFigures:
    """Show the first random batch, and the packed row with the most documents."""
    packed = outcome.orders["packed"].packing
    return PictureFigures(
        batch=_pieces(corpus, outcome, outcome.orders["random"], 0),
        row=_pieces(corpus, outcome, outcome.orders["packed"], most_crowded_pack(packed)),
        capacity=packed.capacity,
    )


def _pieces(corpus: Corpus, outcome: Outcome, order: Order, pack: int) -> tuple[PieceFigures, ...]:
    packing = order.packing
    first, last = packing.offsets[pack : pack + 2].tolist()
    pieces = []
    for piece in range(first, last):
        document = int(outcome.document_ids[packing.document_ids[piece]])
        excerpt = " ".join(corpus.texts[document][: 4 * _EXCERPT_CHARACTERS].split())[:_EXCERPT_CHARACTERS]
        pieces.append(
            PieceFigures(document_id=document, num_tokens=int(packing.lengths[piece]), excerpt=excerpt)
        )
    return tuple(pieces)


def _machine() -> tuple[tuple[str, str], ...]:
    """Return the processor, system and library versions that the figures were measured with."""
    return (
        ("processor", f"{_processor()}, {os.cpu_count()} cores"),
        ("system", platform.platform(terse=True)),
        ("Python", platform.python_version()),
        *((name, version(name)) for name in ("torch", "transformers", "numpy")),
    )


def _processor() -> str:
    """Name the processor as the system does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
