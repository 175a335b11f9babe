"""Feeding a trainer: `vl.PackedLoader` beside other loaders that pack, and what it costs whoever waits for it.

Section `feeding`: 50,000 log-normal documents out of a token store, beside grain, MosaicML Streaming and TRL's packed
data sets, each at the best of some settings, in batches of 8 rows of 8,192; text beside the bare tokenizer; and the
steps of `waiting` and `skewed`. Each contestant is a process of its own on the same cores (`delivery`).
"""

from __future__ import annotations

import atexit
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.feeding import skewed, waiting
from benchmarks.feeding.delivery import CORES, Contestant, Delivered
from benchmarks.inputs import (
    CAPACITY,
    Documents,
    lognormal_lengths,
    source_texts,
    trained_tokenizer,
    write_store,
)
from benchmarks.peers import mosaic
from benchmarks.rows import Race, Row, Samples, Step

COUNT = 50_000
ROUNDS = 3
ROUND_S = 1.5
TRIAL_S = 1.0
TOKENS_TARGET = 5.0
TIMES = 8
"""The sources stand so often in the larger file of texts, which is cut into blocks of the usual size."""
TEXT_TARGET = 1 / 1.1
"""At most 10 % over the bare tokenizer."""
_DELIVERED = "input_ids, labels, positions and segments"


@dataclass(frozen=True)
class _Peer:
    """A peer, and the settings from which the best is taken."""

    name: str
    trials: tuple[dict[str, Any], ...]
    delivers: str


