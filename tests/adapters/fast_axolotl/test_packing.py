"""fast-axolotl's packing functions give what its documentation prints and what its release 0.2.0 returns."""

import copy
import pickle

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import varlen as vl
from varlen.adapters.fast_axolotl import LeakWarning, concatenate_and_pack, pack_sequences
from varlen.adapters.hf import model_inputs
from varlen.errors import DocumentsError, OverlongDocumentError, SettingError

pytestmark = pytest.mark.filterwarnings("ignore::varlen.adapters.fast_axolotl.LeakWarning")

SEQUENCES = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]


def test_the_first_example_of_the_documentation_gives_what_it_prints():
    packed = pack_sequences([torch.tensor(part) for part in SEQUENCES], max_length=8, pad_token_id=0)

    assert packed.dtype == torch.int64
    assert packed.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 11, 12, 0]]


def test_the_second_example_of_the_documentation_unpacks_into_three_columns():
    packed = concatenate_and_pack(
        [[1, 2, 3], [4, 5, 6, 7]],
        [[-100, 2, 3], [-100, -100, 6, 7]],
        [[1, 1, 1], [1, 1, 1, 1]],
        max_length=8,
        pad_token_id=0,
        label_pad_id=-100,
    )
    ids, labels, mask = packed

    assert ids == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert labels == [[-100, 2, 3, -100, -100, 6, 7, -100]]
    assert mask == [[1, 1, 1, 1, 1, 1, 1, 0]]
    assert dict(packed) == {"input_ids": ids, "labels": labels, "attention_mask": mask}
    assert (packed["labels"], packed[0]) == (labels, ids)
    with pytest.raises(KeyError):
        packed["count"]


# What release 0.2.0 returned for these on 2026-11-22.
RELEASE = [
    (
        SEQUENCES,
        8,
        [
            [1, 2, 3, 99, 0, 0, 0, 0],
            [4, 5, 99, 0, 0, 0, 0, 0],
            [6, 7, 8, 9, 99, 0, 0, 0],
            [10, 11, 12, 99, 0, 0, 0, 0],
        ],
        [[1] * held + [0] * (8 - held) for held in (4, 3, 5, 4)],
    ),
    (
        SEQUENCES,
        20,
        [[1, 2, 3, 99, 0, 4, 5, 99, 0, 6, 7, 8, 9, 99, 0, 10, 11, 12, 99, 0]],
        [[1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]],
    ),
    ([[1, 2, 99], [4]], 8, [[1, 2, 99, 99, 0, 4, 99, 0]], [[1, 1, 1, 1, 0, 1, 1, 0]]),
    ([[], [4]], 8, [[99, 0, 4, 99, 0, 0, 0, 0]], [[1, 0, 1, 1, 0, 0, 0, 0]]),
    ([], 8, [], []),
    (
        [[1, 2, 3, 4, 5, 6], [7]],
        8,
        [[1, 2, 3, 4, 5, 6, 99, 0], [7, 99, 0, 0, 0, 0, 0, 0]],
        [[1] * 7 + [0], [1, 1] + [0] * 6],
    ),
]


@pytest.mark.parametrize(("sequences", "width", "ids", "mask"), RELEASE)
def test_with_an_eos_it_returns_what_the_release_returns(sequences, width, ids, mask):
    packed = pack_sequences(sequences, max_length=width, pad_token_id=0, eos_token_id=99)

    labels = [[i if m else -100 for i, m in zip(*row)] for row in zip(ids, mask)]
    assert packed == {"input_ids": ids, "labels": labels, "attention_mask": mask}


def test_concatenating_returns_what_the_release_returns():
    ids = [[1, 2, 3], [4, 5, 6, 7], [], [8, 9]]
    packed = concatenate_and_pack(ids, ids, [[1] * len(part) for part in ids], 8, 0)

    assert packed.input_ids == [[1, 2, 3, 4, 5, 6, 7, 0], [8, 9, 0, 0, 0, 0, 0, 0]]
    assert packed.labels == [[1, 2, 3, 4, 5, 6, 7, -100], [8, 9] + [-100] * 6]
    assert packed.attention_mask == [[1] * 7 + [0], [1, 1] + [0] * 6]


