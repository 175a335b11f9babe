"""Arrow lists over NumPy's memory and back: the same numbers whatever the type and the slice, and no pandas."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.files.token_tables import flat_values, list_column

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
rows_of_numbers = st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=6)


@given(rows_of_numbers, st.sampled_from(_INTEGERS))
def test_a_list_column_holds_the_rows_between_its_offsets(rows: list[list[int]], dtype: str) -> None:
    """Every dtype of whole numbers, and rows and columns without values."""
    offsets = np.cumsum([0, *map(len, rows)])
    column = list_column(np.array([number for row in rows for number in row], dtype=dtype), offsets)
    column.validate(full=True)
    assert column.type == pa.list_(getattr(pa, dtype)())
    assert column.to_pylist() == rows


@given(st.lists(st.lists(st.booleans(), max_size=11), max_size=6))
def test_booleans_are_a_bit_each_in_arrow_and_keep_their_places(rows: list[list[bool]]) -> None:
    """NumPy gives each a byte."""
    values = np.array([flag for row in rows for flag in row], dtype=bool)
    column = list_column(values, np.cumsum([0, *map(len, rows)]))
    column.validate(full=True)
    assert column.type == pa.list_(pa.bool_())
    assert column.to_pylist() == rows


def test_a_list_column_takes_other_strides_and_byte_orders() -> None:
    """Neither is a buffer that Arrow could take as it lies."""
    values = np.arange(12, dtype=">i4")[::3]
    assert list_column(values, np.array([0, 1, 4])).to_pylist() == [[0], [3, 6, 9]]


@given(rows_of_numbers, st.sampled_from(_INTEGERS), st.booleans(), st.data())
def test_flat_values_are_those_of_the_slice(
    rows: list[list[int]], dtype: str, large: bool, data: st.DataObject
) -> None:
    """Rows before and after a slice leave no trace in its values or offsets."""
    kind = (pa.large_list if large else pa.list_)(getattr(pa, dtype)())
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    found = flat_values(pa.array(rows, type=kind).slice(start, stop - start))
    assert found is not None
    values, offsets = found
    assert (values.dtype, offsets.dtype) == (np.dtype(dtype), np.int64)
    assert [values[a:b].tolist() for a, b in zip(offsets, offsets[1:])] == rows[start:stop]
    assert len(offsets) == stop - start + 1
    assert int(offsets[-1]) == len(values)


@pytest.mark.parametrize("rows", [[[1], None], [[1], [None]]])
def test_nulls_have_no_flat_values(rows: list[list[int | None] | None]) -> None:
    """A null has no number: what stands in its place in the buffer is not one."""
    assert flat_values(pa.array(rows, type=pa.list_(pa.int32()))) is None
    assert flat_values(pa.array(rows, type=pa.list_(pa.int32())).slice(0, 0)) is not None


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_packing_tokens_imports_no_pandas(tmp_path: Path) -> None:
    """Importing it takes longer than packing a small set."""
    program = """
import sys
from pathlib import Path
import numpy as np
from varlen.offline.pack import pack_source
from varlen.offline.pack import PackSettings
from varlen.files.token_tables import list_column
from varlen.documents.source import open_source
from varlen.files.token_tables import write_table
folder = Path(sys.argv[1])
column = list_column(np.arange(100, dtype=np.int32), np.arange(0, 101, 10))
write_table({"input_ids": column}, folder / "tokens.parquet", "parquet", 10)
pack_source(open_source([folder / "tokens.parquet"]), folder / "packed", PackSettings(capacity=64))
assert (folder / "packed" / ".manifest.json").is_file()
print("pandas" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["False"]), done.stderr
