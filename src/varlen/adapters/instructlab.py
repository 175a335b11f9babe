"""The padding-free collators of InstructLab and fms-acceleration: one flat row, and the counts that go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from varlen.adapters.features import (
    Features,
    as_columns,
    check_form,
    finish,
    flash_arguments,
    required,
    warn_of_weights,
)
from varlen.batch.flatten import FlatRow, flatten

__all__ = ["PaddingFreeCollator"]

_NEEDED = ("input_ids", "labels", "attention_mask")


@dataclass(kw_only=True)
class PaddingFreeCollator:
    """Lay the samples of a minibatch end to end, and count what is learned from them.

    The call and the outputs are those of `mb_collate_fn` of instructlab-training 0.16, with which its
    MaxTokensPerRankCollator makes minibatches, and with `return_counts=False` those of fms-acceleration-aadp 0.2's
    DataCollatorWithFlattening. It differs where those go wrong:

    - Every sample's first label is -100. At InstructLab it stays, and where it is a token, the last token of the
      sample before must predict it.
    - Targets are counted as they stand in the row. InstructLab's count comes with the sample and includes its first
      token, which no model predicts, so its loss is divided by too large a number.
    - Samples without tokens are left out; labels that some samples lack, or that aren't as long as the ids, are an
      error; tokens with an `attention_mask` of 0 are left out; no samples at all are a DocumentsError.
    - With `return_flash_attn_kwargs` the boundaries are returned too, so that no layer derives them from positions.

    >>> collate = PaddingFreeCollator()
    >>> batch = collate([{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}])
    >>> batch["labels"].tolist(), batch["num_loss_counted_tokens"], batch["num_samples"], batch["total_length"]
    ([[-100, 12, 13, -100, 22]], 3, 2, 5)
    """

    return_counts: bool = True
    """Return `num_loss_counted_tokens`, `num_samples`, `batch_num_loss_counted_tokens` and `total_length`."""
    return_flash_attn_kwargs: bool = False
    """Return `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`."""
    return_tensors: Literal["pt", "np"] = "pt"
    """"pt" for torch tensors, "np" for numpy arrays."""

    def __post_init__(self) -> None:
        check_form(self.return_tensors)

    def __call__(
        self,
        minibatch: Features,
        batch_num_loss_counted_tokens: int | None = None,
        *,
        return_tensors: str | None = None,
    ) -> dict[str, Any]:
        """Return a minibatch of one row.

        Returns:
            `input_ids`, `labels` and `position_ids` int64 `[1, width]`, and the counts as Python ints.

        Cost: one pass over the tokens; from lists, 4 ns for each int.
        """
        self.__post_init__()  # settings may have been written since
        form = self.return_tensors if return_tensors is None else return_tensors
        check_form(form)
        columns = as_columns(minibatch, _NEEDED)
        warn_of_weights(columns)
        row = flatten(
            required(columns, "input_ids"), columns.get("labels"), columns.get("attention_mask"), owners=False
        )
        arrays = {"input_ids": row.input_ids, "labels": row.labels, "position_ids": row.position_ids}
        batch = finish({name: array[None] for name, array in arrays.items() if array is not None}, form)
        if self.return_counts:
            batch |= _counts(row, batch_num_loss_counted_tokens)
        if self.return_flash_attn_kwargs:
            batch |= flash_arguments(row, form)
        return batch


def _counts(row: FlatRow, of_step: int | None) -> dict[str, int]:
    targets = np.add.reduceat(row.labels != -100, row.cu_seqlens[:-1], dtype=np.int64)
    num_targets = int(targets.sum())
    return {
        "num_loss_counted_tokens": num_targets,
        "num_samples": int(np.count_nonzero(targets)),
        "batch_num_loss_counted_tokens": num_targets if of_step is None else of_step,
        "total_length": row.input_ids.size,
    }
