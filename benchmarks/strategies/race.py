"""Throughput and peak memory of strategies: each in a process of its own, taking turns step by step.

Turns matter: whatever else the machine does hits all alike, so that ratios hold even where seconds don't. `races`
are of all strategies; `lora` of adapters alone, where a Llama that knows the longer set is frozen and LoRA learns
the short one; `extreme` of documents of which one in a minibatch, on average, is 10, 100 or 1,000 times as long as
all others.
"""

from __future__ import annotations

import traceback
from collections.abc import Container, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.strategies.feeds import Fed, Feed
from benchmarks.strategies.figures import Told
from benchmarks.strategies.models import LORA_RANK, build, make_optimizer, with_lora
from benchmarks.strategies.sets import Shape, TextSet, cut, extremes
from benchmarks.strategies.train import (
    LEARNING_RATE,
    base_of,
    gradients,
    one_thread,
    processes,
    started,
    update,
    validate,
)
from varlen.train.demo.corpus import Documents
from varlen.train.demo.job import current_bytes, now, peak_bytes, reset_peak

RACED = ("padding_mask", "padding", "grouped", "online", "offline_large", "offline", "sampled", "ours")
_WARM_TOKENS = 32
_PATIENCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a contestant trains; plain data, so that another process can take it."""

    family: str
    feed: Feed
    validation: Documents | None = None
    weights: str | None = None
    """File of the frozen base, where only adapters are trained."""
    learning_rate: float = LEARNING_RATE


class _Runner:
    """A contestant, in its own process."""

    def __init__(self, entry: Entry) -> None:
        one_thread()
        feed = entry.feed
        self._entry = entry
        if entry.weights is None:
            self._model = build(entry.family, feed.seed, feed.attention)
        else:
            self._model = with_lora(started(entry.family, feed.attention, entry.weights), feed.seed)
        self._optimizer = make_optimizer(self._model, entry.learning_rate)
        self._warm_up()
        self._steps: Iterator[Fed] = iter(feed.steps(self._model))
        self._first: Fed | None = next(self._steps)  # what is prepared once is on nobody's clock
        self._base_bytes = 0

    def _warm_up(self) -> None:
        """Load kernels and start what starts at the first use; the weights stay as they are."""
        feed = self._entry.feed
        few = cut(feed.documents, _WARM_TOKENS).take(torch.arange(feed.shape.documents).numpy())
        small = Feed(strategy=feed.strategy, documents=few, shape=feed.shape, seed=0, options=feed.options)
        for fed in small.steps(self._model):
            gradients(self._model, fed)
        self._optimizer.zero_grad()

    def step(self) -> dict[str, Any] | None:
        """Train a step, from documents to changed weights; None where the epoch is over."""
        if not self._base_bytes:
            reset_peak()
            self._base_bytes = current_bytes()
        start = now()
        fed, self._first = self._first or next(self._steps, None), None
        if fed is None:
            return None
        loss = gradients(self._model, fed)
        update(self._model, self._optimizer)
        took = now() - start
        return {
            "loss": loss,
            "tokens": fed.inputs.num_tokens,
            "slots": fed.inputs.num_slots,  # positions computed, padding included
            "wall_s": took.wall_s,
            "cpu_s": took.user_s + took.system_s,
        }

    def memory_bytes(self) -> int:
        return max(peak_bytes() - self._base_bytes, 0)

    def validate(self) -> float:
        assert self._entry.validation is not None
        return validate(self._model, self._entry.validation)

    def parameters(self) -> list[int]:
        counts = [(p.numel(), p.requires_grad) for p in self._model.parameters()]
        return [sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)]


def _serve(connection: Connection, entry: Entry) -> None:
    try:
        runner = _Runner(entry)
        connection.send(None)
        while True:
            connection.send(getattr(runner, connection.recv())())
    except EOFError:
        return
    except Exception:
        connection.send(RuntimeError(traceback.format_exc()))


class Contestant:
    """A contestant's process, seen from outside."""

    def __init__(self, entry: Entry) -> None:
        context = processes()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, entry), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def __enter__(self) -> Contestant:
        return self

    def ask(self, method: str) -> Any:
        with suppress(OSError):
            self._connection.send(method)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            raise RuntimeError(f"a contestant died with code {self._process.exitcode}") from None
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def __exit__(self, *_: object) -> None:
        """End it: it goes when nobody asks any more."""
        self._connection.close()
        self._process.join(timeout=_PATIENCE_S)
        self._process.terminate()
        self._process.join()


