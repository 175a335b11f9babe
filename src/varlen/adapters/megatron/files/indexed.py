"""Packed rows in Megatron's `.sft.bin` and `.sft.idx`, as Megatron-Bridge writes them after 0.6.

::

    NAME.sft.idx   Megatron's index; each row is one sequence and one document
    NAME.sft.bin   int32 words; of each row: 0x53465442 · version, 1 · documents D · D starts, of `seq_start_id` ·
                   a word a token: the id in the lower 31 bits, the mask on top
    NAME.sft.seq_lengths   ours, where a document ends in padding: int32 [documents], positions that don't

The release's readers leave the third file aside. A row is read with one call, wherever it lies.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.files.reader import (
    PackedReader,
    Spec,
    bounds_of,
    from_flat,
    resolve_packed,
    taken_from,
    with_lengths,
)
from varlen.adapters.megatron.files.writer import PackedWriter, WholeFiles, write_dicts
from varlen.adapters.megatron.rows import PackedRows
from varlen.errors import DocumentsError, SettingError, SourceError
from varlen.files.ours import atomic_file, disk_faults
from varlen.store.bin_idx import MAGIC as INDEX_MAGIC
from varlen.store.bin_idx import MegatronFile
from varlen.types import IntArray

MAGIC, VERSION = 0x53465442, 1
_HEAD = 3
_ID_BITS = np.uint32(0x7FFFFFFF)
_BATCH_ROWS_WORDS = 1 << 20


class PackedIndexed(PackedReader):
    """Packed rows of one or more pairs of `.sft.bin` and `.sft.idx`, in the order of their names."""

    def __init__(self, spec: Spec, *, wait_s: float = 0.0, masks: bool = True) -> None:
        """Open the pairs.

        Args:
            spec: either file of a pair, their name without a suffix, a glob, a folder, or several of these.
            wait_s: seconds to wait for files that another node has just written to a network file system.
            masks: changes nothing: a mask is a bit of each token here.

        Raises:
            SourceError: nothing is there, half of a pair, or a pair of something else.
        """
        del masks
        self.paths = resolve_packed(spec, wait_s=wait_s)
        self._files = [_opened(path) for path in self.paths]
        self._lengths = [_lengths_beside(path) for path in self.paths]
        self._bounds = bounds_of([file.num_sequences for file in self._files])
        self.num_rows = int(self._bounds[-1])
        if self.num_rows == 0:
            raise SourceError(f"{self.paths[0]} holds no row; was it written to the end?")
        self._documents: list[IntArray | None] = [None] * len(self.paths)
        self.rows([0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the pairs again in another process."""
        return type(self), (self.paths,)

    def _rows_of(self, ids: IntArray) -> PackedRows:
        return taken_from(self._bounds, ids, self._some)

    def batches(self) -> Iterator[PackedRows]:
        """Yield all rows in order, about a million words or one row at a time."""
        for number, file in enumerate(self._files):
            step = max(1, _BATCH_ROWS_WORDS * file.num_sequences // max(file.num_tokens, 1))
            for start in range(0, file.num_sequences, step):
                yield self._some(number, np.arange(start, min(start + step, file.num_sequences)))

    def _some(self, number: int, local: IntArray) -> PackedRows:
        found: list[tuple[npt.NDArray[Any], ...]] = []
        path = self.paths[number]
        with copy(self._files[number]) as file:  # an open file of its own: several threads may read
            for row in local.tolist():
                (start,), (size,) = file.extents(row, row + 1)
                words = file.read_tokens(int(start), int(start + size))
                found.append(_decoded(words, f"{path}.bin row {row + 1:,}"))
        starts, tokens = ([one[part] for one in found] for part in (0, 1))
        flat = np.concatenate(tokens).view(np.uint32)
        offsets, document_offsets = bounds_of(map(len, tokens)), bounds_of(map(len, starts))
        columns: dict[str, tuple[npt.NDArray[Any], IntArray]] = {
            "input_ids": ((flat & _ID_BITS).view(np.int32), offsets),
            "loss_mask": ((flat >> np.uint32(31)).astype(np.int8), offsets),
            "seq_start_id": (np.concatenate(starts), document_offsets),
        }
        lengths = self._lengths[number]
        if lengths is not None:
            before = self._documents_before(number)
            pieces = [lengths[before[row] : before[row + 1]] for row in local.tolist()]
            columns["seq_lengths"] = np.concatenate(pieces), bounds_of(map(len, pieces))
        rows = from_flat(columns, lambda row: f"{path}.bin row {int(local[row]) + 1:,}")
        return with_lengths(rows) if any(one is not None for one in self._lengths) else rows

    def _documents_before(self, number: int) -> IntArray:
        """Return int64 `[rows + 1]`, the documents before each row of a pair, read once."""
        known = self._documents[number]
        if known is not None:
            return known
        counts = np.zeros(self._files[number].num_sequences, dtype=np.int64)
        with copy(self._files[number]) as file:
            starts, _ = file.extents(0, len(counts))
            for row, start in enumerate(starts.tolist()):
                counts[row] = file.read_tokens(start + 2, start + _HEAD)[0]
        self._documents[number] = before = bounds_of(counts)
        lengths: Any = self._lengths[number]
        if before[-1] != len(lengths):
            raise SourceError(
                f"{_beside(self.paths[number])} has {len(lengths):,} lengths, but {self.paths[number]}.bin holds "
                f"{int(before[-1]):,} documents; write both again"
            )
        return before


def _beside(prefix: str | Path) -> Path:
    return Path(f"{prefix}.seq_lengths")


def _lengths_beside(prefix: str) -> npt.NDArray[np.int32] | None:
    path = _beside(prefix)
    if not path.is_file():
        return None
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, TokenError) as error:
        raise SourceError(f"{path} can't be read: {error}") from error
    if found.dtype != np.int32 or found.ndim != 1:
        raise SourceError(f"{path} must hold int32 lengths, got {found.dtype} of shape {found.shape}")
    return found  # type: ignore[no-any-return]


