"""What NeMo-RL's `nemo_rl.data.packing` offers, with its names, arguments and outputs."""

from varlen.adapters.nemo_rl.packers import (
    BalancedPacker,
    BestFitDecreasingPacker,
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    PackingMetrics,
    SequencePacker,
    get_packer,
)

__all__ = [
    "BalancedPacker",
    "BestFitDecreasingPacker",
    "ConcatenativePacker",
    "FirstFitDecreasingPacker",
    "FirstFitShufflePacker",
    "ModifiedFirstFitDecreasingPacker",
    "PackingAlgorithm",
    "PackingMetrics",
    "SequencePacker",
    "get_packer",
]
