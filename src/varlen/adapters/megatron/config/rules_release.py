"""Rules about releases: what one of them does wrong or otherwise with packed rows, and which one does it right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from varlen.adapters.megatron.config.reading import Reading, multiples
from varlen.adapters.megatron.config.report import ConfigFinding, found
from varlen.adapters.megatron.config.settings import (
    IN_BATCH_NEW,
    IN_BATCH_OLD,
    OFFLINE_FLAG,
    OFFLINE_NEW,
    OFFLINE_OLD,
    SETTINGS,
)

PIPELINE = "model.pipeline_model_parallel_size"


def middle_stages_know_documents(reading: Reading) -> Iterator[ConfigFinding]:
    """Before 0.5 middle pipeline stages get no boundaries: their layers attend across documents."""
    if reading.pp <= 2:
        return
    if reading["dataset.sft"] and reading.tp > 1:
        yield found(
            reading,
            "middle_stages",
            PIPELINE,
            limit="at most 2 with packed rows and tensor parallelism",
            what="Megatron-LM doesn't hand boundaries to all ranks of middle stages; their layers stop or attend "
            "across documents (issue 4092, open when this was written)",
            outcome="advice",
            changes={PIPELINE: 2},
        )
    if not reading.is_offline or not reading.is_before(0, 5):
        return
    is_certain = reading.is_certain or reading.release is not None
    yield found(
        reading,
        "middle_stages",
        PIPELINE,
        limit="at most 2 with packed rows, before release 0.5.0",
        what=("" if is_certain else "if the release is one before 0.5.0: ")
        + "the layers of middle stages get no boundaries and attend across documents; users saw 10 to 20 points less "
        "in benchmarks (issue 2952)",
        outcome="silently wrong" if is_certain else "advice",
        fix="use release 0.5.0 or later"
        + (
            ", or two stages and more tensor parallelism"
            if is_certain
            else '; if it is one, say so with dialect="0.5"'
        ),
    )


def boundaries_end_where_they_end(reading: Reading) -> Iterator[ConfigFinding]:
    """Before 0.5.1 the -1 that ends a row's boundaries is handed to the kernel that cuts rows among ranks."""
    if reading.is_offline and reading.cp > 1 and reading.is_before(0, 5, 1):
        yield found(
            reading,
            "boundary_terminators",
            "model.context_parallel_size",
            limit="1 with packed rows, or release 0.5.1 and later",
            what=f"{_perhaps(reading, '0.5.1')}the -1 behind a row's boundaries is taken for one of them as the row "
            "is cut among ranks; with rows from Parquet this was seen to fail (pull request 4489)",
            outcome="advice",
            fix="use release 0.5.1 or later",
        )


def parquet_padding_is_known(reading: Reading) -> Iterator[ConfigFinding]:
    """Before 0.5.1 `pad_seq_to_mult` doesn't reach the reader of Parquet rows."""
    path = str(reading.spec("packed_train_data_path") or "")
    is_parquet = not path.lower().endswith(".npy")
    if not reading.is_offline or reading.spec("pad_seq_to_mult") <= 1 or not is_parquet:
        return
    if reading.is_before(0, 5, 1) and not (reading.release and reading.is_before(0, 4)):
        yield found(
            reading,
            "parquet_padding",
            f"{reading.specs}.pad_seq_to_mult",
            limit="1 with rows from Parquet, or release 0.5.1 and later",
            what=f"{_perhaps(reading, '0.5.1')}the reader of Parquet rows isn't told of it, and hands documents' "
            "padding on as tokens, to attention and experts",
            outcome="advice",
            fix="use release 0.5.1 or later",
        )


def seed_orders_packs(reading: Reading) -> Iterator[ConfigFinding]:
    """Before 0.6 packs come out of NumPy's global generator, whatever the seed."""
    is_packed_here = reading.is_offline and not reading.says(f"{reading.specs}.packed_train_data_path")
    if is_packed_here and reading.dialect != "0.6" and reading.says("dataset.seed"):
        yield found(
            reading,
            "packing_seed",
            "dataset.seed",
            limit="of no effect on packs before release 0.6",
            what="packs are drawn from NumPy's global generator, so each preparation gives others",
            outcome="advice",
            fix="pack with `varlen pack --format megatron`, and name its file in packed_train_data_path",
        )


def tokenizer_workers_are_said(reading: Reading) -> Iterator[ConfigFinding]:
    """From 0.6 on the default of `num_tokenizer_workers` means one process, and not all cores."""
    setting = f"{reading.specs}.num_tokenizer_workers"
    is_packed_here = reading.is_offline and not reading.says(f"{reading.specs}.packed_train_data_path")
    if is_packed_here and reading.dialect == "0.6" and reading[setting] in (-1, 0):
        yield found(
            reading,
            "tokenizer_workers",
            setting,
            limit="2 or more, for more than one process",
            what="up to 0.5.1 this meant all cores; from 0.6 on it means one, on rank 0, while all others wait",
            outcome="advice",
            changes={setting: 8},
        )


def overlong_samples_are_kept(reading: Reading) -> Iterator[ConfigFinding]:
    """Chats aren't cut as they are tokenized: one too long ends the packing, or from 0.6 on is left out."""
    chats = reading["dataset.dataset_kwargs.chat"] or any(
        "Chat" in name for name in reading.classes.get("dataset.preprocessing", ())
    )
    is_packed_here = reading.is_offline and not reading.says(f"{reading.specs}.packed_train_data_path")
    if chats and is_packed_here:
        is_new = reading.dialect == "0.6"
        yield found(
            reading,
            "overlong_samples",
            f"{reading.specs}.packed_sequence_size",
            limit="the longest chat",
            what="a chat longer than that is left out, and one line of the log counts them"
            if is_new
            else "the first chat longer than that ends the packing with an IndexError",
            outcome="advice",
            fix="see `varlen inspect` for the lengths; `varlen pack --overlong split` keeps every token",
        )


