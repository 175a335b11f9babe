"""What torchtune offers for packing, with its names, arguments and outputs."""

from varlen.adapters.torchtune.packed import PackedDataset

__all__ = ["PackedDataset"]
