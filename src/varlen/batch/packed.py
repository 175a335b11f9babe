"""PackedBatch: the arrays of a batch of packs that models, attention kernels and losses need.

Boundaries are stored as numbers (`cu_seqlens`, `segment_ids`, `document_ids`), never inferred from token
values, so an end-of-text token may equal the padding token and still be a target.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from varlen.errors import DocumentsError, MissingExtraError, SettingError
from varlen.types import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

    from varlen.step_plan import StepPlan

Array: TypeAlias = Any
"""A numpy array, or after `to_torch` a torch tensor of the same shape."""

Layout = Literal["rows", "flat"]

IGNORE_INDEX = -100

_TOKENS = ("input_ids", "labels", "position_ids", "shift_labels")
_SEGMENTS = (
    *("document_ids", "document_starts", "document_lengths", "document_targets", "document_groups"),
    "document_labels",
)
_NUMBERS = ("segment_ids", "cu_seqlens", "cu_seqlens_padded", "pack_ids", "pack_offsets", *_SEGMENTS)
TARGET_WEIGHTS = "target_weights"
"""The name of the column with the weight of each target in the loss."""
TOKEN_LABELS = "token_labels"
"""The name of the column with the class of each token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """A batch of packs as arrays, in one of two layouts.

    `layout="rows"`: one row a pack, `[num_packs, capacity]`. `layout="flat"`: all documents of all packs in
    one row, `[1, num_tokens]`, rounded up to `pad_to_multiple_of`; also called THD or padding-free.

    A *segment* is one piece of a document in this batch. Segments are numbered row by row, left to right;
    padding belongs to none.
    """

    input_ids: Array
    """int32 `[rows, width]` (int64 after `to_torch`); `pad_id` at padding."""
    labels: Array
    """Same shape; the token itself where it is a target, -100 at padding, at the first token of every
    segment, and where the loss mask is 0. Not shifted: position t's label is position t's token."""
    position_ids: Array
    """Same shape; 0, 1, … within each segment, 0 at padding."""
    segment_ids: Array
    """int32, same shape; 0, 1, … within each row, -1 at padding."""
    cu_seqlens: Array
    """int32 `[num_segments + num_padding_segments + 1]`: cumulative lengths over the flattened array, padding
    included in segments of at most 128, so that a varlen kernel covers all positions. Each row's segments come
    first, then its padding. Where slots are rounded up, these are the logical lengths."""
    cu_seqlens_padded: Array | None
    """int32, same shape: the physical slots, present only if they differ from `cu_seqlens`."""
    max_seqlen: int
    """Longest segment in tokens, padding not counted."""
    document_ids: Array
    """int64 `[num_segments]`: the document of each segment, for example to trace a loss spike."""
    document_starts: Array
    """int32 `[num_segments]`: the segment's first token within its document; 0 for whole documents."""
    document_lengths: Array
    """int32 `[num_segments]`: tokens of each segment."""
    document_targets: Array
    """int32 `[num_segments]`: labels other than -100 in each segment."""
    pack_ids: Array
    """int64 `[num_packs]`: which packs of the packing these are."""
    pack_offsets: Array
    """int64 `[num_packs + 1]`: pack k of this batch holds segments `pack_offsets[k]` to `pack_offsets[k + 1]` - 1."""
    layout: Layout
    pad_id: int
    max_token_id: int
    """Largest token id in the batch, padding not counted; the vocabulary size must exceed it. -1 without tokens."""
    num_targets: int
    """Labels other than -100 in this batch."""
    step_num_targets: int
    """The same over the whole step: all ranks, all micro-batches."""
    dp_world_size: int = 1
    """Ranks that the step's packs are dealt to, for `loss_scale`; 1 with a plan: `SliceEngine` scales its losses."""
    document_groups: Array | None = None
    """int64 `[num_segments]`: the group of each segment's document, if the packing has groups."""
    document_labels: Array | None = None
    """`[num_segments]` or `[num_segments, labels]`: what `collate` was given for each segment's document: int64
    classes, -100 for none, or float32 numbers."""
    shift_labels: Array | None = None
    """Same shape as `labels`: position t's target is the token at t + 1. Present on request."""
    columns: Mapping[str, Array] = field(default_factory=dict)
    """Other per-token values, same shape, each in its own dtype with its own pad value; includes `target_weights`."""
    plan: StepPlan | None = None
    """The plan of the step, if the loader has one. The batch then holds the whole documents of which this
    data-parallel rank computes slices, for `SliceEngine.step`; a shared document is counted on each of its ranks."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> PackedBatch:
        """Return a batch whose fields are this dict, without the constructor.

        The constructor of a frozen class sets fields one by one, which takes a good part of a small batch's time.

        Args:
            fields: every field by name, those with a default included; the batch keeps the dict.
        """
        batch = cls.__new__(cls)
        object.__setattr__(batch, "__dict__", fields)
        return batch

    def keys(self) -> NoReturn:
        """Refuse `model(**batch)`, which calls this.

        Raises:
            SettingError: always.
        """
        raise SettingError(
            "a PackedBatch is no mapping of a model's arguments, which differ by model; pass them by "
            "model(**model_inputs(batch, model)), from varlen.adapters.hf, or by name"
        )

    @property
    def num_rows(self) -> int:
        """Rows of the arrays: the number of packs, or 1 in the flat layout."""
        return int(self.input_ids.shape[0])

    @property
    def num_segments(self) -> int:
        """Pieces of documents in this batch."""
        return len(self.document_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of documents in this batch, padding not counted."""
        return int(self.document_lengths.sum())

    @property
    def target_weights(self) -> Array | None:
        """The weight of each target in the loss, which `loss_weights` includes; None where each weighs 1.

        float32, same shape as `labels`, 0 where the label is -100.
        """
        return self.columns.get(TARGET_WEIGHTS)

    @property
    def token_labels(self) -> Array | None:
        """What a head is to say of each token itself, for token classification and masked tokens; None if not given.

        int32, same shape as `labels`, -100 for none and at padding. Unlike `labels` it isn't shifted by a model, so a
        document's first token has one too.
        """
        return self.columns.get(TOKEN_LABELS)

    def group_segments(self) -> IntArray:
        """Return the segments of each group: the pairs of a reward model, the anchors and positives of an embedding.

        Returns:
            int64 `[num_groups, size]` in host memory: numbers of segments, by which to index what is computed for
            each document, such as `pooled[batch.group_segments()]`. Groups rise by number, and within a group the
            documents.

        Raises:
            SettingError: the packing has no groups.
            DocumentsError: groups that aren't all of one size, or a document in several pieces.
        """
        if self.document_groups is None:
            raise SettingError("this batch has no groups: pack with groups=, one number a document")
        groups, documents = on_host(self.document_groups), on_host(self.document_ids)
        order = np.lexsort((documents, groups)).astype(np.int64)
        _, counts = np.unique(groups, return_counts=True)
        pieces = documents.size - np.unique(documents).size
        if pieces:
            raise DocumentsError(
                f"{pieces:,} segments are further pieces of documents, and a group is made of whole ones; pack with "
                'overlong="error", "truncate" or "drop"'
            )
        if counts.size and counts.min() != counts.max():
            usual = int(np.bincount(counts).argmax())
            odd = np.unique(groups)[counts != usual]
            raise DocumentsError(
                f"{odd.size:,} of {counts.size:,} groups don't have {usual} documents as most do, group {odd[0]:,} "
                "first; groups of one size are needed here: pack those of other sizes apart"
            )
        return order.reshape(counts.size, -1)

    @property
    def packs_without_targets(self) -> IntArray:
        """int64: numbers (as in `pack_ids`) of the packs that hold no target, and so would train nothing."""
        owner = np.repeat(np.arange(len(self.pack_ids)), np.diff(on_host(self.pack_offsets)))
        targets = np.bincount(owner, weights=on_host(self.document_targets), minlength=len(self.pack_ids))
        empty: IntArray = on_host(self.pack_ids)[targets == 0]
        return empty

    def loss_scale(self, reduction: Literal["mean", "sum"] = "mean") -> float:
        """Return the factor of the *sum* of this batch's target losses that makes the step's loss a mean over tokens.

        Args:
            reduction: how the framework reduces gradients across data-parallel ranks: "mean" (DDP, FSDP)
                or "sum".

        Returns:
            `dp_world_size / step_num_targets` for "mean", `1 / step_num_targets` for "sum".

        Raises:
            SettingError: the step holds no target; skip it on all ranks. Or targets have weights, so that the mean
                isn't over their number: see `loss_weights`.
        """
        if reduction not in ("mean", "sum"):
            raise SettingError(f'reduction must be "mean" or "sum", got {reduction!r}')
        if self.target_weights is not None:
            raise SettingError(
                "targets of this batch weigh as their rows say (batch.target_weights), so the loss of a step isn't a "
                "mean over their number: sum batch.loss_weights() times the losses, and divide by the sum of these "
                "weights over the step, all batches and ranks"
            )
        if self.step_num_targets == 0:
            raise SettingError(
                "this step holds no target on any rank, so no loss scale exists; skip the step"
            )
        return (self.dp_world_size if reduction == "mean" else 1) / self.step_num_targets

    def loss_weights(self, weighting: LossWeighting = "token") -> Array:
        """Weigh every target, for losses that are not a mean over tokens.

        The loss is `sum(weight * target loss) / sum(weight)`, both sums over the whole step. With N targets
        in a document, K packs and M documents with targets in this batch, a target weighs

        - "token": 1;
        - "document": 1/N, so that every document counts the same;
        - "pair": 1 over the targets of its whole group (preference pair, rollout group);
        - "longalign": K/(N·M) (LongAlign, arXiv:2401.18058, equation 4), so that the mean over packs of
          each pack's sum is the mean over documents.

        With `target_weights`, these weights are multiplied by those of the targets, and N is the sum of a document's
        target weights: documents, pairs and packs count as before. Scaling all weights of a document changes the
        result only with "token".

        Args:
            weighting: see above.

        Returns:
            float32, same shape as `labels`; 0 where the label is -100.

        Raises:
            SettingError: "pair" without groups in the packing, or an unknown weighting.
        """
        labels, begins, lengths = on_host(self.labels), self.segment_begins, on_host(self.document_lengths)
        own = None if self.target_weights is None else on_host(self.target_weights)
        each = target_weights(
            weighting,
            on_host(self.document_targets) if own is None else sums(own.reshape(-1), begins, lengths),
            on_host(self.document_ids),
            None if self.document_groups is None else on_host(self.document_groups),
            len(self.pack_ids),
        )
        flat = spread(each, begins, lengths, labels.size).reshape(labels.shape)
        if own is not None:
            flat = flat * own
        weights = np.where(labels == IGNORE_INDEX, 0, flat).astype(np.float32)
        on_torch = not isinstance(self.labels, np.ndarray)
        return as_tensor(weights, self.labels.device, widen=False) if on_torch else weights

    def dense_mask(self, sliding_window: int | None = None, is_causal: bool = True) -> Array:
        """Return the attention mask as booleans: causal within each segment; padding attends only to itself.

        Args:
            sliding_window: attend only to this many last positions, the token itself included.
            is_causal: if not, each token attends to later ones of its segment too, with a window as far as to
                earlier ones.

        Returns:
            bool `[rows, width, width]`, True where row position q may attend to column position k; quadratic
            in the width, so for reference, small models and kernels without varlen support.
        """
        return dense_mask(self.segment_ids, self.position_ids, sliding_window, is_causal)

    def mask_function(self, sliding_window: int | None = None, is_causal: bool = True) -> Callable[..., Any]:
        """Return FlexAttention's `mask_mod(batch, head, query, key)` for this batch; needs torch.

        Args:
            sliding_window: as in `dense_mask`.
            is_causal: as in `dense_mask`.
        """
        return mask_function(self.segment_ids, sliding_window, is_causal)

    def block_mask(self, sliding_window: int | None = None, is_causal: bool = True) -> Any:
        """Return FlexAttention's `BlockMask` for this batch; needs torch.

        Args:
            sliding_window: as in `dense_mask`.
            is_causal: as in `dense_mask`.
        """
        return block_mask(self.segment_ids, sliding_window, is_causal)

    def to_torch(self, device: torch.device | str | None = None) -> PackedBatch:
        """Return the same batch as torch tensors.

        Ids, labels and positions become int64, which embedding and cross-entropy take; boundaries stay int32,
        which varlen kernels take. Tokens cross to the device as int32 and are widened there.

        Args:
            device: where to put the tensors; None keeps them in host memory, without a copy where the
                dtype allows.
        """
        fields = {name: as_tensor(getattr(self, name), device, widen=True) for name in _TOKENS}
        fields |= {name: as_tensor(getattr(self, name), device, widen=False) for name in _NUMBERS}
        columns = {name: as_tensor(column, device, widen=False) for name, column in self.columns.items()}
        return dataclasses.replace(self, **fields, columns=columns)

    def row(self, index: int) -> PackedBatch:
        """Return one row as a batch of its own, views of this batch's arrays where they can be.

        Args:
            index: which row, from 0.

        Raises:
            SettingError: no such row.
        """
        rows, width = (int(size) for size in self.input_ids.shape)
        if not isinstance(index, int | np.integer) or not -rows <= index < rows:
            raise SettingError(f"row {index!r} is out of range: this batch has {rows} rows")
        if rows == 1:
            return self
        index %= rows
        here, segments = slice(index, index + 1), slice(*map(int, self.pack_offsets[index : index + 2]))
        first, last = np.searchsorted(self._bounds(), [index * width, (index + 1) * width]).tolist()
        fields: dict[str, Any] = {
            name: None if array is None else array[here] for name, array in self._by_token().items()
        }
        fields |= {
            name: None if array is None else array[segments] for name, array in self._by_segment().items()
        }
        ends = {name: getattr(self, name) for name in ("cu_seqlens", "cu_seqlens_padded")}
        fields |= {
            name: None if end is None else end[first : last + 1] - end[first] for name, end in ends.items()
        }
        if fields["cu_seqlens_padded"] is not None and bool(
            (fields["cu_seqlens_padded"] == fields["cu_seqlens"]).all()
        ):
            fields["cu_seqlens_padded"] = None
        lengths, tokens = fields["document_lengths"], fields["input_ids"][fields["segment_ids"] >= 0]
        return dataclasses.replace(
            self,
            **fields,
            columns={name: column[here] for name, column in self.columns.items()},
            max_seqlen=int(lengths.max()) if len(lengths) else 0,
            max_token_id=int(tokens.max()) if len(tokens) else -1,
            pack_ids=self.pack_ids[here],
            pack_offsets=self.pack_offsets[index : index + 2] - self.pack_offsets[index],
            num_targets=int(fields["document_targets"].sum()),
        )

    def _by_token(self) -> dict[str, Array]:
        """Arrays shaped like `input_ids`."""
        return {name: getattr(self, name) for name in (*_TOKENS, "segment_ids")}

    def _by_segment(self) -> dict[str, Array]:
        """Arrays with one entry a segment."""
        return {name: getattr(self, name) for name in _SEGMENTS}

    def _bounds(self) -> Array:
        """Physical boundaries, in host memory."""
        return on_host(self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded)

    @property
    def segment_begins(self) -> IntArray:
        """int64 `[num_segments]`: the first position of each segment in the flattened batch; in host memory."""
        starts = self._bounds()[:-1]
        begins: IntArray = starts[on_host(self.segment_ids).reshape(-1)[starts] >= 0].astype(np.int64)
        return begins

    def replace(self, **changes: Any) -> PackedBatch:
        """Return a copy with some fields replaced.

        With new `labels`, `document_targets` and `num_targets` are counted again unless they are given, and so is
        `step_num_targets` where this batch had all targets of its step; with new `input_ids`, `max_token_id`.

        Args:
            changes: fields by name. `document_labels` are one for each segment, in the order of `document_ids`:
                numbers as `collate` takes them, also in a list. Values of tokens have the shape of `input_ids`.

        Raises:
            DocumentsError: values of another shape; labels of documents that are no numbers, or of a document that
                is cut into pieces.
            SettingError: other targets in a batch that isn't its whole step, without `step_num_targets`.

        Boundaries aren't compared with each other; `vl.check_batch` does that.
        """
        if changes.get("document_labels") is not None:
            ids, starts = (
                changes.get(name, getattr(self, name)) for name in ("document_ids", "document_starts")
            )
            found = labels_of_documents(
                changes["document_labels"], len(ids), "segments of this batch", "labels[batch.document_ids]"
            )
            refuse_labels_of_pieces(on_host(ids), on_host(starts))
            on_torch = not isinstance(ids, np.ndarray)
            changes["document_labels"] = as_tensor(found, ids.device, widen=False) if on_torch else found
        made = dataclasses.replace(self, **changes)
        _check_shapes(made)
        if "labels" in changes and not {"document_targets", "num_targets"} & set(changes):
            made = _recounted(made, self if "document_lengths" not in changes else made, changes)
        if "input_ids" in changes and "max_token_id" not in changes:
            tokens = on_host(made.input_ids)[on_host(made.segment_ids) >= 0]
            made = dataclasses.replace(made, max_token_id=int(tokens.max(initial=-1)))
        return made

    def __repr__(self) -> str:
        """Return the shape, fill and number of targets."""
        rows, width = self.input_ids.shape
        slots = rows * width
        fill = 100 * self.num_tokens / slots if slots else 100.0
        return (
            f"PackedBatch({self.layout} [{rows:,}, {width:,}], {self.num_segments:,} documents or pieces, "
            f"{self.num_tokens:,} tokens, {fill:.2f}% full, {self.num_targets:,} targets)"
        )


