"""fast-axolotl's reader, with its name, arguments and outputs, over varlen's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from varlen.adapters.peers import raises_too
from varlen.arguments import as_choice, as_count
from varlen.counts import many
from varlen.errors import SettingError
from varlen.files.finding import Naming, find
from varlen.files.formats.reader import all_columns
from varlen.files.paths import File, Format

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
    """Yield the rows of files in batches of one size; where a file has other columns, a new batch begins."""
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
    """Count the rows of columns."""
    return max(map(len, columns.values()), default=0)
