"""torchtune's `PackedDataset`, with its arguments and outputs, planned over the whole set by varlen's packer.

torchtune 0.6.1 is what it follows: it fills one pack after the other, in the order of the samples.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from varlen.arguments import as_count
from varlen.batch.collate import collate
from varlen.errors import DocumentsError
from varlen.pack.api import pack
from varlen.pack.pieces import too_long
from varlen.types import IntArray

__all__ = ["PackedDataset"]

_log = logging.getLogger(__name__)


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples packed into rows of `max_seq_len` tokens.

    Every sample is read once, when this is made. Documents are placed where they fill the rows best, from the
    lengths of all of them; rows stand in the order of their first samples.

    Labels are those given, but for the first of every document, which is -100: torchtune moves labels by one over
    the whole row, so that it would otherwise be predicted from the end of the document before. The loss is then
    that of the samples one by one.

    Args:
        ds: samples, each with "tokens" and "labels", lists or arrays of whole numbers.
        max_seq_len: tokens of a row.
        padding_idx: token at padding.
        max_packs: most rows; samples are then read until they would fill as many, the fullest rows are kept, and what
            is left out is logged.
        split_across_pack: lay samples end to end and cut them where a row is full, in place of keeping them whole.

    Raises:
        OverlongDocumentError: a sample is longer than a row and `split_across_pack` is False.
        DocumentsError: a sample without tokens or labels, or with more of the one than of the other.
        SettingError: a setting out of range.

    >>> samples = [{"tokens": [n] * n, "labels": [n] * n} for n in (5, 2, 3)]
    >>> row = PackedDataset(samples, max_seq_len=8)[0]
    >>> {name: values.tolist() for name, values in row.items()}
    {'tokens': [5, 5, 5, 5, 5, 3, 3, 3], 'labels': [-100, 5, 5, 5, 5, -100, 3, 3],
     'input_pos': [0, 1, 2, 3, 4, 0, 1, 2], 'seq_lens': [5, 3]}
    """

    def __init__(
        self,
        ds: Iterable[Any],
        *,
        max_seq_len: int,
        padding_idx: int = 0,
        max_packs: int | None = None,
        split_across_pack: bool = False,
    ) -> None:
        self.ds = ds
        self.max_seq_len = as_count(max_seq_len, "max_seq_len")
        self.padding_idx = padding_idx
        self.max_packs = None if max_packs is None else as_count(max_packs, "max_packs")
        self.split_across_pack = split_across_pack
        most = None if self.max_packs is None else self.max_packs * self.max_seq_len
        longest = None if split_across_pack else self.max_seq_len
        self._tokens, self._labels, self._offsets, is_all = _read(ds, most, longest)
        self._packing = pack(
            np.diff(self._offsets),
            self.max_seq_len,
            "wrapped" if split_across_pack else "best_fit_decreasing",
            "split" if split_across_pack else "error",
        )
        held = self._packing.pack_sums(self._packing.lengths)
        self._rows = np.sort(np.argsort(-held, kind="stable")[: self.max_packs])
        if self._rows.size < self._packing.num_packs or not is_all:
            self._warn_of_omission(int(held[self._rows].sum()), is_all)

    def __len__(self) -> int:
        return self._rows.size

    @property
    def packs(self) -> list[dict[str, torch.Tensor]]:
        """All rows, made anew at every look: what torchtune holds in memory."""
        return [self[number] for number in range(len(self))]

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return a row.

        Returns int64 tensors: `tokens`, `labels` (-100 at padding) and `input_pos` of `max_seq_len` values each.
        """
        number = operator.index(idx)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"row {idx:,} of {len(self):,}")
        number = int(self._rows[number])
        batch = collate(
            (self._tokens, self._offsets),
            self._packing,
            [number],
            labels=(self._labels, self._offsets),
            pad_id=self.padding_idx,
            report=False,
        )
        lengths = batch.document_lengths.astype(np.int64)
        padding = self.max_seq_len - int(lengths.sum())
        first, last = self._packing.offsets[number], self._packing.offsets[number + 1]
        # The positions of a document that was cut run on.
        begins = self._packing.starts[first:last].astype(np.int64)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths - begins, lengths)
        positions = within % self.max_seq_len
        beyond = np.minimum(positions[-1] + 1 + np.arange(padding), self.max_seq_len - 1)
        rows = {
            "tokens": batch.input_ids[0],
            "labels": batch.labels[0],
            "input_pos": np.concatenate([positions, beyond]),
            "seq_lens": np.concatenate([lengths, [padding]]) if padding else lengths,
        }
        return {name: torch.from_numpy(values.astype(np.int64)) for name, values in rows.items()}

    def _warn_of_omission(self, held: int, is_all: bool) -> None:
        _log.warning(
            "max_packs=%s leaves out %s of the %s tokens read%s; raise it to train on them",
            f"{self.max_packs:,}",
            f"{self._packing.num_tokens - held:,}",
            f"{self._packing.num_tokens:,}",
            "" if is_all else ", and all samples after them",
        )


def _read(
    ds: Iterable[Any], most_tokens: int | None, longest: int | None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], IntArray, bool]:
    """Read samples until there are enough tokens.

    Returns int32 tokens and labels of all samples end to end, where each begins as int64 `[num_samples + 1]`.
    """
    parts: dict[str, list[npt.NDArray[np.int32]]] = {"tokens": [], "labels": []}
    lengths: list[int] = []
    is_all, count = True, 0
    for number, sample in enumerate(ds):
        if most_tokens is not None and count >= most_tokens:
            is_all = False
            break
        for name, values in parts.items():
            values.append(_values(sample, name, number))
        size = parts["tokens"][-1].size
        if parts["labels"][-1].size != size:
            raise DocumentsError(
                f"sample {number:,} has {size:,} tokens but {parts['labels'][-1].size:,} labels; "
                "give one label a token, -100 where there is nothing to learn"
            )
        if longest is not None and size > longest:
            seen = f"Dataset sample is too long: sample {number:,} has {size:,} tokens"
            out = "set split_across_pack=True, raise max_seq_len or truncate your samples"
            raise too_long(seen, f"max_seq_len is {longest:,}", out)
        lengths.append(size)
        count += size
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    nothing = np.empty(0, np.int32)
    tokens, labels = (np.concatenate([nothing, *values]) for values in parts.values())
    return tokens, labels, offsets, is_all


def _values(sample: Any, name: str, number: int) -> npt.NDArray[np.int32]:
    """Return tokens or labels of a sample as int32."""
    try:
        values = np.asarray(sample[name])
    except (KeyError, TypeError, IndexError):
        raise DocumentsError(
            f'sample {number:,} has no {name!r}; a sample must be a mapping with "tokens" and "labels"'
        ) from None
    except ValueError as error:
        raise DocumentsError(f"{name} of sample {number:,} can't be read as numbers: {error}") from None
    if values.ndim == 1 and values.size == 0:
        return np.empty(0, np.int32)
    limits = np.iinfo(np.int32)
    if (
        values.ndim != 1
        or values.dtype.kind not in "iu"
        or values.min() < limits.min
        or values.max() > limits.max
    ):
        raise DocumentsError(
            f"{name} of sample {number:,} must be whole numbers of 32 bits in one dimension, got {values.dtype} of "
            f"shape {values.shape}"
        )
    return values.astype(np.int32)
