"""Collators and samplers by their frameworks' names, beside those that they stand in for.

A collator gets a list of features, as a data loader hands them over, so that "from arrays" means an array for each
document. An epoch of a sampler is packed and iterated to its end, Python lists of Python ints included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import checks
from benchmarks.collating import LARGE, MEDIUM, ROUNDS, Batch
from benchmarks.inputs import CAPACITY, NUM_DOCUMENTS, lognormal_lengths
from benchmarks.peers import axolotl, transformers, trl
from benchmarks.rows import Contestant, Race, Row
from benchmarks.step import Step
from benchmarks.stopwatch import alternate

SECTION = "adapters"
FROM_ARRAYS = 100.0
FROM_LISTS = 10.0
"""What the issue asks for: times as fast as what is replaced."""


def steps() -> list[Step]:
    """Return what this section measures."""
    collators = [
        Step(f"the flattening collator from {form}, {size} packs", partial(_race_collator, form, size))
        for form in transformers.INPUTS
        for size in (MEDIUM, LARGE)
    ]
    return [
        *collators,
        Step("TRL's padding-free collator", _race_trl),
        Step("axolotl's batch sampler", _race_axolotl),
    ]


def _features(batch: Batch, form: str) -> list[dict[str, Any]]:
    """Return a batch's documents as a data loader hands them over."""
    if form == "lists":
        return [{"input_ids": document} for document in batch.packed_lists]
    if form == "torch":
        import torch

        return [{"input_ids": torch.from_numpy(document)} for document in batch.packed_arrays]
    return [{"input_ids": document} for document in batch.packed_arrays]


def _race_collator(form: str, size: int) -> list[Row]:
    """Race both collators on the same features, for all that they can give, as tensors."""
    from varlen.adapters.hf import DataCollatorWithFlattening

    batch = Batch.of("log-normal", size)
    features = _features(batch, form)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    theirs = transformers.collator([feature["input_ids"] for feature in features], return_tensors="pt")
    target = FROM_LISTS if form == "lists" else FROM_ARRAYS
    return [_race(batch, form, partial(collate, features), transformers.NAME, theirs, target)]


def _race_trl() -> list[Row]:
    """Race TRL's collator from int64 arrays, which it takes fastest."""
    from varlen.adapters.trl.collator import DataCollatorForLanguageModeling

    batch = Batch.of("log-normal", MEDIUM)
    collate = DataCollatorForLanguageModeling(pad_token_id=0)
    features = _features(batch, "numpy")
    theirs = trl.collator(batch.packed_arrays)
    return [_race(batch, "numpy", partial(collate, features), trl.COLLATOR, theirs, None)]


def _race(
    batch: Batch,
    form: str,
    ours: Callable[[], Any],
    name: str,
    theirs: Callable[[], Any],
    target: float | None,
) -> Race:
    """Check that two collators give the same, then time them."""
    checks.same_outputs(ours(), theirs())
    our_samples, their_samples = alternate(ours, theirs, rounds=ROUNDS)
    num_tokens = batch.documents.num_tokens
    return Race(
        section=SECTION,
        what=f"{len(batch.documents.lengths):,} {batch.name}, {num_tokens:,} tokens a call, features of {form}",
        ours=Contestant(name="varlen", call="the same", samples=our_samples),
        peer=Contestant(
            name=name, call="positions, segments and boundaries, as tensors", samples=their_samples
        ),
        tokens=num_tokens,
        target=target,
    )


def _race_axolotl() -> list[Row]:
    """Race an epoch of the batch sampler: ready to give its first batch, and given to the end."""
    from varlen.adapters.axolotl import MultipackBatchSampler

    lengths = lognormal_lengths(NUM_DOCUMENTS, seed=1)
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
                note="the other makes all its lists before the first batch" if ours is first else "",
            )
        )
    return rows
