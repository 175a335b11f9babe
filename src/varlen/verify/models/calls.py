"""The ways in which packed batches are handed to transformers models today, each to be tried by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from varlen.adapters import hf
from varlen.batch.packed import PackedBatch
from varlen.verify.models.trial import Inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A way of calling a model on a packed batch."""

    name: str
    """The keyword arguments, in a few words."""
    users: str
    """Who calls so."""
    inputs: Inputs
    why: str = ""
    """Why documents see each other, where nothing in the arguments shows it."""


def _positions(batch: PackedBatch, model: Any, **more: Any) -> dict[str, Any]:
    """Return positions that restart at every document, and nothing else that tells documents apart."""
    tensors = batch.to_torch(hf.unwrap(model).device)
    positions = tensors.position_ids + hf.first_position(model)
    arguments = {"input_ids": tensors.input_ids, "position_ids": positions, "use_cache": False} | more
    return {name: value for name, value in arguments.items() if hf.accepts(model, name)}


def _mask_of_ones(batch: PackedBatch, model: Any) -> dict[str, Any]:
    arguments = _positions(batch, model)
    return arguments | {"attention_mask": torch.ones_like(arguments["input_ids"])}


def _mask_of_padding(batch: PackedBatch, model: Any) -> dict[str, Any]:
    arguments = _positions(batch, model)
    is_real = torch.as_tensor(batch.segment_ids >= 0).to(arguments["input_ids"])
    return arguments | {"attention_mask": is_real}


def _mask_of_numbers(batch: PackedBatch, model: Any) -> dict[str, Any]:
    arguments = _positions(batch, model)
    return arguments | {"attention_mask": torch.as_tensor(batch.segment_ids + 1).to(arguments["input_ids"])}


def _ends(batch: PackedBatch) -> torch.Tensor:
    """Return the ends of slots in the flattened rows, which are rounded up where documents' are."""
    return torch.as_tensor(batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded)


def _boundaries(batch: PackedBatch, model: Any) -> dict[str, Any]:
    ends = _ends(batch).to(hf.unwrap(model).device, torch.int32)
    longest = int(ends.diff().max())
    return _positions(
        batch, model, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest
    )


def _boundaries_and_numbers(batch: PackedBatch, model: Any) -> dict[str, Any]:
    arguments = _boundaries(batch, model)
    shape = arguments["input_ids"].shape
    ends = _ends(batch).long()
    numbers = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff()).view(shape)
    numbers = (numbers - numbers[:, :1]).to(arguments["input_ids"].device, torch.int32)
    return arguments | ({"seq_idx": numbers} if hf.accepts(model, "seq_idx") else {})


def _tokens_alone(batch: PackedBatch, model: Any) -> dict[str, Any]:
    arguments = {"input_ids": batch.to_torch(hf.unwrap(model).device).input_ids, "use_cache": False}
    return {name: value for name, value in arguments.items() if hf.accepts(model, name)}


CALLS = (
    Call(
        name="position_ids, use_cache=False",
        users="transformers' DataCollatorWithFlattening under Trainer",
        inputs=_positions,
    ),
    Call(
        name="position_ids, use_cache=True",
        users="the same in a training loop that leaves config.use_cache as it is",
        inputs=lambda batch, model: _positions(batch, model, use_cache=True),
    ),
    Call(
        name="position_ids, attention_mask of ones",
        users="collators that add a mask for every token",
        inputs=_mask_of_ones,
    ),
    Call(
        name="position_ids, attention_mask 0 at padding",
        users="collators that pad packed rows",
        inputs=_mask_of_padding,
    ),
    Call(
        name="position_ids, attention_mask of numbers",
        users="collators that number segments in the mask: 1, 1, 2, 2, 0",
        inputs=_mask_of_numbers,
    ),
    Call(
        name="position_ids, cu_seq_lens, max_length",
        users="DataCollatorWithFlattening(return_flash_attn_kwargs=True)",
        inputs=_boundaries,
    ),
    Call(
        name="position_ids, cu_seq_lens, max_length, seq_idx",
        users="TRL's padding-free collator; return_seq_idx=True",
        inputs=_boundaries_and_numbers,
    ),
    Call(
        name="input_ids alone",
        users="concatenated text",
        inputs=_tokens_alone,
        why="nothing says where documents begin",
    ),
)
"""Every call but varlen's own, `hf.model_inputs`; arguments that a model's forward has no name for are left out."""
