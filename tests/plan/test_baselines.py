"""Baselines: documents dealt, grouped, ordered and shared as their methods say, and none is lost."""

import itertools
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import plan_groups as reference_groups
from tests.support.rarely import examples

from varlen.plan import kernels_groups
from varlen.plan.baselines.dynamic_cp import by_need, by_speed, divisions, dynamic_cp_candidates, seated
from varlen.plan.baselines.packed import (
    ORDERS,
    balanced_candidates,
    by_differencing,
    capacities,
    equal_counts,
    micro_batch_counts,
    ordered,
    packed,
    packed_candidates,
    packs_of,
)
from varlen.plan.search import Candidate
from varlen.step_plan import Mesh


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Mesh]:
    """Lengths, some of them 0, seconds of each document if 1, 2, 4… ranks share it, and a mesh."""
    dp, pp = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    lengths = np.array(draw(st.lists(st.integers(0, 5000), max_size=40)), np.int32)
    own = lengths + 0.001 * lengths.astype(np.float64) ** 2
    work = np.stack([own / 2**level * (1 + 0.1 * level) for level in range(dp.bit_length())], axis=1)
    sharding = draw(st.sampled_from(["optimizer", "parameters"]))
    return lengths, work, Mesh(dp=dp, pp=pp, sharding=sharding)  # type: ignore[arg-type]


def check(candidate: Candidate, lengths: np.ndarray, mesh: Mesh, *, is_even: bool = False) -> None:
    """Each document stands whole in one MicroPack of each of its ranks, and ranks agree about what they share."""
    packs = candidate.forward
    assert candidate.backward is packs
    assert packs.rank_offsets.size == mesh.dp + 1
    assert packs.rank_offsets[-1] == packs.num_micropacks
    assert packs.slice_offsets[-1] == packs.document_ids.size
    assert not packs.starts.any()
    assert packs.stops.tolist() == lengths[packs.document_ids].tolist()

    held = np.flatnonzero(lengths)
    expected = {
        (int(document), int(candidate.first_ranks[document]) + turn)
        for document in held
        for turn in range(candidate.num_ranks[document])
    }
    found = list(zip(packs.document_ids.tolist(), packs.ranks[packs.micropack_of_slice].tolist()))
    assert sorted(found) == sorted(expected)
    assert (candidate.first_ranks[lengths == 0] == -1).all()
    for document in held:
        first, width = int(candidate.first_ranks[document]), int(candidate.num_ranks[document])
        assert width & (width - 1) == 0
        assert first % width == 0
        assert first + width <= mesh.dp

    counts = packs.counts
    if is_even or mesh.sharding == "parameters":
        assert counts.max() == counts.min()
    else:
        assert np.diff(packs.slice_offsets).min(initial=1) > 0
    _check_turns(candidate)


def _check_turns(candidate: Candidate) -> None:
    """What ranks share has one number on all of them: each then runs it at the same turn of a 1F1B schedule."""
    packs = candidate.forward
    turn = np.arange(packs.num_micropacks) - packs.rank_offsets[packs.ranks]
    turn_of_slice = turn[packs.micropack_of_slice]
    for document in np.flatnonzero(candidate.num_ranks > 1):
        assert np.unique(turn_of_slice[packs.document_ids == document]).size == 1
    for micropack in range(packs.num_micropacks):
        ids = packs.document_ids[packs.slice_offsets[micropack] : packs.slice_offsets[micropack + 1]]
        assert np.unique(candidate.num_ranks[ids]).size <= 1
        assert np.unique(candidate.first_ranks[ids]).size <= 1


Step = tuple[np.ndarray, np.ndarray, Mesh]


@examples(6)
@given(steps(), st.integers(500, 20_000))
def test_shared_documents_stand_on_each_of_their_ranks_in_one_order(step, capacity):
    lengths, work, mesh = step

    labels = []
    for candidate in chain.from_iterable(dynamic_cp_candidates(lengths, work, mesh, capacities(capacity))):
        check(candidate, lengths, mesh, is_even=True)
        labels.append(candidate.label)

    assert len(labels) == len(set(labels))


