"""imoneoi/multipack_sampler: its distributed batch sampler, exact."""

from varlen.adapters.multipack.sampler import MultipackDistributedBatchSampler

__all__ = ["MultipackDistributedBatchSampler"]
