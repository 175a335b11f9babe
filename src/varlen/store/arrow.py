"""Arrow files of token ids, Hugging Face's saved data sets among them, with random access in place.

A file is memory-mapped and rows are read directly. That requires an uncompressed file in which a row is one document:
`input_ids`, with `labels`, `loss_mask` and an `attention_mask` of padding before or after the tokens. Parquet isn't
supported: a row group can only be decoded whole, and documents in random order come from all of them. That takes
about a thousand times as long per document as direct access, and `varlen index` makes a store of the whole in little
more than twice the time of decoding.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.documents.pretokenized import flat_column
from varlen.errors import SourceError
from varlen.files.columns import Columns, find_columns
from varlen.files.formats.tables import table_faults
from varlen.files.paths import File
from varlen.store.token_files import Unchanged, sampled_mark
from varlen.text.loss_masks import Mask
from varlen.types import IntArray

_READ = {"input_ids", "labels", "loss_mask", "attention_mask"}  # one contiguous document per row
_KEPT_BATCHES = 4096
_MAGIC = b"ARROW1"
_Flat = tuple[npt.NDArray[Any], IntArray]


class ArrowFile:
    """A memory-mapped file whose rows are documents."""

    def __init__(self, file: File, mapped: Any, batches: list[Any], columns: Columns) -> None:
        self._file, self.path, self.name, self._mapped = file, file.path, file.name, mapped
        self._batches, self._names = batches, dict(columns.names)
        self._rows = np.cumsum([0] + [batch.num_rows for batch in batches])
        at = [batch.schema.get_field_index(columns.names["input_ids"]) for batch in batches[:1]]
        sizes = [_num_values(batch.column(at[0])) for batch in batches]
        self._tokens: list[int] = [0, *accumulate(sizes)]
        self.num_documents, self.num_tokens = int(self._rows[-1]), self._tokens[-1]
        self.has_mask = "labels" in columns.names or "loss_mask" in columns.names
        self._batch = lru_cache(_KEPT_BATCHES)(self._flat)
        self._unchanged = Unchanged(file.local_path, sampled_mark)

    def _flat(self, number: int) -> dict[str, _Flat]:
        """Return validated values and offsets of each role of one batch."""
        batch = self._batches[number]
        with table_faults(self._file):
            batch = batch.select(list(self._names.values()))
            batch.validate(full=True)
        wrong: dict[int, str] = {}
        flat: dict[str, _Flat] = {}
        for role, name in self._names.items():
            flat[role] = flat_column(batch.column(name), role, wrong)
            if not wrong and len(flat[role][0]) and flat[role][0].dtype.kind not in "iu":
                wrong[0] = f"holds {flat[role][0].dtype} in `{role}`"
        lengths = np.diff(flat["input_ids"][1])
        for role, (_, offsets) in flat.items():
            for row in np.flatnonzero(np.diff(offsets) != lengths)[:1].tolist():
                wrong.setdefault(
                    row, f"has {lengths[row]:,} `input_ids` but {np.diff(offsets)[row]:,} `{role}`"
                )
        if wrong:
            row = min(wrong)
            raise SourceError(f"{self.path} row {int(self._rows[number]) + row + 1:,} {wrong[row]}")
        return flat

    def extents(self, first: int, stop: int) -> tuple[IntArray, IntArray]:
        """Return where the documents [first, stop) begin, in tokens of the file, and their lengths."""
        self._check_size()
        starts, lengths = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        number = int(np.searchsorted(self._rows, first, side="right")) - 1
        while first < stop:
            here = min(stop, int(self._rows[number + 1]))
            rows = slice(first - int(self._rows[number]), here - int(self._rows[number]))
            begins, sizes = self._real(number, rows)
            starts.append(begins + self._tokens[number])
            lengths.append(sizes)
            first, number = here, number + 1
        return np.concatenate(starts), np.concatenate(lengths)

    def _real(self, number: int, rows: slice) -> tuple[IntArray, IntArray]:
        """Return where the unpadded tokens of rows begin within their batch, and how many there are."""
        flat = self._batch(number)
        offsets = flat["input_ids"][1][rows.start : rows.stop + 1]
        begins, lengths = offsets[:-1], np.diff(offsets)
        if "attention_mask" not in flat:
            return begins, lengths
        marks = flat["attention_mask"][0][offsets[0] : offsets[-1]]
        before = int(self._rows[number]) + rows.start
        if ((marks != 0) & (marks != 1)).any():
            row = int(np.searchsorted(offsets - offsets[0], np.argmax((marks != 0) & (marks != 1)), "right"))
            raise SourceError(
                f"{self.path} row {before + row:,} holds other than 0 and 1 in `attention_mask`"
            )
        if marks.all():
            return begins, lengths
        # A run of ones begins at a row's start or after a zero; a row with several runs is no document.
        edges = np.concatenate([[0], marks.astype(np.int8)])
        edges[offsets[:-1][lengths > 0] - offsets[0]] = 0  # as if a zero preceded each row
        runs = np.flatnonzero((marks == 1) & (edges[:-1] == 0))
        owners = np.searchsorted(offsets - offsets[0], runs, side="right") - 1
        if (twice := np.flatnonzero(np.diff(owners) == 0)).size:
            raise SourceError(
                f"{self.path} row {before + int(owners[twice[0]]) + 1:,} has padding between its tokens, and can't "
                "be read where it lies; make a store of it (varlen index)"
            )
        ones = np.concatenate([[0], np.cumsum(marks, dtype=np.int64)])
        sizes = ones[offsets[1:] - offsets[0]] - ones[offsets[:-1] - offsets[0]]
        begins = begins.copy()
        begins[owners] = runs + offsets[0]
        return begins, sizes

    def _check_size(self) -> None:
        """Raise if the file was truncated; touching missing mapped memory would kill the process."""
        self._check_same()
        size = os.fstat(self._mapped.fileno()).st_size
        if size < self._file.size:
            raise SourceError(
                f"{self.path} was cut short while it was in use: it had {self._file.size:,} bytes, and has {size:,}; "
                "copy it again"
            )

    def __enter__(self) -> ArrowFile:
        """Check that the file is still there; it is already mapped."""
        self._check_size()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Check that the file wasn't written to while it was read."""
        if kind is None:
            self._check_same()

    def _check_same(self) -> None:
        """Raise if one of the user's files was changed since it was mapped."""
        if self._file.stored is None:
            self._unchanged.check()

    def read_tokens(self, start: int, stop: int) -> npt.NDArray[np.integer[Any]]:
        """Return tokens [start, stop) of one document, as stored."""
        return self._values("input_ids", start, stop)

    def _values(self, role: str, start: int, stop: int) -> npt.NDArray[Any]:
        number = bisect_right(self._tokens, start) - 1
        first = self._tokens[number]
        return self._batch(number)[role][0][start - first : stop - first]

    def read_mask(self, start: int, stop: int, *, check: bool = True) -> Mask:
        """Return the loss mask of tokens [start, stop) of one document."""
        mask = np.ones(stop - start, dtype=np.uint8)
        if "labels" in self._names:
            labels, ids = self._values("labels", start, stop), self._values("input_ids", start, stop)
            odd = np.flatnonzero((labels != -100) & (labels != ids))
            if check and len(odd):
                raise SourceError(
                    f"{self.path} has the label {int(labels[odd[0]])} for the id {int(ids[odd[0]])} at token "
                    f"{start + int(odd[0]):,} (a label is its own token's id, not the next one's, or -100)"
                )
            mask &= labels != -100
        if "loss_mask" in self._names:
            marks = self._values("loss_mask", start, stop)
            odd = np.flatnonzero((marks != 0) & (marks != 1))
            if check and len(odd):
                raise SourceError(
                    f"{self.path} holds {int(marks[odd[0]])} in `loss_mask` at token {start + int(odd[0]):,}, and it "
                    "must be 0 or 1"
                )
            mask &= marks == 1
        return mask

    def will_need(self, start: int, stop: int) -> None:
        """Do nothing: mapped pages are read on access."""

    def mark(self) -> str:
        """Return a fingerprint of the content, and of the columns that are read."""
        return f"{sorted(self._names.items())} {self._file.content or self._unchanged.mark()}"

    def older_mark(self) -> str:
        """Return the same as `mark`."""
        return self.mark()


