"""Megatron-Bridge and Megatron-LM: their packed files, batches, settings and schedules, in each release's dialect.

Names are loaded when first used: files and settings need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varlen.adapters.megatron.batches.boundaries import (
        cp_slice,
        get_packed_seq_cp_partition_indices,
        mtp_targets,
        split_microbatches,
        stage_batch,
    )
    from varlen.adapters.megatron.batches.collate import RowCollator, collate_rows, megatron_batch
    from varlen.adapters.megatron.batches.in_batch import (
        build_mcore_thd_sequence_batch_from_rows,
        check_in_batch_packing,
        pack_batch_sequences,
        pack_right_padded_sequence_batch_to_mcore_thd,
    )
    from varlen.adapters.megatron.batches.params import (
        PackedSeqParams,
        build_uniform_packed_seq_params,
        get_packed_seq_params,
        get_packed_seq_q_cu_seqlens,
        packed_seq_params,
        repack_mcore_thd_position_ids,
        unpack_mcore_thd_tensor_for_position_ids,
    )
    from varlen.adapters.megatron.config.check import check_config
    from varlen.adapters.megatron.config.report import ConfigReport
    from varlen.adapters.megatron.dataset import GPTSFTPackedDataset, GPTSFTPackedParquetDataset
    from varlen.adapters.megatron.files.indexed import (
        PackedIndexed,
        PackedIndexedWriter,
        write_megatron,
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
    from varlen.adapters.megatron.files.parquet import (
        PackedParquet,
        PackedParquetWriter,
        write_packed_parquet,
    )
    from varlen.adapters.megatron.files.reader import (
        PackedReader,
        is_packed_parquet_file,
        is_packed_parquet_spec,
        resolve_packed_parquet_paths,
    )
    from varlen.adapters.megatron.loader import (
        MegatronLoader,
        external_loaders,
        last_checkpoint,
        loader_batch_size,
        saved_state,
    )
    from varlen.adapters.megatron.packing.alignment import (
        alignment,
        calculate_avg_seqlen,
        get_seqlen_list,
        stored_lengths,
    )
    from varlen.adapters.megatron.packing.index import PackIndex, open_index
    from varlen.adapters.megatron.packing.offline import MegatronPackSettings, pack_for_megatron
    from varlen.adapters.megatron.packing.release_packs import (
        PACKING_ALGORITHMS,
        PACKING_ALGOS,
        create_hist,
        create_packing_strategy,
        fill_packing_strategy,
        find_first_bin_that_fits,
        first_fit,
        first_fit_decreasing,
        first_fit_shuffle,
        replay_packs,
    )
    from varlen.adapters.megatron.rows import Dialect, PackedRows
    from varlen.adapters.megatron.samples import (
        build_unpacked_sequence_sample,
        fold_alignment_padding,
        identity_collate,
        unpacked_samples,
    )
    from varlen.adapters.megatron.scheduler import (
        DpBalancedScheduler,
        Microbatches,
        balance_microbatches,
        mask_dummies,
    )
    from varlen.adapters.megatron.specs import PackedSequenceSpecs

_HOMES = {
    "ConfigReport": "varlen.adapters.megatron.config.report",
    "Dialect": "varlen.adapters.megatron.rows",
    "DpBalancedScheduler": "varlen.adapters.megatron.scheduler",
    "GPTSFTPackedDataset": "varlen.adapters.megatron.dataset",
    "GPTSFTPackedParquetDataset": "varlen.adapters.megatron.dataset",
    "MegatronLoader": "varlen.adapters.megatron.loader",
    "MegatronPackSettings": "varlen.adapters.megatron.packing.offline",
    "Microbatches": "varlen.adapters.megatron.scheduler",
    "PACKING_ALGORITHMS": "varlen.adapters.megatron.packing.release_packs",
    "PACKING_ALGOS": "varlen.adapters.megatron.packing.release_packs",
    "PackCounts": "varlen.adapters.megatron.files.metadata",
    "PackIndex": "varlen.adapters.megatron.packing.index",
    "PackedIndexed": "varlen.adapters.megatron.files.indexed",
    "PackedIndexedWriter": "varlen.adapters.megatron.files.indexed",
    "PackedNpy": "varlen.adapters.megatron.files.npy",
    "PackedParquet": "varlen.adapters.megatron.files.parquet",
    "PackedParquetWriter": "varlen.adapters.megatron.files.parquet",
    "PackedReader": "varlen.adapters.megatron.files.reader",
    "PackedRows": "varlen.adapters.megatron.rows",
    "PackedSeqParams": "varlen.adapters.megatron.batches.params",
    "PackedSequenceSpecs": "varlen.adapters.megatron.specs",
    "PackedWriter": "varlen.adapters.megatron.files.opening",
    "RowCollator": "varlen.adapters.megatron.batches.collate",
    "alignment": "varlen.adapters.megatron.packing.alignment",
    "balance_microbatches": "varlen.adapters.megatron.scheduler",
    "build_mcore_thd_sequence_batch_from_rows": "varlen.adapters.megatron.batches.in_batch",
    "build_uniform_packed_seq_params": "varlen.adapters.megatron.batches.params",
    "build_unpacked_sequence_sample": "varlen.adapters.megatron.samples",
    "calculate_avg_seqlen": "varlen.adapters.megatron.packing.alignment",
    "check_config": "varlen.adapters.megatron.config.check",
    "check_in_batch_packing": "varlen.adapters.megatron.batches.in_batch",
    "collate_rows": "varlen.adapters.megatron.batches.collate",
    "combined_metadata": "varlen.adapters.megatron.files.metadata",
    "convert": "varlen.adapters.megatron.files.opening",
    "cp_slice": "varlen.adapters.megatron.batches.boundaries",
    "create_hist": "varlen.adapters.megatron.packing.release_packs",
    "create_packed": "varlen.adapters.megatron.files.opening",
    "create_packing_strategy": "varlen.adapters.megatron.packing.release_packs",
    "external_loaders": "varlen.adapters.megatron.loader",
    "fill_packing_strategy": "varlen.adapters.megatron.packing.release_packs",
    "find_first_bin_that_fits": "varlen.adapters.megatron.packing.release_packs",
    "first_fit": "varlen.adapters.megatron.packing.release_packs",
    "first_fit_decreasing": "varlen.adapters.megatron.packing.release_packs",
    "first_fit_shuffle": "varlen.adapters.megatron.packing.release_packs",
    "fold_alignment_padding": "varlen.adapters.megatron.samples",
    "get_packed_seq_cp_partition_indices": "varlen.adapters.megatron.batches.boundaries",
    "get_packed_seq_params": "varlen.adapters.megatron.batches.params",
    "get_packed_seq_q_cu_seqlens": "varlen.adapters.megatron.batches.params",
    "get_seqlen_list": "varlen.adapters.megatron.packing.alignment",
    "identity_collate": "varlen.adapters.megatron.samples",
    "is_packed_parquet_file": "varlen.adapters.megatron.files.reader",
    "is_packed_parquet_spec": "varlen.adapters.megatron.files.reader",
    "last_checkpoint": "varlen.adapters.megatron.loader",
    "loader_batch_size": "varlen.adapters.megatron.loader",
    "mask_dummies": "varlen.adapters.megatron.scheduler",
    "megatron_batch": "varlen.adapters.megatron.batches.collate",
    "metadata_entry": "varlen.adapters.megatron.files.metadata",
    "metadata_path": "varlen.adapters.megatron.files.metadata",
    "mtp_targets": "varlen.adapters.megatron.batches.boundaries",
    "open_index": "varlen.adapters.megatron.packing.index",
    "open_packed": "varlen.adapters.megatron.files.opening",
    "pack_batch_sequences": "varlen.adapters.megatron.batches.in_batch",
    "pack_for_megatron": "varlen.adapters.megatron.packing.offline",
    "pack_right_padded_sequence_batch_to_mcore_thd": "varlen.adapters.megatron.batches.in_batch",
    "packed_seq_params": "varlen.adapters.megatron.batches.params",
    "read_metadata": "varlen.adapters.megatron.files.metadata",
    "read_packed_npy": "varlen.adapters.megatron.files.npy",
    "repack_mcore_thd_position_ids": "varlen.adapters.megatron.batches.params",
    "replay_packs": "varlen.adapters.megatron.packing.release_packs",
    "resolve_packed_parquet_paths": "varlen.adapters.megatron.files.reader",
    "saved_state": "varlen.adapters.megatron.loader",
    "split_microbatches": "varlen.adapters.megatron.batches.boundaries",
    "stage_batch": "varlen.adapters.megatron.batches.boundaries",
    "stored_lengths": "varlen.adapters.megatron.packing.alignment",
    "unpack_mcore_thd_tensor_for_position_ids": "varlen.adapters.megatron.batches.params",
    "unpacked_samples": "varlen.adapters.megatron.samples",
    "write_megatron": "varlen.adapters.megatron.files.indexed",
    "write_metadata": "varlen.adapters.megatron.files.metadata",
    "write_packed_indexed_dataset": "varlen.adapters.megatron.files.indexed",
    "write_packed_parquet": "varlen.adapters.megatron.files.parquet",
}

__all__ = [
    "PACKING_ALGORITHMS",
    "PACKING_ALGOS",
    "ConfigReport",
    "Dialect",
    "DpBalancedScheduler",
    "GPTSFTPackedDataset",
    "GPTSFTPackedParquetDataset",
    "MegatronLoader",
    "MegatronPackSettings",
    "Microbatches",
    "PackCounts",
    "PackIndex",
    "PackedIndexed",
    "PackedIndexedWriter",
    "PackedNpy",
    "PackedParquet",
    "PackedParquetWriter",
    "PackedReader",
    "PackedRows",
    "PackedSeqParams",
    "PackedSequenceSpecs",
    "PackedWriter",
    "RowCollator",
    "alignment",
    "balance_microbatches",
    "build_mcore_thd_sequence_batch_from_rows",
    "build_uniform_packed_seq_params",
    "build_unpacked_sequence_sample",
    "calculate_avg_seqlen",
    "check_config",
    "check_in_batch_packing",
    "collate_rows",
    "combined_metadata",
    "convert",
    "cp_slice",
    "create_hist",
    "create_packed",
    "create_packing_strategy",
    "external_loaders",
    "fill_packing_strategy",
    "find_first_bin_that_fits",
    "first_fit",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "fold_alignment_padding",
    "get_packed_seq_cp_partition_indices",
    "get_packed_seq_params",
    "get_packed_seq_q_cu_seqlens",
    "get_seqlen_list",
    "identity_collate",
    "is_packed_parquet_file",
    "is_packed_parquet_spec",
    "last_checkpoint",
    "loader_batch_size",
    "mask_dummies",
    "megatron_batch",
    "metadata_entry",
    "metadata_path",
    "mtp_targets",
    "open_index",
    "open_packed",
    "pack_batch_sequences",
    "pack_for_megatron",
    "pack_right_padded_sequence_batch_to_mcore_thd",
    "packed_seq_params",
    "read_metadata",
    "read_packed_npy",
    "repack_mcore_thd_position_ids",
    "replay_packs",
    "resolve_packed_parquet_paths",
    "saved_state",
    "split_microbatches",
    "stage_batch",
    "stored_lengths",
    "unpack_mcore_thd_tensor_for_position_ids",
    "unpacked_samples",
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

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, whether loaded or not."""
    return sorted(__all__)
