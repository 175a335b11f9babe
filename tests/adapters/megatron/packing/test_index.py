"""Megatron-Bridge's seeded packs: those of its release 0.3.1, aligned as each release stores them."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapters.megatron.packing.reference import (
    LENGTHS,
    RELEASED,
    RELEASED_METADATA,
    RELEASED_ROW,
    documents,
    draw_global,
    replayed,
    seed_global,
)
from tests.adapters.megatron.packing.reference import first_fit as first_fit_reference

from varlen.adapters.megatron import (
    PACKING_ALGORITHMS,
    PACKING_ALGOS,
    alignment,
    calculate_avg_seqlen,
    create_hist,
    create_packing_strategy,
    fill_packing_strategy,
    find_first_bin_that_fits,
    first_fit,
    first_fit_decreasing,
    first_fit_shuffle,
    get_seqlen_list,
    replay_packs,
    stored_lengths,
)
from varlen.adapters.megatron.packing.alignment import aligned_pieces, longest_aligned, slots_of
from varlen.errors import DocumentsError, LengthsError, OverlongDocumentError, SettingError

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
    assert "raise the limit to 96 positions" in str(raised.value)


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
    assert "raise the limit to 152 positions" in str(raised.value)


def test_a_multiple_that_no_document_fits_is_refused():
    with pytest.raises(SettingError, match="pass at least 8"):
        longest_aligned(7, 8)


lengths_of_bins = st.lists(st.integers(0, 40), max_size=60)


def packed(lengths, size, algorithm, seed):
    sequences, histogram = create_hist(np.array(documents(lengths)), size)
    seed_global(seed)
    assignments, metadata = create_packing_strategy(histogram, size, algorithm)
    return fill_packing_strategy(assignments, sequences, size, pad_id=0), metadata


@pytest.mark.parametrize(("algorithm", "seed"), RELEASED)
def test_rows_are_those_that_the_release_filled(algorithm, seed):
    rows, metadata = packed(LENGTHS, 16, algorithm, seed)

    found = [[row["input_ids"][start] // 100 for start in row["seq_start_id"]] for row in rows]
    assert found == RELEASED[algorithm, seed]
    if seed == 0:
        assert metadata == RELEASED_METADATA[algorithm]
        assert list(map(type, metadata.values())) == [int, int, float, float, int, int]
    if (algorithm, seed) == ("first_fit_shuffle", 0):
        assert rows[1] == RELEASED_ROW


def test_bins_are_those_that_the_release_made():
    seed_global(7)
    assert first_fit_shuffle(LENGTHS, 16) == [
        *([9, 3, 2, 0, 0, 1], [10, 3, 3], [9, 5, 2], [5, 5, 4], [12, 3], [6, 8], [13], [7, 7], [11], [16]),
        [14],
    ]
    assert first_fit_decreasing([20, 5, 0, 11, 17, 3, 8], 16) == [[20], [17], [11, 5, 0], [8, 3]]
    assert first_fit([20, 5, 0, 11, 17, 3, 8, 0], 16) == [[20], [5, 0, 11, 0], [17], [3, 8]]
    assert first_fit([4096] * 128, 2048) == [[4096]] * 128
    assert first_fit_decreasing([1111, 8192, 4096, 1000], 2048) == [[8192], [4096], [1111], [1000]]


@settings(deadline=None)
@given(lengths_of_bins, st.integers(1, 40))
def test_first_fit_is_a_scan_over_all_bins(lengths, size):
    items = [object() for _ in lengths]

    bins = first_fit(items, size, item_lengths=lengths)

    numbers = {id(item): number for number, item in enumerate(items)}
    assert [[numbers[id(item)] for item in held] for held in bins] == first_fit_reference(lengths, size)
    assert first_fit(lengths, size) == [[lengths[numbers[id(i)]] for i in held] for held in bins]


@settings(deadline=None)
@given(lengths_of_bins, st.integers(1, 40))
def test_first_fit_decreasing_keeps_equal_lengths_in_order(lengths, size):
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)

    bins = first_fit_decreasing(list(range(len(lengths))), size, item_lengths=lengths)

    scanned = first_fit_reference([lengths[number] for number in order], size)
    assert bins == [[order[place] for place in held] for held in scanned]


def test_a_shuffle_draws_what_numpy_draws_for_a_list():
    lengths = list(range(1, 30))
    seed_global(11)
    bins = first_fit_shuffle(lengths, 32)
    seed_global(11)
    shuffled = lengths[:]
    getattr(np.random, "shuffle")(shuffled)  # noqa: B009  # the release's own draw

    assert bins == first_fit(shuffled, 32)
    assert lengths == list(range(1, 30))


def test_lengths_and_items_must_be_as_many():
    for pack in (first_fit, first_fit_decreasing, first_fit_shuffle):
        with pytest.raises(ValueError, match="same number of entries, got 3 and 2"):
            pack([1, 2, 3], 10, item_lengths=[1, 2])
        with pytest.raises(TypeError):
            pack([1, 2, 3], 10, [1, 2, 3])
    with pytest.raises(LengthsError, match="-4"):
        first_fit([3, -4], 10)


def test_the_first_bin_with_room_is_found_by_contents_or_sums():
    bins = [[1111, 2, 3], [17, 11, 0, -5], [100, 200]]
    for held in (bins, [sum(numbers) for numbers in bins]):
        assert find_first_bin_that_fits(held, 11, 1) == -1
        assert find_first_bin_that_fits(held, 11, 1000) == 1


def test_a_histogram_counts_positions_of_input():
    sequences, histogram = create_hist([{"input_ids": [1, 2, 3]} for _ in range(6)], 5)

    assert histogram == [0, 0, 6, 0, 0, 0]
    assert len(sequences[2]) == 6
    assert sequences[4] == []


def test_an_overlong_document_is_refused_or_left_out_with_a_warning(caplog):
    fits, long = {"input_ids": [1, 2, 3, 4]}, {"input_ids": [1, 2, 3, 4, 5]}

    with pytest.raises(
        OverlongDocumentError, match=r"document 1 has 5 tokens, 4 positions .* truncate_seq_len is 3"
    ):
        create_hist([fits, long, fits], 3)
    with caplog.at_level(logging.WARNING):
        sequences, histogram = create_hist(np.array([fits, long, {"input_ids": []}]), 3, overlong="drop")

    assert histogram == [0, 0, 0, 1]
    assert sequences[3] == [fits]
    assert 4 not in sequences
    assert "left out 1 document longer than 3 positions" in caplog.text
    assert "left out 1 document without a token" in caplog.text


@pytest.mark.parametrize("algorithm", PACKING_ALGORITHMS)
def test_every_algorithm_packs_every_document_once(algorithm):
    rows, metadata = packed(LENGTHS, 16, algorithm, 0)

    found = [row["input_ids"][start] // 100 for row in rows for start in row["seq_start_id"]]
    assert sorted(found) == list(range(25))
    assert max(len(row["input_ids"]) - len(row["seq_start_id"]) for row in rows) <= 16
    assert metadata["dataset_max_seqlen"] == 16
    assert metadata["packing_factor"] == round(25 / len(rows), 2)
    assert metadata["packing_efficiency"] == round(sum(LENGTHS) / len(rows) / 16 * 100, 2)


@settings(deadline=None)
@given(lengths_of_bins.filter(len), st.integers(1, 40), st.sampled_from(PACKING_ALGORITHMS))
def test_no_bin_overflows_but_with_one_document_that_is_longer(lengths, size, algorithm):
    assignments, metadata = create_packing_strategy(np.bincount(lengths).tolist(), size, algorithm)

    assert sorted(length for held in assignments for length in held) == sorted(lengths)
    assert all(sum(held) <= size or len(held) == 1 for held in assignments)
    assert metadata["min_packed_seqlen"] == min(map(sum, assignments))
    assert metadata["max_samples_per_bin"] == max(map(len, assignments))


def test_best_fit_is_at_least_as_full_as_the_releases_algorithms():
    counts = np.bincount(np.minimum(np.random.default_rng(0).lognormal(5, 1, 3000), 1024).astype(int))
    rows = {name: len(create_packing_strategy(counts, 1024, name)[0]) for name in PACKING_ALGORITHMS}

    assert PACKING_ALGOS == ["first_fit_decreasing", "first_fit_shuffle"]
    assert rows["best_fit_decreasing"] <= rows["first_fit_decreasing"]
    assert rows["best_fit_shuffle"] <= rows["first_fit_shuffle"]


def test_a_strategy_takes_the_default_algorithm_and_refuses_others():
    assignments, metadata = create_packing_strategy([1, 77], 1)

    assert (metadata["dataset_max_seqlen"], metadata["max_samples_per_bin"]) == (1, 2)
    assert [len(held) for held in assignments] == [2] + [1] * 76
    with pytest.raises(SettingError, match="packing_algorithm must be one of first_fit_decreasing"):
        create_packing_strategy([1, 77], 1, "any_fit")
    with pytest.raises(DocumentsError, match="counts no document"):
        create_packing_strategy([0, 0], 1)


def test_masks_stand_at_the_input_of_their_target():
    sequences = {1: [{"input_ids": [10, 20], "loss_mask": [True, False]}]}
    assert fill_packing_strategy([[1]], sequences, 3, 0) == [
        {"input_ids": [10, 20], "loss_mask": [False, False], "seq_start_id": [0]}
    ]
    sequences = {3: [{"input_ids": np.array([1, 2, 3, 4]), "loss_mask": np.array([True, True, False, True])}]}
    (row,) = fill_packing_strategy([[3]], sequences, 4, 0)
    assert row == {"input_ids": [1, 2, 3, 4], "loss_mask": [True, False, True, False], "seq_start_id": [0]}


@pytest.mark.parametrize(
    ("start", "mask"), [(0, [1, 1, 1]), (1, [1, 1, 1]), (2, [0, 1, 1]), (3, [0, 0, 1]), (9, [0] * 3)]
)
def test_an_answer_is_trained_from_the_input_before_it(start, mask):
    sequences = {1: [{"input_ids": [100, 999, 200], "answer_start_idx": start}]}

    assert fill_packing_strategy([[1]], sequences, 3, pad_id=999)[0]["loss_mask"] == mask


def test_documents_of_several_lengths_share_a_row():
    sequences = {
        1: [
            {"input_ids": [100, 101], "loss_mask": [True, False]},
            {"input_ids": [200, 201], "loss_mask": [False, True]},
        ],
        2: [{"input_ids": [300, 301, 302], "loss_mask": [True, True, False]}],
    }
    seed_global(42)
    (row,) = fill_packing_strategy([[1, 2, 1]], sequences, 7, 0)
    seed_global(42)

    assert row["input_ids"] == [100, 101, 300, 301, 302, 200, 201]
    assert row["loss_mask"] == [False, False, True, False, False, True, False]
    assert row["seq_start_id"] == [0, 2, 5]
    assert fill_packing_strategy([[1, 2, 1]], sequences, 7, 0) == [row]


@pytest.mark.parametrize(
    ("assignments", "document", "words"),
    [
        ([[1]], {"input_ids": [1, 2]}, "no `loss_mask`, .* no `answer_start_idx` either"),
        ([[1]], {"input_ids": [1, 2], "loss_mask": [1]}, "2 `input_ids`, but 1 values of `loss_mask`"),
        ([[]], {"input_ids": [1, 2], "loss_mask": [1, 1]}, "1 document is left over"),
        ([[1, 1]], {"input_ids": [1, 2], "loss_mask": [1, 1]}, "more places of length 1 than"),
        ([[1], [2]], {"input_ids": [1, 2], "loss_mask": [1, 1]}, "more places of length 2 than"),
    ],
)
def test_places_and_documents_that_dont_match_are_refused(assignments, document, words):
    with pytest.raises(DocumentsError, match=words):
        fill_packing_strategy(assignments, {1: [document]}, 2, 0)


ROWS = [
    {"input_ids": list(range(8)), "loss_mask": [1] * 8, "seq_start_id": [0, 4]},
    {"input_ids": list(range(5)), "loss_mask": [1] * 5, "seq_start_id": [0]},
]


def write(path, rows):
    names = ("input_ids", "loss_mask", "seq_start_id")
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in names}), path)


def test_averages_are_the_releases_from_a_file_a_glob_and_a_folder(tmp_path):
    write(tmp_path / "all.parquet", ROWS)
    (tmp_path / "parts").mkdir()
    for number, row in enumerate(ROWS):
        write(tmp_path / "parts" / f"shard_{number:03d}.idx.parquet", [row])

    for spec in ("all.parquet", "parts/shard_*.idx.parquet", "parts"):
        found = calculate_avg_seqlen(str(tmp_path / spec), gbs=1, max_seq_len=8, drop_remainder=True)
        assert found == (3 / 2, 10 / 2, 34 / 3, 34 / 2)


def test_a_remainder_is_dropped_and_no_whole_batch_is_an_error(tmp_path):
    path = str(tmp_path / "rows.parquet")
    write(path, [ROWS[0], ROWS[1], ROWS[1]])

    assert calculate_avg_seqlen(path, 2, 8, True) == (3 / 2, 10 / 2, 34 / 3, 34 / 2)
    assert calculate_avg_seqlen(path, 2, 8, False) == (4 / 3, 14 / 3, 50 / 4, 50 / 3)
    with pytest.raises(DocumentsError, match="has 3 rows, fewer than a global batch of 4"):
        calculate_avg_seqlen(path, 4, 8, True)


def test_the_positions_of_a_row_are_without_each_documents_last_target():
    assert get_seqlen_list(ROWS[0]) == ([3, 3], 6)
    assert get_seqlen_list({"input_ids": np.arange(5), "seq_start_id": np.array([0])}) == ([4], 4)


def test_averages_of_an_array_are_those_of_parquet(tmp_path):
    np.save(tmp_path / "rows.npy", np.array(ROWS, dtype=object))

    found = calculate_avg_seqlen(str(tmp_path / "rows.npy"), gbs=1, max_seq_len=8, drop_remainder=True)
    assert found == (3 / 2, 10 / 2, 34 / 3, 34 / 2)


def test_averages_need_no_mask(tmp_path):
    names = ("input_ids", "seq_start_id")
    pq.write_table(pa.table({name: [row[name] for row in ROWS] for name in names}), tmp_path / "rows.parquet")

    found = calculate_avg_seqlen(str(tmp_path / "rows.parquet"), gbs=1, max_seq_len=8, drop_remainder=True)
    assert found == (3 / 2, 10 / 2, 34 / 3, 34 / 2)
