"""A step's samples become micro-batches of even work, as many on every rank, none empty, each sample once."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import varlen as vl
from varlen.adapters.megatron import (
    DpBalancedScheduler,
    Microbatches,
    balance_microbatches,
    build_unpacked_sequence_sample,
    fold_alignment_padding,
    identity_collate,
    mask_dummies,
    unpacked_samples,
)
from varlen.errors import DocumentsError, LengthsError, OverlongDocumentError, SettingError

CAPACITY = 64
WORK = (10.0, 1.0)
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=40)


def work_of(lengths: list[int]) -> float:
    return sum(WORK[0] * length + WORK[1] * length**2 for length in lengths)


def next_fit_packs(lengths: list[int], capacity: int, multiple: int) -> list[list[int]] | None:
    """Return what `dp_balanced` does: next-fit in order of arrival, then last samples moved off late packs.

    None where it fails because it has no samples.
    """
    packs: list[list[int]] = []
    room = -1
    for number, length in enumerate(lengths):
        if length > room:
            packs.append([])
            room = capacity
        packs[-1].append(number)
        room -= length
    late = len(packs) - 1
    while len(packs) % multiple:
        if late < 0:
            return None
        if len(packs[late]) > 1:
            packs.append([packs[late].pop()])
        else:
            late -= 1
    return packs


def makespan(packs: list[list[int]], lengths: list[int], ranks: int) -> float:
    """Return the work of packs that run `ranks` at a time, where all wait for the heaviest."""
    work = [work_of([lengths[number] for number in pack]) for pack in packs]
    return sum(max(work[first : first + ranks]) for first in range(0, len(work), ranks))


def packs_of(found: Microbatches) -> Iterator[list[int]]:
    for number in range(found.num_microbatches):
        for rank in range(found.dp_size):
            yield found.samples(number, rank).tolist()


@given(LENGTHS, st.integers(1, 5), st.integers(1, 3), st.none() | st.integers(1, 4))
def test_every_sample_stands_once_in_full_ranks_without_an_empty_micro_batch(lengths, ranks, multiple, most):
    settings: dict[str, Any] = {"dp_size": ranks, "group_multiple": multiple, "max_samples": most}
    found = balance_microbatches(lengths, capacity=CAPACITY, work=WORK, fill="empty", **settings)

    packs = list(packs_of(found))
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    assert found.num_microbatches % multiple == 0
    assert len(packs) == found.num_microbatches * ranks
    assert all(sum(lengths[number] for number in pack) <= CAPACITY for pack in packs)
    assert all(len(pack) <= (most or len(lengths)) and pack == sorted(pack) for pack in packs)
    assert [number for number, pack in enumerate(packs) if not pack] == found.dummies.tolist()
    assert not len(found.dummies) or all(len(pack) <= 1 for pack in packs)
    assert np.allclose(found.work, [work_of([lengths[number] for number in pack]) for pack in packs])
    again = balance_microbatches(lengths, capacity=CAPACITY, work=WORK, fill="empty", **settings)
    assert again.to_lists() == found.to_lists()


@given(LENGTHS, st.integers(1, 5), st.integers(1, 3))
def test_a_step_takes_no_longer_than_with_next_fit_and_no_less_than_the_bound(lengths, ranks, multiple):
    found = balance_microbatches(
        lengths, capacity=CAPACITY, dp_size=ranks, group_multiple=multiple, fill="empty", work=WORK
    )
    theirs = next_fit_packs(lengths, CAPACITY, ranks * multiple)

    assert found.makespan == pytest.approx(makespan(list(packs_of(found)), lengths, ranks))
    assert found.lower_bound <= found.makespan * (1 + 1e-9)
    if theirs is not None:
        assert found.makespan <= makespan(theirs, lengths, ranks) * (1 + 1e-9)
        assert len(found.dummies) == 0
        assert found.num_microbatches <= len(theirs) // ranks


def test_the_step_of_the_lognormal_lengths_is_within_a_hundredth_of_the_bound():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6.5, 1.2, 512).astype(int) + 1, 8192)
    found = balance_microbatches(lengths, capacity=16384, dp_size=8)

    theirs = next_fit_packs(lengths.tolist(), 16384, 8)
    assert theirs is not None
    work = np.array([(49152.0 * lengths[pack] + lengths[pack].astype(float) ** 2).sum() for pack in theirs])
    assert found.makespan < 1.01 * found.lower_bound
    assert work.reshape(-1, 8).max(axis=1).sum() > 1.2 * found.lower_bound
    assert found.rank_work.max() < 1.01 * found.rank_work.mean()


def test_the_heavy_micro_batches_of_a_step_are_spread_over_the_ranks():
    found = balance_microbatches([60, 50, 40, 30], capacity=60, dp_size=2, work=(1.0, 0.0))

    assert [found.samples(number, 0).tolist() for number in (0, 1)] == [[0], [3]]
    assert found.rank_work.tolist() == [90.0, 90.0]


def test_ids_are_those_given_and_context_ranks_share_a_micro_batch():
    found = balance_microbatches([5, 6, 7, 8], capacity=8, dp_size=2, cp_size=2, ids=[40, 30, 20, 10])

    assert found.to_lists() == [[[10], [10], [20], [20]], [[40], [40], [30], [30]]]
    assert (found.seqlen_sum, found.seqlen_squared_sum) == (26, 25 + 36 + 49 + 64)


def test_an_overlong_sample_is_refused_by_name_or_runs_alone():
    lengths = [70, 5, 99, 5, 5, 5]

    with pytest.raises(
        OverlongDocumentError, match=r"sample 0 has 70 tokens but capacity is 64 \(2 of 6 samples"
    ):
        balance_microbatches(lengths, capacity=CAPACITY, dp_size=2)
    found = balance_microbatches(lengths, capacity=CAPACITY, dp_size=2, overlong="alone")
    assert found.to_lists() == [[[2], [0]], [[3, 4], [1, 5]]]  # theirs: [[[], [0]], ...]


@given(LENGTHS, st.lists(st.integers(CAPACITY + 1, 200), max_size=6), st.integers(1, 4))
def test_overlong_samples_never_share_a_micro_batch(lengths, overlong, ranks):
    everyone = overlong + lengths
    found = balance_microbatches(
        everyone, capacity=CAPACITY, dp_size=ranks, overlong="alone", fill="empty", work=WORK
    )

    packs = list(packs_of(found))
    assert sorted(number for pack in packs for number in pack) == list(range(len(everyone)))
    assert all(len(pack) == 1 for pack in packs if pack and pack[0] < len(overlong))
    assert all(sum(everyone[n] for n in pack) <= CAPACITY for pack in packs if len(pack) > 1)


def test_fewer_samples_than_ranks_are_refused_with_what_would_do():
    with pytest.raises(
        DocumentsError, match=r"2 samples can't fill 4 micro-batches, 4 at a time .*give at least 4 samples"
    ):
        balance_microbatches([5, 6], capacity=8, dp_size=2, group_multiple=2)


@pytest.mark.parametrize(("fill", "last"), [("empty", [[], []]), ("repeat", [[7], [7]])])
def test_the_dummies_of_a_short_step_are_named(fill, last):
    found = balance_microbatches([5, 6], capacity=8, dp_size=2, group_multiple=2, fill=fill, ids=[7, 8])

    assert found.to_lists() == [[[8], [7]], last]
    assert found.dummies.tolist() == [2, 3]
    assert found.is_dummy.tolist() == [[False, False], [True, True]]
    assert found.seqlen_sum == 11


def test_schedules_and_packers_load_no_torch():
    script = (
        "import sys; from varlen.adapters.megatron import DpBalancedScheduler, balance_microbatches; "
        "from varlen.adapters.nemo_rl import get_packer; get_packer('balanced', 8).pack([3, 4, 5]); "
        "balance_microbatches([3, 4, 5], capacity=8, dp_size=2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_step_without_samples_has_no_micro_batches():
    assert balance_microbatches([], capacity=8, dp_size=2).to_lists() == []


def test_ids_beyond_int64_are_refused_and_not_changed():
    with pytest.raises(DocumentsError, match="id 9,223,372,036,854,775,813 is over"):
        balance_microbatches([3, 4], capacity=8, dp_size=2, ids=np.array([2**63 + 5, 1], dtype=np.uint64))


def test_the_loss_of_dummies_is_masked_and_no_other():
    found = balance_microbatches([5, 6], capacity=8, dp_size=2, group_multiple=2, fill="repeat")
    samples = [{"loss_mask": torch.ones(5)}, {"loss_mask": torch.ones(5)}]

    assert mask_dummies(samples, found, dp_rank=1) == 1
    assert [sample["loss_mask"].sum().item() for sample in samples] == [5.0, 0.0]
    assert mask_dummies([{}, {}], found, dp_rank=0) == 1  # a stage of the pipeline without a loss mask
    with pytest.raises(SettingError, match="1 micro-batches of rank 0 were given; pass all 2 of one of"):
        mask_dummies(samples[:1], found, dp_rank=0)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"lengths": [3, 0, 2]}, LengthsError, r"sample 1 has no tokens \(1 of 3 have none\)"),
        ({"lengths": [3, -1]}, LengthsError, "length -1 of document 1 is negative"),
        ({"ids": [1, 1]}, DocumentsError, "id 1 stands 2 times; give each sample its own"),
        ({"ids": [1]}, DocumentsError, "ids must be one whole number for each of the 2 lengths"),
        ({"dp_size": 0}, SettingError, "dp_size must be a whole number"),
        ({"capacity": 0}, SettingError, "capacity must be a whole number"),
        ({"group_multiple": 0}, SettingError, "group_multiple must be a whole number"),
        ({"max_samples": 0}, SettingError, "max_samples must be a whole number"),
        ({"fill": "wait"}, SettingError, "fill must be one of error, repeat, empty; got 'wait'"),
        ({"overlong": "drop"}, SettingError, "overlong must be one of error, alone; got 'drop'"),
        ({"work": (0, 0)}, SettingError, "work must be two numbers of at least 0"),
    ],
)
def test_what_can_t_be_scheduled_is_refused(settings, error, words):
    given_settings: dict[str, Any] = {"lengths": [3, 2], "capacity": 8, "dp_size": 1} | settings

    with pytest.raises(error, match=words):
        balance_microbatches(given_settings.pop("lengths"), **given_settings)


class TheirRun:
    """Stands in for Megatron-Core's class: a `run` that asks for groups and packs what its rank gets."""

    def run(self: Any, samples: list[tuple[int, int]], rank: int) -> list[list[int]]:
        """Return the ids of each micro-batch of one rank of data and context parallelism."""
        groups = self.get_groups_and_subsamples(samples)
        assert len({number for group in groups for pack in group for number in pack}) == len(samples)
        assert all(len(group) == self.dp_size * self.cp_size for group in groups)
        return [group[rank] for group in groups]


