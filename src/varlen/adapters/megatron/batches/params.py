"""`PackedSeqParams`: the boundaries of a packed micro-batch for Megatron's attention, from a batch of any dialect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from varlen.errors import DocumentsError, MissingExtraError, SettingError

_CURRENT = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@dataclass(eq=False)
class PackedSeqParams:
    """The fields of Megatron-Core's class of this name (0.16 to 0.20) in its order, without Megatron-Core.

    Attention keeps documents apart by `cu_seqlens_q`; rotary embeddings, context parallelism and `seq_idx` go by
    `cu_seqlens_q_padded` where it is given.
    """

    qkv_format: str | None = None
    """"thd" for packed rows, as the functions here make it."""
    cu_seqlens_q: Tensor | None = None
    """int32 `[segments + 1]`: real tokens before each segment."""
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    """int32 `[segments + 1]`: positions before each segment; None where these are the same."""
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: Any = None
    total_tokens: int | None = None
    """Places of the micro-batch on this rank; where given, `seq_idx` is made of it."""
    seq_idx: Tensor | None = None
    """int32 `[1, total_tokens]`: which segment each position belongs to, for recurrent layers."""
    tokens_per_sample: int | None = None
    pad_between_seqs: bool | None = None
    """Whether positions and real tokens differ; False spares kernels the search for padding."""
    cp_scatter_cache: Any = None
    _: KW_ONLY
    cp_partition_mode: str = "zigzag"

    def __post_init__(self) -> None:
        """Make `seq_idx`, as Megatron-Core's class does."""
        bounds = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        if self.total_tokens is not None and self.seq_idx is None and bounds is not None:
            self.seq_idx = sequence_index(bounds, self.total_tokens)

    def to_megatron(self) -> Any:
        """Return Megatron-Core's own object, with those of these fields that the installed release has.

        Raises:
            MissingExtraError: Megatron-Core isn't installed.
            SettingError: it is older than what is set here, so that this would be lost.
        """
        try:
            from megatron.core.packed_seq_params import PackedSeqParams as Theirs  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise MissingExtraError(
                "Megatron-Core is not installed, so there is no PackedSeqParams of its own to make; "
                "`pip install megatron-core` installs it"
            ) from None
        known = {field.name for field in dataclasses.fields(Theirs)}
        ours = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.cp_partition_mode != "zigzag" and "cp_partition_mode" not in known:
            raise SettingError(
                f"cp_partition_mode={self.cp_partition_mode!r} is unknown to the installed Megatron-Core, which "
                "would attend in zigzag; install a later one"
            )
        return Theirs(**{name: value for name, value in ours.items() if name in known})


def sequence_index(bounds: Tensor, total_tokens: int) -> Tensor:
    """Return the segment of each position (int32 `[1, total_tokens]`); positions behind the last are in one more.

    >>> sequence_index(torch.tensor([0, 2, 3]), 5).tolist()
    [[0, 0, 1, 2, 2]]
    """
    ends = torch.cat([bounds, bounds.new_tensor([total_tokens])])
    sizes = (ends[1:] - ends[:-1]).clamp(min=0)
    numbers = torch.arange(sizes.numel(), device=bounds.device)
    return torch.repeat_interleave(numbers, sizes).to(torch.int32).unsqueeze(0)


def get_packed_seq_params(batch: Mapping[str, Any]) -> PackedSeqParams:
    """Return what attention must know about a micro-batch of any dialect, as Megatron-Bridge's function of this name.

    What differs from the releases: `max_seqlen_*` are numbers, never tensors; boundaries without -1 at their end are
    taken whole, where the releases take them for empty; two rows are refused, not joined; and `pad_between_seqs` is
    given.

    Args:
        batch: with `cu_seqlens_q` (`"0.6"`), or `cu_seqlens` and, where documents are padded, `cu_seqlens_unpadded`
            (`"0.4"`, `"0.5"`); both with or without a first dimension of 1. `total_tokens`, `cp_group`,
            `local_cp_size`, `cp_partition_mode`, `pad_between_seqs` and `tokens_per_sample` are passed on.

    Raises:
        DocumentsError: no boundaries, those of several rows, or a `max_seqlen` of several values.

    >>> batch = {"cu_seqlens": torch.tensor([[0, 4, 6, -1]]), "max_seqlen": torch.tensor([[4]])}
    >>> params = get_packed_seq_params(batch)
    >>> params.cu_seqlens_q.tolist(), params.max_seqlen_q, params.cu_seqlens_q_padded
    ([0, 4, 6], 4, None)
    """
    given: dict[str, Any] = {}
    if batch.get("cu_seqlens_q") is not None:
        given = {name: _one_row(batch, name, None) for name in _CURRENT}
        given |= {name: _number(batch, name) for name in ("max_seqlen_q", "max_seqlen_kv")}
        for name in ("cu_seqlens_kv", "max_seqlen_kv", "cu_seqlens_kv_padded"):
            if given[name] is None:
                given[name] = given[name.replace("_kv", "_q")]
    elif batch.get("cu_seqlens") is not None:
        slots = _one_row(batch, "cu_seqlens", "cu_seqlens_argmin")
        reals = _one_row(batch, "cu_seqlens_unpadded", "cu_seqlens_unpadded_argmin")
        given = dict.fromkeys(_CURRENT[:2], slots if reals is None else reals)
        given |= dict.fromkeys(_CURRENT[2:], None if reals is None else slots)
        given["max_seqlen_q"] = given["max_seqlen_kv"] = _number(batch, "max_seqlen")
    else:
        raise DocumentsError(
            "the batch has neither cu_seqlens_q nor cu_seqlens, so attention would join its documents; it has "
            f"{', '.join(sorted(map(str, batch))) or 'no keys'}"
        )
    declared = batch.get("pad_between_seqs")
    passed_on = ("total_tokens", "cp_group", "local_cp_size", "tokens_per_sample")
    return PackedSeqParams(
        qkv_format="thd",
        **given,
        **{name: batch.get(name) for name in passed_on},
        cp_partition_mode=batch.get("cp_partition_mode") or "zigzag",
        pad_between_seqs=given["cu_seqlens_q_padded"] is not None if declared is None else bool(declared),
    )


