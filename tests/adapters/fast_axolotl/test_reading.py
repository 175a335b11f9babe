"""fast-axolotl's reader: both of its signatures, every format, and the loop that its documentation prints."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from varlen.adapters.fast_axolotl import LeakWarning, pack_sequences, streaming_dataset_reader
from varlen.errors import SettingError, SourceError

ROWS = [{"input_ids": [1, 2, number], "text": f"row {number}"} for number in range(7)]


def write(folder: Path, name: str) -> Path:
    """Write the rows in the format that the name ends in."""
    path = folder / name
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if name.endswith(".jsonl"):
        path.write_text(lines)
    elif name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    elif name.endswith(".json"):
        path.write_text(json.dumps(ROWS))
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_file(sink, pa.Table.from_pylist(ROWS).schema) as file,
        ):
            file.write_table(pa.Table.from_pylist(ROWS))
    return path


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in ("input_ids", "text")}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("as_released", [False, True])
def test_batches_hold_the_columns_of_consecutive_rows(tmp_path, name, as_released):
    path = write(tmp_path, name)

    if as_released:
        batches = list(streaming_dataset_reader(str(path), name.partition(".")[2], 3, 2))
    else:
        batches = list(streaming_dataset_reader(path, batch_size=3))

    assert batches == [columns(ROWS[:3]), columns(ROWS[3:6]), columns(ROWS[6:])]


def test_csv_values_are_text_and_a_line_of_text_is_a_row(tmp_path):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "n"], ["a, b", 1], ["c\nd", 2]])
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")

    assert list(streaming_dataset_reader(tmp_path / "a.csv", "csv")) == [
        {"text": ["a, b", "c\nd"], "n": ["1", "2"]}
    ]
    assert list(streaming_dataset_reader(tmp_path / "a.txt", "text")) == [{"text": ["one", "two"]}]


def test_the_type_goes_before_the_name(tmp_path):
    path = write(tmp_path, "a.jsonl").rename(tmp_path / "a.data")

    assert list(streaming_dataset_reader(path, "jsonl")) == [columns(ROWS)]


def test_the_streaming_loop_of_the_documentation_runs_and_warns_of_what_leaks(tmp_path):
    path = write(tmp_path, "a.jsonl")

    def create_packed_batches(data_path: Path, max_length: int, batch_size: int) -> Any:
        buffer: list[list[int]] = []
        for batch in streaming_dataset_reader(data_path, batch_size=100):
            buffer.extend(batch["input_ids"])
            while len(buffer) >= batch_size:
                to_pack = buffer[:batch_size]
                buffer = buffer[batch_size:]
                yield pack_sequences(to_pack, max_length=max_length, pad_token_id=0)

    with pytest.warns(LeakWarning, match=r"no boundaries: .* Two lines"):
        packed = list(create_packed_batches(path, 8, 3))

    assert packed == [
        [[1, 2, 0, 1, 2, 1, 0, 0], [1, 2, 2, 0, 0, 0, 0, 0]],
        [[1, 2, 3, 1, 2, 4, 0, 0], [1, 2, 5, 0, 0, 0, 0, 0]],
    ]


def test_a_bad_row_is_an_error_or_left_out_and_told(tmp_path):
    path = write(tmp_path, "a.jsonl")
    with path.open("a") as file:
        file.write('{"input_ids": [9]}\nno json\n')

    with pytest.raises(SourceError, match=r"a\.jsonl line 8 has no `text`"):
        list(streaming_dataset_reader(path))
    with pytest.warns(
        UserWarning, match=r"2 rows were skipped: .* line 8 has no `text`.* line 9 is not valid JSON"
    ):
        assert list(streaming_dataset_reader(path, on_error="skip")) == [columns(ROWS)]


def test_files_of_other_columns_begin_a_new_batch(tmp_path):
    write(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"other": 1}\n')

    assert list(streaming_dataset_reader(tmp_path)) == [columns(ROWS), {"other": [1]}]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset_type": "xml"}, "dataset_type must be one of jsonl, json, parquet"),
        ({"batch_size": 0}, "batch_size"),
        ({"on_error": "ignore"}, "on_error"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_read(tmp_path, settings, said):
    with pytest.raises(SettingError, match=said):
        streaming_dataset_reader(write(tmp_path, "a.jsonl"), **settings)
    with pytest.raises(SourceError, match="does not exist"):
        streaming_dataset_reader(tmp_path / "no.jsonl")