def ends_of_documents_are_trained(reading: Reading) -> Iterator[ConfigFinding]:
    """Up to 0.6.0 an end-of-document token is taken for padding wherever it stands."""
    is_old = reading.is_before(0, 6) or reading.release in ((0, 6, 0), None)
    if not reading.is_offline or reading.spec("pad_seq_to_mult") <= 1 or not is_old:
        return
    yield found(
        reading,
        "eos_padding",
        f"{reading.specs}.pad_seq_to_mult",
        limit="1, or documents without end tokens within them, up to release 0.6.0",
        what="padding is told by its token, the end-of-document one: a real one counts as padding at a document's "
        "end, and within it (chats of several turns) takes the target behind it away",
        outcome="advice",
        fix="feed the rows with varlen, which stores lengths and infers none",
    )


def _perhaps(reading: Reading, release: str) -> str:
    """Return the words that a finding opens with where the release isn't known."""
    is_known = reading.release is not None or reading.dialect == "0.4"
    return "" if is_known else f"if the release is one before {release}: "


RELEASE_RULES = (
    middle_stages_know_documents,
    boundaries_end_where_they_end,
    parquet_padding_is_known,
    seed_orders_packs,
    tokenizer_workers_are_said,
    overlong_samples_are_kept,
    ends_of_documents_are_trained,
)


# Rules about what turns packing on: switches and specs that contradict each other or the release, sizes, names.

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


SWITCH_RULES = (
    names_of_one_release,
    one_way_of_packing,
    flag_and_specs,
    pack_size_is_positive,
    specs_are_in_range,
    pretraining_packs_nothing,
    loader_yields_micro_batches,
    no_name_is_mistyped,
)


# Rules about Energon's own packing (`packing_buffer_size`), which Megatron-Bridge allows with few things.

BUFFER = "dataset.packing_buffer_size"
OVERLAPS = tuple(
    f"{part}.{name}"
    for part in ("model", "comm_overlap")
    for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
)


def energon_packs_alone(reading: Reading) -> Iterator[ConfigFinding]:
    """One row a micro-batch, a loss per token, no graphs, no pipeline, no further targets."""
    if not reading.is_energon:
        return
    if reading[BUFFER] < 1:
        yield _finding(reading, BUFFER, "1 or more, or not given", 16)
    rules: list[tuple[str, bool, str, Any]] = [
        ("train.micro_batch_size", reading["train.micro_batch_size"] not in (None, 1), "1", 1),
        ("model.calculate_per_token_loss", not reading["model.calculate_per_token_loss"], "true", True),
        (
            "ddp.average_in_collective",
            reading["ddp.average_in_collective"] and not reading["model.calculate_per_token_loss"],
            "false",
            False,
        ),
        ("model.cuda_graph_impl", reading["model.cuda_graph_impl"] != "none", "none", "none"),
        ("model.vision_cuda_graph_impl", reading["model.vision_cuda_graph_impl"] != "none", "none", "none"),
        ("model.dist_train.use_dist_train", reading["model.dist_train.use_dist_train"], "false", False),
        ("model.pipeline_model_parallel_size", reading.pp > 1, "1", 1),
        ("model.mtp_num_layers", bool(reading["model.mtp_num_layers"]), "not given", None),
    ]
    for setting, is_wrong, limit, value in rules:
        if is_wrong:
            yield _finding(reading, setting, f"{limit} with Energon's packing", value)


def energon_agrees_with_training(reading: Reading) -> Iterator[ConfigFinding]:
    """Energon's own micro-batch size is that of training, and of evaluation."""
    own = reading["dataset.micro_batch_size"]
    if own is None or reading.dialect != "0.6":
        return
    for setting in ("train.micro_batch_size", "validation.eval_micro_batch_size"):
        is_evaluation = setting.startswith("validation")
        if is_evaluation and not reading["dataset.do_validation"]:
            continue
        if reading.says(setting) and reading[setting] != own:
            base = reading.micro_batch if is_evaluation else reading[setting]
            rows = 1 if reading.is_energon else base
            yield _finding(
                reading,
                setting,
                f"the same as {reading.shown('dataset.micro_batch_size')}",
                rows,
                {setting: rows, "dataset.micro_batch_size": rows},
            )


def overlap_is_turned_off(reading: Reading) -> Iterator[ConfigFinding]:
    """Overlap of the experts' communication is turned off, as its schedule drops images and boundaries."""
    if not reading.is_energon:
        return
    for setting in OVERLAPS:
        if reading[setting]:
            yield found(
                reading,
                "energon",
                setting,
                limit="false with Energon's packing",
                what="its schedule doesn't hand on images and boundaries; Megatron-Bridge turns it off and warns",
                outcome="advice",
                changes={setting: False},
            )


def _finding(
    reading: Reading, setting: str, limit: str, value: Any, changes: dict[str, Any] | None = None
) -> ConfigFinding:
    return found(
        reading,
        "energon",
        setting,
        limit=limit,
        what="Megatron-Bridge doesn't have Energon's packing with it, and stops with a ValueError"
        if reading.dialect == "0.6"
        else "releases from 0.6 on refuse it with Energon's packing; this one doesn't check it",
        outcome="stops" if reading.dialect == "0.6" else "advice",
        changes=changes or {setting: value},
    )


ENERGON_RULES = (energon_packs_alone, energon_agrees_with_training, overlap_is_turned_off)
