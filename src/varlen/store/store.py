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

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import SourceError
from varlen.files.losses import Losses, stored, total
from varlen.files.written import read_manifest
from varlen.store.shard import Shard, ShardCounts, ShardFiles, shard_counts
from varlen.text.loss_masks import Mask
from varlen.types import Int32Array, IntArray

STORE_FORMAT, WEIGHTED_FORMAT = 1, 2  # version 0.1.0 would ignore the weights of the second
STORE_FORMATS = (STORE_FORMAT, WEIGHTED_FORMAT)
ROW_WEIGHTS = "row_weights"  # key of a source's marks, set if it is read with weights
TEMPLATES = "chat_templates"  # key of a manifest: what rendered its chats, by name; left out without chats
TABLES = ".tables"  # folder in a store for tables computed from its lengths
_OPEN_SHARDS = 8192
_KEPT_TARGETS = 64  # shards whose label counts stay in memory: 4 bytes per document


class TokenStore:
    """A finished token store; `reread` picks up documents added since it was opened."""

    def __init__(self, folder: Path, manifest: dict[str, Any], *, check_tokens: bool = True) -> None:
        self.folder = folder
        self.shards: list[str] = []
        self._listed: list[Mapping[str, Any]] = []
        self.take(manifest)
        listed = self._listed  # not self: a reference cycle would keep mappings until garbage collection
        opened = lru_cache(maxsize=_OPEN_SHARDS)(
            lambda index: _opened(folder, listed[index], check_tokens=check_tokens)
        )
        self._open = opened
        self._reader = Reader(opened)
        self._targets = lru_cache(maxsize=_KEPT_TARGETS)(lambda index: opened(index).targets())

    def take(self, manifest: dict[str, Any]) -> None:
        """Replace the listing by that of a manifest, which begins with the same shards."""
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
        """Losses of its source."""
        is_whole = "losses" in self.manifest or "num_skipped" in self.manifest
        return stored(self.manifest) if is_whole else total(map(stored, self.manifest["shards"]))

    def fingerprint_at(self, num_parts: int) -> str | None:
        """Return the fingerprint that the store had with only its first parts; None if it never had exactly these."""
        if num_parts == self.num_parts:
            return self.fingerprint
        for stage in self.manifest.get("grown", ()):
            if stage["parts"] == num_parts:
                return str(stage["fingerprint"])
        return None

    @property
    def tables(self) -> Path | None:
        """Folder for tables computed from the lengths."""
        return self.folder / TABLES

    def wait_for(self, num_parts: int) -> None:
        """Return immediately: a finished store has all parts."""

    def reread(self) -> None:
        """Pick up documents added since; existing ones keep their positions."""
        now = open_store(self.folder)
        if now.fingerprint_at(self.num_parts) != self.fingerprint:
            raise SourceError(
                f"{self.folder} was replaced by another store while it was read; start over with that one"
            )
        self.take(now.manifest)

    def shard(self, index: int) -> Shard:
        """Return a shard; its offsets stay mapped."""
        return self._open(index)

    def lengths(self, shards: IntArray, documents: IntArray) -> IntArray:
        """Return the lengths of documents, given by shard and number."""
        lengths = np.empty(len(shards), dtype=np.int64)
        for index in np.unique(shards).tolist():
            at, shard = shards == index, self.shard(index)
            shard.check_offsets()
            offsets = shard.offsets
            lengths[at] = offsets[documents[at] + 1] - offsets[documents[at]]
        return lengths

    def where(self, shard: int) -> str:
        """Describe a shard's location."""
        return f"shard {self.shards[shard]} of {self.folder.name}"

    def will_need(self, shards: IntArray, documents: IntArray) -> None:
        """Prefetch documents; arguments as in `lengths`."""
        for index in np.unique(shards).tolist():
            with self.shard(index) as shard:
                shard.will_need(np.sort(documents[shards == index]))

    def count_targets(
        self, shards: IntArray, documents: IntArray, starts: IntArray, stops: IntArray
    ) -> IntArray:
        """Count the labels of pieces; arguments as in `TokenDocuments`.

        Cost: reads the masks only of documents that are cut.
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
        """Read pieces of documents in the given order; arguments as in `TokenDocuments`."""
        return self._reader.read(shards, documents, np.asarray(starts), lengths)


def _opened(folder: Path, listed: Mapping[str, Any], *, check_tokens: bool) -> Shard:
    """Open a shard, and compare it with the manifest."""
    path = folder / listed["name"]
    shard = Shard(path, check_tokens=check_tokens)
    check_listed(path, listed, shard.counts)
    return shard


def open_store(
    folder: str | Path, *, check_tokens: bool = True, manifest: dict[str, Any] | None = None
) -> TokenStore:
    """Open a finished token store, whose manifest may be at hand."""
    if manifest is None:
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
    """Return the format of a store."""
    return WEIGHTED_FORMAT if any(shard.get("has_weights") for shard in shards) else STORE_FORMAT


# Read pieces of documents from many shards by one kernel call; files stay open for the next.

OPEN_SHARDS = 64  # shards whose files stay open: the documents of a window come from a few dozen


_TOKENS, _MASK, _WEIGHTS, _WIDTH, _MASK_WIDTH, _WEIGHTS_WIDTH, _OFFSETS, _HAS_MASK, _HAS_WEIGHTS = range(9)
_CLOSED, _NOTHING = -1, -2  # a file that isn't open, and one that doesn't exist


class Reader:
    """Reads pieces of documents of a store's shards; not thread-safe."""

    def __init__(self, shard: Callable[[int], Shard]) -> None:
        """Create it from a function that opens a shard by its number."""
        self._shard = shard
        self._opened: OrderedDict[int, tuple[Shard, ShardFiles]] = OrderedDict()
        # The kernel's arguments for each shard: open files, bytes per value, the address of its offsets, and whether
        # it has a mask or weights.
        self._table: IntArray = np.full((9, 0), _CLOSED, dtype=np.int64)

    def read(
        self, shards: IntArray, documents: IntArray, starts: IntArray, lengths: IntArray
    ) -> tuple[Int32Array, Mask | None]:
        """Read pieces; arguments as in `TokenStore.gather`."""
        pieces = [np.ascontiguousarray(part, dtype=np.int64) for part in (shards, documents, starts, lengths)]
        for index in np.unique(shards).tolist():  # the kernel reads the mapped offsets
            self._shard(index).check_offsets()
        most = int(shards.max(initial=-1)) + 1
        if most > self._table.shape[1]:
            more = np.full((9, 2 * most - self._table.shape[1]), _CLOSED, dtype=np.int64)
            self._table = np.concatenate([self._table, more], axis=1)
        tokens = np.empty(int(lengths.sum()), dtype=np.int32)
        self._fill(pieces, _TOKENS, _WIDTH, tokens)
        if not len(shards) or self._table[_HAS_MASK, shards].max() <= 0:
            return tokens, None
        mask = np.ones(len(tokens), dtype=np.uint8)
        self._fill(pieces, _MASK, _MASK_WIDTH, mask)
        if self._table[_HAS_WEIGHTS, shards].max() <= 0:
            return tokens, mask
        weights = mask.astype(np.float32)
        self._fill(pieces, _WEIGHTS, _WEIGHTS_WIDTH, weights)
        return tokens, weights

    def _fill(self, pieces: list[IntArray], role: int, width: int, values: npt.NDArray[Any]) -> None:
        """Fill one value per token."""
        from varlen.store.kernels import read_pieces  # imports numba, which opening a store doesn't need

        table, first = self._table, 0
        shards, documents, starts, lengths = pieces
        layout = table[role], table[width], table[_OFFSETS]
        while (failed := read_pieces(shards, documents, starts, lengths, *layout, first, values)) >= 0:
            index, document, start, length = (int(part[failed]) for part in pieces)
            if table[role, index] == _CLOSED:
                self._open(index)
                first = failed
                continue
            to = int(pieces[3][:failed].sum())
            with self._shard(index) as shard:  # read again in Python for a proper error
                at = int(shard.offsets[document]) + start
                again = shard.read_tokens if role == _TOKENS else shard.read_mask
                values[to : to + length] = again(at, at + length)
            first = failed + 1

    def _open(self, index: int) -> None:
        """Open a shard's files, and close those opened longest ago."""
        shard = self._shard(index)
        files = shard.files()
        while len(self._opened) >= OPEN_SHARDS:
            closed, _ = self._opened.popitem(last=False)
            self._table[[_TOKENS, _MASK, _WEIGHTS], closed] = _CLOSED
        self._opened[index] = shard, files
        address = shard.offsets.__array_interface__["data"][0]
        mask = _NOTHING if files.mask < 0 or files.is_weighted else files.mask
        weights = files.mask if files.is_weighted else _NOTHING
        has = files.mask >= 0, files.is_weighted
        self._table[:, index] = (files.tokens, mask, weights, files.width, 1, 4, address, *has)


