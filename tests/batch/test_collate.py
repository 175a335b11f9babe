"""`vl.collate` gives what a plain oracle gives, position by position, in both layouts."""

import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.batch.batches import IGNORE, cases, check_batch, expected, same_batch, tokens_like
from tests.support.packings import random_lengths

import varlen as vl
from varlen.errors import SettingError

OFTEN = settings(max_examples=3 * settings.default.max_examples)


@OFTEN
@given(cases())
def test_every_field_is_that_of_the_oracle(case):
    check_batch(case.collate(), expected(case))


@given(cases())
def test_boundaries_cover_every_position_and_no_segment_joins_another_or_a_row(case):
    batch = case.collate()
    bounds = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    owners = batch.segment_ids.reshape(-1)
    rows, width = batch.segment_ids.shape
    multiple = case.packing.document_multiple_of
    found = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        assert begin < end
        assert begin // width == (end - 1) // width, "a segment crosses rows"
        held = {int(owner) for owner in owners[begin:end]} - {-1}
        assert len(held) <= 1, "two documents share a segment"
        if held:
            assert owners[begin] in held
            found.append(int((owners[begin:end] >= 0).sum()))
            assert end - begin == -(-found[-1] // multiple) * multiple
        else:
            assert end - begin <= 128
    assert bounds[0] == 0
    assert bounds[-1] == rows * width
    assert found == batch.document_lengths.tolist()
    assert len(batch.cu_seqlens) == len(bounds)
    assert (batch.cu_seqlens_padded is None) == (batch.cu_seqlens[-1] == rows * width)
    assert type(batch.max_seqlen) is int


@pytest.mark.parametrize(
    ("length", "capacity", "parts"),
    [(5, 6, [1]), (5, 133, [128]), (5, 134, [128, 1]), (5, 400, [128, 128, 128, 11])],
)
def test_padding_stands_in_segments_of_at_most_128(length, capacity, parts):
    batch = vl.collate([list(range(length))], vl.pack([length], capacity))

    assert np.diff(batch.cu_seqlens).tolist() == [length, *parts]
    flat = vl.collate(
        [list(range(length))], vl.pack([length], capacity), layout="flat", pad_to_multiple_of=capacity
    )
    assert np.diff(flat.cu_seqlens).tolist() == [length, *parts]


def test_padding_segments_are_multiples_of_the_slots():
    batch = vl.collate([[1, 2, 3]], vl.pack([3], 480, document_multiple_of=48))

    assert np.diff(batch.cu_seqlens_padded).tolist() == [48, 96, 96, 96, 96, 48]
    assert np.diff(batch.cu_seqlens).tolist() == [3, 96, 96, 96, 96, 48]


def test_slots_that_need_no_rounding_have_one_set_of_boundaries():
    batch = vl.collate([[1, 2], [3, 4]], vl.pack([2, 2], 8, document_multiple_of=2))

    assert batch.cu_seqlens_padded is None
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 8]


def test_an_end_of_text_token_stays_a_target_where_it_is_the_padding_token_too():
    batch = vl.collate([[5, 0, 0], [0, 7]], vl.pack([3, 2], 6), pad_id=0)

    assert batch.labels.tolist() == [[IGNORE, 0, 0, IGNORE, 7, IGNORE]]
    assert batch.num_targets == 3


def test_a_piece_of_a_split_document_is_a_document_of_its_own():
    batch = vl.collate([list(range(10, 17))], vl.pack([7], 3, overlong="split"))

    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 0]]
    assert batch.labels.tolist() == [[IGNORE, 11, 12], [IGNORE, 14, 15], [IGNORE, IGNORE, IGNORE]]
    assert batch.document_ids.tolist() == [0, 0, 0]
    assert batch.document_starts.tolist() == [0, 3, 6]


def test_shifted_labels_are_the_next_tokens_and_only_there_on_request():
    packing = vl.pack([3, 2], 6)
    batch = vl.collate([[1, 2, 3], [4, 5]], packing, shift_labels=True)

    assert batch.shift_labels is not None
    assert batch.shift_labels.tolist() == [[2, 3, IGNORE, 5, IGNORE, IGNORE]]
    assert vl.collate([[1, 2, 3], [4, 5]], packing).shift_labels is None


def test_the_same_pack_twice_is_two_rows_and_two_sets_of_segments():
    packing = vl.pack([3, 2, 4], 4, "next_fit")
    batch = vl.collate([[1, 2, 3], [4, 5], [6, 7, 8, 9]], packing, pack_ids=[2, 0, 2])

    assert batch.input_ids.tolist() == [[6, 7, 8, 9], [1, 2, 3, 0], [6, 7, 8, 9]]
    assert batch.document_ids.tolist() == [2, 0, 2]
    assert batch.pack_ids.tolist() == [2, 0, 2]
    assert batch.pack_offsets.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_no_packs_make_an_empty_batch(layout):
    for lengths, packs in (([], None), ([0], None), ([3], [])):
        batch = vl.collate(tokens_like(lengths), vl.pack(lengths, 8), pack_ids=packs, layout=layout)
        assert batch.input_ids.shape == ((0, 8) if layout == "rows" else (1, 0))
        assert batch.cu_seqlens.tolist() == [0]
        assert (batch.num_tokens, batch.num_targets, batch.max_seqlen, batch.max_token_id) == (0, 0, 0, -1)
        assert "0 tokens" in repr(batch)


