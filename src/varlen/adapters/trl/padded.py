"""Rows of one document each, padded at their right to the longest, as TRL's collator gives them by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.batch.flatten import Joined, as_whole, join
from varlen.errors import DocumentsError
from varlen.types import IntArray


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
    """Return a row for each document.

    Returns:
        `[rows, width]` each, in TRL's order.
    """
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
    """Refuse a column that has another length than its ids."""
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
    told = join(lengths, "seq_lengths")
    several = np.flatnonzero(told.sizes > 1)
    if several.size:
        first = int(several[0])
        raise DocumentsError(
            f"row {first:,} holds {int(told.sizes[first]):,} documents by its seq_lengths ({several.size:,} of "
            f"{told.sizes.size:,} rows hold several), which see each other in padded rows; pass padding_free=True"
        )
    ends = np.cumsum(told.sizes)
    sums = np.array([int(told.values[end - size : end].sum()) for end, size in zip(ends, told.sizes)])
    _check_sizes(sums.astype(np.int64), sizes, "tokens by its seq_lengths")
