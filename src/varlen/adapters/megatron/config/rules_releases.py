"""Rules about releases: what one of them does wrong or otherwise with packed rows, and which one does it right."""

from __future__ import annotations

from collections.abc import Iterator

from varlen.adapters.megatron.config.finding import found
from varlen.adapters.megatron.config.reading import Reading
from varlen.adapters.megatron.config.report import ConfigFinding

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


RULES = (
    middle_stages_know_documents,
    boundaries_end_where_they_end,
    parquet_padding_is_known,
    seed_orders_packs,
    tokenizer_workers_are_said,
    overlong_samples_are_kept,
    ends_of_documents_are_trained,
)
