"""NeMo-RL's packers give its bins; where more are asked for, none is empty and none heavier than there."""

import enum
import random
import statistics

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from varlen.adapters.nemo_rl import (
    ConcatenativePacker,
    FirstFitShufflePacker,
    PackingAlgorithm,
    PackingMetrics,
    SequencePacker,
    get_packer,
)
from varlen.errors import DocumentsError, LengthsError, OverlongDocumentError, SettingError

CAPACITY = 100
ALGORITHMS = list(PackingAlgorithm)
SMALL = [10, 20, 30, 40, 50, 60, 70, 80, 90]
MEDIUM = [25, 35, 45, 55, 65, 75, 85, 95, 15, 25, 35, 45, 55, 65, 75, 85, 95]
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=40)


def next_fit(lengths: list[int], most: int = -1) -> list[list[int]]:
    """Pack sequences in order, one bin open at a time."""
    bins: list[list[int]] = []
    for number, length in enumerate(lengths):
        is_full = not bins or sum(lengths[n] for n in bins[-1]) + length > CAPACITY or len(bins[-1]) == most
        bins += [[]] if is_full else []
        bins[-1].append(number)
    return bins


def first_fit(lengths: list[int], order: list[int]) -> list[list[int]]:
    """Pack sequences in an order, each into the first bin with space."""
    bins: list[list[int]] = []
    for number in order:
        fitting = (b for b in bins if sum(lengths[n] for n in b) + lengths[number] <= CAPACITY)
        found = next(fitting, None)
        if found is None:
            bins.append([number])
        else:
            found.append(number)
    return bins


def modified_first_fit(lengths: list[int]) -> list[list[int]]:
    """Pack sequences as NeMo-RL's modified first-fit-decreasing does, by searching lists."""

    def room(numbers: list[int]) -> int:
        return CAPACITY - sum(lengths[n] for n in numbers)

    def longest_that_fits(waiting: list[int], space: int) -> list[int]:
        fitting = [n for n in waiting if lengths[n] <= space]
        return [min(fitting, key=lambda n: (-lengths[n], n))] if fitting else []

    everyone = range(len(lengths))
    large = sorted((n for n in everyone if lengths[n] * 2 > CAPACITY), key=lambda n: -lengths[n])
    medium = [n for n in everyone if lengths[n] * 2 <= CAPACITY < lengths[n] * 3]
    small = sorted(
        (n for n in everyone if lengths[n] * 3 <= CAPACITY < lengths[n] * 6), key=lambda n: lengths[n]
    )
    bins = [[n] for n in large]
    for numbers in bins:
        for n in longest_that_fits(medium, room(numbers)):
            numbers.append(n)
            medium.remove(n)
    for numbers in bins[::-1]:
        if len(numbers) == 1 and len(small) > 1 and lengths[small[0]] + lengths[small[1]] <= room(numbers):
            numbers.append(small.pop(0))
            beside = [n for n in small if lengths[n] <= room(numbers)][-1]
            numbers.append(beside)
            small.remove(beside)
    rest = medium + small + [n for n in everyone if lengths[n] * 6 <= CAPACITY]
    for numbers in bins:
        while found := longest_that_fits(rest, room(numbers)):
            numbers += found
            rest.remove(found[0])
    fresh: list[list[int]] = []
    for n in sorted(rest, key=lambda n: (-lengths[n], rest.index(n))):
        emptiest = fresh.pop(0) if fresh and room(fresh[0]) >= lengths[n] else []
        emptiest.append(n)
        place = sum(room(other) >= room(emptiest) for other in fresh)
        fresh.insert(place, emptiest)
    return bins + fresh


def popped(bins: list[list[int]], goal: int) -> list[list[int]]:
    """Ask for more bins as NeMo-RL does: last sequences leave the bins with the most, one for each new bin."""
    found = [list(numbers) for numbers in bins]
    by_count = sorted(range(len(bins)), key=lambda place: (len(bins[place]), place), reverse=True)
    while len(found) < goal:
        source = next(place for place in by_count if len(found[place]) > 1)
        found.append([found[source].pop()])
    return found


def work(lengths: list[int], numbers: list[int]) -> float:
    return sum(49152.0 * lengths[n] + float(lengths[n]) ** 2 for n in numbers)


