"""Packed bins and rollouts go to ranks as many on each, and values of tokens find their places and come back."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.megatron import PackedSeqParams, get_packed_seq_cp_partition_indices
from varlen.adapters.megatron.rl import (
    PackingContext,
    PackingInfo,
    SequencePacker,
    attention_work,
    bins_per_step,
    create_empty_bins,
    create_packed_seq_params,
    create_packed_seq_params_for_bin,
    distribute_packed_bins,
    get_default_packed_seq_params,
    get_packing_actual_tokens,
    get_packing_avg_seq_length,
    get_packing_compute_tokens,
    get_packing_efficiency,
    load_packed_data_by_index,
    pack_all_trajectories,
    pack_inference_logprobs,
    pack_values,
    unpack_logprobs,
    unpack_sequences,
)
from varlen.errors import DocumentsError, SettingError

PAD = 42
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=20)


class Tokenizer:
    """What Megatron's tokenizers call their padding."""

    pad = PAD


def packed(
    lengths: list[int], packer: SequencePacker
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PackingInfo]:
    """Pack sequences whose tokens number them: 1000, 1001, …; 2000, ….; and so on."""
    trajs = 1000 * torch.arange(1, len(lengths) + 1)[:, None] + torch.arange(max(lengths))
    return packer.pack_sequences(trajs, lengths=lengths)


# Bins over ranks


def test_empty_bins_are_padding_without_loss():
    rows = torch.tensor([[1, 2, PAD]])

    trajs, positions, mask, entries = create_empty_bins(3, 8, rows, rows, rows.float(), Tokenizer())

    assert trajs is not None
    assert positions is not None
    assert mask is not None
    assert trajs.shape == positions.shape == mask.shape == (3, 8)
    assert (trajs == PAD).all()
    assert not positions.any()
    assert not mask.any()
    assert (trajs.dtype, mask.dtype) == (torch.int64, torch.float32)
    assert entries == [{"bin_seq_indices": [], "seq_starts": []}] * 3
    assert create_empty_bins(0, 8, rows, rows, rows, pad_token=1) == (None, None, None, [])


