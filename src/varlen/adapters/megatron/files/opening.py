"""Open packed rows in any format, and convert them to another format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from varlen.adapters.megatron.files.indexed import PackedIndexed, PackedIndexedWriter, prefix_of
from varlen.adapters.megatron.files.metadata import PackCounts
from varlen.adapters.megatron.files.npy import PackedNpy
from varlen.adapters.megatron.files.parquet import (
    ROW_GROUP_TOKENS,
    PackedParquet,
    PackedParquetWriter,
    most_tokens_at_once,
)
from varlen.adapters.megatron.files.reader import PARQUET, PackedReader, Spec, resolve_packed
from varlen.adapters.megatron.files.writer import PackedWriter
from varlen.errors import SettingError, SourceError
from varlen.store.token_files import whole_mark

_PARQUET, _NPY, _PAIR = "Parquet", "an array (.npy)", "a pair (.sft.bin, .sft.idx)"
_KINDS: dict[str, Callable[..., PackedReader]] = {
    _PARQUET: PackedParquet,
    _NPY: PackedNpy,
    _PAIR: PackedIndexed,
}
_SMALL_GROUP = 4 * ROW_GROUP_TOKENS


def open_packed(
    spec: Spec, *, cache: str | Path | None = None, wait_s: float = 0.0, masks: bool = True
) -> PackedReader:
    """Open packed rows for random access.

    Args:
        spec: a file, glob or folder, or several: Parquet, `.npy`, or pairs of `.sft.bin` and `.sft.idx`.
        cache: a folder that keeps copies of files that are slow to read in random order: `.npy`, and Parquet whose
            row groups are large, as the releases write it. Each is made once, of the same rows with small row groups,
            and found again by the content of the file; None reads the files themselves.
        wait_s: seconds to wait for files that another node has just written to a network file system.
        masks: read `loss_mask`; else files need not have it, and it is 1 throughout.

    Returns:
        A reader with `num_rows`, `rows(indices)`, `batches()` and `close()`.

    Raises:
        SourceError: nothing is there, files of several kinds are named together, or one is damaged.
        SettingError: the cache can't be written.
    """
    paths = resolve_packed(spec, wait_s=wait_s)
    kinds = {_kind(path): path for path in reversed(paths)}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise SourceError(f"{second} is {other}, and {first} is {one}; read them apart")
    if cache is not None:
        paths = [_cached(path, Path(cache)) for path in paths]
    return _KINDS[_kind(paths[0])](paths, masks=masks)


def _cached(path: str, folder: Path) -> str:
    """Return a file of the same rows with random access: itself, or a copy that is written once."""
    kind = _kind(path)
    if kind == _PAIR or (kind == _PARQUET and most_tokens_at_once(path) <= _SMALL_GROUP):
        return path
    mark = hashlib.sha256(whole_mark(path).encode()).hexdigest()[:16]
    copy = folder / f"{Path(path).name.partition('.')[0]}-{mark}.idx.parquet"
    if not copy.is_file():
        convert(path, copy)
    return str(copy)


def create_packed(path: str | Path) -> PackedWriter:
    """Return a writer of packed rows, by a name's suffix.

    Args:
        path: that ends in `.parquet` or `.pq`, or in `.sft`, `.sft.bin` or `.sft.idx`.

    Raises:
        SettingError: it ends otherwise: `.npy`, a pickle that is read whole into memory, isn't written.
    """
    if str(path).lower().endswith(PARQUET):
        return PackedParquetWriter(path)
    if prefix_of(path).suffix.lower() == ".sft":
        return PackedIndexedWriter(path)
    raise SettingError(
        f"{path} must end in .parquet, .pq or .sft; other kinds of packed files aren't written"
    )


def convert(spec: Spec, output: str | Path, *, wait_s: float = 0.0) -> PackCounts:
    """Convert packed rows to another format in a stream, including true lengths.

    Args:
        spec: what is read, as `open_packed` takes it.
        output: what is written, as `create_packed` takes it.
        wait_s: seconds to wait for files that another node has just written.

    Returns:
        Counts of what was written: `convert(...).entry(pack_size)` is its metadata.

    Raises:
        SourceError: nothing is there, or a file is damaged.
        SettingError: the output is among what is read, or can't be written.
        DocumentsError: a row isn't a packed row.
    """
    reader = open_packed(spec, wait_s=wait_s)
    target, counts = prefix_of(output).resolve(), PackCounts()
    if any(Path(path).resolve() == target for path in resolve_packed(spec)):
        raise SettingError(f"{output} is among what is read; name another")
    with reader, create_packed(output) as writer:
        for rows in reader.batches():
            writer.write(rows)
            counts.add_rows(rows)
    return counts


def _kind(path: str) -> str:
    if path.lower().endswith(PARQUET):
        return _PARQUET
    return _NPY if path.lower().endswith(".npy") else _PAIR
