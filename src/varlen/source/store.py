"""Token stores: documents as token ids on disk, shard by shard, to be packed any number of times.

::

    STORE/
      manifest.json          written last: without it the store isn't finished
      00000-000/             a shard
        tokens.bin           uint16 or int32, little-endian, end to end
        loss_mask.bin        uint8, one a token; absent where every token is supervised
        loss_weights.bin     float32, one a token, in place of the mask where rows have weights; 0 for no label
        offsets.npy          int64 [documents + 1]
        targets.npy          int32 [documents]: labels that the whole document gives, its first token's not counted
        shard.json           counts and dtype, written last
        skipped.log          records that couldn't be read, one a line; absent where there are none
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from varlen.errors import SourceError
from varlen.source.listing import check_listed, check_listing
from varlen.source.loss_masks import Mask
from varlen.source.losses import Losses, stored, total
from varlen.source.pieces import Reader
from varlen.source.shard import Shard
from varlen.source.written import read_manifest
from varlen.types import Int32Array, IntArray

STORE_FORMAT, WEIGHTED_FORMAT = 1, 2
"""Of stores, and of those with weights, which version 0.1.0 would read without them."""
STORE_FORMATS = (STORE_FORMAT, WEIGHTED_FORMAT)
TABLES = ".tables"
"""Folder in a store for what is computed from its lengths once and kept."""
_OPEN_SHARDS = 8192
_KEPT_TARGETS = 64
"""Shards whose counts of labels stay in memory: 4 bytes a document."""


class TokenStore:
    """A finished token store; what was added to it since it was opened is there after `reread`."""

    def __init__(self, folder: Path, manifest: dict[str, Any], *, check_tokens: bool = True) -> None:
        """Open it; arguments as `open_store` has them."""
        self.folder = folder
        self.shards: list[str] = []
        self._listed: list[Mapping[str, Any]] = []
        self.take(manifest)
        listed = self._listed  # and not self, which would keep mappings until a collection of garbage
        opened = lru_cache(maxsize=_OPEN_SHARDS)(
            lambda index: _opened(folder, listed[index], check_tokens=check_tokens)
        )
        self._open = opened
        self._reader = Reader(opened)
        self._targets = lru_cache(maxsize=_KEPT_TARGETS)(lambda index: opened(index).targets())

    def take(self, manifest: dict[str, Any]) -> None:
        """Take in what a manifest lists; it begins with what is there already.

        Raises:
            SourceError: it is damaged, or its parts are out of order.
        """
        check_listing(self.folder, manifest)
        listed = manifest["shards"]
        names = [shard["name"] for shard in listed]
        documents = np.array([shard["num_documents"] for shard in listed], dtype=np.int64)
        tokens = np.array([shard["num_tokens"] for shard in listed], dtype=np.int64)
        parts = np.array([int(name.split("-")[0]) for name in names], dtype=np.int64)
        before = int(parts[-1]) + 1 if len(parts) else 0
        num_parts = int(manifest.get("num_parts", before))
        if (np.diff(parts) < 0).any() or num_parts < before:
            raise SourceError(f"{self.folder} has a damaged manifest: its parts are out of order")
        self.manifest, self.documents, self.tokens = manifest, documents, tokens
        self.parts, self.num_parts = parts, num_parts
        self.shards[:], self._listed[:] = names, listed
        self._may_have_masks = any(shard.get("has_mask", True) for shard in listed)

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens, whatever they were made from."""
        return str(self.manifest["fingerprint"])

    @property
    def losses(self) -> Losses:
        """What its source holds that no token of it stands for."""
        is_whole = "losses" in self.manifest or "num_skipped" in self.manifest
        return stored(self.manifest) if is_whole else total(map(stored, self.manifest["shards"]))

    def fingerprint_at(self, num_parts: int) -> str | None:
        """Return the fingerprint that the store had with its first parts alone; None: it never had just these."""
        if num_parts == self.num_parts:
            return self.fingerprint
        for stage in self.manifest.get("grown", ()):
            if stage["parts"] == num_parts:
                return str(stage["fingerprint"])
        return None

    @property
    def tables(self) -> Path | None:
        """Folder for what is computed from the lengths once and kept."""
        return self.folder / TABLES

    def wait_for(self, num_parts: int) -> None:
        """Return at once: all parts of a finished store are there."""

    def reread(self) -> None:
        """Take in what was added since; what was there keeps its place.

        Raises:
            SourceError: another store stands there now.
        """
        now = open_store(self.folder)
        if now.fingerprint_at(self.num_parts) != self.fingerprint:
            raise SourceError(
                f"{self.folder} was replaced by another store while it was read; begin anew with that one"
            )
        self.take(now.manifest)

    def shard(self, index: int) -> Shard:
        """Return a shard; its offsets stay mapped."""
        return self._open(index)

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        """Return the lengths of documents, each given by its shard and its number there.

        Raises:
            SourceError: a shard's offsets are damaged.
        """
        lengths = np.empty(len(shards), dtype=np.int64)
        for index in np.unique(shards).tolist():
            at, shard = shards == index, self.shard(index)
            shard.check_offsets()
            offsets = shard.offsets
            lengths[at] = offsets[documents[at] + 1] - offsets[documents[at]]
        return lengths

    def where(self, shard: int) -> str:
        """Say where a shard lies."""
        return f"shard {self.shards[shard]} of {self.folder.name}"

    def will_need(self, shards: IntArray, documents: IntArray) -> None:
        """Have the system read documents in while other things are done; arguments as in `lengths`."""
        for index in np.unique(shards).tolist():
            with self.shard(index) as shard:
                shard.will_need(np.sort(documents[shards == index]))

    def count_targets(
        self, shards: IntArray, documents: IntArray, starts: IntArray, stops: IntArray
    ) -> IntArray:
        """Count the labels that pieces of documents give: of supervised tokens but each piece's first.

        Args:
            shards: int64 `[pieces]`.
            documents: int64 `[pieces]`, numbers within the shards.
            starts: int64 `[pieces]`.
            stops: int64 `[pieces]`; a piece is its document's tokens [start, stop).

        Returns:
            int64 `[pieces]`. Cost: masks are read only of documents that are cut.

        Raises:
            SourceError: a shard is damaged.
        """
        counts: IntArray = np.maximum(stops - starts - 1, 0)
        if not self._may_have_masks:
            return counts
        for index in np.unique(shards).tolist():
            shard = self.shard(index)
            if not shard.counts.has_mask:
                continue
            shard.check_offsets()
            pieces = np.flatnonzero(shards == index)
            held = documents[pieces]
            lengths = shard.offsets[held + 1] - shard.offsets[held]
            is_whole = stops[pieces] - starts[pieces] == lengths
            counts[pieces[is_whole]] = self._targets(index)[held[is_whole]]
            if len(cut := pieces[~is_whole]):
                first = shard.offsets[documents[cut]]
                counts[cut] = shard.count_marked(first + starts[cut] + 1, first + stops[cut])
        return counts

    def gather(
        self, shards: IntArray, documents: IntArray, starts: Sequence[int] | IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces of documents end to end, in the order asked for.

        Args:
            shards: int64 `[pieces]`.
            documents: int64 `[pieces]`, numbers within the shards.
            starts: int `[pieces]`, the first token of each piece within its document.
            lengths: int64 `[pieces]`, tokens of each piece.

        Returns:
            Tokens, and the mask; None where all are supervised, and float32 where shards of the pieces hold
            weights. Cost: a system call a piece, and no step in Python.

        Raises:
            SourceError: a shard is damaged.
        """
        return self._reader.read(shards, documents, np.asarray(starts), lengths)


def _opened(folder: Path, listed: Mapping[str, Any], *, check_tokens: bool) -> Shard:
    """Open a shard, and hold it against what the manifest says of it."""
    path = folder / listed["name"]
    shard = Shard(path, check_tokens=check_tokens)
    check_listed(path, listed, shard.counts)
    return shard


def open_store(folder: str | Path, *, check_tokens: bool = True) -> TokenStore:
    """Open a finished token store.

    Args:
        folder: of the store.
        check_tokens: refuse a shard whose tokens are missing as soon as its lengths are needed; else who reads them
            is told.

    Raises:
        SourceError: there is none, or another version of varlen wrote it.
    """
    manifest = read_manifest(Path(folder))
    if manifest is None or manifest.get("kind") != "tokens":
        raise SourceError(f"{folder} is not a finished token store: it has no manifest of one")
    if manifest.get("format") not in STORE_FORMATS:
        raise SourceError(f"{folder} was written in format {manifest.get('format')}; index the data again")
    try:
        return TokenStore(Path(folder), manifest, check_tokens=check_tokens)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SourceError(
            f"{folder} has a damaged manifest: it lists no shards; index the data again"
        ) from error


def format_of(shards: Sequence[Mapping[str, Any]]) -> int:
    """Return the format of a store.

    Args:
        shards: as its manifest lists them.
    """
    return WEIGHTED_FORMAT if any(shard.get("has_weights") for shard in shards) else STORE_FORMAT
