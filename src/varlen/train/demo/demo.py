"""The demo from documents to figures: read, train every method, and gather what was measured."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from varlen.report.figures import (
    CorpusFigures,
    DemoFigures,
    LedgerFigures,
    PictureFigures,
    PieceFigures,
)
from varlen.train.demo.corpus import Corpus, read_corpus
from varlen.train.demo.experiment import Experiment, OnProgress, Outcome
from varlen.train.demo.orders import Order, batches_as_packing, most_crowded_pack, step_slots
from varlen.train.demo.settings import DemoSettings
from varlen.train.demo.worker import prepare
from varlen.types import IntArray

BUCKET_POOL_BATCHES = 50
"""Batches sorted together by transformers' length-grouped sampler; what bucketing reaches on a large set."""
_EXCERPT_CHARACTERS = 110


def run_demo(data: str | Path | None, settings: DemoSettings, on_progress: OnProgress) -> DemoFigures:
    """Run the whole demo.

    Args:
        data: the user's documents; None for the interpreter's own sources.
        settings: of the experiment; fewer steps where documents are few or long.
        on_progress: told of the work done.

    Raises:
        SourceError: the documents can't be read, or are too few.
        VarlenError: a run was killed or failed.
    """
    start = time.perf_counter()
    on_progress(0, 1, "reading documents")
    if (
        data is None
    ):  # parsing a library takes as long as importing torch; a user's file may be refused at once
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
    """Say what the figures were measured on."""
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
