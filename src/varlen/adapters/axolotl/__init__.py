"""axolotl: a plugin that puts a PackedLoader under its trainer, and its multipack batch sampler, exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from varlen.adapters.axolotl.sampler import MultipackBatchSampler

if TYPE_CHECKING:
    from varlen.adapters.axolotl.plugin import VarlenPlugin

__all__ = ["MultipackBatchSampler", "VarlenPlugin"]


def __getattr__(name: str) -> Any:
    """Import the plugin when it is asked for, since the sampler needs no axolotl."""
    if name != "VarlenPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from varlen.adapters.axolotl.plugin import VarlenPlugin

    return VarlenPlugin
