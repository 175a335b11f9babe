"""GivenBatch: a mapping or PackedBatch as arrays in host memory; and Segments: where its documents begin.

Tensors of one device are copied in one transfer, so that the host waits for a GPU only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.batch.packed import PackedBatch
from varlen.counts import many
from varlen.errors import DocumentsError, SettingError

BoolArray: TypeAlias = npt.NDArray[np.bool_]
IntArray: TypeAlias = npt.NDArray[np.int64]

BY_TOKEN = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask", "seq_idx")
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")
CACHES = ("past_key_values", "cache")  # before transformers 5.24, and from then on
OTHER_ENDS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens")
OTHER_NUMBERS = ("segment_ids", "sequence_ids", "document_ids", "doc_ids")
OTHER_LENGTHS = ("seq_lengths", "seq_lens")
"""Other projects' names of boundaries, which transformers' models accept and ignore."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenBatch:
    """A batch as arrays, by the names of a transformers model's arguments."""

    arrays: Mapping[str, IntArray]
    """The given arrays of `BY_TOKEN` and `BOUNDARIES`, as int64 in any shape, without finished masks."""
    dtypes: Mapping[str, str]
    """The original dtype of each array."""
    longest: Mapping[str, int] = field(default_factory=dict)
    """The given numbers of `LONGEST`."""
    finished_mask: Any = None
    """A 4-D attention mask, a `BlockMask`, or one of them for each kind of layer, which models use unchanged."""
    use_cache: bool | None = None
    """None if it wasn't given."""
    has_cache: bool = False
    """Whether a cache was given, by one of `CACHES`."""
    segment_ids: IntArray | None = None
    """`[rows, width]`, -1 at padding; only of a PackedBatch, or where the caller gave the lengths."""
    unread: Mapping[str, IntArray] = field(default_factory=dict)
    """Boundaries under names that models ignore (`OTHER_ENDS` and others), as the document number of every token."""
    packed: PackedBatch | None = None
    """The batch, if it is a PackedBatch; `model_inputs` will make its arguments."""

    @property
    def input_ids(self) -> IntArray:
        """`[rows, width]`."""
        return self.arrays["input_ids"]

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return int(self.input_ids.shape[0])

    @property
    def width(self) -> int:
        """Tokens of a row, padding included."""
        return int(self.input_ids.shape[1])

    def by_token(self, name: str) -> IntArray | None:
        """Return an array shaped like `input_ids`, or None if it wasn't given or has another shape.

        One row of positions is used for all rows. Of M-RoPE positions, the first row is returned.
        """
        array = self.arrays.get(name)
        if array is None:
            return None
        if name == "position_ids":
            if array.ndim == 3:
                array = array[0]
            if array.ndim == 2 and len(array) == 1:
                array = np.broadcast_to(array, (self.rows, array.size))
        return array if array.shape == self.input_ids.shape else None


def read(batch: Any, lengths: Any = None) -> GivenBatch:
    """Read a batch into host memory; `lengths` are those of its documents, as `check_batch` takes them."""
    if isinstance(batch, PackedBatch):
        if lengths is not None:
            raise SettingError("a PackedBatch holds its documents' lengths; leave out lengths=")
        return _read_packed(batch)
    if not isinstance(batch, Mapping):
        raise DocumentsError(
            "check_batch takes a PackedBatch or a mapping such as a collator returns, and was given "
            f"{type(batch).__name__}"
        )
    if batch.get("input_ids") is None:
        named = ", ".join(map(str, batch)) or "nothing"
        raise DocumentsError(f'the batch has no "input_ids" (it has {named}), so there is nothing to check')
    given = {name: batch[name] for name in (*BY_TOKEN, *BOUNDARIES) if batch.get(name) is not None}
    mask = given.get("attention_mask")
    finished = mask if mask is not None and _is_finished(mask) else None
    if finished is not None:
        del given["attention_mask"]
    numbers = {name: batch[name] for name in LONGEST if batch.get(name) is not None}
    arrays, dtypes = _on_host(given | numbers)
    longest = {name: _number(name, arrays.pop(name)) for name in numbers}
    _check_rectangle(arrays["input_ids"])
    use_cache = batch.get("use_cache")
    return GivenBatch(
        arrays=arrays,
        dtypes=dtypes,
        longest=longest,
        finished_mask=finished,
        unread=dict(_unread(batch, arrays["input_ids"].shape)),
        segment_ids=None if lengths is None else _stated(lengths, arrays["input_ids"].shape),
        use_cache=None if use_cache is None else bool(use_cache),
        has_cache=any(batch.get(name) is not None for name in CACHES),
    )


