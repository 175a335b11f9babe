"""Packed rows, or a PackedBatch, as the batch that `GPTSFTPackedDataset.collate_fn` makes, in each dialect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from varlen.adapters.megatron.batches import kernels
from varlen.adapters.megatron.batches.boundaries import TAIL, Boundaries, MegatronBatch, boundary_keys
from varlen.adapters.megatron.rows import NEWEST, Dialect, PackedRows, Where, as_dialect, near_multiples
from varlen.batch.packed import IGNORE_INDEX, TARGET_WEIGHTS, PackedBatch, on_host
from varlen.counts import many
from varlen.errors import DocumentsError, SettingError
from varlen.types import Int32Array, IntArray

_NONE_SILENT: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
_METADATA = ("max_samples_per_bin", "dataset_max_seqlen", "min_packed_seqlen")


@dataclass(frozen=True, kw_only=True)
class RowCollator:
    """What a batch of packed rows shall look like; called with rows, it makes one.

    Keys, shapes and dtypes are those of the release (0.3.1 for `"0.4"`, 0.5.1, 0.6.0). Values differ where the
    release's are wrong, unless `compatible` is set:

    - Real tokens are counted by `seq_lengths` where the rows have them. Else, with `pad_seq_to_mult` above 1, what
      follows a document's last token that is no EOS, or is trained, is padding. The releases take a real EOS at the
      end of a document for padding too.
    - An EOS is trained where the mask says so; the releases set the mask to 0 wherever the input is EOS.
    - A loss mask of fractions stays one (float32); the releases cut them to 0.
    - Padding after the last document stands in segments of at most 128, and counts as real tokens only where there
      are no padded boundaries. The releases make it one sequence, however long, that attention works through.
    - Padded boundaries are given only where they differ (or with `pad_cu_seqlens`, whose keys must not change):
      kernels that take them are slower, and some can't.
    - In `"0.4"` and `"0.5"`, `pad_cu_seqlens` gives both boundaries as many entries; the releases only one of them.
    - Without `return_cu_seqlen`, the mask keeps documents apart; the releases' lets them see each other.
    """

    eos_id: int
    """Token that pads, as in the releases."""
    dialect: Dialect = NEWEST
    max_seq_length: int | None = None
    """Most inputs of a row: the pack size."""
    pad_to_max_length: bool = False
    """Rows are `max_seq_length` wide; else as wide as the widest, rounded up."""
    pad_seq_length_to_mult: int = 16
    """Rows are rounded up to a multiple of it, but not over `max_seq_length`."""
    ceil_to_power_2: bool = False
    """Rows are rounded up to a power of 2 instead."""
    pad_seq_to_mult: int = 1
    """What documents were rounded up to when they were packed; widths are multiples of it too."""
    return_cu_seqlen: bool = True
    """Return boundaries; else an attention mask, quadratic in the width."""
    pad_cu_seqlens: bool = False
    """Return equally many boundaries in every batch, and one `max_seqlen`, for CUDA graphs."""
    pack_metadata: Sequence[Mapping[str, Any]] | None = None
    """Entries of the metadata file, which `pad_cu_seqlens` needs."""
    answer_only_loss: bool = True
    """Train where the loss mask says; else on every real token."""
    eos_in_loss: bool | None = None
    """Train where the input is EOS; None: not if `compatible`."""
    always_padded: bool | None = None
    """Return padded boundaries whenever `pad_seq_to_mult` is above 1; None: if `compatible`."""
    padding_mask: bool = False
    """Add `padding_mask`, True at padding, which routers of experts leave out; later than 0.6.0 Megatron-Bridge has
    it in every batch. In `"0.6"` `pad_between_seqs` stands beside it."""
    pad_id: int | None = None
    """Token and label after the last document; None: `eos_id`."""
    compatible: bool = False
    """Return the release's values, where they are wrong too."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dialect", as_dialect(self.dialect))
        for name in ("pad_seq_length_to_mult", "pad_seq_to_mult", "max_seq_length"):
            value = getattr(self, name)
            if not (value is None and name == "max_seq_length") and not (
                _is_whole(value) and 1 <= value < 2**31
            ):
                raise SettingError(f"{name} must be a whole number from 1 to 2^31 - 1, got {value!r}")
        for name in ("eos_id", "pad_id"):
            value = getattr(self, name)
            if not (value is None and name == "pad_id") and not (_is_whole(value) and abs(value) < 2**63):
                raise SettingError(f"{name} must be the whole number of a token, got {value!r}")
        if self.pad_to_max_length and self.max_seq_length is None:
            raise SettingError("pad_to_max_length=True needs max_seq_length, the pack size")
        most, multiple = self.max_seq_length, self.pad_seq_to_mult
        if most is not None and most % multiple and not self.compatible:
            raise SettingError(
                f"max_seq_length={most:,} is no multiple of pad_seq_to_mult={multiple:,}, so context-parallel ranks "
                f"can't share its rows; pass {near_multiples(most, multiple)}"
            )
        if self.ceil_to_power_2 and multiple & (multiple - 1) and not self.compatible:
            raise SettingError(
                f"ceil_to_power_2=True makes rows that pad_seq_to_mult={multiple:,} doesn't divide; pass a multiple "
                "that is a power of 2, or pad_seq_length_to_mult in the place of ceil_to_power_2"
            )
        if self.pad_cu_seqlens:
            self._check_static()

    def _check_static(self) -> None:
        if not self.pad_to_max_length:
            raise SettingError(
                "'pad_to_max_length=True' is required when pad_cu_seqlens is enabled: CUDA graphs need one shape"
            )
        if not self.pack_metadata:
            raise SettingError(
                "pad_cu_seqlens=True needs the metadata of the packs, which says how many documents a row has at "
                "most; pass pack_metadata_file_path (or pack_metadata)"
            )
        for number, entry in enumerate(self.pack_metadata):
            wrong = [name for name in _METADATA if not _is_whole(entry.get(name))]
            if wrong:
                raise SettingError(
                    f"entry {number} of the pack metadata has no whole number {wrong[0]!r}, which pad_cu_seqlens "
                    "needs; pack the data again, or write the metadata file anew"
                )

    def __call__(
        self, rows: PackedRows, silent: npt.ArrayLike | None = None, where: Where = "row {:,}".format
    ) -> MegatronBatch:
        """Return the batch of some rows.

        `silent`, bool `[rows]`, are rows that only complete the batch and train nothing; `where` names a row in
        messages.
        """
        stored = StoredRows.of(rows)
        lengths, used, differs = self._measured(rows, stored, where)
        width = self._width(used, where)
        is_fractional = stored.loss_mask.dtype.kind == "f" and not self.compatible and self.answer_only_loss
        # One block: from some megabytes on numpy asks for large pages, which are there a good deal sooner.
        block = np.empty((4, rows.num_rows, width), np.int64)
        tokens, labels, positions, mask = block
        if is_fractional:
            mask = np.empty(mask.shape, np.float32)
        eos_in_loss = not self.compatible if self.eos_in_loss is None else self.eos_in_loss
        kernels.fill_rows(
            *stored[:5],
            lengths,
            _NONE_SILENT if silent is None else as_silent(silent, rows.num_rows),
            int(self.answer_only_loss),
            int(eos_in_loss),
            self.eos_id,
            self.eos_id if self.pad_id is None else self.pad_id,
            tokens,
            labels,
            mask,
            positions,
        )
        batch: MegatronBatch = {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy(positions),
            "token_count": used.tolist(),
        }
        bounds = self._boundaries(stored, lengths, used, width, differs, where)
        if self.return_cu_seqlen:
            batch |= boundary_keys(bounds, self.dialect)
        else:
            batch["attention_mask"] = causal_mask(None if self.compatible else bounds, len(used), width)
        if self.padding_mask:
            batch["padding_mask"] = torch.from_numpy(padding_positions(stored, lengths, width))
            if self.dialect == "0.6" and self.return_cu_seqlen:
                batch["pad_between_seqs"] = bounds.physical is not None
        return batch

    def _measured(
        self, rows: PackedRows, stored: StoredRows, where: Where
    ) -> tuple[IntArray, IntArray, bool]:
        """Return each document's real inputs, each row's inputs, and whether any document holds padding."""
        lengths, used = np.empty(len(stored.starts), np.int64), np.empty(len(stored.offsets) - 1, np.int64)
        keep = 2 if self.pad_seq_to_mult == 1 else 0 if self.compatible else 1
        wrong, differs = kernels.measure_rows(
            *stored[:5], NOTHING if self.compatible else stored.given, keep, self.eos_id, lengths, used
        )
        if wrong >= 0:
            rows.check(where)
            raise DocumentsError(f"{where(wrong)}: offsets reach past the tokens or documents of these rows")
        return lengths, used, bool(differs)

    def _width(self, used: IntArray, where: Where) -> int:
        longest, most = int(max(used.tolist())), self.max_seq_length
        if most is not None and longest > most:
            over = used > most
            raise SettingError(
                f"{where(int(np.argmax(over)))} holds {int(used[over][0]):,} inputs but max_seq_length is {most:,} "
                f"({many(int(over.sum()), 'row')} of {len(used):,}); set it to the pack size, or pack to {most:,}"
            )
        if most is not None and self.pad_to_max_length:
            return most
        multiple = self.pad_seq_length_to_mult
        if not self.compatible:
            multiple = math.lcm(multiple, self.pad_seq_to_mult)
        width = -(-longest // multiple) * multiple
        if self.ceil_to_power_2:
            width = 1 << max(longest - 1, 0).bit_length()
        return width if most is None else min(most, width)

    def _boundaries(
        self, stored: StoredRows, lengths: IntArray, used: IntArray, width: int, differs: bool, where: Where
    ) -> Boundaries:
        multiple = self.pad_seq_to_mult
        always = self.compatible if self.always_padded is None else self.always_padded
        padded = differs or (multiple > 1 and (always or self.pad_cu_seqlens))
        tail = 0 if self.compatible else max(TAIL // multiple * multiple, multiple)
        most = self._static("max_samples_per_bin", max) + 2 if self.pad_cu_seqlens else 2**31
        entries = most
        if self.pad_cu_seqlens:
            self._check_documents(np.diff(stored.document_offsets), most - 2, where)
            if differs and multiple == 1:
                raise SettingError(
                    "documents of these rows hold padding (seq_lengths), but pad_seq_to_mult=1; pass what they were "
                    "rounded up to when they were packed, so that every batch has padded boundaries"
                )
        else:
            ends, unit = stored.document_offsets.tolist(), tail or width
            entries = 1 + max(
                end - begin - (row - width) // max(unit, 1)
                for begin, end, row in zip(ends, ends[1:], used.tolist())
            )
        logical, physical = np.empty((2, len(used), entries), np.int32)
        counts, longest = np.empty(len(used), np.int64), np.empty(len(used), np.int32)
        kernels.lay_boundaries(
            *stored[2:5],
            lengths,
            width,
            tail,
            1 if self.compatible else multiple,
            int(not padded),
            most,
            logical,
            physical,
            counts,
            longest,
        )
        max_seqlen = longest.reshape(-1, 1)
        logical_counts = counts
        if self.pad_cu_seqlens:
            max_seqlen = self._constant_max_seqlen(longest, width, where)
            counts = np.full_like(counts, most)
            logical_counts = logical_counts if self.compatible and self.dialect != "0.6" else counts
        return Boundaries(
            logical=logical,
            physical=physical if padded else None,
            counts=counts,
            logical_counts=logical_counts,
            max_seqlen=max_seqlen,
        )

    def _constant_max_seqlen(self, longest: Int32Array, width: int, where: Where) -> npt.NDArray[np.int32]:
        """Return int32 `[rows]`: one `max_seqlen` for all batches, as the metadata gives it."""
        constant = max(
            self._static("dataset_max_seqlen", max), width - self._static("min_packed_seqlen", min)
        )
        if int(longest.max()) > constant:
            row = int(longest.argmax())
            raise SettingError(
                f"{where(row)} has a segment of {int(longest[row]):,} inputs, but the pack metadata allows for "
                f"{constant:,} at most; pass the metadata of these packs"
            )
        return np.full(len(longest), constant, np.int32)

    def _check_documents(self, documents: IntArray, most: int, where: Where) -> None:
        over = documents > most
        if over.any():
            raise SettingError(
                f"{where(int(np.argmax(over)))} holds {many(int(documents[over][0]), 'document')}, but the pack "
                f"metadata says at most {most:,} (max_samples_per_bin; {many(int(over.sum()), 'row')} of "
                f"{len(documents):,}); pass the metadata of these packs"
            )

    def _static(self, name: str, choose: Any) -> int:
        return int(choose(entry[name] for entry in self.pack_metadata or ()))


def collate_rows(rows: PackedRows, *, silent: npt.ArrayLike | None = None, **settings: Any) -> MegatronBatch:
    """Return the batch of some packed rows; the same as `RowCollator(**settings)(rows, silent)`.

    Args:
        rows: packed rows, at least one.
        silent: bool `[rows]`: rows that only complete the batch and train nothing.
        settings: fields of `RowCollator`; `eos_id` is required.

    Raises:
        DocumentsError: rows that are no packed rows, or none.
        SettingError: settings that contradict each other or the rows.

    >>> import numpy as np
    >>> rows = PackedRows(
    ...     input_ids=np.array([5, 6, 7, 2, 8, 9, 2]), loss_mask=np.array([0, 1, 1, 0, 1, 1, 0]),
    ...     offsets=np.array([0, 7]), seq_start_id=np.array([0, 4]), document_offsets=np.array([0, 2]),
    ... )
    >>> batch = collate_rows(rows, eos_id=2, pad_seq_length_to_mult=8)
    >>> for name in ("tokens", "labels", "loss_mask", "cu_seqlens_q", "max_seqlen_q"):
    ...     print(name, batch[name].tolist())
    tokens [[5, 6, 7, 8, 9, 2, 2, 2]]
    labels [[6, 7, 2, 9, 2, 2, 2, 2]]
    loss_mask [[0, 1, 1, 1, 1, 0, 0, 0]]
    cu_seqlens_q [[0, 3, 5, 8]]
    max_seqlen_q [[3]]
    """
    return RowCollator(**settings)(rows, silent)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


# Packed rows in the few dtypes that the kernels of batches are compiled for.

NOTHING: IntArray = np.empty(0, dtype=np.int64)


class StoredRows(NamedTuple):
    """The arrays of `PackedRows`, each contiguous; kernels take the first five."""

    input_ids: npt.NDArray[Any]
    loss_mask: npt.NDArray[Any]
    offsets: IntArray
    starts: IntArray
    document_offsets: IntArray
    given: IntArray
    """int64 `[documents]`: real inputs of each; empty where the rows don't say."""

    @classmethod
    def of(cls, rows: PackedRows) -> StoredRows:
        """Return rows in these dtypes, without a copy where they have them."""
        if rows.num_rows < 1:
            raise DocumentsError("a batch needs at least one packed row, got none")
        if len(rows.loss_mask) != len(rows.input_ids):
            rows.check()
        mask, given = np.asarray(rows.loss_mask), rows.seq_lengths
        ids = np.asarray(rows.input_ids)
        _check_values(ids, mask)
        # Kernels read one length a document, whatever stands behind the array.
        if given is not None and given.shape != (rows.num_documents,):
            raise DocumentsError(
                f"`seq_lengths` must have one value for each of {many(rows.num_documents, 'document')}, got the "
                f"shape {given.shape}"
            )
        if mask.dtype == np.bool_:
            mask = mask.view(np.int8)
        elif mask.dtype.kind == "f":
            mask = mask.astype(np.float32, copy=False)
        elif mask.dtype != np.int8:
            mask = mask.astype(np.int64, copy=False)
        if ids.dtype not in (np.int32, np.int64):
            ids = ids.astype(np.int64)
        return cls(
            input_ids=np.ascontiguousarray(ids),
            loss_mask=np.ascontiguousarray(mask),
            offsets=np.ascontiguousarray(rows.offsets, np.int64),
            starts=np.ascontiguousarray(rows.seq_start_id, np.int64),
            document_offsets=np.ascontiguousarray(rows.document_offsets, np.int64),
            given=NOTHING if given is None else np.ascontiguousarray(given, np.int64),
        )


def as_silent(silent: npt.ArrayLike, num_rows: int) -> npt.NDArray[np.bool_]:
    """Return which rows train nothing: bool `[rows]`."""
    found = np.ascontiguousarray(silent)
    if found.dtype != np.bool_ or found.shape != (num_rows,):
        raise SettingError(
            f"silent must be {many(num_rows, 'boolean')}, one per row; got {found.dtype} of the shape {found.shape}"
        )
    return found


def _check_values(ids: npt.NDArray[Any], mask: npt.NDArray[Any]) -> None:
    """Refuse tokens and masks that no kernel can take, or that would train nonsense."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DocumentsError(
            f"`input_ids` must be whole numbers of one dimension, got {ids.dtype} of the shape {ids.shape}"
        )
    if ids.dtype == np.uint64 and len(ids) and int(ids.max()) > np.iinfo(np.int64).max:
        raise DocumentsError(f"`input_ids` hold {int(ids.max())}, which is no token")
    if mask.ndim != 1 or mask.dtype.kind not in "biuf":
        raise DocumentsError(
            f"`loss_mask` must be numbers of one dimension, got {mask.dtype} of shape {mask.shape}"
        )
    if mask.dtype.kind == "f" and not np.isfinite(mask).all():
        wrong = np.flatnonzero(~np.isfinite(mask))
        raise DocumentsError(
            f"`loss_mask` holds {mask[wrong[0]]} at stored token {int(wrong[0]):,} ({len(wrong):,} of {len(mask):,} "
            "values aren't finite)"
        )


# Masks of a batch of packed rows: which token may see which, and which positions are padding.


def causal_mask(bounds: Boundaries | None, num_rows: int, width: int) -> torch.Tensor:
    """Return which position may not see which: bool `[rows, 1, width, width]`, quadratic in the width."""
    later = torch.ones((width, width), dtype=torch.bool).triu_(1)
    if bounds is None:
        return later.expand(num_rows, 1, width, width).contiguous()
    physical = bounds.logical if bounds.physical is None else bounds.physical
    positions = np.arange(width)
    segments = np.stack([np.searchsorted(row, positions, side="right") for row in physical])
    owner = torch.from_numpy(segments)
    return ((owner[:, :, None] != owner[:, None, :]) | later).unsqueeze(1)


def padding_positions(stored: StoredRows, lengths: IntArray, width: int) -> npt.NDArray[np.bool_]:
    """Return which positions are padding, bool `[rows, width]`, by the real inputs of each document."""
    num_rows = len(stored.offsets) - 1
    changes = np.zeros(num_rows * width + 1, np.int64)
    owners = np.repeat(np.arange(num_rows), np.diff(stored.document_offsets))
    within = np.arange(len(owners)) - stored.document_offsets[owners]
    begins = owners * width + stored.starts - within
    np.add.at(changes, begins, 1)
    np.add.at(changes, begins + lengths, -1)
    is_padding: npt.NDArray[np.bool_] = np.cumsum(changes[:-1]).reshape(num_rows, width) == 0
    return is_padding


# varlen's own batches (`vl.collate`, `vl.PackedLoader`) in the keys that Megatron-Bridge's trainers read.


def megatron_batch(
    batch: PackedBatch,
    dialect: str = NEWEST,
    *,
    weights: str | npt.ArrayLike | None = None,
    always_padded: bool = False,
    padding_mask: bool = False,
    total_tokens: bool = False,
) -> MegatronBatch:
    """Return a batch as a trainer of Megatron reads it.

    Here a label stands at its own token; there it stands at the token before, so that labels and mask are moved by
    one within each document, never across. A document's last position, which predicts nothing, has mask 0 and
    `pad_id` for a label.

    Args:
        batch: in either layout, as numpy arrays or tensors. `layout="rows"` gives as many rows, of which
            `split_microbatches` makes micro-batches of one; `layout="flat"` gives one row.
        dialect: `"0.4"`, `"0.5"` or `"0.6"`, or a release.
        weights: weight of each target, standing where its label stands in `batch.labels`: the name of one of its
            `columns`, or an array such as `batch.loss_weights("document")`. None: `batch.target_weights`, where
            rows weigh their targets, else 1 each.
        always_padded: give padded boundaries even where slots are as long as documents.
        padding_mask: add `padding_mask`, True at padding, for routers of experts.
        total_tokens: add `total_tokens`, from which `get_packed_seq_params` makes the `seq_idx` of recurrent layers.

    Returns:
        `tokens`, `labels`, `position_ids` int64 `[rows, width]`; `loss_mask` int64, or float32 with weights;
        `token_count`, tokens of each row; and the boundaries of the dialect, which cover the padding too: in segments
        of at most 128, and without real tokens where there are padded boundaries. Boundaries are `[rows, entries]`.

    Raises:
        SettingError: an unknown dialect, or weights that are not there, of another shape, or not
            finite.

    >>> import varlen as vl
    >>> packing = vl.pack([3, 2], capacity=8)
    >>> batch = megatron_batch(vl.collate([[5, 6, 7], [8, 9]], packing))
    >>> for name in ("tokens", "labels", "loss_mask", "cu_seqlens_q"):
    ...     print(name, batch[name].tolist())
    tokens [[5, 6, 7, 8, 9, 0, 0, 0]]
    labels [[6, 7, 0, 9, 0, 0, 0, 0]]
    loss_mask [[1, 1, 0, 1, 0, 0, 0, 0]]
    cu_seqlens_q [[0, 3, 5, 8]]
    """
    spelled = as_dialect(dialect)
    tokens, segments = on_host(batch.input_ids), on_host(batch.segment_ids)
    shape = (int(tokens.shape[0]), int(tokens.shape[1]))
    follows = np.zeros(shape, dtype=np.bool_)
    follows[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    targets = _moved(on_host(batch.labels), IGNORE_INDEX)
    trained = follows & (targets != IGNORE_INDEX)
    labels = np.where(trained, targets, np.where(follows, _moved(tokens, batch.pad_id), batch.pad_id))
    mask = trained.astype(np.int64)
    if weights is None and batch.target_weights is not None:
        weights = batch.target_weights
    if weights is not None:
        mask = _weighted(trained, _moved(_weights(batch, weights), 0))
    is_real = segments >= 0
    keys: MegatronBatch = {
        "tokens": torch.from_numpy(tokens.astype(np.int64)),
        "labels": torch.from_numpy(labels.astype(np.int64)),
        "loss_mask": torch.from_numpy(mask),
        "position_ids": torch.from_numpy(on_host(batch.position_ids).astype(np.int64)),
        "token_count": is_real.sum(axis=1).tolist(),
    }
    bounds = _row_boundaries(batch, segments, always_padded)
    keys |= boundary_keys(bounds, spelled)
    if padding_mask:
        keys["padding_mask"] = torch.from_numpy(~is_real)
        if spelled == "0.6":
            keys["pad_between_seqs"] = bounds.physical is not None
    if total_tokens:
        keys["total_tokens"] = shape[1]
    return keys


def _moved(values: npt.NDArray[Any], last: object) -> npt.NDArray[Any]:
    moved = np.empty_like(values)
    moved[:, :-1], moved[:, -1:] = values[:, 1:], last
    return moved


def _weighted(trained: npt.NDArray[np.bool_], weights: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return float32 `[rows, width]`: the weight of each trained position, 0 elsewhere."""
    with np.errstate(over="ignore"):
        mask: npt.NDArray[np.float32] = np.where(trained, weights, 0).astype(np.float32)
    wrong = ~np.isfinite(mask)
    if wrong.any():
        raise SettingError(
            f"weights hold {weights[wrong][0]} ({int(wrong.sum()):,} of {int(trained.sum()):,} targets aren't finite "
            "in float32)"
        )
    return mask


def _weights(batch: PackedBatch, weights: str | npt.ArrayLike) -> npt.NDArray[Any]:
    if isinstance(weights, str):
        if weights not in batch.columns:
            there = ", ".join(map(repr, batch.columns)) or "none"
            raise SettingError(f"the batch has no column {weights!r} to weigh targets with; it has {there}")
        if batch.target_weights is not None and weights != TARGET_WEIGHTS:
            raise SettingError(
                "targets of this batch weigh as their rows say (batch.target_weights), and by the column "
                f"{weights!r}; pass an array that takes both in"
            )
        weights = on_host(batch.columns[weights])
    found = np.asarray(on_host(weights) if isinstance(weights, torch.Tensor) else weights)
    if found.shape != tuple(batch.labels.shape):
        raise SettingError(
            f"weights must have the labels' shape, {tuple(batch.labels.shape)}; got {found.shape}"
        )
    if found.dtype.kind not in "biuf":
        raise SettingError(f"weights must be numbers, got {found.dtype}")
    return found


def _row_boundaries(batch: PackedBatch, segments: npt.NDArray[Any], always_padded: bool) -> Boundaries:
    num_rows, width = segments.shape
    logical = on_host(batch.cu_seqlens).astype(np.int64)
    is_padded = batch.cu_seqlens_padded is not None
    physical = on_host(batch.cu_seqlens_padded).astype(np.int64) if is_padded else logical
    sizes, reals = np.diff(physical), np.diff(logical)
    begins = physical[:-1]
    padded = is_padded or always_padded
    if padded:
        at = np.minimum(begins, segments.size - 1) if segments.size else begins
        is_padding = (segments.reshape(-1)[at] < 0) & (sizes > 0)
        reals = np.where(is_padding, 0, reals)
    owners = np.minimum(begins // max(width, 1), num_rows - 1)
    counts = np.bincount(owners, minlength=num_rows).astype(np.int64) + 1
    shape = num_rows, int(counts.max(initial=1))
    return Boundaries(
        logical=_cumulated(reals, owners, counts, shape),
        physical=_cumulated(sizes, owners, counts, shape) if padded else None,
        counts=counts,
        logical_counts=counts,
        max_seqlen=_longest(sizes, owners, num_rows),
    )


def _cumulated(sizes: IntArray, owners: IntArray, counts: IntArray, shape: tuple[int, int]) -> Int32Array:
    """Return int32 `[rows, entries]`: sizes summed up within each row; 0 before the first and nothing behind."""
    table = np.zeros(shape, np.int32)
    within = np.arange(len(sizes)) - (np.cumsum(counts - 1) - (counts - 1))[owners]
    table[owners, within + 1] = sizes
    return np.cumsum(table, axis=1, dtype=np.int32)


def _longest(sizes: IntArray, owners: IntArray, num_rows: int) -> Int32Array:
    """Return int32 `[rows, 1]`: the longest segment of each row."""
    longest = np.zeros(num_rows, np.int32)
    np.maximum.at(longest, owners, sizes.astype(np.int32))
    return longest.reshape(-1, 1)
