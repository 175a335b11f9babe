"""Rules about lengths: what rows, packs and documents must be multiples of, and which lengths must agree."""

from __future__ import annotations

import math
from collections.abc import Iterator

from varlen.adapters.megatron.config.finding import found
from varlen.adapters.megatron.config.reading import (
    COLLATED,
    FINE_TUNING,
    PRETRAINING,
    Reading,
    multiples,
)
from varlen.adapters.megatron.config.report import ConfigFinding

MODEL, DATASET = "model.seq_length", "dataset.seq_length"


def rows_divide_among_ranks(reading: Reading) -> Iterator[ConfigFinding]:
    """With context parallelism a row is cut into 2·CP chunks, and each rank takes two."""
    length, chunks = reading[MODEL], 2 * reading.cp
    if reading.cp == 1 or length is None or length % chunks == 0:
        return
    below, above = multiples(length, chunks)
    changes = {MODEL: above} | ({DATASET: above} if reading.says(DATASET) else {})
    yield found(
        reading,
        "seq_length",
        MODEL,
        limit=f"a multiple of 2 · context_parallel_size = {chunks}",
        what="a row can't be cut into equal chunks, two for each rank; Megatron stops with an AssertionError",
        outcome="stops",
        changes=changes,
        fix=f"{below} or {above}" if below != above else None,
    )


def collated_rows_divide(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on: what a collator pads rows to never exceeds `seq_length`, so that is a multiple too."""
    length, multiple = reading[DATASET], reading.alignment
    is_text = reading.is_of(("GPTSFTDatasetConfig", "FinetuningDatasetConfig")) and reading.is_in_batch
    if reading.dialect != "0.6" or length is None or length % multiple == 0:
        return
    if not (reading.is_of(COLLATED) or is_text):
        return
    below, above = multiples(length, multiple)
    yield found(
        reading,
        "seq_length",
        DATASET,
        limit=f"a multiple of lcm(2·CP, CP·TP) = {multiple}",
        what=f"rows are cut for {reading.alignment_words}; Megatron-Bridge stops with a ValueError",
        outcome="stops",
        changes={DATASET: above} | ({MODEL: above} if reading.says(MODEL) else {}),
        fix=f"{below} or {above}" if below != above else None,
    )


def model_and_data_agree(reading: Reading) -> Iterator[ConfigFinding]:
    """The model's sequence length is the data set's."""
    ours, theirs = reading[MODEL], reading[DATASET]
    is_checked = reading.is_of((*FINE_TUNING, *PRETRAINING)) or not reading.classes.get("dataset")
    if ours is None or theirs is None or ours == theirs or not is_checked:
        return
    yield found(
        reading,
        "seq_lengths_differ",
        MODEL,
        limit=f"the same as {reading.shown(DATASET)}",
        what="model and data disagree about the length of a row; Megatron-Bridge stops with an AssertionError",
        outcome="stops",
        changes={MODEL: theirs},
    )


def packs_divide_among_ranks(reading: Reading) -> Iterator[ConfigFinding]:
    """A pack is a row: its size is a multiple of `lcm(2·CP, CP·TP)`."""
    setting = f"{reading.specs}.packed_sequence_size"
    size, multiple = reading[setting], reading.alignment
    if not reading.is_offline or size < 1 or size % multiple == 0:
        return
    below, above = multiples(size, multiple)
    packed_already = reading.says(f"{reading.specs}.packed_train_data_path")
    words = f"{below} or {above}" if below != above else str(above)
    yield found(
        reading,
        "pack_size",
        setting,
        limit=f"a multiple of lcm(2·CP, CP·TP) = {multiple}",
        what=f"a full pack can't be cut for {reading.alignment_words}; its first step stops",
        outcome="stops",
        changes=None if packed_already else {setting: above},
        fix=f"pack the data again, to {words} tokens"
        if packed_already
        else words
        if below != above
        else None,
    )


def documents_divide_among_ranks(reading: Reading) -> Iterator[ConfigFinding]:
    """Context parallelism cuts every document of a pack, so each is padded to a multiple; nobody computes it."""
    setting = f"{reading.specs}.pad_seq_to_mult"
    given, multiple = reading[setting], reading.alignment
    if not reading.is_offline or given < 1 or given % multiple == 0:
        return
    evaluation = reading["dist.eval_context_parallel_size"] or 1
    chunks = math.lcm(*(2 * size if size > 1 else 1 for size in (reading.cp, evaluation)))
    is_cut_wrong = given % chunks != 0
    again = "pack the data again with it" if reading.says(f"{reading.specs}.packed_train_data_path") else None
    yield found(
        reading,
        "pad_seq_to_mult",
        setting,
        limit=f"a multiple of lcm(2·CP, CP·TP) = {multiple}",
        what=f"every document of a pack is cut into {chunks} chunks; Transformer Engine asserts on the device that "
        "they are equal, and stops"
        if is_cut_wrong
        else f"NVIDIA pads every document to the multiple of {reading.alignment_words}; rows that don't have it stop",
        outcome="stops" if is_cut_wrong else "advice",
        changes={setting: multiple},
        fix=again,
    )


def documents_fit_a_pack(reading: Reading) -> Iterator[ConfigFinding]:
    """Documents are cut to the data set's sequence length, which should be no more than a pack."""
    size, longest = reading.spec("packed_sequence_size"), reading[DATASET]
    if not reading.is_offline or size < 1 or longest is None or longest <= size:
        return
    if reading.says(f"{reading.specs}.packed_train_data_path"):
        return
    setting = f"{reading.specs}.packed_sequence_size"
    above = multiples(longest, reading.alignment)[1]
    yield found(
        reading,
        "pack_below_seq_length",
        setting,
        limit=f"at least {reading.shown(DATASET)}",
        what=f"documents are cut at {longest} tokens, so one may be longer than a pack of {size}; "
        + ("packing ends with an error at the first" if reading.dialect != "0.6" else "it can't be packed"),
        outcome="advice",
        changes={setting: above},
    )


RULES = (
    rows_divide_among_ranks,
    collated_rows_divide,
    model_and_data_agree,
    packs_divide_among_ranks,
    documents_divide_among_ranks,
    documents_fit_a_pack,
)