def _stated(lengths: Any, shape: tuple[int, ...]) -> IntArray:
    """Return the document number of every token by lengths that the caller gave, -1 at padding; `[rows, width]`."""
    rows, width = shape
    listed = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
    nested = [listed] if not is_list or not listed or not isinstance(listed[0], Sequence) else listed
    if not all(isinstance(own, Sequence) and all(isinstance(n, Integral) for n in own) for own in nested):
        raise SettingError(
            "lengths must be whole numbers of tokens: a list for a batch of one row, or a list for each row; got "
            f"{str(lengths)[:60]}"
        )
    if len(nested) != rows:
        raise SettingError(
            f"lengths are those of {many(len(nested), 'row')}, and the batch has {rows:,}; give a list for each row"
        )
    numbers: IntArray = np.full(shape, -1)
    for row, given in enumerate(nested):
        own = np.array([*given, 0][: max(1, len(given))], dtype=np.int64)
        if (own < 0).any() or own.sum() > width:
            raise SettingError(
                f"the lengths of row {row:,} must be at least 0 and add up to at most its {many(width, 'token')}; "
                f"they add up to {int(own.sum()):,}, and the smallest is {int(own.min()):,}"
            )
        numbers[row, : own.sum()] = np.repeat(np.arange(len(own)), own)
    return numbers


def _unread(batch: Mapping[str, Any], shape: tuple[int, ...]) -> Iterator[tuple[str, IntArray]]:
    """Yield valid boundaries under names that no model reads, as document numbers of tokens."""
    for name in (*OTHER_ENDS, *OTHER_NUMBERS, *OTHER_LENGTHS):
        value = batch.get(name)
        if value is None:
            continue
        try:
            array = next(iter(_on_host({name: value})[0].values()))
        except DocumentsError:
            continue
        if name in OTHER_NUMBERS:
            if array.shape == shape:
                yield name, array
            continue
        lengths = array.reshape(-1) if name in OTHER_LENGTHS else np.diff(array.reshape(-1))
        first = 0 if name in OTHER_LENGTHS or not array.size else int(array.reshape(-1)[0])
        if first == 0 and len(lengths) and (lengths >= 0).all() and lengths.sum() == shape[0] * shape[1]:
            yield name, np.repeat(np.arange(len(lengths)), lengths).reshape(shape)


def _read_packed(batch: PackedBatch) -> GivenBatch:
    slots = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    fields = {
        "input_ids": batch.input_ids,
        "labels": batch.labels,
        "shift_labels": batch.shift_labels,
        "position_ids": batch.position_ids,
        "cu_seq_lens_q": slots,
        "segment_ids": batch.segment_ids,
    }
    arrays, dtypes = _on_host({name: value for name, value in fields.items() if value is not None})
    segment_ids = arrays.pop("segment_ids")
    _check_rectangle(arrays["input_ids"])
    return GivenBatch(
        arrays=arrays,
        dtypes=dtypes,
        use_cache=False,
        segment_ids=segment_ids if segment_ids.shape == arrays["input_ids"].shape else None,
        packed=batch,
    )


def _check_rectangle(ids: IntArray) -> None:
    if ids.ndim != 2:
        raise DocumentsError(
            f"input_ids must be [rows, width], and has the shape {list(ids.shape)}; a single row is "
            "input_ids[None]"
        )


def _is_finished(mask: Any) -> bool:
    """Whether models use this mask unchanged: 4-D, a `BlockMask`, or one for each kind of layer."""
    return isinstance(mask, Mapping) or len(getattr(mask, "shape", ())) == 4


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "device")


def _on_host(given: Mapping[str, Any]) -> tuple[dict[str, IntArray], dict[str, str]]:
    """Return int64 arrays, and their original dtypes; one transfer for each device."""
    arrays, dtypes = {}, {}
    tensors: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        if _is_tensor(value):
            dtypes[name] = str(value.dtype).removeprefix("torch.")
            tensors.setdefault(str(value.device), {})[name] = value.detach()
        else:
            arrays[name], dtypes[name] = _from_numbers(name, value)
    for device, of_device in tensors.items():
        arrays |= _host_tensors(of_device) if device == "cpu" else _in_one_transfer(of_device)
    return arrays, dtypes


def _from_numbers(name: str, value: Any) -> tuple[IntArray, str]:
    """Return an array, list or number as int64, with its dtype."""
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise ValueError
        with np.errstate(invalid="ignore"):
            return array.astype(np.int64), str(array.dtype)
    except (ValueError, TypeError, RuntimeError):
        raise DocumentsError(
            f"{name} is no rectangle of numbers but a {type(value).__name__} whose rows differ in length, or whose "
            "entries aren't numbers; pad the rows, or flatten them into one"
        ) from None


