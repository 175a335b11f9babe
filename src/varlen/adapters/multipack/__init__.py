"""imoneoi/multipack_sampler: its distributed batch sampler, exact."""

from varlen.errors import MissingExtraError

try:
    from varlen.adapters.multipack.sampler import MultipackDistributedBatchSampler
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError("torch is not installed; `pip install 'varlen[train]'` installs it") from None

__all__ = ["MultipackDistributedBatchSampler"]
