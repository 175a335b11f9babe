"""Shards of a token store: written atomically, and read in pieces."""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
import weakref
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.documents.documents import Documents, targets_of
from varlen.errors import SourceError, described
from varlen.files.losses import NO_LOSSES
from varlen.files.ours import sync
from varlen.files.written import SKIPPED
from varlen.regular import open_regular, read_regular
from varlen.text.loss_masks import Mask
from varlen.types import IntArray

_MASK, _WEIGHTS = "loss_mask.bin", "loss_weights.bin"
# Names of all files in a shard's folder.
SHARD_FILES = frozenset(("shard.json", "offsets.npy", "targets.npy", "tokens.bin", _MASK, _WEIGHTS, SKIPPED))
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype(np.uint16), "int32": np.dtype(np.int32)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounts:
    """The content of a shard."""

    num_documents: int
    num_tokens: int
    num_targets: int
    num_skipped: int  # rows lost, as records or in unreadable stretches
    dtype: str
    has_mask: bool  # whether there is a file with one value per token: a mask or weights
    losses: Mapping[str, Any] | None = None  # as JSON; version 0.1.0 stored only `num_skipped`
    # Of the arrays in `offsets.npy` and `targets.npy`, which are read whole anyway; None in shards of 0.1.0.
    crc32: Mapping[str, int] | None = None
    has_weights: bool = False  # whether these values are label weights

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without `has_weights` if it is False."""
        return {name: value for name, value in asdict(self).items() if name != "has_weights" or value}


class ShardWriter:
    """Writes a shard under another name in `work`, and renames it when it is complete."""

    def __init__(self, folder: Path, work: Path | None = None) -> None:
        self._folder = folder
        # A process of a killed run may still be writing this shard.
        self._partial = (work or folder.parent) / f".{folder.name}.{uuid.uuid4().hex[:12]}.part"
        self._partial.mkdir(parents=True)
        self._tokens = (self._partial / "tokens.bin").open("wb")
        self._mask: Any = None
        self._weighs = False
        self._dtype: type = np.uint16
        self._lengths: list[IntArray] = []
        self._targets: list[IntArray] = []
        self._skipped: list[str] = []
        self._losses = NO_LOSSES
        self.num_tokens = 0

    def append(self, documents: Documents) -> None:
        """Add documents."""
        tokens = documents.tokens
        if self._dtype is np.uint16 and len(tokens) and int(tokens.max()) > 0xFFFF:
            self._widen()
        self._tokens.write(tokens.astype(self._dtype).data)
        mask = documents.loss_mask
        if mask is not None and self._mask is None:
            self._mask = (self._partial / _MASK).open("wb")
            self._mask.write(b"\x01" * self.num_tokens)
        if mask is not None and mask.dtype == np.float32 and not self._weighs:
            self._weigh()
        if self._mask is not None:
            kind = np.float32 if self._weighs else np.uint8
            self._mask.write(
                (np.ones(len(tokens), kind) if mask is None else mask.astype(kind, copy=False)).data
            )
        lengths = documents.lengths
        self._lengths.append(lengths)
        self._targets.append(targets_of(documents))
        self._skipped += map(str, documents.faults)
        if documents.losses:
            self._losses += documents.losses
        self.num_tokens += len(tokens)

    def _widen(self) -> None:
        """Rewrite the tokens written so far as int32."""
        self._tokens.close()
        path = self._partial / "tokens.bin"
        wide = np.fromfile(path, dtype=np.uint16).astype(np.int32)
        self._dtype = np.int32
        self._tokens = path.open("wb")
        self._tokens.write(wide.data)

    def _weigh(self) -> None:
        """Rewrite the mask written so far as weights."""
        self._mask.close()
        weights = np.fromfile(self._partial / _MASK, dtype=np.uint8).astype(np.float32)
        (self._partial / _MASK).unlink()
        self._mask, self._weighs = (self._partial / _WEIGHTS).open("wb"), True
        self._mask.write(weights.data)

    def close(self) -> ShardCounts:
        """Complete the shard."""
        self._tokens.close()
        if self._mask is not None:
            self._mask.close()
        lengths = np.concatenate([np.zeros(1, dtype=np.int64), *self._lengths])
        targets = np.concatenate([np.zeros(0, dtype=np.int64), *self._targets])
        arrays = {"offsets": np.cumsum(lengths), "targets": targets.astype(np.int32)}
        for name, array in arrays.items():
            np.save(self._partial / f"{name}.npy", array)
        if self._skipped:
            text = "".join(f"{line}\n" for line in self._skipped)
            (self._partial / SKIPPED).write_text(text, encoding="utf-8", errors="replace")
        counts = ShardCounts(
            num_documents=len(targets),
            num_tokens=self.num_tokens,
            num_targets=int(targets.sum()),
            num_skipped=self._losses.num_rows,
            dtype=np.dtype(self._dtype).name,
            has_mask=self._mask is not None,
            losses=self._losses.to_json(),
            has_weights=self._weighs,
            crc32={name: zlib.crc32(array.data) for name, array in arrays.items()},
        )
        (self._partial / "shard.json").write_text(json.dumps(counts.to_json()))
        for file in self._partial.iterdir():
            sync(file)
        if shard_counts(self._folder) is not None and not self._folder.is_symlink():
            shutil.rmtree(self._folder, ignore_errors=True)  # left by a killed run, without its note
        self._partial.replace(self._folder)
        return counts

    def abandon(self) -> None:
        """Remove what was written."""
        for file in (self._tokens, self._mask):
            if file is not None:
                with suppress(OSError):  # the disk may be full again
                    file.close()
        shutil.rmtree(self._partial, ignore_errors=True)


def shard_counts(folder: Path) -> ShardCounts | None:
    """Return the content of a finished shard, or None where there is none."""
    try:
        return ShardCounts(**json.loads(read_regular(folder / "shard.json")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _check_crc32(name: str, array: npt.NDArray[Any], counts: ShardCounts) -> None:
    """Raise if an array doesn't match its checksum."""
    if counts.crc32 is not None and zlib.crc32(np.ascontiguousarray(array).data) != counts.crc32[name]:
        raise SourceError(f"{name}.npy isn't what was written: its checksum is another")


