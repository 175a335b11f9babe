"""Samples as Megatron-Core's online schedulers take them: one document each, padded for context parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varlen.arguments import as_count
from varlen.batch.packed import IGNORE_INDEX, PackedBatch, on_host
from varlen.errors import DocumentsError


def build_unpacked_sequence_sample(
    tokens: Sequence[int] | Tensor,
    labels: Sequence[int] | Tensor,
    loss_mask: Sequence[float] | Tensor,
    *,
    pad_to_multiple_of: int,
    pad_token_id: int,
    ignore_label_id: int | None = None,
) -> dict[str, Tensor]:
    """Build one sample for a scheduler, as the function of this name in Megatron-Bridge's main branch does.

    Args:
        tokens: `[length]` input tokens of one document.
        labels: `[length]`: the target of each.
        loss_mask: `[length]`: the weight of each target; fractions are kept.
        pad_to_multiple_of: the sample is padded to a multiple of this: the least common multiple of 2·CP and CP·TP.
        pad_token_id: token of the padding.
        ignore_label_id: label of the padding; None: `pad_token_id`, as there. Its loss mask is 0 in any case.

    Returns:
        `tokens`, `labels` and `position_ids`, int64 `[padded]`; `loss_mask`, float32 `[padded]`; `original_seq_len`
        and `padded_seq_len`, int32 `[1]`.

    Raises:
        DocumentsError: no tokens, or labels or a mask of another length.
        SettingError: a multiple below 1.

    >>> sample = build_unpacked_sequence_sample([5, 6, 7], [6, 7, 8], [0, 1, 1], pad_to_multiple_of=4, pad_token_id=9)
    >>> sample["tokens"].tolist(), sample["loss_mask"].tolist()
    ([5, 6, 7, 9], [0.0, 1.0, 1.0, 0.0])
    """
    multiple = as_count(pad_to_multiple_of, "pad_to_multiple_of")
    given = torch.as_tensor(tokens, dtype=torch.int64).reshape(-1)
    targets = torch.as_tensor(labels, dtype=torch.int64).reshape(-1)
    weights = torch.as_tensor(loss_mask, dtype=torch.float32).reshape(-1)
    length = given.numel()
    if length == 0:
        raise DocumentsError("an empty sequence makes no sample; leave documents without tokens out")
    if targets.numel() != length or weights.numel() != length:
        raise DocumentsError(
            f"tokens, labels and loss_mask must have the same length; got {length:,}, {targets.numel():,} and "
            f"{weights.numel():,}"
        )
    padding = -length % multiple
    label_pad = pad_token_id if ignore_label_id is None else ignore_label_id
    return {
        "tokens": torch.nn.functional.pad(given, (0, padding), value=pad_token_id),
        "labels": torch.nn.functional.pad(targets, (0, padding), value=label_pad),
        "loss_mask": torch.nn.functional.pad(weights, (0, padding)),
        "position_ids": torch.arange(length + padding, dtype=torch.int64),
        "original_seq_len": torch.tensor([length], dtype=torch.int32),
        "padded_seq_len": torch.tensor([length + padding], dtype=torch.int32),
    }


def fold_alignment_padding(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make a sample's padding part of it, in place, for attention kernels that take none between sequences.

    Padding stays masked in the loss and stands behind every real token, so causal models compute the same for those.

    Args:
        sample: as `build_unpacked_sequence_sample` returns it.
    """
    sample["original_seq_len"] = sample["padded_seq_len"].clone()
    return sample


def identity_collate(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return samples as a list, not stacked: a scheduler packs them itself.

    Args:
        samples: of one rank and step.
    """
    return list(samples)


def unpacked_samples(
    batch: PackedBatch,
    *,
    pad_to_multiple_of: int = 1,
    pad_token_id: int = 0,
    ignore_label_id: int | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Take a batch of varlen's apart again, for a scheduler that packs the whole step anew.

    Args:
        batch: with one sample of the result for each of its segments, in order. Its last token has no target.
        pad_to_multiple_of, pad_token_id: as in `build_unpacked_sequence_sample`.
        ignore_label_id: label of the padding and where there is no target; None: `pad_token_id`.

    Yields:
        Samples whose labels are shifted: the target of each token stands at its own position.

    Raises:
        SettingError: a multiple below 1.
    """
    ids = on_host(batch.input_ids).reshape(-1)
    targets = on_host(batch.labels).reshape(-1)
    segments = on_host(batch.segment_ids).reshape(-1)
    begins = on_host(batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded)[:-1]
    begins = begins[begins < ids.size]
    fill = pad_token_id if ignore_label_id is None else ignore_label_id
    lengths = on_host(batch.document_lengths).tolist()
    for start, length in zip(begins[segments[begins] >= 0].tolist(), lengths, strict=True):
        stop = start + length
        shifted = np.append(targets[start + 1 : stop], IGNORE_INDEX)
        has_target = shifted != IGNORE_INDEX
        yield build_unpacked_sequence_sample(
            torch.from_numpy(ids[start:stop].astype(np.int64)),
            torch.from_numpy(np.where(has_target, shifted, fill).astype(np.int64)),
            torch.from_numpy(has_target.astype(np.float32)),
            pad_to_multiple_of=pad_to_multiple_of,
            pad_token_id=pad_token_id,
            ignore_label_id=ignore_label_id,
        )