def test_a_long_document_is_shared_by_as_few_ranks_as_hold_it():
    lengths = np.array([8000, 3000, 900, 0], np.int32)
    work = np.repeat(lengths.astype(np.float64)[:, None], 4, axis=1) / 2.0 ** np.arange(4)

    group_of, levels, batches = by_need(lengths, work, 8, 1000, 1)

    assert levels[group_of[:3]].tolist()[0] == 3  # 8 ranks hold 8,000 tokens at 1,000 each
    assert levels[group_of[1]] >= 2
    assert group_of[3] == -1
    assert batches[group_of[0]] == 0
    assert batches[group_of[1]] == batches[group_of[2]] == 1


def test_micro_batches_by_need_are_filled_to_their_share_of_the_work():
    lengths = np.random.default_rng(1).integers(50, 1000, 800).astype(np.int32)
    work = np.repeat(lengths.astype(np.float64)[:, None], 4, axis=1) / 2.0 ** np.arange(4)

    group_of, levels, batches = by_need(lengths, work, 8, 100_000, 4)

    of_batch = np.bincount(
        batches[group_of], work[np.arange(800), levels[group_of]] * 2.0 ** levels[group_of]
    )
    assert len(of_batch) == 4
    assert of_batch.max() < 1.07 * of_batch.mean()


def test_ranks_that_are_left_over_share_the_slowest():
    lengths = np.array([1000, 100], np.int32)
    work = np.repeat(lengths.astype(np.float64)[:, None], 3, axis=1) / 2.0 ** np.arange(3)

    group_of, levels, _ = by_need(lengths, work, 4, 4000, 1)

    assert levels[group_of].tolist() == [1, 1]


def test_a_micro_batch_is_about_as_fast_as_all_ranks_together():
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(7, 1.5, 400), 100_000).astype(np.int32) + 1
    own = 1e-6 * lengths + 1e-10 * lengths.astype(np.float64) ** 2
    work = np.stack([own / 2**level for level in range(5)], axis=1)
    batch_of = np.zeros(lengths.size, np.int32)

    group_of, levels, _ = by_speed(lengths, work, 16, 400_000, batch_of)

    loads = np.bincount(group_of, weights=work[np.arange(400), levels[group_of]])
    assert (2**levels).sum() <= 16
    assert levels.max() >= 1
    assert own.sum() / 16 <= loads.max() < 1.15 * own.sum() / 16


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50), st.integers(1, 10))
def test_divisions_hold_every_document_once_and_leave_no_micro_batch_empty(lengths, count):
    values = np.array(lengths, np.int32)
    count = min(count, np.count_nonzero(values))
    if not count:
        return
    for name, batch_of in divisions(values, values.astype(np.float64) ** 2, count):
        assert (batch_of >= 0).tolist() == (values > 0).tolist(), name
        assert np.unique(batch_of[batch_of >= 0]).tolist() == list(range(batch_of.max() + 1))
        assert batch_of.max() < count
        if name.startswith("sorted"):
            shortest = [values[batch_of == batch].min() for batch in range(batch_of.max() + 1)]
            longest = [values[batch_of == batch].max() for batch in range(batch_of.max() + 1)]
            assert all(low >= high for low, high in zip(shortest, longest[1:]))
    assert batch_of.max() == count - 1


def test_groups_are_seated_on_the_ranks_with_the_least_work_so_far():
    loads = np.array([5.0, 1.0, 3.0, 2.0])
    levels = np.array([1, 0, 0, 1], np.int32)
    batches = np.array([0, 0, 0, 1], np.int32)

    assert seated(loads, levels, batches, 4).tolist() == [0, 3, 2, 2]


