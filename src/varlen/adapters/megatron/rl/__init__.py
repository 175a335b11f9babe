"""Megatron-LM's packing of rollouts (`megatron.rl.sequence_packing_utils`), with its names and outputs."""

from varlen.adapters.megatron.rl.context import (
    PackingContext,
    bins_per_step,
    get_packing_actual_tokens,
    get_packing_avg_seq_length,
    get_packing_compute_tokens,
    get_packing_efficiency,
    load_packed_data_by_index,
    pack_inference_logprobs,
    pack_values,
    unpack_logprobs,
    unpack_sequences,
)
from varlen.adapters.megatron.rl.packer import (
    PackingInfo,
    SequencePacker,
    attention_work,
    get_actual_sequence_lengths,
)
from varlen.adapters.megatron.rl.params import (
    create_empty_bins,
    create_packed_seq_params,
    create_packed_seq_params_for_bin,
    distribute_packed_bins,
    get_default_packed_seq_params,
    pack_all_trajectories,
)

__all__ = [
    "PackingContext",
    "PackingInfo",
    "SequencePacker",
    "attention_work",
    "bins_per_step",
    "create_empty_bins",
    "create_packed_seq_params",
    "create_packed_seq_params_for_bin",
    "distribute_packed_bins",
    "get_actual_sequence_lengths",
    "get_default_packed_seq_params",
    "get_packing_actual_tokens",
    "get_packing_avg_seq_length",
    "get_packing_compute_tokens",
    "get_packing_efficiency",
    "load_packed_data_by_index",
    "pack_all_trajectories",
    "pack_inference_logprobs",
    "pack_values",
    "unpack_logprobs",
    "unpack_sequences",
]
