"""Megatron-Bridge's data sets of packed rows, with their arguments and outputs, over any kind of packed file."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from varlen.adapters.megatron.batches.boundaries import MegatronBatch
from varlen.adapters.megatron.batches.collate import RowCollator
from varlen.adapters.megatron.files.metadata import read_metadata
from varlen.adapters.megatron.files.opening import open_packed
from varlen.adapters.megatron.files.reader import PackedReader, bounds_of
from varlen.adapters.megatron.rows import NEWEST, PackedRows, as_dialect
from varlen.adapters.peers import raises_too
from varlen.counts import many
from varlen.errors import DocumentsError, SettingError

# Packed rows one by one, as data sets give them and collate functions take them, and as flat arrays.

Item = dict[str, Any]
"""One packed row: `input_ids`, `seq_boundaries`, `loss_mask`, and what the file knows besides."""


def rows_of_items(batch: Sequence[Mapping[str, Any]]) -> PackedRows:
    """Return rows that came one by one as packed rows."""
    if not len(batch):
        raise DocumentsError("a batch needs at least one packed row, got none")
    ids, masks, bounds = zip(*[_parts(number, item) for number, item in enumerate(batch)])
    known, lengths = [item.get("seq_lengths") for item in batch], None
    if all(each is not None for each in known):
        lengths = _joined([_lengths(n, each, len(bounds[n]) - 1) for n, each in enumerate(known)])
    return PackedRows(
        input_ids=_joined(ids),
        loss_mask=_joined(masks),
        offsets=bounds_of(map(len, ids)),
        seq_start_id=_joined([ends[:-1] for ends in bounds]),
        document_offsets=bounds_of([len(ends) - 1 for ends in bounds]),
        seq_lengths=lengths,
    )


def _parts(number: int, item: Mapping[str, Any]) -> tuple[npt.NDArray[Any], ...]:
    """Return a row's tokens, its mask, and where its documents begin and the last one ends, from 0."""
    try:
        tokens, mask = np.asarray(item["input_ids"]), np.asarray(item["loss_mask"])
        ends = np.asarray(item["seq_boundaries"])
    except KeyError as error:
        raise DocumentsError(
            f"row {number:,} of the batch has no {error}; it needs input_ids, loss_mask and seq_boundaries"
        ) from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise DocumentsError(f"row {number:,} of the batch is no packed row of numbers: {error}") from None
    if tokens.ndim != 1 or mask.shape != tokens.shape:
        seen = f"{len(mask):,} values" if tokens.ndim == mask.ndim == 1 else f"the shape {mask.shape}"
        stored = f"{len(tokens):,}" if tokens.ndim == 1 else f"the shape {tokens.shape} in"
        raise DocumentsError(f"row {number:,} of the batch has {stored} input_ids, but {seen} of loss_mask")
    is_bounds = ends.ndim == 1 and len(ends) > 1 and ends.dtype.kind in "iu"
    begin, end = (int(ends[0]), int(ends[-1])) if is_bounds else (0, -1)
    if not 0 <= begin <= end <= len(tokens):
        raise DocumentsError(
            f"row {number:,} of the batch has {len(tokens):,} input_ids, but seq_boundaries "
            f"{ends.reshape(-1)[:8].tolist()}; they must be at least two whole numbers that rise within these"
        )
    if begin > 0:
        ends = ends - begin
    if end - begin < len(tokens):
        tokens, mask = tokens[begin:end], mask[begin:end]
    return tokens, mask, ends


def _lengths(number: int, lengths: Any, documents: int) -> npt.NDArray[np.int32]:
    found = np.asarray(lengths)
    if found.shape != (documents,) or found.dtype.kind not in "iu" or int(found.max()) >= 2**31:
        raise DocumentsError(
            f"row {number:,} of the batch has {many(documents, 'document')}, but seq_lengths {str(lengths)[:80]}; "
            "they must be whole numbers, one per document"
        )
    return found.astype(np.int32, copy=False)


