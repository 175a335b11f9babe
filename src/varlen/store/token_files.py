"""The user's own token files with random access, read like a token store.

Nothing is copied: a file gives the positions of its documents, 65,536 at a time, and pieces are read from there.
Every 65,536 documents of a file are a shard and a part, so that work and memory for an order, a window or a restart
are bounded however large the file is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from varlen.errors import SourceError
from varlen.files.remote import changed, replaced_words
from varlen.files.seen import PIECE_BYTES, PIECES, Seen, hash_samples
from varlen.regular import open_regular, require_regular
from varlen.text.loss_masks import Mask
from varlen.text.tokenizer import digest
from varlen.types import Int32Array, IntArray

_SHARD_DOCUMENTS = 1 << 16
_KEPT = 64  # shards whose document positions stay in memory: 16 bytes per document
_MOST_ID = 2**31 - 1


class TokenFile(Protocol):
    """A file of token documents; `with file:` opens it."""

    name: str  # relative to what the user named
    path: str
    num_documents: int
    num_tokens: int  # including padding
    has_mask: bool

    def __enter__(self) -> TokenFile:
        """Open it."""

    def __exit__(self, kind: object, *_: object) -> None:
        """Close it."""

    def extents(self, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """Return where the documents [first, stop) begin, in tokens of the file, and their lengths."""

    def read_tokens(self, start: int, stop: int) -> npt.NDArray[np.integer[Any]]:
        """Return tokens [start, stop) of one document of the open file, as stored."""

    def read_mask(self, start: int, stop: int, *, check: bool = True) -> Mask:
        """Return the loss mask of tokens [start, stop) of one document of the open file."""

    def will_need(self, start: int, stop: int) -> None:
        """Prefetch tokens [start, stop) of the open file."""

    def mark(self) -> str:
        """Return a fingerprint of the content."""

    def older_mark(self) -> str:
        """Return the fingerprint of an earlier version, whose states can still be read."""


class FileTokens:
    """The documents of several files, one file after the other."""

    tables: Path | None = None  # nothing is written beside the user's data

    def __init__(
        self, files: Sequence[TokenFile], *, check_tokens: bool = True, unread: str | None = None
    ) -> None:
        self._files, self._check_tokens = list(files), check_tokens
        self.unread = unread
        counts = [file.num_documents for file in files]
        if not sum(counts):
            more = f" and {len(counts) - 1:,} more" if len(counts) > 1 else ""
            raise SourceError(
                f"{files[0].path}{more} hold no document of tokens" if files else "no file of tokens"
            )
        cuts = [
            (number, first)
            for number, count in enumerate(counts)
            for first in range(0, count, _SHARD_DOCUMENTS)
        ]
        self._cuts = cuts
        self.documents: IntArray = np.array(
            [min(_SHARD_DOCUMENTS, counts[number] - first) for number, first in cuts], dtype=np.int64
        )
        # An estimate, as documents' ends aren't read before they are requested.
        shares = [
            files[number].num_tokens * held // counts[number]
            for (number, _), held in zip(cuts, self.documents.tolist())
        ]
        self.tokens: IntArray = np.array(shares, dtype=np.int64)
        self.parts: IntArray = np.arange(len(cuts))
        self.num_parts = len(cuts)
        self._extents = lru_cache(_KEPT)(self._read_extents)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the tokens and their order: a hash of each file's name, number of documents and `mark`."""
        return digest(json.dumps([[file.name, file.num_documents, file.mark()] for file in self._files]))

    def fingerprint_at(self, num_parts: int) -> str | None:
        """Return the fingerprint of the first parts alone: that of all, as files don't grow."""
        return self.fingerprint if num_parts == self.num_parts else None

    def had_fingerprint(self, num_parts: int, earlier: str) -> bool:
        """Whether an earlier version gave these files this fingerprint, by samples instead of all bytes."""
        older = [[file.name, file.num_documents, file.older_mark()] for file in self._files]
        return num_parts == self.num_parts and earlier == digest(json.dumps(older))

    def wait_for(self, num_parts: int) -> None:
        """Return immediately: all is there."""

    def _read_extents(self, shard: int) -> tuple[TokenFile, IntArray, IntArray]:
        number, first = self._cuts[shard]
        file = self._files[number]
        starts, lengths = file.extents(first, first + int(self.documents[shard]))
        return file, starts, lengths

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        """Return the lengths of documents, given by shard and number."""
        lengths = np.empty(len(shards), dtype=np.int64)
        for shard in np.unique(shards).tolist():
            at = shards == shard
            lengths[at] = self._extents(shard)[2][documents[at]]
        return lengths

    def where(self, shard: int) -> str:
        """Describe a shard's location."""
        number, first = self._cuts[shard]
        return f"{self._files[number].name} from document {first:,}"

    def will_need(self, shards: IntArray, documents: IntArray) -> None:
        """Prefetch documents; arguments as in `lengths`."""
        for shard in np.unique(shards).tolist():
            file, starts, lengths = self._extents(shard)
            held = np.sort(documents[shards == shard])
            with file:
                for start, length in zip(starts[held].tolist(), lengths[held].tolist()):
                    file.will_need(start, start + length)

    def count_targets(
        self, shards: IntArray, documents: IntArray, starts: IntArray, stops: IntArray
    ) -> IntArray:
        """Count the labels of pieces; arguments as in `TokenDocuments`.

        Cost: reads the pieces' masks, if there are any.
        """
        counts: IntArray = np.maximum(stops - starts - 1, 0)
        for shard in np.unique(shards).tolist():
            file, begins, _ = self._extents(shard)
            if not file.has_mask:
                continue
            pieces = np.flatnonzero((shards == shard) & (counts > 0))
            firsts = begins[documents[pieces]]
            spans = zip(
                pieces.tolist(), (firsts + starts[pieces]).tolist(), (firsts + stops[pieces]).tolist()
            )
            with file:
                for piece, start, stop in spans:
                    mask = file.read_mask(start + 1, stop, check=self._check_tokens)
                    counts[piece] = np.count_nonzero(mask)
        return counts

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents in the given order; arguments as in `TokenDocuments`."""
        ends = np.cumsum(lengths)
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
        mask: Mask | None = None
        for shard in np.unique(shards).tolist():
            file, begins, _ = self._extents(shard)
            if file.has_mask and mask is None:
                mask = np.ones(len(tokens), dtype=np.uint8)
            pieces = np.flatnonzero((shards == shard) & (lengths > 0))
            first = begins[documents[pieces]] + np.asarray(starts)[pieces]
            order = np.argsort(first, kind="stable")
            sizes, to = lengths[pieces][order], (ends - lengths)[pieces][order]
            with file:
                for at, size, begin in zip(first[order].tolist(), sizes.tolist(), to.tolist()):
                    ids = file.read_tokens(at, at + size)
                    if ids.dtype.kind == "i" or ids.dtype.itemsize > 2:
                        _check_ids(ids, file, at)
                    tokens[begin : begin + size] = ids
                    if file.has_mask and mask is not None:
                        mask[begin : begin + size] = file.read_mask(at, at + size)
        return tokens, mask


def _check_ids(ids: npt.NDArray[np.integer[Any]], file: TokenFile, at: int) -> None:
    """Raise unless ids are in the range of any vocabulary."""
    if ids.min() < 0 or ((ids.dtype.itemsize > 4 or ids.dtype.kind == "u") and ids.max() > _MOST_ID):
        wrong = int(np.flatnonzero((ids < 0) | (ids > _MOST_ID))[0])
        raise SourceError(
            f"{file.path} holds the id {int(ids[wrong])} at token {at + wrong:,} (ids are from 0 to 2^31 - 1); it is "
            "damaged, or holds something else"
        )


class Unchanged:
    """Detects changes of a local file since it was opened; cheap enough to call for every read."""

    def __init__(self, path: str | Path, mark: Callable[[str | Path], str]) -> None:
        status = Path(path).stat()
        require_regular(status.st_mode)
        self._path, self._take = path, mark
        self._seen = self._last = Seen.of(status)
        self._mark: str | None = None

    def mark(self) -> str:
        """Return a fingerprint of its content."""
        if self._mark is None:
            self.check()
            self._mark = self._take(self._path)
        return self._mark

    def check(self) -> None:
        """Raise if the file changed: by inode and times, else by its fingerprint, if known."""
        try:
            now = Seen.of(Path(self._path).stat())
        except OSError as error:
            raise SourceError(f"{self._path} can't be read: {error.strerror or error}") from error
        if now == self._last:
            return
        if now.size != self._seen.size:
            raise SourceError(changed(str(self._path), self._seen.size, f"{now.size:,}"))
        is_retimed = now.modified_ns != self._seen.modified_ns
        if self._mark is None:
            why = "its time of change is another" if is_retimed else None
        elif self._take(self._path) != self._mark:
            why = "its content is another"
        else:
            is_sampled = self._take is sampled_mark and now.size > PIECES * PIECE_BYTES
            why = "its time of change is another, and only samples of it are known, which are the same"
            why = why if is_retimed and is_sampled else None
        if why is not None:
            raise SourceError(replaced_words(str(self._path), why))
        self._last = now


def whole_mark(path: str | Path) -> str:
    """Return a string that changes with a file's content; for up to 4 MB the same as `sampled_mark`.

    Cost: reads it whole, one to two seconds per GB.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            if os.fstat(file.fileno()).st_size > PIECES * PIECE_BYTES:
                return f"whole:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror or error}") from error
    return sampled_mark(path)


def sampled_mark(path: str | Path) -> str:
    """Return a string that changes with a file's size and almost always with its content.

    Cost: reads 64 pieces of 64 KB spread over the file, its beginning and end included; a smaller file whole.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            hashed = hashlib.sha256(str(size).encode())
            hash_samples(hashed, file, size)
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror or error}") from error
    return f"sampled:{hashed.hexdigest()}"