@given(st.integers(1, 12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_group_is_seated_as_the_oracle_says(dp, num_batches, random):
    groups = []
    for batch in range(num_batches):
        left = dp
        while left and random.random() < 0.8:
            level = random.randrange(left.bit_length())
            groups.append((batch, level, float(random.randrange(5))))
            left -= 2**level
    batches, levels, loads = (np.array([group[column] for group in groups]) for column in range(3))
    batches, levels = batches.astype(np.int32), levels.astype(np.int32)
    turns = np.lexsort((-loads, -levels, batches)).astype(np.int32)
    expected = np.zeros(len(groups), np.int32)

    reference_groups.seat(turns, loads, levels, batches, dp, expected)

    assert seated(loads, levels, batches, dp).tolist() == expected.tolist()


def test_what_a_rank_cannot_hold_is_never_left_to_fewer_ranks():
    lengths = np.full(3, 3000, np.int32)  # four ranks each: two side by side on eight, and one alone
    work = np.repeat(lengths.astype(np.float64)[:, None], 4, axis=1) / 2.0 ** np.arange(4)

    group_of, _, batches = by_need(lengths, work, 8, 1000, 1)

    assert sorted(batches[group_of].tolist()) == [0, 0, 1]


@st.composite
def documents(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Lengths, whole seconds or tenths if 2^level ranks share them, ranks and a limit of tokens."""
    dp = draw(st.integers(1, 9))
    lengths = np.array(draw(st.lists(st.integers(1, 100), min_size=1, max_size=30)), np.int32)
    levels = draw(st.integers(1, dp.bit_length()))
    numbers = st.lists(st.integers(1, 60), min_size=levels, max_size=levels)
    work = draw(st.lists(numbers, min_size=lengths.size, max_size=lengths.size))
    if draw(st.booleans()):
        work = [sorted(row, reverse=True) for row in work]
    scale = draw(st.sampled_from([1.0, 0.1]))
    return lengths, np.array(work, np.float64) * scale, dp, draw(st.integers(1, 200))


@given(documents(), st.integers(1, 12))
def test_filling_by_workload_equals_its_reference(drawn, num_packs):
    lengths, work, _, limit = drawn
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    compiled, readable = (np.full(lengths.size, -1, np.int32) for _ in range(2))

    kernels_groups.least_work(order, lengths, work[:, 0].copy(), num_packs, limit, compiled)
    reference_groups.least_work(order, lengths, work[:, 0].copy(), num_packs, limit, readable)

    assert compiled.tolist() == readable.tolist()
    assert compiled.min() >= 0


@given(documents())
def test_sharing_equals_its_reference(drawn):
    lengths, work, dp, limit = drawn
    order = np.argsort(-work[:, 0], kind="stable").astype(np.int32)
    found = []
    for room in (kernels_groups, reference_groups):
        group_of, levels = np.full(lengths.size, -1, np.int32), np.zeros(dp, np.int32)
        count = room.share(order, lengths, work, dp, limit, group_of, levels)
        found.append((count, group_of.tolist(), levels[:count].tolist()))  # what follows is of earlier trials

    assert found[0] == found[1]
    assert (2 ** levels[:count]).sum() <= dp


def test_sharing_adds_up_as_its_reference_does():
    """Beside one long document it gains nothing to share the others, unless sums are rounded otherwise."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        count, dp = int(rng.integers(8, 40)), int(rng.integers(2, 9))
        work = np.repeat(rng.integers(1, 60, (count, 1)) * 0.1, dp.bit_length(), axis=1)
        work[0] = work.sum(axis=0)
        lengths, order = rng.integers(1, 100, count).astype(np.int32), np.arange(count, dtype=np.int32)
        found = []
        for room in (kernels_groups, reference_groups):
            group_of, levels = np.full(count, -1, np.int32), np.zeros(dp, np.int32)
            room.share(order, lengths, work, dp, 4000, group_of, levels)
            found.append((group_of.tolist(), levels.tolist()))

        assert found[0] == found[1]


@given(documents(), st.integers(1, 200))
def test_filling_by_need_equals_its_reference(drawn, target):
    lengths, work, dp, limit = drawn
    least = (lengths % work.shape[1]).astype(np.int32)
    order = np.lexsort((-work[np.arange(lengths.size), least], -least)).astype(np.int32)
    found = []
    for room in (kernels_groups, reference_groups):
        batch_of, group_of = (np.full(lengths.size, -1, np.int32) for _ in range(2))
        levels, offsets = np.zeros(lengths.size + dp, np.int32), np.zeros(lengths.size + 1, np.int32)
        count = room.fill(
            order, least, lengths, work, dp, limit, float(target), batch_of, group_of, levels, offsets
        )
        found.append((count, batch_of.tolist(), group_of.tolist(), levels.tolist(), offsets.tolist()))

    assert found[0] == found[1]
    for batch in range(count):
        groups = slice(offsets[batch], offsets[batch + 1])
        assert (2 ** levels[groups]).sum() <= dp
        assert set(group_of[batch_of == batch].tolist()) == set(range(offsets[batch], offsets[batch + 1]))


def slowest_possible(work: np.ndarray, dp: int) -> float:
    """The slowest group of the fastest way there is to share a micro-batch, each looked at."""
    best = np.inf
    widths = [sizes for count in range(1, dp + 1) for sizes in _sizes(dp, count, work.shape[1])]
    for sizes in widths:
        for groups in itertools.product(range(len(sizes)), repeat=len(work)):
            loads = [0.0] * len(sizes)
            for row, group in zip(work, groups):
                loads[group] += row[sizes[group]]
            best = min(best, max(loads))
    return best


def _sizes(dp: int, count: int, num_levels: int) -> list[tuple[int, ...]]:
    """The levels of `count` groups that `dp` ranks have room for, each set of levels once."""
    every = itertools.combinations_with_replacement(range(num_levels), count)
    return [levels for levels in every if sum(2**level for level in levels) <= dp]


def test_sharing_is_within_a_tenth_of_the_best_there_is_on_average():
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(60):
        lengths = np.minimum(random.lognormal(2, 1.2, 5).astype(np.int32) + 1, 200)
        own = lengths + 0.05 * lengths.astype(np.float64) ** 2
        work = np.stack([own / 2**level * (1 + 0.05 * level) for level in range(3)], axis=1)
        order = np.argsort(-work[:, 0], kind="stable").astype(np.int32)
        group_of, levels = np.full(5, -1, np.int32), np.zeros(4, np.int32)
        kernels_groups.share(order, lengths, work, 4, 1000, group_of, levels)
        loads = np.bincount(group_of, weights=work[np.arange(5), levels[group_of]])
        ratios.append(loads.max() / slowest_possible(work, 4))

    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) < 1.10, np.mean(ratios)
    assert max(ratios) < 1.5, max(ratios)


def test_a_document_over_every_limit_is_shared_all_the_same():
    group_of, levels = np.full(1, -1, np.int32), np.zeros(4, np.int32)
    work = np.array([[8.0, 4.0, 2.0]])

    count = kernels_groups.share(
        np.zeros(1, np.int32), np.array([1000], np.int32), work, 4, 10, group_of, levels
    )

    assert (count, levels[0]) == (1, 2)


PACKS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=40)


@given(PACKS, st.sampled_from(ORDERS))
def test_every_pack_stands_once_within_its_group(packs, order):
    work = np.array([pack[0] for pack in packs], np.float64)
    group_of = np.array([pack[1] for pack in packs], np.int32)

    found = ordered(work, group_of, order)

    assert sorted(found.tolist()) == list(range(len(packs)))
    assert group_of[found].tolist() == sorted(group_of.tolist())


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("given", [4, 1, 5, 2, 3]),
        ("long_first", [5, 4, 3, 2, 1]),
        ("long_last", [1, 2, 3, 4, 5]),
        ("long_middle", [1, 3, 5, 4, 2]),
        ("long_ends", [5, 3, 1, 2, 4]),
    ],
)
def test_heavy_packs_stand_where_the_order_says(order, expected):
    work = np.array([4.0, 1, 5, 2, 3, 9, 8])
    group_of = np.array([0, 0, 0, 0, 0, 1, 1], np.int32)

    found = work[ordered(work, group_of, order)]

    assert found[:5].tolist() == expected
    assert sorted(found[5:].tolist()) == [8, 9]


