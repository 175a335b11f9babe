"""Megatron-Bridge and Megatron-LM: their packed files, batches, settings and schedules, in each release's dialect.

Names load when first used: files and settings need no torch. Settings begin in `config/check.py`, files in
`files/reader.py`, offline packing in `packing/offline.py`, the loader in `loader.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varlen.adapters.megatron.batches.boundaries import cp_slice as cp_slice
    from varlen.adapters.megatron.batches.boundaries import (
        get_packed_seq_cp_partition_indices as get_packed_seq_cp_partition_indices,
    )
    from varlen.adapters.megatron.batches.boundaries import mtp_targets as mtp_targets
    from varlen.adapters.megatron.batches.boundaries import split_microbatches as split_microbatches
    from varlen.adapters.megatron.batches.boundaries import stage_batch as stage_batch
    from varlen.adapters.megatron.batches.collate import RowCollator as RowCollator
    from varlen.adapters.megatron.batches.collate import collate_rows as collate_rows
    from varlen.adapters.megatron.batches.collate import megatron_batch as megatron_batch
    from varlen.adapters.megatron.batches.in_batch import (
        build_mcore_thd_sequence_batch_from_rows as build_mcore_thd_sequence_batch_from_rows,
    )
    from varlen.adapters.megatron.batches.in_batch import check_in_batch_packing as check_in_batch_packing
    from varlen.adapters.megatron.batches.in_batch import pack_batch_sequences as pack_batch_sequences
    from varlen.adapters.megatron.batches.in_batch import (
        pack_right_padded_sequence_batch_to_mcore_thd as pack_right_padded_sequence_batch_to_mcore_thd,
    )
    from varlen.adapters.megatron.batches.params import PackedSeqParams as PackedSeqParams
    from varlen.adapters.megatron.batches.params import (
        build_uniform_packed_seq_params as build_uniform_packed_seq_params,
    )
    from varlen.adapters.megatron.batches.params import get_packed_seq_params as get_packed_seq_params
    from varlen.adapters.megatron.batches.params import (
        get_packed_seq_q_cu_seqlens as get_packed_seq_q_cu_seqlens,
    )
    from varlen.adapters.megatron.batches.params import packed_seq_params as packed_seq_params
    from varlen.adapters.megatron.batches.params import (
        repack_mcore_thd_position_ids as repack_mcore_thd_position_ids,
    )
    from varlen.adapters.megatron.batches.params import (
        unpack_mcore_thd_tensor_for_position_ids as unpack_mcore_thd_tensor_for_position_ids,
    )
    from varlen.adapters.megatron.config.check import check_config as check_config
    from varlen.adapters.megatron.config.report import ConfigReport as ConfigReport
    from varlen.adapters.megatron.dataset import GPTSFTPackedDataset as GPTSFTPackedDataset
    from varlen.adapters.megatron.dataset import GPTSFTPackedParquetDataset as GPTSFTPackedParquetDataset
    from varlen.adapters.megatron.files.indexed import PackedIndexed as PackedIndexed
    from varlen.adapters.megatron.files.indexed import PackedIndexedWriter as PackedIndexedWriter
    from varlen.adapters.megatron.files.indexed import write_megatron as write_megatron
    from varlen.adapters.megatron.files.indexed import (
        write_packed_indexed_dataset as write_packed_indexed_dataset,
    )
    from varlen.adapters.megatron.files.metadata import PackCounts as PackCounts
    from varlen.adapters.megatron.files.metadata import combined_metadata as combined_metadata
    from varlen.adapters.megatron.files.metadata import metadata_entry as metadata_entry
    from varlen.adapters.megatron.files.metadata import metadata_path as metadata_path
    from varlen.adapters.megatron.files.metadata import read_metadata as read_metadata
    from varlen.adapters.megatron.files.metadata import write_metadata as write_metadata
    from varlen.adapters.megatron.files.npy import PackedNpy as PackedNpy
    from varlen.adapters.megatron.files.npy import read_packed_npy as read_packed_npy
    from varlen.adapters.megatron.files.opening import convert as convert
    from varlen.adapters.megatron.files.opening import create_packed as create_packed
    from varlen.adapters.megatron.files.opening import open_packed as open_packed
    from varlen.adapters.megatron.files.parquet import PackedParquet as PackedParquet
    from varlen.adapters.megatron.files.parquet import PackedParquetWriter as PackedParquetWriter
    from varlen.adapters.megatron.files.parquet import write_packed_parquet as write_packed_parquet
    from varlen.adapters.megatron.files.reader import PackedReader as PackedReader
    from varlen.adapters.megatron.files.reader import is_packed_parquet_file as is_packed_parquet_file
    from varlen.adapters.megatron.files.reader import is_packed_parquet_spec as is_packed_parquet_spec
    from varlen.adapters.megatron.files.reader import (
        resolve_packed_parquet_paths as resolve_packed_parquet_paths,
    )
    from varlen.adapters.megatron.files.writer import PackedWriter as PackedWriter
    from varlen.adapters.megatron.loader import MegatronLoader as MegatronLoader
    from varlen.adapters.megatron.loader import external_loaders as external_loaders
    from varlen.adapters.megatron.loader import last_checkpoint as last_checkpoint
    from varlen.adapters.megatron.loader import loader_batch_size as loader_batch_size
    from varlen.adapters.megatron.loader import saved_state as saved_state
    from varlen.adapters.megatron.packing.alignment import alignment as alignment
    from varlen.adapters.megatron.packing.alignment import calculate_avg_seqlen as calculate_avg_seqlen
    from varlen.adapters.megatron.packing.alignment import get_seqlen_list as get_seqlen_list
    from varlen.adapters.megatron.packing.alignment import stored_lengths as stored_lengths
    from varlen.adapters.megatron.packing.index import PackIndex as PackIndex
    from varlen.adapters.megatron.packing.index import open_index as open_index
    from varlen.adapters.megatron.packing.offline import MegatronPackSettings as MegatronPackSettings
    from varlen.adapters.megatron.packing.offline import pack_for_megatron as pack_for_megatron
    from varlen.adapters.megatron.packing.release_packs import PACKING_ALGORITHMS as PACKING_ALGORITHMS
    from varlen.adapters.megatron.packing.release_packs import PACKING_ALGOS as PACKING_ALGOS
    from varlen.adapters.megatron.packing.release_packs import create_hist as create_hist
    from varlen.adapters.megatron.packing.release_packs import (
        create_packing_strategy as create_packing_strategy,
    )
    from varlen.adapters.megatron.packing.release_packs import fill_packing_strategy as fill_packing_strategy
    from varlen.adapters.megatron.packing.release_packs import (
        find_first_bin_that_fits as find_first_bin_that_fits,
    )
    from varlen.adapters.megatron.packing.release_packs import first_fit as first_fit
    from varlen.adapters.megatron.packing.release_packs import first_fit_decreasing as first_fit_decreasing
    from varlen.adapters.megatron.packing.release_packs import first_fit_shuffle as first_fit_shuffle
    from varlen.adapters.megatron.packing.release_packs import replay_packs as replay_packs
    from varlen.adapters.megatron.rows import Dialect as Dialect
    from varlen.adapters.megatron.rows import PackedRows as PackedRows
    from varlen.adapters.megatron.samples import (
        build_unpacked_sequence_sample as build_unpacked_sequence_sample,
    )
    from varlen.adapters.megatron.samples import fold_alignment_padding as fold_alignment_padding
    from varlen.adapters.megatron.samples import identity_collate as identity_collate
    from varlen.adapters.megatron.samples import unpacked_samples as unpacked_samples
    from varlen.adapters.megatron.scheduler import DpBalancedScheduler as DpBalancedScheduler
    from varlen.adapters.megatron.scheduler import Microbatches as Microbatches
    from varlen.adapters.megatron.scheduler import balance_microbatches as balance_microbatches
    from varlen.adapters.megatron.scheduler import mask_dummies as mask_dummies
    from varlen.adapters.megatron.specs import PackedSequenceSpecs as PackedSequenceSpecs

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

__all__ = sorted(_HOMES)


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