def _each(**choices: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    found: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        found = [{**one, name: value} for one in found for value in values]
    return tuple(found)


_PEERS = {
    "grain": _Peer(
        "grain",
        (
            *_each(fit=("first",), num_bins=(64,), threads=(0,), processes=(0, 1, 2)),
            {"fit": "best", "num_bins": 64, "threads": 0, "processes": 2},
            {"fit": "first", "num_bins": 64, "threads": 2, "processes": 0},
        ),
        f"rows of {_DELIVERED} as int32 arrays, out of a file of tokens mapped into memory",
    ),
    "mosaic": _Peer(
        mosaic.NAME,
        (
            *_each(workers=(0, 1, 2), collator=("own",), documents=(96,)),
            {"workers": 2, "collator": "llm-foundry", "documents": 96},
        ),
        f"rows of {_DELIVERED} as int32 tensors, out of MDS shards; what a collator keeps at the end is left out",
    ),
    "trl": _Peer(
        "datasets + TRL pack_dataset + DataLoader",
        (
            *_each(processes=(1,), workers=(0, 1, 2), form=("numpy",)),
            *_each(processes=(2,), workers=(2,), form=(None, "torch")),
        ),
        f"one flat row of {_DELIVERED} as int64 tensors, out of Arrow",
    ),
}


def steps() -> list[Step]:
    return [
        *(
            Step(f"from tokens, beside {peer.name}", partial(_race_tokens, key))
            for key, peer in _PEERS.items()
        ),
        Step("from text", _race_text),
        *waiting.steps(store_folder, text_folder),
        *skewed.steps(),
    ]


@cache
def store_folder() -> Path:
    """Write the documents in every form that a contestant reads, and return their folder, removed at the end."""
    folder, documents = _temporary(), Documents.draw(lognormal_lengths(COUNT))
    write_store(documents, folder)
    mosaic.write(str(folder / "mds"), documents.tokens, documents.offsets)
    return folder


@cache
def text_folder() -> Path:
    folder = _temporary()
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    lines = [json.dumps({"text": text}) + "\n" for text in source_texts()]
    with (folder / "texts.jsonl").open("w") as file:
        file.writelines(lines)
    with (folder / "more_texts.jsonl").open("w") as file:
        for _ in range(TIMES):
            file.writelines(lines)
    return folder


def _temporary() -> Path:
    kept = tempfile.TemporaryDirectory()
    atexit.register(kept.cleanup)
    return Path(kept.name)


def _race_tokens(key: str) -> list[Row]:
    """Try a peer's settings, and race the best of them."""
    folder, peer = store_folder(), _PEERS[key]
    with Contestant(folder, "varlen") as ours, Contestant(folder, key) as theirs:
        total = int(np.load(folder / "offsets.npy")[-1])

        seconds = partial(Delivered.seconds_in_all, tokens=total)
        best = min(peer.trials, key=lambda options: seconds(theirs.deliver(options, TRIAL_S)))
        fills = ours.check({}), theirs.check(best)
        pairs = _alternate(partial(ours.deliver, {}, ROUND_S), partial(theirs.deliver, best, ROUND_S))
        if key == "trl":  # once more with int64 tensors on our side too
            as_tensors = _alternate(
                partial(ours.deliver, {"to_torch": True}, ROUND_S), partial(theirs.deliver, best, ROUND_S)
            )
    settings = f"{_said(best)}, the best of {len(peer.trials)} settings tried; delivers {peer.delivers}"
    race = partial(_race, fills=fills, tokens=total)
    what = f"from {COUNT:,} tokenized documents to batches of 8 rows of {CAPACITY:,}"
    note = f"{CORES} cores; varlen shuffles, and the peer takes documents in their order"
    row = race(what, _OURS, (peer.name, settings), pairs, seconds, note=note, target=TOKENS_TARGET)
    if key != "trl":
        return [row]
    note = f"{CORES} cores; what pack_dataset takes isn't counted"
    packed = partial(Delivered.seconds_for, tokens=total)
    tensors, as_above = "PackedLoader, then to_torch on the trainer's side", f"{_said(best)}, as above"
    return [
        row,
        race(f"{what}, packed before", _OURS, (peer.name, settings), pairs, packed, note=note),
        race(
            f"{what}, as int64 tensors",
            tensors,
            (peer.name, as_above),
            as_tensors,
            seconds,
            note=f"{CORES} cores",
        ),
    ]


_OURS = f"PackedLoader, worker process, its defaults; delivers rows of {_DELIVERED} as int32 arrays"


def _race_text() -> list[Row]:
    folder = text_folder()
    files = {"more_texts.jsonl": TEXT_TARGET, "texts.jsonl": None}
    bare = {"texts_at_once": 2_000}
    rows: list[Row] = []
    for name, target in files.items():
        options = {"data": name, "mode": "streaming", "append_eos": False}
        with Contestant(folder, "varlen") as ours, Contestant(folder, "tokenizers") as theirs:
            pairs = _alternate(partial(ours.deliver, options, 3.0), partial(theirs.deliver, bare, 3.0))
        size = (folder / name).stat().st_size
        little = "" if target else "; so little is cut into blocks of 12 kB"
        row = _race(
            f"from {size / 1e6:,.0f} MB of Python sources to batches of 8 rows, streaming, nothing written",
            'PackedLoader(mode="streaming"), worker process, from JSON lines',
            ("tokenizers", f"encode_batch_fast and the ids on {CORES} threads, texts in memory"),
            pairs,
            partial(Delivered.seconds_for, tokens=2_000_000),
            tokens=2_000_000,
            target=target,
            note=f"{CORES} cores each{little}",
        )
        rows.append(row)
    return rows


def _alternate(
    ours: Callable[[], Delivered], theirs: Callable[[], Delivered]
) -> list[tuple[Delivered, Delivered]]:
    """Have both deliver once for nothing, and then in turns."""
    ours()
    theirs()
    return [(ours(), theirs()) for _ in range(ROUNDS)]


def _race(
    what: str,
    call: str,
    peer: tuple[str, str],
    pairs: list[tuple[Delivered, Delivered]],
    seconds: Callable[[Delivered], float],
    **more: Any,
) -> Race:
    """Return a race by the clock on the wall, since both use all cores; a sample is the time for all tokens."""
    mine, theirs = (Samples([seconds(pair[side]) for pair in pairs], []) for side in (0, 1))
    return Race.of(what, (call, mine), (*peer, theirs), by_wall=True, **more)


def _said(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


SECTIONS = {"feeding": steps}