def _host_tensors(tensors: Mapping[str, Any]) -> dict[str, IntArray]:
    return {name: tensor.long().numpy() for name, tensor in tensors.items()}


def _in_one_transfer(tensors: Mapping[str, Any]) -> dict[str, IntArray]:
    """Copy all tensors of a device in one transfer."""
    import torch

    if any(tensor.is_meta for tensor in tensors.values()):
        raise DocumentsError(
            f"{', '.join(tensors)}: tensors on the meta device hold no numbers; pass those of a real batch"
        )
    flat: IntArray = torch.cat([tensor.reshape(-1).long() for tensor in tensors.values()]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors.values()])[:-1]
    parts = np.split(flat, ends)
    return {
        name: part.reshape(tuple(tensor.shape))
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def _number(name: str, array: IntArray) -> int:
    if array.size != 1:
        raise DocumentsError(f"{name} must be one number, and has the shape {list(array.shape)}")
    return int(array.reshape(-1)[0])


# Segments.
#
# A position *starts* a segment if the one before it belongs to another segment. Padding in which each position is a
# segment (positions 0, 0, 0) is no document, and may attend to anything.


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Where documents and padding are; bool arrays `[rows, width]`."""

    starts_by: Mapping[str, BoolArray]
    """Where segments start by each argument that defines boundaries; the first column always does."""
    starts: BoolArray
    """The union of these."""
    padding: BoolArray
    """Positions of no document."""
    follows: BoolArray
    """Starts with unmasked positions before them in their row; includes padding of one token."""
    needed: BoolArray
    """Starts of documents with unmasked positions before them, from which they must be isolated."""

    @property
    def is_packed(self) -> bool:
        """Whether any row holds several documents."""
        return bool(self.needed.any())

    @property
    def documents(self) -> int:
        """Number of documents, padding not counted."""
        return int((self.starts & ~self.padding).sum())

    def numbers(self) -> IntArray:
        """Number the segments over the flattened batch, padding included; `[rows * width]`."""
        numbers: IntArray = self.starts.reshape(-1).cumsum() - 1
        return numbers


def segments_of(given: GivenBatch, only: str | None = None) -> Segments:
    """Find where documents begin: by all arguments, or by `only` one of them."""
    starts_by = dict(_starts_by(given))
    starts = np.zeros((given.rows, given.width), dtype=bool)
    starts[:, :1] = True
    for name, starts_of_one in starts_by.items():
        if only in (None, name):
            starts |= starts_of_one
    masked = _masked(given)
    maybe_padding = _maybe_padding(given, starts_by, starts)
    unmasked = ~masked
    has_previous = np.zeros_like(starts)
    has_previous[:, 1:] = np.logical_or.accumulate(unmasked, axis=1)[:, :-1]
    return Segments(
        starts_by=starts_by,
        starts=starts,
        padding=masked | (maybe_padding & _in_runs_of_padding(given, maybe_padding)),
        follows=starts & unmasked & has_previous,
        needed=starts & unmasked & has_previous & ~maybe_padding,
    )


class Clash(NamedTuple):
    """Two arguments, each of which begins documents where the other begins none."""

    one: str
    other: str
    only_one: BoolArray
    only_other: BoolArray

    @property
    def places(self) -> BoolArray:
        """The starts by either of them alone."""
        return self.only_one | self.only_other

    def of(self, name: str) -> BoolArray:
        """The starts by one of the two arguments alone."""
        return self.only_one if name == self.one else self.only_other


def clash_of(segments: Segments) -> Clash | None:
    """Return the first two arguments that tell different documents; None if one's starts include the other's.

    Where the caller gave the lengths, other arguments are compared with these.
    """
    for one, other in combinations(segments.starts_by, 2):
        if "lengths" in segments.starts_by and other != "lengths":
            continue
        by_one, by_other = segments.starts_by[one], segments.starts_by[other]
        only_one = segments.needed & by_one & ~by_other
        only_other = segments.needed & by_other & ~by_one
        if only_one.any() and only_other.any():
            return Clash(one, other, only_one, only_other)
    return None


def breaks(values: IntArray, step: int) -> BoolArray:
    """Return where a row doesn't change by `step` from one column to the next; true in the first column."""
    starts = np.ones(values.shape, dtype=bool)
    np.not_equal(values[:, 1:], values[:, :-1] + step, out=starts[:, 1:])
    return starts


def usable_ends(given: GivenBatch, name: str = "cu_seq_lens_q") -> IntArray | None:
    """Return boundaries that run from 0 to the number of tokens without falling, or None."""
    ends = given.arrays.get(name)
    if ends is None or ends.ndim != 1 or len(ends) < 2:
        return None
    whole = ends[0] == 0 and ends[-1] == given.rows * given.width and bool((np.diff(ends) >= 0).all())
    return ends if whole else None


def segment_mask(given: GivenBatch) -> IntArray | None:
    """Return the attention mask if it numbers segments (1, 1, 2, 2, 0), else None."""
    mask = given.by_token("attention_mask")
    return mask if mask is not None and mask.size and int(mask.max()) > 1 else None


def _starts_by(given: GivenBatch) -> Mapping[str, BoolArray]:
    """Return the starts of segments by each argument."""
    starts_by = {}
    if (positions := given.arrays.get("position_ids")) is not None and positions.ndim == 3:
        # Image positions jump within a document; at its first token all of them are 0.
        first = given.by_token("position_ids")
        if len(positions) == 4 and first is not None:
            starts_by["position_ids"] = breaks(first, 1)
        elif positions.shape[1:] == given.input_ids.shape:
            starts_by["position_ids"] = (positions == 0).all(axis=0)
    elif (plain := given.by_token("position_ids")) is not None:
        starts_by["position_ids"] = breaks(plain, 1)
    if (ends := usable_ends(given)) is not None:
        starts = np.zeros(given.rows * given.width, dtype=bool)
        starts[ends[:-1][np.diff(ends) > 0]] = True
        starts_by["cu_seq_lens_q"] = starts.reshape(given.rows, given.width)
    if (numbers := given.by_token("seq_idx")) is not None:
        starts_by["seq_idx"] = breaks(numbers, 0)
    if (mask := segment_mask(given)) is not None:
        starts_by["attention_mask"] = breaks(mask, 0)
    starts_by |= {name: breaks(numbers, 0) for name, numbers in given.unread.items()}
    if given.segment_ids is not None:
        starts_by["segment_ids" if given.packed else "lengths"] = breaks(given.segment_ids, 0)
    return starts_by


def _masked(given: GivenBatch) -> BoolArray:
    """Return the positions that the batch marks as padding."""
    if given.segment_ids is not None:
        padding: BoolArray = given.segment_ids < 0
        return padding
    mask = given.by_token("attention_mask")
    return np.zeros(given.input_ids.shape, dtype=bool) if mask is None else mask == 0


def _maybe_padding(given: GivenBatch, starts_by: Mapping[str, BoolArray], starts: BoolArray) -> BoolArray:
    """Return the positions that may be padding: segments of one position or of one repeated token, no targets."""
    labels = given.by_token("labels")
    without_target = np.ones(starts.shape, dtype=bool) if labels is None else labels == -100
    if given.segment_ids is not None:
        return np.zeros_like(starts)  # whose padding is known
    if "position_ids" in starts_by:
        single = without_target & _single(starts_by["position_ids"])
        return single if labels is None else single | _tails(given, starts, without_target)
    if not starts_by:
        return np.zeros_like(starts)
    return _repeated(given, starts, without_target)


def _tails(given: GivenBatch, starts: BoolArray, without_target: BoolArray) -> BoolArray:
    """Return segments at the ends of rows with one repeated token and no target: padding with its own positions."""
    last = np.zeros_like(starts)
    if starts.size:
        numbers = starts.cumsum(axis=1)
        last = (numbers == numbers[:, -1:]) & (numbers > 1)
    return last & _repeated(given, starts, without_target)


def _repeated(given: GivenBatch, starts: BoolArray, without_target: BoolArray) -> BoolArray:
    """Return segments of one repeated token without a target: padding of any length."""
    ids, flat = given.input_ids.reshape(-1), starts.reshape(-1)
    first = np.flatnonzero(flat)
    if not len(first):
        return np.zeros_like(starts)
    differs = ids != ids[first][flat.cumsum() - 1]
    same = ~np.logical_or.reduceat(differs | ~without_target.reshape(-1), first)
    lengths = np.diff(np.append(first, len(ids)))
    return np.repeat(same, lengths).reshape(starts.shape)


def _single(starts: BoolArray) -> BoolArray:
    """Return the segments of one position."""
    single = starts.copy()
    single[:, :-1] &= starts[:, 1:]
    return single


def _in_runs_of_padding(given: GivenBatch, maybe_padding: BoolArray) -> BoolArray:
    """Return possible padding next to possible padding of the same token, or at the end of a row.

    A document of one token looks like padding; between others it counts as a document.
    """
    ids = given.input_ids
    run = np.zeros_like(maybe_padding)
    run[:, -1:] = True
    twin = maybe_padding[:, 1:] & maybe_padding[:, :-1] & (ids[:, 1:] == ids[:, :-1])
    run[:, 1:] |= twin
    run[:, :-1] |= twin
    return run
