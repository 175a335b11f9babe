"""Rules about what turns packing on: switches and specs that contradict each other or the release, sizes, names."""

from __future__ import annotations

from collections.abc import Iterator

from varlen.adapters.megatron.config.finding import found
from varlen.adapters.megatron.config.reading import Reading, multiples
from varlen.adapters.megatron.config.report import ConfigFinding
from varlen.adapters.megatron.config.settings import (
    IN_BATCH_NEW,
    IN_BATCH_OLD,
    OFFLINE_FLAG,
    OFFLINE_NEW,
    OFFLINE_OLD,
    SETTINGS,
)

USUAL_PACK = 4096
"""Tokens of a pack, offered where no length is given."""


def names_of_one_release(reading: Reading) -> Iterator[ConfigFinding]:
    """The names of one release only; another's are attributes that nobody reads."""
    is_new = reading.dialect == "0.6"
    other, own = (OFFLINE_OLD, OFFLINE_NEW) if is_new else (OFFLINE_NEW, OFFLINE_OLD)
    theirs, ours = ("0.5.1 and before", "0.6.0 on") if is_new else ("0.6.0 on", "0.5.1 and before")
    limit = f"only the names that releases {'from ' if is_new else ''}{ours} have"
    if other in reading.held:
        moved = {
            name: reading.values[f"{other}.{name}"]
            for name in (full.rpartition(".")[2] for full in SETTINGS if full.startswith(f"{own}."))
            if reading.says(f"{other}.{name}")
        }
        changes: dict[str, object] = {other: None}
        if own not in reading.held and moved.get("packed_sequence_size", 0) > 0:
            changes |= {own: moved} | ({OFFLINE_FLAG: True} if is_new else {})
        yield found(
            reading,
            "packing_names",
            other,
            limit=limit,
            what=f"`{other}` is of releases {theirs}: this one never reads it, and trains as if it weren't there",
            outcome="silently wrong",
            changes=changes,
            seen=f"{other} is set",
        )
    batch, own_batch = (IN_BATCH_OLD, IN_BATCH_NEW) if is_new else (IN_BATCH_NEW, IN_BATCH_OLD)
    if reading[batch]:
        yield found(
            reading,
            "packing_names",
            batch,
            limit=limit,
            what=f"`{batch}` is of releases {theirs}: this one never reads it, and trains unpacked rows",
            outcome="silently wrong",
            changes={batch: None, own_batch: True},
        )


def one_way_of_packing(reading: Reading) -> Iterator[ConfigFinding]:
    """Packing offline, within micro-batches or by Energon, not two of them."""
    ways = [reading.is_offline, reading.is_in_batch, reading.is_energon]
    if sum(ways) < 2:
        return
    is_stopped = reading.dialect == "0.6" and reading.is_offline and reading.is_in_batch
    what = (
        "Megatron-Bridge stops with a ValueError"
        if is_stopped
        else "they want opposite micro-batches: one row of one, several of the other"
    )
    changes = {reading.in_batch_name: False} if reading.is_in_batch else {"dataset.packing_buffer_size": None}
    yield found(
        reading,
        "packing_switches",
        reading.in_batch_name if reading.is_in_batch else "dataset.packing_buffer_size",
        limit="one way of packing",
        what=f"{reading.packing} are asked for together; {what}",
        outcome="stops",
        changes=changes,
    )


