"""`python -m benchmarks.feeding.delivery`: one contestant that delivers batches, in a process of its own.

It is told on its standard input to check what it delivers, or to deliver for some seconds, and answers in JSON. So
contestants stay warm while others have their turn, and none runs in the process of another.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks import WrongResultError, fill_of_rows
from benchmarks.inputs import CAPACITY
from benchmarks.stopwatch import every_core

ROWS = 8
CORES = 2
IGNORED = -100
STREAMED = 32
"""Batches that streaming prepares together: its packs a lane."""
_WARM_S = 0.7
"""Delivered before the clock starts: what was made ahead while others had their turn isn't counted."""
Row = tuple[np.ndarray, np.ndarray]
"""A pack's tokens without padding, and the lengths of its documents."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How a contestant is set up to deliver."""

    batches: Callable[[int | None], Iterator[Any]]
    """Batches of so many epochs; None for no end."""
    tokens: Callable[[Any], int]
    """Of a batch, padding not counted."""
    packs: Callable[[Any], list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]]
    """Of a batch: of each pack its tokens, labels and positions, padding left out, and lengths of documents."""
    num_packs: int | None = None
    """Of an epoch, where batches don't show it."""
    at_a_time: int = 1
    """Batches that are prepared together: whole rounds of them are timed."""
    prepared_s: float = 0.0
    """Spent on packing all documents before the first batch."""
    keeps_leftovers: bool = False
    """At the end of an epoch some documents still wait for others to be packed with."""


def varlen(folder: Path, options: dict[str, Any]) -> Delivery:
    import varlen as vl

    is_torch, data = options.pop("to_torch", False), folder / options.pop("data", "store")

    def batches(epochs: int | None) -> Iterator[Any]:
        loader = vl.PackedLoader(
            data,
            str(folder / "tokenizer.json") if data.suffix else None,
            capacity=CAPACITY,
            global_batch_size=ROWS,
            epochs=epochs,
            **options,
        )
        if loader.mode != options.get("mode", "indexed"):
            raise WrongResultError(f"the loader is {loader.mode}")
        return (batch.to_torch() for batch in loader) if is_torch else iter(loader)

    def packs(batch: Any) -> list[Any]:
        return _rows_of(batch.input_ids, batch.labels, batch.position_ids, np.asarray(batch.segment_ids) + 1)

    at_a_time = STREAMED if data.suffix else 1
    return Delivery(batches=batches, tokens=lambda batch: batch.num_tokens, packs=packs, at_a_time=at_a_time)


def tokenizers(folder: Path, options: dict[str, Any]) -> Delivery:
    """Set up the bare tokenizer: texts in memory, on as many threads as there are cores."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
    at_once = options["texts_at_once"]

    def batches(epochs: int | None) -> Iterator[Any]:
        for _ in itertools.count() if epochs is None else range(epochs):
            for start in range(0, len(texts), at_once):
                some = texts[start : start + at_once]
                yield [
                    encoding.ids for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False)
                ]

    return Delivery(batches=batches, tokens=lambda lists: sum(map(len, lists)), packs=lambda _: [])


def grain(folder: Path, options: dict[str, Any]) -> Delivery:
    from benchmarks.peers import grain

    files = (str(folder / "tokens.npy"), str(folder / "offsets.npy"))

    def packs(batch: Any) -> list[Any]:
        names = ("input_ids", "labels", "input_ids_positions", "input_ids_segment_ids")
        return _rows_of(*(batch[name] for name in names))

    return Delivery(
        batches=lambda epochs: grain.batches(*files, CAPACITY, ROWS, epochs, **options),
        tokens=lambda batch: int(np.count_nonzero(batch["input_ids_segment_ids"])),
        packs=packs,
    )


def trl(folder: Path, options: dict[str, Any]) -> Delivery:
    """Pack with TRL, and set up torch's loader with its collator."""
    from benchmarks.peers import trl

    data, seconds = trl.packed_dataset(str(folder / "data.parquet"), CAPACITY, options.pop("processes"))

    def packs(batch: Any) -> list[Any]:
        ids, labels, positions = (batch[n].numpy()[0] for n in ("input_ids", "labels", "position_ids"))
        return [(ids, labels, positions, np.diff(batch["cu_seq_lens_q"].numpy()))]

    return Delivery(
        batches=lambda epochs: trl.batches(data, ROWS, epochs, **options),
        tokens=lambda batch: batch["input_ids"].numel(),
        packs=packs,
        num_packs=len(data),
        prepared_s=seconds,
    )


def mosaic(folder: Path, options: dict[str, Any]) -> Delivery:
    from benchmarks.peers import mosaic

    is_own = options["collator"] == "own"
    pad, segments = (0, "segment_ids") if is_own else (-1, "sequence_id")

    def packs(batch: Any) -> list[Any]:
        numbers = batch[segments].numpy() - pad
        positions = batch["position_ids"].numpy() if is_own else None
        return _rows_of(batch["input_ids"].numpy(), batch["labels"].numpy(), positions, numbers)

    return Delivery(
        batches=lambda epochs: mosaic.batches(str(folder / "mds"), CAPACITY, ROWS, epochs, **options),
        tokens=lambda batch: int((batch[segments] > pad).sum()),
        packs=packs,
        keeps_leftovers=True,
    )