# Validate a token store's manifest, by itself and against its shards.

_MOST = 1 << 47  # documents or tokens, so that their bytes fit any file system and sums fit 63 bits
_MANY_DOCUMENTS = 1 << 20  # of a shard: check its metadata before allocating for more
_COUNTS = ("num_documents", "num_tokens", "num_targets", "num_skipped")
_COMPARED = ("num_documents", "num_tokens", "num_targets", "dtype", "has_mask", "has_weights", "crc32")


def check_listing(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise unless a manifest is consistent and matches the sizes of its shards."""
    why = _wrong_in(manifest)
    if why is not None:
        raise SourceError(f"{folder} has a damaged manifest: {why}; index the data again")
    for listed in manifest["shards"]:
        is_odd = not listed["num_documents"] or not listed["num_tokens"]
        if is_odd or listed["num_documents"] > _MANY_DOCUMENTS:
            check_listed(folder / listed["name"], listed, shard_counts(folder / listed["name"]))


def check_listed(path: Path, listed: Mapping[str, Any], counts: ShardCounts | None) -> None:
    """Raise unless a shard matches the manifest."""
    if counts is None:
        raise SourceError(
            f"{path} is not a finished shard of tokens, though the manifest lists it; index again"
        )
    for name in _COMPARED:
        actual, listed_value = getattr(counts, name), listed.get(name)
        if name in listed and listed_value != actual:
            raise SourceError(
                f"{path} holds {_shown(actual)} {name.removeprefix('num_')}, and the manifest of its store says "
                f"{_shown(listed_value)}; put back the one that belongs to the other, or index the data again"
            )


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else repr(value)[:40]


def _wrong_in(manifest: Mapping[str, Any]) -> str | None:
    """Return what is inconsistent in a manifest's shards; None if nothing is."""
    shards = manifest.get("shards")
    if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
        return "it lists no shards"
    for shard in shards:
        name = shard.get("name")
        if not isinstance(name, str) or Path(name).name != name or not name.split("-")[0].isdecimal():
            return f"{_shown(name)} is no name of a shard"
        for count in _COUNTS:
            if (count in shard or count in _COUNTS[:2]) and not _is_count(shard.get(count)):
                return f"shard {name} has {_shown(shard.get(count))} {count.removeprefix('num_')}"
    if len({shard["name"] for shard in shards}) < len(shards):
        return "it lists a shard twice"
    for count in _COUNTS:
        listed = manifest.get(count)
        if count in manifest and all(count in shard for shard in shards):
            held = sum(shard[count] for shard in shards)
            if listed != held:
                return f"its shards have {held:,} {count.removeprefix('num_')} together, and it says {_shown(listed)}"
    return _wrong_beside(manifest, shards)


def _wrong_beside(manifest: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what is inconsistent in the rest of a manifest; None if nothing is."""
    if not isinstance(manifest.get("fingerprint"), str):
        return "it has no fingerprint"
    if "num_parts" in manifest and not _is_count(manifest["num_parts"]):
        return f"it has {_shown(manifest['num_parts'])} parts"
    source = manifest.get("source", {})
    if not isinstance(source, dict) or not isinstance(source.get("tokenizer") or {}, dict):
        return "it doesn't say what it was made of"
    stages = manifest.get("grown", [])
    if not isinstance(stages, list) or not all(
        isinstance(entry, dict)
        and _is_count(entry.get("parts"))
        and isinstance(entry.get("fingerprint"), str)
        for entry in stages
    ):
        return "it doesn't say how it grew"
    try:
        for entry in [manifest, *shards]:
            stored(entry)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return "it doesn't say what was lost"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def weighs(tokens: object) -> bool:
    """Whether documents were read with `row_weights`, so that their masks may hold weights."""
    manifest = getattr(tokens, "manifest", None)
    source = manifest.get("source") if isinstance(manifest, Mapping) else None
    return isinstance(source, Mapping) and bool(source.get(ROW_WEIGHTS))
