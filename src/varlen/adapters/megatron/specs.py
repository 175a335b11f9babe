"""Megatron-Bridge's settings of offline packing, with the meaning that each dialect gives them."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from varlen.adapters.megatron.files.metadata import read_metadata
from varlen.adapters.megatron.files.reader import PAIR, is_packed_parquet_spec, resolve_packed
from varlen.adapters.megatron.packing.alignment import alignment, check_size
from varlen.adapters.megatron.packing.offline import MegatronPackSettings
from varlen.adapters.megatron.rows import NEWEST, as_dialect, is_before_parquet
from varlen.adapters.peers import raises_too
from varlen.errors import SettingError, SourceError
from varlen.files.written import read_manifest
from varlen.workers.processors import processors

_NUMBERS = {
    "packed_sequence_size": False,
    "num_tokenizer_workers": False,
    "max_single_sequence_length": True,
    "pad_seq_to_mult": True,
}
"""Fields that are whole numbers, and whether they may be None."""


@raises_too(FileNotFoundError, only=SourceError)
@dataclass
class PackedSequenceSpecs:
    """`PackedSequenceSpecs` of Megatron-Bridge: its names, defaults and rules, and checks for contradictions.

    Fields may be changed after construction, as in the release; `check` validates them again.

    >>> specs = PackedSequenceSpecs.for_parallel(4096, context_parallel_size=2)
    >>> specs.packed_sequence_size, specs.pad_seq_to_mult
    (4096, 4)
    """

    packed_sequence_size: int = -1
    """Positions of a row; 0 or less switches packing off. Not the same as `seq_length`, which cuts documents."""
    max_single_sequence_length: int | None = None
    """Maximum positions of a document; from 0.6 on."""
    tokenizer_model_name: str | None = None
    """Used only in the name of the release's cache."""
    num_tokenizer_workers: int = -1
    """Number of tokenizing processes; 0 or less means all processors before 0.6, and one since (see `workers`)."""
    packed_train_data_path: str | Path | None = None
    packed_val_data_path: str | Path | None = None
    """Existing packed files: Parquet (a file, glob or folder), `.npy`, which is deprecated, or after 0.6 a pair of
    `.sft.bin` and `.sft.idx`."""
    packed_metadata_path: str | Path | None = None
    """Metadata from which constant shapes are computed."""
    pad_cu_seqlens: bool = False
    """Pad boundaries to a constant number, as CUDA graphs need; requires `pad_to_max_length` and metadata."""
    pad_seq_to_mult: int | None = 1
    """Documents are padded to a multiple of it: `alignment` of the parallel sizes. None means 1."""
    _: KW_ONLY
    dialect: str = NEWEST
    """The release whose meaning the fields have: "0.4", "0.5", "0.6", or a release. Not a field of the release."""

    def __post_init__(self) -> None:
        self.dialect = as_dialect(self.dialect)
        self._check_numbers()
        for name in ("packed_train_data_path", "packed_val_data_path"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, self._found(name, str(value)))

    @classmethod
    def for_parallel(
        cls,
        packed_sequence_size: int,
        *,
        context_parallel_size: int = 1,
        tensor_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
        eval_context_parallel_size: int | None = None,
        **fields: Any,
    ) -> PackedSequenceSpecs:
        """Return specs whose documents are aligned to a job's parallel sizes; in the release, users compute this.

        Args:
            packed_sequence_size: positions of a row.
            context_parallel_size, tensor_model_parallel_size, sequence_parallel, eval_context_parallel_size: as in
                `alignment`.
            fields: other fields.

        Raises:
            SettingError: the pack size isn't a multiple; names the nearest multiples.
        """
        multiple = alignment(
            context_parallel_size, tensor_model_parallel_size, sequence_parallel, eval_context_parallel_size
        )
        specs = cls(packed_sequence_size, pad_seq_to_mult=multiple, **fields)
        return specs.check()

    @classmethod
    def from_packed(
        cls, folder: str | Path, *, split: str | None = None, **fields: Any
    ) -> PackedSequenceSpecs:
        """Return specs that read a set of `varlen pack --format megatron`.

        Args:
            folder: the folder of the packed set.
            split: "training" or "validation", for the path that names it; None: the split as which it was packed.
            fields: other fields.

        Raises:
            SourceError: the folder isn't such a set.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if manifest is None or manifest.get("kind") != "megatron":
            raise SourceError(f"{folder} is not a finished set of `varlen pack --format megatron`")
        is_validation = (manifest["settings"]["split"] if split is None else split) == "validation"
        name = "packed_val_data_path" if is_validation else "packed_train_data_path"
        found = {
            name: folder / manifest["data"],
            "packed_metadata_path": folder / manifest["metadata"],
            "pad_seq_to_mult": manifest["settings"]["multiple"],
            **fields,
        }
        return cls(manifest["settings"]["pack_size"], **found)

    @property
    def is_enabled(self) -> bool:
        """Whether packing is on."""
        return self.packed_sequence_size > 0

    @property
    def multiple(self) -> int:
        """Multiple to which documents are padded."""
        return 1 if self.pad_seq_to_mult is None else self.pad_seq_to_mult

    @property
    def workers(self) -> int:
        """Number of tokenizing processes, by this dialect's meaning of `num_tokenizer_workers`."""
        if self.num_tokenizer_workers > 0:
            return self.num_tokenizer_workers
        return 1 if self.dialect == "0.6" else processors()

    def check(self, *, pad_to_max_length: bool | None = None) -> PackedSequenceSpecs:
        """Return these specs if they are valid.

        Args:
            pad_to_max_length: this entry of the data set's `dataset_kwargs`; None if it isn't known yet.

        Raises:
            SettingError: names the field, and a valid value.
            SourceError: the metadata for `pad_cu_seqlens` is damaged, or has another pack size.
        """
        self._check_numbers()
        if self.is_enabled:
            check_size(self.packed_sequence_size, self.multiple, "packed_sequence_size")
        if not self.pad_cu_seqlens:
            return self
        if pad_to_max_length is False:
            raise SettingError(
                "pad_cu_seqlens=True makes the number of boundaries constant, which takes rows of constant width; "
                'set dataset_kwargs["pad_to_max_length"] = True'
            )
        paths = (self.packed_train_data_path, self.packed_val_data_path)
        if self.packed_metadata_path is None and any(path is not None for path in paths):
            raise SettingError(
                "pad_cu_seqlens=True reads how many documents a row has from metadata, and packed data of your own "
                f"has none at the release's own place: set packed_metadata_path to "
                f"{max(self.packed_sequence_size, 0)}_metadata.jsonl beside the data, which `varlen pack` writes"
            )
        if self.packed_metadata_path is not None:
            if not Path(self.packed_metadata_path).exists():
                raise SettingError(
                    f"packed_metadata_path names {self.packed_metadata_path}, which isn't there; "
                    "pad_cu_seqlens=True reads it"
                )
            size = self.packed_sequence_size if self.is_enabled else None
            read_metadata(self.packed_metadata_path, pack_size=size)
        return self

    def to_dialect(self, dialect: str) -> dict[str, Any]:
        """Return the keyword arguments that give another dialect's `PackedSequenceSpecs` the same meaning.

        Args:
            dialect: a dialect or a release; 0.3 has no `num_tokenizer_workers` and reads no Parquet.

        Raises:
            SettingError: a field is set that the dialect doesn't have or can't read.

        >>> PackedSequenceSpecs(4096).to_dialect("0.5")["num_tokenizer_workers"]
        1
        """
        other = as_dialect(dialect)
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        del arguments["dialect"]
        if other != "0.6":
            del arguments["max_single_sequence_length"]
        if other != "0.6" and self.max_single_sequence_length is not None:
            raise SettingError(
                f"max_single_sequence_length={self.max_single_sequence_length:,} is known from 0.6 on; for dialect "
                f"{other} set the data set's seq_length to it"
            )
        if (self.dialect == "0.6") != (other == "0.6") and self.num_tokenizer_workers < 1:
            arguments["num_tokenizer_workers"] = self.workers
        if is_before_parquet(dialect):
            del arguments["num_tokenizer_workers"]  # 0.3 has the dialect "0.4" otherwise
            for name in ("packed_train_data_path", "packed_val_data_path"):
                if arguments[name] is not None and not str(arguments[name]).endswith(".npy"):
                    raise SettingError(
                        f"{name} names {arguments[name]}, but {dialect} reads packed .npy files alone, which aren't "
                        "written here; train with 0.4 or later, or with varlen's GPTSFTPackedParquetDataset"
                    )
        return arguments

    def pack_settings(self, **more: Any) -> MegatronPackSettings:
        """Return the settings of `pack_for_megatron` for these specs.

        Args:
            more: further settings, such as `algorithm` or `overlong`.

        Raises:
            SettingError: packing is off, or the settings contradict each other.
        """
        if not self.is_enabled:
            raise SettingError(
                f"packed_sequence_size is {self.packed_sequence_size}, which switches packing off; set the positions "
                "of a row, such as 4096"
            )
        given = {
            "pack_size": self.packed_sequence_size,
            "multiple": self.multiple,
            "longest": self.max_single_sequence_length,
        }
        return MegatronPackSettings(**{**given, **more})

    def _check_numbers(self) -> None:
        """Refuse numbers that the release refuses, and contradictory ones."""
        for name, may_be_none in _NUMBERS.items():
            value = getattr(self, name)
            is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not is_whole and not (value is None and may_be_none):
                none = ", or None" if may_be_none else ""
                raise SettingError(f"{name} must be a whole number{none}; got {value!r}")
        if not isinstance(self.pad_cu_seqlens, bool):
            raise SettingError(f"pad_cu_seqlens must be True or False; got {self.pad_cu_seqlens!r}")
        size, multiple = self.packed_sequence_size, self.pad_seq_to_mult
        longest = self.max_single_sequence_length
        if multiple is not None and multiple <= 0:
            raise SettingError(f"pad_seq_to_mult must be a positive integer, or None for 1; got {multiple}")
        if size > 0 and self.multiple > size:
            raise SettingError(
                f"pad_seq_to_mult is {multiple:,}, more than packed_sequence_size, {size:,}: no document fits; "
                f"set packed_sequence_size to a multiple of {multiple:,}"
            )
        if longest is None:
            return
        if self.dialect != "0.6":
            raise SettingError(
                f"max_single_sequence_length is known from 0.6 on, not in dialect {self.dialect}; the data set's "
                "seq_length cuts documents there"
            )
        if longest <= 0:
            raise SettingError(
                f"max_single_sequence_length must be a positive integer, or None; got {longest}"
            )
        if 0 < size < longest:
            raise SettingError(
                f"max_single_sequence_length is {longest:,}, more than packed_sequence_size, {size:,}; a document "
                f"must fit in a row: set it to {size:,} at most"
            )

    def _found(self, name: str, path: str) -> str | Path:
        """Return a path in the release's type; refuses one that doesn't exist."""
        if path.lower().endswith(".npy"):
            if not Path(path).exists():
                raise SourceError(f"{name} names {path}, which isn't there")
            if self.dialect != "0.4":
                warnings.warn(
                    f"{name} names {path}: packed .npy files are deprecated, and read whole into memory; "
                    "varlen.adapters.megatron converts them to Parquet",
                    DeprecationWarning,
                    stacklevel=4,
                )
            return Path(path)
        is_pair = path.lower().endswith(PAIR) or any(
            Path(f"{path}{end}").exists() for end in (".idx", PAIR[1])
        )
        if not is_packed_parquet_spec(path) and not (is_pair and self.dialect == "0.6"):
            raise SettingError(
                f"{name} must name packed Parquet (a file, glob or folder; .parquet or .pq), a .npy file, or after "
                f"0.6 a pair of .sft.bin and .sft.idx; got {path}"
            )
        try:
            resolve_packed(path)
        except SourceError as error:
            raise SourceError(f"{name}: {error}") from error
        return path
