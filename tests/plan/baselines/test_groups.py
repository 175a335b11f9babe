"""Micro-batches are filled as said: kernels equal their references, and groups are nearly as fast as can be."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import plan_groups as reference_groups

from varlen.plan import kernels_groups


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
def test_filling_by_workload_equals_its_reference(
    drawn: tuple[np.ndarray, np.ndarray, int, int], num_packs: int
) -> None:
    lengths, work, _, limit = drawn
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    compiled, readable = (np.full(lengths.size, -1, np.int32) for _ in range(2))

    kernels_groups.least_work(order, lengths, work[:, 0].copy(), num_packs, limit, compiled)
    reference_groups.least_work(order, lengths, work[:, 0].copy(), num_packs, limit, readable)

    assert compiled.tolist() == readable.tolist()
    assert compiled.min() >= 0


@given(documents())
def test_sharing_equals_its_reference(drawn: tuple[np.ndarray, np.ndarray, int, int]) -> None:
    lengths, work, dp, limit = drawn
    order = np.argsort(-work[:, 0], kind="stable").astype(np.int32)
    found = []
    for room in (kernels_groups, reference_groups):
        group_of, levels = np.full(lengths.size, -1, np.int32), np.zeros(dp, np.int32)
        count = room.share(order, lengths, work, dp, limit, group_of, levels)
        found.append((count, group_of.tolist(), levels[:count].tolist()))  # what follows is of earlier trials

    assert found[0] == found[1]
    assert (2 ** levels[:count]).sum() <= dp


def test_sharing_adds_up_as_its_reference_does() -> None:
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
def test_filling_by_need_equals_its_reference(
    drawn: tuple[np.ndarray, np.ndarray, int, int], target: int
) -> None:
    lengths, work, dp, limit = drawn
    least = (lengths % work.shape[1]).astype(np.int32)
    order = np.lexsort((-work[:, 0], -least)).astype(np.int32)
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


def test_sharing_is_within_a_tenth_of_the_best_there_is_on_average() -> None:
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


def test_a_document_over_every_limit_is_shared_all_the_same() -> None:
    group_of, levels = np.full(1, -1, np.int32), np.zeros(4, np.int32)
    work = np.array([[8.0, 4.0, 2.0]])

    count = kernels_groups.share(
        np.zeros(1, np.int32), np.array([1000], np.int32), work, 4, 10, group_of, levels
    )

    assert (count, levels[0]) == (1, 2)
