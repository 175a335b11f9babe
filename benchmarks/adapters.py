"""Collators, samplers and packers by other packages' names, beside those that they stand in for.

Section `adapters`: a collator gets a list of features, as a data loader hands them over, so that "from arrays"
means an array for each document; and, as a data set in Arrow's form gives them, a table. An epoch of axolotl's
sampler is packed and iterated to its end, Python lists of Python ints included. imoneoi's sampler isn't raced: it
is no package that can be installed. Section `fast_axolotl`: packing, packing with labels and reading a file, 20,000
documents, the same rows.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import checks
from benchmarks.checks import WrongResultError
from benchmarks.collating import LARGE, MEDIUM, ROUNDS, SMALL, Batch, race_batch
from benchmarks.inputs import CAPACITY, NUM_DOCUMENTS, Documents, lognormal_lengths
from benchmarks.peers import axolotl, transformers, trl
from benchmarks.rows import Row, Step
from benchmarks.stopwatch import Call, race

FROM_ARRAYS = 100.0
FROM_LISTS = 10.0
"""What the issue asks for: times as fast as what is replaced."""
_CASES = (
    ("log-normal", SMALL, False),
    ("log-normal", MEDIUM, False),
    ("log-normal", MEDIUM, True),
    ("short", MEDIUM, False),
    ("log-normal", LARGE, False),
)
"""Documents, packs of them, and whether they have labels of their own."""
_WHY = {
    SMALL: "most of it is the fixed cost of a call in Python: 12 us",
    MEDIUM: "a tensor costs 0.2 us in Python a column, whatever it holds",
}
_TRL_FORMS = ("lists", "numpy")
_EPOCHS = (1_000, 10_000, NUM_DOCUMENTS)
"""Documents of the epochs that axolotl's sampler is asked for."""
_WHY_EPOCH = {
    "to the first batch": "packing alone takes longer than a hundredth of what the other takes, compiled as well",
    "to its end": "what both give are lists of Python ints, and to make them takes longer than a hundredth",
}


def adapter_steps() -> list[Step]:
    forms = (*transformers.INPUTS, "arrow")
    collator, sampler = "the flattening collator from", "axolotl's batch sampler,"
    return [
        *(
            Step(f"{collator} {form}, {case[1]} packs of {case[0]}", partial(_race_collator, form, *case))
            for form in forms
            for case in _CASES
        ),
        *(Step(f"TRL's padding-free collator from {form}", partial(_race_trl, form)) for form in _TRL_FORMS),
        *(Step(f"{sampler} {count:,} documents", partial(_race_axolotl, count)) for count in _EPOCHS),
    ]


def _features(batch: Batch, form: str, labelled: bool) -> Any:
    names = ("input_ids", "labels") if labelled else ("input_ids",)
    if form == "arrow":
        ids = pa.array([document.astype("int32") for document in batch.packed("numpy")], pa.list_(pa.int32()))
        return pa.table(dict.fromkeys(names, ids))
    return [dict(zip(names, values)) for values in zip(*(batch.packed(form) for _ in names))]


def _race_collator(form: str, kind: str, size: int, labelled: bool) -> list[Row]:
    """Race both collators on the same documents, for all that they can give, as tensors."""
    from varlen.adapters.hf import DataCollatorWithFlattening

    batch = Batch.of(kind, size)
    theirs_from = "numpy" if form == "arrow" else form
    documents = batch.packed(theirs_from)
    labels = batch.packed(theirs_from) if labelled else None
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    ours = partial(collate, _features(batch, form, labelled))
    theirs = transformers.collator(documents, return_tensors="pt", labels=labels)
    target = FROM_LISTS if form == "lists" else FROM_ARRAYS
    what = "a table of Arrow, the other from numpy" if form == "arrow" else f"features of {form}"
    what += ", with labels" if labelled else ""
    note = "" if form in ("lists", "arrow") else _WHY.get(size, "")
    call = "hf.DataCollatorWithFlattening"
    return _race(batch, what, (call, ours), transformers.NAME, theirs, target, note)


def _race_trl(form: str) -> list[Row]:
    from varlen.adapters.trl.collator import DataCollatorForLanguageModeling

    batch = Batch.of("log-normal", MEDIUM)
    ours = partial(
        DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True), _features(batch, form, False)
    )
    theirs = trl.collator(batch.packed(form))
    target, note = (FROM_LISTS, "") if form == "lists" else (FROM_ARRAYS, "the other copies arrays as arrays")
    call = "trl.DataCollatorForLanguageModeling"
    return _race(batch, f"features of {form}", (call, ours), trl.COLLATOR, theirs, target, note)


