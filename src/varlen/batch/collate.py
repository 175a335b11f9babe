"""`collate`: a Packing and its documents' tokens in, a PackedBatch out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from varlen import jit
from varlen.batch.layout import Segments, lay_out
from varlen.batch.packed import Layout, PackedBatch
from varlen.batch.ragged import Documents, Ragged, as_ragged, as_sequence, check_integers, count_documents
from varlen.errors import DocumentsError, OutputBufferError, SettingError
from varlen.types import IntArray, Packing

_log = logging.getLogger(__name__)
_kernel = functools.partial(jit.kernel, "varlen.batch", "kernels")
_NAMES = ("input_ids", "labels", "position_ids", "segment_ids")
_LAYOUTS = get_args(Layout)
_INT32 = np.iinfo(np.int32)


def collate(
    documents: Documents,
    packing: Packing,
    pack_ids: Sequence[int] | npt.ArrayLike | None = None,
    labels: Documents | None = None,
    loss_mask: Documents | None = None,
    columns: Mapping[str, Documents] | None = None,
    pad_id: int = 0,
    pad_to_multiple_of: int = 1,
    layout: Layout = "rows",
    *,
    column_pads: Mapping[str, Any] | None = None,
    shift_labels: bool = False,
    step_num_targets: int | None = None,
    dp_world_size: int = 1,
    out: Mapping[str, npt.NDArray[Any]] | PackedBatch | None = None,
) -> PackedBatch:
    """Build the arrays of some packs.

    Documents, labels, masks and columns each come as a list of lists, arrays or tensors (one a document), as
    a tuple (values, offsets), or as an Arrow list array. Flat and Arrow values are read where they lie; of a
    list only the documents in these packs are converted. With documents as a tuple, the others may be flat
    arrays that share its offsets.

    Args:
        documents: token ids of all documents that were packed, in the order of their lengths.
        packing: which piece of which document stands where.
        pack_ids: which packs, in the order wanted; None for all.
        labels: targets a token, -100 for none; None takes the tokens themselves.
        loss_mask: numbers or booleans a token; where 0 the label becomes -100.
        columns: other values a token (advantages, weights), which travel along in their own dtype.
        pad_id: token id at padding. It may equal a real token's id: boundaries are carried, not inferred.
        pad_to_multiple_of: the width of the flat layout is rounded up to this multiple (and to slots); in rows
            the width is the capacity, which must be a multiple already.
        layout: "rows", one row a pack of `capacity` positions, or "flat", all in one row without padding
            between packs.
        column_pads: values of the columns at padding, 0 where not named.
        shift_labels: also give `shift_labels`, where position t holds the target that follows it.
        step_num_targets: targets in the whole step over all ranks and micro-batches; None takes this batch's.
        dp_world_size: data-parallel ranks, for `loss_scale`.
        out: arrays to fill in place of new ones: a mapping with `input_ids`, `labels`, `position_ids` and
            `segment_ids` (and columns), or an earlier batch. Shape and dtype must match exactly.

    Returns:
        A PackedBatch; its docstrings give every array's shape and dtype.

    Raises:
        DocumentsError: documents, labels, masks or columns that don't match the packing or each other.
        OutputBufferError: a buffer of the wrong shape, dtype or memory layout; nothing has been written then.
        SettingError: an unknown layout, or a multiple that doesn't divide the capacity.

    Cost: one pass over the batch's tokens; about the speed of copying memory for flat and Arrow input.

    >>> import varlen as vl
    >>> documents = [[11, 12, 13], [21, 22]]
    >>> batch = vl.collate(documents, vl.pack([3, 2], capacity=6))
    >>> batch.input_ids.tolist(), batch.labels.tolist()
    ([[11, 12, 13, 21, 22, 0]], [[-100, 12, 13, -100, 22, -100]])
    >>> batch.position_ids.tolist(), batch.cu_seqlens.tolist()
    ([[0, 1, 2, 0, 1, 0]], [0, 3, 5, 6])
    """
    if layout not in _LAYOUTS:
        raise SettingError(f"layout must be one of {', '.join(_LAYOUTS)}; got {layout!r}")
    if not _INT32.min <= pad_id <= _INT32.max:
        raise SettingError(f"pad_id must be a token id that an int32 holds, got {pad_id!r}")
    wanted = np.arange(packing.num_packs) if pack_ids is None else as_sequence(pack_ids)
    segments = lay_out(packing, wanted, layout, pad_to_multiple_of)
    source = _Source(documents, packing, segments)
    tokens, token_starts = source.read(documents, "documents")
    check_integers(tokens, "token ids")
    _check_range(tokens, token_starts, segments, "token ids")
    targets = source.read_targets(labels, loss_mask, tokens, token_starts)
    extra = {
        name: (*source.read(values, f"column {name!r}"), np.asarray((column_pads or {}).get(name, 0)))
        for name, values in (columns or {}).items()
    }
    arrays = _buffers(out, segments.shape, {name: values.dtype for name, (values, _, _) in extra.items()})

    flat = {name: array.reshape(-1) for name, array in arrays.items()}
    largest = _kernel("assemble")(
        tokens,
        token_starts,
        segments.lengths,
        segments.places,
        segments.numbers,
        np.int32(pad_id),
        *(flat[name] for name in _NAMES),
    )
    num_targets = segments.num_targets
    if targets is not None:
        _kernel("mask_labels")(*targets, segments.lengths, segments.places, flat["labels"], segments.targets)
        num_targets = int(segments.targets.sum())
    for name, (values, starts, pad) in extra.items():
        padding = pad.astype(values.dtype).reshape(1)
        _kernel("copy_column")(values, starts, segments.lengths, segments.places, padding, flat[name])
    batch = PackedBatch(
        **{name: arrays[name] for name in _NAMES},
        cu_seqlens=segments.cu_seqlens,
        cu_seqlens_padded=segments.cu_slots,
        max_seqlen=segments.max_seqlen,
        document_ids=segments.documents,
        document_starts=segments.first_tokens,
        document_lengths=segments.lengths,
        document_targets=segments.targets,
        pack_ids=wanted,
        pack_offsets=segments.pack_offsets,
        layout=layout,
        pad_id=int(pad_id),
        max_token_id=int(largest),
        num_targets=num_targets,
        step_num_targets=num_targets if step_num_targets is None else int(step_num_targets),
        dp_world_size=int(dp_world_size),
        document_groups=None if packing.groups is None else packing.groups[segments.documents],
        shift_labels=_shifted(arrays["labels"]) if shift_labels else None,
        columns={name: arrays[name] for name in extra},
    )
    if targets is not None or segments.min_seqlen == 1:  # else every segment has a target
        _report_without_targets(batch)
    return batch


@dataclass(frozen=True, slots=True)
class _Source:
    """Reads what belongs to the segments of a batch, and refuses what doesn't match the packing."""

    documents: Documents
    packing: Packing
    segments: Segments

    def read(self, values: Documents, name: str) -> tuple[npt.NDArray[Any], IntArray]:
        """Flat values and the index of each segment's first value."""
        if (
            values is not self.documents
            and isinstance(self.documents, tuple)
            and not isinstance(values, tuple)
        ):
            array = np.asarray(values) if not hasattr(values, "value_lengths") else None
            if array is not None and array.ndim == 1 and array.dtype != object:
                tokens = np.asarray(self.documents[0])
                if array.size != tokens.size:
                    raise DocumentsError(
                        f"{name}: {array.size:,} values for {tokens.size:,} tokens; one a token is needed"
                    )
                values = (array, self.documents[1])
        count = count_documents(values, name)
        if count != self.packing.num_documents:
            raise DocumentsError(
                f"{name}: {count:,} documents given, but {self.packing.num_documents:,} lengths were packed; "
                "pass all documents, in the order of the lengths"
            )
        ragged, places = as_ragged(values, self.segments.documents, name)
        return ragged.values, self._locate(ragged, places, name)

    def _locate(self, ragged: Ragged, places: IntArray, name: str) -> IntArray:
        """Where each segment begins among the values."""
        segments, packing = self.segments, self.packing
        starts = np.empty(places.size, np.int64)
        exact = {"error": 2, "drop": 2, "split": 1, "truncate": 0}[packing.overlong]
        wrong, first = _kernel("locate")(
            places,
            segments.first_tokens,
            segments.lengths,
            ragged.offsets,
            ragged.values.size,
            packing.capacity,
            0 if packing.method == "wrapped" else exact,
            starts,
        )
        if wrong:
            place, document = int(places[first]), int(segments.documents[first])
            begin, end = int(ragged.offsets[place]), int(ragged.offsets[place + 1])
            stop = int(segments.first_tokens[first]) + int(segments.lengths[first])
            if end < begin or begin < 0 or end > ragged.values.size:
                seen = f"its offsets {begin:,} to {end:,} don't rise within the {ragged.values.size:,} values"
            else:
                seen = f"it has {end - begin:,} values here but was packed up to token {stop:,}"
            raise DocumentsError(
                f"{name}: document {document:,} doesn't match the packing: {seen} "
                f"({wrong:,} of {places.size:,} segments in this batch don't match)"
            )
        return starts

    def read_targets(
        self,
        labels: Documents | None,
        loss_mask: Documents | None,
        tokens: npt.NDArray[Any],
        starts: IntArray,
    ) -> tuple[npt.NDArray[Any], IntArray, npt.NDArray[Any], IntArray] | None:
        """Labels and mask for the kernel, or None where every token is its own label."""
        if labels is None and loss_mask is None:
            return None
        values, value_starts = (tokens, starts) if labels is None else self.read(labels, "labels")
        if labels is not None:
            check_integers(values, "labels")
            _check_range(values, value_starts, self.segments, "labels")
        mask, mask_starts = np.empty(0, np.uint8), starts
        if loss_mask is not None:
            mask, mask_starts = self.read(loss_mask, "loss_mask")
            if mask.dtype.kind not in "biuf":
                raise DocumentsError(f"loss_mask must be numbers or booleans, got dtype {mask.dtype}")
        return values, value_starts, mask, mask_starts


