"""Rows of a micro-batch become one row as Megatron-Bridge joins them, and nothing real is taken for padding."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.megatron import (
    build_mcore_thd_sequence_batch_from_rows,
    check_in_batch_packing,
    pack_batch_sequences,
    pack_right_padded_sequence_batch_to_mcore_thd,
)
from varlen.errors import DocumentsError, SettingError

# What megatron-bridge 0.3.1 returned for these on 2026-11-23: tokens, labels, loss mask, None, positions,
# boundaries, longest. Labels were 0, 1, … row by row, the loss mask their rest by 3, positions 10·row + column.
ROWS = [[5, 6, 7, 0, 0], [8, 0, 9, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]]
RELEASE: list[tuple[list[list[int]], int, int, list[Any]]] = [
    (
        ROWS,
        0,
        1,
        [
            [[5, 6, 7, 8, 0, 9, 1, 2, 3, 4, 5]],
            [[0, 1, 2, 5, 6, 7, 15, 16, 17, 18, 19]],
            [[0.0, 1.0, 2.0, 2.0, 0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 1.0]],
            None,
            [[0, 1, 2, 10, 11, 12, 30, 31, 32, 33, 34]],
            [0, 3, 6, 11],
            5,
        ],
    ),
    (
        ROWS,
        0,
        4,
        [
            [[5, 6, 7, 0, 8, 0, 9, 0, 1, 2, 3, 4, 5, 0, 0, 0]],
            [[0, 1, 2, -100, 5, 6, 7, -100, 15, 16, 17, 18, 19, -100, -100, -100]],
            [[0.0, 1.0, 2.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0]],
            None,
            [[0, 1, 2, 3, 10, 11, 12, 13, 30, 31, 32, 33, 34, 35, 36, 37]],
            [0, 4, 8, 16],
            8,
        ],
    ),
    (
        [[5, 6, 2, 2], [7, 2, 2, 2]],
        2,
        6,
        [
            [[5, 6, 2, 2, 2, 2, 7, 2, 2, 2, 2, 2]],
            [[0, 1, -100, -100, -100, -100, 4, -100, -100, -100, -100, -100]],
            [[0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]],
            None,
            [[0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]],
            [0, 6, 12],
            6,
        ],
    ),
]


def columns(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = torch.arange(tokens.numel()).reshape(tokens.shape)
    positions = torch.arange(tokens.shape[1]) + 10 * torch.arange(tokens.shape[0])[:, None]
    return numbers, (numbers % 3).float(), positions


def joined_by_hand(tokens: torch.Tensor, lengths: list[int], pad: int, multiple: int) -> dict[str, list[Any]]:
    """Join rows one token at a time: the readable reference."""
    labels, weights, positions = columns(tokens)
    out: dict[str, list[Any]] = {"tokens": [], "labels": [], "loss_mask": [], "position_ids": []}
    bounds, padded = [0], [0]
    for row, length in enumerate(lengths):
        if length == 0:
            continue
        slot = (length + multiple - 1) // multiple * multiple
        for step in range(slot):
            is_real = step < length
            out["tokens"].append(int(tokens[row, step]) if is_real else pad)
            out["labels"].append(int(labels[row, step]) if is_real else -100)
            out["loss_mask"].append(float(weights[row, step]) if is_real else 0.0)
            out["position_ids"].append(int(positions[row, 0]) + step)
        bounds.append(bounds[-1] + length)
        padded.append(padded[-1] + slot)
    return out | {"bounds": bounds, "padded": padded}


@pytest.mark.parametrize(("rows", "pad", "multiple", "expected"), RELEASE)
def test_rows_are_joined_as_the_release_joins_them(rows, pad, multiple, expected):
    tokens = torch.tensor(rows)
    labels, weights, positions = columns(tokens)

    found = pack_batch_sequences(tokens, labels, weights, None, positions, pad, multiple)

    assert [None if values is None else values.tolist() for values in found] == expected


@given(st.data(), st.integers(1, 6), st.integers(0, 2))
def test_rows_are_as_long_as_their_mask_says(data, multiple, pad):
    width = data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=5).filter(any))
    drawn = st.lists(st.integers(0, 3), min_size=width, max_size=width)
    tokens = torch.tensor([data.draw(drawn) for _ in lengths])
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    labels, weights, positions = columns(tokens)
    expected = joined_by_hand(tokens, lengths, pad, multiple)

    for given_mask, attention_mask in ((mask, None), (None, mask), (mask, torch.zeros_like(mask))):
        found = pack_batch_sequences(
            tokens, labels, weights, attention_mask, positions, pad, multiple, given_mask
        )
        assert found[0].tolist() == [expected["tokens"]]
        assert found[1] is not None
        assert found[1].tolist() == [expected["labels"]]
        assert found[2] is not None
        assert found[2].tolist() == [expected["loss_mask"]]
        assert found[3] is None
        assert found[4].tolist() == [expected["position_ids"]]
        assert found[5].tolist() == expected["padded"]
        assert found[6].item() == max(b - a for a, b in zip(expected["padded"], expected["padded"][1:]))

    if 0 in lengths:
        return
    batch = {"tokens": tokens, "labels": labels, "loss_mask": weights, "position_ids": positions}
    batch |= {"attention_mask": mask}
    pack_right_padded_sequence_batch_to_mcore_thd(
        batch, pad_token_id=pad, pad_to_multiple_of=multiple, emit_padding_mask=True
    )
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert batch[name].tolist() == [expected[name]]
    assert batch["cu_seqlens_q"].tolist() == batch["cu_seqlens_kv"].tolist() == expected["bounds"]
    assert ("cu_seqlens_q_padded" in batch) == (expected["bounds"] != expected["padded"])
    assert batch.get("cu_seqlens_kv_padded", batch["cu_seqlens_kv"]).tolist() == expected["padded"]
    assert batch["padding_mask"].sum().item() == expected["padded"][-1] - expected["bounds"][-1]
    assert batch["total_tokens"] == expected["padded"][-1]


def test_a_real_token_that_equals_the_padding_is_kept_where_a_mask_says_so():
    tokens = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    positions = torch.arange(4).expand(2, 4)

    with_mask = pack_batch_sequences(tokens, None, None, mask, positions)
    without = pack_batch_sequences(tokens, None, None, None, positions)

    assert with_mask[0].tolist() == [[5, 6, 0, 7, 8, 9, 0]]
    assert without[0].tolist() == [[5, 6, 7, 8, 9]]  # what the releases return for both
    assert with_mask[5].dtype == torch.int32


def test_a_stage_without_labels_gets_none_and_kinds_of_numbers_stay():
    tokens = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]], dtype=torch.int32)
    positions = torch.arange(5, dtype=torch.int32).expand(2, 5)

    found = pack_batch_sequences(tokens, None, None, None, positions, pad_to_multiple_of=4)

    assert found[1] is found[2] is None
    assert (found[0].dtype, found[4].dtype, found[5].dtype) == (torch.int32,) * 3
    assert found[5].tolist() == [0, 4, 12]
    half = pack_batch_sequences(tokens, None, torch.ones(2, 5, dtype=torch.bfloat16), None, positions)[2]
    assert half is not None
    assert half.dtype == torch.bfloat16


def test_four_dimensional_attention_masks_say_nothing_about_lengths():
    tokens = torch.tensor([[1, 2, 0], [3, 0, 0]])
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)

    found = pack_batch_sequences(tokens, None, None, mask, torch.arange(3).expand(2, 3))

    assert found[0].tolist() == [[1, 2, 3]]
    assert found[3] is None


@pytest.mark.parametrize("labels", [None, torch.full((1, 4), -100)])
def test_rows_of_padding_alone_give_nothing_and_a_warning(labels, caplog):
    tokens = torch.zeros(1, 4, dtype=torch.int64)

    with caplog.at_level(logging.WARNING):
        found = pack_batch_sequences(tokens, labels, None, None, torch.arange(4).unsqueeze(0))

    assert found[0].shape == found[4].shape == (1, 0)
    assert (found[5].tolist(), found[6].item()) == ([0], 0)
    assert (found[1] is None) == (labels is None)
    assert "none of the 1 rows has a token" in caplog.text
    batch = {"tokens": tokens, "labels": labels, "position_ids": torch.arange(4).unsqueeze(0)}
    with pytest.raises(DocumentsError, match=r"row 0 of the batch has no tokens \(1 of 1 rows have none\)"):
        pack_right_padded_sequence_batch_to_mcore_thd(batch)


def test_masks_with_gaps_or_padding_on_the_left_are_refused():
    tokens, positions = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.arange(3).expand(2, 3)

    for mask in ([[1, 1, 1], [0, 1, 1]], [[1, 1, 1], [1, 0, 1]]):
        with pytest.raises(DocumentsError, match=r"row 1 .* not right-padded: its mask .*1 of 2 rows"):
            pack_batch_sequences(tokens, None, None, torch.tensor(mask), positions)
    batch = {"input_ids": torch.tensor([[1, 0, 3]]), "position_ids": torch.arange(3).unsqueeze(0)}
    with pytest.raises(DocumentsError, match="without a mask, padding token 0 stands before a real token"):
        pack_right_padded_sequence_batch_to_mcore_thd(batch)


def test_a_micro_batch_of_one_row_is_refused_with_the_setting():
    check_in_batch_packing(2)
    with pytest.raises(SettingError, match=r"train.micro_batch_size` is 1; set it to 2 or more, or turn"):
        check_in_batch_packing(1)


@pytest.mark.parametrize(("cp", "tp", "bounds"), [(1, 1, [0, 3, 8]), (2, 1, [0, 4, 12]), (2, 4, [0, 8, 16])])
def test_rows_are_rounded_up_for_context_and_sequence_parallelism(cp, tp, bounds):
    multiple = max(2 * cp if cp > 1 else 1, cp * tp if tp > 1 else 1)  # one divides the other here
    tokens = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]])

    found = pack_batch_sequences(tokens, tokens, tokens, None, tokens, pad_to_multiple_of=multiple)

    assert found[5].tolist() == bounds
    assert found[0].shape == (1, bounds[-1])


def sample(*tokens: int, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a row without padding."""
    ids = torch.tensor(tokens)
    return {"input_ids": ids, "position_ids": torch.arange(len(tokens)), "labels": ids + 1} | others