packed_seq_params = get_packed_seq_params
"""The same by the name of what it gives."""


def get_packed_seq_q_cu_seqlens(packed_seq_params: Any) -> tuple[Tensor, Tensor]:
    """Return the boundaries of real tokens and those of positions, which are the same where no padded ones are given.

    Args:
        packed_seq_params: this module's `PackedSeqParams` or Megatron-Core's.

    Raises:
        DocumentsError: it has no boundaries.
    """
    bounds = packed_seq_params.cu_seqlens_q
    if bounds is None:
        raise DocumentsError("these PackedSeqParams have no cu_seqlens_q")
    padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
    return bounds, bounds if padded is None else padded


def build_uniform_packed_seq_params(
    batch_size: int, seq_length: int, device: torch.device | str | None = None
) -> PackedSeqParams:
    """Return the parameters of rows of one length laid end to end, each a sequence of its own.

    Args:
        batch_size: rows.
        seq_length: positions of a row.
        device: of the boundaries.

    Raises:
        SettingError: fewer than one row or position.
    """
    if batch_size < 1 or seq_length < 1:
        raise SettingError(f"batch_size and seq_length must be 1 or more: {batch_size!r} and {seq_length!r}")
    bounds = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_length
    given = bounds, bounds, bounds, bounds
    return PackedSeqParams("thd", *given, seq_length, seq_length, pad_between_seqs=False)


def _one_row(batch: Mapping[str, Any], name: str, argmin: str | None) -> Tensor | None:
    """Return the boundaries of a micro-batch of one row, what stands behind their end cut off."""
    bounds = batch.get(name)
    if bounds is None:
        return None
    if not isinstance(bounds, Tensor) or bounds.dim() not in (1, 2):
        seen = f"shape {tuple(bounds.shape)}" if isinstance(bounds, Tensor) else type(bounds).__name__
        raise DocumentsError(f"{name} must be a tensor [entries] or [1, entries], got {seen}")
    if bounds.dim() == 2:
        if bounds.size(0) != 1:
            raise DocumentsError(
                f"{name} has {bounds.size(0):,} rows; packed attention takes micro-batches of one row: pass "
                "each of split_microbatches(batch)"
            )
        bounds = bounds[0]
    stop = batch.get(argmin) if argmin else None
    if stop is not None:
        bounds = bounds[: int(stop)]
        # On a device it would have to be waited for.
        if bounds.device.type == "cpu" and bool((bounds < 0).any()):
            raise DocumentsError(
                f"{argmin} is {int(stop)}, but {name} holds -1 before that: {bounds.tolist()[:8]}; pass both of the "
                "same micro-batch"
            )
    elif argmin:
        least = int(torch.argmin(bounds))
        bounds = bounds[:least] if int(bounds[least]) < 0 else bounds
    if not bounds.numel():
        raise DocumentsError(f"{name} ends before its first entry; a row's boundaries begin with 0")
    return bounds


def _number(batch: Mapping[str, Any], name: str) -> int | None:
    value = batch.get(name)
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise DocumentsError(
                f"{name} must contain exactly one value, got {value.numel():,}; pass a micro-batch of one row"
            )
        value = value.item()
    return int(value)


# Packed rows of one micro-batch back into rows of their own, for models that make position ids of a batch.


def unpack_mcore_thd_tensor_for_position_ids(
    tensor: Tensor, packed_seq_params: Any
) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Return the documents of a packed row as rows of their own.

    Args:
        tensor: `[1, positions]`.
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
        raise DocumentsError(f"cu_seqlens_q must rise and hold at least a token, got {logical.tolist()[:8]}")
    outside = [n for n, (at, size) in enumerate(zip(begins, sizes)) if at < 0 or at + size > tensor.size(1)]
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
    index = torch.tensor(begins, device=tensor.device)[:, None] + within
    rows[is_token] = tensor[0, index[is_token]]
    return rows, is_token, begins, sizes


def repack_mcore_thd_position_ids(
    position_ids: Tensor, *, padded_starts: list[int], lengths: list[int], total_length: int
) -> Tensor:
    """Return positions of rows of their own where these stand in the packed row.

    Args:
        position_ids: `[axes, documents, longest]`.
        padded_starts: where each document begins in the packed row.
        lengths: tokens of each document.
        total_length: positions of the packed row.

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
    if lengths and (int((begins + sizes).max()) > total_length or max(lengths) > position_ids.size(2)):
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
