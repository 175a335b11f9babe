"""Megatron-Bridge and Megatron-LM: their packed files, batches, settings and schedules, in each release's dialect.

Names are loaded when first used: files and settings need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varlen.adapters.megatron.batches.collate import RowCollator, collate_rows
    from varlen.adapters.megatron.batches.context_parallel import (
        cp_slice,
        get_packed_seq_cp_partition_indices,
        split_microbatches,
    )
    from varlen.adapters.megatron.batches.from_batch import megatron_batch
    from varlen.adapters.megatron.batches.params import (
        PackedSeqParams,
        build_uniform_packed_seq_params,
        get_packed_seq_params,
        get_packed_seq_q_cu_seqlens,
        packed_seq_params,
    )
    from varlen.adapters.megatron.batches.stages import stage_batch
    from varlen.adapters.megatron.batches.targets import mtp_targets
    from varlen.adapters.megatron.batches.thd import (
        repack_mcore_thd_position_ids,
        unpack_mcore_thd_tensor_for_position_ids,
    )
    from varlen.adapters.megatron.dataset import GPTSFTPackedDataset, GPTSFTPackedParquetDataset
    from varlen.adapters.megatron.dialects import Dialect
    from varlen.adapters.megatron.files.indexed import (
        PackedIndexed,
        PackedIndexedWriter,
        write_packed_indexed_dataset,
    )
    from varlen.adapters.megatron.files.metadata import (
        PackCounts,
        combined_metadata,
        metadata_entry,
        metadata_path,
        read_metadata,
        write_metadata,
    )
    from varlen.adapters.megatron.files.npy import PackedNpy, read_packed_npy
    from varlen.adapters.megatron.files.opening import PackedWriter, convert, create_packed, open_packed
    from varlen.adapters.megatron.files.pairs import write_megatron
    from varlen.adapters.megatron.files.parquet import PackedParquet
    from varlen.adapters.megatron.files.parquet_writer import PackedParquetWriter, write_packed_parquet
    from varlen.adapters.megatron.files.paths import (
        is_packed_parquet_file,
        is_packed_parquet_spec,
        resolve_packed_parquet_paths,
    )
    from varlen.adapters.megatron.files.reader import PackedReader
    from varlen.adapters.megatron.rows import PackedRows

_HOMES = {
    "Dialect": "varlen.adapters.megatron.dialects",
    "GPTSFTPackedDataset": "varlen.adapters.megatron.dataset",
    "GPTSFTPackedParquetDataset": "varlen.adapters.megatron.dataset",
    "PackCounts": "varlen.adapters.megatron.files.metadata",
    "PackedIndexed": "varlen.adapters.megatron.files.indexed",
    "PackedIndexedWriter": "varlen.adapters.megatron.files.indexed",
    "PackedNpy": "varlen.adapters.megatron.files.npy",
    "PackedParquet": "varlen.adapters.megatron.files.parquet",
    "PackedParquetWriter": "varlen.adapters.megatron.files.parquet_writer",
    "PackedReader": "varlen.adapters.megatron.files.reader",
    "PackedRows": "varlen.adapters.megatron.rows",
    "PackedSeqParams": "varlen.adapters.megatron.batches.params",
    "PackedWriter": "varlen.adapters.megatron.files.opening",
    "RowCollator": "varlen.adapters.megatron.batches.collate",
    "build_uniform_packed_seq_params": "varlen.adapters.megatron.batches.params",
    "collate_rows": "varlen.adapters.megatron.batches.collate",
    "combined_metadata": "varlen.adapters.megatron.files.metadata",
    "convert": "varlen.adapters.megatron.files.opening",
    "cp_slice": "varlen.adapters.megatron.batches.context_parallel",
    "create_packed": "varlen.adapters.megatron.files.opening",
    "get_packed_seq_cp_partition_indices": "varlen.adapters.megatron.batches.context_parallel",
    "get_packed_seq_params": "varlen.adapters.megatron.batches.params",
    "get_packed_seq_q_cu_seqlens": "varlen.adapters.megatron.batches.params",
    "is_packed_parquet_file": "varlen.adapters.megatron.files.paths",
    "is_packed_parquet_spec": "varlen.adapters.megatron.files.paths",
    "megatron_batch": "varlen.adapters.megatron.batches.from_batch",
    "metadata_entry": "varlen.adapters.megatron.files.metadata",
    "metadata_path": "varlen.adapters.megatron.files.metadata",
    "mtp_targets": "varlen.adapters.megatron.batches.targets",
    "open_packed": "varlen.adapters.megatron.files.opening",
    "packed_seq_params": "varlen.adapters.megatron.batches.params",
    "read_metadata": "varlen.adapters.megatron.files.metadata",
    "read_packed_npy": "varlen.adapters.megatron.files.npy",
    "repack_mcore_thd_position_ids": "varlen.adapters.megatron.batches.thd",
    "resolve_packed_parquet_paths": "varlen.adapters.megatron.files.paths",
    "split_microbatches": "varlen.adapters.megatron.batches.context_parallel",
    "stage_batch": "varlen.adapters.megatron.batches.stages",
    "unpack_mcore_thd_tensor_for_position_ids": "varlen.adapters.megatron.batches.thd",
    "write_megatron": "varlen.adapters.megatron.files.pairs",
    "write_metadata": "varlen.adapters.megatron.files.metadata",
    "write_packed_indexed_dataset": "varlen.adapters.megatron.files.indexed",
    "write_packed_parquet": "varlen.adapters.megatron.files.parquet_writer",
}

__all__ = [
    "Dialect",
    "GPTSFTPackedDataset",
    "GPTSFTPackedParquetDataset",
    "PackCounts",
    "PackedIndexed",
    "PackedIndexedWriter",
    "PackedNpy",
    "PackedParquet",
    "PackedParquetWriter",
    "PackedReader",
    "PackedRows",
    "PackedSeqParams",
    "PackedWriter",
    "RowCollator",
    "build_uniform_packed_seq_params",
    "collate_rows",
    "combined_metadata",
    "convert",
    "cp_slice",
    "create_packed",
    "get_packed_seq_cp_partition_indices",
    "get_packed_seq_params",
    "get_packed_seq_q_cu_seqlens",
    "is_packed_parquet_file",
    "is_packed_parquet_spec",
    "megatron_batch",
    "metadata_entry",
    "metadata_path",
    "mtp_targets",
    "open_packed",
    "packed_seq_params",
    "read_metadata",
    "read_packed_npy",
    "repack_mcore_thd_position_ids",
    "resolve_packed_parquet_paths",
    "split_microbatches",
    "stage_batch",
    "unpack_mcore_thd_tensor_for_position_ids",
    "write_megatron",
    "write_metadata",
    "write_packed_indexed_dataset",
    "write_packed_parquet",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use and keep it."""
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    import importlib

    from varlen.errors import MissingExtraError

    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch is not installed; `pip install 'varlen[train]'` installs it") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, whether loaded or not."""
    return sorted(__all__)