def flag_and_specs(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on: the flag of offline packing and its specs together, or neither."""
    if reading.dialect != "0.6" or not reading.is_offline:
        return
    if not reading[OFFLINE_FLAG]:
        yield found(
            reading,
            "packing_flag",
            OFFLINE_FLAG,
            limit=f"true where `{OFFLINE_NEW}` is set",
            what="specs of offline packing are set and its switch is off; Megatron-Bridge stops with a ValueError",
            outcome="stops",
            changes={OFFLINE_FLAG: True},
        )
    if OFFLINE_NEW not in reading.held:
        size = _row_size(reading)
        yield found(
            reading,
            "packing_specs",
            OFFLINE_NEW,
            limit=f"set where `{OFFLINE_FLAG}` is true",
            what="offline packing is on and nothing says to what size; Megatron-Bridge stops with a ValueError",
            outcome="stops",
            changes={OFFLINE_NEW: {"packed_sequence_size": size, "pad_seq_to_mult": reading.alignment}},
            seen=f"{OFFLINE_NEW} is not given",
        )


def _row_size(reading: Reading) -> int:
    """Return the length of a row, up to the multiple that it must have; 4,096 where nothing says."""
    length = reading["dataset.seq_length"] or reading["model.seq_length"] or USUAL_PACK
    return multiples(length, reading.alignment)[1]


def pack_size_is_positive(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on a pack size of 0 or less is refused; before, it turns packing off."""
    if reading.specs not in reading.held or reading.spec("packed_sequence_size") > 0:
        return
    setting = f"{reading.specs}.packed_sequence_size"
    is_new = reading.dialect == "0.6"
    yield found(
        reading,
        "pack_size",
        setting,
        limit="a size of 1 or more",
        what="no pack has this size; "
        + (
            "Megatron-Bridge stops with a ValueError"
            if is_new
            else "packing is off, though its specs are set"
        ),
        outcome="stops" if is_new else "advice",
        changes={setting: _row_size(reading)},
    )


def specs_are_in_range(reading: Reading) -> Iterator[ConfigFinding]:
    """`pad_seq_to_mult` of 1 or more; `max_single_sequence_length` between 1 and the pack size."""
    if reading.specs not in reading.held:
        return
    setting = f"{reading.specs}.pad_seq_to_mult"
    if reading[setting] < 1:
        yield found(
            reading,
            "pad_seq_to_mult",
            setting,
            limit="1 or more",
            what="Megatron-Bridge stops with a ValueError as it makes the specs",
            outcome="stops",
            changes={setting: reading.alignment},
        )
    setting = f"{reading.specs}.max_single_sequence_length"
    longest, size = reading[setting], reading.spec("packed_sequence_size")
    if longest is not None and size > 0 and not 1 <= longest <= size:
        yield found(
            reading,
            "max_single_sequence_length",
            setting,
            limit=f"from 1 to packed_sequence_size = {size}",
            what="no document of that length fits a pack; Megatron-Bridge stops with a ValueError",
            outcome="stops",
            changes={setting: size},
        )


def pretraining_packs_nothing(reading: Reading) -> Iterator[ConfigFinding]:
    """Data sets of pre-training read no specs of packing."""
    if reading.is_pretraining and reading.held & {OFFLINE_OLD, OFFLINE_NEW}:
        name = OFFLINE_OLD if OFFLINE_OLD in reading.held else OFFLINE_NEW
        yield found(
            reading,
            "packing_ignored",
            name,
            limit="a data set of fine-tuning",
            what=f"{reading.classes['dataset'][0]} joins documents to rows by itself, and reads no specs of packing",
            outcome="advice",
            fix="leave the specs out, or use a data set of fine-tuning",
            seen=f"{name} is set",
        )


def loader_yields_micro_batches(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on: text rows are packed within a micro-batch only where the loader yields micro-batches."""
    is_text = reading.is_of(("GPTSFTDatasetConfig", "FinetuningDatasetConfig"))
    kind = reading["dataset.dataloader_type"] or ("batch" if is_text else None)
    if reading.dialect == "0.6" and reading.is_in_batch and is_text and kind == "batch":
        given = reading.says("dataset.dataloader_type")
        yield found(
            reading,
            "dataloader_type",
            "dataset.dataloader_type",
            limit='"single" or "cyclic" with in-batch packing of text',
            what="this loader yields whole global batches, not micro-batches to pack; Megatron-Bridge stops with a "
            "ValueError",
            outcome="stops",
            changes={"dataset.dataloader_type": "single"},
            seen=None if given else "dataset.dataloader_type = batch, the default of this data set",
        )


def no_name_is_mistyped(reading: Reading) -> Iterator[ConfigFinding]:
    """A name that nobody reads, all but that of a setting: probably a slip of the pen."""
    for written, near in reading.mistyped:
        yield found(
            reading,
            "unknown_setting",
            written,
            limit="a name that Megatron reads",
            what=f"no rule knows `{written}`; was {near} meant? The release's default stands in its place",
            outcome="advice",
            fix=f"rename it to {near}, if that is meant",
            seen=f"{written} is set",
        )


RULES = (
    names_of_one_release,
    one_way_of_packing,
    flag_and_specs,
    pack_size_is_positive,
    specs_are_in_range,
    pretraining_packs_nothing,
    loader_yields_micro_batches,
    no_name_is_mistyped,
)