def race(entries: dict[str, Entry], most_steps: int, told: Told) -> list[dict[str, Any]]:
    """Let contestants train steps in turns; returns a record of each.

    They take at most so many steps, fewer where their epoch is over before.
    """
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in entries}
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(Contestant(entry)) for name, entry in entries.items()}
        running = dict(contestants)
        for step in range(most_steps):
            for name, contestant in list(running.items()):
                if (timed := contestant.ask("step")) is None:
                    del running[name]
                else:
                    steps[name].append(timed)
            told(step + 1, most_steps, "step of each")
        return [
            {
                "strategy": name,
                "steps": steps[name],
                "memory_bytes": contestant.ask("memory_bytes"),
                "validation_loss": None if entries[name].validation is None else contestant.ask("validate"),
                "parameters": contestant.ask("parameters"),
            }
            for name, contestant in contestants.items()
        ]


def _entries(
    raced: tuple[str, ...], family: str, documents: Documents, shape: Shape, seed: int = 0, **more: Any
) -> dict[str, Entry]:
    """Return what contestants train, by strategy; `more` is the rest of an `Entry`."""
    feeds = {name: Feed(strategy=name, documents=documents, shape=shape, seed=seed) for name in raced}
    return {name: Entry(family=family, feed=feed, **more) for name, feed in feeds.items()}


def races(
    sets: dict[str, TextSet],
    told: Told,
    known: Container[str],
    *,
    families: tuple[str, ...],
    steps: dict[str, int],
    epoch: dict[str, int],
) -> Iterator[dict[str, Any]]:
    """Race all strategies on every family and set.

    `steps` are of each contestant, `epoch` the minibatches that documents are drawn for, both by set.
    """
    for name, of_set in sets.items():
        documents = of_set.draw(epoch[name], 0)
        for family in families:
            key = f"{family}, {name}"
            if key in known:
                continue
            entries = _entries(RACED, family, documents, of_set.shape)
            told(0, steps[name], f"{key}: starting")
            contestants = race(entries, steps[name], told)
            yield {"key": key, "family": family, "set": name, "contestants": contestants}


FEW_RACED = ("padding", "grouped", "online", "ours")
LORA_RATE = 8e-3
"""Adapters learn at a higher rate than weights do."""


def lora(
    sets: dict[str, TextSet], told: Told, known: Container[str], *, steps: int
) -> Iterator[dict[str, Any]]:
    """Race adapters on a base of the longer set, over one epoch of the short set."""
    if "lora" in known:
        return
    one_thread()
    short = sets["short"]
    weights = base_of("llama", sets["long"])
    documents = short.draw(steps, 1)
    more = {"validation": short.validation, "weights": weights, "learning_rate": LORA_RATE}
    entries = _entries(FEW_RACED, "llama", documents, short.shape, 1, **more)
    yield {
        "key": "lora",
        "rank": LORA_RANK,
        "learning_rate": LORA_RATE,
        "base_loss": validate(started("llama", "varlen", weights), short.validation),
        "contestants": race(entries, 2 * steps, told),
    }


MINIBATCH = 16
BASE_TOKENS = 8
"""Tokens of a short document."""


def extreme(
    told: Told, known: Container[str], *, factors: dict[int, int], base: int = BASE_TOKENS
) -> Iterator[dict[str, Any]]:
    """Race strategies on such documents."""
    for factor, steps in factors.items():
        if f"{factor}x" in known:
            continue
        minibatch_tokens = base * (MINIBATCH - 1 + factor)
        shape = Shape(documents=MINIBATCH, capacity=minibatch_tokens, packs=1)
        documents = extremes(factor, steps, shape, base)
        entries = _entries(FEW_RACED, "llama", documents, shape)
        told(0, steps, f"{factor}x: starting")
        yield {
            "key": f"{factor}x",
            "factor": factor,
            "base": base,
            "minibatch": MINIBATCH,
            "capacity": minibatch_tokens,
            "contestants": race(entries, 2 * steps, told),
        }