def next_fit(sequences: list[list[int]], width: int) -> list[list[list[int]]]:
    """Sequences by row, the empty ones left out."""
    rows: list[list[list[int]]] = []
    for sequence in filter(None, sequences):
        if not rows or sum(map(len, rows[-1])) + len(sequence) > width:
            rows.append([])
        rows[-1].append(sequence)
    return rows


@given(st.lists(st.lists(st.integers(1, 99), max_size=7), max_size=12), st.integers(7, 20))
def test_boundaries_cut_the_rows_into_the_sequences(sequences, width):
    rows, boundaries = pack_sequences(sequences, width, 0, return_boundaries=True)
    expected = next_fit(sequences, width)
    found = [[row[begin:end] for begin, end in spans] for row, spans in zip(rows, boundaries)]

    assert found == expected
    assert [row[sum(map(len, parts)) :] for row, parts in zip(rows, expected)] == [
        [0] * (width - sum(map(len, parts))) for parts in expected
    ]


@given(st.lists(st.lists(st.integers(1, 99), max_size=7), max_size=12), st.integers(9, 20))
def test_boundaries_with_an_eos_end_after_it(sequences, width):
    packed, boundaries = pack_sequences(sequences, width, 0, 100, return_boundaries=True)
    found = [row[begin:end] for row, spans in zip(packed["input_ids"], boundaries) for begin, end in spans]

    assert found == [[*sequence, 100] for sequence in sequences]


@pytest.mark.parametrize("eos", [None, 99])
@pytest.mark.parametrize(("overlong", "kept"), [("truncate", [[1, 2, 3, 4], [7]]), ("drop", [[7]])])
def test_what_is_too_long_follows_the_policy(eos, overlong, kept):
    width = 4 if eos is None else 6
    long = [[1, 2, 3, 4, 5], [7]]

    assert pack_sequences(long, width, 0, eos, overlong=overlong) == pack_sequences(kept, width, 0, eos)
    with pytest.raises(
        OverlongDocumentError, match=r"sequence 0 has 5 tokens but the most of a row is 4 \(1 of 2"
    ):
        pack_sequences(long, width, 0, eos)


@pytest.mark.parametrize(("overlong", "ids"), [("truncate", [[1, 2], [7, 0]]), ("drop", [[7, 0]])])
def test_labels_and_masks_are_cut_with_their_sequences(overlong, ids):
    long = [[1, 2, 3], [7]]
    packed = concatenate_and_pack(long, long, [[1, 1, 1], [1]], 2, 0, 0, overlong=overlong)

    assert (packed.input_ids, packed.labels) == (ids, ids)
    assert packed.attention_mask == [[int(token > 0) for token in row] for row in ids]
    with pytest.raises(OverlongDocumentError, match="sequence 0 has 3 tokens"):
        concatenate_and_pack(long, long, [[1, 1, 1], [1]], 2, 0)


@pytest.mark.parametrize("overlong", ["error", "truncate"])
def test_labels_of_another_length_than_their_sequence_are_refused(overlong):
    with pytest.raises(DocumentsError, match="document 0 has 2 values for 3 tokens"):
        concatenate_and_pack([[1, 2, 3]], [[1, 2]], [[1, 1, 1]], 8, 0, overlong=overlong)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack_sequences([[1]], 0, 0), "max_length must be a whole number from 1"),
        (
            lambda: pack_sequences([[1]], 2, 0, 9),
            "max_length must hold a token, its eos and a padding token; got 2",
        ),
        (
            lambda: pack_sequences([[1]], 4, 0, overlong="split"),
            "overlong must be one of error, truncate, drop",
        ),
    ],
)
def test_settings_that_can_not_be_are_refused(call, words):
    with pytest.raises(SettingError, match=words):
        call()


def test_tokens_that_are_no_sequences_are_refused():
    with pytest.raises(DocumentsError, match=r"sequence 0 is a int \(3 of 3 are no sequences\); pass a list"):
        pack_sequences([1, 2, 3], 8, 0)
    with pytest.raises(DocumentsError, match="sequence 0 is a Tensor"):
        pack_sequences(torch.tensor([1, 2]), 8, 0)


