"""What verl's `verl.utils.seqlen_balancing` offers, with its names, arguments and outputs."""

from varlen.adapters.verl.partitions import (
    calculate_workload,
    get_group_balanced_partitions,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
    log_seqlen_unbalance,
    micro_batch_partitions,
)

__all__ = [
    "calculate_workload",
    "get_group_balanced_partitions",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "micro_batch_partitions",
]
