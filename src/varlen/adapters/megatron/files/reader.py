"""What every reader of packed rows can do, whatever holds them; and what those over several files share."""

from __future__ import annotations

import contextlib
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.rows import PackedRows, Where
from varlen.counts import many
from varlen.errors import DocumentsError, SourceError
from varlen.types import IntArray

RowIds = Sequence[int] | npt.NDArray[np.integer[Any]] | range


class PackedReader(ABC):
    """Packed rows that are read at any index: a sequence of dictionaries, and a context that closes."""

    num_rows: int

    def rows(self, indices: RowIds) -> PackedRows:
        """Return some rows, in the order asked for.

        Args:
            indices: of rows over all files; repeated ones are given again, negative ones count from the end.

        Raises:
            IndexError: there is no such row.
            SourceError: a file is damaged, or was replaced.
            DocumentsError: a row isn't a packed row; says which.

        Cost: of Parquet, the row groups that hold the rows, each decoded once: about half a millisecond for a
        row of 4,096 tokens in a file that varlen wrote, where a row group holds four.
        """
        ids = row_ids(indices, self.num_rows)
        return self._rows_of(ids) if len(ids) else taken(self.rows([0]), ids)

    @abstractmethod
    def _rows_of(self, ids: IntArray) -> PackedRows:
        """Return rows, one at least, by numbers that exist, from 0."""

    @abstractmethod
    def batches(self) -> Iterator[PackedRows]:
        """Yield all rows in order, about a million tokens or one row at a time."""

    def close(self) -> None:  # noqa: B027  (most readers hold nothing open)
        """Close the files; the next read opens them again."""

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return one row as the releases' readers do: lists of `input_ids`, `loss_mask` and `seq_start_id`.

        `seq_boundaries` are the starts and the row's end; `seq_lengths` is there where the file has it. A negative
        index counts from the end, with the mask as it is: the data set decides which rows complete a batch.
        """
        return as_dict(self.rows([operator.index(index)]), 0)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self[index] for index in range(self.num_rows))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def row_ids(indices: RowIds, num_rows: int) -> IntArray:
    """Return indices of rows as they count from the beginning."""
    ids = np.asarray(indices)
    if ids.size == 0:
        return np.zeros(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise IndexError(f"rows are named by a list of whole numbers, got {ids.dtype} of shape {ids.shape}")
    ids = ids.astype(np.int64)
    outside = np.flatnonzero((ids < -num_rows) | (ids >= num_rows))
    if len(outside):
        raise IndexError(
            f"there is no row {int(ids[outside[0]]):,}: rows are numbered 0 to {num_rows - 1:,}, or -{num_rows:,} to "
            f"-1 from the end ({many(len(outside), 'index', 'indices')} of {len(ids):,} out of range)"
        )
    return np.where(ids < 0, ids + num_rows, ids)


# From what a user names to packed files: a file, a glob, a folder, or several, in one order everywhere.

Spec = str | Path | Sequence[str | Path]
"""A file, glob or folder, or several of them."""

PARQUET = (".parquet", ".pq")
NAMED_PARQUET = (".idx.parquet", ".idx.pq")
PAIR = (".sft.bin", ".sft.idx")
_MAGIC = "*?["
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


def is_packed_parquet_file(path: str | Path) -> bool:
    """Return whether a name, or a glob, ends as packed Parquet files of Megatron-Bridge do, in any case.

    The name and what it returns are those of `megatron.bridge.data.packing.paths` (0.6).

    Args:
        path: of a file, or a glob.

    >>> is_packed_parquet_file("train_4096.idx.Parquet"), is_packed_parquet_file("train.parquet")
    (True, False)
    """
    return str(path).lower().endswith(NAMED_PARQUET)


def is_packed_parquet_spec(spec: str | Path) -> bool:
    """Return whether a spec names Parquet: by its end, a glob of such files, or a folder.

    The name and what it returns are those of `megatron.bridge.data.packing.paths` (0.6). Nothing need be there,
    except for a folder.

    Args:
        spec: a file, glob or folder.

    >>> is_packed_parquet_spec("data/part-*.parquet"), is_packed_parquet_spec("data/train.npy")
    (True, False)
    """
    name = str(spec).lower()
    if name.endswith(PARQUET):
        return True
    if _is_glob(str(spec)):
        return any(suffix in name for suffix in PARQUET)
    return Path(spec).is_dir()


def resolve_packed_parquet_paths(spec: Spec, *, wait_s: float = 0.0) -> list[str]:
    """Return the Parquet files that a spec stands for, sorted.

    The name and order are those of `megatron.bridge.data.packing.paths` (0.6). A file whose name holds brackets is
    taken before the glob that its name could be.

    Args:
        spec: a file, a glob (`*`, `?`, `[...]`), a folder, whose files ending in `.parquet` or `.pq` are taken, or
            several of these, in the order given.
        wait_s: seconds to go on looking for what another node has just written to a network file system.

    Raises:
        SourceError: nothing is there (a ValueError).
    """
    return _resolved(spec, wait_s, PARQUET, "Parquet files", ".parquet or .pq")


def resolve_packed(spec: Spec, *, wait_s: float = 0.0) -> list[str]:
    """Return the packed files that a spec stands for, whatever kind they are of."""
    found = _resolved(
        spec, wait_s, (*PARQUET, ".npy", *PAIR), "packed files", ".parquet, .pq, .npy or .sft.idx"
    )
    return list(dict.fromkeys(path[:-4] if path.lower().endswith(PAIR) else path for path in found))


def _is_glob(spec: str) -> bool:
    """Return whether a name is a glob; a file whose name holds brackets goes before it."""
    return any(sign in spec for sign in _MAGIC) and not Path(spec).exists()


def _resolved(spec: Spec, wait_s: float, suffixes: tuple[str, ...], what: str, ends: str) -> list[str]:
    entries = [spec] if isinstance(spec, str | Path) else list(spec)
    if not entries:
        raise SourceError("no packed data was named; pass a file, a folder or a glob")
    return [path for entry in entries for path in _one(str(entry), wait_s, suffixes, what, ends)]


def _one(spec: str, wait_s: float, suffixes: tuple[str, ...], what: str, ends: str) -> list[str]:
    path = Path(spec).expanduser()

    def look() -> list[str]:
        if _is_glob(str(path)):
            pattern = str(path.relative_to(path.anchor))
            found = _of_kind(Path(path.anchor).glob(pattern), suffixes)
            return found or _of_kind(Path(path.anchor).glob(f"{pattern}{PAIR[1][-4:]}"), suffixes)
        if path.is_dir():
            return _of_kind(path.iterdir(), suffixes)
        if path.is_file() and spec.lower().endswith(suffixes):
            return [str(path)]
        halves = [f"{path}{end}" for end in (".idx", PAIR[1]) if f"{path}{end}".lower().endswith(suffixes)]
        return [half for half in halves if Path(half).is_file()][:1]

    found = _awaited(look, path, wait_s)
    if found:
        return found
    if _is_glob(str(path)):
        raise SourceError(f"no {what} match {spec}; their names end in {ends}")
    if path.is_dir():
        raise SourceError(f"{spec} is a folder without {what}; their names end in {ends}")
    if path.exists():
        raise SourceError(f"{spec} isn't one of the {what}; their names end in {ends}")
    raise SourceError(
        f"{spec} isn't there; if another node has just written it to a network file system, pass wait_s=60"
    )


def _of_kind(paths: Iterable[Path], suffixes: tuple[str, ...]) -> list[str]:
    """Return the names that end so, sorted; those that begin with a dot are still being written."""
    names = {str(path) for path in paths if not path.name.startswith(".")}
    return sorted(name for name in names if name.lower().endswith(suffixes))


def _awaited(look: Callable[[], list[str]], path: Path, wait_s: float) -> list[str]:
    """Look again, after longer each time, until something is there or the time is up."""
    until, pause = time.monotonic() + wait_s, _FIRST_WAIT_S
    while True:
        found = look()
        left = until - time.monotonic()
        if found or left <= 0:
            return found
        _refresh(path)
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_WAIT_S)


def _refresh(path: Path) -> None:
    """List the nearest folder that is there: a client of a network file system then forgets what it knew of it."""
    folder = path
    while folder != folder.parent and (any(sign in str(folder) for sign in _MAGIC) or not folder.is_dir()):
        folder = folder.parent
    with contextlib.suppress(OSError):
        list(folder.iterdir())


# Packed rows in memory: from lists and back, some of them, and several sets end to end.

COLUMNS = ("input_ids", "loss_mask", "seq_start_id")
"""What every packed row has, by the name that files and the releases' code give it."""
MASK = "loss_mask"
"""The one of them that statistics of lengths don't read."""
LENGTHS = "seq_lengths"
"""Our own column: positions of input of each document that aren't padding."""
_MOST_ID = 2**31 - 1


