"""Packed rows of Megatron's, which say where documents begin: `seq_start_id` is turned into what the others say.

Each document is stored with its last target, and the mask stands at the input that a target belongs to, one token
before it. `seq_lengths`, where such a row has them, are the inputs of each document that aren't padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.types import IntArray

STARTS = "seq_start_id"
_Column = tuple[npt.NDArray[np.integer[Any]], IntArray]


def starts_differ(flat: Mapping[str, _Column]) -> dict[int, str]:
    """Blame rows whose documents don't begin at 0, rise and end within them.

    Args:
        flat: values and offsets of each column, `seq_start_id` among them.
    """
    found: dict[int, str] = {}
    (_, offsets), (starts, owners) = flat["input_ids"], flat[STARTS]
    widths, counts = np.diff(offsets), np.diff(owners)
    for row in np.flatnonzero(counts == 0).tolist():
        if widths[row]:
            found[row] = f"has no `{STARTS}`, but {widths[row]:,} `input_ids`"
    of = np.repeat(np.arange(len(counts)), counts)
    is_first = np.zeros(len(starts), dtype=bool)
    is_first[owners[:-1][counts > 0]] = True
    before = np.concatenate([[-1], starts[:-1]])
    wrong = np.where(is_first, starts != 0, starts <= before) | (starts >= widths[of])
    for at in np.flatnonzero(wrong)[::-1].tolist():  # the first of a row is what is said
        row = int(of[at])
        found[row] = (
            f"holds {int(starts[at]):,} at place {at - int(owners[row]):,} of `{STARTS}`, which must begin at "
            f"0, rise, and stay below its {widths[row]:,} `input_ids`"
        )
    if "seq_lengths" in flat and not found:
        lengths, length_owners = flat["seq_lengths"]
        for row in np.flatnonzero(np.diff(length_owners) != counts).tolist():
            found[row] = (
                f"has {int(np.diff(length_owners)[row]):,} `seq_lengths` but {counts[row]:,} `{STARTS}`"
            )
        if not found:
            stored = _stored(flat)
            for at in np.flatnonzero((lengths < 0) | (lengths >= stored))[::-1].tolist():
                row = int(of[at])
                found[row] = (
                    f"holds {int(lengths[at]):,} at place {at - int(owners[row]):,} of `seq_lengths`, but stores "
                    f"{int(stored[at]):,} tokens of that document, the last target among them"
                )
    return found


def without_starts(flat: Mapping[str, _Column]) -> dict[str, _Column]:
    """Return columns that say the same by `seq_lengths`, a `loss_mask` of each token itself, and an `attention_mask`.

    The mark of a document's first token, which nothing predicts and no such file keeps, is that of its second.

    Args:
        flat: checked values and offsets of each column, `seq_start_id` among them.
    """
    same = {name: column for name, column in flat.items() if name not in (STARTS, "position_ids")}
    (ids, offsets), (_, owners) = flat["input_ids"], flat[STARTS]
    stored = _stored(flat)
    begins = np.cumsum(stored) - stored
    if "loss_mask" in flat:
        marks = flat["loss_mask"][0]
        rolled = np.concatenate([marks[:1], marks[:-1]])
        rolled[begins] = marks[begins]
        same["loss_mask"] = rolled, offsets
    if "seq_lengths" in flat:
        within = np.arange(len(ids)) - np.repeat(begins, stored)
        is_real = within <= np.repeat(flat["seq_lengths"][0], stored)
        if "attention_mask" in flat:
            is_real &= flat["attention_mask"][0] == 1
        same["attention_mask"] = is_real.astype(np.uint8), offsets
    same["seq_lengths"] = stored, owners
    return same


def _stored(flat: Mapping[str, _Column]) -> IntArray:
    """Return int64 `[documents]`: stored tokens of each."""
    (_, offsets), (starts, owners) = flat["input_ids"], flat[STARTS]
    counts = np.diff(owners)
    begins = starts.astype(np.int64) + np.repeat(offsets[:-1], counts)
    ends = np.concatenate([begins[1:], offsets[-1:]])
    ends[owners[1:][counts > 0] - 1] = offsets[1:][counts > 0]
    stored: IntArray = ends[: len(begins)] - begins
    return stored
