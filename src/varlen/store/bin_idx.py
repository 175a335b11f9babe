"""Megatron's pairs of `.bin` and `.idx`: tokens end to end, and where sequences and documents lie among them.

::

    NAME.idx   "MMIDIDX" 00 00 · u64 version, 1 · u8 kind of number · u64 sequences S · u64 documents + 1
               int32 [S] lengths · int64 [S] offsets in bytes · int64 [documents + 1] sequences of each document
               int8 [S] modes (optional, ignored)
    NAME.bin   tokens

A document is the concatenation of its sequences. Pages of an index are read and validated when they are needed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import SourceError
from varlen.regular import open_regular
from varlen.store.token_files import Unchanged, sampled_mark, whole_mark
from varlen.text.loss_masks import Mask
from varlen.types import IntArray

MAGIC = b"MMIDIDX\x00\x00"
_HEAD_BYTES = 34
_MOST_TOKENS = 1 << 48
_KINDS: dict[int, type[Any]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_FRACTIONS = {6: "float64", 7: "float32"}


class MegatronFile:
    """One pair of `.bin` and `.idx`."""

    has_mask = False

    def __init__(self, prefix: Path, name: str, *, check_tokens: bool = True) -> None:
        self._bin, self._idx = (Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx"))
        self.path, self.name = str(self._bin), name
        try:
            self._tokens, self._index = Unchanged(self._bin, sampled_mark), Unchanged(self._idx, whole_mark)
            self._size = self._bin.stat().st_size
            idx_bytes = self._idx.stat().st_size
            with open(self._idx, "rb", opener=open_regular) as file:
                head = file.read(_HEAD_BYTES)
        except OSError as error:
            raise SourceError(
                f"{error.filename} can't be read: {error.strerror or error}; a pair of .bin and .idx is needed"
            ) from error
        self.dtype, sequences, documents = self._read_head(head)
        needed = _HEAD_BYTES + 12 * sequences + 8 * documents
        if idx_bytes not in (needed, needed + sequences):
            raise SourceError(
                f"{self._idx} is damaged or cut off: it has {idx_bytes:,} bytes, but {sequences:,} sequences and "
                f"{documents - 1:,} documents take {needed:,}; copy it again"
            )
        self.num_documents, self.num_sequences = documents - 1, sequences
        self._idx_bytes, self._check_tokens = idx_bytes, check_tokens
        self._lengths = self._mapped(np.int32, _HEAD_BYTES, sequences)
        self._begins = self._mapped(np.int64, _HEAD_BYTES + 4 * sequences, sequences)
        self._sequences = self._mapped(np.int64, _HEAD_BYTES + 12 * sequences, documents)
        if self._sequences[0] != 0 or self._sequences[-1] != sequences:
            raise SourceError(
                f"{self._idx} is damaged: its documents must rise from sequence 0 to {sequences:,}, but go from "
                f"{int(self._sequences[0]):,} to {int(self._sequences[-1]):,}; copy it again"
            )
        # From the index alone, so that ranks agree even if the .bin of one is cut off.
        ends = self._begins[-1:].astype(np.int64) // self.dtype.itemsize + self._lengths[-1:]
        self.num_tokens = int(np.clip(ends, 0, _MOST_TOKENS).max(initial=0))
        self._file = -1

    def _read_head(self, head: bytes) -> tuple[np.dtype[Any], int, int]:
        """Return the number type, and the number of sequences and of document bounds."""
        if head[: len(MAGIC)] != MAGIC:
            raise SourceError(
                f"{self._idx} is not an index of Megatron's: it begins with {head[:9]!r} instead of {MAGIC!r}; older "
                "ones (TNTIDX) aren't read, make it again with Megatron's tools"
            )
        if len(head) < _HEAD_BYTES:
            raise SourceError(f"{self._idx} is cut off: it has {len(head)} bytes; copy it again")
        version, kind = int.from_bytes(head[9:17], "little"), head[17]
        sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
        if version != 1:
            raise SourceError(
                f"{self._idx} has version {version:,}, and only 1 is read; make it again with Megatron's tools"
            )
        if kind not in _KINDS:
            what = _FRACTIONS.get(kind, f"of the unknown kind {kind}")
            raise SourceError(f"{self._idx} says that its numbers are {what}; ids are whole numbers")
        if documents == 0:
            raise SourceError(f"{self._idx} is damaged: it names no bounds of documents; copy it again")
        return np.dtype(_KINDS[kind]).newbyteorder("<"), sequences, documents

    def _mapped(self, kind: type[Any], at: int, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(kind).newbyteorder("<")
        if count == 0:
            return np.zeros(0, dtype=dtype)
        return np.memmap(self._idx, dtype=dtype, mode="r", offset=at, shape=(count,))

    def extents(self, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """Return where the documents [first, stop) begin, in tokens of the file, and their lengths."""
        mapped: Any = self._sequences.base
        if mapped.size() < self._idx_bytes:  # touching missing mapped memory would kill the process
            raise SourceError(f"{self._idx} was cut short while it was in use; copy it again, and go on")
        self._index.check()
        bounds = self._sequences[first : stop + 1].astype(np.int64)
        if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > len(self._lengths):
            raise self._damaged("its documents' sequences don't rise", first, stop)
        a, b = int(bounds[0]), int(bounds[-1])
        sizes, begins = self._lengths[a:b].astype(np.int64), self._begins[a:b].astype(np.int64)
        width = self.dtype.itemsize
        if (sizes < 0).any() or (begins < 0).any() or (begins % width).any():
            raise self._damaged("lengths or places of sequences are out of range", first, stop)
        ends = begins + sizes * width
        is_behind = (begins > self._size) | (ends > self._size)  # a sum of arbitrary numbers may overflow
        if is_behind.any() and (self._check_tokens or not self._is_cut(begins, ends, sizes)):
            raise self._damaged(
                f"sequences end beyond the {self._size:,} bytes of {self._bin.name}", first, stop
            )
        running = np.concatenate([[0], np.cumsum(sizes)])
        bounds -= a
        lengths = running[bounds[1:]] - running[bounds[:-1]]
        is_first = np.zeros(b - a + 1, dtype=bool)
        is_first[bounds[:-1]] = True
        if (ends[:-1] != begins[1:])[~is_first[1 : b - a]].any():
            raise self._damaged("a document's sequences don't stand end to end", first, stop)
        starts = np.zeros(stop - first, dtype=np.int64)
        is_held = bounds[1:] > bounds[:-1]
        starts[is_held] = begins[bounds[:-1][is_held]] // width
        return starts, lengths

    def _is_cut(self, begins: IntArray, ends: IntArray, sizes: IntArray) -> bool:
        """Whether the index is consistent, so that the .bin file must have been cut off.

        An index is consistent if sequences are contiguous and none is longer than the file.
        """
        in_a_row = bool((ends[:-1] == begins[1:]).all() and (ends >= begins).all())
        return in_a_row and bool((sizes * self.dtype.itemsize <= self._size).all())

    def _damaged(self, why: str, first: int, stop: int) -> SourceError:
        return SourceError(
            f"{self._idx} is damaged among documents {first:,} to {stop - 1:,}: {why}; make the pair again"
        )

    def __enter__(self) -> MegatronFile:
        self._tokens.check()
        self._index.check()
        try:
            self._file = open_regular(self._bin)
        except OSError as error:
            raise SourceError(f"{self._bin} can't be read: {error.strerror or error}") from error
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        os.close(self._file)
        self._file = -1
        if kind is None:
            self._tokens.check()

    def read_tokens(self, start: int, stop: int) -> npt.NDArray[np.integer[Any]]:
        """Return tokens [start, stop) of the open file, as stored."""
        width = self.dtype.itemsize
        try:
            content = os.pread(self._file, (stop - start) * width, start * width)
        except OSError as error:
            raise SourceError(f"{self._bin} can't be read: {error.strerror or error}") from error
        if len(content) != (stop - start) * width:
            raise SourceError(
                f"{self._bin} ends before token {stop:,}, though its index names it; copy it again"
            )
        return np.frombuffer(content, dtype=self.dtype)

    def read_mask(self, start: int, stop: int, *, check: bool = True) -> Mask:  # noqa: ARG002 - all are valid
        """Return a mask of ones: all tokens are supervised."""
        return np.ones(stop - start, dtype=np.uint8)

    def will_need(self, start: int, stop: int) -> None:
        """Prefetch tokens; do nothing where unsupported."""
        width = self.dtype.itemsize
        if stop > start and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, start * width, (stop - start) * width, os.POSIX_FADV_WILLNEED)

    def mark(self) -> str:
        """Return a fingerprint of the tokens and their bounds: of the whole index, and of samples of the tokens."""
        return f"{self._index.mark()} {self._tokens.mark()}"

    def older_mark(self) -> str:
        """Return the fingerprint of version 0.1.0: samples of both."""
        return f"{sampled_mark(self._idx)} {self._tokens.mark()}"
