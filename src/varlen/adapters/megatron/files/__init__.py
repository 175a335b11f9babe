"""Packed files of Megatron-Bridge: Parquet, `.npy`, `.sft.bin` and `.sft.idx`, and the metadata beside them."""
