"""FlexAttention's masks of trees, made of intervals: which blocks see each other wholly, and which in part."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch.packed import check_window, import_torch
from varlen.types import IntArray

BLOCK = 128
"""Queries, and keys, of a block."""
_Blocks = npt.NDArray[np.bool_]


def tree_block_mask(
    subtree_end: Any, position_ids: Any, sliding_window: int | None = None, chunk: int | None = None
) -> Any:
    """Return FlexAttention's `BlockMask` of a batch of trees, on the device of its tensors.

    Args:
        subtree_end: int32 `[rows, width]`, a tensor, as `TreeBatch` has it.
        position_ids: int64 `[rows, width]`, a tensor.
        sliding_window: see only tokens of this many last positions.
        chunk: see only tokens of the same chunk of so many positions.

    Cost: linear in the tokens, and a comparison for each pair of blocks. No mask of tokens is formed.
    """
    torch = import_torch()
    from torch.nn.attention.flex_attention import BlockMask

    check_window(sliding_window)

    def sees(row: Any, _head: Any, query: Any, key: Any) -> Any:
        seen = (key <= query) & (query < subtree_end[row, key])
        if sliding_window is not None:
            seen = seen & (position_ids[row, query] - position_ids[row, key] < sliding_window)
        if chunk is not None:
            seen = seen & (position_ids[row, query] // chunk == position_ids[row, key] // chunk)
        return seen

    ends, positions = (x.cpu().numpy().astype(np.int64) for x in (subtree_end, position_ids))
    some, whole = _blocks_seen(ends, positions, sliding_window, chunk)

    def listed(seen: _Blocks) -> tuple[Any, Any]:
        counts = seen.sum(-1, dtype=np.int32)
        order = np.argsort(~seen, axis=-1, kind="stable").astype(np.int32)
        found = [torch.from_numpy(each)[:, None].to(subtree_end.device) for each in (counts, order)]
        return found[0], found[1]

    width = subtree_end.shape[1]
    return BlockMask.from_kv_blocks(*listed(some), *listed(whole), BLOCK, sees, (width, width))


def _blocks_seen(
    ends: IntArray, positions: IntArray, window: int | None, chunk: int | None
) -> tuple[_Blocks, _Blocks]:
    """Return which blocks of keys a block of queries sees in part, and which wholly; `[rows, blocks, blocks]`."""
    rows, width = ends.shape
    count = -(-width // BLOCK)
    blocks = np.arange(count)
    lasts = np.minimum((blocks + 1) * BLOCK, width) - 1

    def extremes(values: IntArray) -> tuple[IntArray, IntArray]:
        padded = np.pad(values, ((0, 0), (0, count * BLOCK - width)), mode="edge").reshape(rows, count, BLOCK)
        return padded.min(-1), padded.max(-1)

    least_end, most_end = extremes(ends)
    nearest, farthest = extremes(positions)
    earlier = blocks[None, :] < blocks[:, None]  # of keys than of queries
    any_seen = earlier[None] & (most_end[:, None, :] > (blocks * BLOCK)[None, :, None])
    all_seen = earlier[None] & (least_end[:, None, :] > lasts[None, :, None])
    if window is not None:
        any_seen &= nearest[:, :, None] - farthest[:, None, :] < window
        all_seen &= farthest[:, :, None] - nearest[:, None, :] < window
    if chunk is not None:
        low, high = nearest // chunk, farthest // chunk
        any_seen &= (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
        all_seen &= (low[:, :, None] == high[:, None, :]) & (high[:, :, None] == low[:, None, :])
    any_seen |= np.eye(count, dtype=np.bool_)[None]
    # A block that reaches beyond the width isn't whole: FlexAttention doesn't look at its tokens one by one then.
    all_seen &= (lasts - blocks * BLOCK == BLOCK - 1)[None, :, None]
    return any_seen & ~all_seen, all_seen
