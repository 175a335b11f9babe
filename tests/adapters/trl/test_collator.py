"""TRL's padding-free collator beside ours: equal where that one is right, and better where it is wrong."""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as Theirs

from varlen.adapters.trl.collator import DataCollatorForLanguageModeling
from varlen.errors import DocumentsError, SettingError

flat = partial(DataCollatorForLanguageModeling, padding_free=True)
FORMS = (list, np.array, torch.tensor)


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of documents with their lengths, or one document each; with labels or without."""
    packed, labelled, form = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(FORMS))
    made = []
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4 if packed else 1))
        ids = draw(st.lists(st.integers(0, 50_000), min_size=sum(lengths), max_size=sum(lengths)))
        row: dict[str, Any] = {"input_ids": form(ids)}
        if packed:
            row["seq_lengths"] = lengths
        if labelled:
            row["labels"] = form([-100 if draw(st.booleans()) else token for token in ids])
        made.append(row)
    return made


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Require the same keys in the same order, of the same dtypes, shapes and values."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype, name
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name


@given(rows())
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_the_batch_is_trls_own_value_for_value(batch):
    same(
        DataCollatorForLanguageModeling(7, padding_free=True)(batch),
        Theirs(pad_token_id=7, padding_free=True)(batch),
    )


@given(rows(), st.integers(1, 300))
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_padding_is_one_segment_a_token_there_and_one_in_128_here(batch, multiple):
    theirs = Theirs(pad_token_id=7, padding_free=True, pad_to_multiple_of=multiple)(batch)
    ours = flat(7, pad_to_multiple_of=multiple)(batch)

    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(ours[name], theirs[name]), name
    tokens = sum(len(row["input_ids"]) for row in batch)
    documents = sum(len(row.get("seq_lengths", [0])) for row in batch)
    padding = ours["input_ids"].numel() - tokens
    assert len(theirs["cu_seq_lens_q"]) - 1 == documents + padding
    assert len(ours["cu_seq_lens_q"]) - 1 == documents + -(-padding // 128)
    assert torch.equal(ours["cu_seq_lens_q"][: documents + 1], theirs["cu_seq_lens_q"][: documents + 1])
    assert torch.equal(ours["seq_idx"][:, :tokens], theirs["seq_idx"][:, :tokens])
    assert ours["max_length_q"] == int(ours["cu_seq_lens_q"].diff().max())


def test_an_empty_row_makes_ids_fractions_there_and_is_left_out_here():
    batch = [{"input_ids": []}, {"input_ids": [1, 2]}]

    assert Theirs(pad_token_id=0, padding_free=True)(batch)["input_ids"].dtype == torch.float32
    ours = flat(0)(batch)
    assert ours["input_ids"].dtype == torch.int64
    assert ours["cu_seq_lens_q"].tolist() == [0, 2]


def test_lengths_that_are_not_those_of_the_row_are_refused():
    collate = flat(0)

    with pytest.raises(DocumentsError, match=r"row 1 add up to 3, and the row has 2 tokens \(1 of 2 rows"):
        collate([{"input_ids": [1], "seq_lengths": [1]}, {"input_ids": [1, 2], "seq_lengths": [1, 2]}])
    with pytest.raises(DocumentsError, match="1 lengths are negative"):
        collate([{"input_ids": [1, 2], "seq_lengths": [3, -1]}])
    with pytest.raises(DocumentsError, match="1 of 2 features have no 'seq_lengths'"):
        collate([{"input_ids": [1, 2], "seq_lengths": [2]}, {"input_ids": [1, 2]}])


def test_masks_without_labels_would_be_lost_and_are_refused():
    row = {"input_ids": [1, 2], "completion_mask": [0, 1]}

    with pytest.raises(DocumentsError, match="'completion_mask' and no 'labels'"):
        flat(0)([row])
    assert flat(0)([row | {"labels": [-100, 2]}])["labels"].tolist() == [[-100, 2]]


def test_other_columns_travel_along_when_they_are_named():
    batch = [{"input_ids": [1, 2], "weights": [0.5, 1.0]}, {"input_ids": [3], "weights": [2.0]}]

    assert "weights" not in flat(0)(batch)
    assert flat(0, columns=("weights",))(batch)["weights"].tolist() == [[0.5, 1.0, 2.0]]


@given(rows(), st.booleans(), st.sampled_from([None, 1, 8, 64]), st.booleans())
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_padded_rows_are_trls_own_value_for_value_and_the_default(batch, positions, multiple, as_arrow):
    for row in batch:
        if "seq_lengths" in row:
            row["seq_lengths"] = [len(row["input_ids"])]
    settings: dict[str, Any] = {"return_position_ids": positions, "pad_to_multiple_of": multiple}
    theirs = Theirs(7, **settings)(batch)
    plain = [{name: np.asarray(value).tolist() for name, value in row.items()} for row in batch]

    ours = DataCollatorForLanguageModeling(7, **settings)(pa.Table.from_pylist(plain) if as_arrow else batch)

    same(ours, theirs)


def test_rows_of_several_documents_leak_when_padded_there_and_are_refused_here():
    row = {"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}

    assert Theirs(0)([row])["attention_mask"].tolist() == [[1, 1, 1]]
    with pytest.raises(
        DocumentsError, match=r"row 1 holds 2 documents .*1 of 2 rows.*pass padding_free=True"
    ):
        DataCollatorForLanguageModeling(0)([{"input_ids": [4], "seq_lengths": [1]}, row])


def test_bad_rows_are_refused_when_padded_as_well():
    collate = DataCollatorForLanguageModeling(0)

    with pytest.raises(DocumentsError, match=r"row 1 has 2 input_ids, but 1 labels \(1 of 2 rows differ\)"):
        collate([{"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(DocumentsError, match=r"row 0 has 2 input_ids, but 3 tokens by its seq_lengths"):
        collate([{"input_ids": [1, 2], "seq_lengths": [3]}])
    with pytest.raises(DocumentsError, match="hold no token"):
        collate([{"input_ids": []}])
    kept = collate(
        [{"input_ids": [0, 1], "attention_mask": [0, 1]}, {"input_ids": [2, 3], "attention_mask": [1, 1]}]
    )
    assert kept["input_ids"].tolist() == [[1, 0], [2, 3]]
    assert kept["attention_mask"].tolist() == [[1, 0], [1, 1]]
    weights = [{"input_ids": [1, 2], "weights": [0.5, 1.0]}, {"input_ids": [3], "weights": [2.0]}]
    carried = DataCollatorForLanguageModeling(0, columns=("weights",))(weights)["weights"]
    assert carried.tolist() == [[0.5, 1.0], [2.0, 0.0]]


def test_settings_are_read_and_written_as_trls():
    collate = DataCollatorForLanguageModeling(0)
    collate.padding_free = True

    assert collate([{"input_ids": [1]}, {"input_ids": [2]}])["input_ids"].tolist() == [[1, 2]]
    collate.pad_to_multiple_of = 0.5  # type: ignore[assignment]
    with pytest.raises(SettingError, match="pad_to_multiple_of"):
        collate([{"input_ids": [1]}])


def test_other_tensors_are_refused():
    with pytest.raises(SettingError, match='"pt"'):
        flat(0, return_tensors="np")
    with pytest.raises(SettingError, match="\"pt\", as in TRL; got 'np'"):
        flat(0)([{"input_ids": [1]}], return_tensors="np")
    same(flat(0)([{"input_ids": [1, 2]}], "pt"), Theirs(0, padding_free=True)([{"input_ids": [1, 2]}], "pt"))


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4))
def test_positions_of_packed_rows_are_trls_own(rows):
    ours = DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths(rows)
    theirs = Theirs.get_position_ids_from_packed_seq_lengths(rows)

    assert [row.dtype for row in ours] == [row.dtype for row in theirs]
    assert [row.tolist() for row in ours] == [row.tolist() for row in theirs]


def test_lengths_of_0_shift_positions_there_and_take_no_place_here():
    rows = [[2, 0, 3], [0]]

    ours = DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths(rows)

    assert [row.tolist() for row in ours] == [[0, 1, 0, 1, 2], []]
