"""Shards of a token store: written whole or not at all, and read piece by piece."""

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
from varlen.errors import SourceError
from varlen.files.losses import NO_LOSSES
from varlen.files.ours import sync
from varlen.files.written import SKIPPED
from varlen.regular import open_regular, read_regular
from varlen.text.loss_masks import Mask
from varlen.types import IntArray

_MASK, _WEIGHTS = "loss_mask.bin", "loss_weights.bin"
SHARD_FILES = frozenset(("shard.json", "offsets.npy", "targets.npy", "tokens.bin", _MASK, _WEIGHTS, SKIPPED))
"""Names of all that is in a shard's folder."""
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype(np.uint16), "int32": np.dtype(np.int32)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounts:
    """What a shard holds."""

    num_documents: int
    num_tokens: int
    num_targets: int
    num_skipped: int
    """Rows lost, each a record or one of a stretch that can't be read."""
    dtype: str
    has_mask: bool
    """Whether there is a file of a value a token: of the mask, or of weights."""
    losses: Mapping[str, Any] | None = None
    """As `Losses` has them; None in shards of version 0.1.0, which know `num_skipped` alone."""
    crc32: Mapping[str, int] | None = None
    """Of the numbers in `offsets.npy` and `targets.npy`, which are read whole anyway; None in shards of 0.1.0."""
    has_weights: bool = False
    """Whether these values are what labels weigh."""

    def to_json(self) -> dict[str, Any]:
        """Return it for shard.json, where weights are named only if there are some."""
        return {name: value for name, value in asdict(self).items() if name != "has_weights" or value}


class ShardWriter:
    """Writes one shard under another name, in `work`, and gives it its own when it is whole."""

    def __init__(self, folder: Path, work: Path | None = None) -> None:
        self._folder = folder
        # A run that was killed may have left a process that still writes this shard.
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
        """Write again, with wider ids, what has been written so far."""
        self._tokens.close()
        path = self._partial / "tokens.bin"
        wide = np.fromfile(path, dtype=np.uint16).astype(np.int32)
        self._dtype = np.int32
        self._tokens = path.open("wb")
        self._tokens.write(wide.data)

    def _weigh(self) -> None:
        """Write weights in place of the mask, of what has been written so far too."""
        self._mask.close()
        weights = np.fromfile(self._partial / _MASK, dtype=np.uint8).astype(np.float32)
        (self._partial / _MASK).unlink()
        self._mask, self._weighs = (self._partial / _WEIGHTS).open("wb"), True
        self._mask.write(weights.data)

    def close(self) -> ShardCounts:
        """Finish the shard."""
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
            shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed before its note
        self._partial.replace(self._folder)
        return counts

    def abandon(self) -> None:
        """Remove what has been written."""
        for file in (self._tokens, self._mask):
            if file is not None:
                with suppress(OSError):  # a full disk, again
                    file.close()
        shutil.rmtree(self._partial, ignore_errors=True)


def shard_counts(folder: Path) -> ShardCounts | None:
    """Return what a finished shard holds, or None where there is none."""
    try:
        return ShardCounts(**json.loads(read_regular(folder / "shard.json")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _check_crc32(name: str, array: npt.NDArray[Any], counts: ShardCounts) -> None:
    """Require that numbers are those that were written."""
    if counts.crc32 is not None and zlib.crc32(np.ascontiguousarray(array).data) != counts.crc32[name]:
        raise SourceError(f"{name}.npy isn't what was written: its checksum is another")


def _check_offsets(offsets: IntArray, counts: ShardCounts) -> None:
    """Require that offsets are those of a shard."""
    is_flat = isinstance(offsets, np.ndarray) and offsets.dtype == np.int64
    if not is_flat or offsets.shape != (counts.num_documents + 1,):
        raise SourceError(f"offsets.npy doesn't hold int64 offsets of {counts.num_documents:,} documents")
    if offsets[0] != 0 or offsets[-1] != counts.num_tokens or (offsets[1:] < offsets[:-1]).any():
        raise SourceError(f"offsets.npy must rise from 0 to the {counts.num_tokens:,} tokens")


class ShardFiles:
    """Open files of a shard, as numbers; closed when nobody holds this object any more."""

    def __init__(self, tokens: int, mask: int, width: int, *, is_weighted: bool) -> None:
        """Take the open files, to have them open once more, and the bytes of a stored token; -1 for no mask."""
        self.is_weighted = is_weighted
        self.tokens, self.mask = os.dup(tokens), -1 if mask < 0 else os.dup(mask)
        self.width = width
        held = [file for file in (self.tokens, self.mask) if file >= 0]
        weakref.finalize(self, _close, held).atexit = False
        for file in held:
            if hasattr(os, "posix_fadvise"):  # so that the system reads nothing around what is asked for
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


class Shard:
    """A finished shard: its offsets are mapped, and `with shard:` opens its files.

    Tokens are read and not mapped, so that what a process holds stays bounded however large the store is. Several
    threads may use it, one at a time within `with`.
    """

    def __init__(self, folder: Path, *, check_tokens: bool = True) -> None:
        """Open it."""
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
        """Require that the tokens are there, and the mask, as many as were written."""
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
        """Require that the offsets are all there still; touching mapped memory that isn't would kill the process."""
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
        """Close them."""
        for file in (self._tokens, self._mask):
            if file >= 0:
                os.close(file)
        self._tokens = self._mask = -1
        self._lock.release()

    def will_need(self, documents: IntArray) -> None:
        """Have the system read documents in while other things are done; nothing where it can't.

        Reading ahead of single documents would take in megabytes around each of them, so it is switched off.

        Args:
            documents: int64, ascending numbers in this shard.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        breaks = np.flatnonzero(np.diff(documents) != 1)
        starts = self.offsets[documents[np.concatenate([[0], breaks + 1])]]
        stops = self.offsets[documents[np.concatenate([breaks, [len(documents) - 1]])] + 1]
        for file, size in (
            (self._tokens, self._dtype.itemsize),
            (self._mask, self._mask_dtype.itemsize),
        ):
            if file >= 0:
                for start, stop in zip((starts * size).tolist(), (stops * size).tolist()):
                    if stop > start:  # no bytes would mean all that follow
                        os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_WILLNEED)

    def targets(self) -> IntArray:
        """Return int64 `[documents]`: the labels that each document gives."""
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
        """Count the supervised tokens of stretches [start, stop), by the mask alone, which there is."""
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
        """Open the files for reading here and there."""
        with self:
            is_weighted = self.counts.has_weights
            return ShardFiles(self._tokens, self._mask, self._dtype.itemsize, is_weighted=is_weighted)

    def read_tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens [start, stop) of the open shard, as they are stored."""
        size = self._dtype.itemsize
        return np.frombuffer(self._read(self._tokens, start * size, stop * size), dtype=self._dtype)

    def read_mask(self, start: int, stop: int) -> Mask | None:
        """Return the mask or the weights of tokens [start, stop) of the open shard; None: all are supervised."""
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


# Arrays that numpy wrote to files of their own, mapped: whatever is damaged or none is an error of a few kinds.

_PARSES = 10
"""Of a header, before its failure is believed."""
_MAGIC = b"\x93NUMPY"


def map_array(path: Path) -> Any:
    """Map an array that numpy wrote.

    A header that promises more than there is takes no memory, as nothing is read. numpy parses it as Python, and
    CPython before 3.11.8 fails at that now and then where another thread parses something at the same time
    (github.com/python/cpython/issues/106905): it is asked again.
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
        raise SourceError(str(error) or type(error).__name__) from error
