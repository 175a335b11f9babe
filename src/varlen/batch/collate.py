"""`collate`: a Packing and its documents' tokens in, a PackedBatch out."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from varlen.batch import kernels
from varlen.batch.layout import (
    Segments,
    as_number,
    as_pack_ids,
    check_layout,
    exactness,
    lay_out,
    padding_segment,
    refuse_mismatch,
)
from varlen.batch.packed import (
    IGNORE_INDEX,
    TARGET_WEIGHTS,
    TOKEN_LABELS,
    Layout,
    PackedBatch,
    labels_of_documents,
    refuse_labels_of_pieces,
)
from varlen.batch.tree_batch import TreeBatch
from varlen.batch.trees import collate_trees
from varlen.errors import DocumentsError, OutputBufferError, SettingError
from varlen.forest import Forest
from varlen.ragged import Documents, as_flat, as_ragged, check_integers, is_flat, refuse_negative
from varlen.types import IntArray, Packing, as_packing

_log = logging.getLogger(__name__)
_NAMES = ("input_ids", "labels", "position_ids", "segment_ids")

Out = (
    Mapping[str, npt.NDArray[Any]] | PackedBatch | Callable[[tuple[int, int]], Mapping[str, npt.NDArray[Any]]]
)
"""Arrays to fill: a mapping by name, an earlier batch, or a function from the shape to such a mapping."""


@overload
def collate(
    documents: Forest,
    packing: Packing,
    pack_ids: Sequence[int] | npt.ArrayLike | None = None,
    *,
    pad_id: int = 0,
    pad_to_multiple_of: int = 1,
    layout: Layout = "rows",
    step_num_targets: int | None = None,
) -> TreeBatch: ...
@overload
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
    target_weights: Documents | None = None,
    token_labels: Documents | None = None,
    document_labels: npt.ArrayLike | None = None,
    shift_labels: bool = False,
    step_num_targets: int | None = None,
    dp_world_size: int = 1,
    out: Out | None = None,
    report: bool = True,
) -> PackedBatch: ...
def collate(
    documents: Any,
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
    target_weights: Documents | None = None,
    token_labels: Documents | None = None,
    document_labels: npt.ArrayLike | None = None,
    shift_labels: bool = False,
    step_num_targets: int | None = None,
    dp_world_size: int = 1,
    out: Out | None = None,
    report: bool = True,
) -> PackedBatch | TreeBatch:
    """Build the arrays of some packs, of documents or of a forest's trees.

    A Forest of `vl.fold` holds the values beside its targets: with it and its packing of `vl.pack_forest`, only
    packs, padding, layout and the step's targets are given. The result is a TreeBatch, whose docstrings explain it.

    Documents, labels, masks and columns can each be a list of lists, arrays or tensors (one a document), a tuple
    (values, offsets), or an Arrow list array. Flat and Arrow values are read without a copy; of a list, only the
    documents in these packs are converted. If documents are a tuple, the others may be flat arrays that share its
    offsets.

    Args:
        documents: token ids of all documents that were packed, in the order of their lengths; or a Forest.
        packing: the pieces of documents in each pack.
        pack_ids: which packs, in the order wanted; None for all.
        labels: a target for each token, -100 for none; None takes the tokens themselves.
        loss_mask: a number or boolean for each token; where it is 0, the label becomes -100. For weights, pass
            `target_weights`.
        columns: other values for each token (advantages, for example), copied in their own dtype.
        pad_id: token id at padding. It may equal a real token's id: boundaries are stored, not inferred.
        pad_to_multiple_of: the width of the flat layout is rounded up to this multiple (and to slots). In rows, the
            width is the capacity, which must be a multiple already.
        layout: "rows", one row a pack of `capacity` positions, or "flat", all in one row without padding
            between packs.
        target_weights: the weight of each label in the loss, at least 0; where it is 0, the label becomes -100.
        token_labels: the class of each token itself, -100 for none, for heads that don't predict the next token.
        document_labels: one for each document that was packed: integers are classes, -100 for none; floating-point
            numbers, and rows of several numbers `[documents, labels]`, are targets of regression or multiple labels.
        column_pads: values of the columns at padding, 0 where not named.
        shift_labels: also return `shift_labels`, where position t holds the target that follows it.
        step_num_targets: targets in the whole step over all ranks and micro-batches; None takes this batch's.
        dp_world_size: data-parallel ranks, for `loss_scale`.
        out: arrays to fill in place of new ones: a mapping with `input_ids`, `labels`, `position_ids`,
            `segment_ids` and all columns (`target_weights` is optional), an earlier batch, or a function from the
            shape to such a mapping. Shape and dtype must match exactly.
        report: log a warning where packs hold no target.

    Returns:
        A PackedBatch; its docstrings give every array's shape and dtype.

    Raises:
        DocumentsError: documents, labels, masks or columns that don't match the packing or each other; a document
            without its label, or with one and cut into pieces.
        OutputBufferError: a buffer of the wrong shape, dtype or memory layout; nothing has been written then.
        SettingError: an unknown layout, a multiple that doesn't divide the capacity, or a mask beside weights.

    Cost: one pass over the batch's tokens; about the speed of copying memory for flat and Arrow input.

    >>> import varlen as vl
    >>> documents = [[11, 12, 13], [21, 22]]
    >>> batch = vl.collate(documents, vl.pack([3, 2], capacity=6))
    >>> batch.input_ids.tolist(), batch.labels.tolist()
    ([[11, 12, 13, 21, 22, 0]], [[-100, 12, 13, -100, 22, -100]])
    >>> batch.position_ids.tolist(), batch.cu_seqlens.tolist()
    ([[0, 1, 2, 0, 1, 0]], [0, 3, 5, 6])
    """
    as_packing(packing, "vl.collate(documents, packing)")
    if isinstance(documents, Forest) or packing.prefixes is not None:
        beside = (labels, loss_mask, columns, column_pads, target_weights, token_labels, document_labels, out)
        is_beside = any(each is not None for each in beside) or shift_labels
        sizes = (pad_id, pad_to_multiple_of, step_num_targets)
        return collate_trees(documents, packing, pack_ids, layout, *sizes, is_beside=is_beside)
    check_layout(layout)
    pad = as_number(pad_id, "pad_id", -(2**31))
    ranks = as_number(dp_world_size, "dp_world_size", 1)
    step = None if step_num_targets is None else as_number(step_num_targets, "step_num_targets", 0, 2**63 - 1)
    multiple = as_number(pad_to_multiple_of, "pad_to_multiple_of", 1)
    if loss_mask is not None and target_weights is not None:
        raise SettingError(
            "target_weights say by 0 what loss_mask says: give the weights alone, 0 where it is 0"
        )
    columns, pads = _as_mapping(columns, "columns"), _as_mapping(column_pads, "column_pads")
    if columns or pads:
        check_columns(columns, pads, (*_NAMES, "shift_labels", TARGET_WEIGHTS, TOKEN_LABELS))
    wanted = np.arange(packing.num_packs) if pack_ids is None else as_pack_ids(pack_ids)
    made = None
    per_token = (labels, loss_mask, target_weights, token_labels, out)
    if all(each is None for each in per_token) and not columns:
        made = plain_fields(documents, packing, wanted, layout, multiple, pad)
    if made is None:
        segments = lay_out(packing, wanted, layout, multiple, documents)
        source = Source(documents, packing, segments)
        tokens = source.tokens()
        weights = None if target_weights is None else source.weights(target_weights)
        targets = source.targets(labels, loss_mask, weights, *tokens)
        extra = {name: source.column(values, name, pads.get(name, 0)) for name, values in columns.items()}
        if weights is not None:
            extra[TARGET_WEIGHTS] = weights
        if token_labels is not None:
            extra[TOKEN_LABELS] = source.classes(token_labels)
        made = _fields(segments, tokens, targets, extra, out, pad)
    fields, shortest = made
    fields["pack_ids"] = wanted
    fields["layout"] = layout
    fields["pad_id"] = pad
    fields["step_num_targets"] = fields["num_targets"] if step is None else step
    fields["dp_world_size"] = ranks
    fields["document_groups"] = None if packing.groups is None else packing.groups[fields["document_ids"]]
    fields["document_labels"] = None
    if document_labels is not None:
        given = labels_of_documents(
            document_labels, packing.num_documents, "documents", "in the order of the documents"
        )
        refuse_labels_of_pieces(fields["document_ids"], fields["document_starts"])
        fields["document_labels"] = given[fields["document_ids"]]
    fields["shift_labels"] = _shifted(fields["labels"]) if shift_labels else None
    fields["plan"] = None
    batch = PackedBatch.of(fields)
    # Otherwise every segment has a target.
    if report and (
        shortest == 1 or labels is not None or loss_mask is not None or target_weights is not None
    ):
        _report_without_targets(batch)
    return batch


def _fields(
    segments: Segments,
    tokens: tuple[npt.NDArray[Any], IntArray],
    targets: Targets | None,
    columns: Mapping[str, Column],
    out: Out | None,
    pad_id: int,
) -> tuple[dict[str, Any], int]:
    """Fill the arrays; returns the fields of a PackedBatch, and the length of its shortest segment."""
    arrays = _buffers(out, segments.shape, {name: column.values.dtype for name, column in columns.items()})
    if out is not None:
        read = [
            tokens[0],
            *(targets[::2] if targets else ()),
            *(column.values for column in columns.values()),
        ]
        _refuse_shared(arrays, read)
    largest = kernels.assemble(
        *tokens, segments.lengths, segments.begins, pad_id, *(arrays[name] for name in _NAMES)
    )
    if largest >= 2**31:
        refuse_negative(*tokens, segments.lengths, segments.documents)
    num_targets = segments.num_targets
    if targets is not None:
        written = arrays["labels"].reshape(-1)
        kernels.mask_labels(*targets, segments.lengths, segments.begins, written, segments.targets)
        num_targets = int(segments.targets.sum())
    for name, column in columns.items():
        values, padding, written = map(_bits, (column.values, column.pad, arrays[name].reshape(-1)))
        kernels.copy_column(values, column.starts, segments.lengths, segments.begins, padding, written)
    weights = arrays[TARGET_WEIGHTS] if TARGET_WEIGHTS in columns else None
    if weights is not None:
        check_weights(weights)
        weights[arrays["labels"] == -100] = 0
    return {
        **{name: arrays[name] for name in _NAMES},
        "cu_seqlens": segments.cu_seqlens,
        "cu_seqlens_padded": segments.cu_slots,
        "max_seqlen": segments.max_seqlen,
        "document_ids": segments.documents,
        "document_starts": segments.first_tokens,
        "document_lengths": segments.lengths,
        "document_targets": segments.targets,
        "pack_offsets": segments.pack_offsets,
        "max_token_id": largest,
        "num_targets": num_targets,
        "columns": {name: arrays[name] for name in columns},
    }, segments.min_seqlen


def _as_mapping(values: object, name: str) -> Mapping[str, Any]:
    """Return values by name; None gives an empty mapping."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise SettingError(f"{name} must be a mapping from names to values, got {type(values).__name__}")
    return values


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View memory as unsigned integers, so that copying needs no kernel for every dtype."""
    return array.view(f"u{array.dtype.itemsize}")


def _buffers(
    out: Out | None,
    shape: tuple[int, int],
    column_dtypes: Mapping[str, np.dtype[Any]],
) -> dict[str, npt.NDArray[Any]]:
    """Return new arrays to fill, or the caller's after validation."""
    if out is None:
        # One block for all: the C library reuses the block that an earlier batch freed, but returns smaller blocks to
        # the system. Page faults of fresh memory would cost four times the filling.
        block = np.empty((len(_NAMES), *shape), np.int32)
        made = {name: np.empty(shape, dtype) for name, dtype in column_dtypes.items()}
        return {**dict(zip(_NAMES, block)), **made}
    dtypes: dict[str, np.dtype[Any]] = {**dict.fromkeys(_NAMES, np.dtype(np.int32)), **column_dtypes}
    if callable(out):
        out = out(shape)
    if isinstance(out, PackedBatch):
        out = {**{name: getattr(out, name) for name in _NAMES}, **out.columns}
    if not isinstance(out, Mapping):
        raise OutputBufferError(f"out must be a mapping or an earlier batch, got {type(out).__name__}")
    if TARGET_WEIGHTS in dtypes and TARGET_WEIGHTS not in out:  # optional in callers' buffers
        out = {**out, TARGET_WEIGHTS: np.empty(shape, np.float32)}
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
    for first, second in itertools.combinations(dtypes, 2):
        if np.may_share_memory(out[first], out[second]):
            raise OutputBufferError(f"out[{first!r}] and out[{second!r}] share memory; each needs its own")
    return {name: out[name] for name in dtypes}


