"""Batches in the keys, shapes and dtypes that Megatron-Bridge's trainers read, in each release's dialect."""