CONTESTANTS = {"varlen": varlen, "tokenizers": tokenizers, "grain": grain, "trl": trl, "mosaic": mosaic}


def _rows_of(ids: Any, labels: Any, positions: Any, segments: Any) -> list[Any]:
    """Cut rows: segments are numbered from 1 in each, and 0 is padding."""
    found = []
    for row in range(len(ids)):
        is_real = np.asarray(segments[row]) > 0
        lengths = np.bincount(np.asarray(segments[row])[is_real])[1:]
        of_row = [
            None if part is None else np.asarray(part[row])[is_real] for part in (ids, labels, positions)
        ]
        found.append((*of_row, lengths))
    return found


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """What came in some seconds."""

    tokens: int
    seconds: float
    prepared_s: float
    """Spent once on all documents, before the first batch."""

    def seconds_for(self, tokens: int) -> float:
        return tokens * self.seconds / self.tokens

    def seconds_in_all(self, tokens: int) -> float:
        return self.seconds_for(tokens) + self.prepared_s


def check(delivery: Delivery, folder: Path) -> dict[str, float]:
    """Take an epoch, and see that every document comes once, with its labels and positions."""
    tokens, offsets = np.load(folder / "tokens.npy"), np.load(folder / "offsets.npy")
    rows: list[Row] = []
    num_packs = 0
    for batch in delivery.batches(1):
        packs = delivery.packs(batch)
        num_packs += len(packs)
        for ids, labels, positions, lengths in packs:
            starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
            steps = np.arange(len(ids)) - np.repeat(starts, lengths)
            if positions is not None and not np.array_equal(positions, steps):
                raise WrongResultError("positions don't restart with every document")
            if not np.array_equal(labels, np.where(steps == 0, IGNORED, ids)):
                raise WrongResultError("labels are not the tokens, each document's first left out")
            rows.append((ids, lengths))
    delivered = sum(len(ids) for ids, _ in rows)
    if delivery.keeps_leftovers:
        share = delivered / len(tokens)
        if not 0.97 < share <= 1:
            raise WrongResultError(f"{share:.1%} of the tokens were delivered")
    else:
        fill_of_rows(rows, tokens, offsets, CAPACITY * ROWS)
    return {"tokens": delivered, "fill": delivered / ((delivery.num_packs or num_packs) * CAPACITY)}


def deliver(delivery: Delivery, batches: Iterator[Any], seconds: float) -> dict[str, float]:
    begun = time.perf_counter()
    while time.perf_counter() - begun < _WARM_S:
        for _ in range(delivery.at_a_time):
            next(batches)
    taken, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(delivery.at_a_time):
            taken += delivery.tokens(next(batches))
    return {"tokens": taken, "seconds": time.perf_counter() - start, "prepared_s": delivery.prepared_s}


def main() -> None:
    """Obey orders until the standard input ends.

    Whoever delivers goes on where it stopped, as long as the same options are asked for.
    """
    folder, name = Path(sys.argv[1]), sys.argv[2]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:CORES]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    options = delivery = endless = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if delivery is None or order["options"] != options:
                endless = delivery = None
                gc.collect()  # which ends the workers of the one before
                options = order["options"]
                delivery = CONTESTANTS[name](folder, dict(options))
            if order["seconds"] is None:
                answer: dict[str, Any] = check(delivery, folder)
            else:
                endless = delivery.batches(None) if endless is None else endless
                answer = deliver(delivery, endless, order["seconds"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # workers of peers may keep an interpreter from ending


class Contestant:
    """A contestant's process, seen from outside."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._errors = (folder / f"{name}.err").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.feeding.delivery", str(folder), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**every_core(), "HF_HOME": str(folder / "cache"), "RAYON_NUM_THREADS": str(CORES)},
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Contestant:
        return self

    def check(self, options: dict[str, Any]) -> float:
        """Have it deliver an epoch that is checked; returns how full its packs are."""
        return self._ask(options, None)["fill"]

    def deliver(self, options: dict[str, Any], seconds: float) -> Delivered:
        return Delivered(**self._ask(options, seconds))

    def _ask(self, options: dict[str, Any], seconds: float | None) -> dict[str, float]:
        """Give an order, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pause(signal.SIGCONT)
        with suppress(BrokenPipeError):  # what it says at last tells more
            order = {"options": options, "seconds": seconds}
            print(json.dumps(order), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.name} ended: {self._errors.read()[-2000:]}")
        self._pause()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WrongResultError(f"{self.name} {options}: {answer['error']}")
        return answer

    def _pause(self, signal_: signal.Signals = signal.SIGSTOP) -> None:
        """Have it and all that it started stand still, or go on, so that it makes nothing ahead meanwhile."""
        for process in [self._process.pid, *_descendants(self._process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(process, signal_)

    def __exit__(self, *_: object) -> None:
        for process in _descendants(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()


def _descendants(process: int) -> list[int]:
    """Return the processes that a process has started, and those that they have; none where the system hides them."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


if __name__ == "__main__":
    main()
