"""An object of every class that is a drop-in, what makes drop-ins refuse, and names that are our own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

OURS = {
    *("axolotl.VarlenPlugin", "fast_axolotl.LeakWarning", "fast_axolotl.PackedColumns"),
    *("nemo_rl.BalancedPacker", "nemo_rl.BestFitDecreasingPacker", "verl.micro_batch_partitions"),
    *("megatron.rl.attention_work", "megatron.rl.bins_per_step", "megatron.rl.pack_values"),
    *(
        "megatron.rl.unpack_logprobs",
        "megatron.rl.unpack_sequences",
        "megatron.ConfigReport",
        "megatron.Dialect",
    ),
    *(
        "megatron.MegatronLoader",
        "megatron.MegatronPackSettings",
        "megatron.Microbatches",
        "megatron.PackCounts",
    ),
    *("megatron.PackIndex", "megatron.PackedIndexed", "megatron.PackedIndexedWriter", "megatron.PackedNpy"),
    *(
        "megatron.PackedParquet",
        "megatron.PackedParquetWriter",
        "megatron.PackedReader",
        "megatron.PackedRows",
    ),
    *("megatron.PackedWriter", "megatron.RowCollator", "megatron.alignment", "megatron.balance_microbatches"),
    *("megatron.check_config", "megatron.check_in_batch_packing", "megatron.collate_rows"),
    *("megatron.combined_metadata", "megatron.convert", "megatron.cp_slice", "megatron.create_packed"),
    *("megatron.external_loaders", "megatron.fold_alignment_padding", "megatron.last_checkpoint"),
    *(
        "megatron.loader_batch_size",
        "megatron.mask_dummies",
        "megatron.megatron_batch",
        "megatron.metadata_entry",
    ),
    *("megatron.metadata_path", "megatron.mtp_targets", "megatron.open_index", "megatron.open_packed"),
    *("megatron.pack_for_megatron", "megatron.packed_seq_params", "megatron.read_metadata"),
    *(
        "megatron.read_packed_npy",
        "megatron.replay_packs",
        "megatron.saved_state",
        "megatron.split_microbatches",
    ),
    *(
        "megatron.stage_batch",
        "megatron.stored_lengths",
        "megatron.unpacked_samples",
        "megatron.write_megatron",
    ),
    *("megatron.write_metadata", "megatron.write_packed_indexed_dataset", "hf.accepts", "hf.first_position"),
    *(
        "hf.has_experts",
        "hf.implementation",
        "hf.inputs_without_boundaries",
        "hf.logits_size",
        "hf.model_inputs",
    ),
    *("hf.model_type", "hf.mrope_positions", "hf.plain_inputs", "hf.register", "hf.text_config", "hf.unwrap"),
    *("hf.use_varlen_attention", "hf.vocabulary_size"),
    # Names of releases that are gone, or lists of names, whose values the tests of their rooms hold.
    *("megatron.PACKING_ALGORITHMS", "megatron.PACKING_ALGOS", "megatron.build_uniform_packed_seq_params"),
    *("megatron.build_unpacked_sequence_sample", "megatron.identity_collate"),
}
"""What stands for nothing at a peer, without `varlen.adapters.`."""


def row_file(folder: Path) -> str:
    """A packed Parquet file."""
    from varlen.adapters.megatron import PackedParquetWriter
    from varlen.adapters.megatron.dataset import rows_of_items

    path = folder / "rows.idx.parquet"
    items = [{"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 0], "seq_boundaries": [0, 3, 5]}] * 3
    with PackedParquetWriter(path) as writer:
        writer.write(rows_of_items(items))
    return str(path)


class Tokenizer:
    eos_id = 2


def made(ours: str, folder: Path) -> Any:
    """An object of a class that is a drop-in."""
    from varlen.adapters import axolotl, megatron, multipack, nemo_rl, torchtune
    from varlen.adapters.megatron import rl

    lengths = np.array([3, 2, 4])
    info = rl.PackingInfo([[0]], {0: [0, 2]}, [2], [0], "fifo")
    tensor = torch.zeros(1, 2, dtype=torch.int64)
    samples = [{"tokens": [1, 2], "labels": [1, 2]}]
    by_name: dict[str, Callable[[], Any]] = {
        "axolotl.MultipackBatchSampler": lambda: axolotl.MultipackBatchSampler(range(3), 1, 8, lengths, 9),
        "multipack.MultipackDistributedBatchSampler": lambda: multipack.MultipackDistributedBatchSampler(
            8, lengths, 1, 0
        ),
        "torchtune.PackedDataset": lambda: torchtune.PackedDataset(samples, max_seq_len=4),
        "nemo_rl.PackingAlgorithm": lambda: nemo_rl.PackingAlgorithm,
        "nemo_rl.PackingMetrics": nemo_rl.PackingMetrics,
        "nemo_rl.SequencePacker": lambda: nemo_rl.ConcatenativePacker(8),
        "megatron.rl.PackingInfo": lambda: info,
        "megatron.rl.SequencePacker": lambda: rl.SequencePacker(8, 0),
        "megatron.rl.PackingContext": lambda: rl.PackingContext(
            8, rl.SequencePacker(8, 0), info, tensor, tensor, tensor, tensor, tensor
        ),
        "megatron.PackedSeqParams": megatron.PackedSeqParams,
        "megatron.DpBalancedScheduler": lambda: megatron.DpBalancedScheduler(8, 1, 1, None),
        "megatron.PackedSequenceSpecs": megatron.PackedSequenceSpecs,
        "megatron.GPTSFTPackedDataset": lambda: megatron.GPTSFTPackedDataset(row_file(folder), Tokenizer()),
        "megatron.GPTSFTPackedParquetDataset": lambda: megatron.GPTSFTPackedParquetDataset(
            row_file(folder), Tokenizer()
        ),
    }
    name = ours.removeprefix("varlen.adapters.")
    return by_name[name]() if name in by_name else vars(nemo_rl)[name.removeprefix("nemo_rl.")](8)


def broken(ours: str, folder: Path) -> Callable[[], Any]:
    """What makes a drop-in refuse, by name."""
    from varlen.adapters import axolotl, fast_axolotl, megatron, multipack, trl, verl
    from varlen.adapters.megatron import rl

    info = rl.PackingInfo([[0, 1]], {0: [0]}, [2, 3], [0, 0], "fifo")
    by_name: dict[str, Callable[[], Any]] = {
        "axolotl.MultipackBatchSampler": lambda: axolotl.MultipackBatchSampler(range(3), 1, 0, [3], 9),
        "multipack.MultipackDistributedBatchSampler": lambda: multipack.MultipackDistributedBatchSampler(
            8, [[1]], 1, 0
        ),
        "verl.get_group_balanced_partitions": lambda: verl.get_group_balanced_partitions([1], [0, 1], 2),
        "verl.get_seqlen_balanced_partitions": lambda: verl.get_seqlen_balanced_partitions([1], 2, False),
        "verl.greedy_partition": lambda: verl.greedy_partition([1, 2, 3], 2, True),
        "verl.karmarkar_karp": lambda: verl.karmarkar_karp([1, 2, 3], 2, True),
        "megatron.rl.SequencePacker": lambda: rl.SequencePacker(8, 0, seq_length_multiple=3),
        "megatron.rl.create_packed_seq_params_for_bin": lambda: rl.create_packed_seq_params_for_bin(
            info, 0, 8, 4, torch.device("cpu")
        ),
        "megatron.DpBalancedScheduler": lambda: megatron.DpBalancedScheduler(
            8, 1, 4, None
        ).get_groups_and_subsamples([(0, 3)]),
        "megatron.PackedSequenceSpecs": lambda: megatron.PackedSequenceSpecs(
            8, packed_train_data_path=folder / "none.idx.parquet"
        ),
        "megatron.GPTSFTPackedDataset": lambda: megatron.GPTSFTPackedDataset(
            row_file(folder), Tokenizer(), virtual_tokens=3
        ),
        "megatron.GPTSFTPackedParquetDataset": lambda: megatron.GPTSFTPackedParquetDataset(
            row_file(folder), Tokenizer(), pad_cu_seqlens=True
        ),
        "fast_axolotl.streaming_dataset_reader": lambda: list(
            fast_axolotl.streaming_dataset_reader(folder / "none.jsonl", "jsonl")
        ),
        "trl.pack_dataset": lambda: trl.pack_dataset(_tiny_set(), 0),
    }
    return by_name[ours]


def _tiny_set() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": [[1, 2]]})
