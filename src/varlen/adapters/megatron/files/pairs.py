"""Write Megatron's pairs of `.bin` and `.idx`, streamed, whole or not at all; `varlen.store.bin_idx` reads them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.adapters.megatron.files.flat import bounds_of
from varlen.errors import DocumentsError, SettingError
from varlen.files.token_tables import sync, unfinished
from varlen.offline.outputs import disk_faults
from varlen.store.bin_idx import MAGIC
from varlen.types import IntArray

Stored: TypeAlias = Literal["int32", "uint16"]
_CODES: dict[Stored, int] = {"int32": 4, "uint16": 8}
_MOST: dict[Stored, int] = {"int32": 2**31 - 1, "uint16": 2**16 - 1}


def prefix_of(path: str | Path) -> Path:
    """Return the name that both files of a pair share, of any of the three."""
    name = str(path)
    return Path(name[:-4] if name.lower().endswith((".bin", ".idx")) else name)


class PairWriter:
    """One pair in the making: each sequence a document of its own."""

    def __init__(self, prefix: str | Path, dtype: Stored = "int32") -> None:
        """Begin a pair."""
        if dtype not in _CODES:
            raise SettingError(f"dtype must be 'int32' or 'uint16', got {dtype!r}")
        self.prefix, self.dtype = prefix_of(prefix), dtype
        self._paths = [Path(f"{self.prefix}{suffix}") for suffix in (".bin", ".idx")]
        self._partial = [unfinished(path) for path in self._paths]
        self._lengths = array("i")
        self._is_done = False
        with disk_faults(self.prefix):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin = self._partial[0].open("wb")

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths)

    def write(self, values: npt.NDArray[np.integer[Any]], offsets: IntArray) -> None:
        """Add documents.

        Args:
            values: `[tokens]`.
            offsets: int64 `[documents + 1]`, from 0.
        """
        if self._is_done:
            raise SettingError(f"{self.prefix} is closed; open another writer")
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
        with disk_faults(self.prefix):
            self._bin.write(np.ascontiguousarray(values, dtype=np.dtype(self.dtype).newbyteorder("<")).data)
        self._lengths.extend(np.diff(offsets).tolist())

    def close(self) -> None:
        """Write the index, and let both files appear, the index last."""
        if self._is_done:
            return
        try:
            if not self._lengths:
                raise DocumentsError(f"no documents were written to {self.prefix}; a pair needs one at least")
            with disk_faults(self.prefix):
                self._bin.close()
                self._write_index()
                for partial in self._partial:
                    sync(partial)
                for partial, path in zip(self._partial, self._paths):
                    partial.replace(path)
                sync(self.prefix.absolute().parent)
            self._is_done = True
        finally:
            self.abort()

    def _write_index(self) -> None:
        count, width = len(self._lengths), np.dtype(self.dtype).itemsize
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        with self._partial[1].open("wb") as file:
            file.write(MAGIC + struct.pack("<QBQQ", 1, _CODES[self.dtype], count, count + 1))
            file.write(lengths.astype("<i4").data)
            file.write((bounds_of(lengths)[:-1] * width).astype("<i8").data)
            file.write(np.arange(count + 1, dtype="<i8").data)

    def abort(self) -> None:
        """Leave nothing, unless the pair was closed."""
        self._is_done = True
        self._bin.close()
        for partial in self._partial:
            partial.unlink(missing_ok=True)

    def __enter__(self) -> PairWriter:
        """Return the writer."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the pair, or leave none if the block raised."""
        if kind is None:
            self.close()
        else:
            self.abort()


def write_megatron(
    prefix: str | Path,
    documents: Iterable[npt.ArrayLike] | Iterable[tuple[npt.NDArray[Any], IntArray]],
    *,
    dtype: Stored = "int32",
) -> Path:
    """Write documents as Megatron's pair of `.bin` and `.idx`, which `varlen` reads where it lies.

    Args:
        prefix: path of both files, with or without a suffix.
        documents: lists or arrays of tokens, one a document; or pairs of flat tokens and int64 offsets, which hold
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
    return writer.prefix
