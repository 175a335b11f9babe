"""verl's functions: parts that are as even as its own or more so, and micro-batches under its limits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.verl import (
    calculate_workload,
    get_group_balanced_partitions,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
    log_seqlen_unbalance,
    micro_batch_partitions,
)
from varlen.errors import LengthsError, OverlongDocumentError, SettingError

# What verl 0.9.1 returned for these on 2026-11-22 (each part of karmarkar_karp sorted).
RELEASE: list[tuple[list[int], int, bool, list[list[int]], list[list[int]]]] = [
    ([8, 7, 6, 5, 4], 2, False, [[1, 3, 4], [0, 2]], [[0, 3, 4], [1, 2]]),
    ([1, 1, 1, 1, 1, 1], 3, True, [[0, 5], [1, 4], [2, 3]], [[0, 3], [1, 4], [2, 5]]),
    ([0, 0, 5, 0], 3, False, [[2], [0, 1], [3]], [[0, 1, 2], [3], []]),
    (
        [512, 1024, 64, 2048, 300, 300, 7, 900],
        4,
        True,
        [[3, 6], [4, 7], [1, 2], [0, 5]],
        [[0, 5], [1, 6], [2, 4], [3, 7]],
    ),
    (
        [1889, 1250, 1368, 1794, 1157, 1551, 1667, 451, 112, 601, 570, 1747],
        3,
        False,
        [[0, 5, 8, 9, 10], [2, 4, 7, 11], [1, 3, 6]],
        [[0, 5, 8, 10], [1, 3, 7, 9, 11], [2, 4, 6]],
    ),
    (
        [1825, 11, 1000, 1642, 263, 1594, 239, 936, 1633, 606, 683, 557],
        3,
        True,
        [[1, 5, 8, 11], [0, 4, 7, 9], [2, 3, 6, 10]],
        [[0, 5, 8, 11], [1, 3, 7, 10], [2, 4, 6, 9]],
    ),
    (
        [1439, 510, 1980, 890, 956, 1009, 1165, 1107, 1019, 1991, 1615, 1585, 1400, 1244, 682, 1977],
        5,
        False,
        [[1, 11, 12, 14], [3, 9, 13], [2, 4, 6], [5, 7, 15], [0, 8, 10]],
        [[0, 8, 13], [1, 5, 9, 15], [2, 10], [3, 6, 11], [4, 7, 12, 14]],
    ),
]


@pytest.mark.parametrize(("weights", "parts", "equal", "differenced", "dealt"), RELEASE)
def test_they_return_what_the_release_returns(weights, parts, equal, differenced, dealt):
    assert karmarkar_karp(weights, parts, equal) == differenced
    assert greedy_partition(weights, parts, equal) == dealt


@pytest.mark.parametrize(("weights", "parts", "equal", "differenced", "dealt"), RELEASE)
def test_the_balanced_parts_are_no_heavier_than_the_release_s(weights, parts, equal, differenced, dealt):
    ours = get_seqlen_balanced_partitions(weights, parts, equal)

    assert max(sum(weights[i] for i in part) for part in ours) <= max(
        sum(weights[i] for i in part) for part in differenced
    )
    assert sorted(i for part in ours for i in part) == list(range(len(weights)))


@given(st.lists(st.integers(0, 10_000), min_size=6, max_size=60), st.integers(1, 6), st.booleans())
def test_every_sample_stands_in_one_part_and_numbers_rise(weights, parts, equal):
    kept = weights[: len(weights) // parts * parts] if equal else weights
    for divide in (get_seqlen_balanced_partitions, karmarkar_karp, greedy_partition):
        found = divide(kept, parts, equal)

        assert len(found) == parts
        assert sorted(i for part in found for i in part) == list(range(len(kept)))
        assert all(part == sorted(part) for part in found)
        assert not equal or {len(part) for part in found} == {len(kept) // parts}
        assert all(type(i) is int for part in found for i in part)


def test_a_tensor_of_workloads_is_taken():
    lengths = torch.tensor([1000, 900, 200, 100])

    parts = get_seqlen_balanced_partitions(calculate_workload(lengths), k_partitions=2, equal_size=True)

    assert parts == [[0, 3], [1, 2]]
    assert calculate_workload(3) == 24576 * 3 + 9


def test_samples_of_one_uid_stay_together():
    lengths = [10, 20, 500, 400, 30, 40, 300, 350]
    uids = ["a", "a", "b", "b", "c", "c", "d", "d"]

    assert get_group_balanced_partitions(lengths, uids, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_groups_that_come_apart_are_refused():
    with pytest.raises(SettingError, match=r"2 uids stand in 3 runs.*sort the samples by uid"):
        get_group_balanced_partitions([1, 2, 3], ["a", "b", "a"], 1)
    with pytest.raises(LengthsError, match="3 lengths and 2 uids"):
        get_group_balanced_partitions([1, 2, 3], ["a", "b"], 1)
    with pytest.raises(SettingError, match="3 items can't be divided into 2 parts of equal size"):
        get_group_balanced_partitions([1, 2, 3], ["a", "b", "c"], 2)


def test_the_log_says_how_even_parts_are():
    lengths = [8, 1, 7, 2, 6, 3]

    logged = log_seqlen_unbalance(lengths, [[0, 1, 5], [2, 3, 4]], "seqlen")

    assert logged == {  # as verl 0.9.1 returns it
        "seqlen/min": 11,
        "seqlen/max": 16,
        "seqlen/minmax_diff": 5,
        "seqlen/balanced_min": 12,
        "seqlen/balanced_max": 15,
        "seqlen/mean": 13.5,
    }


def test_the_log_takes_samples_that_can_t_be_divided_evenly():
    logged = log_seqlen_unbalance([5, 5, 5, 5, 5], [[0, 1, 2], [3, 4]], "p")

    assert (logged["p/min"], logged["p/max"]) == (10, 15)  # verl: a third run of 5 tokens, and min 5
    with pytest.raises(SettingError, match="0 parts were given"):
        log_seqlen_unbalance([5], [], "p")


def test_too_few_samples_are_refused():
    with pytest.raises(SettingError, match="1 items can't fill 2 parts"):
        get_seqlen_balanced_partitions([1], 2, equal_size=False)
    with pytest.raises(SettingError, match="3 items can't be divided into 2 parts of equal size"):
        karmarkar_karp(np.array([1, 2, 3]), 2, equal_size=True)


LIMIT = 64
LENGTHS = st.lists(st.integers(1, LIMIT), min_size=1, max_size=30)


def verl_parts(lengths: list[int], least: int, multiple: int) -> list[list[int]] | None:
    """Return the parts that verl finds by trying one number after the other; None where it finds none."""
    work = [calculate_workload(length) for length in lengths]
    number = max(least, min(len(lengths), -(-sum(lengths) // LIMIT)))
    number += -number % multiple
    while number <= len(lengths):
        parts = karmarkar_karp(work, number, equal_size=False)
        if all(sum(lengths[n] for n in part) <= LIMIT for part in parts):
            return parts
        number += multiple
    return None


@given(LENGTHS, st.integers(0, 6), st.integers(1, 3), st.booleans())
def test_micro_batches_keep_to_the_limits_and_are_no_more_than_verl_s(lengths, least, multiple, balance):
    theirs = verl_parts(lengths, least, multiple)
    settings: dict[str, Any] = {"min_num_micro_batch": least, "num_batches_divided_by": multiple}
    if theirs is None:
        with pytest.raises(
            SettingError, match="micro-batches of at most 64 tokens are needed, but a rank has only"
        ):
            micro_batch_partitions(lengths, LIMIT, **settings)
        return

    found = micro_batch_partitions(lengths, LIMIT, use_dynamic_bsz_balance=balance, **settings)

    assert sorted(n for part in found for n in part) == list(range(len(lengths)))
    assert all(part and sum(lengths[n] for n in part) <= LIMIT for part in found)
    assert len(found) >= least
    assert len(found) % multiple == 0
    assert len(found) <= len(theirs)
    work = [sum(calculate_workload(lengths[n]) for n in part) for part in found]
    if len(found) == len(theirs):
        assert max(work) <= max(sum(calculate_workload(lengths[n]) for n in part) for part in theirs)
    if balance:
        top = work.index(max(work))
        assert work[: top + 1] == sorted(work[: top + 1])
        assert work[top:] == sorted(work[top:], reverse=True)


def test_neighbours_of_a_group_stay_together():
    found = micro_batch_partitions([10, 10, 30, 30, 5, 5], 64, force_group_size=2)

    assert sorted(found) == [[0, 1, 4, 5], [2, 3]]
    with pytest.raises(LengthsError, match="5 samples aren't whole groups of 2"):
        micro_batch_partitions([1] * 5, 64, force_group_size=2)


def on_ranks(ranks: list[list[int]], **settings: Any) -> list[Any]:
    """Run all ranks one after the other, with what each of the two rounds of asking finds on all of them."""
    asked: list[list[int]] = [[], []]

    def asking(answers: list[int]) -> Callable[[int], int]:
        turns = iter(range(2))

        def largest(number: int) -> int:
            turn = next(turns)
            asked[turn].append(number)
            return answers[turn] if answers else number

        return largest

    results: list[Any] = []
    for answers in ([], [0, 0]):
        if answers:
            answers = [max(asked[0]), max(asked[1])]
        results = []
        for lengths in ranks:
            try:
                results.append(
                    micro_batch_partitions(lengths, LIMIT, largest_of_all=asking(answers), **settings)
                )
            except (SettingError, OverlongDocumentError, LengthsError) as error:
                results.append(error)
    return results


def test_all_ranks_get_as_many_micro_batches_or_all_an_error():
    many, few = on_ranks([[60, 60, 60], [10, 10, 10, 10]])
    assert len(many) == len(few) == 3

    assert all(isinstance(result, SettingError) for result in on_ranks([[60, 60, 60], [10, 10]]))
    overlong = on_ranks([[10] * 500, [65]])
    assert [str(error)[:20] for error in overlong] == ["a sample of another ", "a sample or group ha"]


@pytest.mark.parametrize(("wrong", "groups"), [([3, 0], 1), ([3, -1], 1), ([3], 2), ([2**31 - 1] * 2, 2)])
def test_a_rank_with_lengths_that_are_wrong_leaves_no_other_waiting(wrong, groups):
    good, bad = on_ranks([[10] * 4, wrong], force_group_size=groups)

    assert isinstance(bad, LengthsError)
    assert isinstance(good, OverlongDocumentError)
    assert str(good).startswith("a sample of another rank")


@pytest.mark.parametrize(
    ("lengths", "settings", "error", "words"),
    [
        ([65], {}, OverlongDocumentError, "65 tokens that must stay together but max_token_len is 64"),
        ([3, 0], {}, LengthsError, "sample 1 has no tokens"),
        ([3], {"min_num_micro_batch": 2}, SettingError, "2 micro-batches .* a rank has only 1 samples"),
        ([3], {"num_batches_divided_by": 0}, SettingError, "num_batches_divided_by must be a whole number"),
    ],
)
def test_samples_that_can_t_be_divided_are_refused(lengths, settings, error, words):
    with pytest.raises(error, match=words):
        micro_batch_partitions(lengths, LIMIT, **settings)
