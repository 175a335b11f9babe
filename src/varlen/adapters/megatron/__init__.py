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
    from varlen.adapters.megatron.files.opening import convert, create_packed, open_packed
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
    from varlen.adapters.megatron.files.writer import PackedWriter
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

_NAMES = {
    "batches.boundaries": "cp_slice get_packed_seq_cp_partition_indices mtp_targets split_microbatches stage_batch",
    "batches.collate": "RowCollator collate_rows megatron_batch",
    "batches.in_batch": "build_mcore_thd_sequence_batch_from_rows check_in_batch_packing pack_batch_sequences "
    "pack_right_padded_sequence_batch_to_mcore_thd",
    "batches.params": "PackedSeqParams build_uniform_packed_seq_params get_packed_seq_params "
    "get_packed_seq_q_cu_seqlens packed_seq_params repack_mcore_thd_position_ids "
    "unpack_mcore_thd_tensor_for_position_ids",
    "config.check": "check_config",
    "config.report": "ConfigReport",
    "dataset": "GPTSFTPackedDataset GPTSFTPackedParquetDataset",
    "files.indexed": "PackedIndexed PackedIndexedWriter write_megatron write_packed_indexed_dataset",
    "files.metadata": "PackCounts combined_metadata metadata_entry metadata_path read_metadata write_metadata",
    "files.npy": "PackedNpy read_packed_npy",
    "files.opening": "convert create_packed open_packed",
    "files.parquet": "PackedParquet PackedParquetWriter write_packed_parquet",
    "files.reader": "PackedReader is_packed_parquet_file is_packed_parquet_spec resolve_packed_parquet_paths",
    "files.writer": "PackedWriter",
    "loader": "MegatronLoader external_loaders last_checkpoint loader_batch_size saved_state",
    "packing.alignment": "alignment calculate_avg_seqlen get_seqlen_list stored_lengths",
    "packing.index": "PackIndex open_index",
    "packing.offline": "MegatronPackSettings pack_for_megatron",
    "packing.release_packs": "PACKING_ALGORITHMS PACKING_ALGOS create_hist create_packing_strategy "
    "fill_packing_strategy find_first_bin_that_fits first_fit first_fit_decreasing first_fit_shuffle replay_packs",
    "rows": "Dialect PackedRows",
    "samples": "build_unpacked_sequence_sample fold_alignment_padding identity_collate unpacked_samples",
    "scheduler": "DpBalancedScheduler Microbatches balance_microbatches mask_dummies",
    "specs": "PackedSequenceSpecs",
}
"""The public names of each module."""
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}

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
