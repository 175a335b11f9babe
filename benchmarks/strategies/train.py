"""One training run: the steps of a feed, the loss of each, and what is lost on documents held back.

And the models that a comparison begins with: trained a little on documents of their own, the same for every strategy.
Trained from nothing, a small model stays at the frequency of tokens for a while, and how long is a matter of luck
that would hide everything else. The paper fine-tunes trained models, too. Weights are kept in the folder for
temporary files, under the hash of all that they depend on.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checks import WrongResultError
from benchmarks.strategies import models
from benchmarks.strategies.feeds import Fed, Feed, flattened
from benchmarks.strategies.models import bare, build, make_optimizer
from benchmarks.strategies.sets import TextSet
from varlen.adapters import hf
from varlen.train.demo.corpus import Documents
from varlen.train.demo.run import add_gradients, mean_loss
from varlen.types import IntArray

LEARNING_RATE = 2e-3
MOST_NORM = 1.0
"""Gradients are clipped to this norm; without it the longer set's runs diverge now and then."""
POINTS = 6
"""Times that a run is validated, at equal distances in tokens."""
_VALIDATED_TOKENS = 16_384
"""Validated at a time, so that it takes no more memory than training."""


@dataclass(kw_only=True)
class Curve:
    """What a run did, step by step, and its validation losses; plain data."""

    tokens: list[int] = field(default_factory=list)
    """Of each step, those of documents."""
    documents: list[int] = field(default_factory=list)
    """Pieces of each step."""
    losses: list[float] = field(default_factory=list)
    """Mean over the step's targets, in nats, before its update."""
    validation: list[tuple[int, int, float]] = field(default_factory=list)
    """Steps done, tokens seen, loss in nats."""
    seconds: float = 0.0

    @property
    def last_loss(self) -> float:
        return self.validation[-1][2]


@dataclass(kw_only=True)
class Ledger:
    """How often each document was trained."""

    lengths: IntArray
    seen: IntArray = field(init=False)
    """int64 `[documents]`: tokens trained."""
    pieces: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self.seen, self.pieces = np.zeros_like(self.lengths), np.zeros_like(self.lengths)

    def count(self, fed: Fed) -> None:
        np.add.at(self.seen, fed.document_ids, fed.lengths)
        np.add.at(self.pieces, fed.document_ids, 1)

    def check(self, *, whole: bool) -> None:
        """Require that every token was trained once, and of whole documents each in one piece."""
        if not np.array_equal(self.seen, self.lengths) or (whole and (self.pieces != 1).any()):
            wrong = int((self.seen != self.lengths).sum())
            raise WrongResultError(f"{wrong:,} of {self.lengths.size:,} documents weren't trained once")


def train(
    model: Any,
    feed: Feed,
    validation: Documents,
    *,
    at_step: int | None = None,
    points: int = POINTS,
    learning_rate: float = LEARNING_RATE,
) -> Curve:
    """Train one epoch, and check that it was one.

    It is validated at `points` equal distances in tokens, the last one at the end, and after `at_step`.
    """
    curve, ledger = Curve(), Ledger(lengths=feed.documents.lengths)
    optimizer = make_optimizer(model, learning_rate)
    total = int(feed.documents.lengths.sum())
    begun, seen = time.perf_counter(), 0
    for step, fed in enumerate(feed.steps(model), start=1):
        curve.losses.append(gradients(model, fed))
        update(model, optimizer)
        ledger.count(fed)
        curve.tokens.append(fed.inputs.num_tokens)
        curve.documents.append(len(fed.document_ids))
        before, seen = seen, seen + fed.inputs.num_tokens
        if step == at_step or points * seen // total > points * before // total:
            curve.validation.append((step, seen, validate(model, validation)))
    ledger.check(whole=feed.strategy != "wrapped")
    curve.seconds = time.perf_counter() - begun
    return curve


def gradients(model: Any, fed: Fed, num_targets: int | None = None) -> float:
    """Add a step's gradients, and return its loss.

    `num_targets` are those of the whole step, if more ranks take part.
    """
    inputs = fed.inputs
    return add_gradients(bare(model), inputs.arguments, inputs.labels, num_targets or inputs.num_targets)


def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Clip gradients as transformers' Trainer does unless told otherwise, and change the weights."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
    optimizer.step()
    optimizer.zero_grad()


def validate(model: Any, documents: Documents) -> float:
    """Return the mean loss over all targets of some documents, each alone in its context, in nats."""
    inner = bare(model)
    attention = hf.implementation(inner)
    hf.use_varlen_attention(inner)
    total, targets = 0.0, 0
    for ids in _at_a_time(documents.lengths):
        inputs = flattened(documents, ids).inputs
        total += mean_loss(inner, inputs.arguments, inputs.labels, inputs.num_targets) * inputs.num_targets
        targets += inputs.num_targets
    inner.set_attn_implementation(attention)
    return total / targets


def _at_a_time(lengths: IntArray) -> Iterator[IntArray]:
    """Cut documents into runs of about as many tokens."""
    rounds = np.cumsum(lengths) // _VALIDATED_TOKENS
    yield from np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(rounds)) + 1)


def processes() -> ForkServerContext:
    """Return a context whose processes start from a server that has imported torch and transformers once."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def one_thread() -> None:
    torch.set_num_threads(1)


BASE_RATE = 4e-3


def base_of(family: str, of_set: TextSet) -> str:
    """Train a base unless it is there; returns the file that holds its weights."""
    said = hashlib.sha256(of_set.base.tokens.tobytes() + of_set.base.offsets.tobytes())
    said.update(f"{family} {BASE_RATE} {of_set.shape} {torch.__version__}".encode())
    said.update(Path(models.__file__).read_bytes())
    place = Path(tempfile.gettempdir(), f"varlen-strategies-{said.hexdigest()[:16]}.pt")
    if not place.exists():
        one_thread()
        feed = Feed(strategy="online", documents=of_set.base, shape=of_set.shape, seed=0)
        model = build(family, 0, feed.attention)
        train(model, feed, of_set.validation, points=1, learning_rate=BASE_RATE)
        new = place.with_suffix(".new")
        torch.save(model.state_dict(), new)
        new.replace(place)
    return str(place)


def started(family: str, attention: str, weights: str) -> Any:
    model = build(family, 0, attention)
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model