def test_rows_come_in_the_form_of_the_sequences():
    arrays = pack_sequences([np.array([1, 2], np.int16)], 3, 0)
    tensors = pack_sequences([torch.tensor([1, 2], dtype=torch.int32)], 3, 0)

    assert (arrays.dtype, arrays.tolist()) == (np.int16, [[1, 2, 0]])
    assert (tensors.dtype, tensors.tolist()) == (torch.int32, [[1, 2, 0]])


def test_rows_without_boundaries_are_warned_of_and_rows_with_them_are_not(recwarn):
    pack_sequences([[1]], 2, 0, return_boundaries=True)
    assert not recwarn
    with pytest.warns(LeakWarning, match="carry no boundaries"):
        pack_sequences([[1]], 2, 0)
    with pytest.warns(LeakWarning, match="labels=batch trains on the padding"):
        concatenate_and_pack([[1]], [[1]], [[1]], 2, 0)


def test_the_training_loop_of_the_documentation_runs_and_so_does_the_way_out():
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_attention_heads=2)
    config.num_hidden_layers, config.pad_token_id = 1, 0
    model, max_length, batch_size = LlamaForCausalLM(config), 8, 1
    sequences = [torch.tensor(part) for part in SEQUENCES]
    optimizer = torch.optim.AdamW(model.parameters())
    packed = pack_sequences(sequences, max_length=max_length, pad_token_id=model.config.pad_token_id)
    losses = []
    for i in range(0, len(packed), batch_size):
        batch = packed[i : i + batch_size]
        outputs = model(batch, labels=batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == 2

    packing = vl.pack([len(s) for s in sequences], max_length)
    apart = vl.collate(sequences, packing).to_torch()
    together = model(**model_inputs(apart, model)).loss
    alone = sum(model(part[None], labels=part[None]).loss * (len(part) - 1) for part in sequences) / sum(
        len(part) - 1 for part in sequences
    )
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_labels_and_padding_that_unsigned_ids_can_not_hold_are_not_wrapped_around(kind):
    ids, labels, masks = [np.array([1, 2, 3], kind)], [np.array([-100, 2, 3])], [np.array([1, 1, 1])]

    columns = concatenate_and_pack(ids, labels, masks, 5, 0)
    rows = pack_sequences(ids, 5, -1)

    assert columns.input_ids.dtype == kind
    assert columns.labels.tolist() == [[-100, 2, 3, -100, -100]]
    assert rows.tolist() == [[1, 2, 3, -1, -1]]


def test_labels_of_tensors_of_bytes_are_not_wrapped_around():
    ids = [torch.tensor([1, 2, 3], dtype=torch.uint8)]

    columns = concatenate_and_pack(
        ids, [torch.tensor([-100, 2, 3])], [torch.ones(3, dtype=torch.int64)], 5, 0
    )

    assert columns.input_ids.dtype == torch.uint8
    assert columns.labels.tolist() == [[-100, 2, 3, -100, -100]]


def test_packed_columns_are_a_mapping_in_every_use_but_iteration_and_unpacking():
    packed = concatenate_and_pack(
        [[1, 2]], [[1, 2]], [[1, 1]], max_length=4, pad_token_id=0, label_pad_id=-100
    )
    columns = {"input_ids": [[1, 2, 0, 0]], "labels": [[1, 2, -100, -100]], "attention_mask": [[1, 1, 0, 0]]}

    assert packed == columns
    assert "labels" in packed
    assert "count" not in packed
    assert packed.get("count", 3) == 3
    assert list(packed.values()) == list(columns.values())
    assert list(packed.items()) == list(columns.items())
    assert {**packed} == columns
    assert [*packed] == list(columns.values())
    assert packed[1:] == tuple(columns.values())[1:]


def test_packed_columns_stay_what_they_are_where_libraries_copy_and_move_them():
    ids = [torch.tensor([1, 2]), torch.tensor([3])]
    packed = concatenate_and_pack(ids, ids, [torch.ones_like(one) for one in ids], 4, 0)

    for made in (copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert type(made) is type(packed)
        assert [one.tolist() for one in made] == [one.tolist() for one in packed]
    moved = send_to_device(packed, "cpu")
    assert type(moved) is type(packed)
    assert all(torch.equal(moved[name], packed[name]) for name in ("input_ids", "labels", "attention_mask"))
