"""torchtitan: a loader behind its data protocol, whose packs are planned over all ranks."""

from varlen.adapters.torchtitan.batch import trainer_batch
from varlen.adapters.torchtitan.loader import PackedDataLoader
from varlen.adapters.torchtitan.rules import check_trainer

__all__ = ["PackedDataLoader", "check_trainer", "trainer_batch"]
