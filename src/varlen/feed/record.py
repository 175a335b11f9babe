"""What a state says of a lane: its counts, and the documents that wait in it, as a text of about 2 bytes for each.

::

    stored    sorted by number: differences of numbers · first tokens · lengths · ages,    byte planes, zlib, base64
    order     by arrival: the older ones first, those of one round by the hash that shuffled them

Where documents wait in that order, it isn't stored, as sorting them again gives it; else it is a column more.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from varlen.errors import SettingError, StateError
from varlen.feed.lane import Arrival, Counts, shuffle_keys
from varlen.feed.state import MOST
from varlen.pack.lengths import as_count
from varlen.text.loss_masks import all_weigh_one
from varlen.types import Int32Array, IntArray

_MALFORMED = (LookupError, AttributeError, ArithmeticError, TypeError, ValueError, zlib.error)
"""What reading a state raises that somebody has changed."""
_COLUMNS, _WIDTH = 4, 8
_MOST_RATIO = 1100
"""Bytes that a byte of zlib's can become, at most."""
_MOST_NUMBER = 2**31 - 1
"""Of a token, of tokens and of rounds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaneRecord:
    """What a state says of a lane."""

    ids: IntArray
    starts: IntArray
    lengths: IntArray
    ages: Int32Array
    counts: Counts
    is_masked: bool
    """Whether any of their tokens isn't to be learnt, or weighs other than 1: reading alone tells which."""


def to_record(carried: Arrival, counts: Counts, seed: int | None, epochs: Sequence[int]) -> dict[str, Any]:
    """Return what a state says of a lane, for JSON.

    Args:
        carried: what waits.
        counts: of the lane.
        seed: of the shuffle.
        epochs: in which most of what waits may have come.
    """
    lengths, ages = np.diff(carried.offsets), carried.ages.astype(np.int64)
    table = np.stack([carried.ids, carried.firsts, lengths, ages])
    order = np.lexsort((ages, lengths, carried.firsts, carried.ids))
    stored = table[:, order]
    epoch = next(
        (one for one in epochs if np.array_equal(stored[:, _arrived(stored, seed, one)], table)), None
    )
    deltas = np.diff(stored[:1], prepend=0)
    columns = [deltas, stored[1:]]
    if epoch is None:
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        columns.append(places[None])
    whole = np.ascontiguousarray(np.concatenate(columns), dtype="<i8")
    planes = whole.view(np.uint8).reshape(*whole.shape, _WIDTH)
    return {
        "documents": table.shape[1],
        "tokens": int(lengths.sum()),
        "waiting": base64.b64encode(zlib.compress(planes.transpose(0, 2, 1).tobytes())).decode(),
        "epoch": epoch,
        "masked": carried.mask is not None and not all_weigh_one(carried.mask),
        "counts": counts.to_json(),
    }


def _arrived(stored: IntArray, seed: int | None, epoch: int) -> IntArray:
    """Return the order of arrival of what is stored, if all came in one epoch."""
    ids, starts, _, ages = stored
    keys = ids if seed is None else shuffle_keys(ids, seed, epoch)
    return np.lexsort((starts, keys, -ages))


def from_record(record: Mapping[str, Any], seed: int | None) -> LaneRecord:
    """Read what `to_record` wrote.

    Args:
        record: of a state.
        seed: of the shuffle.

    Raises:
        StateError: it is nothing of the kind.
    """
    try:
        count, tokens = (as_count(record[name], name, 0, MOST) for name in ("documents", "tokens"))
        epoch = None if record["epoch"] is None else as_count(record["epoch"], "epoch", 0, MOST)
        counts = Counts.from_json(record["counts"])
        table = _unpacked(record["waiting"], count, _COLUMNS + (epoch is None))
        is_masked = record["masked"] is not False
    except _MALFORMED as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"this is no state of a loader: {type(error).__name__} {error}") from None
    is_positive = bool((table >= 0).all())  # before sums, which may turn over
    stored = table[:_COLUMNS]
    stored[0] = np.cumsum(stored[0])
    order = table[_COLUMNS] if epoch is None else _arrived(stored, seed, epoch)
    sound = (
        is_positive
        and bool((stored[0] >= 0).all())
        and int(stored[1:].max(initial=0)) <= _MOST_NUMBER
        and int(stored[2].sum()) == tokens
        and np.array_equal(np.sort(order), np.arange(count))
    )
    if not sound:
        raise StateError(
            f"the state's {count:,} waiting documents of {tokens:,} tokens aren't what they were; it was cut or "
            "changed. Load it as it was saved, or an earlier one"
        )
    ids, starts, lengths, ages = stored[:, order]
    return LaneRecord(
        ids=ids,
        starts=starts,
        lengths=lengths,
        ages=ages.astype(np.int32),
        counts=counts,
        is_masked=is_masked,
    )


def _unpacked(text: object, count: int, columns: int) -> IntArray:
    """Return columns of whole numbers, int64 `[columns, count]`.

    Raises:
        ValueError: they aren't.
        zlib.error: they were changed.
    """
    if not isinstance(text, str):
        raise SettingError(f"waiting must be text, got {type(text).__name__}")
    packed = base64.b64decode(text, validate=True)
    size = columns * count * _WIDTH
    if size > _MOST_RATIO * len(packed):
        raise SettingError(f"{count:,} documents in {len(packed):,} bytes")
    reader = zlib.decompressobj()
    content = reader.decompress(packed, size + 1)
    if len(content) != size or not reader.eof or reader.unused_data:
        raise SettingError(f"{len(content):,} bytes instead of {size:,}")
    planes = np.frombuffer(content, dtype=np.uint8).reshape(columns, _WIDTH, count).transpose(0, 2, 1)
    return np.ascontiguousarray(planes).view("<i8").reshape(columns, count).astype(np.int64)
