"""NEFTune's noise in packed rows, scaled by each document's own length.

NEFTune adds uniform noise of at most `alpha / sqrt(length * width)` to embedded tokens. transformers takes the length
of the row, so that in a row of many documents every one gets too little.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from varlen.batch.packed import PackedBatch
from varlen.errors import ModelError

_SHARES = "varlen_neftune_shares"


@contextlib.contextmanager
def noise_of_documents(trainer: Any, batch: PackedBatch) -> Iterator[None]:
    """Have a Trainer's NEFTune go by the documents of a batch, while the model is called with it."""
    embedding = _noisy(trainer)
    if embedding is None:
        yield
        return
    setattr(embedding, _SHARES, shares(batch))
    try:
        yield
    finally:
        delattr(embedding, _SHARES)


def shares(batch: PackedBatch) -> torch.Tensor:
    """Return float32 `[rows, width]`: one over the root of the length of each token's document, 0 at padding."""
    tensors = batch.to_torch()
    positions, segments = tensors.position_ids, tensors.segment_ids
    found = torch.zeros(segments.shape, dtype=torch.float32, device=segments.device)
    is_real = segments >= 0
    begins = (positions == 0) & is_real
    lengths = tensors.document_lengths.to(segments.device, torch.int64)
    numbers = begins.flatten().cumsum(0).view(segments.shape) - 1
    found[is_real] = lengths.to(torch.float32)[numbers[is_real]].rsqrt()
    return found


def _noisy(trainer: Any) -> Any:
    """Return the embedding that has transformers' hook, with ours in its place; None where there is no noise."""
    if getattr(trainer, "neftune_noise_alpha", None) is None:
        return None
    handle = getattr(trainer, "neftune_hook_handle", None)
    if handle is None:
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    embedding = next((each for each in model.modules() if hasattr(each, "neftune_noise_alpha")), None)
    if embedding is None:
        return None
    if not getattr(handle, "is_varlens", False):
        handle.remove()
        handle = embedding.register_forward_hook(_add_noise)
        handle.is_varlens = True
        trainer.neftune_hook_handle = handle
    return embedding


def _add_noise(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
    """Add noise to embedded tokens; with no batch told of, as transformers does."""
    if not module.training:
        return output
    told = getattr(module, _SHARES, None)
    if told is None:
        of_row = module.neftune_noise_alpha / (output.size(1) * output.size(2)) ** 0.5
        return output + torch.zeros_like(output).uniform_(-of_row, of_row)
    if told.shape != output.shape[:2]:
        raise ModelError(
            f"NEFTune's noise is for {tuple(told.shape)} tokens of a packed batch, and {tuple(output.shape[:2])} "
            "were embedded; leave neftune_noise_alpha out"
        )
    most: torch.Tensor = module.neftune_noise_alpha / output.size(2) ** 0.5 * told.to(output.device)
    noise = torch.zeros_like(output).uniform_(-1, 1) * most[..., None].to(output.dtype)
    noisy: torch.Tensor = output + noise
    return noisy
