"""In-batch packing: the padded rows of one micro-batch of a vision-language model, joined into one row.

The functions are those of Megatron-Bridge: `pack_batch_sequences` of releases 0.3 to 0.5.1 (in their `vlm_step`), and
the two of 0.6 and later (in their `data.packing.in_batch`). Values are theirs. Each function lists what differs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from varlen.arguments import as_count
from varlen.counts import many
from varlen.errors import DocumentsError, SettingError

_log = logging.getLogger(__name__)
IGNORE_INDEX = -100
_OWN = ("position_ids", "labels", "loss_mask", "attention_mask")
_BOUNDARIES = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")

Packed: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor, Tensor]
"""Tokens, labels, loss mask, attention mask, positions, boundaries, longest segment."""


def check_in_batch_packing(micro_batch_size: int) -> None:
    """Require a micro-batch of several rows: with one there is nothing to join. Offline packing requires one row.

    Args:
        micro_batch_size: rows of a micro-batch, before they are joined.

    Raises:
        SettingError: it is 1.
    """
    if as_count(micro_batch_size, "micro_batch_size") == 1:
        raise SettingError(
            "in-batch packing joins the rows of a micro-batch, but `train.micro_batch_size` is 1; set it to 2 or "
            "more, or turn `pack_sequences_in_batch` (from 0.6 on `enable_in_batch_packing`) off"
        )


def pack_batch_sequences(
    tokens: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
    padding_mask: Tensor | None = None,
) -> Packed:
    """Join right-padded rows into one, as releases 0.3 to 0.5.1 of Megatron-Bridge do.

    A row is as long as its mask says. Only without a mask it ends at its last token other than `pad_token_id`; a
    mask that isn't right-padded is refused. Those releases ignore a two-dimensional `attention_mask`, so that real
    tokens equal to the padding are lost from the end of a row, and a mask with gaps silently takes the wrong tokens.

    Args:
        tokens: `[rows, width]`.
        labels, loss_mask: `[rows, width]`, or None on stages of a pipeline that have none.
        attention_mask: `[rows, width]`, 1 at real tokens; one of another shape, or None, says nothing.
        position_ids: `[rows, width]`.
        pad_token_id: token of padding.
        pad_to_multiple_of: each row is rounded up to this: the least common multiple of 2·CP and CP·TP.
        padding_mask: `[rows, width]`, 1 at real tokens; goes before `attention_mask`.

    Returns:
        Tokens, labels, loss mask, None, and position ids, each `[1, total]` in its own dtype; int32 `[rows + 1]`
        boundaries, rounded up; and the longest row, rounded up, as a number on the device. Rows without tokens are
        left out. Padding has `pad_token_id`, label -100, mask 0, and positions that go on. Where no row has tokens,
        all are empty, with a warning in the log.

    Raises:
        DocumentsError: shapes that differ, or a mask with gaps or padding on the left.
        SettingError: a multiple below 1.

    Cost: one wait for the device, for the lengths.

    >>> tokens = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
    >>> positions = torch.arange(4).expand(2, 4)
    >>> joined = pack_batch_sequences(tokens, None, None, None, positions, pad_to_multiple_of=2)
    >>> joined[0].tolist(), joined[4].tolist(), joined[5].tolist()
    ([[5, 6, 7, 0, 8, 9]], [[0, 1, 2, 3, 0, 1]], [0, 4, 6])
    """
    multiple = as_count(pad_to_multiple_of, "pad_to_multiple_of")
    rows = {
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "padding_mask": padding_mask,
    }
    check_shapes(tokens, "tokens", rows)
    mask = padding_mask
    if mask is None and attention_mask is not None and attention_mask.shape == tokens.shape:
        mask = attention_mask
    lengths = lengths_of(tokens, pad_token_id, mask, only_right=mask is not None)
    chosen = [row for row, length in enumerate(lengths) if length]
    device = tokens.device
    if not chosen:
        _log.warning("none of the %d rows has a token, so nothing was packed", len(lengths))
        empty = [values if values is None else values[:, :0] for values in (labels, loss_mask)]
        bounds, longest = torch.zeros(1, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
        ends = (position_ids[:, :0], bounds.to(device), longest.to(device))
        return tokens[:, :0], empty[0], empty[1], attention_mask, *ends
    real = [lengths[row] for row in chosen]
    slots = [length + -length % multiple for length in real]
    pieces = list(zip(chosen, real))

    def joined(values: Tensor | None, pad: float) -> Tensor | None:
        return None if values is None else _joined([values[row, :n] for row, n in pieces], slots, pad)

    packed = _joined([tokens[row, :length] for row, length in pieces], slots, pad_token_id)
    positions = _positions([position_ids[row, :length] for row, length in pieces], slots)
    longest = torch.tensor(max(slots), dtype=torch.int32, device=device)
    targets, weights = joined(labels, IGNORE_INDEX), joined(loss_mask, 0)
    return packed, targets, weights, None, positions, _boundaries(slots, device), longest


def build_mcore_thd_sequence_batch_from_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    token_key: str = "input_ids",
    sequence_length: int | None = None,
    pad_token_id: int = 0,
    ignore_index: int = IGNORE_INDEX,
    pad_to_multiple_of: int = 1,
    packed_sequence_length: int | None = None,
    pad_to_packed_sequence_length: bool = False,
    pad_to_max_length: bool = False,
    sequence_tensor_pad_values: Mapping[str, float] | None = None,
    emit_padding_mask: bool = False,
    always_padded: bool = False,
) -> dict[str, Any]:
    """Join rows without padding into one, as Megatron-Bridge does from 0.6 on.

    The padded boundaries are added only where they differ from the real ones. Megatron-Bridge adds them wherever rows
    may be rounded up, and attention then takes a slower kernel. A row needs no `position_ids`.

    Args:
        rows: the tensors of each sample, `[length]`.
        token_key: name of the tokens.
        sequence_length: most tokens of a row; None for no limit.
        pad_token_id: token of padding.
        ignore_index: label of padding.
        pad_to_multiple_of: each row is rounded up to this: the least common multiple of 2·CP and CP·TP.
        packed_sequence_length: most tokens of all rows, rounded up.
        pad_to_packed_sequence_length: the last row's padding goes on to exactly `packed_sequence_length`.
        pad_to_max_length: the spelling of 0.6.0: the padding goes on to exactly `sequence_length`.
        sequence_tensor_pad_values: other tensors with a value per token, and the value of each at padding.
        emit_padding_mask: add `padding_mask`, bool `[1, total]`, True at padding, for routers of experts.
        always_padded: add the padded boundaries wherever there could be padding, as Megatron-Bridge does.

    Returns:
        Each tensor, `[1, total]` in its own dtype; `attention_mask` None; int32 `cu_seqlens_q` and `cu_seqlens_kv`,
        `[rows + 1]`; the same with `_padded`; `max_seqlen_q` and `max_seqlen_kv`, rounded up, as int32 numbers; and
        `total_tokens`, an int.

    Raises:
        DocumentsError: no rows, a row that is empty, padded or too long, or one whose tensors don't match.
        SettingError: settings out of range, or that contradict each other.
    """
    pads = dict(sequence_tensor_pad_values or {})
    if pad_to_max_length:
        packed_sequence_length, pad_to_packed_sequence_length = sequence_length, True
    multiple, width = checked_width(pad_to_multiple_of, packed_sequence_length, pad_to_packed_sequence_length)
    most = None if sequence_length is None else as_count(sequence_length, "sequence_length")
    taken = {token_key, *_OWN} & set(pads)
    if taken:
        raise SettingError(
            f"{', '.join(sorted(taken))}: these have their own pad values; pass other tensors' only"
        )
    names = [n for n in ("labels", "loss_mask", *pads) if any(row.get(n) is not None for row in rows)]
    lengths = checked_rows(rows, token_key, names, most)
    slots = [length + -length % multiple for length in lengths]
    if width is not None and sum(slots) > width:
        raise DocumentsError(
            f"{many(len(rows), 'row')} of {slots} tokens, rounded up to multiples of {multiple}, take {sum(slots):,} "
            f"tokens, over the packed_sequence_length of {width:,}; put fewer rows into a micro-batch or raise it"
        )
    if width is not None and pad_to_packed_sequence_length:
        slots[-1] += width - sum(slots)
    given = [row.get("position_ids") for row in rows]
    tokens = [row[token_key] for row in rows]
    steps = [torch.arange(n, device=tokens[0].device) if p is None else p for n, p in zip(lengths, given)]
    packed: dict[str, Any] = {
        token_key: _joined(tokens, slots, pad_token_id),
        "position_ids": _positions(steps, slots),
        "attention_mask": None,
    }
    for name, pad in ({"labels": ignore_index, "loss_mask": 0} | pads).items():
        if name in names:
            packed[name] = _joined([row[name] for row in rows], slots, pad)
    could_pad = multiple > 1 or pad_to_packed_sequence_length
    has_padded = slots != lengths or (always_padded and could_pad)
    packed |= _boundary_keys(lengths, slots, tokens[0].device, has_padded)
    if emit_padding_mask:
        masks = [torch.zeros_like(row, dtype=torch.bool) for row in tokens]
        packed["padding_mask"] = _joined(masks, slots, True)
    return packed


def pack_right_padded_sequence_batch_to_mcore_thd(
    batch: MutableMapping[str, Any],
    *,
    token_key: str | None = None,
    sequence_length: int | None = None,
    pad_token_id: int = 0,
    **settings: Any,
) -> None:
    """Join the right-padded rows of a batch into one, in place, as Megatron-Bridge does from 0.6 on.

    Args:
        batch: tokens and `position_ids`, `[rows, width]`; perhaps `labels`, `loss_mask`, and an `attention_mask` of
            the same shape, 1 at real tokens. Without it a row ends where its tokens equal `pad_token_id`.
        token_key: name of the tokens; None: "tokens" or "input_ids", whichever is there.
        sequence_length: most tokens of a row, padding not counted.
        pad_token_id: token of padding.
        settings: those of `build_mcore_thd_sequence_batch_from_rows`. A `padding_mask` that stands in the batch is
            removed, or replaced with `emit_padding_mask`.

    Raises:
        DocumentsError: tensors that are missing or don't match, or rows that are empty or not right-padded.
        SettingError: settings out of range, or that contradict each other.
    """
    name = token_key or next((k for k in ("tokens", "input_ids") if torch.is_tensor(batch.get(k))), None)
    if name is None or not torch.is_tensor(batch.get(name)):
        raise DocumentsError(
            f"the batch has no tensor {name or 'tokens or input_ids'}; it has {', '.join(batch)}"
        )
    tokens = batch[name]
    if batch.get("position_ids") is None:
        raise DocumentsError("the batch has no position_ids; they must have the shape of the tokens")
    extra = [key for key in settings.get("sequence_tensor_pad_values") or {} if batch.get(key) is not None]
    keys = [key for key in ("position_ids", "labels", "loss_mask") if batch.get(key) is not None] + extra
    mask = batch.get("attention_mask")
    check_shapes(tokens, name, {key: batch[key] for key in keys} | {"attention_mask": mask})
    lengths = lengths_of(tokens, pad_token_id, mask, only_right=True)
    if 0 in lengths:
        raise DocumentsError(
            f"row {lengths.index(0)} of the batch has no tokens ({lengths.count(0)} of {len(lengths)} rows have "
            "none); leave such samples out of the micro-batch"
        )
    rows = [{key: batch[key][row, :length] for key in (name, *keys)} for row, length in enumerate(lengths)]
    packed = build_mcore_thd_sequence_batch_from_rows(
        rows, token_key=name, sequence_length=sequence_length, pad_token_id=pad_token_id, **settings
    )
    for key in (*_BOUNDARIES, "padding_mask"):
        batch.pop(key, None)
    batch.update(packed)
    for twin in ("tokens", "input_ids"):
        if twin in batch:
            batch[twin] = packed[name]


def _joined(pieces: Sequence[Tensor], slots: Lengths, pad: float) -> Tensor:
    """Return pieces end to end, each padded to its slot, as one row."""
    gaps = [slot - len(piece) for slot, piece in zip(slots, pieces)]
    if not any(gaps):
        return torch.cat(list(pieces)).unsqueeze(0)
    padding = pieces[0].new_full((max(gaps),), pad)
    return torch.cat([part for piece, gap in zip(pieces, gaps) for part in (piece, padding[:gap])]).unsqueeze(
        0
    )


def _positions(pieces: Sequence[Tensor], slots: Lengths) -> Tensor:
    """Return positions end to end; in padding they go on from the last real one."""
    gaps = [slot - len(piece) for slot, piece in zip(slots, pieces)]
    if not any(gaps):
        return torch.cat(list(pieces)).unsqueeze(0)
    steps = torch.arange(1, max(gaps) + 1, dtype=pieces[0].dtype, device=pieces[0].device)
    parts = [
        part for piece, gap in zip(pieces, gaps) for part in (piece, steps[:gap] + piece[-1])[: 1 + bool(gap)]
    ]
    return torch.cat(parts).unsqueeze(0)


def _boundaries(lengths: Lengths, device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _boundary_keys(
    lengths: Lengths, slots: Lengths, device: torch.device, has_padded: bool
) -> dict[str, Any]:
    """Return where rows begin and end, in the names of `PackedSeqParams`."""
    bounds = _boundaries(lengths, device)
    keys: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    if has_padded:
        keys |= dict.fromkeys(_BOUNDARIES, _boundaries(slots, device))
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        keys[name] = torch.tensor(max(slots), dtype=torch.int32)
    return keys | {"total_tokens": sum(slots)}


# The rows that in-batch packing takes: their lengths, and what is wrong with them.

Lengths = list[int]
"""Tokens of each row."""


def check_shapes(tokens: Tensor, name: str, others: Mapping[str, Tensor | None]) -> None:
    """Require rows of tokens, and that what goes with them has their shape."""
    if tokens.dim() != 2:
        raise DocumentsError(f"{name} must be rows of equal width, but their shape is {tuple(tokens.shape)}")
    for key, values in others.items():
        if values is not None and values.shape != tokens.shape:
            raise DocumentsError(
                f"{key} has the shape {tuple(values.shape)}, but {name} {tuple(tokens.shape)}; they must be the same"
            )


def lengths_of(tokens: Tensor, pad: int, mask: Tensor | None, *, only_right: bool) -> Lengths:
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
        seen = "its mask has padding" if mask is not None else f"without a mask, padding token {pad} stands"
        raise DocumentsError(
            f"row {wrong[0]} of the batch is not right-padded: {seen} before a real token ({len(wrong)} "
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
            seen = tuple(tokens.shape) if torch.is_tensor(tokens) else type(tokens).__name__
            raise DocumentsError(f"row {number}: {token_key} must be a tensor of one dimension, got {seen}")
        length = tokens.numel()
        if length == 0:
            raise DocumentsError(f"row {number} has no tokens; leave such samples out of the micro-batch")
        if most is not None and length > most:
            raise DocumentsError(f"row {number} has {length:,} tokens, over sequence_length {most:,}; cut it")
        mask = row.get("attention_mask")
        given = {name: row.get(name) for name in ("position_ids", "attention_mask")}
        for name, values in (given | {name: row.get(name) for name in names}).items():
            if values is None and name not in names:
                continue
            if not torch.is_tensor(values) or values.shape != tokens.shape:
                what = tuple(values.shape) if torch.is_tensor(values) else values
                raise DocumentsError(
                    f"row {number}: {name} must match its {length:,} tokens, as in all rows; got {what}"
                )
        if mask is not None and not bool(mask.to(torch.bool).all()):
            raise DocumentsError(
                f"row {number} is padded: its attention_mask has zeros; pass real tokens alone"
            )
        lengths.append(length)
    return lengths