def test_random_is_the_same_every_time_and_no_other_order():
    work, group_of = np.arange(50.0), np.zeros(50, np.int32)

    found = ordered(work, group_of, "random")

    assert found.tolist() == ordered(work, group_of, "random").tolist()
    assert found.tolist() not in [ordered(work, group_of, order).tolist() for order in ORDERS[:-1]]


@given(steps(), st.integers(500, 6000))
def test_packs_as_users_run_them_hold_every_document(step, capacity):
    lengths, _, mesh = step

    check(packed(lengths, mesh, capacity), lengths, mesh)


def test_packs_are_dealt_in_turn():
    candidate = packed(np.array([8, 8, 8, 5, 3], np.int32), Mesh(dp=3), 8)

    assert candidate.forward.counts.tolist() == [2, 1, 1]
    assert candidate.first_ranks.tolist() == [0, 1, 2, 0, 0]
    assert candidate.label == "capacity 8, round robin"


def test_where_parameters_are_sharded_empty_micropacks_even_the_counts_out():
    candidate = packed(np.array([8, 8, 8, 5, 3], np.int32), Mesh(dp=3, sharding="parameters"), 8)

    assert candidate.forward.counts.tolist() == [2, 2, 2]
    assert np.diff(candidate.forward.slice_offsets).tolist() == [1, 2, 1, 0, 1, 0]


