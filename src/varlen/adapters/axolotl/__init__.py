"""axolotl: its multipack batch sampler, exact."""

from varlen.errors import MissingExtraError

try:
    from varlen.adapters.axolotl.sampler import MultipackBatchSampler
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError("torch is not installed; `pip install 'varlen[train]'` installs it") from None

__all__ = ["MultipackBatchSampler"]
