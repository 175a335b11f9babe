"""Packs as an index over a token store: which documents are in which row; tokens are not stored again.

::

    INDEX/
      .manifest.json         settings, ledger, and which token store it refers to
      4096_metadata.jsonl    what the release's data set reads beside a packed file
      offsets.npy            int64 [rows + 1]: where each row's pieces begin
      documents.npy          uint32 or int64 [pieces]: which document, counted over all shards
      positions.npy          int32 [pieces]: positions of input of each piece
      starts.npy             int32 [pieces]: its first token in its document; absent where every piece begins at 0
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.files.reader import PackedReader, bounds_of
from varlen.adapters.megatron.packing.alignment import slots_of
from varlen.adapters.megatron.rows import PackedRows
from varlen.errors import SettingError, SourceError
from varlen.files.ours import sync
from varlen.files.written import read_manifest
from varlen.offline.outputs import output_faults
from varlen.store.shard import map_array
from varlen.store.store import TokenStore, open_store
from varlen.types import Int32Array, IntArray, Packing

INDEX = "megatron-index"
_BATCH_TOKENS = 1 << 20
_MOST = 1 << 47


class PackIndex(PackedReader):
    """Packed rows, gathered from a token store when they are asked for.

    The rows are those that `pack_for_megatron` writes to Parquet with the same settings, value for value. It can be
    pickled if it was opened from a folder, and serves one thread at a time.
    """

    def __init__(
        self,
        store: TokenStore,
        arrays: dict[str, npt.NDArray[Any]],
        *,
        multiple: int = 1,
        pad_id: int = 0,
        opened_from: tuple[Path, Path] | None = None,
    ) -> None:
        """Take a store and an index of it.

        Args:
            store: the token store.
            arrays: the index's arrays by name, as `arrays_of` returns them.
            multiple: slots are rounded up to a multiple of this.
            pad_id: token of the padding.
            opened_from: the folders of the index and of the token store.
        """
        self._store, self._opened_from = store, opened_from
        self._offsets, self._documents = arrays["offsets"], arrays["documents"]
        self._positions, self._starts = arrays["positions"], arrays.get("starts")
        self._multiple, self._pad_id = multiple, pad_id
        self._first = np.concatenate([[0], np.cumsum(store.documents)]).astype(np.int64)
        self.num_rows = len(self._offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        if self._opened_from is None:
            raise SettingError("only an index that open_index opened can be sent to other processes")
        return open_index, self._opened_from

    @property
    def row_tokens(self) -> IntArray:
        """int64 `[rows]`: stored tokens of each row."""
        ends = np.concatenate([[0], np.cumsum(slots_of(self._positions, self._multiple), dtype=np.int64)])
        stored: IntArray = np.diff(ends[self._offsets]) + np.diff(self._offsets)
        return stored

    def _rows_of(self, ids: IntArray) -> PackedRows:
        counts = self._offsets[ids + 1] - self._offsets[ids]
        document_offsets = bounds_of(counts)
        within = np.arange(int(document_offsets[-1])) - np.repeat(document_offsets[:-1], counts)
        pieces = np.repeat(self._offsets[ids], counts) + within
        positions = np.asarray(self._positions[pieces])
        tokens, mask = self._gathered(pieces, positions)
        begins = bounds_of(slots_of(positions, self._multiple).astype(np.int64) + 1)
        if self._multiple > 1:
            tokens, mask = _spread(tokens, mask, positions, begins, self._pad_id)
        offsets = begins[document_offsets]
        return PackedRows(
            input_ids=tokens,
            loss_mask=mask,
            offsets=offsets,
            seq_start_id=begins[:-1] - np.repeat(offsets[:-1], counts),
            document_offsets=document_offsets,
            seq_lengths=positions,
        )

    def _gathered(self, pieces: IntArray, positions: Int32Array) -> tuple[Int32Array, npt.NDArray[np.int8]]:
        """Return the tokens of pieces, and at each whether the target behind it is trained, end to end."""
        documents = self._documents[pieces].astype(np.int64)
        shards = np.searchsorted(self._first, documents, side="right") - 1
        starts = np.zeros(len(pieces), np.int64) if self._starts is None else self._starts[pieces]
        lengths = positions.astype(np.int64) + 1
        tokens, supervised = self._store.gather(
            shards.astype(np.int64), documents - self._first[shards], starts.astype(np.int64), lengths
        )
        mask = np.ones(len(tokens), np.int8)
        if supervised is not None:
            mask[:-1] = supervised[1:]
        mask[np.cumsum(lengths) - 1] = 0  # the last token is a target alone
        return tokens, mask

    def batches(self) -> Iterator[PackedRows]:
        """Yield all rows in order, up to a million tokens or one row at a time."""
        return self.batches_of(0, self.num_rows)

    def batches_of(self, start: int, stop: int) -> Iterator[PackedRows]:
        """Yield rows in order, as `batches` does.

        Args:
            start, stop: number of the first row, and of the one behind the last.
        """
        ends = np.cumsum(self.row_tokens)
        while start < stop:
            before = int(ends[start - 1]) if start else 0
            most = int(np.searchsorted(ends, before + _BATCH_TOKENS, side="right"))
            end = min(max(most, start + 1), stop)
            yield self.rows(range(start, end))
            start = end


def open_index(folder: str | Path, tokens: str | Path | None = None) -> PackIndex:
    """Open packs that `varlen pack --format megatron-index` wrote.

    Args:
        folder: of the index.
        tokens: of the token store, if it was moved since the index was made.

    Raises:
        SourceError: no such index, or the store holds other tokens than those that it refers to.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("kind") != INDEX:
        raise SourceError(f"{folder} is not a finished index of packs: it has no manifest of one")
    kinds = {"tokens": str, "tokens_fingerprint": str, "settings": dict, "pad_id": int}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)]
    if wrong or not isinstance(manifest["settings"].get("multiple"), int):
        raise SourceError(
            f"{folder} has a damaged manifest without `{[*wrong, 'settings.multiple'][0]}`; pack it again"
        )
    path = folder / manifest["tokens"] if tokens is None else Path(tokens)
    if read_manifest(path) is None:
        raise SourceError(
            f"{folder} is an index of tokens in {os.path.normpath(path)}, which isn't there; pass tokens=PLACE"
        )
    store = open_store(path)
    recorded = manifest["tokens_fingerprint"], manifest["settings"]["multiple"], manifest["pad_id"]
    return opened(folder, store, *recorded, crc32=manifest.get("crc32"))


