"""DataCollatorWithFlattening beside transformers' own: equal where that is right, better where it is wrong."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import DataCollatorWithFlattening as Theirs
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from varlen.adapters.hf import DataCollatorWithFlattening
from varlen.errors import DocumentsError, SettingError

FORMS = {
    "lists": list,
    "numpy": lambda values: np.array(values, np.int64),
    "numpy of 32 bits": lambda values: np.array(values, np.int32),
    "torch": lambda values: torch.tensor(values, dtype=torch.int64),
}
DROPS_EMPTY = Version(transformers.__version__) >= Version("5.24")
"""Whether transformers' collator leaves out documents without tokens."""
TOKENS = st.integers(0, 2**40) | st.integers(0, 50_000)


@st.composite
def features(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Documents that hold a token at least, in one form or in a mixture of them, all with labels or none."""
    documents = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=1, max_size=6))
    labelled = draw(st.booleans())
    one_form = draw(st.sampled_from([*FORMS, None]))
    made = []
    for document in documents:
        small = all(-(2**31) <= token < 2**31 for token in document)
        names = [name for name in FORMS if small or "32" not in name]
        form = FORMS[one_form if one_form in names else draw(st.sampled_from(names))]
        feature = {"input_ids": form(document)}
        if labelled:
            masked = [-100 if draw(st.booleans()) else token for token in document]
            feature["labels"] = form(masked)
        made.append(feature)
    return made


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "return_position_ids": st.booleans(),
        "separator_id": st.sampled_from([-100, 0, 7]),
        "return_flash_attn_kwargs": st.booleans(),
        "return_seq_idx": st.booleans(),
        "position_ids_start": st.sampled_from([0, 2]),
        "return_tensors": st.sampled_from(["pt", "np"]),
    },
)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Require the same keys in the same order, of the same types, dtypes, shapes and values."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, int):
            assert ours[name] == value, name
        else:
            assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
            assert ours[name].tolist() == value.tolist(), name


@given(features(), SETTINGS)
def test_the_batch_is_transformers_own_value_for_value(batch, settings):
    same(DataCollatorWithFlattening(**settings)(batch), Theirs(**settings)(batch))


@given(features(), st.sampled_from(["pt", "np"]), st.sampled_from([-100, 5]))
def test_a_call_may_ask_for_other_tensors_and_another_separator(batch, form, separator):
    ours = DataCollatorWithFlattening("np", return_seq_idx=True)(batch, form, separator)

    same(ours, Theirs("np", return_seq_idx=True)(batch, form, separator))


def test_an_empty_document_takes_up_a_label_there_before_5_24_and_nothing_here():
    batch = [{"input_ids": [1, 2]}, {"input_ids": []}, {"input_ids": [3]}]
    settings = {"return_flash_attn_kwargs": True, "return_seq_idx": True, "return_tensors": "np"}

    theirs, ours = Theirs(**settings)(batch), DataCollatorWithFlattening(**settings)(batch)

    if DROPS_EMPTY:
        same(ours, theirs)
    else:
        assert theirs["labels"].shape == (1, 4) != theirs["input_ids"].shape
        assert theirs["cu_seq_lens_q"].tolist() == [0, 2, 2, 3]
    same(ours, DataCollatorWithFlattening(**settings)([batch[0], batch[2]]))
    assert ours["labels"].tolist() == [[-100, 2, -100]]
    assert ours["cu_seq_lens_q"].tolist() == [0, 2, 3]
    assert ours["seq_idx"].tolist() == [[0, 0, 1]]


def test_labels_of_some_features_only_are_lost_there_and_refused_here():
    batch = [{"input_ids": [1, 2]}, {"input_ids": [3, 4], "labels": [-100, -100]}]

    # Trains on the prompt.
    assert Theirs(return_tensors="np")(batch)["labels"].tolist() == [[-100, 2, -100, 4]]
    with pytest.raises(DocumentsError, match=r"1 of 2 features have no 'labels', feature 0 first"):
        DataCollatorWithFlattening()(batch)
    with pytest.raises(DocumentsError, match=r"1 of 2 features have no 'labels', feature 1 first"):
        DataCollatorWithFlattening()(batch[::-1])


def test_labels_of_another_length_pass_there_and_are_refused_here():
    batch = [{"input_ids": [1, 2, 3], "labels": [1, 2]}, {"input_ids": [3], "labels": [3, 4]}]

    assert Theirs(return_tensors="np")(batch)["labels"].tolist() == [[-100, 2, -100, 4]]
    with pytest.raises(DocumentsError, match=r"labels: document 0 has 2 values for 3 tokens.*2 of 2"):
        DataCollatorWithFlattening()(batch)


def test_padding_under_an_attention_mask_is_trained_on_there_and_left_out_here():
    batch = [
        {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]},
        {"input_ids": [7, 8, 9, 0], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [0, 0, 0, 0], "attention_mask": [0, 0, 0, 0]},
    ]

    theirs = Theirs(return_tensors="np")(batch)
    ours = DataCollatorWithFlattening(return_tensors="np", return_flash_attn_kwargs=True)(batch)

    assert theirs["labels"].tolist() == [[-100, 0, 5, 6, -100, 8, 9, 0, -100, 0, 0, 0]]
    assert ours["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert ours["labels"].tolist() == [[-100, 6, -100, 8, 9]]
    assert ours["cu_seq_lens_q"].tolist() == [0, 2, 5]
    assert "attention_mask" not in ours


@given(features(), st.data())
def test_a_mask_leaves_tokens_out_with_all_that_is_theirs(batch, data):
    masks = [[data.draw(st.integers(0, 1)) for _ in feature["input_ids"]] for feature in batch]
    masks[0][0] = 1
    weighed = [
        feature | {"attention_mask": mask, "weights": np.arange(len(mask), dtype=np.float32)}
        for feature, mask in zip(batch, masks)
    ]
    cut = []
    for feature, mask in zip(weighed, masks):
        kept = [index for index, bit in enumerate(mask) if bit]
        cut.append({name: np.asarray(feature[name])[kept] for name in feature if name != "attention_mask"})

    settings: Any = {"return_flash_attn_kwargs": True, "return_seq_idx": True, "return_tensors": "np"}
    same(DataCollatorWithFlattening(**settings)(weighed), DataCollatorWithFlattening(**settings)(cut))


def test_other_columns_are_lost_there_and_travel_along_here():
    batch = [
        {
            "input_ids": [1, 2],
            "advantages": [0.5, 1.5],
            "types": np.array([0, 1], np.int8),
            "text": "ab",
            "n": 2,
        },
        {"input_ids": [3], "advantages": [2.5], "types": np.array([1], np.int8), "text": "c", "n": 1},
    ]

    assert set(Theirs()(batch)) == {"input_ids", "labels", "position_ids"}
    collate = DataCollatorWithFlattening(pad_to_multiple_of=4, column_pads={"types": 3})
    ours = collate(batch)
    assert list(ours) == ["input_ids", "labels", "position_ids", "advantages", "types"]
    assert ours["advantages"].dtype == torch.float32
    assert ours["advantages"].tolist() == [[0.5, 1.5, 2.5, 0.0]]
    assert ours["types"].dtype == torch.int8
    assert ours["types"].tolist() == [[0, 1, 1, 3]]
    assert list(DataCollatorWithFlattening(columns=())(batch)) == ["input_ids", "labels", "position_ids"]
    assert "types" not in DataCollatorWithFlattening(columns=("advantages",))(batch)


def test_a_named_column_that_cannot_travel_along_is_refused():
    batch = [{"input_ids": [1, 2], "a": [1.0, 2.0], "text": "ab"}, {"input_ids": [3, 4], "a": [1.0]}]

    with pytest.raises(DocumentsError, match="a: document 1 has 1 values for 2 tokens"):
        DataCollatorWithFlattening(columns=("a",))(batch)
    with pytest.raises(DocumentsError, match="1 of 2 features have no 'text'"):
        DataCollatorWithFlattening(columns=("text",))(batch)
    with pytest.raises(SettingError, match="'labels' can't be carried along"):
        DataCollatorWithFlattening(columns=("labels",))(batch)
    with pytest.raises(DocumentsError, match="must hold numbers"):
        DataCollatorWithFlattening(columns=("text",))([{"input_ids": [1], "text": ["a"]}])


def test_a_batch_without_tokens_is_an_error_that_says_so():
    with pytest.raises(ValueError if DROPS_EMPTY else IndexError):
        Theirs()([])
    empty = [{"input_ids": []}, {"input_ids": []}]
    if DROPS_EMPTY:
        with pytest.raises(ValueError, match="every example is empty"):
            Theirs()(empty)
    else:
        assert Theirs(return_tensors="np")(empty)["labels"].shape == (1, 2)
    with pytest.raises(DocumentsError, match="a batch of no documents"):
        DataCollatorWithFlattening()([])
    with pytest.raises(DocumentsError, match="no token in this batch of 2 documents"):
        DataCollatorWithFlattening()(empty)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"input_ids": [1.5, 2.0]}, "must be whole numbers, got dtype float64"),
        ({"input_ids": np.array([1.0, 2.0])}, "must be whole numbers, got dtype float64"),
        ({"input_ids": torch.tensor([True])}, "must be whole numbers, got dtype bool"),
        ({"input_ids": [[1, 2]]}, "entry 1 must have one dimension"),
        ({"input_ids": 7}, "entry 1 must have one dimension"),
        ({"text": "ab"}, "1 of 2 features have no 'input_ids', feature 1 first"),
        ([1, 2], "a feature is a mapping .* a list"),
    ],
)
def test_what_holds_no_token_ids_is_refused_with_a_sentence(feature, message):
    first = {"input_ids": np.array([1])} if isinstance(feature, dict) else {"input_ids": [1]}

    with pytest.raises(DocumentsError, match=message):
        DataCollatorWithFlattening()([first, feature])


@given(features(), st.integers(1, 300), st.sampled_from([0, 2]))
def test_padding_stands_in_segments_of_its_own(batch, multiple, start):
    settings: Any = {
        "return_flash_attn_kwargs": True,
        "return_seq_idx": True,
        "return_tensors": "np",
        "position_ids_start": start,
    }
    plain = DataCollatorWithFlattening(**settings)(batch)

    padded = DataCollatorWithFlattening(**settings, pad_to_multiple_of=multiple, pad_token_id=9)(batch)

    tokens, width = plain["input_ids"].size, padded["input_ids"].size
    assert width == -(-tokens // multiple) * multiple
    for name in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert padded[name][:, :tokens].tolist() == plain[name].tolist(), name
    assert set(padded["input_ids"][0, tokens:].tolist()) <= {9}
    assert set(padded["labels"][0, tokens:].tolist()) <= {-100}
    # Where boundaries are read from positions, every token of padding must begin a document of its own.
    assert set(padded["position_ids"][0, tokens:].tolist()) <= {start}
    ends, documents = padded["cu_seq_lens_q"], len(plain["cu_seq_lens_q"])
    assert ends[:documents].tolist() == plain["cu_seq_lens_q"].tolist()
    assert ends[-1] == width
    assert (np.diff(ends) > 0).all()
    assert (np.diff(ends)[documents - 1 :] <= 128).all()
    assert len(ends) - documents == -(-(width - tokens) // 128)
    assert padded["max_length_q"] == np.diff(ends).max()
    assert padded["seq_idx"][0].tolist() == np.repeat(np.arange(len(ends) - 1), np.diff(ends)).tolist()


@given(features(), st.integers(1, 20))
def test_both_of_transformers_detectors_find_our_documents_in_the_positions(batch, multiple):
    collate = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, pad_to_multiple_of=multiple
    )
    row, documents = collate(batch), len(batch)
    tokens = sum(len(feature["input_ids"]) for feature in batch)

    numbers = find_packed_sequence_indices(row["position_ids"])  # of eager, SDPA and FlexAttention
    (ends, _), _ = prepare_fa_kwargs_from_position_ids(row["position_ids"])  # of FlashAttention

    if numbers is None:
        assert row["position_ids"][0].tolist() == list(range(tokens))
    else:
        assert numbers[0, :tokens].tolist() == row["seq_idx"][0, :tokens].tolist()
        assert (numbers[0, tokens:] >= documents).all()
    assert ends[: documents + 1].tolist() == row["cu_seq_lens_q"][: documents + 1].tolist()


def test_shifted_labels_hold_at_each_position_the_target_that_follows():
    collate = DataCollatorWithFlattening(shift_labels=True, pad_to_multiple_of=4)

    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])

    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, -100, -100]]
    assert batch["shift_labels"].tolist() == [[2, 3, -100, 5, -100, -100, -100, -100]]


def test_settings_out_of_range_are_refused_when_the_collator_is_made():
    with pytest.raises(SettingError, match=r'"pt" .* or "np"'):
        DataCollatorWithFlattening("tf")
    with pytest.raises(SettingError, match="pad_to_multiple_of"):
        DataCollatorWithFlattening(pad_to_multiple_of=0)
    with pytest.raises(SettingError, match=r'"pt" .* or "np"'):
        DataCollatorWithFlattening()([{"input_ids": [1]}], return_tensors="jax")


def test_the_collator_reaches_a_loaders_workers_by_pickle():
    import pickle

    collate = pickle.loads(pickle.dumps(DataCollatorWithFlattening(return_seq_idx=True)))

    assert collate([{"input_ids": [1, 2]}])["seq_idx"].tolist() == [[0, 0]]


@pytest.mark.parametrize("labelled", [False, True])
def test_rows_of_a_data_set_are_taken_as_a_table_as_a_mapping_and_one_by_one(labelled):
    lengths = [3, 1, 4, 2, 2]
    rows = [
        {
            "input_ids": list(range(10 * number, 10 * number + length)),
            **({"labels": [-100] + [number] * (length - 1)} if labelled else {}),
            "weight": [0.5] * length,
            "text": f"document {number}",
            "source": [number],
        }
        for number, length in enumerate(lengths)
    ]
    data = Dataset.from_list(rows)
    collate = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    expected = collate(data.with_format("numpy").__getitems__([4, 0, 2]))

    for form in ("arrow", "numpy", "torch", None):
        batch = collate(data.with_format(form)[[4, 0, 2]])
        assert batch["input_ids"].tolist() == [[40, 41, 0, 1, 2, 20, 21, 22, 23]]
        assert list(batch) == list(expected)
        assert "weight" in batch
        assert not {"text", "source"} & set(batch)
        same({**batch, "weight": 0}, {**expected, "weight": 0})
        assert batch["weight"].tolist() == [[0.5] * 9]
    equally_long = collate(data.with_format("numpy")[[3, 4]])
    assert equally_long["input_ids"].tolist() == [[30, 31, 40, 41]]


def test_a_loader_gives_the_collator_tables_of_arrow():
    data = Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]]}).with_format("arrow")
    batches = BatchSampler(SequentialSampler(data), 2, drop_last=False)

    loader = DataLoader(
        data, sampler=batches, batch_size=None, collate_fn=DataCollatorWithFlattening(return_seq_idx=True)
    )

    assert [batch["input_ids"].tolist() for batch in loader] == [[[1, 2, 3]], [[4, 5, 6]]]


def test_an_empty_table_is_refused():
    with pytest.raises(DocumentsError, match="a batch of no documents"):
        DataCollatorWithFlattening()({"input_ids": []})
    with pytest.raises(DocumentsError, match=r"features need 'input_ids'.* 'text'"):
        DataCollatorWithFlattening()({"text": ["a"]})
