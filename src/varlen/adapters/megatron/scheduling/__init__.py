"""Which samples of a global batch Megatron-Core packs together, and which data-parallel rank runs them when."""