def _check_shapes(batch: PackedBatch) -> None:
    """Refuse arrays that don't have a value for each token, or for each segment."""
    by_token = {**batch._by_token(), **batch.columns}
    shape = tuple(getattr(batch.input_ids, "shape", ()))
    for name, array in by_token.items():
        if array is not None and tuple(getattr(array, "shape", ())) != shape:
            seen = f"of shape {list(array.shape)}" if hasattr(array, "shape") else type(array).__name__
            raise DocumentsError(
                f"{name} must be an array or tensor of shape {list(shape)}, as input_ids; got {seen}"
            )
    for name, array in batch._by_segment().items():
        if array is not None and (not hasattr(array, "shape") or len(array) != batch.num_segments):
            seen = f"{len(array):,} values" if hasattr(array, "shape") else type(array).__name__
            raise DocumentsError(
                f"{name} must be an array or tensor with one value for each of the batch's {batch.num_segments:,} "
                f"segments, as document_ids; got {seen}"
            )


def _recounted(made: PackedBatch, bounds: PackedBatch, changes: Mapping[str, Any]) -> PackedBatch:
    """Return a batch whose numbers of targets are those of its labels."""
    is_target = (on_host(made.labels) != IGNORE_INDEX).reshape(-1)
    each = sums(is_target, bounds.segment_begins, on_host(bounds.document_lengths)).astype(np.int32)
    targets, whole = int(each.sum()), made.step_num_targets
    if "step_num_targets" not in changes and targets != made.num_targets:
        if made.num_targets != whole:
            raise SettingError(
                f"the new labels hold {targets:,} targets, and there were {made.num_targets:,} of the step's "
                f"{whole:,}, by which loss_scale() divides; pass step_num_targets= as well: those of the whole step, "
                "all its batches and ranks"
            )
        whole = targets
    if not isinstance(made.document_targets, np.ndarray):
        each = as_tensor(each, made.document_targets.device, widen=False)
    return dataclasses.replace(made, document_targets=each, num_targets=targets, step_num_targets=whole)


