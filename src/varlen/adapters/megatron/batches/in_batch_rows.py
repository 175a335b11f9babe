"""The rows that in-batch packing takes: their lengths, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from varlen.arguments import as_count
from varlen.errors import DocumentsError, SettingError

Lengths = list[int]
"""Tokens of each row."""


def check_shapes(tokens: torch.Tensor, name: str, others: Mapping[str, torch.Tensor | None]) -> None:
    """Require rows of tokens, and that what goes with them has their shape."""
    if tokens.dim() != 2:
        raise DocumentsError(f"{name} must be rows of equal width, but their shape is {tuple(tokens.shape)}")
    for key, values in others.items():
        if values is not None and values.shape != tokens.shape:
            raise DocumentsError(
                f"{key} has the shape {tuple(values.shape)}, but {name} {tuple(tokens.shape)}; they must be the same"
            )


def lengths_of(tokens: torch.Tensor, pad: int, mask: torch.Tensor | None, *, only_right: bool) -> Lengths:
    """Return the tokens of each row: as its mask says, or up to its last token other than padding."""
    real = tokens != pad if mask is None else mask.to(device=tokens.device, dtype=torch.bool)
    steps = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    last = (real * steps).amax(dim=1) if real.numel() else real.sum(dim=1)
    if not only_right:
        lengths: Lengths = last.tolist()
        return lengths
    lengths, counts = torch.stack([last, real.sum(dim=1)]).tolist()
    wrong = [row for row, (length, count) in enumerate(zip(lengths, counts)) if length != count]
    if wrong:
        seen = "its mask" if mask is not None else f"it has no mask, and the padding token {pad}"
        raise DocumentsError(
            f"row {wrong[0]} of the batch is not right-padded: {seen} has padding before a real token ({len(wrong)} "
            f"of {len(lengths)} rows); pad on the right, and pass an attention_mask that is 1 at real tokens"
        )
    return lengths


def checked_width(multiple: int, width: int | None, is_fixed: bool) -> tuple[int, int | None]:
    """Return the multiple and the width, checked."""
    multiple = as_count(multiple, "pad_to_multiple_of")
    if width is not None:
        width = as_count(width, "packed_sequence_length")
    if is_fixed and width is None:
        raise SettingError(
            "padding to a fixed width needs packed_sequence_length (for pad_to_max_length: sequence_length)"
        )
    if is_fixed and width is not None and width % multiple:
        raise SettingError(
            f"packed_sequence_length {width:,} is not a multiple of pad_to_multiple_of {multiple:,}; the nearest: "
            f"{width // multiple * multiple or multiple:,}"
        )
    return multiple, width


def checked_rows(
    rows: Sequence[Mapping[str, Any]], token_key: str, names: Sequence[str], most: int | None
) -> Lengths:
    """Return the tokens of each row."""
    if not rows:
        raise DocumentsError("no rows were given; a micro-batch needs at least one")
    lengths = []
    for number, row in enumerate(rows):
        tokens = row.get(token_key)
        if not torch.is_tensor(tokens) or tokens.dim() != 1:
            raise DocumentsError(f"row {number}: {token_key} must be a tensor of one dimension")
        length = tokens.numel()
        if length == 0:
            raise DocumentsError(f"row {number} has no tokens; leave such samples out of the micro-batch")
        if most is not None and length > most:
            raise DocumentsError(
                f"row {number} has {length:,} tokens, over the sequence_length of {most:,}; cut it"
            )
        mask = row.get("attention_mask")
        given = {name: row.get(name) for name in ("position_ids", "attention_mask")}
        for name, values in (given | {name: row.get(name) for name in names}).items():
            if values is None and name not in names:
                continue
            if not torch.is_tensor(values) or values.shape != tokens.shape:
                seen = tuple(values.shape) if torch.is_tensor(values) else values
                raise DocumentsError(
                    f"row {number}: {name} must match its {length:,} tokens, as in all rows; got {seen}"
                )
        if mask is not None and not bool(mask.to(torch.bool).all()):
            raise DocumentsError(
                f"row {number} is padded: its attention_mask has zeros; pass its real tokens alone"
            )
        lengths.append(length)
    return lengths