def _check_range(values: npt.NDArray[Any], starts: IntArray, segments: Segments, name: str) -> None:
    """Refuse numbers that an int32 can't hold, before anything is written."""
    if np.can_cast(values.dtype, np.int32):
        return
    low, high = _kernel("value_range")(values, starts, segments.lengths)
    if low < _INT32.min or high > _INT32.max:
        raise DocumentsError(f"{name} run from {low:,} to {high:,}, outside of int32; these are no token ids")


def _buffers(
    out: Mapping[str, npt.NDArray[Any]] | PackedBatch | None,
    shape: tuple[int, int],
    column_dtypes: Mapping[str, np.dtype[Any]],
) -> dict[str, npt.NDArray[Any]]:
    """The arrays to fill, the caller's if they are exactly right."""
    dtypes: dict[str, np.dtype[Any]] = {**dict.fromkeys(_NAMES, np.dtype(np.int32)), **column_dtypes}
    if out is None:
        return {name: np.empty(shape, dtype) for name, dtype in dtypes.items()}
    if isinstance(out, PackedBatch):
        out = {**{name: getattr(out, name) for name in _NAMES}, **out.columns}
    missing = [name for name in dtypes if name not in out]
    if missing:
        raise OutputBufferError(f"out lacks {', '.join(missing)}; it needs {', '.join(dtypes)}")
    for name, dtype in dtypes.items():
        array = out[name]
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
            seen = f"{array.dtype} {array.shape}" if hasattr(array, "dtype") else type(array).__name__
            raise OutputBufferError(f"out[{name!r}] must be a numpy array {dtype} {shape}, got {seen}")
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise OutputBufferError(f"out[{name!r}] must be C-contiguous and writable")
    return {name: out[name] for name in dtypes}


def _shifted(labels: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Labels one position earlier; the first label of what follows a document is -100 already."""
    shifted = np.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    return shifted


def _report_without_targets(batch: PackedBatch) -> None:
    """Say once a batch which packs would train nothing."""
    empty = batch.packs_without_targets
    if empty.size:
        _log.warning(
            "%s of %s packs in this batch hold no target and would train nothing, pack %s first; "
            "see PackedBatch.packs_without_targets",
            f"{empty.size:,}",
            f"{len(batch.pack_ids):,}",
            f"{empty[0]:,}",
        )