def _check_offsets(offsets: IntArray, counts: ShardCounts) -> None:
    """Raise unless these are valid offsets of the shard."""
    is_flat = isinstance(offsets, np.ndarray) and offsets.dtype == np.int64
    if not is_flat or offsets.shape != (counts.num_documents + 1,):
        raise SourceError(f"offsets.npy doesn't hold int64 offsets of {counts.num_documents:,} documents")
    if offsets[0] != 0 or offsets[-1] != counts.num_tokens or (offsets[1:] < offsets[:-1]).any():
        raise SourceError(f"offsets.npy must rise from 0 to the {counts.num_tokens:,} tokens")


class ShardFiles:
    """Open files of a shard, closed when this object is garbage collected."""

    def __init__(self, tokens: int, mask: int, width: int, *, is_weighted: bool) -> None:
        """Duplicate open files; `mask` is -1 for none, `width` is the bytes of a stored token."""
        self.is_weighted = is_weighted
        self.tokens, self.mask = os.dup(tokens), -1 if mask < 0 else os.dup(mask)
        self.width = width
        held = [file for file in (self.tokens, self.mask) if file >= 0]
        weakref.finalize(self, _close, held).atexit = False
        for file in held:
            if hasattr(os, "posix_fadvise"):  # disable readahead
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


