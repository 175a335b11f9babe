"""Lightning: a data module whose loader is neither sharded again nor ahead of what was trained."""

from varlen.adapters.lightning.data import PackedDataModule

__all__ = ["PackedDataModule"]
