"""A gathered rollout becomes each rank's micro-batches, and values of tokens find their places and come back."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.megatron.rl import (
    PackingContext,
    PackingInfo,
    SequencePacker,
    bins_per_step,
    create_packed_seq_params,
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


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.data())
def test_log_probs_of_inference_lie_one_before_their_tokens(
    lengths: list[int], multiple: int, data: st.DataObject
) -> None:
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
def test_log_probs_of_other_ranks_are_left_out_and_padding_behind_too(starts: list[int]) -> None:
    info = PackingInfo([[1], []], {0: starts, 1: []}, [2, 3], [0, 1])
    padded = torch.tensor([[9.0, 9.0, 9.0], [-1.0, -2.0, 7.0]])

    values, known = pack_inference_logprobs(padded, info, torch.tensor([[1, 1, 0], [0, 1, 1]]), 4)

    assert values.tolist() == [[-1, -2, 0], [0, 0, 0]]
    assert known.tolist() == [[True, True, False], [False] * 3]


@given(LENGTHS, st.sampled_from([1, 4]))
def test_values_come_back_from_the_bins_as_they_were(lengths: list[int], multiple: int) -> None:
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
            "sequence 0 ends at 5, behind its bin of 4 values",
        ),
        (lambda: unpack_logprobs(torch.ones(1, 3), INFO), "sequence 0 ends at 4, behind its bin of 3 values"),
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
def test_values_that_do_not_fit_the_bins_are_refused(call: Any, words: str) -> None:
    with pytest.raises(DocumentsError, match=words):
        call()


# A rank's share of a rollout


@pytest.mark.parametrize("split", [True, False])
def test_a_rollout_becomes_the_micro_batches_of_each_rank(split: bool) -> None:
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
def test_padding_counts_as_work_where_it_is_not_cut(split: bool, first: list[int]) -> None:
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


def test_log_probs_of_inference_are_handed_out_where_they_correct() -> None:
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


def test_figures_of_a_packing_count_real_tokens_and_places() -> None:
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
def test_a_step_takes_its_share_of_the_bins_rounded_up(
    ratio: float, bins: int, ranks: int, expected: int
) -> None:
    assert bins_per_step(ratio, bins, ranks) == expected


@pytest.mark.parametrize("ratio", [0, -1, 1.1, float("nan")])
def test_a_step_of_no_share_is_refused(ratio: float) -> None:
    with pytest.raises(SettingError, match="samples_ratio_per_step must be over 0 and at most 1"):
        bins_per_step(ratio, 4, 1)


def test_what_a_context_lacks_is_said() -> None:
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
