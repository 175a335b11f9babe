"""Rollouts become bins as Megatron-LM packs them, or fuller ones, and every token of every trajectory is in one."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.megatron.rl import (
    SequencePacker,
    create_packed_seq_params_for_bin,
    distribute_packed_bins,
    get_actual_sequence_lengths,
    pack_inference_logprobs,
    unpack_sequences,
)
from varlen.errors import DocumentsError, LengthsError, OverlongDocumentError, SettingError
from varlen.plan.partition import even_ways, packed

GOLDEN = json.loads((Path(__file__).with_name("golden.json")).read_text(encoding="utf-8"))["cases"]
PAD, EOD = 42, 43


def rollout(*sequences: Sequence[int], pad: int = PAD) -> torch.Tensor:
    width = max(map(len, sequences))
    return torch.tensor([[*tokens, *[pad] * (width - len(tokens))] for tokens in sequences])


def masks_of(lengths: Sequence[int], width: int) -> torch.Tensor:
    """Return masks in which the policy generated every token but the first."""
    places = torch.arange(width)
    return (places < torch.tensor(lengths)[:, None]) & (places > 0)


# Megatron-LM's values, and what its tests describe


@pytest.mark.parametrize("case", GOLDEN)
def test_compatible_bins_are_those_of_megatron(case):
    packer = SequencePacker(case["bin_size"], case["pad"], case["most"], case["multiple"], compatible=True)
    masks = torch.tensor(case["masks"]).bool()

    rows, positions, loss_mask, info = packer.pack_sequences(torch.tensor(case["trajs"]), masks)

    assert rows.tolist() == case["rows"]
    assert positions.tolist() == case["positions"]
    assert loss_mask.tolist() == case["loss_mask"]
    assert [info.seq_starts[number] for number in range(len(rows))] == case["seq_starts"]
    for name in ("bin_seq_indices", "seq_lengths", "seq_to_bin_idx"):
        assert getattr(info, name) == case[name]
    for number in range(len(rows)):
        params = create_packed_seq_params_for_bin(
            info, number, case["bin_size"], case["most"], "cpu", case["multiple"]
        )
        padded = params.cu_seqlens_q_padded
        assert params.cu_seqlens_q is not None
        assert params.cu_seqlens_q.tolist() == case["cu_seqlens"][number]
        assert (None if padded is None else padded.tolist()) == case["cu_seqlens_padded"][number]
    for algo, ranks in case["ranks"].items():
        for rank, theirs in enumerate(ranks):
            mine = distribute_packed_bins(
                rows,
                positions,
                loss_mask,
                info,
                dp_rank=rank,
                dp_size=3,
                pad_token=case["pad"],
                packing_algo=algo,
            )
            assert mine[0].tolist() == theirs["rows"]
            assert mine[3].bin_seq_indices == theirs["bin_seq_indices"]
            assert [mine[3].seq_starts[number] for number in range(len(mine[0]))] == theirs["seq_starts"]
    logprobs = [torch.tensor(values) for values in case["logprobs"]]
    values, known = pack_inference_logprobs(logprobs, info, masks, case["bin_size"])
    assert values.tolist() == case["packed_logprobs"]
    assert known.int().tolist() == case["known"]


def test_lengths_end_at_the_last_token_other_than_padding():
    trajs = rollout([1, 2, 3], [4, 5, 6, 7, 8], [9], [PAD], [1, PAD, 3], [PAD, 2, 3, 4])

    assert get_actual_sequence_lengths(trajs, PAD) == [3, 5, 1, 0, 3, 4]


def test_lengths_need_rows_and_columns():
    with pytest.raises(DocumentsError, match="Expected 2D tensor"):
        get_actual_sequence_lengths(torch.tensor([1, 2, 3]), PAD)


def test_a_bin_holds_sequences_from_long_to_short_with_positions_from_zero():
    trajs = rollout([1, 2, 3, EOD], [4, 5, EOD], [6, 7, 8, 9, EOD])
    masks = [masks_of([length], 5)[0] for length in (4, 3, 5)]  # a list, as its test has it

    rows, positions, loss_mask, info = SequencePacker(16, PAD).pack_sequences(trajs, masks)

    assert rows.tolist() == [[6, 7, 8, 9, EOD, 1, 2, 3, EOD, 4, 5, EOD, *[PAD] * 4]]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0]]
    assert loss_mask.tolist() == [[0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0]]
    assert (rows.dtype, positions.dtype, loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)
    assert (info.bin_seq_indices, info.seq_starts) == ([[2, 0, 1]], {0: [0, 5, 9, 12]})
    assert (info.seq_lengths, info.seq_to_bin_idx, info.packing_algo) == ([4, 3, 5], [0, 0, 0], "fifo")


@pytest.mark.parametrize(
    ("multiple", "bin_size", "starts"), [(1, 16, [0, 7, 12]), (4, 24, [0, 8, 16])], ids=["plain", "aligned"]
)
def test_slots_begin_at_multiples_with_padding_between(multiple, bin_size, starts):
    trajs = rollout([1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15, 16])
    packer = SequencePacker(bin_size, PAD, 4, multiple)

    rows, positions, loss_mask, info = packer.pack_sequences(trajs, lengths=[5, 7])

    assert rows.shape == (1, bin_size)
    assert info.bin_seq_indices == [[1, 0]]
    assert info.seq_starts == {0: starts}
    expected = [PAD] * bin_size
    expected[0:7], expected[starts[1] : starts[1] + 5] = range(10, 17), range(1, 6)
    assert rows[0].tolist() == expected
    assert loss_mask[0].tolist() == [float(token != PAD) for token in expected]
    assert positions[0, starts[1] : starts[1] + 5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("compatible", [True, False])
def test_a_slot_takes_its_whole_multiple_of_a_bin(compatible):
    packer = SequencePacker(8, PAD, seq_length_multiple=4, compatible=compatible)

    rows, _, _, info = packer.pack_sequences(torch.arange(1, 10).reshape(3, 3))

    assert len(rows) == 2
    assert sorted(map(len, info.bin_seq_indices)) == [1, 2]


# What is better


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], SequencePacker]:
    """Trajectories whose tokens may be the padding, their lengths, and a packer that can take them."""
    lengths = draw(st.lists(st.integers(0, 12), max_size=20))
    width = max([1, *lengths]) + draw(st.integers(0, 2))
    trajs = torch.full((len(lengths), width), 7)
    for row, length in enumerate(lengths):
        trajs[row, :length] = torch.tensor(
            draw(st.lists(st.integers(5, 9), min_size=length, max_size=length))
        )
    multiple = draw(st.sampled_from([1, 2, 4]))
    packer = SequencePacker(
        (-(-12 // multiple) + draw(st.integers(0, 4))) * multiple,
        7,
        draw(st.integers(1, 5)),
        multiple,
        method=draw(st.sampled_from(["best_fit_decreasing", "balanced"])),
        bin_count_multiple=draw(st.integers(1, 4)),
    )
    return trajs, lengths, packer


@given(rollouts())
def test_every_token_of_every_trajectory_is_in_one_bin(drawn):
    trajs, lengths, packer = drawn

    rows, positions, loss_mask, info = packer.pack_sequences(trajs, lengths=lengths)

    found = unpack_sequences(rows, info)
    real = [number for number, length in enumerate(lengths) if length]
    assert list(found) == real == sorted(number for numbers in info.bin_seq_indices for number in numbers)
    for number in real:
        assert found[number].tolist() == trajs[number, : lengths[number]].tolist()
        assert number in info.bin_seq_indices[info.seq_to_bin_idx[number]]  # type: ignore[index]
    for number, values in unpack_sequences(positions, info).items():
        assert values.tolist() == list(range(lengths[number]))
    assert loss_mask.sum() == sum(lengths)
    assert [number for number, place in enumerate(info.seq_to_bin_idx) if place is None] == [
        number for number, length in enumerate(lengths) if not length
    ]
    taken = torch.zeros(rows.shape, dtype=torch.int64)
    for place, numbers in enumerate(info.bin_seq_indices):
        assert 1 <= len(numbers) <= packer.max_sequences_per_bin
        starts = info.seq_starts[place]
        assert len(starts) == len(numbers) + 1
        assert starts[0] == 0
        assert starts[-1] <= packer.bin_size
        for number, start, stop in zip(numbers, starts, starts[1:]):
            slot = -(-lengths[number] // packer.seq_length_multiple) * packer.seq_length_multiple
            assert (start % packer.seq_length_multiple, stop - start) == (0, slot)
            taken[place, start : start + lengths[number]] += 1
    assert not (taken > 1).any()
    assert (rows[taken == 0] == 7).all()
    assert (positions[taken == 0] == 0).all()
    assert (loss_mask[taken == 0] == 0).all()


@given(rollouts())
def test_bins_are_a_multiple_and_no_more_than_megatron_needs(drawn):
    trajs, lengths, packer = drawn
    real = sum(length > 0 for length in lengths)

    bins = len(packer.pack_sequences(trajs, lengths=lengths)[0])

    theirs = SequencePacker(
        packer.bin_size, 7, packer.max_sequences_per_bin, packer.seq_length_multiple, compatible=True
    )
    kept = [number for number, length in enumerate(lengths) if length]
    many = len(theirs.pack_sequences(trajs[kept], lengths=[lengths[number] for number in kept])[0])
    assert bins % packer.bin_count_multiple == 0 or bins == real
    assert bins <= many + -many % packer.bin_count_multiple


def test_best_fit_takes_fewer_bins_than_one_open_bin():
    lengths = [6, 6, 4, 4, 2, 2]
    trajs = torch.ones((6, 6), dtype=torch.int64)

    ours = SequencePacker(8, 0).pack_sequences(trajs, lengths=lengths)[3].bin_seq_indices
    theirs = SequencePacker(8, 0, compatible=True).pack_sequences(trajs, lengths=lengths)[3].bin_seq_indices

    assert ours == [[0, 4], [1, 5], [2, 3]]
    assert theirs == [[0], [1], [2, 3], [4, 5]]


def test_bins_stand_in_the_order_of_their_first_trajectories():
    lengths = [1, 8, 3, 7, 5]

    info = SequencePacker(8, 0).pack_sequences(torch.ones((5, 8), dtype=torch.int64), lengths=lengths)[3]

    assert info.bin_seq_indices == [[3, 0], [1], [4, 2]]


@pytest.mark.parametrize("multiple", [1, 8])
def test_balanced_bins_have_more_even_attention(multiple):
    lengths = np.random.default_rng(0).lognormal(4, 1, 128).astype(int).clip(1, 800).tolist()
    trajs = torch.ones((128, 800), dtype=torch.int64)

    def bins(packer: SequencePacker) -> list[int]:
        info = packer.pack_sequences(trajs, lengths=lengths)[3]
        return sorted(sum(lengths[number] ** 2 for number in numbers) for numbers in info.bin_seq_indices)

    full = bins(SequencePacker(1600, 0, bin_count_multiple=multiple))
    balanced = bins(SequencePacker(1600, 0, bin_count_multiple=multiple, method="balanced"))

    assert len(balanced) == len(full)
    assert sum(balanced) == sum(full)
    assert sum(balanced[::-1][::multiple]) <= sum(full[::-1][::multiple])
    assert balanced[-1] < full[-1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 4))
def test_balanced_bins_are_the_best_of_the_planners_ways(lengths, multiple):
    packer = SequencePacker(50, 0, 6, method="balanced", bin_count_multiple=multiple)
    info = packer.pack_sequences(torch.ones((len(lengths), 50), dtype=torch.int64), lengths=lengths)[3]
    bin_of = np.array(info.seq_to_bin_idx)

    sizes = np.array(lengths, np.int32)
    work, bins = sizes.astype(float) ** 2, len(info.bin_seq_indices)
    ways = even_ways(sizes, work, packed(sizes, 50, 6)[0], bins, 50, 6)

    def waits(way: Any) -> tuple[float, float]:
        heavy = np.sort(np.bincount(way, weights=work))[::-1]
        return heavy[::multiple].sum(), heavy[0]

    assert waits(bin_of) == min(map(waits, ways))


def test_a_real_end_that_equals_the_padding_is_kept_where_it_is_known(caplog):
    trajs, masks = rollout([1, 2, EOD], [3, EOD, EOD], pad=EOD), masks_of([3, 2], 3)
    packer = SequencePacker(8, EOD)

    with caplog.at_level(logging.WARNING):
        by_masks = packer.pack_sequences(trajs, masks)[3].seq_lengths
        by_lengths = packer.pack_sequences(trajs, lengths=[3, 3])[3].seq_lengths
        by_attention = packer.pack_sequences(trajs, attention_mask=masks_of([3, 2], 3) | (trajs < EOD))[
            3
        ].seq_lengths
        assert not caplog.records
        alone = [packer.pack_sequences(trajs)[3].seq_lengths for _ in range(2)]
    theirs = SequencePacker(8, EOD, compatible=True).pack_sequences(trajs, masks)[3].seq_lengths

    assert (by_masks, by_lengths, by_attention) == ([3, 2], [3, 3], [3, 2])
    assert alone == [[2, 1], [2, 1]]
    assert theirs == [2, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "neither lengths nor a mask was given, so that each trajectory is taken to end at its last token other than "
        "43; real tokens that equal it are lost from the end"
    ]


def test_a_rollout_of_nothing_has_no_bins():
    for trajs in (torch.full((3, 4), PAD), torch.zeros((0, 4), dtype=torch.int64)):
        rows, _, loss_mask, info = SequencePacker(8, PAD, method="balanced").pack_sequences(trajs)
        assert rows.shape == loss_mask.shape == (0, 8)
        assert (info.bin_seq_indices, info.seq_to_bin_idx) == ([], [None] * len(trajs))


def test_the_mean_of_sequences_a_bin_is_kept():
    packer = SequencePacker(4, PAD)

    packer.pack_sequences(rollout([1, 2, 3, 4], [1, 2], [3, 4]))

    assert packer.last_avg_seqs_per_bin == 1.5


# What can't be packed


TRAJS = rollout([1, 2, 3, 4, 5], [6, 7])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"trajs": torch.ones(3)}, DocumentsError, r"trajs must be rows of equal width, .* is \(3,\)"),
        (
            {"generation_masks": torch.ones(2, 4)},
            DocumentsError,
            r"generation_masks has the shape \(2, 4\), but",
        ),
        ({"generation_masks": [torch.ones(5), torch.ones(4)]}, DocumentsError, r"0 has \(5,\) and 1 \(4,\)"),
        ({"attention_mask": torch.ones(5)}, DocumentsError, r"attention_mask has the shape \(5,\)"),
        ({"attention_mask": TRAJS == 7}, DocumentsError, "row 1 of the batch is not right-padded"),
        ({"lengths": [5]}, LengthsError, "there are 2 trajectories, but 1 lengths"),
        ({"lengths": [5, 6]}, LengthsError, "trajectory 1 can't have 6 tokens: trajs are 5 wide"),
        ({"lengths": [5, -1]}, LengthsError, "length -1 of document 1 is negative"),
        (
            {"lengths": [5, 2], "generation_masks": torch.ones(2, 5)},
            DocumentsError,
            r"trajectory 1 has 2 tokens by its length, but its generation_masks are set up at token 5 \(1 of 2",
        ),
        (
            {"lengths": [5, 2], "attention_mask": masks_of([5, 3], 5) | (TRAJS != PAD)},
            DocumentsError,
            "trajectory 1 has 2 tokens by its length, but its attention_mask ends at token 3",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        SequencePacker(8, PAD).pack_sequences(**{"trajs": TRAJS, **arguments})


@pytest.mark.parametrize("compatible", [True, False])
def test_a_trajectory_longer_than_a_bin_is_named(compatible):
    with pytest.raises(
        OverlongDocumentError, match=r"trajectory 0 has 5 tokens but bin_size is 4 \(1 of 2 trajectories"
    ):
        SequencePacker(4, PAD, compatible=compatible).pack_sequences(TRAJS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"seq_length_multiple": 4},
            "bin_size 10 must be divisible by seq_length_multiple 4; the nearest: 8 or 12",
        ),
        ({"seq_length_multiple": 16}, "the nearest: 16"),
        ({"seq_length_multiple": 0}, "seq_length_multiple must be a whole number from 1"),
        ({"max_sequences_per_bin": 0}, "max_sequences_per_bin must be a whole number from 1"),
        ({"bin_size": 0}, "bin_size must be a whole number from 1"),
        ({"bin_count_multiple": 1.5}, "bin_count_multiple must be a whole number"),
        ({"method": "next_fit"}, "method must be one of best_fit_decreasing, balanced; got 'next_fit'"),
        ({"compatible": True, "method": "balanced"}, "compatible=True packs as Megatron-LM does"),
        ({"compatible": True, "bin_count_multiple": 2}, "compatible=True packs as Megatron-LM does"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        SequencePacker(**{"bin_size": 10, "pad_token": PAD, **settings})
