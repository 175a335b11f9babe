"""Megatron-Bridge and Megatron-LM: their packed files, batches, settings and schedules, in each release's dialect.

Names are loaded when first used: files and settings need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varlen.adapters.megatron.batches.in_batch import (
        build_mcore_thd_sequence_batch_from_rows,
        check_in_batch_packing,
        pack_batch_sequences,
        pack_right_padded_sequence_batch_to_mcore_thd,
    )
    from varlen.adapters.megatron.dialects import Dialect
    from varlen.adapters.megatron.rows import PackedRows
    from varlen.adapters.megatron.scheduling.balance import balance_microbatches
    from varlen.adapters.megatron.scheduling.microbatches import Microbatches
    from varlen.adapters.megatron.scheduling.samples import (
        build_unpacked_sequence_sample,
        fold_alignment_padding,
        identity_collate,
        unpacked_samples,
    )
    from varlen.adapters.megatron.scheduling.scheduler import DpBalancedScheduler, mask_dummies

_HOMES = {
    "Dialect": "varlen.adapters.megatron.dialects",
    "DpBalancedScheduler": "varlen.adapters.megatron.scheduling.scheduler",
    "Microbatches": "varlen.adapters.megatron.scheduling.microbatches",
    "PackedRows": "varlen.adapters.megatron.rows",
    "balance_microbatches": "varlen.adapters.megatron.scheduling.balance",
    "build_mcore_thd_sequence_batch_from_rows": "varlen.adapters.megatron.batches.in_batch",
    "build_unpacked_sequence_sample": "varlen.adapters.megatron.scheduling.samples",
    "check_in_batch_packing": "varlen.adapters.megatron.batches.in_batch",
    "fold_alignment_padding": "varlen.adapters.megatron.scheduling.samples",
    "identity_collate": "varlen.adapters.megatron.scheduling.samples",
    "mask_dummies": "varlen.adapters.megatron.scheduling.scheduler",
    "pack_batch_sequences": "varlen.adapters.megatron.batches.in_batch",
    "pack_right_padded_sequence_batch_to_mcore_thd": "varlen.adapters.megatron.batches.in_batch",
    "unpacked_samples": "varlen.adapters.megatron.scheduling.samples",
}

__all__ = [
    "Dialect",
    "DpBalancedScheduler",
    "Microbatches",
    "PackedRows",
    "balance_microbatches",
    "build_mcore_thd_sequence_batch_from_rows",
    "build_unpacked_sequence_sample",
    "check_in_batch_packing",
    "fold_alignment_padding",
    "identity_collate",
    "mask_dummies",
    "pack_batch_sequences",
    "pack_right_padded_sequence_batch_to_mcore_thd",
    "unpacked_samples",
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
