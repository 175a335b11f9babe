"""Documents aligned to the multiple of context and sequence parallelism, as each release stores them, and better."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.megatron import alignment, stored_lengths
from varlen.adapters.megatron.packing.alignment import aligned_pieces, longest_aligned, slots_of
from varlen.errors import OverlongDocumentError, SettingError


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [
        ({}, 1),
        ({"context_parallel_size": 2}, 4),
        ({"context_parallel_size": 3}, 6),
        ({"tensor_model_parallel_size": 8}, 1),
        ({"tensor_model_parallel_size": 8, "sequence_parallel": True}, 8),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 8, "sequence_parallel": True}, 16),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 3, "sequence_parallel": True}, 12),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 1, "sequence_parallel": True}, 4),
        ({"context_parallel_size": 1, "eval_context_parallel_size": 4}, 8),
        ({"context_parallel_size": 2, "eval_context_parallel_size": 3}, 12),
    ],
)
def test_the_multiple_divides_over_all_ranks(sizes, multiple):
    assert alignment(**sizes) == multiple


@pytest.mark.parametrize(
    "name", ["context_parallel_size", "tensor_model_parallel_size", "eval_context_parallel_size"]
)
def test_a_size_below_one_is_refused_by_name(name):
    with pytest.raises(SettingError, match=name):
        alignment(**{name: 0})


@given(
    st.lists(st.integers(0, 200), max_size=30),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from(["split", "truncate", "drop"]),
)
def test_no_slot_overflows_and_every_slot_divides(positions, size, multiple, overlong):
    if size < multiple:
        return
    pieces = aligned_pieces(positions, size, multiple=multiple, overlong=overlong)
    slots = slots_of(pieces.lengths, multiple)

    assert (slots % multiple == 0).all()
    assert slots.max(initial=0) <= size
    lost = pieces.losses.get("truncated", 0) + pieces.losses.get("dropped", 0)
    assert int(pieces.lengths.sum()) + lost == sum(positions)
    assert overlong != "split" or lost == 0


@given(st.integers(1, 200), st.integers(8, 100), st.sampled_from([2, 4, 8]))
def test_truncated_documents_are_as_long_as_0_6_stores_them(tokens, size, multiple):
    pieces = aligned_pieces([tokens - 1], size, multiple=multiple, overlong="truncate")

    stored = int(slots_of(pieces.lengths, multiple)[0]) + 1
    assert stored == stored_lengths([tokens], size, multiple)[0]


@pytest.mark.parametrize(
    ("length", "longest", "stored"),
    [
        (16, 16, 17),
        (17, 16, 17),
        (20, 16, 17),
        (21, 16, 17),
        (17, 40, 17),
        (18, 40, 25),
        (3, 16, 9),
        (5, 16, 9),
    ],
)
def test_0_6_rounds_positions_and_not_stored_tokens(length, longest, stored):
    assert stored_lengths([length], longest, 8).tolist() == [stored]


def test_before_0_6_a_document_near_the_pack_size_overflowed_it():
    assert stored_lengths([4090, 4096], 4096, 8, "0.4").tolist() == [4097, 4097]
    assert stored_lengths([150], 150, 8, "0.3.1").tolist() == [151]  # 150 positions, which 8 doesn't divide
    assert stored_lengths([150], 150, 8, "0.6").tolist() == [145]
    assert stored_lengths([150, 7], 150, 1, "0.4").tolist() == [150, 7]


def test_a_document_near_the_limit_is_an_error_and_not_cut():
    assert longest_aligned(150, 8) == 144
    with pytest.raises(OverlongDocumentError) as raised:
        aligned_pieces([3, 149], 150, multiple=8)

    assert "document 1 has 150 tokens, 149 positions of input; aligned to 8 it would take 152" in str(
        raised.value
    )
    assert "144 are the most that fit" in str(raised.value)
    assert "positions for 152" in str(raised.value)


def test_a_multiple_that_no_document_fits_is_refused():
    with pytest.raises(SettingError, match="pass at least 8"):
        longest_aligned(7, 8)