def labels_of_documents(values: Any, count: int, of: str, wanted: str) -> npt.NDArray[Any]:
    """Return labels as an array, `[count]` or `[count, labels]`: int64 classes, or float32 numbers.

    For messages, `of` says of what they are, and `wanted` how to give as many.
    """
    if isinstance(values, list | tuple):
        values = [np.nan if one is None else one for one in values]
    try:
        array = on_host(values)
    except ValueError as error:
        raise DocumentsError(f"document_labels must be numbers, as many for each document: {error}") from None
    if array.dtype.kind not in "biuf" or array.ndim not in (1, 2):
        raise DocumentsError(
            "document_labels must be numbers, [documents] or [documents, labels]; got "
            f"{array.dtype} of shape {list(array.shape)}"
        )
    if len(array) != count:
        raise DocumentsError(
            f"document_labels: {len(array):,} labels for {count:,} {of}; give one for each, {wanted}"
        )
    if array.dtype.kind == "f" and (missing := np.isnan(array).any(tuple(range(1, array.ndim)))).any():
        raise DocumentsError(
            f"document_labels: document {np.argmax(missing):,} has no label ({missing.sum():,} of {missing.size:,} "
            "have none); leave such documents out, or give -100 as their class"
        )
    are_classes = array.dtype.kind in "biu" and array.ndim == 1
    return np.asarray(array, np.int64 if are_classes else np.float32)