def _joined(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def named_row(batch: Sequence[Mapping[str, Any]], index: int) -> str:
    """Return the name of a row for messages: as files number them, from 1, where it is known."""
    number = batch[index].get("row")
    return f"row {index:,} of the batch" if number is None else f"row {number + 1:,}"


def item_of(rows: PackedRows, index: int, number: int, is_padding: bool) -> Item:
    """Return one of some rows: views of their arrays."""
    here = slice(int(rows.offsets[index]), int(rows.offsets[index + 1]))
    documents = slice(int(rows.document_offsets[index]), int(rows.document_offsets[index + 1]))
    item: Item = {
        "input_ids": rows.input_ids[here],
        "seq_boundaries": [*rows.seq_start_id[documents].tolist(), here.stop - here.start],
        "loss_mask": rows.loss_mask[here],
        "row": number,
    }
    if rows.seq_lengths is not None:
        item["seq_lengths"] = rows.seq_lengths[documents]
    if is_padding:
        item["loss_mask"], item["is_padding"] = np.zeros_like(item["loss_mask"]), True
    return item


_SPECIAL_TOKENS = {
    "system_turn_start": "<extra_id_0>",
    "turn_start": "<extra_id_1>",
    "label_start": "<extra_id_2>",
    "end_of_turn": "\n",
    "end_of_name": "\n",
}
_OFF = ("add_bos", "add_sep", "hf_dataset", "global_sample_mapping", "is_test", "output_original_text")
_NONE = ("sep_id", "index_mapping_dir", "prompt_template", "memmap_workers", "special_tokens")
_UNUSED: dict[str, Any] = {
    **dict.fromkeys(_OFF, False),
    **dict.fromkeys((*_NONE, "prompt_completion_config")),
    "min_seq_length": 1,
    "add_eos": True,
    "label_key": "answer",
    "truncation_field": "text",
    "tokens_to_generate": 0,
    "truncation_method": "right",
    "get_attention_mask_from_fusion": True,
}
"""What the releases' class takes for data that is not packed, with its defaults: attributes that change nothing."""
_COLLATED = {field.name for field in fields(RowCollator)} - {"eos_id", "pad_id", "pad_seq_to_mult"}
"""Attributes that batches are made by, by the names of `RowCollator`."""


@raises_too(AssertionError)
class GPTSFTPackedDataset(Dataset[Item]):
    """Packed rows of a file, by number, and the batches that trainers read of them.

    What differs from the releases (`compatible=True` gives theirs), besides the batches, of which `RowCollator` says
    what differs:

    - An index below 0, with which samplers complete the last batch, never trains; up to 0.5.1 such a row trained
      where `max_num_samples` was set, and in all releases with `answer_only_loss=False`.
    - Rows come as arrays, and several at once for a `DataLoader`; numpy's global random numbers are left alone.
    - Files are read by row, of whatever kind they are: Parquet, `.npy`, or Megatron's `.bin` and `.idx`.

    Args:
        file_path: a file, glob or folder of packed rows.
        tokenizer: what has `eos_id` (or `eod`, or `eos_token_id`), the token of padding.
        pad_cu_seqlens: as `RowCollator` has it, and needs `pack_metadata_file_path`.
        pad_seq_to_mult: what documents were rounded up to when they were packed.
        pack_metadata_file_path: the metadata file beside the packs.
        max_seq_length: the pack size.
        max_num_samples: rows in all: passes over the file, each shuffled, as many as that takes. None: one, in order.
        seed: of the shuffles, which are those of the releases.
        virtual_tokens: must be 0: P-tuning isn't possible with packed rows.
        dialect: whose keys the batches have: `"0.4"`, `"0.5"` or `"0.6"`, or a release.
        pad_to_max_length, padding_mask and others: as `RowCollator` has them.
        others: arguments that the releases take for data that isn't packed; they change nothing.

    Arguments are attributes by the releases' names, and may be written: the next batch is made by what they then say.
    The order of the rows, `samples_mapping`, is that of `max_num_samples` and `seed` when this is made, as there.

    Raises:
        SettingError: settings that contradict each other, or unknown ones.
        SourceError: no file, a damaged one, or metadata that contradicts itself.
    """

    def __init__(
        self,
        file_path: str | Path,
        tokenizer: Any,
        return_cu_seqlen: bool = True,
        pad_cu_seqlens: bool = False,
        pad_seq_to_mult: int | None = 1,
        pack_metadata_file_path: str | Path | None = None,
        *,
        max_seq_length: int = 1024,
        pad_to_max_length: bool = False,
        pad_seq_length_to_mult: int = 16,
        max_num_samples: int | None = None,
        seed: int = 1234,
        answer_only_loss: bool = True,
        ceil_to_power_2: bool = False,
        virtual_tokens: int = 0,
        dialect: str = NEWEST,
        compatible: bool = False,
        eos_in_loss: bool | None = None,
        always_padded: bool | None = None,
        padding_mask: bool = False,
        **others: Any,
    ) -> None:
        unknown = sorted(set(others) - set(_UNUSED))
        if unknown:
            raise SettingError(
                f"{unknown[0]!r} is no argument of {type(self).__name__}, here or in Megatron-Bridge; take it out"
            )
        if virtual_tokens:
            raise SettingError(
                f"P-Tuning with packed sequence is not supported: virtual_tokens={virtual_tokens!r} must be 0"
            )
        self.file_path, self.tokenizer, self.seed = file_path, tokenizer, seed
        self.pack_metadata = None
        if pack_metadata_file_path is not None:
            size = max_seq_length if pad_cu_seqlens else None
            self.pack_metadata = read_metadata(pack_metadata_file_path, pack_size=size)
        self.dialect = as_dialect(dialect)
        self.max_seq_length = max_seq_length
        self.pad_to_max_length = pad_to_max_length
        self.pad_seq_length_to_mult = pad_seq_length_to_mult
        self.ceil_to_power_2 = ceil_to_power_2
        self._pad_seq_to_mult = pad_seq_to_mult  # the releases' name of it
        self.return_cu_seqlen = return_cu_seqlen
        self.pad_cu_seqlens = pad_cu_seqlens
        self.answer_only_loss = answer_only_loss
        self.eos_in_loss = eos_in_loss
        self.always_padded = always_padded
        self.padding_mask = padding_mask
        self.compatible = compatible
        self.virtual_tokens = virtual_tokens
        self.special_tokens: Any = None
        for name, usual in _UNUSED.items():
            setattr(self, name, others.get(name, usual))
        if self.special_tokens is None:
            self.special_tokens = dict(_SPECIAL_TOKENS)
        field = self.__dict__.pop("truncation_field")
        self.truncation_fields = [] if field is None else field.split(",")
        self._made: tuple[Any, RowCollator] | None = None
        assert self.collator  # raises for settings that contradict each other
        self.indexed_dataset: PackedReader = open_packed(file_path)
        self.max_num_samples = max_num_samples
        self.samples_mapping = _shuffled(self.indexed_dataset.num_rows, max_num_samples, seed)

    @property
    def collator(self) -> RowCollator:
        """What makes batches of rows, by the attributes as they are now.

        Raises:
            SettingError: they contradict each other.
        """
        settings = {name: getattr(self, name) for name in _COLLATED}
        settings["eos_id"] = _eos_id(self.tokenizer)
        settings["pad_seq_to_mult"] = 1 if self._pad_seq_to_mult is None else self._pad_seq_to_mult
        if self._made is None or self._made[0] != settings:
            self._made = settings, RowCollator(**settings)
        return self._made[1]

    def __len__(self) -> int:
        """Rows: those of the file, or `max_num_samples`."""
        return self.indexed_dataset.num_rows if self.samples_mapping is None else len(self.samples_mapping)

    def __getitem__(self, idx: int) -> Item:
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return several rows, read at once: what a `DataLoader` calls for a batch."""
        wanted = np.array([operator.index(index) for index in indices], dtype=np.int64)
        outside = (wanted < -len(self)) | (wanted >= len(self))
        if outside.any():
            raise IndexError(f"row {int(wanted[outside][0]):,} of {len(self):,} in {self.file_path}")
        is_padding = wanted < 0
        if self.samples_mapping is not None:
            wanted = self.samples_mapping[wanted]
            if self.compatible and as_dialect(self.dialect) != "0.6":
                is_padding = wanted < 0
        rows = self.indexed_dataset.rows(wanted)
        return [
            item_of(rows, index, number % self.indexed_dataset.num_rows, quiet)
            for index, (number, quiet) in enumerate(zip(wanted.tolist(), is_padding.tolist()))
        ]

    def collate_fn(self, batch: Sequence[Mapping[str, Any]]) -> MegatronBatch:
        """Return the batch of some rows; see `RowCollator`.

        Args:
            batch: rows as this data set gives them, or as the releases' do, with lists.

        Raises:
            DocumentsError: a row without tokens, mask or boundaries, or with boundaries that don't match.
            SettingError: a row that is longer than `max_seq_length`.
        """
        collator = self.collator
        silent = [bool(item.get("is_padding")) for item in batch]
        is_whole = collator.compatible or True not in silent
        try:
            return collator(rows_of_items(batch), None if is_whole else silent, partial(named_row, batch))
        except (DocumentsError, SettingError) as error:
            raise type(error)(f"{self.file_path}: {error}") from None

    def close(self) -> None:
        """Close the files; they are opened again by the next read."""
        self.indexed_dataset.close()

    @staticmethod
    def validate_row(
        idx: int, input_ids: Sequence[int], loss_mask: Sequence[int], seq_start_id: Sequence[int]
    ) -> None:
        """Check one row as it is stored. Rows that are read are checked anyway.

        Args:
            idx: its number, for messages.
            input_ids: stored tokens.
            loss_mask: one value each.
            seq_start_id: where documents begin.

        Raises:
            DocumentsError: what doesn't match.
        """
        where, size = f"Row {idx}", len(input_ids)
        starts = np.asarray(seq_start_id, dtype=np.int64).reshape(-1)
        if len(loss_mask) != size:
            raise DocumentsError(
                f"{where}: loss_mask length ({len(loss_mask):,}) != input_ids length ({size:,})"
            )
        if not len(starts) or starts[0] != 0:
            raise DocumentsError(f"{where}: seq_start_id must start with 0, got {starts[:5].tolist()}")
        beyond = np.flatnonzero(starts >= size)
        if len(beyond):
            first = int(beyond[0])
            raise DocumentsError(
                f"{where}: seq_start_id[{first}]={int(starts[first]):,} >= {size:,}, the number of input_ids"
            )
        falls = np.flatnonzero(np.diff(starts) < 1)
        if len(falls):
            first = int(falls[0]) + 1
            raise DocumentsError(
                f"{where}: seq_start_id is not non-decreasing and distinct at index {first}: "
                f"{int(starts[first - 1]):,}, then {int(starts[first]):,}; every document holds a token"
            )


class GPTSFTPackedParquetDataset(GPTSFTPackedDataset):
    """The same by the name that the releases have for Parquet files; see `GPTSFTPackedDataset`."""


def _shuffled(num_rows: int, most: int | None, seed: int) -> npt.NDArray[np.int64] | None:
    """Return which rows stand where: passes over all of them, each shuffled as the releases shuffle it."""
    if most is None:
        return None
    if isinstance(most, bool) or not isinstance(most, int | np.integer) or most < 1:
        raise SettingError(f"max_num_samples must be a whole number from 1 on, or None; got {most!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise SettingError(f"seed must be a whole number from 0 to 4,294,967,295, got {seed!r}")
    random = np.random.RandomState(seed)
    passes = []
    for _ in range(-(-int(most) // num_rows)):
        order = np.arange(num_rows)
        random.shuffle(order)
        passes.append(order)
    return np.concatenate(passes)[:most]


def _eos_id(tokenizer: Any) -> int:
    for name in ("eos_id", "eod", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return int(value)
    raise SettingError(
        f"the tokenizer ({type(tokenizer).__name__}) has no whole number eos_id, eod or eos_token_id, which pads rows"
    )
