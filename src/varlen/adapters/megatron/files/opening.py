"""Open packed rows whatever kind of file holds them, and write them as another kind."""

from __future__ import annotations

from collections.abc import Callable

from varlen.adapters.megatron.files.parquet import PackedParquet
from varlen.adapters.megatron.files.paths import PARQUET, Spec, resolve_packed
from varlen.adapters.megatron.files.reader import PackedReader
from varlen.errors import SourceError

_Open = Callable[[list[str]], PackedReader]


def open_packed(spec: Spec, *, wait_s: float = 0.0) -> PackedReader:
    """Open packed rows to be read at any place.

    Args:
        spec: a file, glob or folder, or several: Parquet, `.npy`, or pairs of `.sft.bin` and `.sft.idx`.
        wait_s: seconds to wait for files that another node has just written to a network file system.

    Returns:
        A reader with `num_rows`, `rows(indices)`, `batches()` and `close()`.

    Raises:
        SourceError: nothing is there, files of several kinds are named together, or one is damaged.
    """
    paths = resolve_packed(spec, wait_s=wait_s)
    kinds = {_kind(path): path for path in reversed(paths)}
    if len(kinds) > 1:
        (one, first), (other, second) = sorted(kinds.items())[:2]
        raise SourceError(f"{first} is {one} and {second} is {other}; read them apart")
    return PackedParquet(paths)


def _kind(path: str) -> str:
    """Name the kind of a file by its end."""
    if path.lower().endswith(PARQUET):
        return "Parquet"
    return "an array (.npy)" if path.lower().endswith(".npy") else "a pair (.sft.bin, .sft.idx)"
