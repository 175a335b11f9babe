"""Megatron-Bridge and Megatron-LM: their packed files, batches, settings and schedules, in each release's dialect.

Names are loaded when first used: files and settings need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varlen.adapters.megatron.dialects import Dialect
    from varlen.adapters.megatron.packing.alignment import alignment, stored_lengths
    from varlen.adapters.megatron.packing.averages import calculate_avg_seqlen, get_seqlen_list
    from varlen.adapters.megatron.packing.index import PackIndex, open_index
    from varlen.adapters.megatron.packing.offline import pack_for_megatron
    from varlen.adapters.megatron.packing.replay import replay_packs
    from varlen.adapters.megatron.packing.settings import MegatronPackSettings
    from varlen.adapters.megatron.packing.strategy import (
        ALGORITHMS,
        PACKING_ALGOS,
        create_hist,
        create_packing_strategy,
        fill_packing_strategy,
        find_first_bin_that_fits,
        first_fit,
        first_fit_decreasing,
        first_fit_shuffle,
    )
    from varlen.adapters.megatron.rows import PackedRows
    from varlen.adapters.megatron.specs import PackedSequenceSpecs

_HOMES = {
    "ALGORITHMS": "varlen.adapters.megatron.packing.strategy",
    "Dialect": "varlen.adapters.megatron.dialects",
    "MegatronPackSettings": "varlen.adapters.megatron.packing.settings",
    "PACKING_ALGOS": "varlen.adapters.megatron.packing.strategy",
    "PackIndex": "varlen.adapters.megatron.packing.index",
    "PackedRows": "varlen.adapters.megatron.rows",
    "PackedSequenceSpecs": "varlen.adapters.megatron.specs",
    "alignment": "varlen.adapters.megatron.packing.alignment",
    "calculate_avg_seqlen": "varlen.adapters.megatron.packing.averages",
    "create_hist": "varlen.adapters.megatron.packing.strategy",
    "create_packing_strategy": "varlen.adapters.megatron.packing.strategy",
    "fill_packing_strategy": "varlen.adapters.megatron.packing.strategy",
    "find_first_bin_that_fits": "varlen.adapters.megatron.packing.strategy",
    "first_fit": "varlen.adapters.megatron.packing.strategy",
    "first_fit_decreasing": "varlen.adapters.megatron.packing.strategy",
    "first_fit_shuffle": "varlen.adapters.megatron.packing.strategy",
    "get_seqlen_list": "varlen.adapters.megatron.packing.averages",
    "open_index": "varlen.adapters.megatron.packing.index",
    "pack_for_megatron": "varlen.adapters.megatron.packing.offline",
    "replay_packs": "varlen.adapters.megatron.packing.replay",
    "stored_lengths": "varlen.adapters.megatron.packing.alignment",
}

__all__ = [
    "ALGORITHMS",
    "PACKING_ALGOS",
    "Dialect",
    "MegatronPackSettings",
    "PackIndex",
    "PackedRows",
    "PackedSequenceSpecs",
    "alignment",
    "calculate_avg_seqlen",
    "create_hist",
    "create_packing_strategy",
    "fill_packing_strategy",
    "find_first_bin_that_fits",
    "first_fit",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "get_seqlen_list",
    "open_index",
    "pack_for_megatron",
    "replay_packs",
    "stored_lengths",
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
