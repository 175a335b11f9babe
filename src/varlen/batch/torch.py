"""Arrays as torch tensors, and FlexAttention's view of boundaries; torch is imported inside functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from varlen.batch.masks import check_window
from varlen.errors import MissingExtraError

if TYPE_CHECKING:
    import torch


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


def as_tensor(array: Any, device: torch.device | str | None, *, widen: bool) -> Any:
    """Return an array as a tensor, None as None.

    Args:
        array: numpy or torch; host memory is shared where dtype and device allow.
        device: where to; None leaves it where it is.
        widen: to int64, after it has moved, so that int32 crosses at half the traffic.

    Raises:
        MissingExtraError: torch is not installed.
    """
    if array is None:
        return None
    if isinstance(array, np.ndarray):
        array = import_torch().from_numpy(array if array.flags.writeable else array.copy())
    moved = array if device is None else array.to(device, non_blocking=True)
    return moved.long() if widen else moved


def on_host(array: Any) -> npt.NDArray[Any]:
    """Return an array or a tensor as numpy, from wherever it lies."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def mask_function(segment_ids: Any, sliding_window: int | None = None) -> Callable[..., Any]:
    """Return FlexAttention's `mask_mod(row, head, query, key)`: the same segment, not later; padding to itself.

    Args:
        segment_ids: integers `[rows, width]`, numpy or torch, -1 at padding; the function reads a tensor on
            their device.
        sliding_window: attend to the last this many positions only, the token itself included.

    Raises:
        MissingExtraError: torch is not installed.
        SettingError: a window below 1.
    """
    check_window(sliding_window)
    owners = import_torch().as_tensor(segment_ids)

    def mask_mod(row: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG001 - FlexAttention's signature
        same = (owners[row, query] == owners[row, key]) & (owners[row, query] >= 0) & (key <= query)
        if sliding_window is not None:
            same = same & (query - key < sliding_window)
        return same | (query == key)

    return mask_mod


def block_mask(segment_ids: Any, sliding_window: int | None = None) -> Any:
    """Return FlexAttention's `BlockMask`, on the device of the ids; cost grows with the squared width.

    Args:
        segment_ids: integers `[rows, width]`, numpy or torch, -1 at padding.
        sliding_window: attend to the last this many positions only, the token itself included.

    Raises:
        MissingExtraError: torch is not installed.
        SettingError: a window below 1.
    """
    torch = import_torch()
    from torch.nn.attention.flex_attention import create_block_mask

    rows, width = segment_ids.shape
    device = segment_ids.device if isinstance(segment_ids, torch.Tensor) else "cpu"
    mask_mod = mask_function(segment_ids, sliding_window)
    return create_block_mask(mask_mod, B=rows, H=None, Q_LEN=width, KV_LEN=width, device=device)
