"""Megatron-Bridge's seeded packs from lengths alone: those of its release 0.3.1, and of a readable reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapters.megatron.packing.reference import LENGTHS, RELEASED, draw_global, replayed, seed_global

from varlen.adapters.megatron import alignment, replay_packs, stored_lengths
from varlen.adapters.megatron.packing.alignment import aligned_pieces, longest_aligned, slots_of
from varlen.errors import LengthsError, OverlongDocumentError, SettingError

ALGORITHMS = ["first_fit_shuffle", "first_fit_decreasing", "first_fit"]


@pytest.mark.parametrize(("algorithm", "seed"), RELEASED)
def test_packs_are_those_that_the_release_wrote(algorithm, seed):
    packing = replay_packs(LENGTHS, 16, seed, algorithm=algorithm)

    assert packing.to_lists() == RELEASED[algorithm, seed]
    assert packing.ledger.tokens_in == packing.ledger.packed == sum(LENGTHS)
    assert packing.ledger.documents_in == 25


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20), max_size=80),
    st.integers(20, 50),
    st.integers(0, 2**32 - 1),
    st.sampled_from(ALGORITHMS),
)
def test_packs_are_those_of_the_reference(lengths, size, seed, algorithm):
    packing = replay_packs(lengths, size, seed, algorithm=algorithm)

    assert packing.to_lists() == replayed(lengths, size, seed, algorithm)
    assert sorted(packing.document_ids) == list(range(len(lengths)))
    assert packing.lengths.tolist() == [lengths[number] for number in packing.document_ids]


def test_a_thousand_documents_pack_as_the_reference_packs_them():
    lengths = np.minimum(np.random.default_rng(0).lognormal(4, 1, 1000), 512).astype(int).tolist()

    assert replay_packs(lengths, 512, 5).to_lists() == replayed(lengths, 512, 5, "first_fit_shuffle")


@settings(deadline=None)
@given(st.lists(st.integers(0, 64), max_size=60), st.sampled_from([1, 4, 8]), st.integers(0, 9))
def test_aligned_documents_are_packed_by_their_padded_lengths(lengths, multiple, seed):
    packing = replay_packs(lengths, 64, seed, multiple=multiple)

    padded = [-(-length // multiple) * multiple for length in lengths]
    assert packing.to_lists() == replayed(padded, 64, seed, "first_fit_shuffle")
    assert packing.slot_lengths.tolist() == [padded[number] for number in packing.document_ids]
    assert packing.num_tokens == sum(lengths)


def test_numpys_global_generator_stays_as_it_was():
    seed_global(3)
    replay_packs(LENGTHS, 16, 0)
    drawn = draw_global()

    seed_global(3)
    assert drawn == draw_global()


def test_an_overlong_document_is_an_error_that_names_it_and_what_would_do():
    with pytest.raises(OverlongDocumentError) as raised:
        replay_packs([3, 70, 5, 90], 64, multiple=8)

    assert str(raised.value).startswith(
        "document 1 has 71 tokens, 70 positions of input; aligned to 8 it would take 72, but 64 are the most that "
        "fit (2 of 4 documents are too long); "
    )
    assert "positions for 96" in str(raised.value)


def test_dropped_documents_are_those_that_0_6_leaves_out_and_are_counted():
    lengths = [3, 70, 5, 90, 0]

    packing = replay_packs(lengths, 64, 1, overlong="drop")

    kept = [0, 2, 4]
    rows = replayed([3, 5, 0], 64, 1, "first_fit_shuffle")
    assert packing.to_lists() == [[kept[number] for number in row] for row in rows]
    assert (packing.ledger.dropped, packing.ledger.dropped_documents) == (160, 2)


def test_cut_documents_keep_every_position():
    packing = replay_packs([10, 150], 64, 0, overlong="split")

    pieces = sorted(zip(packing.document_ids.tolist(), packing.starts.tolist(), packing.stops.tolist()))
    assert pieces == [(0, 0, 10), (1, 0, 64), (1, 64, 128), (1, 128, 150)]
    assert replay_packs([10, 150], 64, 0, overlong="truncate").ledger.truncated == 86


def test_no_documents_make_no_packs():
    assert replay_packs([], 16).num_packs == 0
    assert replay_packs([70], 16, overlong="drop").num_packs == 0
    assert replay_packs([0, 0], 16).to_lists() == [[1, 0]]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"lengths": [3, -1]}, LengthsError, "-1"),
        ({"lengths": [3, 2.5]}, LengthsError, "2.5"),
        ({"pack_size": 0}, SettingError, "pack_size"),
        ({"seed": -1}, SettingError, "seed"),
        ({"seed": 2**32}, SettingError, "seed"),
        ({"algorithm": "best_fit"}, SettingError, "algorithm must be one of first_fit_shuffle"),
        ({"overlong": "skip"}, SettingError, "overlong must be one of"),
        ({"multiple": 32}, SettingError, "pack_size is 16, but documents are padded to multiples of 32"),
        ({"longest": 2, "multiple": 4}, SettingError, "longest is 2"),
    ],
)
def test_what_cant_be_is_refused_in_a_sentence(changed, error, words):
    with pytest.raises(error) as raised:
        replay_packs(**{"lengths": [3, 4], "pack_size": 16, **changed})

    assert words in str(raised.value)


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
