"""torchtitan: a loader behind its data protocol, whose packs are planned over all ranks."""

from varlen.adapters.torchtitan.loader import PackedDataLoader, check_trainer, trainer_batch

__all__ = ["PackedDataLoader", "check_trainer", "trainer_batch"]
