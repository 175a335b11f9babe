"""Lightning: a data module whose loader is neither sharded again nor ahead of what was trained."""

from varlen.errors import MissingExtraError

try:
    from varlen.adapters.lightning.data import PackedDataModule
except ModuleNotFoundError as error:
    if error.name not in ("torch", "lightning"):
        raise
    raise MissingExtraError(
        f"{error.name} is not installed; `pip install 'varlen[train]' lightning` installs it"
    ) from None

__all__ = ["PackedDataModule"]