class Balanced(DpBalancedScheduler, TheirRun):
    """As a user writes it, to have `run` from Megatron-Core."""


def test_a_class_that_inherits_from_both_runs_the_balanced_schedule():
    scheduler = Balanced(4, 2, 2, 2, max_num_seqs=1)

    assert scheduler.run([(0, 5), (1, 2), (2, 6), (3, 3)], rank=0) == [[2], [1]]
    assert scheduler.run([(0, 5), (1, 2), (2, 6), (3, 3)], rank=1) == [[2], [1]]
    assert scheduler.run([(0, 5), (1, 2), (2, 6), (3, 3)], rank=2) == [[0], [3]]
    assert scheduler.microbatches is not None
    assert scheduler.microbatches.num_microbatches == 2
    assert scheduler.get_required_sample_keys()[-2:] == ["original_seq_len", "padded_seq_len"]
    assert DpBalancedScheduler(np.int64(4), 2, 2, None).max_seq_len_all_ranks == 8  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "settings", "words"),
    [
        ((4, 0, 2, None), {}, "cp_size must be a whole number"),
        ((4, 1, 2, 0), {}, "microbatch_group_size_per_vp_stage must be a whole number"),
        ((4, 1, 2, None, 0), {}, "max_num_seqs must be a whole number"),
        ((4, 1, 2, None), {"fill": "x"}, "fill must be one of"),
        ((4, 1, 2, None), {"overlong": "cut"}, "overlong must be one of"),
    ],
)
def test_a_schedulers_settings_are_refused_when_it_is_made(sizes, settings, words):
    with pytest.raises(SettingError, match=words):
        DpBalancedScheduler(*sizes, **settings)


