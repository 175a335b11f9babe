"""Packed rows in flat arrays say where documents lie, and refuse boundaries that no release could mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.megatron import PackedRows
from varlen.adapters.megatron.rows import as_dialect
from varlen.errors import DocumentsError, SettingError

ROWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=5)


def packed(stored: list[list[int]]) -> PackedRows:
    """Rows whose documents are stored with these lengths, and all of whose tokens are real."""
    sizes = [sum(row) for row in stored]
    starts = [start for row in stored for start in np.cumsum([0, *row[:-1]]).tolist()]
    return PackedRows(
        input_ids=np.arange(sum(sizes)),
        loss_mask=np.ones(sum(sizes), dtype=np.int8),
        offsets=np.cumsum([0, *sizes]),
        seq_start_id=np.array(starts, dtype=np.int64),
        document_offsets=np.cumsum([0, *map(len, stored)]),
        seq_lengths=np.array([length - 1 for row in stored for length in row], dtype=np.int32),
    )


@given(ROWS)
def test_documents_lie_where_rows_say(stored: list[list[int]]) -> None:
    rows = packed(stored).check()

    lengths = [length for row in stored for length in row]
    assert rows.num_rows == len(stored)
    assert rows.num_documents == len(lengths)
    assert rows.stored_lengths.tolist() == lengths
    assert rows.begins.tolist() == np.cumsum([0, *lengths])[:-1].tolist()


TWO = packed([[4, 2], [3]])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (replace(TWO, loss_mask=TWO.loss_mask[:-1]), "9 `input_ids`, but 8 values of `loss_mask`"),
        (replace(TWO, document_offsets=np.array([0, 3])), "3 `offsets`, but 2 `document_offsets`"),
        (replace(TWO, seq_start_id=np.array([0])), "1 `seq_start_id`, but `document_offsets` end at 3"),
        (replace(TWO, seq_lengths=np.ones(1, np.int32)), "3 `seq_start_id`, but 1 values of `seq_lengths`"),
        (
            replace(
                TWO, seq_start_id=np.array([0, 4]), document_offsets=np.array([0, 2, 2]), seq_lengths=None
            ),
            "row 1: `seq_start_id` is empty",
        ),
        (replace(TWO, seq_start_id=np.array([0, 4, 1])), "row 1: `seq_start_id` begins at 1 and not at 0"),
        (
            replace(TWO, seq_start_id=np.array([0, 6, 0])),
            "row 0: `seq_start_id` reaches past the row's 6 tokens",
        ),
        (replace(TWO, seq_start_id=np.array([0, -2, 0])), "row 0: `seq_start_id` must rise"),
        (replace(packed([[2, 2, 2]]), seq_start_id=np.array([0, 4, 2])), "row 0: `seq_start_id` must rise"),
        (replace(packed([[2, 2, 2]]), seq_start_id=np.array([0, 2, 2])), "row 0: `seq_start_id` must rise"),
        (
            replace(TWO, seq_lengths=np.array([3, 2, 2], dtype=np.int32)),
            "row 0: `seq_lengths` has a document longer than what is stored of it",
        ),
        (
            replace(TWO, seq_lengths=np.array([3, 1, -1], dtype=np.int32)),
            "row 1: `seq_lengths` has a document shorter than nothing",
        ),
    ],
)
def test_rows_that_no_release_could_mean_are_refused(wrong: PackedRows, words: str) -> None:
    with pytest.raises(DocumentsError, match=words.replace("(", r"\(")):
        wrong.check()


def test_the_refusal_names_the_row_as_it_is_asked_to_and_counts_those_like_it() -> None:
    wrong = replace(packed([[2], [2], [2]]), seq_start_id=np.array([0, 1, 1]))

    with pytest.raises(
        DocumentsError, match=r"file.npy, row 11: .* \(2 rows of 3 like it\); pack the data again"
    ):
        wrong.check(lambda row: f"file.npy, row {row + 10:,}")


def test_a_release_speaks_one_dialect() -> None:
    releases = ("0.3.0", "v0.4.2", "0.5.1", "0.6", "0.7.0.dev0", "1.0")

    assert [as_dialect(release) for release in releases] == ["0.4", "0.4", "0.5", "0.6", "0.6", "0.6"]


@pytest.mark.parametrize("wrong", ["", "0", "0.2.1", "main", "0.x"])
def test_a_dialect_that_nobody_speaks_is_refused(wrong: str) -> None:
    with pytest.raises(SettingError, match=r"names no dialect .* '0\.4', '0\.5', '0\.6'"):
        as_dialect(wrong)