def _race(
    batch: Batch, form: str, ours: tuple[str, Call], name: str, theirs: Call, target: float, note: str
) -> list[Row]:
    """Check that two collators give the same, then time them."""
    checks.same_outputs(ours[1](), theirs())
    peer = (name, "positions, segments and boundaries, as tensors", theirs)
    return [race_batch(batch, form, ours, peer, target, note)]


def _race_axolotl(num_documents: int) -> list[Row]:
    """Race an epoch of the batch sampler: ready to give its first batch, and given to the end."""
    from varlen.adapters.axolotl import MultipackBatchSampler

    lengths = lognormal_lengths(num_documents, seed=1)
    theirs = axolotl.sampler(lengths, CAPACITY)
    batches = MultipackBatchSampler(range(len(lengths)), 1, CAPACITY, lengths, axolotl.BIN_SIZE)

    def first() -> list:
        batches.set_epoch(0)
        return next(iter(batches))

    def epoch() -> list:
        batches.set_epoch(0)
        return list(batches)

    fills = [
        checks.fill_of_ids([pack for batch in made for pack in batch], lengths, CAPACITY)
        for made in (epoch(), theirs())
    ]
    return [
        race(
            f"an epoch of {len(lengths):,} documents {what}",
            ("MultipackBatchSampler", ours),
            (axolotl.SAMPLER, "generate_batches", theirs),
            rounds=ROUNDS,
            fills=(fills[0], fills[1]),
            target=FROM_ARRAYS,
            note=_WHY_EPOCH[what],
        )
        for what, ours in (("to the first batch", first), ("to its end", epoch))
    ]


COUNT, LONGEST, ROW = 20_000, 2046, 2048
"""It panics at a sequence of more than capacity - 2 tokens, so there is none."""
EOS, PAD = 1, 0
RUST_ROUNDS = 5
_COLUMNS = ("input_ids", "labels", "attention_mask")


def fast_axolotl_steps() -> list[Step]:
    return [
        Step("pack_sequences", _race_pack),
        Step("concatenate_and_pack", _race_concatenate),
        Step("reader, Parquet", lambda: _race_reader("parquet")),
        Step("reader, JSON lines", lambda: _race_reader("jsonl")),
    ]


@cache
def _rust_documents() -> Documents:
    return Documents.draw(lognormal_lengths(COUNT, mean=336.0, longest=LONGEST))


def _race_pack() -> list[Row]:
    """With the arguments of release 0.2.0, lists in and lists out."""
    lists = _rust_documents().lists
    what = "pack_sequences from lists, rows as lists"
    return _race_names(what, "pack_sequences", lambda module: module.pack_sequences(lists, ROW, PAD, EOS))


def _race_concatenate() -> list[Row]:
    lists = _rust_documents().lists
    masks = [[1] * len(one) for one in lists]

    def pack(module: Any) -> Any:
        packed = module.concatenate_and_pack(lists, lists, masks, ROW, PAD)
        return dict(zip(_COLUMNS, packed)) if isinstance(packed, tuple) else dict(packed)

    return _race_names("concatenate_and_pack from lists, rows as lists", "concatenate_and_pack", pack)


def _race_reader(kind: str) -> list[Row]:
    documents = _rust_documents()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"data.{kind}")
        if kind == "parquet":
            pq.write_table(pa.table({"input_ids": documents.arrow}), path, row_group_size=2000)
        else:
            path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents.lists))

        def read(module: Any) -> int:
            batches = module.streaming_dataset_reader(str(path), kind, 1000, 1)
            return sum(len(batch["input_ids"]) for batch in batches)

        name = "streaming_dataset_reader"
        return _race_names(f"{name}, {kind} of token lists", name, read)


def _race_names(what: str, name: str, call: Callable[[Any], Any]) -> list[Row]:
    """Check that a call of either module gives the same, then time both."""
    import fast_axolotl

    from varlen.adapters import fast_axolotl as ours

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ours.LeakWarning)
        mine, other = call(ours), call(fast_axolotl)
        if isinstance(mine, dict):
            for key in _COLUMNS:
                if not np.array_equal(mine[key], other[key]):
                    raise WrongResultError(f"{what}: {key} differs from the peer's")
        elif mine != other:
            raise WrongResultError(f"{what}: {mine:,} rows, the peer read {other:,}")
        del mine, other
        return [
            race(
                what,
                (f"adapters.fast_axolotl.{name}", partial(call, ours)),
                (f"fast-axolotl {name}", "release 0.2.0, its Rust extension", partial(call, fast_axolotl)),
                rounds=RUST_ROUNDS,
                tokens=_rust_documents().num_tokens,
                note=f"{COUNT:,} log-normal documents, the same rows come out",
            )
        ]


SECTIONS = {"adapters": adapter_steps, "fast_axolotl": fast_axolotl_steps}