def _opened(prefix: str) -> MegatronFile:
    file = MegatronFile(Path(prefix), Path(prefix).name)
    if file.dtype.kind != "i" or file.dtype.itemsize != 4:
        raise SourceError(f"{prefix}.idx says that its numbers are {file.dtype.name}; packed rows are int32")
    if file.num_sequences != file.num_documents:
        raise SourceError(
            f"{prefix}.idx names {file.num_documents:,} documents and {file.num_sequences:,} sequences; each "
            "packed row is one of both"
        )
    return file


def _decoded(words: npt.NDArray[Any], where: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the starts and the tokens' words of one row."""
    head = [int(word) for word in words[:_HEAD]]
    if len(words) < _HEAD + 2:
        raise SourceError(f"{where} has {len(words)} words; a packed row has {_HEAD + 2} at least")
    if head[0] != MAGIC:
        raise SourceError(
            f"{where} begins with {head[0]:#x} instead of {MAGIC:#x}; tokens that aren't packed are read by "
            "vl.PackedLoader and varlen pack"
        )
    if head[1] != VERSION:
        raise SourceError(f"{where} is of version {head[1]:,}; version {VERSION} is read")
    if not 0 < head[2] < len(words) - _HEAD:
        raise SourceError(f"{where} says {head[2]:,} documents, but has {len(words) - _HEAD:,} words for all")
    return words[_HEAD : _HEAD + head[2]], words[_HEAD + head[2] :]


class PackedIndexedWriter(PackedWriter):
    """Write packed rows to one pair of `.sft.bin` and `.sft.idx`, streamed, whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        """Begin a pair.

        Args:
            path: that ends in `.sft`, `.sft.bin` or `.sft.idx`.

        Raises:
            SettingError: it ends otherwise, or the place can't be written.
        """
        prefix = prefix_of(path)
        if prefix.suffix.lower() != ".sft":
            raise SettingError(f"{path} must end in .sft: Megatron-Bridge knows packed pairs by their name")
        super().__init__(prefix)
        self._pair = PairWriter(prefix)
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._has_padding = False

    def _add(self, rows: PackedRows) -> None:
        if rows.seq_lengths is not None:
            self._lengths.append(rows.seq_lengths)
            self._has_padding |= bool((rows.seq_lengths != rows.stored_lengths - 1).any())
        tokens, bounds = rows.input_ids.astype(np.uint32), rows.offsets.tolist()
        tokens |= rows.loss_mask.astype(np.uint32) << np.uint32(31)
        starts, document_bounds = rows.seq_start_id.astype(np.int32), rows.document_offsets.tolist()
        pieces, sizes = [], []
        for row in range(rows.num_rows):
            first, last = document_bounds[row], document_bounds[row + 1]
            a, b = bounds[row], bounds[row + 1]
            pieces += [np.array([MAGIC, VERSION, last - first], dtype=np.int32), starts[first:last]]
            pieces.append(tokens[a:b].view(np.int32))
            sizes.append(_HEAD + last - first + b - a)
        self._pair.write(np.concatenate(pieces), bounds_of(sizes))

    def _finish(self) -> None:
        if self._has_padding:
            with atomic_file(_beside(self.path)) as partial, partial.open("wb") as file:
                np.save(file, np.concatenate(self._lengths), allow_pickle=False)
        elif self.num_rows:
            _beside(self.path).unlink(missing_ok=True)
        self._pair.close()

    def _give_up(self) -> None:
        self._pair.abort()


def write_packed_indexed_dataset(rows: Sequence[Mapping[str, Any]], output_path: str | Path) -> str:
    """Write packed rows given as dictionaries, as the function of this name in Megatron-Bridge after 0.6 does.

    The files are the same to the byte.

    Args:
        rows: with `input_ids`, `loss_mask` and `seq_start_id`, and perhaps `seq_lengths`.
        output_path: that ends in `.sft`, `.sft.bin` or `.sft.idx`.

    Returns:
        What the names of both files begin with.

    Raises:
        DocumentsError: a row isn't a packed row, or there is none.
        SettingError: the name ends otherwise, or the place can't be written.
    """
    with PackedIndexedWriter(output_path) as writer:
        write_dicts(writer, rows)
    return str(writer.path)


# Write Megatron's pairs of `.bin` and `.idx`, streamed, whole or not at all; `varlen.store.bin_idx` reads them.

Stored: TypeAlias = Literal["int32", "uint16"]
_CODES: dict[Stored, int] = {"int32": 4, "uint16": 8}
_MOST: dict[Stored, int] = {"int32": 2**31 - 1, "uint16": 2**16 - 1}


def prefix_of(path: str | Path) -> Path:
    """Return the name that both files of a pair share, of any of the three."""
    name = str(path)
    return Path(name[:-4] if name.lower().endswith((".bin", ".idx")) else name)


class PairWriter(WholeFiles):
    """One pair in the making: each sequence a document of its own."""

    def __init__(self, prefix: str | Path, dtype: Stored = "int32") -> None:
        if dtype not in _CODES:
            raise SettingError(f"dtype must be 'int32' or 'uint16', got {dtype!r}")
        path, self.dtype, self._lengths = prefix_of(prefix), dtype, array("i")
        super().__init__(path, Path(f"{path}.bin"), Path(f"{path}.idx"))
        with disk_faults(self.path):
            self._bin = self._partial[0].open("wb")

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths)

    def write(self, values: npt.NDArray[np.integer[Any]], offsets: IntArray) -> None:
        """Add documents (`values`: `[tokens]`; `offsets`: int64 `[documents + 1]`, from 0)."""
        most = _MOST[self.dtype]
        least = -most - 1 if self.dtype == "int32" else 0
        if len(values) and (values.min() < least or values.max() > most):
            wrong = int(np.flatnonzero((values < least) | (values > most))[0])
            document = self.num_documents + int(np.searchsorted(offsets, wrong, side="right")) - 1
            way_out = "; write int32" if self.dtype == "uint16" and 0 <= values[wrong] < 2**31 else ""
            raise DocumentsError(
                f"document {document:,} holds {int(values[wrong]):,}, which {self.dtype} can't hold ({least:,} to "
                f"{most:,}){way_out}"
            )
        with disk_faults(self.path):
            self._bin.write(np.ascontiguousarray(values, dtype=np.dtype(self.dtype).newbyteorder("<")).data)
        self._lengths.extend(np.diff(offsets).tolist())

    def _finish(self) -> None:
        if not self._lengths:
            raise DocumentsError(f"no documents were written to {self.path}; a pair needs one at least")
        self._bin.close()
        count, width = len(self._lengths), np.dtype(self.dtype).itemsize
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        with self._partial[1].open("wb") as file:
            file.write(INDEX_MAGIC + struct.pack("<QBQQ", 1, _CODES[self.dtype], count, count + 1))
            file.write(lengths.astype("<i4").data)
            file.write((bounds_of(lengths)[:-1] * width).astype("<i8").data)
            file.write(np.arange(count + 1, dtype="<i8").data)

    def _give_up(self) -> None:
        self._bin.close()


def write_megatron(
    prefix: str | Path,
    documents: Iterable[npt.ArrayLike] | Iterable[tuple[npt.NDArray[Any], IntArray]],
    *,
    dtype: Stored = "int32",
) -> Path:
    """Write documents as Megatron's pair of `.bin` and `.idx`, which `varlen` reads where it lies.

    Args:
        prefix: path of both files, with or without a suffix.
        documents: lists or arrays of tokens, one per document; or pairs of flat tokens and int64 offsets, which hold
            many and are written as they come, so that memory stays bounded.
        dtype: "uint16" for vocabularies of up to 65,536 ids, in half the bytes.

    Returns:
        The path that both files share.

    Raises:
        DocumentsError: an id doesn't fit, or there are no documents.
        SettingError: the place can't be written.
    """
    with PairWriter(prefix, dtype) as writer:
        for document in documents:
            if isinstance(document, tuple):
                writer.write(np.asarray(document[0]), np.asarray(document[1], dtype=np.int64))
            else:
                tokens = np.asarray(document, dtype=None if np.size(document) else np.int64)
                if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
                    raise DocumentsError(
                        f"document {writer.num_documents:,} must be a list of whole numbers, got {tokens.dtype} "
                        f"of shape {tokens.shape}"
                    )
                writer.write(tokens, np.array([0, len(tokens)], dtype=np.int64))
    return writer.path
