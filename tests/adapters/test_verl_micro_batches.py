"""A rank's samples become micro-batches under verl's limits, as many on every rank, and even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varlen.adapters.verl import calculate_workload, karmarkar_karp, micro_batch_partitions
from varlen.errors import LengthsError, OverlongDocumentError, SettingError

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
def test_micro_batches_keep_to_the_limits_and_are_no_more_than_verl_s(
    lengths: list[int], least: int, multiple: int, balance: bool
) -> None:
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


def test_neighbours_of_a_group_stay_together() -> None:
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


def test_all_ranks_get_as_many_micro_batches_or_all_an_error() -> None:
    many, few = on_ranks([[60, 60, 60], [10, 10, 10, 10]])
    assert len(many) == len(few) == 3

    assert all(isinstance(result, SettingError) for result in on_ranks([[60, 60, 60], [10, 10]]))
    overlong = on_ranks([[10] * 500, [65]])
    assert [str(error)[:20] for error in overlong] == ["a sample of another ", "65 tokens that must "]


@pytest.mark.parametrize(("wrong", "groups"), [([3, 0], 1), ([3, -1], 1), ([3], 2), ([2**31 - 1] * 2, 2)])
def test_a_rank_with_lengths_that_are_wrong_leaves_no_other_waiting(wrong: list[int], groups: int) -> None:
    good, bad = on_ranks([[10] * 4, wrong], force_group_size=groups)

    assert isinstance(bad, LengthsError)
    assert isinstance(good, OverlongDocumentError)
    assert str(good).startswith("a sample of another rank")


@pytest.mark.parametrize(
    ("lengths", "settings", "error", "words"),
    [
        ([65], {}, OverlongDocumentError, "65 tokens that must stay together: over the max_token_len of 64"),
        ([3, 0], {}, LengthsError, "sample 1 has no tokens"),
        ([3], {"min_num_micro_batch": 2}, SettingError, "2 micro-batches .* a rank has only 1 samples"),
        ([3], {"num_batches_divided_by": 0}, SettingError, "num_batches_divided_by must be a whole number"),
    ],
)
def test_samples_that_can_t_be_divided_are_refused(
    lengths: list[int], settings: dict[str, Any], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        micro_batch_partitions(lengths, LIMIT, **settings)
