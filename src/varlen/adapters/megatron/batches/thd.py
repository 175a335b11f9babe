"""Packed rows of one micro-batch back into rows of their own, for models that make position ids of a batch."""

from __future__ import annotations

from typing import Any

import torch

from varlen.adapters.megatron.batches.params import get_packed_seq_q_cu_seqlens
from varlen.errors import DocumentsError


def unpack_mcore_thd_tensor_for_position_ids(
    tensor: torch.Tensor, packed_seq_params: Any
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Return the documents of a packed row as rows of their own.

    Args:
        tensor: `[1, places]`.
        packed_seq_params: `PackedSeqParams`, this adapter's or Megatron-Core's.

    Returns:
        The documents, `[documents, longest]`, 0 behind each, those without a token left out; bool of the same shape,
        True at tokens; where each began in the packed row; and how long each is.

    Raises:
        DocumentsError: another shape, boundaries that don't fit it, or none that holds a token.
    """
    if tensor.dim() != 2 or tensor.size(0) != 1:
        raise DocumentsError(f"a packed row must have the shape [1, places], got {tuple(tensor.shape)}")
    logical, physical = get_packed_seq_q_cu_seqlens(packed_seq_params)
    for name, bounds in (("cu_seqlens_q", logical), ("cu_seqlens_q_padded", physical)):
        if bounds.dim() != 1 or bounds.numel() < 2 or bounds.shape != logical.shape:
            raise DocumentsError(
                f"{name} must have one dimension, at least two entries and as many as cu_seqlens_q; got "
                f"{tuple(bounds.shape)}"
            )
    sizes, begins = (logical[1:] - logical[:-1]).tolist(), physical[:-1].tolist()
    # Segments without a token (padding, or entries that make up the number) have no row.
    begins = [begin for begin, size in zip(begins, sizes) if size]
    sizes = [size for size in sizes if size]
    if not sizes or min(sizes) < 0:
        raise DocumentsError(
            f"cu_seqlens_q must rise and hold at least one token, got {logical.tolist()[:8]}"
        )
    outside = [
        n for n, (begin, size) in enumerate(zip(begins, sizes)) if begin < 0 or begin + size > tensor.size(1)
    ]
    if outside:
        first = outside[0]
        raise DocumentsError(
            f"segment {first:,} spans [{begins[first]:,}, {begins[first] + sizes[first]:,}) but the packed row has "
            f"{tensor.size(1):,} places"
        )
    lengths = torch.tensor(sizes, device=tensor.device)
    within = torch.arange(max(sizes), device=tensor.device)
    is_token = within < lengths[:, None]
    rows = tensor.new_zeros(is_token.shape)
    places = torch.tensor(begins, device=tensor.device)[:, None] + within
    rows[is_token] = tensor[0, places[is_token]]
    return rows, is_token, begins, sizes


def repack_mcore_thd_position_ids(
    position_ids: torch.Tensor, *, padded_starts: list[int], lengths: list[int], total_length: int
) -> torch.Tensor:
    """Return positions of rows of their own where these stand in the packed row.

    Args:
        position_ids: `[axes, documents, longest]`.
        padded_starts: where each document begins in the packed row.
        lengths: tokens of each document.
        total_length: places of the packed row.

    Returns:
        `[axes, 1, total_length]`; 0 at padding.

    Raises:
        DocumentsError: another shape, other numbers of documents, or a document outside the row.
    """
    if position_ids.dim() != 3 or not position_ids.size(1) == len(lengths) == len(padded_starts):
        raise DocumentsError(
            f"position_ids must have the shape [axes, documents, longest], got {tuple(position_ids.shape)} for "
            f"{len(lengths):,} lengths and {len(padded_starts):,} starts"
        )
    sizes, begins = torch.tensor(lengths, dtype=torch.int64), torch.tensor(padded_starts, dtype=torch.int64)
    if len(lengths) and (
        int((begins + sizes).max()) > total_length or int(sizes.max()) > position_ids.size(2)
    ):
        raise DocumentsError(
            f"documents reach {int((begins + sizes).max()):,} and are up to {int(sizes.max()):,} long, but the "
            f"packed row has {total_length:,} places and rows of positions {position_ids.size(2):,}"
        )
    device = position_ids.device
    within = torch.arange(position_ids.size(2), device=device)
    is_token = within < sizes.to(device)[:, None]
    packed = position_ids.new_zeros((position_ids.size(0), 1, total_length))
    packed[:, 0, (begins.to(device)[:, None] + within)[is_token]] = position_ids[:, is_token]
    return packed
