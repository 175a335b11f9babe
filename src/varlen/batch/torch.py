"""A batch as torch tensors, and FlexAttention's view of its boundaries; torch is imported inside functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from varlen.batch.packed import PackedBatch
from varlen.errors import MissingExtraError, SettingError

if TYPE_CHECKING:
    import torch

_WIDE = ("input_ids", "labels", "position_ids", "shift_labels")
_NARROW = (
    "segment_ids",
    "cu_seqlens",
    "cu_seqlens_padded",
    "document_ids",
    "document_starts",
    "document_lengths",
    "document_targets",
    "document_groups",
    "pack_ids",
    "pack_offsets",
)


def import_torch() -> Any:
    """Return the torch module.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch is not installed; `pip install 'varlen[train]'` installs it") from None
    return torch


def to_torch(batch: PackedBatch, device: torch.device | str | None = None) -> PackedBatch:
    """Return the same batch as tensors: ids, labels and positions int64, boundaries int32.

    Args:
        batch: numpy or torch.
        device: where to; None for host memory. int32 tokens are moved first and widened there, at half the
            traffic. Tensors share memory with the numpy arrays where dtype and device allow.

    Raises:
        MissingExtraError: torch is not installed.
    """
    torch = import_torch()

    def tensor(array: Any, wide: bool) -> Any:
        if array is None:
            return None
        if isinstance(array, np.ndarray):
            array = torch.from_numpy(array if array.flags.writeable else array.copy())
        moved = array if device is None else array.to(device, non_blocking=True)
        return moved.long() if wide else moved

    fields = {name: tensor(getattr(batch, name), wide=True) for name in _WIDE}
    fields |= {name: tensor(getattr(batch, name), wide=False) for name in _NARROW}
    columns = {name: tensor(column, wide=False) for name, column in batch.columns.items()}
    return batch.replace(**fields, columns=columns)


def mask_function(batch: PackedBatch, sliding_window: int | None = None) -> Callable[..., Any]:
    """Return FlexAttention's `mask_mod(batch, head, query, key)`: the same segment, not later; padding to itself.

    Args:
        batch: numpy or torch; the function reads tensors on the batch's device.
        sliding_window: attend to the last this many positions only, the token itself included.

    Raises:
        MissingExtraError: torch is not installed.
        SettingError: a window below 1.
    """
    if sliding_window is not None and sliding_window < 1:
        raise SettingError(f"sliding_window must be at least 1, got {sliding_window}")
    torch = import_torch()
    owners = torch.as_tensor(batch.segment_ids)

    def mask_mod(row: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG001 - FlexAttention's signature
        same = (owners[row, query] == owners[row, key]) & (owners[row, query] >= 0) & (key <= query)
        if sliding_window is not None:
            same = same & (query - key < sliding_window)
        return same | (query == key)

    return mask_mod


def block_mask(batch: PackedBatch, sliding_window: int | None = None) -> Any:
    """Return FlexAttention's `BlockMask` for the batch, on its device; cost grows with the squared width.

    Raises:
        MissingExtraError: torch is not installed.
    """
    torch = import_torch()
    from torch.nn.attention.flex_attention import create_block_mask

    rows, width = batch.input_ids.shape
    device = batch.input_ids.device if isinstance(batch.input_ids, torch.Tensor) else "cpu"
    return create_block_mask(
        mask_function(batch, sliding_window), B=rows, H=None, Q_LEN=width, KV_LEN=width, device=device
    )
