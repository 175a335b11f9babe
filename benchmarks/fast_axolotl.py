"""fast-axolotl beside varlen's functions of the same names: packing, packing with labels, reading a file."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.checks import WrongResultError
from benchmarks.inputs import Documents, lognormal_lengths
from benchmarks.peers import fast_axolotl as peer
from benchmarks.rows import Contestant, Race, Row
from benchmarks.step import Step
from benchmarks.stopwatch import alternate
from varlen.adapters import fast_axolotl as ours

SECTION = "fast_axolotl"
COUNT, LONGEST, CAPACITY = 20_000, 2046, 2048
"""It panics at a sequence of more than capacity - 2 tokens, so there is none."""
EOS, PAD = 1, 0
ROUNDS = 5


def steps() -> list[Step]:
    """Return what this section measures."""
    return [
        Step("pack_sequences", _race_pack),
        Step("concatenate_and_pack", _race_concatenate),
        Step("reader, Parquet", lambda: _race_reader("parquet")),
        Step("reader, JSON lines", lambda: _race_reader("jsonl")),
    ]


@cache
def _documents() -> Documents:
    return Documents.draw(lognormal_lengths(COUNT, mean=336.0, longest=LONGEST))


def _race_pack() -> list[Row]:
    """Race `pack_sequences` with the arguments of release 0.2.0, lists in and lists out."""
    lists = _documents().lists

    def pack() -> Any:
        return ours.pack_sequences(lists, CAPACITY, PAD, EOS)

    call = peer.packer(lists, CAPACITY, PAD, EOS)
    return [_race("pack_sequences from lists, rows as lists", pack, call, peer.PACK, _documents().num_tokens)]


def _race_concatenate() -> list[Row]:
    """Race `concatenate_and_pack`."""
    lists = _documents().lists
    masks = [[1] * len(one) for one in lists]

    def pack() -> Any:
        return dict(ours.concatenate_and_pack(lists, lists, masks, CAPACITY, PAD))

    theirs = peer.concatenator(lists, lists, masks, CAPACITY)

    def call() -> Any:
        packed = theirs()
        names = ("input_ids", "labels", "attention_mask")
        return dict(packed) if isinstance(packed, dict) else dict(zip(names, packed))

    what = "concatenate_and_pack from lists, rows as lists"
    return [_race(what, pack, call, peer.CONCATENATE, _documents().num_tokens)]


def _race_reader(kind: str) -> list[Row]:
    """Race `streaming_dataset_reader` over a file of token ids."""
    documents = _documents()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"data.{kind}")
        if kind == "parquet":
            pq.write_table(pa.table({"input_ids": documents.arrow}), path, row_group_size=2000)
        else:
            path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents.lists))

        def read() -> int:
            batches = ours.streaming_dataset_reader(str(path), kind, 1000, 1)
            return sum(len(batch["input_ids"]) for batch in batches)

        call = peer.reader(str(path), kind, 1000)
        what = f"streaming_dataset_reader, {kind} of token lists"
        return [_race(what, read, call, peer.READ, documents.num_tokens)]


def _race(what: str, ours_: Callable[[], Any], theirs: Callable[[], Any], name: str, tokens: int) -> Race:
    """Check that both give the same, then time them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ours.LeakWarning)
        mine, other = ours_(), theirs()
        if isinstance(mine, dict):
            for key in ("input_ids", "labels", "attention_mask"):
                if not np.array_equal(mine[key], other[key]):
                    raise WrongResultError(f"{what}: {key} differs from the peer's")
        elif mine != other:
            raise WrongResultError(f"{what}: {mine:,} rows, the peer read {other:,}")
        del mine, other
        samples = alternate(ours_, theirs, rounds=ROUNDS)
    return Race(
        section=SECTION,
        what=what,
        ours=Contestant(name="varlen", call=f"adapters.fast_axolotl.{name.split()[-1]}", samples=samples[0]),
        peer=Contestant(name=name, call="release 0.2.0, its Rust extension", samples=samples[1]),
        tokens=tokens,
        note=f"{COUNT:,} log-normal documents, the same rows come out",
    )