def _refuse_shared(arrays: Mapping[str, npt.NDArray[Any]], read: Sequence[npt.NDArray[Any]]) -> None:
    """Refuse output arrays that share memory with input."""
    for name, array in arrays.items():
        if any(np.may_share_memory(array, source) for source in read):
            raise OutputBufferError(
                f"out[{name!r}] shares memory with the documents, labels, mask or columns that are read; "
                "it needs memory of its own"
            )


def _shifted(labels: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Move labels one position earlier; the first label of each segment is -100, so none crosses a boundary."""
    shifted = np.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    return shifted


def _report_without_targets(batch: PackedBatch) -> None:
    """Log a warning if some packs would train nothing."""
    empty = batch.packs_without_targets
    if empty.size:
        _log.warning(
            "%s of %s packs in this batch hold no target and would train nothing, pack %s first; "
            "see PackedBatch.packs_without_targets",
            f"{empty.size:,}",
            f"{len(batch.pack_ids):,}",
            f"{empty[0]:,}",
        )


def plain_fields(
    documents: Documents,
    packing: Packing,
    pack_ids: IntArray,
    layout: Layout,
    pad_to_multiple_of: int,
    pad_id: int,
) -> tuple[dict[str, Any], int] | None:
    """Do what `_fields` does in one kernel call, for the most frequent batch: flat documents without labels.

    Returns None where documents must be converted, or where anything is wrong: the general path reports it.
    """
    multiple = packing.document_multiple_of
    width = packing.capacity if layout == "rows" else 0
    if width % pad_to_multiple_of:
        return None
    try:
        ragged = as_flat(documents, "documents")
    except DocumentsError:
        return None
    if ragged is None or ragged.offsets.size - 1 != packing.num_documents:
        return None
    dtype = ragged.values.dtype
    if dtype.kind not in "iu" or dtype == np.uint64:
        return None
    fits, wide, narrow, boundaries, block, targets, longest, shortest, largest = kernels.plain_batch(
        packing.document_ids,
        packing.starts,
        packing.stops,
        packing.offsets,
        pack_ids,
        width,
        multiple,
        math.lcm(multiple, pad_to_multiple_of),
        padding_segment(multiple),
        ragged.values,
        ragged.offsets,
        packing.capacity,
        exactness(packing),
        dtype.itemsize > 4 or dtype == np.uint32,
        pad_id,
    )
    if not fits:
        return None
    count = narrow.shape[1]
    input_ids, labels, position_ids, segment_ids = block
    first_tokens, lengths, document_targets = narrow
    is_exact = multiple == 1 or np.array_equal(boundaries[0], boundaries[1])
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "segment_ids": segment_ids,
        "cu_seqlens": boundaries[0],
        "cu_seqlens_padded": None if is_exact else boundaries[1],
        "max_seqlen": longest,
        "document_ids": wide[:count],
        "document_starts": first_tokens,
        "document_lengths": lengths,
        "document_targets": document_targets,
        "pack_offsets": wide[3 * count :],
        "max_token_id": largest,
        "num_targets": targets,
        "columns": {},
    }, shortest


_INT32 = np.iinfo(np.int32)
_SIZES = (1, 2, 4, 8)  # bytes of the numbers that kernels can read

Targets = tuple[npt.NDArray[Any], IntArray, npt.NDArray[Any], IntArray]
"""Labels, the index of each segment's first label, the loss mask (of size 0 for none), and the same index for it."""


@dataclass(frozen=True, slots=True)
class Column:
    """A per-token column to copy."""

    values: npt.NDArray[Any]
    starts: IntArray
    """int64 `[segments]`: index of each segment's first value."""
    pad: npt.NDArray[Any]
    """`[1]`, of the same dtype: the value at padding."""


class Source:
    """Reads tokens, labels, masks and columns for the segments of a batch, and validates them."""

    def __init__(self, documents: Documents, packing: Packing, segments: Segments) -> None:
        self._documents = documents
        self._packing = packing
        self._segments = segments

    def tokens(self) -> tuple[npt.NDArray[Any], IntArray]:
        """Return token ids and the index of each segment's first token."""
        tokens, starts = self._segments.tokens, self._segments.sources
        check_integers(tokens, "token ids")
        self._check_range(tokens, starts, "token ids")
        return tokens, starts

    def targets(
        self,
        labels: Documents | None,
        loss_mask: Documents | None,
        weights: Column | None,
        tokens: npt.NDArray[Any],
        starts: IntArray,
    ) -> Targets | None:
        """Return labels and mask for the kernel, or None where every token is its own label."""
        if labels is None and loss_mask is None and weights is None:
            return None
        values, value_starts = tokens, starts
        if labels is not None:
            values, value_starts = self._read(labels, "labels")
            check_integers(values, "labels")
            self._check_range(values, value_starts, "labels")
        mask: npt.NDArray[Any] = np.empty(0, np.uint8)
        mask_starts = starts
        if weights is not None:
            mask, mask_starts = weights.values, weights.starts
        if loss_mask is not None:
            mask, mask_starts = self._read(loss_mask, "loss_mask")
            if mask.dtype.kind not in "biuf":
                raise DocumentsError(f"loss_mask must be numbers or booleans, got dtype {mask.dtype}")
            if mask.dtype.itemsize not in _SIZES or mask.dtype == np.float16:
                mask = mask != 0  # kernels can't read these dtypes
        return values, value_starts, mask, mask_starts

    def column(self, values: Documents, name: str, pad: Any) -> Column:
        """Return a per-token column."""
        array, starts = self._read(values, f"column {name!r}")
        if array.dtype.kind not in "biuf" or array.dtype.itemsize not in _SIZES:
            raise DocumentsError(f"column {name!r} must hold numbers or booleans, got dtype {array.dtype}")
        is_number = np.asarray(pad).dtype.kind in "biuf"
        if not array.size and is_number:  # without values, the pad decides the dtype
            array = array.astype(np.result_type(array.dtype, np.min_scalar_type(pad)))
        return Column(array, starts, _as_pad(pad, array.dtype, name))

    def weights(self, values: Documents) -> Column:
        """Return weights of labels as a float32 column."""
        array, starts = self._read(values, "target_weights")
        if array.dtype.kind not in "biuf":
            raise DocumentsError(f"target_weights must be numbers, got dtype {array.dtype}")
        with np.errstate(over="ignore"):
            single = array.astype(np.float32, copy=False)
        if array.dtype.itemsize > 4 and np.count_nonzero(single) != np.count_nonzero(array):
            raise DocumentsError("target_weights hold numbers so small that float32 takes them for 0")
        return Column(single, starts, np.zeros(1, np.float32))

    def classes(self, values: Documents) -> Column:
        """Return classes of tokens as an int32 column."""
        array, starts = self._read(values, TOKEN_LABELS)
        check_integers(array, TOKEN_LABELS)
        self._check_range(array, starts, TOKEN_LABELS)
        return Column(array.astype(np.int32, copy=False), starts, np.full(1, IGNORE_INDEX, np.int32))

    def _read(self, values: Documents, name: str) -> tuple[npt.NDArray[Any], IntArray]:
        """Return flat values and the index of each segment's first value."""
        if values is not self._documents and isinstance(self._documents, tuple) and is_flat(values):
            size, wanted = len(values), len(self._documents[0])
            if size != wanted:
                raise DocumentsError(f"{name}: {size:,} values for {wanted:,} tokens; one a token is needed")
            values = (values, self._documents[1])
        segments, packing = self._segments, self._packing
        ragged, rows = as_ragged(values, packing.num_documents, lambda: segments.documents, name)
        rows = segments.documents if rows is None else rows
        self._check_sizes(ragged.offsets, rows, name)
        starts = np.empty(rows.size, np.int64)
        wrong, first = kernels.locate(
            rows,
            segments.first_tokens,
            segments.lengths,
            ragged.offsets,
            ragged.values.size,
            packing.capacity,
            exactness(packing),
            starts,
        )
        if wrong:
            piece = np.array([segments.first_tokens[first], segments.lengths[first]])
            counts = (wrong, rows.size)
            refuse_mismatch(ragged, rows[first], segments.documents[first], piece, counts, name)
        return ragged.values, starts

    def _check_sizes(self, offsets: IntArray, rows: IntArray, name: str) -> None:
        """Require as many values as the documents have tokens."""
        sizes, wanted = (ends[row + 1] - ends[row] for ends, row in ((offsets, rows), self._segments.bounds))
        wrong = sizes != wanted
        if wrong.any():
            first = int(np.argmax(wrong))
            raise DocumentsError(
                f"{name}: document {self._segments.documents[first]:,} has {sizes[first]:,} values for "
                f"{wanted[first]:,} tokens; one a token is needed "
                f"({int(wrong.sum()):,} of {sizes.size:,} segments in this batch don't match)"
            )

    def _check_range(self, values: npt.NDArray[Any], starts: IntArray, name: str) -> None:
        """Refuse numbers outside of int32, before anything is written."""
        kind, size = values.dtype.kind, values.dtype.itemsize
        if size < 4 or (size == 4 and kind == "i"):
            return
        unsigned = kind == "u"
        # Viewed as signed, numbers of 2^63 and above are negative.
        signed = values.view(np.int64) if values.dtype == np.uint64 else values
        low, high = kernels.value_range(signed, starts, self._segments.lengths)
        if low < (0 if unsigned else _INT32.min) or high > _INT32.max:
            low, high = sorted((low % 2**64, high % 2**64)) if unsigned else (low, high)
            raise DocumentsError(
                f"{name} run from {low:,} to {high:,}, outside of int32; these are no token ids"
            )


def check_weights(weights: npt.NDArray[np.float32]) -> None:
    """Refuse weights that are negative or not finite."""
    wrong = ~((weights >= 0) & (weights < np.inf))
    if wrong.any():
        first = float(weights[wrong][0])
        raise DocumentsError(
            f"target_weights must be finite numbers from 0 (in float32), got {first:g} ({int(wrong.sum()):,} of the "
            f"batch's {weights.size:,})"
        )


def check_columns(columns: Mapping[str, Any], pads: Mapping[str, Any], taken: tuple[str, ...]) -> None:
    """Refuse columns with names of a batch's own arrays, and pads of unknown columns."""
    reserved = [name for name in columns if name in taken]
    if reserved:
        raise SettingError(
            f"a column can't be called {', '.join(map(repr, reserved))}: a batch has that array anyway"
        )
    unknown = [name for name in pads if name not in columns]
    if unknown:
        raise SettingError(
            f"column_pads names {', '.join(map(repr, unknown))}, but the columns are "
            f"{', '.join(map(repr, columns)) or 'none'}"
        )


def _as_pad(pad: Any, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """Return a pad value in the dtype of its column."""
    given = np.asarray(pad)
    if given.ndim == 0 and given.dtype.kind in "biuf":
        with np.errstate(all="ignore"):
            held = given.astype(dtype)
        same = held == given or (dtype.kind == "f" and (given != given or abs(given) <= np.finfo(dtype).max))
        if same:
            return held.reshape(1)
    raise SettingError(f"column_pads[{name!r}] is {pad!r}, which the column's dtype {dtype} can't hold")