def bounds_of(lengths: Iterable[int] | npt.NDArray[np.integer[Any]]) -> IntArray:
    """Return the offsets of stretches of these lengths."""
    sizes = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths), dtype=np.int64)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def with_lengths(rows: PackedRows) -> PackedRows:
    """Return rows with their `seq_lengths`; where the file has none, no token is padding."""
    if rows.seq_lengths is not None:
        return rows
    return replace(rows, seq_lengths=(rows.stored_lengths - 1).astype(np.int32))


def joined(parts: Sequence[PackedRows]) -> PackedRows:
    """Return several sets of rows as one."""
    if len(parts) == 1:
        return parts[0]
    if any(part.seq_lengths is not None for part in parts):
        parts = [with_lengths(part) for part in parts]
    lengths = [part.seq_lengths for part in parts if part.seq_lengths is not None]
    return PackedRows(
        input_ids=np.concatenate([part.input_ids for part in parts]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        offsets=bounds_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        seq_start_id=np.concatenate([part.seq_start_id for part in parts]),
        document_offsets=bounds_of(np.concatenate([np.diff(part.document_offsets) for part in parts])),
        seq_lengths=np.concatenate(lengths) if lengths else None,
    )


def between(rows: PackedRows, start: int, stop: int) -> PackedRows:
    """Return the rows [start, stop), over the same memory."""
    a, b = int(rows.offsets[start]), int(rows.offsets[stop])
    first, last = int(rows.document_offsets[start]), int(rows.document_offsets[stop])
    return PackedRows(
        input_ids=rows.input_ids[a:b],
        loss_mask=rows.loss_mask[a:b],
        offsets=rows.offsets[start : stop + 1] - a,
        seq_start_id=rows.seq_start_id[first:last],
        document_offsets=rows.document_offsets[start : stop + 1] - first,
        seq_lengths=None if rows.seq_lengths is None else rows.seq_lengths[first:last],
    )


def taken(rows: PackedRows, indices: IntArray) -> PackedRows:
    """Return some rows, in the order asked for, in memory of their own (`indices`: int64, from 0)."""

    def of(values: npt.NDArray[Any], offsets: IntArray) -> npt.NDArray[Any]:
        starts, stops = offsets[indices].tolist(), offsets[indices + 1].tolist()
        pieces = [values[a:b] for a, b in zip(starts, stops)]
        return np.concatenate(pieces) if pieces else values[:0].copy()

    return PackedRows(
        input_ids=of(rows.input_ids, rows.offsets),
        loss_mask=of(rows.loss_mask, rows.offsets),
        offsets=bounds_of(rows.offsets[indices + 1] - rows.offsets[indices]),
        seq_start_id=of(rows.seq_start_id, rows.document_offsets),
        document_offsets=bounds_of(rows.document_offsets[indices + 1] - rows.document_offsets[indices]),
        seq_lengths=None if rows.seq_lengths is None else of(rows.seq_lengths, rows.document_offsets),
    )


def taken_from(parts: IntArray, ids: IntArray, read: Callable[[int, IntArray], PackedRows]) -> PackedRows:
    """Return rows of several parts, each of which is read once; `parts`: int64, the rows before each part."""
    numbers = np.searchsorted(parts, ids, side="right") - 1
    order = np.argsort(numbers, kind="stable")
    cuts = np.flatnonzero(np.diff(numbers[order], prepend=-1, append=-1)).tolist()
    groups = [order[start:stop] for start, stop in pairwise(cuts)]
    found = joined([read(int(numbers[one[0]]), ids[one] - parts[numbers[one[0]]]) for one in groups])
    if (order[1:] > order[:-1]).all():
        return found
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return taken(found, back)


def as_dict(rows: PackedRows, index: int) -> dict[str, list[int]]:
    """Return one row as lists."""
    one = between(rows, index, index + 1)
    starts = one.seq_start_id.tolist()
    found = {
        "input_ids": one.input_ids.tolist(),
        "loss_mask": one.loss_mask.tolist(),
        "seq_start_id": starts,
        "seq_boundaries": [*starts, len(one.input_ids)],
    }
    if one.seq_lengths is not None:
        found[LENGTHS] = one.seq_lengths.tolist()
    return found


def from_dicts(rows: Iterable[Mapping[str, Any]], where: Where = "row {:,}".format) -> PackedRows:
    """Return rows given as mappings with `input_ids`, `loss_mask`, `seq_start_id` and perhaps `seq_lengths`."""
    found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*COLUMNS, LENGTHS)}
    for count, row in enumerate(rows, 1):
        missing = [name for name in COLUMNS if name not in row]
        if missing:
            raise DocumentsError(
                f"{where(count - 1)} has no {missing[0]!r}; a packed row has {', '.join(map(repr, COLUMNS))}"
            )
        for name in COLUMNS:
            found[name].append(_whole(row[name], name, count - 1, where))
        if LENGTHS in row:
            found[LENGTHS].append(_whole(row[LENGTHS], LENGTHS, count - 1, where))
        if len(found[LENGTHS]) not in (0, count):
            raise DocumentsError(
                f"{where(count - 1)}: some rows have {LENGTHS!r} and others don't; give all or none"
            )
    return from_lists(found, where)


