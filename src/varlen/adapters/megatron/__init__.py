"""Megatron-Bridge and Megatron-LM: their packed files, batches, settings and schedules, in each release's dialect.

Names are loaded when first used: files and settings need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varlen.adapters.megatron.dialects import Dialect
    from varlen.adapters.megatron.loader import MegatronLoader, saved_state
    from varlen.adapters.megatron.providers import external_loaders, loader_batch_size
    from varlen.adapters.megatron.rows import PackedRows

_HOMES = {
    "Dialect": "varlen.adapters.megatron.dialects",
    "MegatronLoader": "varlen.adapters.megatron.loader",
    "PackedRows": "varlen.adapters.megatron.rows",
    "external_loaders": "varlen.adapters.megatron.providers",
    "loader_batch_size": "varlen.adapters.megatron.providers",
    "saved_state": "varlen.adapters.megatron.loader",
}

__all__ = [
    "Dialect",
    "MegatronLoader",
    "PackedRows",
    "external_loaders",
    "loader_batch_size",
    "saved_state",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use and keep it."""
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    import importlib

    from varlen.errors import MissingExtraError

    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch is not installed; `pip install 'varlen[train]'` installs it") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, whether loaded or not."""
    return sorted(__all__)