def refuse_labels_of_pieces(documents: IntArray, starts: IntArray) -> None:
    """Refuse labels where a segment isn't its document's beginning."""
    if (cut := starts > 0).any():
        raise DocumentsError(
            f"document {documents[np.argmax(cut)]:,} is cut into pieces ({cut.sum():,} later pieces in this batch), "
            'and a label is for a whole document; pack with overlong="error", "truncate" or "drop"'
        )


LossWeighting = Literal["token", "document", "pair", "longalign"]


def target_weights(
    weighting: LossWeighting, targets: Any, documents: Any, groups: Any | None, num_packs: int
) -> FloatArray:
    """Return the weight of one target of each segment, as `PackedBatch.loss_weights` defines it; 0 without targets.

    `targets` is the number of targets in each segment, or the sum of their weights.
    """
    if weighting not in get_args(LossWeighting):
        raise SettingError(
            f"weighting must be one of {', '.join(get_args(LossWeighting))}; got {weighting!r}"
        )
    counts = np.asarray(targets).astype(np.float64)
    if weighting == "token":
        return np.ones_like(counts)
    if weighting == "document":
        return _shares(np.asarray(documents), counts)
    if weighting == "pair":
        if groups is None:
            raise SettingError('weighting "pair" needs groups: pack with groups=, one number a document')
        return _shares(np.asarray(groups), counts)
    assert weighting == "longalign", weighting
    with_targets = int((counts > 0).sum())
    return _reciprocals(counts) * (num_packs / with_targets if with_targets else 0.0)