@given(LENGTHS, st.integers(1, 5), st.sampled_from(["fifo", "round-robin", "balanced"]), st.integers(1, 3))
def test_every_rank_has_as_many_bins_and_every_sequence_one_rank(lengths, ranks, algo, multiple):
    rows, positions, mask, info = packed(lengths, SequencePacker(12, PAD, 4, multiple))

    shares = [
        distribute_packed_bins(
            rows, positions, mask, info, dp_rank=rank, dp_size=ranks, pad_token=PAD, packing_algo=algo
        )
        for rank in range(ranks)
    ]

    each = -(-len(rows) // ranks)
    held: list[int] = []
    for trajs, places, weights, mine in shares:
        assert trajs.shape == places.shape == weights.shape == (each, 12)
        assert len(mine.bin_seq_indices) == len(mine.seq_starts) == each
        assert mine.packing_algo == algo
        is_empty = [not numbers for numbers in mine.bin_seq_indices]
        assert is_empty == sorted(is_empty)
        for number in np.flatnonzero(is_empty):
            assert mine.seq_starts[int(number)] == []
            assert (trajs[number] == PAD).all()
            assert not weights[number].any()
        for number, tokens in unpack_sequences(trajs, mine).items():
            assert tokens.tolist() == [1000 * (number + 1) + place for place in range(lengths[number])]
            held.append(number)
    assert sorted(held) == list(range(len(lengths)))
    assert sum(not numbers for share in shares for numbers in share[3].bin_seq_indices) == -len(rows) % ranks


def waits(
    lengths: list[int], size: int, ranks: int, algo: Any, padding: bool = True, **settings: Any
) -> float:
    """Return the work of ranks that wait for each other at every bin, over the mean of a rank."""
    packer = SequencePacker(size, PAD, 50, **(settings or {"compatible": True}))
    rows, positions, mask, info = packed(lengths, packer)
    work = []
    for rank in range(ranks):
        share = distribute_packed_bins(
            rows,
            positions,
            mask,
            info,
            dp_rank=rank,
            dp_size=ranks,
            pad_token=PAD,
            packing_algo=algo,
            padding_work=padding,
        )
        work.append(attention_work(share[3], size, padding=padding))
    return float(np.max(work, axis=0).sum() / np.mean(work, axis=0).sum())


@given(LENGTHS, st.integers(1, 4), st.booleans())
def test_balanced_bins_never_make_ranks_wait_longer_than_those_of_megatron(lengths, ranks, padding):
    best = waits(lengths, 12, ranks, "balanced", padding)

    assert best <= min(waits(lengths, 12, ranks, algo, padding) for algo in ("fifo", "round-robin")) + 1e-9


def test_balanced_bins_make_ranks_wait_less():
    lengths = np.random.default_rng(3).lognormal(4, 1, 512).astype(int).clip(1, 500).tolist()

    waited = {algo: waits(lengths, 1000, 4, algo) for algo in ("fifo", "round-robin", "balanced")}

    assert waited["fifo"] > 2.2
    assert waited["round-robin"] > 1.2
    assert waited["balanced"] < 1.15
    even = waits(lengths, 1000, 4, "balanced", False, method="balanced", bin_count_multiple=4)
    assert even < 1.03


def test_balanced_steps_keep_the_order_of_the_packing():
    rows, positions, mask, info = packed([1, 1, 8, 8, 4, 4], SequencePacker(8, PAD, 1))

    shares = [
        distribute_packed_bins(
            rows,
            positions,
            mask,
            info,
            dp_rank=rank,
            dp_size=2,
            pad_token=PAD,
            packing_algo="balanced",
            padding_work=False,
        )
        for rank in range(2)
    ]

    assert [share[3].bin_seq_indices for share in shares] == [[[0], [2], [4]], [[1], [3], [5]]]


def test_attention_work_counts_what_each_token_sees():
    info = PackingInfo([[1, 0], []], {0: [0, 4, 8], 1: []}, [3, 4], [0, 0])

    assert attention_work(info, 10).tolist() == [4**2 + 3**2 + 2**2, 100]
    assert attention_work(info, 10, padding=False).tolist() == [25, 0]


def test_a_multiple_of_bins_leaves_no_rank_an_empty_one():
    lengths = [5, 5, 5, 3, 3, 1]

    bins = packed(lengths, SequencePacker(10, PAD, bin_count_multiple=4))[3].bin_seq_indices

    assert len(bins) == 4
    assert all(bins)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dp_rank": 2}, SettingError, "dp_rank must be a whole number from 0 to 1, got 2"),
        ({"dp_size": 0}, SettingError, "dp_size must be a whole number from 1"),
        ({"packing_algo": "lifo"}, SettingError, "packing_algo must be one of fifo, round-robin, balanced"),
        (
            {"packed_loss_mask": torch.ones(1, 4)},
            DocumentsError,
            r"packed_loss_mask has the shape \(1, 4\), but",
        ),
        ({"packed_trajs": torch.ones(2, 8)}, DocumentsError, r"packing_info has 1 bins; got shape \(2, 8\)"),
    ],
)
def test_bins_that_cannot_be_dealt_are_refused(arguments, error, words):
    rows, positions, mask, info = packed([5, 3], SequencePacker(8, PAD))
    given_ = {
        "packed_trajs": rows,
        "packed_position_ids": positions,
        "packed_loss_mask": mask,
        "packing_info": info,
        "dp_rank": 0,
        "dp_size": 2,
        "pad_token": PAD,
    }
    with pytest.raises(error, match=words):
        distribute_packed_bins(**(given_ | arguments))  # type: ignore[arg-type]


def test_empty_bins_need_a_token_of_padding():
    rows = torch.ones(1, 4)
    with pytest.raises(SettingError, match="pass pad_token, or a tokenizer"):
        create_empty_bins(1, 4, rows, rows, rows)


# What attention is told


@pytest.mark.parametrize("count", [1, 10, 48, 49, 50])
def test_boundaries_have_one_size_whatever_the_bin_holds(count):
    starts = [20 * number for number in range(count + 1)]
    info = PackingInfo([list(range(count))], {0: starts}, [20] * count, [0] * count)

    params = create_packed_seq_params_for_bin(info, 0, 1024, 50, torch.device("cpu"))

    assert params.cu_seqlens_q is not None
    assert params.cu_seqlens_q is params.cu_seqlens_kv
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q.tolist() == starts + [1024] * (51 - count)
    assert params.max_seqlen_q == params.max_seqlen_kv == params.total_tokens == 1024
    assert params.cu_seqlens_q_padded is None
    assert params.pad_between_seqs is False


