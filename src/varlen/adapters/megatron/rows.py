"""Packed rows as Megatron-Bridge stores them, in flat arrays: what its files hold and its batches are made of.

Every document is stored with one token more than a model reads of it, the last target: a document stored as tokens
`t[0:n]` is `n - 1` positions of input `t[0:n - 1]` with targets `t[1:n]`. `loss_mask` stands at the input that a
target belongs to, so the mask of a document's last stored token is never used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.counts import many
from varlen.errors import DocumentsError, SettingError
from varlen.types import Int32Array, IntArray

Where: TypeAlias = Callable[[int], str]
"""Names a row, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """Packed rows end to end; row r holds the stored tokens `offsets[r]:offsets[r + 1]`."""

    input_ids: npt.NDArray[np.integer[Any]]
    """`[stored tokens]`."""
    loss_mask: npt.NDArray[Any]
    """`[stored tokens]`: 1 at an input whose target is trained; int8 from files, any number in memory."""
    offsets: IntArray
    """int64 `[rows + 1]`."""
    seq_start_id: npt.NDArray[np.integer[Any]]
    """`[documents]`: where each document begins, counted from the first stored token of its row."""
    document_offsets: IntArray
    """int64 `[rows + 1]`: row r holds the documents `document_offsets[r]:document_offsets[r + 1]`."""
    seq_lengths: Int32Array | None = None
    """int32 `[documents]`: positions of input that hold real tokens, at most the stored tokens - 1; what lies behind
    them in a document is padding. None where a file doesn't say: then there is none, or its place is unknown."""

    @property
    def num_rows(self) -> int:
        """Packs."""
        return len(self.offsets) - 1

    @property
    def num_documents(self) -> int:
        """Documents of all rows."""
        return len(self.seq_start_id)

    @property
    def begins(self) -> IntArray:
        """int64 `[documents]`: each document's first stored token, counted over all rows."""
        shifts = np.repeat(self.offsets[:-1], np.diff(self.document_offsets))
        begins: IntArray = self.seq_start_id.astype(np.int64) + shifts
        return begins

    @property
    def stored_lengths(self) -> IntArray:
        """int64 `[documents]`: stored tokens of each document, padding and the last target included."""
        begins = self.begins
        ends = np.append(begins[1:], self.offsets[-1])
        last = self.document_offsets[1:] - 1
        has_any = np.diff(self.document_offsets) > 0
        ends[last[has_any]] = self.offsets[1:][has_any]
        lengths: IntArray = ends - begins
        return lengths

    def check(self, where: Where = "row {:,}".format) -> PackedRows:
        """Return these rows if their boundaries and masks are those of packed rows.

        Args:
            where: names a row, for messages.

        Raises:
            DocumentsError: says of the first row that is wrong what was seen, and how many are.
        """
        for found, why in _faults(self):
            if len(found):
                first = int(found[0])
                raise DocumentsError(
                    f"{where(first)}: {why(first)} ({many(len(found), 'row')} of {self.num_rows:,} like it); "
                    "pack the data again"
                )
        return self


_Fault = tuple[npt.NDArray[np.intp], Callable[[int], str]]


def _faults(rows: PackedRows) -> list[_Fault]:
    """Return for each rule the rows that break it, and words for one of them."""
    uneven = _uneven(rows)
    if uneven:
        return [(np.zeros(1, dtype=np.intp), lambda _: uneven)]
    counts, sizes = np.diff(rows.document_offsets), np.diff(rows.offsets)
    empty: _Fault = np.flatnonzero(counts == 0), lambda _: "`seq_start_id` is empty"
    if len(empty[0]):
        return [empty]
    firsts = rows.seq_start_id[rows.document_offsets[:-1]] if rows.num_rows else rows.seq_start_id[:0]
    owners = np.repeat(np.arange(rows.num_rows), counts)
    stored = rows.stored_lengths
    outside = np.unique(owners[rows.seq_start_id >= sizes[owners]])
    short = np.unique(owners[stored < 1])
    faults: list[_Fault] = [
        (np.flatnonzero(firsts != 0), lambda r: f"`seq_start_id` begins at {int(firsts[r]):,} and not at 0"),
        (outside, lambda r: f"`seq_start_id` reaches past the row's {int(sizes[r]):,} tokens"),
        (short, lambda _: "`seq_start_id` must rise from document to document"),
    ]
    if rows.seq_lengths is not None:
        lengths = rows.seq_lengths
        long, negative = np.unique(owners[lengths > stored - 1]), np.unique(owners[lengths < 0])
        faults += [
            (long, lambda _: "`seq_lengths` has a document longer than what is stored of it"),
            (negative, lambda _: "`seq_lengths` has a negative length"),
        ]
    return faults


def _uneven(rows: PackedRows) -> str:
    """Return which arrays don't fit together by their lengths, in words; empty if all do."""
    documents = rows.num_documents
    if len(rows.loss_mask) != len(rows.input_ids):
        return f"{len(rows.input_ids):,} `input_ids`, but {len(rows.loss_mask):,} values of `loss_mask`"
    if len(rows.document_offsets) != len(rows.offsets):
        return f"{len(rows.offsets):,} `offsets`, but {len(rows.document_offsets):,} `document_offsets`"
    if int(rows.document_offsets[-1]) != documents:
        return (
            f"{documents:,} `seq_start_id`, but `document_offsets` end at {int(rows.document_offsets[-1]):,}"
        )
    if rows.seq_lengths is not None and len(rows.seq_lengths) != documents:
        return f"{documents:,} `seq_start_id`, but {len(rows.seq_lengths):,} values of `seq_lengths`"
    return ""


# The three ways in which Megatron-Bridge's releases spell packed batches and settings.

Dialect: TypeAlias = Literal["0.4", "0.5", "0.6"]
"""`"0.4"`: releases 0.3 to 0.4.2; `"0.5"`: 0.5.0 and 0.5.1; `"0.6"`: 0.6.0 and later."""

DIALECTS: tuple[Dialect, ...] = ("0.4", "0.5", "0.6")
NEWEST: Dialect = "0.6"


def as_dialect(dialect: str) -> Dialect:
    """Return a dialect by its name, or by a release that uses it.

    >>> as_dialect("v0.3.1"), as_dialect("0.5.0"), as_dialect("0.7")
    ('0.4', '0.5', '0.6')
    """
    release = _release(dialect)
    if release is not None:
        if release >= (0, 6):
            return "0.6"
        if release >= (0, 3):
            return "0.5" if release == (0, 5) else "0.4"
    raise SettingError(
        f"{dialect!r} names no dialect of Megatron-Bridge; pass one of {', '.join(map(repr, DIALECTS))}, or a "
        "release from 0.3 on"
    )


def near_multiples(size: int, multiple: int) -> str:
    """Return the nearest multiples of a size in words, for messages.

    >>> near_multiples(510, 4), near_multiples(3, 8)
    ('508 or 512', '8')
    """
    below = size // multiple * multiple
    return " or ".join(f"{near:,}" for near in (below, below + multiple) if near)


def is_before_parquet(dialect: str) -> bool:
    """Return whether a release is 0.3, whose packed files are `.npy` alone; its dialect is that of 0.4.

    >>> is_before_parquet("0.3.1"), is_before_parquet("0.4")
    (True, False)
    """
    return _release(dialect) == (0, 3)


def _release(name: str) -> tuple[int, int] | None:
    """Return the first two numbers of a release, or None where it has none."""
    parts = str(name).removeprefix("v").split(".")
    if len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal():
        return int(parts[0]), int(parts[1])
    return None
