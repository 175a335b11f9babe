"""TRL's DataCollatorForLanguageModeling by its own name: padded rows, or packed rows laid end to end in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.adapters.features import (
    TAKEN,
    Features,
    as_columns,
    as_torch_has_them,
    columns_to_carry,
    finish,
    flash_arguments,
    required,
    warn_of_weights,
)
from varlen.arguments import as_count
from varlen.batch.flatten import flatten
from varlen.batch.packed import import_torch
from varlen.errors import DocumentsError, SettingError
from varlen.pack.lengths import as_lengths
from varlen.ragged import Joined, as_whole, join
from varlen.types import IntArray

RowLengths: TypeAlias = Sequence[Sequence[int]]  # of each row the lengths of its documents, in TRL's form
_MASKS = ("completion_mask", "assistant_masks")
_NEEDED = ("input_ids", "labels", "attention_mask", "seq_lengths", *_MASKS)


@dataclass
class DataCollatorForLanguageModeling:
    """Pad rows of one document each; with `padding_free=True` lay rows of several, as of `pack_dataset`, end to end.

    Arguments, their defaults and outputs are those of TRL 1.16's collator, value for value. It differs where that one
    goes wrong:

    - Padding has segments of at most 128 tokens. There each token of it is a segment of its own: 8,000 tokens of
      padding are 8,000 segments for every kernel of every layer.
    - Ids are int64 always. There an empty sequence turns them into float32, and int32 arrays stay int32.
    - Labels of another length than the ids, lengths that don't add up to their row, and labels or `seq_lengths` that
      only some rows have, are errors. With `padding_free`, a row without tokens is left out; padded, it is a row of
      padding.
    - Rows with a `completion_mask` or `assistant_masks` and no labels are an error: the masks would be lost, and
      prompts trained on.
    - Rows of several documents (`seq_lengths`) are refused in padded rows, where they see each other.
    - Tokens with an `attention_mask` of 0 are left out. There they are trained on.

    >>> collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    >>> batch = collate([{"input_ids": [11, 12, 21, 22, 23], "seq_lengths": [2, 3]}])
    >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
    ([[0, 1, 0, 1, 2]], [0, 2, 5])
    """

    pad_token_id: int
    """Token id at padding."""
    padding_free: bool = False
    """Lay the rows end to end in one, with positions and boundaries and without an attention mask."""
    return_position_ids: bool = False
    """Return positions beside padded rows too; rows end to end always have them."""
    pad_to_multiple_of: int | None = None
    """Round the width of the row up to this multiple."""
    return_tensors: Literal["pt"] = "pt"
    """Must be "pt"."""
    _: KW_ONLY
    columns: tuple[str, ...] | None = ()
    """Names of other columns to carry along; None for all that hold one number per token in every row."""
    column_pads: Mapping[str, Any] = field(default_factory=dict)
    """Values of such columns at padding, 0 where not named."""

    def __post_init__(self) -> None:
        _check_form(self.return_tensors)
        if self.pad_to_multiple_of is not None:
            as_count(self.pad_to_multiple_of, "pad_to_multiple_of")

    def __call__(self, examples: Features, return_tensors: str | None = None) -> dict[str, Any]:
        """Return a batch: a row for each example, or one of all.

        Returns:
            `input_ids`, `labels`, perhaps `position_ids`, and `attention_mask` int64 `[rows, width]`. With
            `padding_free`: `input_ids`, `labels` and `position_ids` int64 `[1, width]`, `cu_seq_lens_q` and
            `cu_seq_lens_k` int32 `[segments + 1]`, `max_length_q` and `max_length_k` as Python ints, `seq_idx` int32
            `[1, width]`.

        Cost: one pass over the tokens; from lists, 4 ns for each int.
        """
        self.__post_init__()  # settings may have been written since
        _check_form("pt" if return_tensors is None else return_tensors)
        columns = as_columns(examples, {*_NEEDED, *(self.columns or ())})
        documents, labels = required(columns, "input_ids"), columns.get("labels")
        masks = [name for name in _MASKS if name in columns]
        if masks and labels is None:
            raise DocumentsError(
                f"rows have {masks[0]!r} and no 'labels', and would be trained on as a whole; give them labels, -100 "
                "where nothing is to be learned"
            )
        carried = columns_to_carry(columns, self.columns, {*TAKEN, "seq_lengths", *_MASKS})
        warn_of_weights(columns, carried)
        keep, lengths = columns.get("attention_mask"), columns.get("seq_lengths")
        pads = {name: pad for name, pad in self.column_pads.items() if name in carried}
        if not self.padding_free:
            rows = padded_rows(
                documents,
                labels,
                keep,
                lengths,
                carried,
                pad_id=self.pad_token_id,
                multiple=self.pad_to_multiple_of or 1,
                column_pads=pads,
                positions=self.return_position_ids,
            )
            return finish(as_torch_has_them(rows, carried), "pt")
        row = flatten(
            documents,
            labels,
            keep,
            carried,
            lengths=lengths,
            pad_id=self.pad_token_id,
            pad_to_multiple_of=self.pad_to_multiple_of or 1,
            column_pads=pads,
        )
        arrays: dict[str, Any] = {"input_ids": row.input_ids, "labels": row.labels}
        arrays["position_ids"] = row.position_ids
        batch = finish({name: array[None] for name, array in arrays.items()}, "pt")
        others = {"seq_idx": row.owners, **as_torch_has_them(row.columns, carried)}
        batch |= flash_arguments(row, "pt")
        return batch | finish(
            {name: array[None] for name, array in others.items() if array is not None}, "pt"
        )

    torch_call = __call__

    @staticmethod
    def get_position_ids_from_packed_seq_lengths(batch_seq_lengths: RowLengths) -> list[Any]:
        """Return the positions of rows, an int64 tensor each.

        Args:
            batch_seq_lengths: of each row the lengths of its documents.

        Raises:
            LengthsError: lengths that aren't whole numbers from 0.
        """
        torch = import_torch()
        rows = [as_lengths(lengths).tolist() for lengths in batch_seq_lengths]
        nothing = torch.empty(0, dtype=torch.int64)
        return [torch.cat([nothing, *map(torch.arange, lengths)]) for lengths in rows]


def _check_form(return_tensors: object) -> None:
    if return_tensors != "pt":
        raise SettingError(f'return_tensors must be "pt", as in TRL; got {return_tensors!r}')


# Rows of one document each, padded at their right to the longest, as TRL's collator gives them by default.


def padded_rows(
    documents: Any,
    labels: Any,
    keep: Any,
    lengths: Any,
    columns: Mapping[str, Any],
    *,
    pad_id: int,
    multiple: int,
    column_pads: Mapping[str, Any],
    positions: bool,
) -> dict[str, npt.NDArray[Any]]:
    """Return a row for each document: `[rows, width]` each, in TRL's order."""
    ids = as_whole(join(documents, "input_ids"), "input_ids")
    given: dict[str, Joined] = (
        {} if labels is None else {"labels": as_whole(join(labels, "labels"), "labels")}
    )
    given |= {name: join(values, name) for name, values in columns.items()}
    if keep is not None:
        given["attention_mask"] = join(keep, "attention_mask")
    for name, joined in given.items():
        _check_sizes(joined.sizes, ids.sizes, name)
    if lengths is not None:
        _check_one_each(lengths, ids.sizes)
    values, sizes = ids.values, ids.sizes
    if keep is not None:
        taken = given.pop("attention_mask").values != 0
        sizes = np.bincount(np.repeat(np.arange(sizes.size), sizes)[taken], minlength=sizes.size)
        values = values[taken]
        given = {name: joined._replace(values=joined.values[taken]) for name, joined in given.items()}
    if not values.size:
        raise DocumentsError(f"{ids.sizes.size:,} rows hold no token; leave empty batches out of the sampler")
    width = -(-int(sizes.max()) // multiple) * multiple
    is_real = np.arange(width) < sizes[:, None]

    def rows(flat: npt.NDArray[Any], pad: Any) -> npt.NDArray[Any]:
        made = np.full(is_real.shape, pad, flat.dtype)
        made[is_real] = flat
        return made

    whole = values.astype(np.int64, copy=False)
    targets = given.pop("labels").values.astype(np.int64, copy=False) if "labels" in given else whole
    arrays = {"input_ids": rows(whole, pad_id), "labels": rows(targets, -100)}
    if positions:
        arrays["position_ids"] = np.where(is_real, np.arange(width), 0)
    arrays["attention_mask"] = is_real.astype(np.int64)
    for name, joined in given.items():
        arrays[name] = rows(joined.values, column_pads.get(name, 0))
    return arrays


def _check_sizes(sizes: IntArray, wanted: IntArray, name: str) -> None:
    """Refuse a column whose lengths differ from those of the ids."""
    if sizes.size == wanted.size and bool((sizes == wanted).all()):
        return
    if sizes.size != wanted.size:
        raise DocumentsError(f"{name} has {sizes.size:,} rows, but input_ids has {wanted.size:,}")
    wrong = np.flatnonzero(sizes != wanted)
    first = int(wrong[0])
    raise DocumentsError(
        f"row {first:,} has {int(wanted[first]):,} input_ids, but {int(sizes[first]):,} {name} "
        f"({wrong.size:,} of {wanted.size:,} rows differ)"
    )


def _check_one_each(lengths: Any, sizes: IntArray) -> None:
    """Refuse rows of several documents, which see each other in a padded row."""
    rows = join(lengths, "seq_lengths")
    several = np.flatnonzero(rows.sizes > 1)
    if several.size:
        first = int(several[0])
        raise DocumentsError(
            f"row {first:,} holds {int(rows.sizes[first]):,} documents by its seq_lengths ({several.size:,} of "
            f"{rows.sizes.size:,} rows hold several), which see each other in padded rows; pass padding_free=True"
        )
    ends = np.cumsum(rows.sizes)
    sums = np.array([int(rows.values[end - size : end].sum()) for end, size in zip(ends, rows.sizes)])
    _check_sizes(sums.astype(np.int64), sizes, "tokens by its seq_lengths")