def spread(weights: FloatArray, begins: Any, lengths: Any, size: int) -> Any:
    """Write each segment's weight at all of its positions, and 0 at padding; `begins` are the first positions."""
    flat = np.zeros(size, np.float64)
    owner, at = _positions(begins, lengths)
    flat[at] = weights[owner]
    return flat


def sums(values: Any, begins: Any, lengths: Any) -> FloatArray:
    """Return the sum of the values in each segment; `begins` are the first positions."""
    owner, at = _positions(begins, lengths)
    totals: FloatArray = np.zeros(lengths.size)
    np.add.at(totals, owner, values[at])
    return totals


def _positions(begins: Any, lengths: Any) -> tuple[IntArray, IntArray]:
    """Return the segment of each token, and the token's position."""
    owner = np.repeat(np.arange(lengths.size), lengths)
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    return owner, begins[owner] + np.arange(owner.size) - first[owner]


def _shares(owners: Any, counts: FloatArray) -> FloatArray:
    """Return one over the targets of each segment's owner (document or group) in this batch."""
    _, inverse = np.unique(owners, return_inverse=True)
    totals: FloatArray = np.bincount(inverse, weights=counts, minlength=1).astype(np.float64)
    return _reciprocals(totals)[inverse]


def _reciprocals(counts: FloatArray) -> FloatArray:
    """Return one over each count, 0 for 0."""
    return np.divide(1.0, counts, out=np.zeros_like(counts), where=counts > 0)