def test_a_sample_is_padded_and_its_padding_masked():
    sample = build_unpacked_sequence_sample(
        [5, 6, 7, 8, 9], [6, 7, 8, 9, 0], [0, 1, 0.5, 1, 1], pad_to_multiple_of=4, pad_token_id=99
    )

    assert {name: values.tolist() for name, values in sample.items()} == {
        "tokens": [5, 6, 7, 8, 9, 99, 99, 99],
        "labels": [6, 7, 8, 9, 0, 99, 99, 99],
        "loss_mask": [0.0, 1.0, 0.5, 1.0, 1.0, 0.0, 0.0, 0.0],
        "position_ids": list(range(8)),
        "original_seq_len": [5],
        "padded_seq_len": [8],
    }
    types = (torch.int64, torch.int64, torch.float32, torch.int64, torch.int32, torch.int32)
    assert tuple(values.dtype for values in sample.values()) == types
    assert fold_alignment_padding(sample)["original_seq_len"].tolist() == [8]


def test_a_sample_without_tokens_or_with_other_lengths_is_refused():
    with pytest.raises(DocumentsError, match="an empty sequence makes no sample"):
        build_unpacked_sequence_sample([], [], [], pad_to_multiple_of=1, pad_token_id=0)
    with pytest.raises(DocumentsError, match="must have the same length; got 2, 1 and 2"):
        build_unpacked_sequence_sample([1, 2], [1], [1, 1], pad_to_multiple_of=1, pad_token_id=0)


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_packed_batch_comes_apart_into_its_documents(layout, multiple):
    documents = [[11, 12, 13], [21, 22, 23, 24, 25], [31, 32]]
    packing = vl.pack([3, 5, 2], capacity=8, method="next_fit", document_multiple_of=multiple)
    batch = vl.collate(documents, packing, layout=layout, pad_id=0)

    samples = identity_collate(list(unpacked_samples(batch, pad_to_multiple_of=4, ignore_label_id=-100)))

    assert [sample["original_seq_len"].item() for sample in samples] == [3, 5, 2]
    assert samples[0]["tokens"].tolist() == [11, 12, 13, 0]
    assert samples[1]["labels"].tolist() == [22, 23, 24, 25, -100, -100, -100, -100]
    assert samples[2]["loss_mask"].tolist() == [1.0, 0.0, 0.0, 0.0]