def opened(
    folder: Path, store: TokenStore, fingerprint: str, multiple: int, pad_id: int, crc32: Any = None
) -> PackIndex:
    """Open the arrays in a folder, over the store that they refer to; reads them once, 2 GB in about a second."""
    if store.fingerprint != fingerprint:
        raise SourceError(
            f"{folder} was made for other tokens than {store.folder} holds: the store was rewritten or extended "
            "since, or is another one; pack it again"
        )
    arrays = {}
    for name in ("offsets", "documents", "positions", "starts"):
        path = folder / f"{name}.npy"
        if name == "starts" and not path.exists():
            continue
        try:
            arrays[name] = map_array(path)
        except (OSError, ValueError) as error:
            raise SourceError(f"{path} is missing or damaged ({error}); pack it again") from error
    why = _wrong_in(arrays, int(store.documents.sum()))
    if why is None and crc32 and crc32 != _sums(arrays):
        why = "its arrays aren't those that were written"
    if why is not None:
        raise SourceError(f"{folder} is damaged: {why}; pack it again")
    folders = folder, store.folder
    return PackIndex(store, arrays, multiple=multiple, pad_id=pad_id, opened_from=folders)


def _wrong_in(arrays: dict[str, Any], num_documents: int) -> str | None:
    """Return why the arrays are inconsistent, or None if they are consistent."""
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays.values()):
        return "its arrays aren't lists of whole numbers"
    offsets, pieces = arrays["offsets"], len(arrays["documents"])
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != pieces or (offsets[1:] < offsets[:-1]).any():
        return f"the offsets of its rows don't rise from 0 to its {pieces:,} pieces"
    if any(len(array) != pieces for name, array in arrays.items() if name != "offsets"):
        return "its arrays differ in length"
    for name, most in (("documents", num_documents - 1), ("positions", _MOST), ("starts", _MOST)):
        if pieces and name in arrays and (int(arrays[name].min()) < 0 or int(arrays[name].max()) > most):
            return f"its {name} go from {arrays[name].min():,} to {arrays[name].max():,} (0 to {most:,})"
    return None


def arrays_of(packing: Packing) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an index: about 8 bytes per piece and 8 per row."""
    largest = int(packing.document_ids.max(initial=0))
    kind = np.uint32 if largest < 2**32 else np.int64
    arrays = {
        "offsets": packing.offsets,
        "documents": packing.document_ids.astype(kind),
        "positions": packing.lengths,
    }
    if packing.starts.any():
        arrays["starts"] = packing.starts
    return arrays


def _sums(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, int]:
    return {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in arrays.items()}


def write_arrays(folder: Path, packing: Packing) -> tuple[int, dict[str, int]]:
    """Write the arrays of an index; returns the bytes of their files, and the CRC-32 of each one's numbers."""
    size, arrays = 0, arrays_of(packing)
    with output_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            path = folder / f"{name}.npy"
            np.save(path, array)
            sync(path)
            size += path.stat().st_size
    return size, _sums(arrays)


def _spread(
    tokens: Int32Array, mask: npt.NDArray[np.int8], positions: Int32Array, begins: IntArray, pad_id: int
) -> tuple[Int32Array, npt.NDArray[np.int8]]:
    """Move pieces that lie end to end into their slots, with padding between them."""
    lengths = positions.astype(np.int64) + 1
    at = np.arange(len(tokens)) + np.repeat(begins[:-1] - np.cumsum(lengths) + lengths, lengths)
    padded = np.full(int(begins[-1]), pad_id, np.int32)
    padded[at] = tokens
    trained = np.zeros(int(begins[-1]), np.int8)
    trained[at] = mask
    return padded, trained
