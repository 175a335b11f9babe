"""Rules about data: what turns packing on, batches and the ranks that share them, and lengths that must divide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from varlen.adapters.megatron.config.reading import (
    COLLATED,
    FINE_TUNING,
    PRETRAINING,
    Reading,
    multiples,
    nearest,
)
from varlen.adapters.megatron.config.report import ConfigFinding, Outcome, Rule, Rules, found
from varlen.adapters.megatron.config.settings import (
    IN_BATCH_NEW,
    IN_BATCH_OLD,
    OFFLINE_FLAG,
    OFFLINE_NEW,
    OFFLINE_OLD,
    SETTINGS,
)

VALUE_ERROR = "Megatron-Bridge stops with a ValueError"
USUAL_PACK = 4096  # tokens of a pack, offered where no length is given
TEXT = ("GPTSFTDatasetConfig", "FinetuningDatasetConfig")
LOADER, BUFFER = "dataset.dataloader_type", "dataset.packing_buffer_size"
MICRO, GLOBAL = "train.micro_batch_size", "train.global_batch_size"
EVAL_MICRO, EVAL_GLOBAL = "validation.eval_micro_batch_size", "validation.eval_global_batch_size"
EVAL_CP = "dist.eval_context_parallel_size"
MODEL, DATASET = "model.seq_length", "dataset.seq_length"
SIZE, MULTIPLE = "{r.specs}.packed_sequence_size", "{r.specs}.pad_seq_to_mult"


def names_of_one_release(reading: Reading) -> Iterator[ConfigFinding]:
    """The names of one release only; those of another release have no effect."""
    other, own = (OFFLINE_OLD, OFFLINE_NEW) if reading.is_new else (OFFLINE_NEW, OFFLINE_OLD)
    batch, own_batch = (IN_BATCH_OLD, IN_BATCH_NEW) if reading.is_new else (IN_BATCH_NEW, IN_BATCH_OLD)
    theirs, ours = ("0.5.1 and before", "0.6.0 on") if reading.is_new else ("0.6.0 on", "0.5.1 and before")
    limit = f"only the names that releases {'from ' if reading.is_new else ''}{ours} have"
    what = f"is of releases {theirs}: this one never reads it, and trains"
    report = partial(found, reading, "packing_names")
    if other in reading.held:
        moved = {
            name: reading.values[f"{other}.{name}"]
            for name in (full.rpartition(".")[2] for full in SETTINGS if full.startswith(f"{own}."))
            if reading.has(f"{other}.{name}")
        }
        changes: dict[str, object] = {other: None}
        if own not in reading.held and moved.get("packed_sequence_size", 0) > 0:
            changes |= {own: moved} | ({OFFLINE_FLAG: True} if reading.is_new else {})
        effect = f"`{other}` {what} as if it weren't there"
        yield report(other, limit, effect, "silently wrong", changes, seen=f"{other} is set")
    if reading[batch]:
        effect = f"`{batch}` {what} unpacked rows"
        yield report(batch, limit, effect, "silently wrong", {batch: None, own_batch: True})


def row_size(reading: Reading) -> int:
    """Return the length of a row, up to the multiple that it must have; 4,096 by default."""
    return multiples(reading[DATASET] or reading[MODEL] or USUAL_PACK, reading.alignment)[1]


def _longest_is_out_of_range(reading: Reading) -> bool:
    longest, size = reading.spec("max_single_sequence_length"), reading.spec("packed_sequence_size")
    return reading.specs in reading.held and longest is not None and size > 0 and not 1 <= longest <= size


def _yields_global_batches(reading: Reading) -> bool:
    kind = reading[LOADER] or "batch"
    return reading.is_new and reading.is_in_batch and reading.is_of(TEXT) and kind == "batch"


def _unread_specs(reading: Reading) -> str:
    return OFFLINE_OLD if OFFLINE_OLD in reading.held else OFFLINE_NEW


def _packing_switch(reading: Reading) -> str:
    return reading.in_batch_name if reading.is_in_batch else BUFFER


def no_name_is_mistyped(reading: Reading) -> Iterator[ConfigFinding]:
    """A name without effect that is close to that of a setting: probably a typing error."""
    for written, near in reading.mistyped:
        limit, fix = "a name that Megatron reads", f"rename it to {near}, if that is meant"
        what = f"no rule knows `{written}`; was {near} meant? The release's default stands in its place"
        seen = f"{written} is set"
        yield found(reading, "unknown_setting", written, limit, what, "advice", fix=fix, seen=seen)


SWITCH_RULES = (
    names_of_one_release,
    Rule(
        "packing_switches",
        _packing_switch,
        lambda r: r.is_offline + r.is_in_batch + r.is_energon > 1,
        "one way of packing",
        "{r.packing} are asked for together; they want opposite micro-batches, and releases from 0.6 on stop",
        changes=lambda r: {_packing_switch(r): False if r.is_in_batch else None},
    ),
    # From 0.6 on: the flag of offline packing and its specs together, or neither.
    Rule(
        "packing_flag",
        OFFLINE_FLAG,
        lambda r: r.is_new and r.is_offline and not r[OFFLINE_FLAG],
        f"true where `{OFFLINE_NEW}` is set",
        "specs of offline packing are set and its switch is off; Megatron-Bridge stops with a ValueError",
        to=True,
    ),
    Rule(
        "packing_specs",
        OFFLINE_NEW,
        lambda r: r.is_new and r.is_offline and OFFLINE_NEW not in r.held,
        f"set where `{OFFLINE_FLAG}` is true",
        "offline packing is on and nothing says to what size; Megatron-Bridge stops with a ValueError",
        to=lambda r: {"packed_sequence_size": row_size(r), "pad_seq_to_mult": r.alignment},
        seen=f"{OFFLINE_NEW} is not given",
    ),
    Rule(
        "pack_size",
        SIZE,
        lambda r: r.specs in r.held and r.spec("packed_sequence_size") <= 0,
        "a size of 1 or more",
        lambda r: f"no pack has this size; {VALUE_ERROR if r.is_new else 'packing is off'}",
        lambda r: "stops" if r.is_new else "advice",
        to=row_size,
    ),
    Rule(
        "pad_seq_to_mult",
        MULTIPLE,
        lambda r: r.specs in r.held and r.spec("pad_seq_to_mult") < 1,
        "1 or more",
        "Megatron-Bridge stops with a ValueError as it makes the specs",
        to=lambda r: r.alignment,
    ),
    Rule(
        "max_single_sequence_length",
        "{r.specs}.max_single_sequence_length",
        _longest_is_out_of_range,
        lambda r: f"from 1 to packed_sequence_size = {r.spec('packed_sequence_size')}",
        "no document of that length fits a pack; Megatron-Bridge stops with a ValueError",
        to=lambda r: r.spec("packed_sequence_size"),
    ),
    Rule(
        "packing_ignored",
        _unread_specs,
        lambda r: r.is_pretraining and r.held & {OFFLINE_OLD, OFFLINE_NEW},
        "a data set of fine-tuning",
        "{r.classes[dataset][0]} joins documents to rows by itself, and reads no specs of packing",
        "advice",
        fix="leave the specs out, or use a data set of fine-tuning",
        seen=lambda r: f"{_unread_specs(r)} is set",
    ),
    # From 0.6 on text rows are packed within a micro-batch only where the loader yields micro-batches.
    Rule(
        "dataloader_type",
        LOADER,
        _yields_global_batches,
        '"single" or "cyclic" with in-batch packing of text',
        "this loader yields whole global batches, not micro-batches to pack; Megatron-Bridge stops with a ValueError",
        to="single",
        seen=lambda r: None if r.has(LOADER) else f"{LOADER} = batch, the default of this data set",
    ),
    no_name_is_mistyped,
)


# Batches: rows of a micro-batch, the global batch, and the processes that share it.


def _one_row(reading: Reading) -> dict[str, object]:
    """Return micro-batches of one row; with as many tokens per step and in each forward pass, where that can be."""
    micro, whole, size = reading[MICRO] or 1, reading[GLOBAL], reading.spec("packed_sequence_size")
    if reading.is_packed_here and whole and size > 0 and whole % micro == 0:
        return {MICRO: 1, GLOBAL: whole // micro, f"{reading.specs}.packed_sequence_size": size * micro}
    return {MICRO: 1}


def processes_divide(reading: Reading) -> Iterator[ConfigFinding]:
    """The number of processes is a multiple of TP·PP·CP."""
    group = reading.tp * reading.pp * reading.cp
    if reading.world_size is not None and reading.world_size % group:
        counts = sorted({*multiples(reading.world_size, group)})
        limit = f"a multiple of TP·PP·CP = {reading.tp}·{reading.pp}·{reading.cp} = {group}"
        what = "the processes can't be shared out; Megatron stops with an AssertionError"
        fix, seen = f"start {' or '.join(map(str, counts))} processes", f"{reading.world_size} processes"
        yield found(reading, "world_size", "world_size", limit, what, fix=fix, seen=seen)


def global_batch_divides(reading: Reading) -> Iterator[ConfigFinding]:
    """The global batch is a multiple of micro-batch size times data-parallel size."""
    whole, micro = reading[GLOBAL], reading[MICRO]
    if whole is not None and micro is not None and whole % (group := micro * (reading.dp or 1)):
        ranks = f" · data-parallel size = {micro}·{reading.dp} = {group}" if reading.dp else f" = {micro}"
        what = "the ranks can't take equally many micro-batches; Megatron stops with an AssertionError"
        changes, fix = {GLOBAL: multiples(whole, group)[0]}, nearest(whole, group)
        yield found(
            reading, "global_batch", GLOBAL, f"a multiple of {MICRO}{ranks}", what, changes=changes, fix=fix
        )


def evaluation_batch_divides(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on: the same in evaluation, whose context parallelism may be another."""
    whole = reading[EVAL_GLOBAL] or reading[GLOBAL]
    micro = reading[EVAL_MICRO] or reading[MICRO]
    cp = reading[EVAL_CP] or reading.cp
    group = reading.tp * reading.pp * cp
    if not reading.is_new or reading.dp is None or whole is None or micro is None:
        return
    if not (reading.has(EVAL_GLOBAL) or reading.has(EVAL_MICRO) or cp != reading.cp):
        return
    assert reading.world_size is not None
    share = micro * (reading.world_size // group)
    if reading.world_size % group:
        limit = f"{reading.world_size} processes are a multiple of TP·PP·CP of evaluation = {group}"
        what = "the processes can't be shared out in evaluation; Megatron-Bridge stops with an AssertionError"
        yield found(reading, "world_size", EVAL_CP, limit, what, changes={EVAL_CP: reading.cp})
    elif whole % share:
        limit = f"a multiple of the evaluation's micro-batch · data-parallel size = {share}"
        what = "the ranks can't take equally many micro-batches in evaluation; Megatron-Bridge stops"
        changes, fix = {EVAL_GLOBAL: multiples(whole, share)[0]}, nearest(whole, share)
        yield found(reading, "global_batch", EVAL_GLOBAL, limit, what, changes=changes, fix=fix)


BATCH_RULES = (
    # A micro-batch of offline packing is one row: its boundaries are those of one row.
    Rule(
        "micro_batch_packed",
        MICRO,
        lambda r: (r.is_offline or r["dataset.sft"]) and (r[MICRO] or 1) != 1,
        "1 with packed rows",
        "a packed row holds many documents and comes alone; Megatron stops, at the first step at the latest",
        changes=_one_row,
    ),
    # Packing within a micro-batch is the opposite of offline packing.
    Rule(
        "micro_batch_in_batch",
        MICRO,
        lambda r: r.is_in_batch and r[MICRO] == 1,
        "2 or more with in-batch packing",
        "there is one row only, and nothing to pack it with; Megatron-Bridge stops with a ValueError",
        to=2,
    ),
    Rule(
        "eval_micro_batch",
        EVAL_MICRO,
        lambda r: r.is_offline and (r[EVAL_MICRO] or 1) > 1 and r["dataset.do_validation"],
        "1 with packed rows",
        "evaluation passes boundaries of several rows to attention, which takes one row's; its first step stops",
        to=1,
    ),
    processes_divide,
    global_batch_divides,
    evaluation_batch_divides,
)


# Lengths: what rows, packs and documents must be multiples of, and which lengths must agree.


def _lengths_differ(reading: Reading) -> bool:
    is_checked = reading.is_of((*FINE_TUNING, *PRETRAINING)) or not reading.classes.get("dataset")
    lengths = reading[MODEL], reading[DATASET]
    return is_checked and None not in lengths and lengths[0] != lengths[1]


def packs_divide_among_ranks(reading: Reading) -> Iterator[ConfigFinding]:
    """A pack is a row: its size is a multiple of `lcm(2·CP, CP·TP)`."""
    setting = f"{reading.specs}.packed_sequence_size"
    size, multiple = reading[setting], reading.alignment
    if not reading.is_offline or size < 1 or size % multiple == 0:
        return
    words, above = nearest(size, multiple), multiples(size, multiple)[1]
    limit = f"a multiple of lcm(2·CP, CP·TP) = {multiple}"
    what = f"a full pack can't be cut for {reading.alignment_words}; its first step stops"
    changes = {setting: above} if reading.is_packed_here else {}
    fix = words if reading.is_packed_here else f"pack the data again, to {words or above} tokens"
    yield found(reading, "pack_size", setting, limit, what, changes=changes, fix=fix)


def documents_divide_among_ranks(reading: Reading) -> Iterator[ConfigFinding]:
    """Context parallelism cuts every document, so each must be padded to a multiple, which no release computes."""
    setting = f"{reading.specs}.pad_seq_to_mult"
    given, multiple = reading[setting], reading.alignment
    if not reading.is_offline or given < 1 or given % multiple == 0:
        return
    chunks = math.lcm(*(2 * size if size > 1 else 1 for size in (reading.cp, reading[EVAL_CP] or 1)))
    is_uneven = given % chunks != 0
    what = f"NVIDIA pads every document to the multiple of {reading.alignment_words}; other rows stop"
    if is_uneven:
        what = f"every document is cut into {chunks} chunks; Transformer Engine stops where they aren't equal"
    outcome: Outcome = "stops" if is_uneven else "advice"
    limit = f"a multiple of lcm(2·CP, CP·TP) = {multiple}"
    changes, fix = {setting: multiple}, None if reading.is_packed_here else "pack the data again with it"
    yield found(reading, "pad_seq_to_mult", setting, limit, what, outcome, changes, fix=fix)


def _longer_than_a_pack(reading: Reading) -> bool:
    size, longest = reading.spec("packed_sequence_size"), reading[DATASET]
    return reading.is_packed_here and size >= 1 and longest is not None and longest > size


LENGTH_RULES = (
    # With context parallelism a row is cut into 2·CP chunks, and each rank takes two.
    Rule(
        "seq_length",
        MODEL,
        lambda r: r.cp > 1 and r[MODEL] is not None and r[MODEL] % (2 * r.cp),
        lambda r: f"a multiple of 2 · context_parallel_size = {2 * r.cp}",
        "a row can't be cut into equal chunks, two for each rank; Megatron stops with an AssertionError",
        changes=lambda r: r.given(multiples(r[MODEL], 2 * r.cp)[1], MODEL, DATASET),
        fix=lambda r: nearest(r[MODEL], 2 * r.cp),
    ),
    # From 0.6 on what a collator pads rows to never exceeds `seq_length`, so that is a multiple too.
    Rule(
        "seq_length",
        DATASET,
        lambda r: (
            r.is_new
            and r[DATASET] is not None
            and r[DATASET] % r.alignment
            and (r.is_of(COLLATED) or (r.is_of(TEXT) and r.is_in_batch))
        ),
        "a multiple of lcm(2·CP, CP·TP) = {r.alignment}",
        "rows are cut for {r.alignment_words}; Megatron-Bridge stops with a ValueError",
        changes=lambda r: r.given(multiples(r[DATASET], r.alignment)[1], DATASET, MODEL),
        fix=lambda r: nearest(r[DATASET], r.alignment),
    ),
    Rule(
        "seq_lengths_differ",
        MODEL,
        _lengths_differ,
        lambda r: f"the same as {r.shown(DATASET)}",
        "model and data disagree about the length of a row; Megatron-Bridge stops with an AssertionError",
        to=lambda r: r[DATASET],
    ),
    packs_divide_among_ranks,
    documents_divide_among_ranks,
    # Documents are cut to the data set's sequence length, which should be no more than a pack.
    Rule(
        "pack_below_seq_length",
        SIZE,
        _longer_than_a_pack,
        lambda r: f"at least {r.shown(DATASET)}",
        "documents are cut at {r[dataset.seq_length]} tokens; one that is longer than a pack can't be packed",
        "advice",
        to=lambda r: multiples(r[DATASET], r.alignment)[1],
    ),
)

RULES: Rules = (*SWITCH_RULES, *BATCH_RULES, *LENGTH_RULES)