def from_lists(columns: Mapping[str, Sequence[npt.NDArray[Any]]], where: Where) -> PackedRows:
    """Return rows whose values are arrays, one per row, by column; `seq_lengths` may have none."""
    flat = {
        name: (np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64), bounds_of(map(len, arrays)))
        for name, arrays in columns.items()
    }
    return from_flat(flat, where)


def from_flat(flat: Mapping[str, tuple[npt.NDArray[Any], IntArray]], where: Where) -> PackedRows:
    """Return checked rows made of each column's values and offsets, from 0."""
    (ids, offsets), (mask, mask_offsets) = flat["input_ids"], flat["loss_mask"]
    starts, document_offsets = flat["seq_start_id"]
    _refuse_uneven(offsets, mask_offsets, "`input_ids`", "values of `loss_mask`", where)
    _refuse_outside(ids, offsets, "input_ids", _MOST_ID, where)
    _refuse_outside(mask, mask_offsets, "loss_mask", 1, where)
    _refuse_outside(starts, document_offsets, "seq_start_id", _MOST_ID, where)
    lengths, length_offsets = flat.get(LENGTHS, (starts[:0], offsets[:1]))
    if len(length_offsets) > 1:
        _refuse_uneven(document_offsets, length_offsets, "`seq_start_id`", f"values of `{LENGTHS}`", where)
        _refuse_outside(lengths, length_offsets, LENGTHS, _MOST_ID, where)
    return PackedRows(
        input_ids=ids.astype(np.int32, copy=False),
        loss_mask=mask.astype(np.int8, copy=False),
        offsets=offsets,
        seq_start_id=starts.astype(np.int64, copy=False),
        document_offsets=document_offsets,
        seq_lengths=lengths.astype(np.int32, copy=False) if len(length_offsets) > 1 else None,
    ).check(where)


