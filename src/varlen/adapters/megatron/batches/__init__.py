"""Batches as Megatron's releases spell them."""