@pytest.mark.parametrize(
    "settings",
    [
        {"sequence_length": 8, "pad_to_max_length": True},
        {"packed_sequence_length": 8, "pad_to_packed_sequence_length": True},
    ],
)
def test_the_last_row_is_padded_to_a_fixed_width(settings):
    packed = build_mcore_thd_sequence_batch_from_rows([sample(1, 2, 3), sample(4, 5)], **settings)

    assert packed["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert packed["labels"].tolist() == [[2, 3, 4, 5, 6, -100, -100, -100]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert packed["cu_seqlens_q"].tolist() == [0, 3, 5]
    assert packed["cu_seqlens_q_padded"].tolist() == [0, 3, 8]
    assert (packed["max_seqlen_q"].item(), packed["total_tokens"]) == (5, 8)
    assert packed["attention_mask"] is None


def test_padded_boundaries_stand_only_where_they_differ_unless_asked_for():
    rows = [sample(1, 2), sample(3, 4, 5, 6)]

    ours = build_mcore_thd_sequence_batch_from_rows(rows, pad_to_multiple_of=2)
    theirs = build_mcore_thd_sequence_batch_from_rows(rows, pad_to_multiple_of=2, always_padded=True)

    assert "cu_seqlens_q_padded" not in ours
    assert theirs["cu_seqlens_q_padded"].tolist() == theirs["cu_seqlens_q"].tolist() == [0, 2, 6]


def test_other_tensors_travel_along_with_their_own_padding():
    rows = [sample(1, 2, 3, weight=torch.tensor([0.5, 1.0, 2.0])), sample(4, weight=torch.tensor([3.0]))]
    del rows[0]["position_ids"], rows[1]["position_ids"]

    packed = build_mcore_thd_sequence_batch_from_rows(
        rows, pad_to_multiple_of=2, sequence_tensor_pad_values={"weight": -1.0}, emit_padding_mask=True
    )

    assert packed["weight"].tolist() == [[0.5, 1.0, 2.0, -1.0, 3.0, -1.0]]
    assert packed["padding_mask"].tolist() == [[False, False, False, True, False, True]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]


def test_a_batch_is_joined_in_place_and_keeps_nothing_stale():
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
    stale = torch.tensor([0, 4, 8], dtype=torch.int32)
    batch = {"input_ids": tokens, "tokens": tokens, "position_ids": torch.arange(4).expand(2, 4)}
    batch |= {"padding_mask": tokens == 0, "cu_seqlens_q_padded": stale, "visual_inputs": "pictures"}

    pack_right_padded_sequence_batch_to_mcore_thd(batch, token_key="input_ids")

    assert batch["tokens"].tolist() == batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["visual_inputs"] == "pictures"
    assert not {"padding_mask", "cu_seqlens_q_padded"} & set(batch)


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([], {}, "no rows were given"),
        ([sample(1), sample()], {}, "row 1 has no tokens"),
        ([sample(1, 2, 3)], {"sequence_length": 2}, "row 0 has 3 tokens, over sequence_length 2"),
        ([{"input_ids": torch.ones(1, 2)}], {}, "input_ids must be a tensor of one dimension"),
        (
            [sample(1, 2), {"input_ids": torch.tensor([1])}],
            {},
            "row 1: labels must match its 1 tokens, as in all rows; got None",
        ),
        (
            [sample(1, 2, attention_mask=torch.tensor([1, 0]))],
            {},
            "row 0 is padded: its attention_mask has zeros",
        ),
        (
            [sample(1, 2, 3), sample(4)],
            {"packed_sequence_length": 6, "pad_to_multiple_of": 4},
            r"2 rows of \[4, 4\] tokens, rounded up to multiples of 4, take 8 tokens, over the .* 6;",
        ),
    ],
)
def test_rows_that_can_t_be_joined_are_refused(rows, settings, words):
    with pytest.raises(DocumentsError, match=words):
        build_mcore_thd_sequence_batch_from_rows(rows, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"packed_sequence_length": 6, "pad_to_packed_sequence_length": True, "pad_to_multiple_of": 4},
            "6 is not a multiple of pad_to_multiple_of 4; the nearest: 4",
        ),
        ({"pad_to_max_length": True}, "needs packed_sequence_length"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be a whole number"),
        ({"sequence_tensor_pad_values": {"labels": 0}}, "labels: these have their own pad values"),
    ],
)
def test_settings_by_which_no_rows_can_be_joined_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        build_mcore_thd_sequence_batch_from_rows([sample(1)], **settings)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"ids": 3}, "the batch has no tensor tokens or input_ids; it has ids"),
        ({"tokens": torch.ones(1, 2)}, "the batch has no position_ids"),
        ({"tokens": torch.ones(2), "position_ids": torch.ones(2)}, r"tokens must be rows .* shape is \(2,\)"),
        (
            {"tokens": torch.ones(1, 2), "position_ids": torch.ones(1, 3)},
            r"position_ids has the shape \(1, 3\), but tokens \(1, 2\)",
        ),
    ],
)
def test_a_batch_whose_tensors_don_t_match_is_refused(batch, words):
    with pytest.raises(DocumentsError, match=words):
        pack_right_padded_sequence_batch_to_mcore_thd(batch)