@settings(max_examples=30)
@given(steps(), st.integers(500, 20_000))
def test_tuned_packs_hold_every_document(step, capacity):
    lengths, work, mesh = step

    for candidate in chain.from_iterable(packed_candidates(lengths, work[:, 0], mesh, capacities(capacity))):
        check(candidate, lengths, mesh)


@settings(max_examples=20)
@given(steps())
def test_balanced_micro_batches_hold_every_document(step):
    lengths, work, mesh = step

    for candidate in chain.from_iterable(balanced_candidates(lengths, work[:, 0], mesh)):
        check(candidate, lengths, mesh)
        assert candidate.forward.counts.max() <= max(lengths.size, 1)


def test_what_is_longer_than_a_smaller_capacity_is_a_pack_of_its_own():
    pack_of, num_packs = packs_of(np.array([9, 2, 20, 0, 6], np.int32), 8)

    assert pack_of.tolist() == [1, 0, 2, -1, 0]
    assert num_packs == 3


def test_capacities_are_halved_down_to_what_kernels_need():
    assert capacities(65_536) == [65_536, 32_768, 16_384, 8_192, 4_096, 2_048]
    assert capacities(3_000) == [3_000, 1_500]
    assert capacities(100) == [100]


@given(st.lists(st.integers(1, 100), min_size=9, max_size=60), st.integers(2, 8))
def test_equal_numbers_of_packs_are_nearly_equal(work, dp):
    ranks = equal_counts(np.array(work, np.float64), dp)

    counts = np.bincount(ranks, minlength=dp)
    assert counts.max() == -(-len(work) // dp)


def test_tuning_finds_even_ranks_and_short_packs_where_packs_are_uneven():
    lengths = np.array([4096, 4096, *[64] * 128], np.int32)
    work = lengths.astype(np.float64) ** 2
    mesh = Mesh(dp=2)

    labels = [
        candidate.label
        for candidate in chain.from_iterable(packed_candidates(lengths, work, mesh, capacities(8192)))
    ]
    heaviest = [
        np.bincount(candidate.first_ranks, weights=work).max()
        for candidate in chain.from_iterable(packed_candidates(lengths, work, mesh, capacities(8192)))
    ]

    assert heaviest[0] > 1.9 * min(heaviest)
    assert "capacity 1,024, even work in equal numbers, long first" in labels
    assert len(labels) == len(set(labels))


def test_counts_of_micro_batches_follow_stages_and_tokens():
    mesh = Mesh(dp=2, pp=4)

    tokens = np.full(1000, 1000, np.int32)
    assert micro_batch_counts(tokens, mesh) == (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 488)
    assert micro_batch_counts(np.full(10, 2000, np.int32), mesh) == (4, 6, 8, 9)
    assert micro_batch_counts(np.full(3, 100, np.int32), mesh) == (1,)
    assert micro_batch_counts(np.full(3, 10**6, np.int32), mesh) == (3,)


def test_differencing_leaves_no_rank_more_than_the_longest_document():
    work = np.array([10.0, 1, 1, 1, 1, 1, 1, 1, 1, 0])

    pack_of, ranks = by_differencing(work, 4, 2)

    held = pack_of >= 0
    assert held.tolist() == [True] * 9 + [False]
    assert np.bincount(ranks[pack_of[held]], weights=work[held]).tolist() in ([10, 8], [8, 10])
    assert sorted(np.bincount(ranks).tolist()) == [1, 4]


@given(steps())
def test_filling_by_workload_keeps_within_twice_the_even_share_of_tokens(step):
    lengths, work, mesh = step
    lengths = lengths[lengths > 0]
    if not lengths.size:
        return
    longest, share = int(lengths.max()), lengths.sum() / (4 * mesh.dp)
    work = lengths.astype(np.float64) ** 2
    for candidate in chain.from_iterable(
        balanced_candidates(lengths, work, mesh, counts=(4,), orders=("given",))
    ):
        if candidate.label.startswith("WLB"):
            tokens = np.bincount(candidate.forward.micropack_of_slice, weights=candidate.forward.stops)
            assert tokens.max() <= max(2 * share, longest)


def test_short_documents_spill_over_from_a_micro_batch_that_is_full_of_tokens():
    lengths = np.array([1000] * 3 + [10] * 1000, np.int32)
    work = lengths.astype(np.float64) ** 2  # all the short ones together are a tenth of a long one

    candidate = next(
        chain.from_iterable(balanced_candidates(lengths, work, Mesh(), counts=(4,), orders=("given",)))
    )

    tokens = np.bincount(candidate.forward.micropack_of_slice, weights=candidate.forward.stops)
    assert candidate.label.startswith("WLB")
    assert 2 * 13_000 / 4 - 10 < tokens.max() <= 2 * 13_000 / 4


def test_capacities_that_share_too_much_work_are_left_out():
    lengths, mesh = np.full(16, 4096, np.int32), Mesh(dp=4, pp=1)
    work = np.stack(
        [lengths * 1.0, lengths * 0.7, lengths * 0.5], axis=1
    )  # sharing costs 40 % and 100 % more

    def labels(most_s: float) -> set[int]:
        found = dynamic_cp_candidates(
            lengths, work, mesh, [4096, 2048, 1024], counts=(2,), ways=("Megatron",), most_s=most_s
        )
        labels = [candidate.label for candidate in chain.from_iterable(found)]
        return {int(label.split(" of ")[1].split()[0].replace(",", "")) for label in labels}

    even_s = float(work[:, 0].sum()) / mesh.dp
    assert labels(np.inf) == {4096, 2048, 1024}
    assert labels(1.5 * even_s) == {4096, 2048}
    assert labels(1.1 * even_s) == {4096}
