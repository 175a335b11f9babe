"""Collators and samplers by their frameworks' names, beside those that they stand in for.

A collator gets a list of features, as a data loader hands them over, so that "from arrays" means an array for each
document; and, as a data set in Arrow's form gives them, a table. An epoch of a sampler is packed and iterated to its
end, Python lists of Python ints included. imoneoi's sampler isn't raced: it is no package that can be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import checks
from benchmarks.collating import LARGE, MEDIUM, ROUNDS, SMALL, Batch
from benchmarks.inputs import CAPACITY, NUM_DOCUMENTS, lognormal_lengths
from benchmarks.peers import axolotl, transformers, trl
from benchmarks.rows import Contestant, Race, Row
from benchmarks.step import Step
from benchmarks.stopwatch import alternate

SECTION = "adapters"
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


def steps() -> list[Step]:
    """Return what this section measures."""
    collators = [
        Step(
            f"the flattening collator from {form}, {size} packs of {kind}",
            partial(_race_collator, form, *case),
        )
        for form in (*transformers.INPUTS, "arrow")
        for case in _CASES
        for kind, size, _ in [case]
    ]
    return [
        *collators,
        *(Step(f"TRL's padding-free collator from {form}", partial(_race_trl, form)) for form in _TRL_FORMS),
        *(
            Step(f"axolotl's batch sampler, {count:,} documents", partial(_race_axolotl, count))
            for count in _EPOCHS
        ),
    ]


_TRL_FORMS = ("lists", "numpy")
_EPOCHS = (1_000, 10_000, NUM_DOCUMENTS)
"""Documents of the epochs that axolotl's sampler is asked for."""
_WHY_EPOCH = {
    "to the first batch": "packing alone takes longer than a hundredth of what the other takes, compiled as well",
    "to its end": "what both give are lists of Python ints, and to make them takes longer than a hundredth",
}


def _features(batch: Batch, form: str, labelled: bool) -> Any:
    """Return a batch's documents as a data loader hands them over."""
    if form == "arrow":
        return _table(batch, labelled)
    columns = {"input_ids": _documents(batch, form)}
    if labelled:
        columns["labels"] = _documents(batch, form)
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def _documents(batch: Batch, form: str) -> list:
    """Return the token ids of each document, every time as objects of their own."""
    if form == "lists":
        return [list(document) for document in batch.packed_lists]
    if form == "torch":
        import torch

        return [torch.from_numpy(document) for document in batch.packed_arrays]
    return batch.packed_arrays


def _table(batch: Batch, labelled: bool) -> Any:
    """Return neighbouring rows of a data set in Arrow's form, tokens of 32 bits."""
    import pyarrow as pa

    ids = pa.array([document.astype("int32") for document in batch.packed_arrays], pa.list_(pa.int32()))
    return pa.table({"input_ids": ids, "labels": ids} if labelled else {"input_ids": ids})


def _race_collator(form: str, kind: str, size: int, labelled: bool) -> list[Row]:
    """Race both collators on the same documents, for all that they can give, as tensors."""
    from varlen.adapters.hf import DataCollatorWithFlattening

    batch = Batch.of(kind, size)
    theirs_from = "numpy" if form == "arrow" else form
    documents = _documents(batch, theirs_from)
    labels = _documents(batch, theirs_from) if labelled else None
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    ours = partial(collate, _features(batch, form, labelled))
    theirs = transformers.collator(documents, return_tensors="pt", labels=labels)
    target = FROM_LISTS if form == "lists" else FROM_ARRAYS
    what = f"features of {form}" + (", with labels" if labelled else "")
    if form == "arrow":
        what = "a table of Arrow, the other from numpy" + (", with labels" if labelled else "")
    note = "" if form in ("lists", "arrow") else _WHY.get(size, "")
    return [
        _race(batch, what, "hf.DataCollatorWithFlattening", ours, transformers.NAME, theirs, target, note)
    ]


def _race_trl(form: str) -> list[Row]:
    """Race TRL's collator, from lists and from what it takes fastest."""
    from varlen.adapters.trl.collator import DataCollatorForLanguageModeling

    batch = Batch.of("log-normal", MEDIUM)
    ours = partial(
        DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True), _features(batch, form, False)
    )
    theirs = trl.collator(_documents(batch, form))
    target, note = (FROM_LISTS, "") if form == "lists" else (FROM_ARRAYS, "the other copies arrays as arrays")
    return [
        _race(
            batch,
            f"features of {form}",
            "trl.DataCollatorForLanguageModeling",
            ours,
            trl.COLLATOR,
            theirs,
            target,
            note,
        )
    ]


def _race(
    batch: Batch,
    form: str,
    call: str,
    ours: Callable[[], Any],
    name: str,
    theirs: Callable[[], Any],
    target: float,
    note: str,
) -> Race:
    """Check that two collators give the same, then time them."""
    checks.same_outputs(ours(), theirs())
    our_samples, their_samples = alternate(ours, theirs, rounds=ROUNDS)
    num_tokens = batch.documents.num_tokens
    return Race(
        section=SECTION,
        what=f"{len(batch.documents.lengths):,} {batch.name}, {num_tokens:,} tokens a call, {form}",
        ours=Contestant(name="varlen", call=call, samples=our_samples),
        peer=Contestant(
            name=name, call="positions, segments and boundaries, as tensors", samples=their_samples
        ),
        tokens=num_tokens,
        target=target,
        note=note,
    )


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
    rows: list[Row] = []
    for what, ours in (("to the first batch", first), ("to its end", epoch)):
        our_samples, their_samples = alternate(ours, theirs, rounds=ROUNDS)
        rows.append(
            Race(
                section=SECTION,
                what=f"an epoch of {len(lengths):,} documents {what}",
                ours=Contestant(
                    name="varlen", call="MultipackBatchSampler", samples=our_samples, fill=fills[0]
                ),
                peer=Contestant(
                    name=axolotl.SAMPLER, call="generate_batches", samples=their_samples, fill=fills[1]
                ),
                target=FROM_ARRAYS,
                note=_WHY_EPOCH[what],
            )
        )
    return rows