def as_stored(rows: PackedRows, before: int = 0) -> PackedRows:
    """Return rows of the types that files hold, if they are packed rows."""
    flat = {
        "input_ids": (rows.input_ids, rows.offsets),
        "loss_mask": (rows.loss_mask, rows.offsets),
        "seq_start_id": (rows.seq_start_id, rows.document_offsets),
    }
    if rows.seq_lengths is not None:
        flat[LENGTHS] = rows.seq_lengths, rows.document_offsets
    return from_flat(flat, lambda row: f"row {before + row:,}")


def _whole(value: Any, name: str, index: int, where: Where) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.zeros(0, dtype=object)
    if array.ndim == 1 and array.dtype.kind in "iub":
        return array
    if array.size == 0 and array.ndim == 1 and array.dtype.kind == "f":  # of an empty list
        return np.zeros(0, dtype=np.int64)
    raise DocumentsError(
        f"{where(index)}: {name!r} must be a list of whole numbers, got {type(value).__name__} of {array.dtype}"
    )


def _refuse_uneven(ours: IntArray, theirs: IntArray, one: str, other: str, where: Where) -> None:
    differ = np.flatnonzero(np.diff(ours) != np.diff(theirs))
    if len(differ):
        row = int(differ[0])
        raise DocumentsError(
            f"{where(row)}: {int(np.diff(ours)[row]):,} {one}, but {int(np.diff(theirs)[row]):,} {other}; "
            "pack the data again"
        )


def _refuse_outside(values: npt.NDArray[Any], offsets: IntArray, name: str, most: int, where: Where) -> None:
    if not len(values) or values.dtype.kind == "b":
        return
    is_whole = values.dtype.kind in "iu"
    if is_whole and values.min() >= 0 and values.max() <= most:
        return
    wrong = np.flatnonzero(~((values >= 0) & (values <= most) & (is_whole or values == np.rint(values))))
    if not len(wrong):
        return
    row = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
    index = int(wrong[0] - offsets[row])
    raise DocumentsError(
        f"{where(row)}: `{name}` holds {values[wrong[0]]} at place {index:,} (0 to {most:,}); pack the data again"
    )
