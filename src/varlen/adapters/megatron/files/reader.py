"""What every reader of packed rows can do, whatever holds them; and what those over several files share."""

from __future__ import annotations

import contextlib
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.files.flat import as_dict
from varlen.adapters.megatron.rows import PackedRows
from varlen.counts import many
from varlen.errors import SourceError
from varlen.types import IntArray

RowIds = Sequence[int] | npt.NDArray[np.integer[Any]] | range


class PackedReader(Protocol):
    """Packed rows that are read at any place."""

    @property
    def num_rows(self) -> int:
        """Packs of all files."""

    def rows(self, indices: RowIds) -> PackedRows:
        """Return some rows, in the order asked for.

        Args:
            indices: of rows over all files; repeated ones are given again, negative ones count from the end.

        Raises:
            SourceError: a file is damaged.
            DocumentsError: a row isn't a packed row.
        """

    def batches(self) -> Iterator[PackedRows]:
        """Yield all rows in order, some at a time, in bounded memory."""

    def close(self) -> None:
        """Give the files back."""

    def __len__(self) -> int:
        """Count the rows."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return one row as lists."""

    def __enter__(self) -> PackedReader:
        """Return the reader."""

    def __exit__(self, *_: object) -> None:
        """Close it."""


class RowReader(ABC):
    """What a reader is once it knows its rows: a sequence of dictionaries, and a context that closes."""

    num_rows: int

    @abstractmethod
    def rows(self, indices: RowIds) -> PackedRows:
        """Return some rows, in the order asked for; as `PackedReader` has it."""

    def close(self) -> None:  # noqa: B027  (most readers hold nothing open)
        """Give the files back; they are opened again by the next read."""

    def __len__(self) -> int:
        """Count the rows."""
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return one row as the releases' readers do: lists of `input_ids`, `loss_mask` and `seq_start_id`.

        `seq_boundaries` are the starts and the row's end; `seq_lengths` is there where the file has it. A negative
        index counts from the end, with the mask as it is: which rows complete a batch is the data set's business.
        """
        return as_dict(self.rows([operator.index(index)]), 0)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        """Yield every row as lists."""
        return (self[index] for index in range(self.num_rows))

    def __enter__(self) -> Any:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
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
    """Return the files of one entry."""
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
    """Return the names that end so, sorted; what begins with a dot is in the making."""
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