@given(LENGTHS | st.lists(st.integers(51, 66) | st.integers(10, 33), max_size=40))
@example([51, 17, 18, 25, 30, 33])
def test_bins_are_those_of_the_readable_references(lengths):
    falling = sorted(range(len(lengths)), key=lambda n: (lengths[n], n), reverse=True)
    shuffled = list(range(len(lengths)))
    random.Random(7).shuffle(shuffled)

    assert get_packer("concatenative", CAPACITY).pack(lengths) == next_fit(lengths)
    assert get_packer("first_fit_decreasing", CAPACITY).pack(lengths) == first_fit(lengths, falling)
    assert get_packer("first_fit_shuffle", CAPACITY, seed=7).pack(lengths) == first_fit(lengths, shuffled)
    random.seed(7)
    assert get_packer("FIRST_FIT_SHUFFLE", CAPACITY).pack(lengths) == first_fit(lengths, shuffled)
    assert get_packer("modified_first_fit_decreasing", CAPACITY).pack(lengths) == modified_first_fit(lengths)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=LENGTHS, least=st.integers(0, 12), multiple=st.integers(1, 5))
def test_every_sequence_stands_once_in_as_many_bins_as_asked_for(algorithm, lengths, least, multiple):
    packer = get_packer(
        algorithm, CAPACITY, min_bin_count=least, bin_count_multiple=multiple, seed=1, allow_empty=True
    )
    natural = get_packer(algorithm, CAPACITY, seed=1).pack(lengths)
    bins = packer.pack(lengths)

    assert sorted(n for numbers in bins for n in numbers) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in numbers) <= CAPACITY for numbers in bins)
    goal = max(len(natural), least)
    assert len(bins) == goal + -goal % multiple
    assert all(type(n) is int for numbers in bins for n in numbers)
    assert sum(not numbers for numbers in bins) == max(0, len(bins) - len(lengths))
    if len(bins) == len(natural) and algorithm is not PackingAlgorithm.BALANCED:
        assert bins == natural
    assert packer.pack(lengths) == bins


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40), st.data())
def test_no_bin_is_heavier_than_where_sequences_are_taken_off_one_by_one(lengths, data):
    natural = get_packer("first_fit_decreasing", CAPACITY).pack(lengths)
    goal = data.draw(st.integers(len(natural), len(lengths)))
    bins = get_packer("first_fit_decreasing", CAPACITY, min_bin_count=goal).pack(lengths)

    ours = max(work(lengths, numbers) for numbers in bins)
    theirs = max(work(lengths, numbers) for numbers in popped(natural, goal))
    assert ours <= theirs * (1 + 1e-12)
    even = get_packer("balanced", CAPACITY, min_bin_count=goal).pack(lengths)
    assert len(even) >= goal
    assert max(work(lengths, numbers) for numbers in even) <= sum(work(lengths, n) for n in natural)


