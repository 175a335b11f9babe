"""transformers' DataCollatorWithFlattening by its own name: one flat row of documents with their boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np

from varlen.adapters.features import (
    TAKEN,
    Features,
    as_columns,
    as_torch_has_them,
    check_form,
    columns_to_carry,
    finish,
    flash_arguments,
    required,
    warn_of_weights,
)
from varlen.arguments import as_count
from varlen.batch.flatten import FlatRow, flatten

_NEEDED = ("input_ids", "labels", "attention_mask")


@dataclass
class DataCollatorWithFlattening:
    """Lay the documents of a batch end to end in one row, as transformers' class of this name does.

    Its arguments and outputs are those of transformers 5.23 and 5.24, value for value and dtype for dtype. It differs
    where those go wrong:

    - A document without tokens is left out, as it is from 5.24 on. Before, it takes up a label there but no id, which
      shifts all labels behind it, and stands twice in the boundaries.
    - Where `labels` are in some features only, or not as long as the ids, it raises. There the first feature
      decides for all.
    - Tokens with an `attention_mask` of 0 are left out. There padding is trained on.
    - A batch that a data set gives as an Arrow table is read without converting it to Python objects.
    - Other columns of numbers with one value per token are kept. There they are lost.
    - A batch without tokens raises a DocumentsError that says what to do. There it raises a ValueError; before 5.24
      an IndexError, or nothing where it holds empty documents.

    >>> collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    >>> batch = collate([{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}])
    >>> batch["labels"].tolist(), batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
    ([[-100, 12, 13, -100, 22]], [[0, 1, 2, 0, 1]], [0, 3, 5])
    """

    return_tensors: Literal["pt", "np"] = "pt"
    """"pt" for torch tensors, "np" for numpy arrays."""
    _: KW_ONLY
    return_position_ids: bool = True
    """Return `position_ids`, which restart in every document."""
    separator_id: int = -100
    """The first label of every document, which the token before it may not predict."""
    return_flash_attn_kwargs: bool = False
    """Return `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`."""
    return_seq_idx: bool = False
    """Return `seq_idx`, the number of each token's document in the row."""
    position_ids_start: int = 0
    """The first position of every document; models like RoBERTa want `padding_idx + 1`."""
    pad_to_multiple_of: int | None = None
    """Round the width of the row up to this multiple. Padding has labels of -100 and segments of at most 128
    tokens of its own; without `return_flash_attn_kwargs` each of its tokens is a document by its position."""
    pad_token_id: int = 0
    """Token id at padding."""
    shift_labels: bool = False
    """Return `shift_labels` too, where position t holds the next token's label, as transformers' losses take it."""
    columns: tuple[str, ...] | None = None
    """Names of other columns to carry along; None for all that hold one number per token in every feature."""
    column_pads: Mapping[str, Any] = field(default_factory=dict)
    """Values of such columns at padding, 0 where not named."""

    def __post_init__(self) -> None:
        check_form(self.return_tensors)
        if self.pad_to_multiple_of is not None:
            as_count(self.pad_to_multiple_of, "pad_to_multiple_of")

    def __call__(
        self, features: Features, return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict[str, Any]:
        """Return a batch of one row.

        Returns:
            `input_ids`, `labels` and, unless switched off, `position_ids`, int64 `[1, width]`; on request `seq_idx`
            int32 `[1, width]`, `cu_seq_lens_q` and `cu_seq_lens_k` int32 `[segments + 1]`, `max_length_q` and
            `max_length_k` as Python ints, `shift_labels`; other columns `[1, width]`. Never an attention mask.

        Cost: one pass over the tokens, and about 0.2 us for each document; from lists, 4 ns for each int.
        """
        self.__post_init__()  # settings may have been written since
        form = self.return_tensors if return_tensors is None else return_tensors
        check_form(form)
        columns = as_columns(features, _NEEDED if self.columns is None else {*_NEEDED, *self.columns})
        documents = required(columns, "input_ids")
        carried = columns_to_carry(columns, self.columns, (*TAKEN, "shift_labels"))
        warn_of_weights(columns, carried)
        row = flatten(
            documents,
            columns.get("labels"),
            columns.get("attention_mask"),
            carried,
            separator=self.separator_id if separator_id is None else separator_id,
            first_position=self.position_ids_start,
            pad_id=self.pad_token_id,
            pad_to_multiple_of=self.pad_to_multiple_of or 1,
            column_pads={name: pad for name, pad in self.column_pads.items() if name in carried},
            positions=self.return_position_ids,
            owners=self.return_seq_idx,
        )
        arrays: dict[str, Any] = {"input_ids": row.input_ids[None], "labels": row.labels[None]}
        if row.position_ids is not None:
            arrays["position_ids"] = row.position_ids[None]
        if row.owners is not None:
            arrays["seq_idx"] = row.owners[None]
        if self.shift_labels:
            arrays["shift_labels"] = shifted(row)[None]
        if carried:
            arrays |= {name: values[None] for name, values in as_torch_has_them(row.columns, carried).items()}
        batch = finish(arrays, form)
        if self.return_flash_attn_kwargs:
            batch |= flash_arguments(row, form)
        return batch


def shifted(row: FlatRow) -> Any:
    """Return int64 `[width]`: at each position the label of the next, -100 at the last."""
    labels = np.full_like(row.labels, -100)
    labels[:-1] = row.labels[1:]
    return labels