def test_what_a_batch_says_of_itself_is_what_it_holds():
    batch = vl.collate([[5, 6, 9], [4, 3]], vl.pack([3, 2], 6))

    assert (batch.num_rows, batch.num_segments, batch.num_tokens) == (1, 2, 5)
    assert (batch.max_seqlen, batch.max_token_id, batch.num_targets) == (3, 9, 3)
    assert repr(batch) == "PackedBatch(rows [1, 6], 2 documents or pieces, 5 tokens, 83.33% full, 3 targets)"


def test_the_largest_token_is_not_that_of_the_padding():
    assert vl.collate([[5, 6]], vl.pack([2], 4), pad_id=99).max_token_id == 6


@given(cases(layouts=("rows",)), st.data())
def test_a_row_is_the_batch_of_that_pack_alone(case, data):
    batch = case.collate()
    if not batch.num_rows:
        return
    index = data.draw(st.integers(-batch.num_rows, batch.num_rows - 1))
    alone = case.collate(pack_ids=[batch.pack_ids[index]])

    same_batch(batch.row(index), alone.replace(step_num_targets=batch.step_num_targets))


def test_a_row_is_a_view_and_a_row_that_is_not_there_is_refused():
    batch = vl.collate([[1, 2, 3], [4, 5, 6]], vl.pack([3, 3], 4))

    assert np.shares_memory(batch.row(1).input_ids, batch.input_ids)
    for index in (2, -3, 0.0):
        with pytest.raises(SettingError, match=f"row {index} is out of range: this batch has 2 rows"):
            batch.row(index)


def test_packs_without_a_target_are_named_in_the_batch_and_in_the_log(caplog):
    packing = vl.pack([3, 1, 2, 1], 3, "next_fit")
    with caplog.at_level(logging.WARNING, logger="varlen"):
        batch = vl.collate([[1, 2, 3], [4], [5, 6], [7]], packing, loss_mask=[[1, 1, 0], [1], [1, 0], [1]])
    assert batch.packs_without_targets.tolist() == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 3 packs in this batch hold no target and would train nothing, pack 1 first; "
        "see PackedBatch.packs_without_targets"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="varlen"):
        assert vl.collate([[1, 2, 3], [5, 6]], vl.pack([3, 2], 3)).packs_without_targets.tolist() == []
        assert vl.collate([[4]], vl.pack([1], 3)).packs_without_targets.tolist() == [0]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_batch_of_thousands_of_documents_holds_each_token_where_the_packing_says(layout):
    lengths = random_lengths(1, 5000, 600)
    documents = tokens_like(lengths)
    packing = vl.pack(lengths, 512, overlong="split")
    batch = vl.collate(documents, packing, layout=layout)
    mask = batch.segment_ids.reshape(-1) >= 0
    order = np.concatenate(
        [documents[d][a:b] for d, a, b in zip(packing.document_ids, packing.starts, packing.stops)]
    )

    assert batch.input_ids.reshape(-1)[mask].tolist() == order.tolist()
    assert sorted(order.tolist()) == list(range(1, sum(lengths) + 1))
    assert batch.num_targets == sum(lengths) - packing.num_pieces


def test_packs_of_a_window_are_collated_from_all_documents_so_far():
    lengths = random_lengths(2, 400, 60)
    documents = tokens_like(lengths)
    packer = vl.WindowPacker(capacity=50, window=64)
    seen: list[int] = []
    for begin in range(0, 400, 50):
        packing = packer.add(lengths[begin : begin + 50])
        batch = vl.collate(documents[: packer.num_records], packing, layout="flat")
        seen += batch.input_ids[0].tolist()
    seen += vl.collate(documents, packer.flush(), layout="flat").input_ids[0].tolist()

    assert sorted(seen) == list(range(1, sum(lengths) + 1))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_plain_python_gives_the_same_batch_as_the_kernels(case, plain_python):
    plain_python(False)
    compiled = case.collate()
    plain_python(True)

    same_batch(case.collate(), compiled)


def test_the_scale_of_a_loss_makes_the_step_a_mean_over_tokens():
    batch = vl.collate([[1, 2, 3]], vl.pack([3], 4), step_num_targets=8, dp_world_size=4)

    assert batch.num_targets == 2
    assert batch.loss_scale() == batch.loss_scale("mean") == 4 / 8
    assert batch.loss_scale("sum") == 1 / 8
    assert vl.collate([[1, 2, 3]], vl.pack([3], 4)).loss_scale("sum") == 1 / 2


def test_a_loss_without_targets_has_no_scale():
    batch = vl.collate([[1]], vl.pack([1], 4))
    with pytest.raises(SettingError, match="no target on any rank, so no loss scale exists; skip the step"):
        batch.loss_scale()
    with pytest.raises(SettingError, match='reduction must be "mean" or "sum", got \'max\''):
        batch.loss_scale("max")  # type: ignore[arg-type]