def map_arrow(file: File) -> ArrowFile | None:
    """Map a file whose rows are documents of token ids; None where it is something else, or can't be mapped."""
    import pyarrow as pa

    if file.format != "arrow" or file.is_remote or file.suffix_compression is not None or file.size <= 0:
        return None
    with table_faults(file):
        mapped = pa.memory_map(file.local_path)
        whole = mapped.read_buffer(file.size)
        mapped.seek(0)
        is_file = mapped.read(len(_MAGIC)) == _MAGIC
        mapped.seek(0)
        reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
        columns = _token_columns(reader.schema, file.path)
        if columns is None:
            return None
        if not is_file:
            batches = list(reader)
        else:
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()
        name = columns.names["input_ids"]
        held = next((batch.column(name) for batch in batches if _num_values(batch.column(name))), None)
        if held is not None and not _lies_in(held, whole):
            return None
    return ArrowFile(file, mapped, batches, columns)


def _token_columns(schema: Any, path: str) -> Columns | None:
    """Return the columns of token ids, one document per row; None for other rows."""
    import pyarrow as pa

    try:
        columns = find_columns(schema.names, {}, path)
    except SourceError:
        return None
    if columns.kind != "tokens" or not _READ.issuperset(columns.names):
        return None
    if any(schema.names.count(name) > 1 for name in columns.names.values()):
        return None  # reading raises for it
    for name in columns.names.values():
        kind = schema.field(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
            return None
    return columns


def _lies_in(column: Any, whole: Any) -> bool:
    """Whether a column's values lie in the file's own bytes: compressed ones are decompressed elsewhere."""
    values = column.values.buffers()[1]
    return bool(whole.address <= values.address < whole.address + whole.size)


def _num_values(column: Any) -> int:
    """Return the number of values in a list array."""
    import pyarrow as pa

    if not len(column):
        return 0
    if pa.types.is_fixed_size_list(column.type):
        return len(column) * int(column.type.list_size)
    return int(column.offsets[-1].as_py()) - int(column.offsets[0].as_py())