@pytest.mark.parametrize(
    ("multiple", "bin_size", "padded", "real"),
    [
        (1, 16, None, [0, 7, 12, 16, 16, 16]),
        (4, 24, [0, 8, 16, 24, 24, 24], [0, 7, 12, 20, 20, 20]),
        (4, 16, [0, 8, 16, 16, 16, 16], [0, 7, 12, 12, 12, 12]),
    ],
)
def test_padded_boundaries_stand_beside_real_ones_where_slots_are_rounded(multiple, bin_size, padded, real):
    info = packed([5, 7], SequencePacker(bin_size, PAD, 4, multiple))[3]

    params = create_packed_seq_params_for_bin(info, 0, bin_size, 4, "cpu", multiple)

    assert params.cu_seqlens_q is not None
    assert params.cu_seqlens_q.tolist() == real
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded
    assert (None if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded.tolist()) == padded
    assert params.pad_between_seqs is (multiple > 1)


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.integers(0, 10))
def test_padding_is_cut_to_the_entries_that_there_are(lengths, multiple, more):
    size = (-(-12 // multiple) + more) * multiple
    info = packed(lengths, SequencePacker(size, PAD, 6, multiple))[3]
    for number, held in enumerate(info.bin_seq_indices):
        params = create_packed_seq_params_for_bin(info, number, size, 6, "cpu", multiple, split_padding=True)

        assert params.cu_seqlens_q is not None
        bounds = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        assert bounds.numel() == params.cu_seqlens_q.numel() == 8
        assert bounds[: len(held) + 1].tolist() == info.seq_starts[number]
        assert bounds[-1] == size
        slots = bounds.diff()
        assert (slots >= 0).all()
        assert not (slots % multiple).any()
        assert params.cu_seqlens_q.diff()[: len(held)].tolist() == [lengths[place] for place in held]
        pieces = slots[len(held) :]
        assert pieces.tolist() == params.cu_seqlens_q.diff()[len(held) :].tolist()
        assert int(pieces.max()) <= -(-int(pieces.sum()) // multiple // pieces.numel()) * multiple


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_empty_bin_is_told_in_the_fields_of_a_full_one(multiple):
    info = packed([5, 7], SequencePacker(16, PAD, 4, multiple))[3]
    info.bin_seq_indices.append([])
    info.seq_starts[1] = []

    full, empty = (
        create_packed_seq_params_for_bin(info, number, 16, 4, "cpu", multiple) for number in (0, 1)
    )

    default = get_default_packed_seq_params(16, 4, "cpu", multiple)
    for field in dataclasses.fields(PackedSeqParams):
        values = [getattr(params, field.name) for params in (full, empty, default)]
        if isinstance(values[0], torch.Tensor):
            assert len({(value.shape, value.dtype) for value in values}) == 1, field.name
            assert values[1].tolist() == values[2].tolist()
        else:
            assert values[0] == values[1] == values[2], field.name
    assert default.cu_seqlens_q is not None
    assert default.cu_seqlens_q.tolist() == [0, 16, 16, 16, 16, 16]
    cut = get_default_packed_seq_params(16, 4, "cpu", multiple, split_padding=True).cu_seqlens_q
    assert cut is not None
    assert cut.tolist() == ([0, 3, 6, 9, 12, 16] if multiple == 1 else [0, 4, 8, 12, 16, 16])


@pytest.mark.parametrize("cp", [2, 4])
def test_log_probs_of_context_parallel_ranks_make_up_those_of_the_whole_bin(cp):
    slot = 2 * cp
    size, lengths = 8 * slot, [2 * slot + 1, slot + 3, slot - 2]
    rows, positions, _, info = packed(lengths, SequencePacker(size, PAD, 4, slot))
    params = create_packed_seq_params_for_bin(info, 0, size, 4, "cpu", slot)

    def model(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.sin(tokens.double()) + torch.cos(places.double())

    whole = model(rows, positions)
    joined = torch.full_like(whole, torch.nan)
    for rank in range(cp):
        mine = get_packed_seq_cp_partition_indices(params, total_tokens=size, cp_size=cp, cp_rank=rank)
        assert mine.numel() == size // cp
        joined[:, mine] = model(rows[:, mine], positions[:, mine])
    assert joined.tolist() == whole.tolist()
    assert {number: len(values) for number, values in unpack_logprobs(joined[:, 1:], info).items()} == {
        0: 2 * slot,
        1: slot + 2,
        2: slot - 3,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_sequences_per_bin": 1}, "bin 0 holds 2 sequences, over the max_sequences_per_bin of 1"),
        ({"seq_length_multiple": 4}, r"slots of \[5, 5\] tokens, which must each be divisible by .* 4"),
        (
            {"seq_starts": []},
            r"must have a start for each of its 2 sequences and, as end sentinel, .* 0 entries",
        ),
        ({"seq_starts": [0, 5]}, "as end sentinel, where the last slot ends; got 2 entries"),
        ({"seq_starts": [0, 4, 10], "seq_length_multiple": 2}, "must follow one another from 0"),
        ({"seq_starts": [0, 6, 18], "seq_length_multiple": 2}, "within its 16 tokens, .* multiples of 2"),
        ({"seq_starts": [0, 4, 10]}, r"sequences of \[5, 5\] tokens at \[0, 4, 10\]; they must follow"),
        ({"seq_starts": [0, 6, 11]}, "must follow one another from 0"),
        ({"seq_starts": [1, 6, 11]}, "must follow one another from 0"),
        ({"seq_starts": [0, 5, 20]}, "must follow one another from 0 within its 16"),
        ({"bin_idx": 1}, "there is no bin 1; packing_info has 1"),
    ],
)
def test_a_bin_that_breaks_its_contract_is_refused(changes, words):
    info = packed([5, 5], SequencePacker(16, PAD, 4))[3]
    if "seq_starts" in changes:
        info.seq_starts[0] = changes["seq_starts"]
    others = {name: value for name, value in changes.items() if name != "seq_starts"}
    with pytest.raises(DocumentsError, match=words):
        create_packed_seq_params_for_bin(
            **({"packing_info": info, "bin_idx": 0, "bin_size": 16, "max_sequences_per_bin": 4} | others)  # type: ignore[arg-type]
        )


def test_a_bin_of_no_whole_slots_is_refused():
    with pytest.raises(SettingError, match="bin_size 10 must be divisible by seq_length_multiple 4"):
        get_default_packed_seq_params(10, 4, "cpu", 4)


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.data())
def test_log_probs_of_inference_lie_one_before_their_tokens(lengths, multiple, data):
    width = max(lengths)
    trajs = torch.arange(len(lengths) * width).reshape(-1, width)
    masks = torch.zeros(trajs.shape, dtype=torch.bool)
    for number, length in enumerate(lengths):
        row = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
        masks[number, :length] = torch.tensor(row)
    scored = [data.draw(st.integers(0, int(mask.sum()))) for mask in masks]
    logprobs = [trajs[number][masks[number]][:count].float() for number, count in enumerate(scored)]
    packer = SequencePacker(12, -1, 4, multiple)
    rows, _, _, info = packer.pack_sequences(trajs, masks, lengths=lengths)

    values, known = pack_inference_logprobs([*logprobs[:-1], None], info, masks, 12)

    assert values.shape == known.shape == (len(rows), 11)
    assert (values[known] == rows[:, 1:][known]).all()  # each log-prob is the number of its own token
    assert not values[~known].any()
    told = unpack_logprobs(known, info)
    assert list(told) == list(range(len(lengths)))
    for number, found in told.items():
        first = int(masks[number, 0])  # nothing predicts the first token
        expected = 0 if number == len(lengths) - 1 else max(scored[number] - first, 0)
        assert int(found.sum()) == expected
    assert int(known.sum()) == sum(int(found.sum()) for found in told.values())  # none between sequences


@pytest.mark.parametrize("starts", [[0, 3], [0]], ids=["with the end", "without"])
def test_log_probs_of_other_ranks_are_left_out_and_padding_behind_too(starts):
    info = PackingInfo([[1], []], {0: starts, 1: []}, [2, 3], [0, 1])
    padded = torch.tensor([[9.0, 9.0, 9.0], [-1.0, -2.0, 7.0]])

    values, known = pack_inference_logprobs(padded, info, torch.tensor([[1, 1, 0], [0, 1, 1]]), 4)

    assert values.tolist() == [[-1, -2, 0], [0, 0, 0]]
    assert known.tolist() == [[True, True, False], [False] * 3]


@given(LENGTHS, st.sampled_from([1, 4]))
def test_values_come_back_from_the_bins_as_they_were(lengths, multiple):
    values = torch.randn(len(lengths), max(lengths), 2)
    packer = SequencePacker(12, PAD, 4, multiple)
    rows, _, _, info = packer.pack_sequences(torch.ones(values.shape[:2]), lengths=lengths)

    bins = pack_values(values, info, 12, fill=-3)

    assert bins.shape == (*rows.shape, 2)
    assert torch.equal(bins == -3, (rows == PAD)[..., None].expand(bins.shape))
    back = unpack_sequences(bins, info)
    assert list(back) == list(range(len(lengths)))
    for number, length in enumerate(lengths):
        assert torch.equal(back[number], values[number, :length])


INFO = PackingInfo([[1, 0]], {0: [0, 3, 5]}, [2, 3], [0, 0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: unpack_sequences(torch.ones(2, 5), INFO),
            r"has 1 bins, but the values have the shape \(2, 5\)",
        ),
        (
            lambda: unpack_sequences(torch.ones(1, 4), INFO),
            "sequence 0 ends at 5, beyond its bin of 4 values",
        ),
        (lambda: unpack_logprobs(torch.ones(1, 3), INFO), "sequence 0 ends at 4, beyond its bin of 3 values"),
        (
            lambda: pack_values(torch.ones(2, 2), INFO, 8),
            r"values must be .*2 and at least 3; got shape \(2, 2\)",
        ),
        (
            lambda: pack_inference_logprobs([None], INFO, torch.ones(2, 3), 8),
            r"there are 2 sequences, but generation_masks of shape \(2, 3\) and 1 inference_logprobs",
        ),
        (
            lambda: unpack_sequences(torch.ones(1, 5), PackingInfo([[2]], {0: [0, 3]}, [2, 3], [0, 0])),
            r"a bin holds sequence 2, but there are 2 lengths in seq_lengths \(1 of 1",
        ),
    ],
)
def test_values_that_do_not_fit_the_bins_are_refused(call, words):
    with pytest.raises(DocumentsError, match=words):
        call()


# A rank's share of a rollout


@pytest.mark.parametrize("split", [True, False])
def test_a_rollout_becomes_the_micro_batches_of_each_rank(split):
    lengths = [5, 7, 3, 8, 2, 6, 4]
    trajs = torch.arange(7)[:, None] * 10 + torch.arange(8)
    masks = (torch.arange(8) > 1) & (torch.arange(8) < torch.tensor(lengths)[:, None])
    packer = SequencePacker(16, PAD, 4, 2)
    seen: list[int] = []
    for rank in range(4):
        context = pack_all_trajectories(
            trajs,
            masks,
            None,
            torch.arange(7.0),
            packer,
            dp_rank=rank,
            dp_size=4,
            lengths=lengths,
            split_padding=split,
        )
        context.old_logprobs = torch.zeros(len(context.packed_trajs), 15)
        for number in range(len(context.packed_trajs)):
            made = load_packed_data_by_index(number, context, True)
            tokens, advantages, old, mask, positions, reference, inference, starts, sizes, numbers, params = (
                made
            )
            assert tokens.shape == positions.shape == (1, 16)
            assert old is not None
            assert old.shape == mask.shape == (1, 15)
            assert reference is None
            assert inference is None
            assert advantages.tolist() == numbers
            assert sizes == [lengths[place] for place in numbers]
            assert len(starts) == (len(numbers) + 1 if numbers else 0)
            assert torch.equal(mask, context.packed_loss_mask[number : number + 1, 1:])
            assert mask.sum() == sum(max(size - 2, 0) for size in sizes)
            assert params.cu_seqlens_q is not None
            assert params.cu_seqlens_q.diff()[: len(sizes)].tolist() == sizes
            assert params.cu_seqlens_q_padded is not None
            slots = params.cu_seqlens_q_padded.diff()
            padding = int(slots[len(sizes) :].sum()) // 2
            assert int((slots > 0).sum()) == len(sizes) + min(padding, 5 - len(sizes) if split else 1)
            seen += numbers
    assert sorted(seen) == list(range(7))


@pytest.mark.parametrize(("split", "first"), [(True, [0, 1]), (False, [2])])
def test_padding_counts_as_work_where_it_is_not_cut(split, first):
    made = [
        pack_all_trajectories(
            torch.ones(3, 9, dtype=torch.int64),
            torch.arange(9) < torch.tensor([[8], [8], [9]]),
            None,
            torch.ones(3),
            SequencePacker(16, PAD, compatible=True),
            dp_rank=rank,
            dp_size=2,
            lengths=[8 + (number == 2) for number in range(3)],
            split_padding=split,
        )
        for rank in range(2)
    ]

    # Two of 8 attend to 128 places, one of 9 to 81, and to 130 with its padding; the heavier goes to rank 0.
    assert made[0].packing_info.bin_seq_indices == [first]
    assert made[1].packing_info.bin_seq_indices == [[2] if split else [0, 1]]


def test_log_probs_of_inference_are_handed_out_where_they_correct():
    context = pack_all_trajectories(
        torch.ones(1, 4, dtype=torch.int64),
        torch.ones(1, 4),
        None,
        torch.ones(1),
        SequencePacker(4, PAD),
        dp_rank=0,
        dp_size=1,
    )
    context.packed_inference_logprobs = torch.tensor([[-1.0, -2.0, -3.0]])

    assert load_packed_data_by_index(0, context)[6] is None
    told = load_packed_data_by_index(0, context, logprobs_is_correction=True)[6]
    assert told is not None
    assert told.tolist() == [[-1, -2, -3]]


def context_of(info: PackingInfo, rows: torch.Tensor, **settings: Any) -> PackingContext:
    return PackingContext(rows.shape[1], None, info, None, None, rows, rows, rows, **settings)


def test_figures_of_a_packing_count_real_tokens_and_places():
    info = PackingInfo([[0, 1], [2, 3]], {0: [0, 5, 8], 1: [0, 10, 14]}, [5, 3, 10, 4], [0, 0, 1, 1])
    context = context_of(info, torch.zeros(2, 16))

    assert get_packing_actual_tokens(context) == 22
    assert get_packing_compute_tokens(context) == 32
    assert get_packing_avg_seq_length(context) == 5.5
    assert get_packing_efficiency(context, dp_size=4) == 22 / 128
    nothing = context_of(PackingInfo([], {}, [], []), torch.zeros(0, 16))
    assert get_packing_efficiency(nothing) == get_packing_avg_seq_length(nothing) == 0


@pytest.mark.parametrize(
    ("ratio", "bins", "ranks", "expected"),
    [
        (1.0, 1, 8, 8),
        (1.0, 42, 8, 336),
        (0.5, 1, 8, 8),
        (1 / 3, 4, 8, 16),
        (0.07, 100, 1, 7),
        (1 / 3, 3, 2, 2),
    ],
)
def test_a_step_takes_its_share_of_the_bins_rounded_up(ratio, bins, ranks, expected):
    assert bins_per_step(ratio, bins, ranks) == expected


@pytest.mark.parametrize("ratio", [0, -1, 1.1, float("nan")])
def test_a_step_of_no_share_is_refused(ratio):
    with pytest.raises(SettingError, match="samples_ratio_per_step must be over 0 and at most 1"):
        bins_per_step(ratio, 4, 1)


def test_what_a_context_lacks_is_said():
    context = context_of(INFO, torch.zeros(1, 8))
    with pytest.raises(SettingError, match="this PackingContext has no packer"):
        create_packed_seq_params(context)
    with pytest.raises(
        DocumentsError, match="no cached_packed_seq_params for bin 0; set them to create_packed"
    ):
        load_packed_data_by_index(0, context)
    with pytest.raises(DocumentsError, match="there is no bin 1; this rank has 1"):
        load_packed_data_by_index(1, context)
    with pytest.raises(DocumentsError, match="there are 2 trajectories, but 3 global_advantages"):
        pack_all_trajectories(
            torch.ones(2, 4),
            torch.ones(2, 4),
            None,
            torch.ones(3),
            SequencePacker(4, PAD),
            dp_rank=0,
            dp_size=1,
        )
