"""torchtitan: a loader behind its data protocol, whose packs are planned over all ranks."""

from varlen.errors import MissingExtraError

try:
    from varlen.adapters.torchtitan.batch import trainer_batch
    from varlen.adapters.torchtitan.loader import PackedDataLoader
    from varlen.adapters.torchtitan.rules import check_trainer
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError("torch is not installed; `pip install 'varlen[train]'` installs it") from None

__all__ = ["PackedDataLoader", "check_trainer", "trainer_batch"]
