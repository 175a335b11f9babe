"""What fast-axolotl offers, with its names, arguments and outputs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from varlen.adapters.peers import raises_too
from varlen.arguments import as_choice, as_count
from varlen.batch.collate import collate
from varlen.counts import many
from varlen.errors import DocumentsError, SettingError
from varlen.files.finding import Naming, find
from varlen.files.formats.reader import all_columns
from varlen.files.paths import File, Format
from varlen.pack.api import pack
from varlen.pack.pieces import check_fit, ways_out
from varlen.types import Packing

__all__ = [
    "LeakWarning",
    "PackedColumns",
    "concatenate_and_pack",
    "pack_sequences",
    "streaming_dataset_reader",
]


# The packing functions of fast-axolotl, with its names, arguments and outputs, over varlen's packer.
#
# Two spellings are served: the one of its documentation (tensors in, one tensor out) and that of its release
# 0.2.0, which takes `eos_token_id` and returns a dictionary of lists. Where the original panics or loses tokens
# in silence, these raise, or do what `overlong` says.

Sequences = Sequence[Any]  # token ids of each sequence: lists, numpy arrays or torch tensors
Policy = Literal["error", "truncate", "drop"]
_POLICIES = ("error", "truncate", "drop")


class LeakWarning(UserWarning):
    """Rows of these functions carry no boundaries, so what is trained on them is not what it seems."""


class PackedColumns(dict[str, Any]):
    """Three columns of rows: the original's dictionary, but for iteration and unpacking, which give the columns.

    So do numbers: `columns[0]` is `columns["input_ids"]`.

    >>> columns = PackedColumns([[1]], [[2]], [[3]])
    >>> ids, labels, masks = columns
    >>> ids, columns["labels"], "labels" in columns, columns == dict(columns.items())
    ([[1]], [[2]], True, True)
    """

    def __init__(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> None:
        """Take the columns.

        Args:
            input_ids: `[rows, max_length]`, in the form of the sequences given: lists of lists, an array or a tensor.
                Or a mapping of all columns, with which other libraries make a mapping of the same kind.
            labels: likewise.
            attention_mask: likewise.
        """
        if isinstance(input_ids, Mapping):
            super().__init__(input_ids.items())
        else:
            super().__init__(input_ids=input_ids, labels=labels, attention_mask=attention_mask)

    @property
    def input_ids(self) -> Any:
        """`[rows, max_length]`."""
        return self["input_ids"]

    @property
    def labels(self) -> Any:
        """`[rows, max_length]`."""
        return self["labels"]

    @property
    def attention_mask(self) -> Any:
        """`[rows, max_length]`."""
        return self["attention_mask"]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over columns, where a dictionary gives names."""
        return iter(self.values())

    def __reversed__(self) -> Iterator[Any]:
        """Iterate over columns from the last one."""
        return iter(tuple(self.values())[::-1])

    def __getitem__(self, key: Any) -> Any:
        """Return a column by its name, or by its number, as of a tuple."""
        if isinstance(key, int | slice):
            return tuple(self.values())[key]
        return super().__getitem__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy columns by name."""
        return PackedColumns, (dict(self.items()),)


Boundaries = list[list[tuple[int, int]]]  # for each row, where each of its sequences begins and ends


def pack_sequences(
    sequences: Sequences,
    max_length: int,
    pad_token_id: int,
    eos_token_id: int | None = None,
    label_pad_id: int = -100,
    *,
    return_boundaries: bool = False,
    overlong: Policy = "error",
) -> Any:
    """Fill rows with sequences in order, opening the next row where one doesn't fit (next-fit).

    Args:
        sequences: lists, arrays or tensors of token ids.
        max_length: width of a row.
        pad_token_id: id at padding.
        eos_token_id: as in release 0.2.0: each sequence, the empty one too, is followed by this id and by one
            padding token.
        label_pad_id: label at padding.
        return_boundaries: also return where each sequence begins and ends.
        overlong: what becomes of sequences that fit in no row: "error", "truncate" or "drop".

    Returns:
        Without `eos_token_id` the rows, `[rows, max_length]`: a tensor, an array or lists, as the sequences
        were. With it a dictionary of `input_ids`, `labels` and `attention_mask` (0 at padding), each a list of
        rows. With `return_boundaries` a pair of that and, for each row, (begin, end) of its sequences.

    Raises:
        OverlongDocumentError: a sequence fits in no row, and `overlong` is "error".
        DocumentsError: sequences that hold no whole numbers.
        SettingError: a setting out of range.

    Warns:
        LeakWarning: without boundaries nothing keeps the sequences of a row apart.

    >>> pack_sequences([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 8, 0, return_boundaries=True)
    ([[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 0, 0, 0, 0]], [[(0, 3), (3, 5)], [(0, 4)]])
    """
    as_choice(overlong, "overlong", _POLICIES)
    width = as_count(max_length, "max_length")
    if eos_token_id is None:
        _check_lengths(sequences, width, overlong)
        rows, packing = _rows(list(sequences), width, overlong, pad_token_id, {}, {})
        packed: Any = _like(rows["input_ids"], sequences, pad_token_id)
    else:
        if width < 3:
            raise SettingError(f"max_length must hold a token, its eos and a padding token; got {width}")
        _check_lengths(sequences, width - 2, overlong)
        most = width - 2 if overlong == "truncate" else None  # the eos stays
        cut = [_as_lists(sequence[:most]) for sequence in sequences]
        ended = [[*sequence, eos_token_id, pad_token_id] for sequence in cut]
        labels = [[*sequence, eos_token_id, label_pad_id] for sequence in cut]
        masks = [[1] * (len(sequence) + 1) + [0] for sequence in cut]
        columns = {"given_labels": labels, "mask": masks}
        pads = {"given_labels": label_pad_id}
        rows, packing = _rows(ended, width, overlong, pad_token_id, columns, pads, is_made_here=True)
        packed = {
            "input_ids": _as_lists(rows["input_ids"]),
            "labels": _as_lists(rows["given_labels"]),
            "attention_mask": _as_lists(rows["mask"]),
        }
    if not return_boundaries:
        _warn()
        return packed
    return packed, _boundaries(packing, 0 if eos_token_id is None else 1)


def concatenate_and_pack(
    input_ids: Sequences,
    labels: Sequences,
    attention_masks: Sequences,
    max_length: int,
    pad_token_id: int,
    label_pad_id: int = -100,
    *,
    overlong: Policy = "error",
) -> PackedColumns:
    """Fill rows with sequences in order, their labels and masks beside them (next-fit).

    Args:
        input_ids: lists, arrays or tensors of token ids.
        labels: as long as the sequences.
        attention_masks: as long as the sequences.
        max_length: width of a row.
        pad_token_id: id at padding, where the mask is 0.
        label_pad_id: label at padding.
        overlong: what becomes of sequences longer than a row: "error", "truncate" or "drop".

    Returns:
        Three columns of rows `[rows, max_length]`, in the form of the sequences given.

    Raises:
        OverlongDocumentError: a sequence is longer than a row, and `overlong` is "error".
        DocumentsError: labels or masks that don't match the sequences.
        SettingError: a setting out of range.

    Warns:
        LeakWarning: nothing keeps the sequences of a row apart.
    """
    as_choice(overlong, "overlong", _POLICIES)
    width = as_count(max_length, "max_length")
    _check_lengths(input_ids, width, overlong)
    columns = {"given_labels": list(labels), "mask": list(attention_masks)}
    rows, _ = _rows(list(input_ids), width, overlong, pad_token_id, columns, {"given_labels": label_pad_id})
    _warn()
    pads = {"input_ids": pad_token_id, "given_labels": label_pad_id, "mask": 0}
    return PackedColumns(*(_like(rows[name], input_ids, pad) for name, pad in pads.items()))


def _check_lengths(sequences: Sequences, longest: int, overlong: Policy) -> None:
    odd = [
        number
        for number, sequence in enumerate(sequences)
        if not hasattr(sequence, "__len__") or getattr(sequence, "ndim", 1) == 0
    ]
    if odd:
        raise DocumentsError(
            f"sequence {odd[0]:,} is a {type(sequences[odd[0]]).__name__} "
            f"({len(odd):,} of {len(sequences):,} are no sequences); pass a list of token ids for each document"
        )
    if overlong == "error":
        out = ways_out([name for name in _POLICIES if name != "error"], "max_length")
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        name = "sequence {:,}".format
        check_fit([lengths], longest, name, limit_name="the most of a row", out=out, units="sequences")


def _rows(
    sequences: list[Any],
    width: int,
    overlong: Policy,
    pad_id: int,
    columns: Mapping[str, Sequences],
    pads: Mapping[str, int],
    *,
    is_made_here: bool = False,
) -> tuple[dict[str, Any], Packing]:
    """Pack sequences by next-fit; return ids and columns as rows (lists for lists), and the packing."""
    packing = pack([len(sequence) for sequence in sequences], width, "next_fit", overlong)
    if are_plain([sequences] if is_made_here else [sequences, *columns.values()]):
        rows = {name: join(column, packing, pads.get(name, 0)) for name, column in columns.items()}
        return {"input_ids": join(sequences, packing, pad_id), **rows}, packing
    batch = collate(sequences, packing, columns=columns, pad_id=pad_id, column_pads=pads)
    return {"input_ids": batch.input_ids, **batch.columns}, packing


def _boundaries(packing: Packing, padding: int) -> Boundaries:
    """Return (begin, end) of each sequence in its row, without the padding behind it."""
    ends = np.cumsum(packing.lengths)
    rows = []
    for first, stop in zip(packing.offsets[:-1].tolist(), packing.offsets[1:].tolist()):
        before = ends[first] - packing.lengths[first]
        spans = zip(
            ends[first:stop] - packing.lengths[first:stop] - before, ends[first:stop] - before - padding
        )
        rows.append([(int(begin), int(end)) for begin, end in spans])
    return rows


def _as_lists(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _like(rows: Any, given: Sequences, pad: int) -> Any:
    """Rows in the form of the sequences given: a tensor or an array of their dtype, else lists.

    Where that dtype can't hold the rows or what they are padded with, such as -100 in unsigned numbers, it is int64.
    """
    first = given[0] if len(given) else None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        fits = _fits(torch.iinfo(first.dtype), rows, pad)
        return torch.from_numpy(rows).to(first.device, first.dtype if fits else torch.int64)
    if isinstance(first, np.ndarray):
        return rows.astype(first.dtype if _fits(np.iinfo(first.dtype), rows, pad) else np.int64)
    return _as_lists(rows)


def _fits(limits: Any, rows: Any, pad: int) -> bool:
    values = (pad, int(rows.min()), int(rows.max())) if rows.size else (pad,)
    return bool(limits.min <= min(values) and max(values) <= limits.max)


def _warn() -> None:
    warnings.warn(
        "rows of packed sequences carry no boundaries: the model lets each sequence see those before it in its "
        "row, and labels=batch trains on the padding. Two lines keep them apart: "
        "batch = vl.collate(sequences, vl.pack([len(s) for s in sequences], max_length)).to_torch(); "
        "loss = model(**varlen.adapters.hf.model_inputs(batch, model)).loss",
        LeakWarning,
        stacklevel=3,
    )


# Rows of Python lists from Python lists: joined as lists, since arrays on the way would cost ten times as much.


def are_plain(columns: Sequence[Any]) -> bool:
    """Return whether all are lists of Python's own whole numbers, as long in each column as in the others.

    What isn't takes the way over arrays, which says what is wrong with it.
    """
    first = columns[0]
    for column in columns:
        if len(column) != len(first):
            return False
        for sequence, other in zip(column, first):
            if (
                type(sequence) is not list
                or len(sequence) != len(other)
                or not set(map(type, sequence)) <= {int}
            ):
                return False
    return True


def join(sequences: Sequence[Any], packing: Packing, pad: int) -> Any:
    """Return the rows of a packing, padded to its capacity: a list of lists, of lists."""
    rows: list[Any] = []
    bounds = packing.offsets.tolist()
    pieces = list(zip(packing.document_ids.tolist(), packing.starts.tolist(), packing.stops.tolist()))
    for first, last in zip(bounds[:-1], bounds[1:]):
        row: list[int] = []
        for document, start, stop in pieces[first:last]:
            sequence = sequences[document]
            row += sequence if stop - start == len(sequence) else sequence[start:stop]
        row += [pad] * (packing.capacity - len(row))
        rows.append(row)
    return rows


# fast-axolotl's reader, with its name, arguments and outputs, over varlen's own.

OnError = Literal["raise", "skip"]
_TYPES: dict[str, Format] = {
    "jsonl": "jsonl",
    "json": "json",
    "parquet": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
    "csv": "csv",
    "text": "text",
}


@raises_too(RuntimeError)
def streaming_dataset_reader(
    file_path: str | Path,
    dataset_type: str | None = None,
    batch_size: int = 1000,
    num_threads: int = 4,
    *,
    on_error: OnError = "raise",
) -> Iterator[dict[str, list[Any]]]:
    """Read a file in batches of rows, column by column, in bounded memory.

    Args:
        file_path: a file, a folder, a glob or a URL; plain, .gz or .zst.
        dataset_type: format of the files, as "jsonl", "parquet", "arrow", "csv", "json" or "text" (a row a line);
            None goes by their names.
        batch_size: rows of a batch; the last one may hold fewer.
        num_threads: taken for compatibility; the order of rows doesn't depend on it.
        on_error: "raise" at a row that can't be read, where the original leaves rows out and prints a line; or
            "skip" them, with a warning that lists them at the end.

    Yields:
        For each batch the values of every column that the first row has, by name. CSV values are text.

    Raises:
        SourceError: no such file, or a row that can't be read.
        SettingError: a setting out of range.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "a.jsonl")
    >>> _ = path.write_text('{"input_ids": [1, 2]}' + chr(10) + '{"input_ids": [3]}')
    >>> list(streaming_dataset_reader(path, batch_size=100))
    [{'input_ids': [[1, 2], [3]]}]
    """
    as_choice(on_error, "on_error", ("raise", "skip"))
    size = as_count(batch_size, "batch_size")
    as_count(num_threads, "num_threads", least=0)
    kind: Format | None = None
    if dataset_type is not None and dataset_type != "hf_dataset":
        kind = _TYPES.get(dataset_type.split(".")[0])
        if kind is None:
            raise SettingError(f"dataset_type must be one of {', '.join(_TYPES)}; got {dataset_type!r}")
    files = find(file_path, Naming(format=kind)).files
    return _batches(files, size, on_error)


def _batches(files: Sequence[File], size: int, on_error: OnError) -> Iterator[dict[str, list[Any]]]:
    """Yield batches of `size` rows; a file with other columns begins a new batch."""
    waiting: dict[str, list[Any]] = {}
    skipped: list[str] = []
    for file in files:
        for columns, faults in all_columns(file):
            if faults and on_error == "raise":
                raise faults[0].raised()
            skipped += map(str, faults)
            if waiting and waiting.keys() != columns.keys():
                yield waiting
                waiting = {}
            for name, values in columns.items():
                waiting.setdefault(name, []).extend(values)
            while _rows_of(waiting) >= size:
                yield {name: values[:size] for name, values in waiting.items()}
                waiting = {name: values[size:] for name, values in waiting.items()}
    if _rows_of(waiting):
        yield waiting
    if skipped:
        more = f" and {len(skipped) - 5:,} more" if len(skipped) > 5 else ""
        were = many(len(skipped), "row was", "rows were")
        warnings.warn(f"{were} skipped: {'; '.join(skipped[:5])}{more}", stacklevel=2)


def _rows_of(columns: Mapping[str, list[Any]]) -> int:
    return max(map(len, columns.values()), default=0)