def test_more_bins_are_more_even_than_with_sequences_taken_off_one_by_one():
    lengths = [100] * 4 + [5] * 80
    bins = get_packer("first_fit_decreasing", CAPACITY, bin_count_multiple=16).pack(lengths)
    theirs = popped(get_packer("first_fit_decreasing", CAPACITY).pack(lengths), 16)

    assert len(bins) == len(theirs) == 16
    assert sorted(len(numbers) for numbers in bins) == [1] * 4 + [5] * 8 + [10] * 4
    assert sorted(len(numbers) for numbers in theirs)[-1] == 20


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "lengths", [[50], [30] * 5, [100] * 3, [10, 50, 100, 20, 80, 30, 70, 40, 60, 90], SMALL, MEDIUM]
)
def test_ordinary_sequences_are_packed(algorithm, lengths):
    bins = get_packer(algorithm, CAPACITY).pack(np.array(lengths))

    assert sorted(n for numbers in bins for n in numbers) == list(range(len(lengths)))
    assert all(0 < sum(lengths[n] for n in numbers) <= CAPACITY for numbers in bins)
    assert len(bins) >= -(-sum(lengths) // CAPACITY)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_sequences_make_no_bins(algorithm):
    assert get_packer(algorithm, CAPACITY, bin_count_multiple=4).pack([]) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sequence_longer_than_a_bin_is_refused_by_name_or_stands_alone(algorithm):
    lengths = [50, 150, 70, 30, 101]

    with pytest.raises(
        OverlongDocumentError, match=r"sequence 1 has 150 tokens but bin_capacity is 100 \(2 of 5 sequences"
    ):
        get_packer(algorithm, CAPACITY).pack(lengths)
    alone = get_packer(algorithm, CAPACITY, overlong="alone")
    assert alone.pack(lengths)[-2:] == [[1], [4]]
    assert alone.pack([150, 101]) == [[0], [1]]
    few = get_packer(algorithm, CAPACITY, min_bin_count=4, bin_count_multiple=4, overlong="alone")
    bins = few.pack([150, 20, 20, 20, 20])
    assert len(bins) == 4
    assert [0] in bins


def test_too_few_sequences_for_the_bins_are_refused_or_leave_empty_ones():
    for settings in ({"min_bin_count": 3}, {"bin_count_multiple": 3}):
        with pytest.raises(DocumentsError, match="Cannot create 3 bins with only 2 sequences"):
            get_packer("concatenative", CAPACITY, **settings).pack([50, 50])
        bins = get_packer("concatenative", CAPACITY, **settings, allow_empty=True).pack([50, 50])
        assert bins == [[0], [1], []]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_bin_count": -1}, "min_bin_count must be a whole number from 0"),
        ({"bin_count_multiple": 0}, "bin_count_multiple must be a whole number from 1"),
        ({"bin_count_multiple": -5}, "bin_count_multiple must be a whole number from 1"),
        ({"bin_capacity": 0}, "bin_capacity must be a whole number from 1"),
        ({"overlong": "drop"}, "overlong must be error or alone; got 'drop'"),
        (
            {"algorithm": "fastest"},
            "'fastest' is no packing algorithm; available: CONCATENATIVE, FIRST_FIT_DECR",
        ),
        ({"algorithm": object()}, "is no packing algorithm"),
        ({"work": (0, -1)}, "work must be two numbers of at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        get_packer(**({"algorithm": "concatenative", "bin_capacity": CAPACITY} | settings))


def test_sequences_without_tokens_are_refused():
    with pytest.raises(
        LengthsError, match=r"must be positive, but sequence 1 has no tokens \(1 of 3 have none"
    ):
        get_packer("first_fit_decreasing", CAPACITY).pack([5, 0, 3])
    with pytest.raises(LengthsError, match="length -2 of document 0 is negative"):
        get_packer("first_fit_decreasing", CAPACITY).pack([-2])


def test_a_packer_is_found_by_nemo_rl_s_own_enumeration_and_has_its_settings():
    theirs = enum.Enum("PackingAlgorithm", {"FIRST_FIT_SHUFFLE": "first_fit_shuffle"})
    packer = get_packer(theirs.FIRST_FIT_SHUFFLE, CAPACITY, min_bin_count=3, bin_count_multiple=2)

    assert isinstance(packer, FirstFitShufflePacker)
    assert isinstance(packer, SequencePacker)
    assert (packer.min_bin_count, packer.bin_count_multiple, packer.metrics) == (3, 2, None)
    assert packer.get_aggregated_metrics() == {}


def test_the_most_sequences_of_a_bin_are_kept():
    packer = ConcatenativePacker(CAPACITY)
    packer.max_sequences_per_bin = 2

    assert packer.pack([10] * 5) == next_fit([10] * 5, most=2) == [[0, 1], [2, 3], [4]]


def test_metrics_have_nemo_rl_s_names_and_values():
    lengths, bins = [60, 40, 50, 10], [[0, 1], [2], [3]]
    full = [1.0, 0.5, 0.1]

    stats = ConcatenativePacker(CAPACITY).compute_metrics(lengths, bins)

    assert stats == {
        "num_sequences": 4,
        "num_bins": 3,
        "total_sequence_length": 160,
        "total_bin_capacity": 300,
        "total_waste": 140,
        "average_utilization": pytest.approx(160 / 300),
        "waste_ratio": pytest.approx(140 / 300),
        "bin_balance": pytest.approx(1 - statistics.stdev(full) / (160 / 300)),
        "theoretical_min_bins": 2,
        "bin_efficiency": pytest.approx(2 / 3),
    }
    assert set(PackingMetrics().calculate_stats_only([], [], CAPACITY).values()) == {0}


def test_metrics_of_several_packings_add_up(capsys):
    packer = get_packer("concatenative", CAPACITY, collect_metrics=True)
    packer.pack([60, 40, 50, 10])
    packer.pack([100])

    assert packer.get_aggregated_metrics() == {
        "total_sequences": 5,
        "total_bins": 3,
        "average_utilization": pytest.approx(260 / 300),
        "min_utilization": pytest.approx(0.8),
        "max_utilization": 1.0,
        "average_waste_ratio": pytest.approx(40 / 300),
        "min_waste_ratio": 0.0,
        "max_waste_ratio": pytest.approx(0.2),
        "average_bin_count": 1.5,
        "bin_efficiency": 1.0,
    }
    packer.print_metrics()
    assert "total_sequences: 5" in capsys.readouterr().out
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}
    packer.print_metrics()
    ConcatenativePacker(CAPACITY).print_metrics()
    assert capsys.readouterr().out.splitlines() == [
        "Nothing has been packed yet.",
        "No metrics are collected; pass collect_metrics=True.",
    ]
    metrics = PackingMetrics()
    metrics.update([1], [[0]], CAPACITY, packing_time=2.0)
    assert metrics.get_aggregated_stats()["average_packing_time"] == 2.0