class Shard:
    """A finished shard: its offsets are memory-mapped, and `with shard:` opens its files.

    Tokens are read rather than mapped, so that a process's memory stays bounded however large the store is. Several
    threads may use it, one at a time within `with`.
    """

    def __init__(self, folder: Path, *, check_tokens: bool = True) -> None:
        counts = shard_counts(folder)
        if counts is None:
            raise SourceError(f"{folder} is not a finished shard of tokens; index the data again")
        self.counts = counts
        self._path = folder
        self._lock = threading.RLock()
        try:
            self._dtype = _DTYPES[counts.dtype]
            self._mask_dtype = np.dtype(np.float32 if counts.has_weights else np.uint8)
            self._mask_name = _WEIGHTS if counts.has_weights else _MASK
            self.offsets: IntArray = map_array(folder / "offsets.npy")
            _check_offsets(self.offsets, counts)
            _check_crc32("offsets", self.offsets, counts)
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise SourceError(f"{folder} can't be read: {error}; index the data again") from error
        self._mapped: Any = self.offsets.base
        self._mapped_bytes: int = self._mapped.size()
        self._tokens = self._mask = -1
        if check_tokens:
            self._check_tokens()

    def _check_tokens(self) -> None:
        """Raise unless tokens and mask have the size that was written."""
        counts = self.counts
        with self:
            sizes = [os.fstat(file).st_size for file in (self._tokens, self._mask) if file >= 0]
        widths = (self._dtype.itemsize, self._mask_dtype.itemsize)
        if sizes != [counts.num_tokens * width for width in widths[: len(sizes)]]:
            raise SourceError(
                f"{self._path} is damaged: it doesn't hold the {counts.num_tokens:,} tokens of "
                f"{counts.num_documents:,} documents that were written; index the data again"
            )

    def check_offsets(self) -> None:
        """Raise if the offsets were truncated; touching missing mapped memory would kill the process."""
        if self._mapped.size() < self._mapped_bytes:
            raise SourceError(f"{self._path} is damaged: offsets.npy was cut short while it was in use")

    def __enter__(self) -> Shard:
        """Open the files."""
        self._lock.acquire()
        try:
            self._tokens = self._opened("tokens.bin")
            if self.counts.has_mask:
                self._mask = self._opened(self._mask_name)
        except SourceError:
            self.__exit__()
            raise
        return self

    def _opened(self, name: str) -> int:
        try:
            return open_regular(self._path / name)
        except OSError as error:
            raise SourceError(f"{self._path / name} can't be read: {error.strerror or error}") from error

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        for file in (self._tokens, self._mask):
            if file >= 0:
                os.close(file)
        self._tokens = self._mask = -1
        self._lock.release()

    def will_need(self, documents: IntArray) -> None:
        """Prefetch documents, given by ascending numbers; do nothing where unsupported.

        Readahead for single documents would read megabytes around each of them, so it is disabled.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        breaks = np.flatnonzero(np.diff(documents) != 1)
        starts = self.offsets[documents[np.concatenate([[0], breaks + 1])]]
        stops = self.offsets[documents[np.concatenate([breaks, [len(documents) - 1]])] + 1]
        for file, size in ((self._tokens, self._dtype.itemsize), (self._mask, self._mask_dtype.itemsize)):
            if file >= 0:
                for start, stop in zip((starts * size).tolist(), (stops * size).tolist()):
                    if stop > start:  # a length of 0 would mean the rest of the file
                        os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_WILLNEED)

    def targets(self) -> IntArray:
        """Return the labels of each document, int64 `[documents]`."""
        path, count = self._path / "targets.npy", self.counts.num_documents
        try:
            mapped = map_array(path)
        except (OSError, ValueError) as error:
            raise SourceError(f"{path} can't be read: {error}; index the data again") from error
        if mapped.shape != (count,) or mapped.dtype != np.int32:
            raise SourceError(f"{path} doesn't hold counts of {count:,} documents; index the data again")
        try:
            _check_crc32("targets", mapped, self.counts)
        except (KeyError, ValueError) as error:
            raise SourceError(f"{path} can't be read: {error}; index the data again") from error
        targets: IntArray = mapped.astype(np.int64)
        most = np.maximum(np.diff(self.offsets) - 1, 0)
        if (targets < 0).any() or (targets > most).any() or int(targets.sum()) != self.counts.num_targets:
            raise SourceError(
                f"{path} is damaged: it doesn't hold the {self.counts.num_targets:,} labels of {count:,} documents "
                "that were written; index the data again"
            )
        return targets

    def count_marked(self, starts: IntArray, stops: IntArray) -> list[int]:
        """Count the supervised tokens of stretches [start, stop) of a shard with a mask."""
        self._lock.acquire()
        try:
            self._mask = self._opened(self._mask_name)
            stretches = zip(starts.tolist(), stops.tolist())
            if self.counts.has_weights:
                return [int(np.count_nonzero(self._marks(*stretch))) for stretch in stretches]
            read = (self._read(self._mask, *stretch) for stretch in stretches)
            return [len(marks) - marks.count(0) for marks in read]
        finally:
            self.__exit__()

    def files(self) -> ShardFiles:
        """Open the files for random access."""
        with self:
            is_weighted = self.counts.has_weights
            return ShardFiles(self._tokens, self._mask, self._dtype.itemsize, is_weighted=is_weighted)

    def read_tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens [start, stop) of the open shard, as stored."""
        size = self._dtype.itemsize
        return np.frombuffer(self._read(self._tokens, start * size, stop * size), dtype=self._dtype)

    def read_mask(self, start: int, stop: int) -> Mask | None:
        """Return the mask or weights of tokens [start, stop) of the open shard; None: all are supervised."""
        return self._marks(start, stop) if self.counts.has_mask else None

    def _marks(self, start: int, stop: int) -> Mask:
        size = self._mask_dtype.itemsize
        return np.frombuffer(self._read(self._mask, start * size, stop * size), dtype=self._mask_dtype)

    def _read(self, file: int, start: int, stop: int) -> bytes:
        try:
            content = os.pread(file, stop - start, start)
        except OSError as error:
            raise SourceError(f"{self._path} can't be read: {error.strerror or error}") from error
        if len(content) != stop - start:
            name = "tokens.bin" if file == self._tokens else self._mask_name
            raise SourceError(
                f"{self._path / name} is damaged: {stop:,} bytes were written, but it ends before; index the data "
                "again"
            )
        return content


# Memory-mapped numpy arrays; damaged files raise only a few kinds of errors.

_PARSES = 10  # tries to parse a header
_MAGIC = b"\x93NUMPY"


def map_array(path: Path) -> Any:
    """Map an array that numpy wrote.

    Nothing is read, so a header with an excessive shape takes no memory. numpy parses the header as Python, which
    before CPython 3.11.8 fails at random if another thread parses something at the same time
    (github.com/python/cpython/issues/106905), so it is retried.
    """
    with open(path, "rb", opener=open_regular) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise SourceError("it is no array of numpy's")
    for _ in range(_PARSES):
        try:
            return _loaded(path)
        except SystemError:
            continue
    return _loaded(path)


def _loaded(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (
        EOFError,
        OverflowError,
        SyntaxError,
        TokenError,
        TypeError,
        MemoryError,
        RecursionError,
    ) as error:
        raise SourceError(described(error)) from error