def dense_mask(
    segment_ids: Any, position_ids: Any, sliding_window: int | None = None, is_causal: bool = True
) -> Any:
    """Return bool `[rows, width, width]`: query q may attend to key k in its segment; if causal, not a later one.

    Padding attends only to itself, so that no softmax row is empty. Works on numpy arrays and on tensors, on their
    device. Quadratic in the width.
    """
    check_window(sliding_window)
    queries, keys = position_ids[:, :, None], position_ids[:, None, :]
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids >= 0)[:, :, None]
    mask = same & (keys <= queries) if is_causal else same
    if sliding_window is not None:
        mask = mask & (abs(queries - keys) < sliding_window)
    diagonal = np.arange(segment_ids.shape[1])
    mask[:, diagonal, diagonal] = True
    return mask


def check_window(sliding_window: int | None) -> None:
    """Require a window of at least one position."""
    if sliding_window is None:
        return
    try:
        positions = operator.index(sliding_window)
    except TypeError:
        positions = 0
    if positions < 1:
        raise SettingError(f"sliding_window must be a whole number of at least 1, got {sliding_window!r}")


def import_torch() -> Any:
    """Return the torch module."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError('torch is not installed; `pip install "varlen[train]"` installs it') from None
    return torch


def as_tensor(array: Any, device: torch.device | str | None, *, widen: bool) -> Any:
    """Return an array as a tensor, None as None; `widen` makes it int64 after the transfer, to halve the traffic."""
    if array is None:
        return None
    if isinstance(array, np.ndarray):
        array = import_torch().from_numpy(array if array.flags.writeable else array.copy())
    moved = array if device is None else array.to(device, non_blocking=True)
    return moved.long() if widen else moved


def on_host(array: Any) -> npt.NDArray[Any]:
    """Return an array or a tensor of any device as numpy."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def mask_function(
    segment_ids: Any, sliding_window: int | None = None, is_causal: bool = True
) -> Callable[..., Any]:
    """Return FlexAttention's `mask_mod(row, head, query, key)` for the mask of `dense_mask`."""
    check_window(sliding_window)
    owners = import_torch().as_tensor(segment_ids)

    def mask_mod(row: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG001 - FlexAttention's signature
        same = (owners[row, query] == owners[row, key]) & (owners[row, query] >= 0)
        if is_causal:
            same = same & (key <= query)
        if sliding_window is not None:
            same = same & (abs(query - key) < sliding_window)
        return same | (query == key)

    return mask_mod


def block_mask(segment_ids: Any, sliding_window: int | None = None, is_causal: bool = True) -> Any:
    """Return FlexAttention's `BlockMask`, on the device of the ids; cost grows with the squared width."""
    torch = import_torch()
    from torch.nn.attention.flex_attention import create_block_mask

    rows, width = segment_ids.shape
    device = segment_ids.device if isinstance(segment_ids, torch.Tensor) else "cpu"
    mask_mod = mask_function(segment_ids, sliding_window, is_causal)
    return create_block_mask(mask_mod, B=rows, H=None, Q_LEN=width, KV_LEN=width, device=device)
