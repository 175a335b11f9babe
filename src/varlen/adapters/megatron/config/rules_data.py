"""Rules about batches: rows of a micro-batch, the global batch, and the processes that share it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from varlen.adapters.megatron.config.reading import (
    COLLATED,
    FINE_TUNING,
    PRETRAINING,
    Reading,
    as_written,
    multiples,
)
from varlen.adapters.megatron.config.report import ConfigFinding, found
from varlen.parsed import parse_json
from varlen.regular import read_regular_text

MICRO, GLOBAL = "train.micro_batch_size", "train.global_batch_size"
EVAL_MICRO, EVAL_GLOBAL = "validation.eval_micro_batch_size", "validation.eval_global_batch_size"


def packs_come_one_by_one(reading: Reading) -> Iterator[ConfigFinding]:
    """A micro-batch of offline packing is one row: its boundaries are those of one row."""
    rows = reading.micro_batch or 1
    if not (reading.is_offline or reading["dataset.sft"]) or rows == 1:
        return
    changes: dict[str, object] = {MICRO: 1}
    steps, size = reading[GLOBAL], reading.spec("packed_sequence_size")
    packed_already = reading.says(f"{reading.specs}.packed_train_data_path")
    if reading.is_offline and steps and size > 0 and steps % rows == 0 and not packed_already:
        # As many tokens a step, and as many in each forward pass.
        changes |= {GLOBAL: steps // rows, f"{reading.specs}.packed_sequence_size": size * rows}
    how = (
        "Megatron-Bridge stops with a ValueError; a custom data set at the first step"
        if not reading.is_arguments
        else "Megatron-LM stops where it hands the boundaries on"
    )
    yield found(
        reading,
        "micro_batch_packed",
        MICRO,
        limit="1 with packed rows",
        what=f"a packed row holds many documents already, and comes alone; {how}",
        outcome="stops",
        changes=changes,
    )


def in_batch_packs_several(reading: Reading) -> Iterator[ConfigFinding]:
    """Packing within a micro-batch needs two rows at least; the opposite of offline packing."""
    if reading.is_in_batch and reading.micro_batch == 1:
        yield found(
            reading,
            "micro_batch_in_batch",
            MICRO,
            limit="2 or more with in-batch packing",
            what="the rows of a micro-batch are packed into one, and there is only one; Megatron-Bridge stops with a "
            "ValueError",
            outcome="stops",
            changes={MICRO: 2},
        )


def packs_are_evaluated_one_by_one(reading: Reading) -> Iterator[ConfigFinding]:
    """The micro-batch of evaluation is one packed row too."""
    rows = reading[EVAL_MICRO] or 1
    if reading.is_offline and rows > 1 and reading["dataset.do_validation"]:
        yield found(
            reading,
            "eval_micro_batch",
            EVAL_MICRO,
            limit="1 with packed rows",
            what="evaluation hands on the boundaries of several rows where attention takes those of one; its first "
            "step stops",
            outcome="stops",
            changes={EVAL_MICRO: 1},
        )


def processes_divide(reading: Reading) -> Iterator[ConfigFinding]:
    """The number of processes is a multiple of TP·PP·CP."""
    group = reading.tp * reading.pp * reading.cp
    if reading.world_size is None or reading.world_size % group == 0:
        return
    below, above = multiples(reading.world_size, group)
    yield found(
        reading,
        "world_size",
        "world_size",
        limit=f"a multiple of TP·PP·CP = {reading.tp}·{reading.pp}·{reading.cp} = {group}",
        what="the processes can't be shared out; Megatron stops with an AssertionError",
        outcome="stops",
        fix=f"start {' or '.join(map(str, sorted({below, above})))} processes",
        seen=f"{reading.world_size} processes",
    )


def global_batch_divides(reading: Reading) -> Iterator[ConfigFinding]:
    """The global batch is a multiple of micro-batch size times data-parallel size."""
    steps, rows = reading[GLOBAL], reading.micro_batch
    if steps is None or rows is None:
        return
    group = rows * (reading.dp or 1)
    if steps % group:
        below, above = multiples(steps, group)
        of = (
            f"{MICRO} · data-parallel size = {rows}·{reading.dp} = {group}"
            if reading.dp
            else f"{MICRO} = {rows}"
        )
        yield found(
            reading,
            "global_batch",
            GLOBAL,
            limit=f"a multiple of {of}",
            what="the ranks can't take equally many micro-batches; Megatron stops with an AssertionError",
            outcome="stops",
            changes={GLOBAL: below},
            fix=f"{below} or {above}" if below != above else None,
        )


def evaluation_batch_divides(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on: the same in evaluation, whose context parallelism may be another."""
    steps = reading[EVAL_GLOBAL] or reading[GLOBAL]
    rows = reading[EVAL_MICRO] or reading.micro_batch
    cp = reading["dist.eval_context_parallel_size"] or reading.cp
    group = reading.tp * reading.pp * cp
    if reading.dialect != "0.6" or reading.dp is None or steps is None or rows is None:
        return
    if not (reading.says(EVAL_GLOBAL) or reading.says(EVAL_MICRO) or cp != reading.cp):
        return
    assert reading.world_size is not None
    if reading.world_size % group:
        yield found(
            reading,
            "world_size",
            "dist.eval_context_parallel_size",
            limit=f"{reading.world_size} processes are a multiple of TP·PP·CP of evaluation = {group}",
            what="the processes can't be shared out in evaluation; Megatron-Bridge stops with an AssertionError",
            outcome="stops",
            changes={"dist.eval_context_parallel_size": reading.cp},
        )
        return
    share = rows * (reading.world_size // group)
    if steps % share:
        below, above = multiples(steps, share)
        yield found(
            reading,
            "global_batch",
            EVAL_GLOBAL,
            limit=f"a multiple of the evaluation's micro-batch · data-parallel size = {share}",
            what="the ranks can't take equally many micro-batches in evaluation; Megatron-Bridge stops with an "
            "AssertionError",
            outcome="stops",
            changes={EVAL_GLOBAL: below},
            fix=f"{below} or {above}" if below != above else None,
        )


BATCH_RULES = (
    packs_come_one_by_one,
    in_batch_packs_several,
    packs_are_evaluated_one_by_one,
    processes_divide,
    global_batch_divides,
    evaluation_batch_divides,
)


# Rules about lengths: what rows, packs and documents must be multiples of, and which lengths must agree.

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


LENGTH_RULES = (
    rows_divide_among_ranks,
    collated_rows_divide,
    model_and_data_agree,
    packs_divide_among_ranks,
    documents_divide_among_ranks,
    documents_fit_a_pack,
)


# Rules about files: packed rows that are there, in a form that the release reads, and metadata that is theirs.

PACKED = ("packed_train_data_path", "packed_val_data_path")
NEEDED = ("pack_size", "dataset_max_seqlen", "max_samples_per_bin", "min_packed_seqlen")
"""What the reader of fixed boundaries takes from each entry of a metadata file."""


def packed_rows_are_there(reading: Reading) -> Iterator[ConfigFinding]:
    """Named files of packed rows exist, and end as the release expects; addresses of object stores are believed."""
    for name in PACKED:
        setting = f"{reading.specs}.{name}"
        if not reading.is_offline or not reading.says(setting) or "://" in reading[setting]:
            continue
        path = str(reading[setting])
        if path.lower().endswith(".npy"):
            yield from _npy(reading, setting, path)
            continue
        is_first = reading.release is not None and reading.is_before(0, 4)
        if is_first:
            yield _missing(reading, setting, "a .npy file before release 0.4", "stops with an AssertionError")
        elif not _rows_at(path):
            kinds = "a Parquet file, folder or pattern" + (
                ", or a prefix of .bin and .idx" if reading.dialect == "0.6" else ""
            )
            yield _missing(reading, setting, f"{kinds} that is there", "stops with a FileNotFoundError")


def metadata_belong_to_rows(reading: Reading) -> Iterator[ConfigFinding]:
    """A named metadata file is a JSON array of what was packed, to this size."""
    setting = f"{reading.specs}.packed_metadata_path"
    is_static = bool(reading.spec("pad_cu_seqlens"))
    is_packed = reading.says(f"{reading.specs}.packed_train_data_path")
    if not reading.is_offline:
        return
    if not reading.says(setting):
        if is_static and is_packed:
            yield _metadata(
                reading,
                setting,
                "given with pad_cu_seqlens",
                "its default is the folder of packs that "
                "Megatron-Bridge makes itself, and the data set doesn't open without it",
                is_error=False,
            )
        return
    path = str(reading[setting])
    if "://" in path:
        return
    if not Path(path).is_file():
        if is_packed:
            yield _metadata(
                reading, setting, "a file that is there", "the data set doesn't open without it", True
            )
        return
    yield from _entries(reading, setting, path, is_static)


def _entries(reading: Reading, setting: str, path: str, is_static: bool) -> Iterator[ConfigFinding]:
    """Go over what a metadata file holds."""
    try:
        entries: Any = parse_json(read_regular_text(path))
    except (ValueError, OSError) as error:
        told = str(error).splitlines()[0]
        yield _metadata(reading, setting, "one JSON array", f"it isn't JSON: {told}", True)
        return
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        yield _metadata(
            reading,
            setting,
            "one JSON array with an entry for each run",
            f"it holds {str(entries)[:60]}",
            True,
        )
        return
    missing = [name for name in NEEDED if any(name not in entry for entry in entries)]
    if missing:
        yield _metadata(
            reading,
            setting,
            f"entries with {', '.join(NEEDED)}",
            f"an entry is without {', '.join(missing)}, of which boundaries of one number are made",
            is_static,
        )
    size = reading.spec("packed_sequence_size")
    sizes = sorted(
        {entry["pack_size"] for entry in entries if isinstance(entry.get("pack_size"), int)} - {size}
    )
    if sizes:
        yield _metadata(
            reading,
            setting,
            f"of packs of packed_sequence_size = {size}",
            f"it holds packs of {' and '.join(map(str, sizes))}; readers take the largest of all entries",
            is_static,
        )


def _npy(reading: Reading, setting: str, path: str) -> Iterator[ConfigFinding]:
    if not Path(path).is_file():
        yield _missing(reading, setting, "a file that is there", "stops with a FileNotFoundError")
    elif not (reading.release is not None and reading.is_before(0, 4)):
        yield found(
            reading,
            "npy_file",
            setting,
            limit="Parquet from release 0.4 on",
            what=".npy files are pickles, read whole into memory on every rank, and deprecated",
            outcome="advice",
            fix="write it anew as Parquet with varlen's reader of packed rows",
        )


def _missing(reading: Reading, setting: str, limit: str, how: str) -> ConfigFinding:
    path = str(reading[setting])
    parent = Path(path).parent
    where = "" if parent.is_dir() else f"; neither is the folder {parent}"
    is_there = Path(path).exists()
    what = "this is something else" if is_there else f"there is nothing at this path{where}"
    return found(
        reading,
        "packed_file",
        setting,
        limit=limit,
        what=f"{what}; Megatron-Bridge {how}",
        outcome="stops",
        fix="pack the data with `varlen pack --format megatron`, or leave the path out to have it packed as the run "
        "starts",
    )


def _metadata(reading: Reading, setting: str, limit: str, what: str, is_error: bool) -> ConfigFinding:
    return found(
        reading,
        "metadata",
        setting,
        limit=limit,
        what=what,
        outcome="stops" if is_error else "advice",
        fix=f"name the file that was written with the packs of {as_written(reading.spec('packed_sequence_size'))}",
    )


def _rows_at(path: str) -> bool:
    """Return whether a path leads to packed rows: a file, a folder with Parquet files, a pattern, a prefix."""
    place = Path(path)
    if place.is_dir():
        return any(inner.suffix.lower() in (".parquet", ".pq") for inner in place.iterdir())
    if place.is_file():
        return place.suffix.lower() in (".parquet", ".pq", ".bin", ".idx")
    if any(sign in path for sign in "*?["):
        return any(Path(place.anchor or ".").glob(str(place.relative_to(place.anchor))))
    return Path(f"{path}.bin").is_file() and Path(f"{path}.idx").is_file()


FILE_RULES = (packed_rows_are_there, metadata_belong_to_rows)
